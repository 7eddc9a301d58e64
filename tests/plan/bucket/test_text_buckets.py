"""Samples without audio: buckets of their own by tokens, behind those by duration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig, WindowConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.make import Samples, kept_plan, make_plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_folder, plan_key
from forebay.plan.statistics import batch_statistics
from forebay.plan.window import WindowPlan

RATE = 1000
SETTINGS = BucketConfig(edges_s=(1.0, 2.0), edges=(8, 16, 32), batch_seconds=4.0, batch_tokens=64, lockstep=1)
Array = np.ndarray[Any, Any]


@st.composite
def mixed_lengths(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    """Durations, tokens and which samples have no audio, one of them at least."""
    heard = draw(st.lists(st.integers(1, 3000), max_size=40))
    count = draw(st.integers(1, 40))
    tokens = draw(st.lists(st.integers(1, 60), min_size=len(heard) + count, max_size=len(heard) + count))
    place = np.array(draw(st.permutations(range(len(heard) + count))))
    durations = np.array([*heard, *[0] * count], np.int32)[place]
    return durations, np.array(tokens, np.int32), durations == 0


def plan_of(lengths: tuple[Array, Array, Array], settings: BucketConfig = SETTINGS) -> BucketPlan:
    durations, tokens, texts = lengths
    return bucket_plan(durations, sample_rate_hz=RATE, settings=settings, tokens=tokens, texts=texts)


@given(mixed_lengths(), st.sampled_from([SETTINGS, BucketConfig(k=3, batch_tokens=64, batch_seconds=4.0, lockstep=1)]))
def test_every_sample_is_in_one_bucket_of_its_kind_and_length(
    lengths: tuple[Array, Array, Array], settings: BucketConfig
) -> None:
    durations, tokens, texts = lengths
    plan = plan_of(lengths, settings)
    assert np.array_equal(np.sort(plan.members), np.arange(len(durations)))
    assert len(plan.batch_sizes) == len(plan.edges_s) + len(plan.edges)
    assert bool(plan.edges_s) == (not texts.all())
    for bucket, (start, stop) in enumerate(zip(plan.offsets[:-1], plan.offsets[1:], strict=True)):
        own, number = plan.members[start:stop], bucket - len(plan.edges_s)
        assert (texts[own] == (number >= 0)).all()
        if number >= 0 and len(own):
            assert tokens[own].min() >= (0, *plan.edges)[number]
            assert number == len(plan.edges) - 1 or tokens[own].max() < plan.edges[number]
        # A budget of tokens holds for all, of seconds for what has them.
        if len(own) and plan.batch_sizes[bucket] > 1:
            assert plan.batch_sizes[bucket] * tokens[own].max() <= 64
            assert plan.batch_sizes[bucket] * durations[own].max() <= 4 * RATE


@given(mixed_lengths())
def test_audio_is_planned_as_it_is_alone(lengths: tuple[Array, Array, Array]) -> None:
    durations, tokens, texts = lengths
    if texts.all():
        return
    plan = plan_of(lengths)
    alone = bucket_plan(durations[~texts], sample_rate_hz=RATE, settings=SETTINGS, tokens=tokens[~texts])
    assert plan.edges_s == alone.edges_s
    assert plan.batch_sizes[:2].tolist() == alone.batch_sizes.tolist()
    assert np.flatnonzero(~texts)[alone.members].tolist() == plan.members[: plan.offsets[2]].tolist()


def test_figures_are_those_of_tokens_and_of_seconds_by_bucket() -> None:
    lengths = (np.array([500, 1500, 0, 0]), np.array([5, 9, 10, 12]), np.array([False, False, True, True]))
    plan = plan_of(lengths)
    found = batch_statistics(plan, lengths[0], frames=np.array([50, 150, 10, 12]))
    names = [bucket["range"] for bucket in found["buckets"]]
    assert names == ["0.0-1.0s", "1.0-2.0s", "0-8 tokens", "8-16 tokens", "16-32 tokens"]
    assert [bucket["samples"] for bucket in found["buckets"]] == [1, 1, 0, 2, 0]
    assert found["buckets"][3]["padding"] == pytest.approx(2 / 24, abs=1e-6)


@pytest.mark.parametrize("settings", [SETTINGS, BucketConfig(k=2, batch_size=3, lockstep=1)])
@pytest.mark.parametrize("count", [0, 20])
def test_a_plan_comes_back_from_disk_as_it_was(tmp_path: Path, settings: BucketConfig, count: int) -> None:
    rng = np.random.default_rng(0)
    durations = np.concatenate([rng.integers(1, 3000, count), np.zeros(30, np.int64)])
    plan = plan_of((durations, rng.integers(1, 60, count + 30), durations == 0), settings)
    folder = tmp_path / "plan"
    save_plan(plan, folder, cache_key="a" * 64, settings=settings, statistics=batch_statistics(plan, durations))
    again = load_plan(folder, cache_key="a" * 64, settings=settings)
    assert isinstance(again, BucketPlan)
    assert (again.edges_s, again.edges) == (plan.edges_s, plan.edges)
    positions = range(plan.num_batches)
    for one, two in zip(plan.order(3, 1).batches(positions), again.order(3, 1).batches(positions), strict=True):
        assert one.tolist() == two.tolist()


def test_a_plan_of_text_alone_is_kept_and_found(tmp_path: Path) -> None:
    tokens = np.arange(1, 41)

    def resolve() -> tuple[Any, Path | None]:
        samples = Samples(
            durations=np.zeros(40, np.int32),
            sample_rate_hz=RATE,
            frames=lambda: tokens,
            tokens=lambda: tokens,
            texts=np.ones(40, bool),
        )
        name: dict[str, Any] = {"cache_key": "b" * 64, "settings": SETTINGS}
        return kept_plan(plan_folder(tmp_path, dataset="texts", split="train", **name), samples, **name)

    first, second = resolve(), resolve()
    assert first[1] == second[1]
    assert first[0].batch_sizes.tolist() == second[0].batch_sizes.tolist() == [9, 4, 1]


def test_windows_of_text_alone_are_sorted_by_tokens() -> None:
    tokens = np.random.default_rng(1).permutation(64)
    settings = WindowConfig(batch_size=4, window=16, lockstep=1)
    samples = Samples(
        durations=np.zeros(64, np.int32), sample_rate_hz=RATE, tokens=lambda: tokens, texts=np.ones(64, bool)
    )
    plan = make_plan(samples, settings)
    assert isinstance(plan, WindowPlan)
    spans = [np.ptp(tokens[batch]) for batch in plan.order(0, 0).batches(range(16))]
    assert max(spans) == 3  # one window holds all, so a batch holds four texts that follow each other in length
    with pytest.raises(PlanError, match=r'kind = "window" sorts by one length, and 64 of 64 samples have no audio'):
        make_plan(samples, WindowConfig(batch_seconds=4.0))
    some = dataclasses.replace(samples, texts=np.arange(64) < 3)
    with pytest.raises(PlanError, match=r"and 3 of 64 samples have no audio; give plan.batch_size for text alone"):
        make_plan(some, settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (BucketConfig(batch_tokens=64), r"2 samples have no audio, .* give plan.edges in tokens \(they have 5 to 9\)"),
        (BucketConfig(edges=(8,), batch_seconds=4.0), r"batch_seconds = 4.0 is no budget for 2 samples without audio"),
        (BucketConfig(edges=(8, 16), batch_size=(4, 4, 4)), r"batch_size has 3 entries, these lengths have 2 buckets"),
    ],
)
def test_settings_that_plan_no_text(settings: BucketConfig, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of((np.zeros(2, np.int32), np.array([5, 9]), np.ones(2, bool)), settings)


def test_text_without_tokens_has_no_length() -> None:
    with pytest.raises(PlanError, match=r"2 samples have no audio and no tokens"):
        bucket_plan(np.zeros(2, np.int32), sample_rate_hz=RATE, settings=SETTINGS, texts=np.ones(2, bool))


def test_edges_are_in_the_key_where_they_are_given() -> None:
    plain = BucketConfig(edges_s=(1.0,), batch_size=4)
    assert plan_key("a", dataclasses.replace(plain, edges=(8,))) != plan_key("a", plain)
    assert plan_key("a", dataclasses.replace(plain, edges=None)) == plan_key("a", plain)


@pytest.mark.parametrize("edges", [(), (0,), (8, 8), (9, 8)])
def test_edges_that_do_not_rise(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"edges must rise from above 0"):
        BucketConfig(edges=edges, batch_size=4)
