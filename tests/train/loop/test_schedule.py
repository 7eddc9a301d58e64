"""The number of steps of a run against the groups that the loop makes, and learning rates against transformers."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments, get_scheduler

from forebay.config import BucketConfig, TrainConfig
from forebay.errors import ConfigError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import Cursor, LoaderState
from forebay.plan.make_buckets import bucket_plan
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.loop.schedule import Schedule, host_sum, micro_batch_groups, run_steps, steps_to_go
from tests.train.tiny import ListLoader, config_of, num_labels, real_loader, real_loader_model, whisper_batch

SAMPLES_A_SECOND = 16_000


class Walked:
    """A loader of numbers instead of samples: its walks, states and `grad_acc` are those of a Loader."""

    weight = 1

    def __init__(self, plan: BucketPlan, place: LoaderState, *, dp_rank: int, dp_world_size: int) -> None:
        self.plan = plan
        self.cursor = Cursor(plan, place.plan_key, seed=place.seed, rank=dp_rank, world=dp_world_size)
        self.cursor.load_state_dict(place.to_json())

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in self.cursor.walk():
            self.cursor.hand_out(step)
            yield {"labels": torch.zeros(1, 1)}

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        self.cursor.load_state_dict(state)

    def report(self) -> dict[str, Any]:
        return {}

    def size(self, grad_acc: int) -> int:
        place = self.cursor.state
        if self.plan.grad_accs is None:
            return grad_acc
        return self.plan.grad_accs[self.plan.order(place.seed, place.epoch).bucket(place.position)]


def plan_of(*, num_samples: int, tail: Any, grad_accs: tuple[int, ...] | None, lockstep: int) -> BucketPlan:
    lengths = np.random.default_rng(num_samples).integers(1, 6 * SAMPLES_A_SECOND, num_samples)
    settings = BucketConfig(edges_s=(2.0, 4.0), batch_size=2, tail=tail, lockstep=lockstep)
    plan = bucket_plan(lengths, sample_rate_hz=SAMPLES_A_SECOND, settings=settings)
    return dataclasses.replace(plan, grad_accs=grad_accs and grad_accs[: len(plan.batch_sizes)])


@given(
    num_samples=st.integers(20, 120),
    tail=st.sampled_from(["short", "drop", "pad"]),
    grad_accs=st.none() | st.tuples(*[st.integers(1, 5)] * 3),
    grad_acc=st.integers(1, 4),
    lockstep=st.integers(1, 6),
    dp_world_size=st.integers(1, 3),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
    begun=st.floats(0, 1),
)
def test_steps_of_epochs_are_the_groups_of_the_loop(
    num_samples: int,
    tail: Any,
    grad_accs: tuple[int, ...] | None,
    grad_acc: int,
    lockstep: int,
    dp_world_size: int,
    epochs: int,
    seed: int,
    begun: float,
) -> None:
    """Steps are counted from the head of a run, and from any place in it: a resume may stand inside a group."""
    plan = plan_of(num_samples=num_samples, tail=tail, grad_accs=grad_accs, lockstep=lockstep)
    position = int(begun * plan.num_batches) if begun > 0.3 else 0
    place = LoaderState(plan_key="k", seed=seed, epoch=0, position=position)
    wanted = steps_to_go(plan, place, epochs=epochs, dp_world_size=dp_world_size, grad_acc=grad_acc)
    loader = Walked(plan, place, dp_rank=dp_world_size - 1, dp_world_size=dp_world_size)
    groups = micro_batch_groups(
        loader,
        size=lambda: loader.size(grad_acc),
        count_targets=num_labels,
        sum_over_ranks=host_sum(1),
    )
    count = 0
    while loader.cursor.state.epoch < epochs:
        next(groups)
        count += 1
    groups.close()
    assert count == wanted


def test_whole_epochs_have_the_steps_of_one_division() -> None:
    plan = plan_of(num_samples=50, tail="short", grad_accs=None, lockstep=2)
    place = LoaderState(plan_key="k", seed=0, epoch=1, position=0)
    steps = steps_to_go(plan, place, epochs=4, dp_world_size=2, grad_acc=3)
    assert steps == 3 * math.ceil(math.ceil(plan.num_batches / 2) / 3)
    assert steps_to_go(plan, place, epochs=1, dp_world_size=2, grad_acc=3) == 0


def steps_and_losses(config: Any, **kwargs: Any) -> tuple[list[int], list[float]]:
    lines: list[StepLog] = []
    train(config, loader=real_loader(num_threads=0), source_kind="cache", log=lines.append, **kwargs)
    return [line.step for line in lines], [line.loss for line in lines]


@pytest.mark.usefixtures("fresh_accelerate")
def test_run_of_epochs_ends_with_its_last_epoch_and_a_resumed_one_there_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seven micro-batches an epoch are four steps of two; the learning rate of the whole run is that of eight."""
    config = config_of(
        tmp_path,
        model=real_loader_model(tmp_path / "model"),
        model_type="qwen3_asr",
        epochs=2,
        grad_acc=2,
        warmup_ratio=0.3,
        log_every=1,
        checkpoint_every=3,
        learning_rate=3e-3,
    )
    steps, losses = steps_and_losses(config)
    assert steps == list(range(1, 9))
    (tmp_path / "runs").rename(tmp_path / "whole")

    def stop(line: StepLog) -> None:
        if line.step == 5:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        train(config, loader=real_loader(num_threads=0), source_kind="cache", log=stop)
    with caplog.at_level(logging.INFO, logger="forebay.train"):
        assert steps_and_losses(config, resume=True) == ([4, 5, 6, 7, 8], losses[3:])
    assert "going on after step 3" in caplog.text
    assert "settings differ" not in caplog.text
    assert steps_and_losses(config, resume=True) == ([], [])  # after the last epoch there is nothing to do


def test_epochs_need_a_plan_to_count_by() -> None:
    with pytest.raises(ConfigError, match=r"train.epochs is 2, but a ListLoader has no plan .*; set train.max_steps"):
        run_steps(TrainConfig(epochs=2), ListLoader([whisper_batch(0)]), steps_done=0)


def test_epochs_that_are_over_before_the_first_step_are_refused() -> None:
    loader = real_loader(num_threads=0)
    loader.set_epoch(2)
    with pytest.raises(ConfigError, match=r"train.epochs is 2, but the loader stands at epoch 2"):
        run_steps(TrainConfig(epochs=2), loader, steps_done=0)
    assert run_steps(TrainConfig(epochs=2), loader, steps_done=9) == 9


def test_left_out_the_steps_are_100() -> None:
    assert run_steps(TrainConfig(), ListLoader([]), steps_done=0) == 100
    assert run_steps(TrainConfig(max_steps=7), ListLoader([]), steps_done=3) == 7


@given(
    kind=st.sampled_from(["cosine", "linear", "constant"]),
    num_steps=st.integers(1, 60),
    warmup_steps=st.integers(0, 60),
)
def test_factors_are_those_of_transformers_one_step_ahead_in_the_warm_up(
    kind: Any, num_steps: int, warmup_steps: int
) -> None:
    schedule = Schedule(num_steps=num_steps, warmup_steps=warmup_steps, kind=kind)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_scheduler(
        "constant_with_warmup" if kind == "constant" else kind,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=num_steps,
    )
    factor_of = theirs.lr_lambdas[0]
    for step in range(1, num_steps + 1):
        at = step if step <= warmup_steps else step - 1
        expected = factor_of(at) if at < warmup_steps or step > warmup_steps else 1.0
        assert schedule.factor(step) == pytest.approx(expected, abs=1e-12)
        assert schedule.factor(step) > 0


@given(ratio=st.floats(0.001, 0.999), num_steps=st.integers(1, 10_000))
def test_share_of_warm_up_is_rounded_as_in_transformers(ratio: float, num_steps: int) -> None:
    schedule = Schedule.of(TrainConfig(warmup_ratio=ratio), num_steps=num_steps)
    # Their argument of one name takes steps and, below 1, a share.
    wanted = TrainingArguments.get_warmup_steps(type("Arguments", (), {"warmup_steps": ratio})(), num_steps)
    assert schedule.warmup_steps == wanted


def test_a_line_falls_to_the_last_share_and_a_constant_stays() -> None:
    line = Schedule(num_steps=5, warmup_steps=1, kind="linear")
    assert [line.factor(step) for step in range(1, 6)] == [1.0, 1.0, 0.75, 0.5, 0.25]
    constant = Schedule(num_steps=5, warmup_steps=2, kind="constant")
    assert [constant.factor(step) for step in range(1, 6)] == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert list(itertools.islice((constant.factor(step) for step in range(6, 9)), 3)) == [1.0] * 3
