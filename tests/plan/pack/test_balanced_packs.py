"""Packs of like cost come together: the same packs, groups of equal work, an order that ranks step through alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.plan import PackConfig, PackCosts
from forebay.errors import PlanError
from forebay.plan.make import Samples, make_plan, samples_of
from forebay.plan.pack.alike_packs import StepSpread, in_groups, learnt_tokens, pack_costs
from forebay.plan.pack.pack_plan import PackPlan
from forebay.store.cache import open_cache
from forebay.store.selection import Selection
from tests.plan.packs import packs_of, photos_and_text
from tests.train.tiny_vl import FakeVlSource, conversations
from tests.train.vl_cache import make_vl_cache

Array = np.ndarray[Any, Any]


def plan_of(tokens: Array, patches: Array, learnt: Array | None, **settings: Any) -> PackPlan:
    images = (patches > 0).astype(np.int64)
    samples = Samples(
        tokens=lambda: tokens,
        patches=lambda: patches,
        images=lambda: images,
        learnt=None if learnt is None else lambda: learnt,
    )
    plan = make_plan(samples, PackConfig(seq_len=8192, **settings))
    assert isinstance(plan, PackPlan)
    return plan


def mixes() -> dict[str, tuple[Array, Array, Array]]:
    rng = np.random.default_rng(0)
    photos, patches = photos_and_text(8000, text_share=0.1)
    shown = rng.integers(160, 281, 8000)
    questions = shown + rng.integers(40, 121, 8000)
    both = {"photos": (photos, patches), "VQA": (questions, 4 * shown)}
    return {
        name: (tokens, seen, np.maximum((tokens - seen // 4) * rng.uniform(0.1, 0.6, 8000), 1).astype(np.int64))
        for name, (tokens, seen) in both.items()
    }


@pytest.mark.parametrize("name", ["photos", "VQA"])
def test_the_packs_of_a_step_cost_and_learn_alike(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens, patches, learnt = mixes()[name]
    vision = PackCosts(token=0, token_squared=0)
    with caplog.at_level(logging.INFO):
        plan = plan_of(tokens, patches, learnt, balance="cost", costs=vision)
    plain = plan_of(tokens, patches, None)
    assert {tuple(pack.tolist()) for pack in packs_of(plan)} == {tuple(pack.tolist()) for pack in packs_of(plain)}
    costs = patches + patches.astype(float) ** 2 / 6912
    for epoch in range(2):
        batches = plan.order(3, epoch).batches(range(plan.num_batches))
        assert len({int(batch[0]) for batch in batches}) == plan.num_batches
        steps = np.array([[costs[b].sum() for b in batches], [learnt[b].sum() for b in batches]])
        steps = steps[:, : len(batches) // 8 * 8].reshape(2, -1, 8)
        spread = (steps.std(2) / steps.mean(2)).mean(1)
        assert spread[0] <= 0.03
        assert spread[1] <= 0.1
    assert "balance over 8 ranks, as coefficients of variation: cost 0.0" in caplog.text


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 99))
def test_an_order_has_every_pack_once_and_groups_stay_together(count: int, lockstep: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost, learnt = rng.random(count), rng.random(count)
    order = in_groups(cost, learnt, lockstep=lockstep)
    assert sorted(order.tolist()) == list(range(count))
    tokens = rng.integers(5000, 8000, count)  # a pack a sample
    plan = plan_of(tokens, np.zeros(count, np.int64), tokens, balance="cost", lockstep=lockstep)
    groups = [set(plan.members[start : start + lockstep].tolist()) for start in range(0, count, lockstep)]
    samples = [int(batch[0]) for batch in plan.order(seed, 1).batches(range(count))]
    found = [set(samples[start : start + lockstep]) for start in range(0, count, lockstep)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, groups))
    assert [int(plan.order(seed, 1).batch(place)[0]) for place in range(count)] == samples


def test_a_cost_is_that_of_a_plain_loop() -> None:
    costs = PackCosts(patch=2, patch_squared=0.5, token=3, token_squared=0.25)
    tokens, patches, images = np.array([10, 20, 30]), np.array([8, 0, 16]), np.array([2, 0, 1])
    seen = {"tokens": tokens, "patches": patches, "images": images}
    found = pack_costs(np.array([2, 0, 1]), np.array([0, 2, 3]), **seen, costs=costs)
    lengths = zip(tokens, patches, images, strict=True)
    own = [2 * p + 0.5 * p * p / max(k, 1) + 3 * n + 0.25 * n * n for n, p, k in lengths]
    assert found.tolist() == [own[2] + own[0], own[1]]
    assert StepSpread.of(found, found, np.array([0, 1])) == StepSpread(0.0, 0.0)  # fewer than the ranks


def test_learnt_tokens_are_read_of_the_cache_and_of_nothing_else(tmp_path: Path) -> None:
    samples = conversations(1, 20)
    cache = open_cache(make_vl_cache(tmp_path, samples, rows_per_shard=3))
    wanted = [int(np.count_nonzero(sample["label_mask"])) for sample in samples]
    assert learnt_tokens(cache).tolist() == wanted
    some = Selection(cache, np.array([3, 7, 19]), key="k")
    assert learnt_tokens(some).tolist() == [wanted[3], wanted[7], wanted[19]]
    settings = PackConfig(seq_len=200, balance="cost", lockstep=2)
    plan = make_plan(samples_of(cache), settings)
    assert isinstance(plan, PackPlan)
    assert plan.lockstep == 2
    with pytest.raises(PlanError, match='balance = "cost" needs the tokens that each sample learns'):
        make_plan(samples_of(FakeVlSource(samples)), settings)
    with pytest.raises(ValueError, match='lockstep and costs of packs are of balance = "cost"'):
        PackConfig(seq_len=200, lockstep=4)
