from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.config import BucketConfig
from forebay.errors import CacheMismatchError, PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import Samples, kept_plan
from forebay.plan.names import plan_folder

LENGTHS = np.random.default_rng(2).integers(500, 32_000, 400)


def resolved(root: Path, **changes: Any) -> tuple[BucketPlan, Path | None]:
    name: dict[str, Any] = {
        "cache_key": "ab" * 32,
        "settings": changes.pop("settings", BucketConfig(batch_seconds=60.0)),
    }
    lengths: dict[str, Any] = {"durations": LENGTHS, "frames": lambda: LENGTHS // 10, "sample_rate_hz": 1000}
    folder = plan_folder(root, dataset="prompts", split="train", **name)
    plan, kept = kept_plan(folder, Samples(**{**lengths, **changes}), **name)
    assert isinstance(plan, BucketPlan)
    return plan, kept


def test_a_plan_is_made_once(tmp_path: Path) -> None:
    first, folder = resolved(tmp_path)
    again, same = resolved(tmp_path, frames=lambda: pytest.fail("statistics made twice"))
    assert folder is not None
    assert same == folder
    assert np.array_equal(first.members, again.members)
    assert isinstance(first.members.base, np.memmap)


def test_padding_is_counted_in_frames(tmp_path: Path) -> None:
    _, folder = resolved(tmp_path, frames=lambda: np.full(400, 10))
    assert folder is not None
    assert json.loads((folder / "packing_stats.json").read_bytes())["padding"] == 0.0


def test_settings_get_their_own_plans(tmp_path: Path) -> None:
    _, first = resolved(tmp_path)
    _, second = resolved(tmp_path, settings=BucketConfig(batch_seconds=90.0))
    assert first != second
    assert len(list((tmp_path / "plans").iterdir())) == 2


def test_an_unwritable_root_keeps_the_plan_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        plan, folder = resolved(tmp_path)
    assert folder is None
    assert plan.num_batches == resolved(tmp_path / "elsewhere")[0].num_batches
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the plan stays in memory" in caplog.text


def test_a_damaged_plan_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan, folder = resolved(tmp_path)
    assert folder is not None
    good = (folder / "members.npy").read_bytes()
    (folder / "members.npy").write_bytes(good[:-4])
    with caplog.at_level(logging.WARNING):
        again, same = resolved(tmp_path)
    assert same == folder
    assert (folder / "members.npy").read_bytes() == good
    assert np.array_equal(plan.batch_sizes, again.batch_sizes)
    assert "making the plan again" in caplog.text


def test_a_plan_of_other_samples_is_refused(tmp_path: Path) -> None:
    resolved(tmp_path)
    with pytest.raises(CacheMismatchError, match=r"num_samples differs \(399 in the cache, 400 in the plan\)"):
        resolved(tmp_path, durations=LENGTHS[:-1])


def test_an_impossible_plan_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no samples to plan"):
        resolved(tmp_path, durations=LENGTHS[:0])
    assert not (tmp_path / "plans").exists()
