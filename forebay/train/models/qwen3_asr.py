"""Qwen3-ASR: a causal model that reads audio at its placeholder tokens, and text alone as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.train.models.families import ModelFacts


def facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Qwen3-ASR in `folder` wants; config: its `Qwen3ASRConfig`."""
    return ModelFacts(
        folder=folder,
        model_type="qwen3_asr",
        model_class="Qwen3ASRForConditionalGeneration",
        constants={
            "features": "qwen3_asr",
            "prompt": "qwen3_asr",
            "n_mels": config.audio_config.num_mel_bins,
            "audio_token_id": config.audio_token_id,
        },
        vocab_size=config.text_config.vocab_size,
        labels_are_shifted=False,
        value_fields=("input_features",),
        text_prompt="plain",
        max_positions=config.text_config.max_position_embeddings,
    )
