"""The meter: losses read late are still those of their steps, and the first that is not finite is named."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ForebayError
from forebay.train.loop.meter import FILE_NAME, Meter, StepLog, StepsLog, read_lines
from forebay.train.loop.schedule import Group
from forebay.train.loop.trainable import SkippedSteps
from tests.train.tiny import config_of


def meter(*, first_step: int = 1, limit: int = 20) -> Meter:
    skipped = SkippedSteps(limit=limit)
    return Meter(first_step=first_step, sum_on_device=lambda tensor: 2 * tensor, skipped=skipped)


def add(to: Meter, loss: float, *, grad_norm: float = 1.0, num_samples: int = 3, is_skipped: bool = False) -> None:
    group = Group(batches=[], num_targets=1, num_samples=num_samples, wait_s=0.0)
    to.add(loss=torch.tensor(loss), grad_norm=torch.tensor(grad_norm), group=group, is_skipped=is_skipped)


@given(losses=st.lists(st.floats(0, 100, width=32), min_size=2, max_size=12), cut=st.integers(1, 11))
def test_lines_hold_the_mean_over_their_steps_and_ranks(losses: list[float], cut: int) -> None:
    cut = min(cut, len(losses) - 1)
    counted, lines = meter(first_step=5), []
    for index, loss in enumerate(losses):
        add(counted, loss)
        if index == cut // 2:
            counted.settle()  # a checkpoint between two lines
        if index + 1 in (cut, len(losses)):
            lines.append(counted.line(learning_rate=0.1, padding=0.5))
    assert [line.step for line in lines] == [4 + cut, 4 + len(losses)]
    for line, part in zip(lines, (losses[:cut], losses[cut:]), strict=True):
        assert line.loss == pytest.approx(2 * math.fsum(part) / len(part), rel=1e-6)
        assert line.samples_per_s > 0
        assert line.data_wait_share == 0
    assert counted.num_samples == 3 * len(losses)
    assert counted.losses == pytest.approx((2 * losses[0], 2 * losses[-1]))


@given(bad=st.sampled_from([math.nan, math.inf, -math.inf]), at=st.integers(0, 5), first_step=st.integers(1, 1000))
def test_first_loss_that_is_not_finite_is_named(bad: float, at: int, first_step: int) -> None:
    counted = meter(first_step=first_step)
    for index in range(6):
        add(counted, bad if index >= at else 1.0)
    with pytest.raises(ForebayError, match=rf"the loss of step {first_step + at} is -?(nan|inf)"):
        counted.settle()


def test_gradient_norm_may_overflow_in_a_skipped_step_only() -> None:
    scaled = meter()
    add(scaled, 1.0, grad_norm=math.inf, is_skipped=True)
    assert scaled.losses == (2.0, 2.0)
    plain = meter()
    add(plain, 1.0, grad_norm=math.inf)
    with pytest.raises(ForebayError, match="the gradient norm of step 1 is inf"):
        plain.settle()


@given(
    steps=st.lists(st.tuples(st.sampled_from([1.0, 2.0, math.nan, math.inf]), st.booleans()), min_size=1, max_size=12)
)
def test_losses_of_skipped_steps_may_be_anything_and_do_not_count(steps: list[tuple[float, bool]]) -> None:
    """A finite loss counts also where its step was skipped: the gradient alone overflowed."""
    steps = [(loss, is_skipped or not math.isfinite(loss)) for loss, is_skipped in steps]
    counted = meter()
    for loss, is_skipped in steps:
        add(counted, loss, grad_norm=math.nan if is_skipped else 1.0, is_skipped=is_skipped)
    line = counted.line(learning_rate=0.1, padding=0.0)
    finite = [2 * loss for loss, _ in steps if math.isfinite(loss)]
    assert line.step == len(steps)
    assert line.skipped_steps == sum(is_skipped for _, is_skipped in steps)
    if finite:
        assert line.loss == pytest.approx(sum(finite) / len(finite))
        assert counted.losses == (finite[0], finite[-1])
    else:
        assert math.isnan(line.loss)
        assert all(map(math.isnan, counted.losses))
        add(counted, 1.0)
        assert counted.losses == (2.0, 2.0)


@given(skips=st.lists(st.booleans(), max_size=30), limit=st.integers(1, 5), before=st.integers(0, 4))
def test_so_many_skipped_steps_in_a_row_end_the_run(skips: list[bool], limit: int, before: int) -> None:
    before = min(before, limit - 1)
    skipped = SkippedSteps(limit=limit, total=before, in_a_row=before)
    row = before
    for step, is_skipped in enumerate(skips, start=before + 1):
        row = row + 1 if is_skipped else 0
        if row == limit:
            wanted = rf"skipped steps {step - limit + 1} to {step}, .*max_skipped_steps = {limit} .*embed_lr_mult"
            with pytest.raises(ForebayError, match=wanted):
                skipped.add(step, is_skipped=is_skipped)
            break
        skipped.add(step, is_skipped=is_skipped)
        assert (skipped.in_a_row, skipped.total) == (row, before + sum(skips[: step - before]))


def test_log_line_reads_well() -> None:
    line = StepLog(
        step=10,
        loss=3.14159,
        learning_rate=1e-4,
        samples_per_s=45.26,
        data_wait_share=0.021,
        padding=0.083,
        grad_norm=0.8312,
        cpu_share=1.694,
    )
    wanted = (
        "step 10: loss 3.1416, lr 1.00e-04, grad norm 0.831, 45.3 samples/s, data wait 2.1 %, padding 8.3 %, "
        "CPU 1.69 cores"
    )
    assert str(line) == wanted
    on_a_gpu = dataclasses.replace(
        line, device_utilization=0.984, device_memory_bytes=38_200_000_000, device_total_bytes=80_000_000_000
    )
    assert str(on_a_gpu) == f"{wanted}, device 98 %, 38.2 GB of 80 GB"
    assert str(dataclasses.replace(line, skipped_steps=2)) == f"{wanted}, 2 steps skipped"


def test_a_line_has_the_norm_of_its_last_step_and_the_skipped_steps_of_the_run() -> None:
    counted = meter()
    add(counted, 1.0, grad_norm=3.0)
    add(counted, 1.0, grad_norm=math.inf, is_skipped=True)
    counted.settle()
    add(counted, 1.0, grad_norm=0.5)
    line = counted.line(learning_rate=0.1, padding=0.5)
    assert (line.grad_norm, line.skipped_steps) == (0.5, 1)
    assert line.cpu_share >= 0  # no number is none
    assert line.device_utilization is line.device_memory_bytes is None


def test_losses_of_a_resumed_run_begin_where_it_began() -> None:
    resumed = Meter(
        first_step=4, losses=(9.0, 5.0), sum_on_device=lambda tensor: tensor, skipped=SkippedSteps(limit=20)
    )
    assert resumed.losses == (9.0, 5.0)
    add(resumed, 3.0)
    assert resumed.losses == (9.0, 3.0)
    with pytest.raises(ValueError, match="no step has been counted"):
        _ = meter().losses


def line(step: int) -> StepLog:
    return StepLog(
        step=step, loss=1.0 / step, learning_rate=1e-3, samples_per_s=7.5, data_wait_share=0.25, padding=0.125
    )


def written(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "logs" / FILE_NAME)


def test_a_new_run_begins_the_file_anew(tmp_path: Path) -> None:
    for seed in (3, 4):
        log = StepsLog(config_of(tmp_path, model=tmp_path, seed=seed), tmp_path, step=0)
        for step in (5, 10):
            log.add(line(step))
    head, *lines = written(tmp_path)
    assert (head["version"], head["name"], head["settings"]["loader"]["seed"]) == (1, "tiny", 4)
    assert [each["step"] for each in lines] == [5, 10]
    assert lines[0]["loss"] == 0.2


def test_a_resumed_run_keeps_what_leads_to_its_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=tmp_path)
    log = StepsLog(config, tmp_path, step=0)
    for step in (5, 10, 15):
        log.add(line(step))
    with open(tmp_path / "logs" / FILE_NAME, "ab") as file:
        file.write(b'{"step": 20, "lo')  # a crash cut it short
    resumed = StepsLog(config, tmp_path, step=12)
    assert len(written(tmp_path)) == 4  # nothing is touched before the first line
    resumed.add(line(17))
    assert [each["step"] for each in written(tmp_path)[1:]] == [5, 10, 17]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    log = StepsLog(config_of(tmp_path, model=tmp_path), tmp_path, step=0)
    with pytest.raises(ForebayError, match=r"cannot write the log lines to .*steps\.jsonl.*; make room"):
        log.add(line(5))
