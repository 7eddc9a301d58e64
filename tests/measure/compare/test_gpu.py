"""Figures of a comparison about a device; `test_command` holds them to None on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forebay
from forebay.measure.compare import compare
from tests.processes import ROOT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_device_s_memory_and_speed_are_told_by_bucket(tmp_path: Path) -> None:
    overrides = [f"run.cache_root={tmp_path}/caches", f"train.output_dir={tmp_path}/runs"]
    config = forebay.load_config(
        ROOT / "configs/demo_qwen3_asr.toml", overrides=[*overrides, 'train.mixed_precision="bf16"']
    )
    forebay.preprocess.build(config)
    document = compare(config, against="uncached,uncached+unbucketed,hf", steps=30).to_json()
    assert document["device"] == torch.cuda.get_device_name()
    for arm in document["arms"].values():
        assert arm["device_bytes"] > 1_000_000
        assert all(row["device_bytes"] > 0 < row["step_s"] for row in arm["buckets"].values())
        assert arm["tflops"] > 0
        assert arm["utilisation"] is None or 0 <= arm["utilisation"] <= 1
        assert arm["mfu"] is None or 0 < arm["mfu"] < 1
    uncached = document["arms"]["uncached"]
    assert uncached["losses"] == pytest.approx(document["arms"]["config"]["losses"], rel=0.05)
