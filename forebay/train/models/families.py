"""The families of models that the reference loop trains: a line here and a file make a family."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

TextEncoder = Literal["zeros", "silence"]
"""What the decoder of an encoder-decoder attends to beside text alone, as `train.text_encoder` names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss:
    """The unit that a model's own loss is a mean of, so that the losses of micro-batches and ranks can be weighed.

    per: `next_token`, targets of causal models; `token`, labels as they stand; or `sample`.
    """

    per: Literal["next_token", "token", "sample"]
    is_sum: bool = False
    """Whether the model gives the sum over samples (`ctc_loss_reduction = "sum"`)."""
    is_asked: bool = False
    """Whether the model gives a loss only for `return_loss=True` (CLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The facts in a model's config.json about the batches that the model takes."""

    folder: Path
    model_type: str
    model_class: str
    """Name of the model's class in transformers."""
    constants: Mapping[str, Any]
    """What the constants of a cache have to be, `features` and `prompt` among them; a cache may lack some."""
    vocab_size: int | None
    """Ids of tokens that the model knows; None where it reads and writes none."""
    labels_are_shifted: bool
    """True: `labels[:, t]` is the target of position t (Whisper). False: of position t - 1 (causal models)."""
    own_loss: OwnLoss | None = None
    """Of a model that computes its loss itself: every model of no family. None: cross entropy of `logits`."""
    num_labels: int | None = None
    """Classes of a model of classes; None for other models."""
    class_names: tuple[str, ...] | None = None
    """Their names in the order of their numbers."""
    blank_id: int | None = None
    """Of a model with CTC: the id that no label has."""
    generates: bool = False
    """Of a model of no family: whether its own `generate` writes down what a clip says."""
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
    why: str = ""
    """Why a model of no family is of this class."""

    @property
    def who(self) -> str:
        """The class and the folder, for messages."""
        return f"{self.model_class} in {self.folder}"

    @property
    def writes(self) -> bool:
        """Whether evaluations can have texts of the model: of the families, by CTC, and of speech seq2seq models."""
        return self.own_loss is None or self.blank_id is not None or self.generates


class Family(Protocol):
    """The contents of a family's module."""

    def facts(self, folder: Path, config: Any) -> ModelFacts:
        """Returns the facts of the model in `folder`. config: what transformers read of its config.json."""


FAMILIES = {
    "qwen2_5_vl": "forebay.train.models.qwen",
    "qwen2_vl": "forebay.train.models.qwen",
    "qwen3_asr": "forebay.train.models.qwen",
    "qwen3_vl": "forebay.train.models.qwen",
    "whisper": "forebay.train.models.whisper",
}
"""The module of each `model_type`; `Family` says what the module has."""


def family_of(model_type: str) -> Family | None:
    """Returns the family of a model type; None where the table has none."""
    if model_type not in FAMILIES:
        return None
    family: Family = importlib.import_module(FAMILIES[model_type])
    return family
