"""What the families of Qwen-VL have in common: causal models of packs, in which patches stand at placeholder tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.steps.image.qwen2_vl import Patches
from forebay.train.models.table import ModelFacts


def facts_of_packs(folder: Path, config: Any, *, model_class: str) -> ModelFacts:
    """Returns what a Qwen-VL of this class in `folder` wants of a pack; config: what transformers read of it.

    Position ids have four rows: the place of a token in its sample, by which transformers keeps the samples of a pack
    apart, and the three of M-RoPE.
    """
    return ModelFacts(
        folder=folder,
        model_type=str(config.model_type),
        model_class=model_class,
        constants={
            "features": Patches.name,
            "prompt": "chat",
            "patch_size": config.vision_config.patch_size,
            "merge_size": config.vision_config.spatial_merge_size,
            "temporal_patch_size": config.vision_config.temporal_patch_size,
            "image_token_id": config.image_token_id,
        },
        vocab_size=config.text_config.vocab_size,
        labels_are_shifted=False,
        # Without the positions the samples of a pack would see each other.
        value_fields=(Patches.name, "image_grid_thw", "position_ids"),
        takes_packs=True,
    )
