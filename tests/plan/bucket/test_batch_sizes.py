from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import ConfigError, PlanError
from forebay.plan.make import Samples, make_plan
from forebay.plan.make_buckets import Limit, batch_sizes, bucket_plan
from forebay.plan.statistics import batch_statistics

RATE = 10
LENGTHS = np.array([10, 12, 25, 29, 41, 44])  # seconds / 10
TOKENS = np.array([3, 9, 2, 5, 1, 1])


def written(tmp_path: Path, table: Any) -> str:
    path = tmp_path / "calibration.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return str(path)


def test_a_calibration_gives_sizes_and_steps(tmp_path: Path) -> None:
    table = {
        "1": {"batch_size": 4, "grad_acc": 2},
        "0": {"batch_size": 8},
        "2": {"batch_size": 1, "grad_acc": 5, "gib": 3},
    }
    settings = BucketConfig(edges_s=(2, 4, 6), calibration=written(tmp_path, table))
    plan = bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=settings)
    assert plan.batch_sizes.tolist() == [8, 4, 1]
    assert plan.grad_accs == (1, 2, 5)
    assert [bucket["grad_acc"] for bucket in batch_statistics(plan, LENGTHS)["buckets"]] == [1, 2, 5]


def test_without_a_calibration_the_plan_says_nothing_about_steps() -> None:
    plan = bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=BucketConfig(batch_size=2))
    assert plan.grad_accs is None
    assert "grad_acc" not in batch_statistics(plan, LENGTHS)["buckets"][0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", r"calibration\.json is not JSON"),
        ([], r"calibration\.json holds a list, wanted \{\"b_0_3\": \{\"batch_size\": 40"),
        ({"0": 4, "1": {}}, r"bucket 0 is 4, wanted"),
        ({"0": {"grad_acc": 2}}, r"bucket 0: batch_size is None, wanted 1 or more"),
        ({"0": {"batch_size": 0}}, r"bucket 0: batch_size is 0, wanted 1 or more"),
        ({"0": {"batch_size": True}}, r"bucket 0: batch_size is True, wanted 1 or more"),
        ({"0": {"batch_size": 3, "grad_acc": 1.5}}, r"bucket 0: grad_acc is 1\.5, wanted 1 or more"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, table: Any, message: str) -> None:
    settings = BucketConfig(edges_s=(2,), calibration=written(tmp_path, table))
    with pytest.raises(ConfigError, match=message):
        bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=settings)


@pytest.mark.parametrize("names", [("b_0_2", "b_2_4", "b_4_6.5"), ("b_0_2", "1", "b_4_6.5")])
def test_buckets_are_called_by_name_or_index(tmp_path: Path, names: tuple[str, ...]) -> None:
    table = {name: {"batch_size": 8 - bucket, "grad_acc": bucket + 1} for bucket, name in enumerate(names)}
    settings = BucketConfig(edges_s=(2, 4, 6.5), calibration=written(tmp_path, dict(reversed(table.items()))))
    plan = bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=settings)
    assert plan.batch_sizes.tolist() == [8, 7, 6]
    assert plan.grad_accs == (1, 2, 3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("0", "7"), r"missing b_2_4, b_4_6; unknown '7'; wanted b_0_2, b_2_4, b_4_6, or their indices 0 to 2"),
        (("b_0_2", "b_2_4", "b_4_8"), r"missing b_4_6; unknown 'b_4_8'; wanted b_0_2, b_2_4, b_4_6"),
        (("0", "1", "2", "b_6_8"), r"missing none; unknown 'b_6_8'; wanted"),
        (("0", "1", "9" * 30), r"missing b_4_6; unknown '999"),
        (("b_0_2", "0", "1"), r"b_0_2 and 0 are one bucket; leave one of them out"),
        ((), r"missing b_0_2, b_2_4, b_4_6; unknown none"),
    ],
)
def test_a_calibration_of_other_buckets_is_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    path = written(tmp_path, {name: {"batch_size": 3} for name in names})
    with pytest.raises(PlanError, match=message):
        bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=BucketConfig(edges_s=(2, 4, 6), calibration=path))


def test_the_buckets_of_texts_are_called_by_index(tmp_path: Path) -> None:
    texts = np.array([False, False, True, True, False, True])
    table = {"b_0_2": {"batch_size": 5}, "b_2_6": {"batch_size": 4}, "2": {"batch_size": 3}, "3": {"batch_size": 2}}
    settings = BucketConfig(edges_s=(2, 6), edges=(5, 50), calibration=written(tmp_path, table))
    plan = bucket_plan(np.where(texts, 0, LENGTHS), sample_rate_hz=RATE, settings=settings, tokens=TOKENS, texts=texts)
    assert plan.batch_sizes.tolist() == [5, 4, 3, 2]


def test_token_budgets_follow_the_most_tokens_of_a_bucket() -> None:
    settings = BucketConfig(edges_s=(2, 4, 6), batch_tokens=20)
    plan = bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=settings, tokens=TOKENS)
    assert plan.batch_sizes.tolist() == [2, 4, 20]
    both = BucketConfig(edges_s=(2, 4, 6), batch_tokens=20, batch_seconds=12)
    plan = bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=both, tokens=TOKENS)
    assert plan.batch_sizes.tolist() == [2, 3, 2]  # 20 / 9, 12 / 4, 12 / 4.4


@pytest.mark.parametrize("tokens", [None, lambda: np.zeros(6, dtype=np.int32)])
def test_token_budgets_need_tokens(tokens: Any) -> None:
    samples = Samples(durations=LENGTHS, sample_rate_hz=RATE, tokens=tokens)
    with pytest.raises(PlanError, match=r"plan\.batch_tokens needs a cache with tokens: add a \[text\] section"):
        make_plan(samples, BucketConfig(batch_tokens=20))


def test_tokens_of_another_cache_are_refused() -> None:
    with pytest.raises(PlanError, match="tokens holds 5 samples, durations 6"):
        bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=BucketConfig(batch_tokens=20), tokens=TOKENS[:5])


def test_a_table_for_more_buckets_than_there_are_is_refused() -> None:
    with pytest.raises(PlanError, match=r"batch_size has 8 entries, these lengths have 6 buckets; lower plan\.k"):
        bucket_plan(LENGTHS, sample_rate_hz=RATE, settings=BucketConfig(k=8, batch_size=(2,) * 8))


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=6), st.floats(0.5, 60))
def test_even_sizes_of_optimal_edges_make_no_more_batches(parts: list[tuple[int, int]], budget: float) -> None:
    limits = [Limit(samples=samples, length=length) for samples, length in parts]
    plain = batch_sizes(BucketConfig(batch_seconds=budget), limits, sample_rate_hz=RATE)
    even = batch_sizes(BucketConfig(k=6, batch_seconds=budget), limits, sample_rate_hz=RATE)
    for limit, size, other in zip(limits, plain, even, strict=True):
        assert 1 <= other <= size
        assert -(-limit.samples // other) == -(-limit.samples // size)
        # No smaller size has as few batches.
        assert other == 1 or not limit.samples or -(-limit.samples // (other - 1)) > -(-limit.samples // other)
