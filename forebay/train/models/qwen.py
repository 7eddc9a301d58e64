"""Qwen's causal models. Qwen2-VL, Qwen2.5-VL and Qwen3-VL read packs, in which image patches stand at placeholder
tokens; Qwen3-ASR reads audio at such tokens, and text alone as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.steps.image.qwen2_vl import Patches
from forebay.train.models.families import ModelFacts

_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Qwen in `folder` wants; config: what transformers read of it."""
    return (_asr_facts if config.model_type == "qwen3_asr" else _vl_facts)(folder, config)


def _vl_facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Qwen-VL in `folder` wants of a pack.

    Position ids have four rows: the place of a token in its sample, by which transformers keeps the samples of a pack
    apart, and the three of M-RoPE.
    """
    return ModelFacts(
        folder=folder,
        model_type=str(config.model_type),
        model_class=_CLASSES[config.model_type],
        constants={
            "features": Patches.name,
            "prompt": "chat",
            "patch_size": config.vision_config.patch_size,
            "merge_size": config.vision_config.spatial_merge_size,
            "temporal_patch_size": config.vision_config.temporal_patch_size,
            "image_token_id": config.image_token_id,
            "video_token_id": config.video_token_id,
            "video_family": config.model_type.removesuffix("_vl"),
            "tokens_per_second": getattr(config.vision_config, "tokens_per_second", None),
        },
        vocab_size=config.text_config.vocab_size,
        labels_are_shifted=False,
        # Without the positions the samples of a pack would see each other.
        value_fields=(Patches.name, "image_grid_thw", "position_ids"),
        takes_packs=True,
    )


def _asr_facts(folder: Path, config: Any) -> ModelFacts:
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
