"""A family that the table does not have: Qwen3, a causal model of text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.train.models.families import ModelFacts


def facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Qwen3 in `folder` wants; config: its `Qwen3Config`."""
    return ModelFacts(
        folder=folder,
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        constants={"features": "none", "prompt": "plain"},
        vocab_size=config.vocab_size,
        labels_are_shifted=False,
        text_prompt="plain",
    )
