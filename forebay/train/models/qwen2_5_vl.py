"""Qwen2.5-VL: a causal model of packs, in which image patches stand at their placeholder tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.train.models.packs import facts_of_packs
from forebay.train.models.table import ModelFacts


def facts(folder: Path, config: Any) -> ModelFacts:
    """Returns what a Qwen2.5-VL in `folder` wants; config: its `Qwen2_5_VLConfig`."""
    return facts_of_packs(folder, config, model_class="Qwen2_5_VLForConditionalGeneration")
