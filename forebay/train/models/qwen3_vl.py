"""Qwen3-VL: a causal model of packs, in which image patches stand at their placeholder tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.train.models.table import ModelFacts


def facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Qwen3-VL in `folder` wants; config: its `Qwen3VLConfig`."""
    return ModelFacts(
        folder=folder,
        model_type="qwen3_vl",
        model_class="Qwen3VLForConditionalGeneration",
        constants={
            "features": "patches",
            "prompt": "chat",
            "patch_size": config.vision_config.patch_size,
            "merge_size": config.vision_config.spatial_merge_size,
            "temporal_patch_size": config.vision_config.temporal_patch_size,
            "image_token_id": config.image_token_id,
        },
        vocab_size=config.text_config.vocab_size,
        labels_are_shifted=False,
        # Without the positions the samples of a pack would see each other.
        value_fields=("patches", "image_grid_thw", "position_ids"),
        takes_packs=True,
    )
