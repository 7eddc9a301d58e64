"""Constants of made-up sources, written without their groups."""

from __future__ import annotations

from typing import Any

from forebay.store.layout import Constants

_OF_TEXT = {
    *("prompt", "vocab_size", "pad_token_id", "eos_token_id", "end_token", "audio_token_id", "image_token_id"),
    *("text_form", "classes", "num_classes", "image_outputs"),
}


def flat(**values: Any) -> Constants:
    """Returns the constants of a source with items of one group, that of its `features`, or with texts alone."""
    features = values.get("features", "none")
    group = "text" if features == "none" else "image" if features in ("patches", "images") else "audio"
    text = {name: value for name, value in values.items() if name in _OF_TEXT}
    rest = {name: value for name, value in values.items() if name not in _OF_TEXT}
    return Constants({group: rest, "text": {**text, **(rest if group == "text" else {})}})
