"""Reports of inspect on a cache of texts: tokens instead of hours, and nothing to hear or to draw."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forebay.config import BucketConfig
from forebay.plan.disk import save_plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_folder
from forebay.plan.statistics import batch_statistics
from forebay.store.cache import open_cache
from forebay.store.source import length_of, without_audio
from tests.commands import inspect
from tests.store_factory import make_cache

SETTINGS = BucketConfig(edges=(6, 12), batch_tokens=24, lockstep=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "caches", features="none", num_samples=9, failed_rows=[2])


def save(folder: Path) -> None:
    cache = open_cache(folder)
    tokens, durations = cache.lengths["num_tokens"], length_of(cache, "num_audio_samples")
    plan = bucket_plan(durations, sample_rate_hz=16_000, settings=SETTINGS, tokens=tokens, texts=without_audio(cache))
    target = plan_folder(folder.parent, dataset="prompts", split="train", cache_key=cache.key, settings=SETTINGS)
    found = batch_statistics(plan, durations, frames=tokens)
    save_plan(plan, target, cache_key=cache.key, settings=SETTINGS, statistics=found)


def test_the_report_counts_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder)
    code, out, err = inspect(capsys, folder)
    assert (code, err) == (0, "")
    lengths = open_cache(folder).lengths["num_tokens"]
    lines = out.splitlines()
    assert f"  samples     9, {lengths.sum()} tokens, no audio" in lines
    assert f"tokens a sample: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}" in lines
    assert any(line.split() == ["languages", "samples", "share"] for line in lines)
    assert any(line.split()[:3] == ["0-6", "tokens", str((lengths < 6).sum())] for line in lines)
    assert "durations" not in out
    assert any(line.split() == ["audio", "none"] for line in lines)


def test_the_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = inspect(capsys, folder, "--json")
    document: dict[str, Any] = json.loads(out)
    lengths = open_cache(folder).lengths["num_tokens"]
    assert code == 0
    assert (document["hours"], document["bytes_per_hour"], document["histogram"]) == (0.0, None, None)
    assert document["num_tokens"] == lengths.sum()
    assert document["lengths"] == {"min": lengths.min(), "mean": pytest.approx(lengths.mean()), "max": lengths.max()}
    assert document["constants"]["features"] == "none"


def test_one_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = inspect(capsys, folder, "--sample", 1, "--json")
    sample = json.loads(out)["sample"]
    assert code == 0
    assert sample["fields"].keys() == {"input_ids", "prefix_len"}
    assert "duration_s" not in sample["row"]
    assert "num_audio_samples" not in sample["row"]


@pytest.mark.parametrize(
    ("option", "message"),
    [("--wav", r"--wav: .* has no audio \(its fields: input_ids, prefix_len\)"), ("--png", r"--png: .* has no audio")],
)
def test_there_is_nothing_to_hear_or_to_draw(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    code, _, err = inspect(capsys, folder, "--sample", 0, option, tmp_path / "out")
    assert code == 2
    assert re.search(message, err)
    assert not (tmp_path / "out").exists()
