"""What a model wants of a run, and the checks of a config, of a source and of each batch against that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.steps.batch import IGNORED
from forebay.steps.table import audio_step, made


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
    takes_text_alone: bool = False
    """True: the model is trained on batches without `value_fields`, too."""
    max_label_tokens: int | None = None
    """Positions of the decoder; None where the model sets no such limit."""


class Family(Protocol):
    """What the module of a family has."""

    def facts(self, folder: Path, config: Any) -> ModelFacts:
        """Returns the facts of the model in `folder`. config: what transformers read of its config.json."""
        ...


def check_config(facts: ModelFacts, config: Config) -> None:
    """Returns when the model takes what the config makes, else raises ConfigError with both values; reads no data."""
    if facts.takes_packs != (config.modality == "vision"):
        takes, has = ("packs of images and text", "no") if facts.takes_packs else ("audio", "a")
        raise ConfigError(
            f"train.model: {facts.folder} is a {facts.model_type} model and takes {takes}, but {config.path} has {has} "
            "[vision] section; name another train.model or change the config"
        )
    if facts.takes_packs or (facts.takes_text_alone and config.audio.features == "none"):
        return
    wanted = facts.constants["features"]
    if config.audio.features != wanted:
        raise ConfigError(
            f'audio.features is "{config.audio.features}", but {facts.folder} is a {facts.model_type} model and takes '
            f'"{wanted}"; set audio.features = "{wanted}" or another train.model'
        )
    n_mels = made(audio_step(wanted), config.audio.settings).fields()[0].shape[0]
    if n_mels != facts.constants.get("n_mels"):
        wanted = facts.constants.get("n_mels")
        raise ConfigError(
            f"audio.n_mels is {n_mels}, but the model in {facts.folder} takes {wanted} mel bins; "
            f"set audio.n_mels = {wanted} and run: forebay preprocess {config.path}"
        )
    prompt = None if config.text is None else config.text.prompt
    if prompt != facts.constants["prompt"]:
        raise ConfigError(
            f"text.prompt is {prompt!r}, but {facts.folder} is a {facts.model_type} model; "
            f'set text.prompt = "{facts.constants["prompt"]}"'
        )


def check_constants(facts: ModelFacts, constants: Mapping[str, Any]) -> None:
    """Returns when a source's constants are the model's, else raises CacheMismatchError with both values."""
    if constants.get("features") == "none":
        if not facts.takes_text_alone:
            raise CacheMismatchError(
                f"features: the {facts.model_type} model in {facts.folder} takes no text without audio, and the cache "
                'has "none"; leave that cache out of mixture.source, or name a model that is trained on text alone, too'
            )
        return
    for name, wanted in facts.constants.items():
        stored = constants.get(name)
        if stored is not None and stored != wanted:
            raise CacheMismatchError(
                f"{name}: the model in {facts.folder} wants {wanted!r}, the cache has {stored!r}; "
                "name another train.model, or change the config and run forebay preprocess"
            )


def check_batch(facts: ModelFacts, batch: Mapping[str, torch.Tensor]) -> None:
    """Returns when the model can take this batch (on the host), else raises CacheMismatchError with both values.

    A token id beyond the embedding is an index error without a name on the CPU and a device-side assertion on CUDA. A
    rare token can come late, so every batch is looked at: two reductions over a few thousand integers.
    """
    _check_fields(facts, batch)
    n_mels = facts.constants.get("n_mels")
    if "input_features" in batch and (stored := batch["input_features"].shape[1]) != n_mels:
        raise CacheMismatchError(
            f"model in {facts.folder} wants {n_mels} mel bins, the cache has {stored}; "
            f"set audio.n_mels = {n_mels} and run forebay preprocess, or name another train.model"
        )
    audio_token_id = facts.constants.get("audio_token_id")
    if audio_token_id is not None and "input_features" not in batch and audio_token_id in batch[facts.ids_field]:
        raise CacheMismatchError(
            f"batch has audio tokens (id {audio_token_id}) in {facts.ids_field} and no field input_features; "
            f'set audio.features = "{facts.constants["features"]}", then run forebay preprocess'
        )
    for name in (facts.ids_field, "labels"):
        _check_ids(facts, name, batch[name])


def _check_fields(facts: ModelFacts, batch: Mapping[str, torch.Tensor]) -> None:
    # Packs have their images in one of two forms: uint8 patches, and what the model takes.
    names = {*batch, "patches"} if "pixel_values" in batch else set(batch)
    of_media = {field for name in facts.value_fields for field in (name, f"{name}_mask")}
    is_text = facts.takes_text_alone and not of_media & names
    for name in (*(() if is_text else facts.value_fields), facts.ids_field, "labels"):
        if name not in names:
            wanted = (
                'give the config a [vision] section and plan.kind = "pack"'
                if facts.takes_packs
                else 'set audio.features = "{features}" and text.prompt = "{prompt}"'.format_map(facts.constants)
            )
            raise CacheMismatchError(
                f"batch has no field {name} (it has {', '.join(sorted(batch))}), which a {facts.model_type} model "
                f"needs; {wanted}, then run forebay preprocess"
            )


def _check_ids(facts: ModelFacts, name: str, ids: torch.Tensor) -> None:
    if not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if high >= facts.vocab_size or low < (IGNORED if name == "labels" else 0):
        raise CacheMismatchError(
            f"{name} holds token ids {low} to {high}, the model in {facts.folder} has ids 0 to {facts.vocab_size - 1}; "
            "its text.tokenizer is not the model's: name the model's folder there and run forebay preprocess"
        )
    if facts.max_label_tokens is not None and ids.shape[1] > facts.max_label_tokens:
        raise CacheMismatchError(
            f"{name} has {ids.shape[1]} tokens, the model in {facts.folder} takes {facts.max_label_tokens}; "
            f"set text.max_label_tokens = {facts.max_label_tokens} and run forebay preprocess"
        )
