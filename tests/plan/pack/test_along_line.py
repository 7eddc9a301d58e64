"""The packer along a line: against the best subsets, and against greedy packers that see as many samples."""

from __future__ import annotations

import logging
from itertools import combinations
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan_pack import LENGTHS, SEQ_LEN, first_fit, largest_first, next_fit, uniform
from forebay.config import PackConfig
from forebay.plan.pack.along_line import stream_packs
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from tests.plan.packs import packs_of, photos_and_text

Array = np.ndarray[Any, Any]
BUFFERS = (8, 16, 32, 64, 128, 256)


def packs_along(tokens: Array, *, seq_len: int, buffer_size: int, **more: Any) -> list[list[int]]:
    settings = {"patches": None, "max_patches": None, **more}
    places, ends = stream_packs(tokens, seq_len=seq_len, buffer_size=buffer_size, **settings)
    return [places[start:end].tolist() for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def made(tokens: Array, buffer_size: int) -> PackPlan:
    return pack_plan(tokens, settings=PackConfig(seq_len=SEQ_LEN, buffer_size=buffer_size))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(60, 130))
def test_a_pack_is_the_oldest_and_the_best_subset_of_those_in_sight(lengths: list[int], seq_len: int) -> None:
    tokens = np.array(lengths)
    if tokens.mean() * 8 <= seq_len:
        return  # such packs begin with the oldest as they come
    first = packs_along(tokens, seq_len=seq_len, buffer_size=len(lengths))[0]
    others = range(1, len(lengths))
    sums = [lengths[0] + sum(lengths[n] for n in some) for k in range(len(lengths)) for some in combinations(others, k)]
    assert 0 in first
    assert tokens[first].sum() == max(total for total in sums if total <= seq_len)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(60, 200), st.integers(1, 20))
def test_at_an_infinite_price_packs_are_those_of_the_greedy_loop(
    lengths: list[int], seq_len: int, buffer_size: int
) -> None:
    tokens = np.array(lengths)
    found = packs_along(tokens, seq_len=seq_len, buffer_size=buffer_size, price=inf)
    assert found == largest_first(tokens, seq_len=seq_len, buffer_size=buffer_size)


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(60, 200), st.integers(1, 20), st.floats(0, 3))
def test_at_any_price_every_sample_is_in_one_pack(
    lengths: list[int], seq_len: int, buffer_size: int, price: float
) -> None:
    tokens = np.array(lengths, dtype=np.int64)
    found = packs_along(tokens, seq_len=seq_len, buffer_size=buffer_size, price=price)
    assert sorted(place for pack in found for place in pack) == list(range(len(lengths)))
    assert all(tokens[pack].sum() <= seq_len for pack in found)


@given(st.sampled_from(sorted(LENGTHS)), st.integers(1, 900), st.sampled_from(BUFFERS), st.integers(0, 2**32))
def test_no_greedy_packer_with_the_same_promise_needs_fewer_packs(
    name: str, count: int, buffer_size: int, seed: int
) -> None:
    tokens = LENGTHS[name](count, seed=seed)
    greedy = largest_first(tokens, seq_len=SEQ_LEN, buffer_size=buffer_size)
    assert made(tokens, buffer_size).num_batches <= len(greedy)


@pytest.mark.parametrize("name", sorted(LENGTHS))
@pytest.mark.parametrize("buffer_size", BUFFERS)
@pytest.mark.few
def test_packs_of_any_buffer_are_as_full_as_greedy_ones(name: str, buffer_size: int) -> None:
    tokens = LENGTHS[name](6000)
    plan = made(tokens, buffer_size)
    greedy = [largest_first(tokens, seq_len=SEQ_LEN, buffer_size=buffer_size), next_fit(tokens)]
    if buffer_size >= 16:  # a packer with open packs holds more samples than are in sight here
        greedy.append(first_fit(tokens, open_packs=buffer_size))
    assert plan.num_batches <= min(len(packs) for packs in greedy)


@pytest.mark.parametrize(("buffer_size", "fill"), [(8, 0.9), (64, 0.97), (256, 0.99)])
@pytest.mark.few("8-0.9")
def test_large_samples_do_not_stay_alone(buffer_size: int, fill: float) -> None:
    tokens = uniform(20_000)
    plan = made(tokens, buffer_size)
    assert tokens.sum() / plan.num_batches / SEQ_LEN >= fill


@pytest.mark.parametrize("max_patches", [24_576, 16_384])
def test_text_without_images_fills_what_images_leave(max_patches: int) -> None:
    tokens, patches = photos_and_text(8000, text_share=0.3)
    settings = PackConfig(seq_len=SEQ_LEN, buffer_size=64, max_patches=max_patches)
    packs = packs_of(pack_plan(tokens, patches=patches, settings=settings))
    least = max(tokens.sum() / SEQ_LEN, patches.sum() / max_patches)
    assert least / len(packs) >= 0.985


def test_a_buffer_smaller_than_a_pack_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    tokens = np.full(3000, SEQ_LEN // 20)
    with caplog.at_level(logging.WARNING, logger="forebay"):
        plan = made(tokens, 8)
        made(tokens, 64)
    assert len(tokens) / plan.num_batches == 20
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "plan.buffer_size is 8, and a pack of plan.seq_len = 8192 holds 20.0 samples; packs are 99.85 % full: with "
        "more samples in sight they are fuller; set plan.buffer_size = 80, or 0 for all samples"
    )
