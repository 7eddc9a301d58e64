"""The report of a run on itself: the phases of its start, and the buckets that it drew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.train.loop.run import train
from tests.train.tiny import (
    ListLoader,
    config_of,
    real_loader,
    real_loader_model,
    whisper_batch,
    whisper_folder,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_a_resumed_run_reports_its_own_phases_and_the_buckets_of_the_whole_run(tmp_path: Path) -> None:
    """Seven micro-batches an epoch: 8 in the first run, 12 when it was resumed."""
    model = real_loader_model(tmp_path / "model")
    reports = []
    for steps in (8, 12):
        config = config_of(tmp_path, model=model, model_type="qwen3_asr", max_steps=steps)
        reports.append(train(config, loader=real_loader(), source_kind="cache", resume=steps == 12))
    first, resumed = reports
    assert list(first.phases) == ["model", "to device", "first batch", "first step"]
    assert list(resumed.phases) == ["checkpoint", "model", "to device", "optimizer state", "first batch", "first step"]
    for report, batches in ((first, 8), (resumed, 12)):
        document = json.loads(json.dumps(report.to_json()))
        assert document["phases"] == report.phases
        buckets = document["buckets"]
        assert list(buckets) == ["b_0_1", "b_1_3"]
        assert sum(bucket["batches"] for bucket in buckets.values()) == batches
        for bucket in buckets.values():
            assert bucket["share"] == pytest.approx(bucket["batches"] / batches, abs=1e-6)
            assert bucket["hours"] > 0
        assert sum(bucket["expected"] for bucket in buckets.values()) == pytest.approx(1, abs=1e-5)
        lines = [line for line in report.lines()[1:] if line != report.waiting]
        assert [line.partition(":")[0] for line in lines] == ["bucket b_0_1", "bucket b_1_3"]


def test_a_loader_without_a_plan_has_no_buckets(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=whisper_folder(tmp_path / "model"), max_steps=1)
    report = train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")
    assert (report.buckets, len(list(report.lines()))) == ({}, 1)
