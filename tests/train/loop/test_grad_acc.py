"""Accumulation steps bucket by bucket: what a calibration says, the loader tells, and the loop does."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from forebay.config import BucketConfig
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_key
from forebay.train.loader import Loader
from forebay.train.loop.schedule import host_sum, micro_batch_groups
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.tiny import num_labels

SIZES = {"0": {"batch_size": 3, "grad_acc": 1}, "1": {"batch_size": 2, "grad_acc": 3}}


@pytest.fixture
def settings(tmp_path: Path) -> BucketConfig:
    (tmp_path / "calibration.json").write_text(json.dumps(SIZES))
    return BucketConfig(edges_s=(2.0, 4.0), calibration=str(tmp_path / "calibration.json"), lockstep=6, tail="drop")


def make_loader(settings: BucketConfig, *, dp_rank: int = 0, dp_world_size: int = 1) -> Loader:
    lengths = np.random.default_rng(5).integers(10, 400, 80).tolist()
    source = FakeSource(lengths, features="qwen3_asr", prompt="qwen3_asr", dtype="float16")
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    key = plan_key(source.key, settings)
    return loader_of(source, plan, plan_key=key, seed=7, dp_rank=dp_rank, dp_world_size=dp_world_size, num_threads=0)


def steps_of(loader: Loader) -> list[tuple[int, int]]:
    """Micro-batches, and samples of the first, of every step of an epoch."""

    def size() -> int:
        wanted = loader.grad_acc
        assert wanted is not None
        return wanted

    groups = micro_batch_groups(loader, size=size, count_targets=num_labels, sum_over_ranks=host_sum(1))
    found: list[tuple[int, int]] = []
    while sum(count for count, _ in found) < len(loader):
        group = next(groups)
        found.append((len(group.batches), len(group.batches[0][0]["labels"])))
    groups.close()
    return found


def test_every_step_accumulates_what_its_bucket_says(settings: BucketConfig) -> None:
    steps = steps_of(make_loader(settings))
    wanted = {SIZES[name]["batch_size"]: SIZES[name]["grad_acc"] for name in SIZES}
    assert {size for _, size in steps} == {2, 3}
    # The last step of the epoch takes what is left.
    assert all(count == wanted[size] for count, size in steps[:-1])
    assert steps[-1][0] <= wanted[steps[-1][1]]


def test_all_ranks_accumulate_alike(settings: BucketConfig) -> None:
    loaders = [make_loader(settings, dp_rank=rank, dp_world_size=3) for rank in range(3)]
    told: list[list[int | None]] = []
    for loader in loaders:
        own = [loader.grad_acc]
        for _ in itertools.islice(loader, len(loader) - 1):
            own.append(loader.grad_acc)
        told.append(own)
    assert told[0] == told[1] == told[2]
    assert set(told[0]) == {1, 3}


def test_a_resumed_loader_says_the_same(settings: BucketConfig) -> None:
    loader, other = make_loader(settings), make_loader(settings)
    batches = iter(loader)
    for _ in range(9):
        next(batches)
        other.load_state_dict(loader.state_dict())
        assert other.grad_acc == loader.grad_acc


def test_without_a_calibration_nothing_is_said() -> None:
    assert make_loader(BucketConfig(edges_s=(2.0, 4.0), batch_size=2)).grad_acc is None
