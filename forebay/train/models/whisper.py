"""Whisper: an encoder of log-mel features, and a decoder whose labels are shifted already."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from forebay.train.models.families import ModelFacts, TextEncoder

SILENCE = -1.5
"""Log-mel of digital silence in Whisper's normalised units: (log10(1e-10) + 4) / 4."""


def facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Whisper in `folder` wants; config: its `WhisperConfig`."""
    return ModelFacts(
        folder=folder,
        model_type="whisper",
        model_class="WhisperForConditionalGeneration",
        constants={"features": "log_mel", "prompt": "whisper", "n_mels": config.num_mel_bins},
        vocab_size=config.vocab_size,
        labels_are_shifted=True,
        ids_field="decoder_input_ids",
        value_fields=("input_features",),
        text_prompt="whisper",
        prepare_text_alone=prepare_text_alone,
        max_label_tokens=config.max_target_positions,
        max_positions=config.max_target_positions,
    )


def prepare_text_alone(model: Any, text_encoder: TextEncoder) -> None:
    """Makes a `WhisperForConditionalGeneration` take batches of `decoder_input_ids` and `labels` without audio.

    Where such a batch comes, the decoder attends to `encoder_outputs` of its own: with `zeros` one position of zeros,
    [B, 1, d_model], without a pass of the encoder; with `silence` what the encoder makes of 30 s of silence, computed
    for one row and without a gradient. Calls that have audio, or encoder outputs, stay as they are.

    The `WhisperModel` inside has the hook, whatever wraps it: DDP, adapters and `torch.compile` all call it.
    """
    from transformers import WhisperModel

    [inner] = [module for module in model.modules() if isinstance(module, WhisperModel)]
    inner.register_forward_pre_hook(partial(_with_encoder_outputs, text_encoder=text_encoder), with_kwargs=True)


def _with_encoder_outputs(
    model: Any, arguments: tuple[Any, ...], named: dict[str, Any], *, text_encoder: TextEncoder
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    features = arguments[0] if arguments else named.get("input_features")
    if features is not None or named.get("encoder_outputs") is not None or named.get("decoder_input_ids") is None:
        return None
    row = _silence(model) if text_encoder == "silence" else _zeros(model)
    outputs = row.expand(len(named["decoder_input_ids"]), -1, -1)
    return arguments, {**named, "encoder_outputs": (outputs,)}


def _zeros(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.encoder.conv1.weight
    return weight.new_zeros(1, 1, model.config.d_model)


def _silence(model: Any) -> torch.Tensor:
    weight, config = model.encoder.conv1.weight, model.config
    frames = 2 * config.max_source_positions  # the encoder halves them
    with torch.no_grad():
        features = weight.new_full((1, config.num_mel_bins, frames), SILENCE)
        outputs: torch.Tensor = model.encoder(features).last_hidden_state
    return outputs
