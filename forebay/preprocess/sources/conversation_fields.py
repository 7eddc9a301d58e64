"""Which fields a conversation may have: those that are taken, those that would change its meaning, and all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forebay.preprocess.sources.json_object import JsonError

TOOLS, REASONING, VIDEO, AUDIO = "has_tools", "has_reasoning", "has_video", "has_audio"
BOXES, PREFERENCES, PIXEL_LIMITS = "has_boxes", "preference_data", "image_pixel_limits"

_WHAT = {
    TOOLS: "tools and their calls",
    REASONING: "reasoning apart from the answer",
    VIDEO: "videos",
    AUDIO: "audio in a conversation over images",
    BOXES: "boxes of objects",
    PREFERENCES: "answers to prefer or to reject",
    PIXEL_LIMITS: "a size of one image, other than that of the processor",
}

IDS = frozenset({"sample_id", "id"})
_COMMON = IDS | {"system", "images", "image"}
WITH_MESSAGES = _COMMON | {"messages", "conversations"}
WITH_QUESTION = _COMMON | {"question", "answer"}
MESSAGE = frozenset({"role", "from", "content", "value", "loss", "weight"})
TEXT_PART = frozenset({"type", "text"})
IMAGE_PART = frozenset({"type", "image"})

REFUSED_OF_ROW: Mapping[str, str] = {
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), TOOLS),
    "reasoning_content": REASONING,
    **dict.fromkeys(("videos", "video"), VIDEO),
    **dict.fromkeys(("audios", "audio"), AUDIO),
    "objects": BOXES,
    **dict.fromkeys(("rejected_response", "rejected", "chosen", "rejected_messages", "rejected_images"), PREFERENCES),
}
REFUSED_OF_MESSAGE: Mapping[str, str] = {
    **REFUSED_OF_ROW,
    "tool_call_id": TOOLS,
}
REFUSED_OF_PART: Mapping[str, str] = {
    **REFUSED_OF_ROW,
    **dict.fromkeys(("max_pixels", "min_pixels", "resized_height", "resized_width"), PIXEL_LIMITS),
}
REFUSED_ROLES: Mapping[str, str] = dict.fromkeys(
    ("tool", "function", "tool_call", "tool_response", "function_call", "observation"), TOOLS
)
_REFUSED_TAGS = {"video": VIDEO, "audio": AUDIO, "bbox": BOXES, "ref-object": BOXES}
_TAG = re.compile(rf"<({'|'.join(_REFUSED_TAGS)})>")


def unknown_fields(
    fields: Mapping[str, Any], taken: frozenset[str], refused: Mapping[str, str], *, where: str = ""
) -> list[str]:
    """Returns the names of the fields that have a value and are not taken.

    taken: what is. refused: reasons by field. where: in front of a field's name in a message. Raises JsonError with the
    reason of the first refused field that is given; one that is null or holds nothing is not.
    """
    if fields.keys() <= taken:
        return []
    unknown = fields.keys() - taken
    for name in sorted(unknown & refused.keys()):
        if is_given(fields[name]):
            raise refusal(refused[name], f"{where}field {name} is given")
    return [name for name in unknown if name not in refused and fields[name] is not None]


def refuse_tags(text: str, *, where: str) -> None:
    """Raises JsonError where a string of a message has a tag that stands for what is no image."""
    found = _TAG.search(text)
    if found:
        error = refusal(_REFUSED_TAGS[found[1]], f"{where} has the tag {found[0]}")
        raise JsonError(f"{error}; words that only look like it go into a part of type text", reason=error.reason)


def refusal(reason: str, found: str) -> JsonError:
    """Returns the error for a part of a conversation that cannot be stored. found: where it stands, with its field."""
    return JsonError(f"{found}, and {_WHAT[reason]} cannot be stored; remove the row or the field", reason=reason)


def is_given(value: Any) -> bool:
    """Says whether a field holds anything: arrow writes the fields of other rows as null, and lists of nothing."""
    if isinstance(value, list):
        return any(map(is_given, value))
    if isinstance(value, dict):
        return any(map(is_given, value.values()))
    return value is not None and value != ""
