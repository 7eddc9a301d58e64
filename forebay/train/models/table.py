"""The families of models that the reference loop trains: a line here and a file make a family."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from forebay.errors import ConfigError

TextEncoder = Literal["zeros", "silence"]
"""What the decoder of an encoder-decoder attends to beside text alone, as `train.text_encoder` names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a model's config.json says about the batches that the model takes."""

    folder: Path
    model_type: str
    model_class: str
    """Name of the model's class in transformers."""
    constants: Mapping[str, Any]
    """What the constants of a cache have to be, `features` and `prompt` among them; a cache may lack some."""
    vocab_size: int
    labels_are_shifted: bool
    """True: `labels[:, t]` is the target of position t (Whisper). False: of position t - 1 (causal models)."""
    ids_field: str = "input_ids"
    """Batch field of the token ids that the model reads."""
    value_fields: tuple[str, ...] = ()
    """Batch fields that the model needs beside token ids and labels."""
    takes_packs: bool = False
    """True: the model is trained on packs of images and text."""
    text_prompt: str | None = None
    """Prompt of the batches without `value_fields` that the model is trained on, too; None where it takes none."""
    prepare_text_alone: Callable[[Any, TextEncoder], None] | None = None
    """Makes a loaded model take such batches as `train.text_encoder` says; None where the model takes them as it is."""
    max_label_tokens: int | None = None
    """Positions of the decoder; None where the model sets no such limit."""
    max_positions: int | None = None
    """Tokens that a prompt and what is written behind it have together at most; None where the model says nothing."""


class Family(Protocol):
    """What the module of a family has."""

    def facts(self, folder: Path, config: Any) -> ModelFacts:
        """Returns the facts of the model in `folder`. config: what transformers read of its config.json."""
        ...


FAMILIES = {
    "qwen3_asr": "forebay.train.models.qwen3_asr",
    "qwen3_vl": "forebay.train.models.qwen3_vl",
    "whisper": "forebay.train.models.whisper",
}
"""The module of each `model_type`; `Family` says what the module has."""


def family_of(model_type: object, *, path: Path) -> Family:
    """Returns the family of a model type; ConfigError, with all families and the nearest, where the table has none.

    path: the config.json that names the model type.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        family: Family = importlib.import_module(FAMILIES[model_type])
        return family
    near = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    raise ConfigError(
        f"train.model: {path} has model_type {model_type!r}, wanted one of {', '.join(FAMILIES)}"
        + (f"; the nearest is {near[0]!r}" if near else ""),
        code="FB108",
    )
