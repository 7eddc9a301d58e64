"""The best evaluation so far: the lowest number that is one, on the first set, and of no trap."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import EvalConfig, TrainConfig
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.loop.checkpoint import Best, BestRecord


def settings_of(metric: Any = "wer") -> TrainConfig:
    sets = tuple(EvalConfig(name=name, cache=f"/caches/{name}") for name in ("dev", "test"))
    return TrainConfig(eval=sets, save_best=metric)


def test_of_accuracy_and_f1_the_highest_is_the_best() -> None:
    for metric in ("accuracy", "f1"):
        best = Best(settings_of(metric))
        found = [
            best.consider([result_of(step, None, **{metric: value})]) for step, value in enumerate((0.5, 0.4, 0.6))
        ]
        assert found == [True, False, True]
        assert best.record is not None
        assert (best.record.metric, best.record.value) == (metric, 0.6)


def result_of(step: int, wer: float | None, **changes: Any) -> EvalResult:
    result = EvalResult(
        name="dev", step=step, loss=2.0, wer=wer, cer=0.5, num_samples=3, elapsed_s=0.1, text="none", trap=None
    )
    return replace(result, **changes)


def changed(result: EvalResult, changes: dict[str, Any]) -> EvalResult:
    return replace(result, **changes)


RECORD = BestRecord(checkpoint="checkpoint-00000005", step=5, name="dev", metric="wer", value=0.5)


def test_only_a_lower_result_of_the_first_set_is_wanted() -> None:
    best = Best(settings_of())
    assert best.record is None
    assert best.consider([result_of(1, 0.9, name="test"), result_of(1, 0.8)])
    assert best.in_checkpoint("checkpoint-00000001") == BestRecord(
        checkpoint="checkpoint-00000001", step=1, name="dev", metric="wer", value=0.8
    )
    assert not best.consider([result_of(2, 0.1, name="test")])
    assert not best.consider([result_of(3, 0.8)])
    assert best.in_checkpoint("checkpoint-00000003") == best.record
    assert best.consider([result_of(4, 0.7)])
    assert (best.in_checkpoint("checkpoint-00000004-2") or RECORD).checkpoint == "checkpoint-00000004-2"


@pytest.mark.parametrize("metric", ["wer", "cer", "loss"])
def test_the_metric_of_the_settings_decides(metric: str) -> None:
    best = Best(settings_of(metric))
    assert best.consider([result_of(1, 0.8)])
    assert best.record is not None
    assert best.record.value == {"wer": 0.8, "cer": 0.5, "loss": 2.0}[metric]
    assert best.consider([changed(result_of(2, 0.8), {metric: 0.3})])


def test_without_save_best_nothing_is_wanted() -> None:
    best = Best(replace(settings_of(), save_best=None))
    assert not best.consider([result_of(1, 0.1)])
    assert best.in_checkpoint("checkpoint-00000001") is None


@pytest.mark.parametrize("changes", [{"trap": "repeats itself"}, {"wer": math.nan}, {"wer": math.inf}, {"wer": None}])
def test_what_is_no_result_is_never_the_best(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    best = Best(settings_of())
    with caplog.at_level(logging.WARNING):
        assert not best.consider([changed(result_of(1, 0.1), changes)])
    assert ('train.save_best = "wer", and dev has none' in caplog.text) == ("wer" in changes and changes["wer"] is None)
    assert best.record is None


@given(
    values=st.lists(st.none() | st.floats(min_value=0) | st.just(math.nan), max_size=12),
    traps=st.sets(st.integers(0, 11)),
)
def test_best_is_the_first_of_the_lowest(values: list[float | None], traps: set[int]) -> None:
    best = Best(settings_of())
    for step, value in enumerate(values):
        if best.consider([result_of(step, value, trap="trap" if step in traps else None)]):
            best.in_checkpoint(f"checkpoint-{step:08d}")
    usable = [
        (value, step)
        for step, value in enumerate(values)
        if value is not None and math.isfinite(value) and step not in traps
    ]
    assert (None if best.record is None else (best.record.value, best.record.step)) == min(usable, default=None)


def test_a_checkpoints_record_is_taken_up() -> None:
    best = Best(settings_of())
    best.go_on(RECORD, found=["checkpoint-00000005"])
    assert not best.consider([result_of(6, 0.6)])
    assert best.consider([result_of(7, 0.4)])


@pytest.mark.parametrize(
    ("record", "found", "message"),
    [
        (RECORD, [], "checkpoint-00000005, wer 0.5000 on dev.* is not in the run folder any more"),
        (replace(RECORD, metric="loss"), ["checkpoint-00000005"], "chosen by loss on dev, and now wer on dev"),
        (replace(RECORD, name="test"), ["checkpoint-00000005"], "chosen by wer on test, and now wer on dev"),
    ],
)
def test_a_record_that_cannot_be_compared_is_forgotten(
    record: BestRecord, found: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    best = Best(settings_of())
    with caplog.at_level(logging.WARNING):
        best.go_on(record, found=found)
    assert best.record is None
    assert re.search(message, caplog.text)
