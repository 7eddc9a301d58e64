"""Whisper: an encoder of log-mel features, and a decoder whose labels are shifted already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.train.models.table import ModelFacts


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
        max_label_tokens=config.max_target_positions,
        max_positions=config.max_target_positions,
    )
