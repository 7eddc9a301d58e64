"""Models with CTC: what their labels must not hold, and the text that they write, by the likeliest id of each frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.steps.batch import IGNORED
from forebay.train.models.families import ModelFacts


def check_config(facts: ModelFacts, config: Config) -> None:
    """Returns where a config makes labels for CTC; else raises ConfigError."""
    prompt = None if config.text is None else config.text.prompt
    if prompt != "plain":
        raise ConfigError(
            f"text.prompt is {prompt!r}, but {facts.model_class} in {facts.folder} learns a text as it is spoken; set "
            'text.prompt = "plain" and text.end_token = false',
            code="FB109",
        )


def check_constants(facts: ModelFacts, constants: Mapping[str, Any]) -> None:
    """Returns where a source's labels are texts alone; else raises CacheMismatchError: CTC has no end token."""
    end = constants.get("eos_token_id")
    if end is not None and constants.get("end_token", 1):
        raise CacheMismatchError(
            f"the cache has the end token {end} behind each text, and {facts.model_class} in {facts.folder} learns by "
            "CTC, in which a text has none; set text.end_token = false and run forebay preprocess",
            code="FB404",
        )


def check_batch(facts: ModelFacts, batch: Mapping[str, Any]) -> None:
    """Returns where no label is the blank; else raises CacheMismatchError: the loss would pass over it."""
    if bool((batch["labels"] == facts.blank_id).any()):
        raise CacheMismatchError(
            f"labels hold id {facts.blank_id}, which is the blank of {facts.model_class} in {facts.folder} "
            "(`pad_token_id` of its config.json); name the model's own tokenizer in text.tokenizer, or make "
            "pad_token_id the id of the tokenizer's pad token, and run forebay preprocess",
            code="FB404",
        )


def check_lengths(facts: ModelFacts, model: Any, batch: Mapping[str, Any]) -> int:
    """Returns how many clips have fewer frames than their text wants, so that their loss is 0 (`ctc_zero_infinity`).

    model: the bare module. batch: on the host. A text wants a frame a label, and one between two equal ones. Raises
    CacheMismatchError with both numbers where such a loss is infinite.
    """
    labels = batch["labels"]
    known = labels != IGNORED
    wanted = known.sum(1) + ((labels[:, 1:] == labels[:, :-1]) & known[:, 1:]).sum(1)
    frames = num_frames(facts, model, batch)
    short = (frames < wanted).nonzero().flatten()
    if len(short) and not getattr(model.config, "ctc_zero_infinity", False):
        row = int(short[0])
        raise CacheMismatchError(
            f"a clip has {int(frames[row])} frames of {facts.model_class} and its text wants {int(wanted[row])}, so "
            "its loss by CTC is infinite; drop such clips by [filter], or set ctc_zero_infinity to true in "
            f"{facts.folder / 'config.json'}",
            code="FB404",
        )
    return len(short)


def num_frames(facts: ModelFacts, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the frames of the model's output that each clip has, int64 [batch]. model: the bare module."""
    import transformers

    values = inputs[getattr(transformers, facts.model_class).main_input_name]
    mask = inputs.get("attention_mask")
    lengths = torch.full((len(values),), values.shape[1], device=values.device) if mask is None else mask.sum(-1)
    for owner in (model, getattr(model, "encoder", None)):
        for name in ("_get_feat_extract_output_lengths", "_get_subsampling_output_length"):
            if (of := getattr(owner, name, None)) is not None:
                found: torch.Tensor = of(lengths).long()
                return found
    return lengths.long()


def greedy(logits: torch.Tensor, frames: torch.Tensor, *, blank_id: int) -> list[list[int]]:
    """Returns the ids of each clip: the likeliest of each frame, equal neighbours once, without blanks.

    logits: [batch, frames, vocab]. frames: int [batch], of each clip.
    """
    best = logits.argmax(-1).cpu()
    return [
        [token for token in torch.unique_consecutive(row[:length]).tolist() if token != blank_id]
        for row, length in zip(best, frames.tolist(), strict=True)
    ]
