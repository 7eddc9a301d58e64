"""The simulator of a node's shard cache: its policies, its traces of real orders, and its model of a link."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import remote_sim
from benchmarks.remote_sim import Feed, Trace, made_plan, node_positions, step_starts, trace
from benchmarks.shard_cache import POLICIES, next_uses, simulate
from forebay.plan.bucket_plan import Order, ShardOrder
from forebay.plan.cursor import Cursor
from forebay.plan.shard_line import locality_window
from forebay.store.layout import Ints

used = st.lists(st.integers(0, 12), max_size=80).map(lambda shards: np.array(shards, dtype=np.int64))
few_used = st.lists(st.integers(0, 5), max_size=14).map(lambda shards: np.array(shards, dtype=np.int64))


def fewest_fetches(uses: Ints, capacity: int) -> int:
    """Returns what no policy can do better: every choice of a victim at every miss is tried."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for shard in uses.tolist():
        following: dict[frozenset[int], int] = {}
        for resident, cost in costs.items():
            if shard in resident:
                ways, paid = [resident], cost
            else:
                kept = [resident] if len(resident) < capacity else [resident - {victim} for victim in resident]
                ways, paid = [rest | {shard} for rest in kept], cost + 1
            for way in ways:
                following[way] = min(paid, following.get(way, paid))
        costs = following
    return min(costs.values())


@given(few_used, st.integers(1, 4))
def test_belady_is_the_offline_optimum(uses: Ints, capacity: int) -> None:
    assert simulate(uses, capacity=capacity, policy="belady").fetches == fewest_fetches(uses, capacity)


@given(used, st.integers(1, 14))
def test_belady_never_fetches_more_than_the_others(uses: Ints, capacity: int) -> None:
    found = {policy: simulate(uses, capacity=capacity, policy=policy).fetches for policy in POLICIES}
    assert found["belady"] <= min(found["lru"], found["fifo"])


@pytest.mark.parametrize("policy", list(POLICIES))
@given(used, st.integers(1, 14))
def test_what_is_resident_is_never_more_than_fits(policy: str, uses: Ints, capacity: int) -> None:
    """Misses and victims, played again: a hit is resident, a miss is not, a victim was."""
    result = simulate(uses, capacity=capacity, policy=policy)
    resident: set[int] = set()
    for shard, missed, victim in zip(uses.tolist(), result.missed.tolist(), result.victims.tolist(), strict=True):
        assert missed == (shard not in resident)
        if victim >= 0:
            assert missed
            assert len(resident) == capacity
            resident.remove(victim)
        resident.add(shard)
        assert len(resident) <= capacity


@pytest.mark.parametrize("policy", list(POLICIES))
@given(used)
def test_with_room_for_all_each_shard_is_fetched_once(policy: str, uses: Ints) -> None:
    distinct = len(np.unique(uses))
    result = simulate(uses, capacity=max(distinct, 1), policy=policy)
    assert result.fetches == distinct
    assert (result.victims == -1).all()


def test_a_cache_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="a cache of 0 shards holds none that is used"):
        simulate(np.arange(3), capacity=0, policy="lru")


@given(used)
def test_next_uses_are_those_that_a_search_finds(uses: Ints) -> None:
    line = uses.tolist()
    for place, following in enumerate(next_uses(uses).tolist()):
        later = [other for other in range(place + 1, len(line)) if line[other] == line[place]]
        assert following == (later[0] if later else 2 * len(line) - place)


def test_of_shards_that_are_not_used_again_the_longest_unused_goes_first() -> None:
    result = simulate(np.array([3, 1, 2, 4, 5]), capacity=3, policy="belady")
    assert result.victims.tolist() == [-1, -1, -1, 3, 1]


@pytest.mark.parametrize(("window", "kind"), [(None, Order), (8, ShardOrder)])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_trace_is_what_the_ranks_of_a_node_read(window: int | None, kind: type[Order], nodes: int) -> None:
    plan = made_plan(num_shards=40, shard_samples=60, batch_seconds=30.0, window=window)
    assert type(plan.order(0, 0)) is kind
    steps = trace(plan, node_positions(plan, nodes=nodes, ranks=2), epochs=range(2))
    cursors = [Cursor(plan, "key", seed=0, rank=rank, world=2 * nodes) for rank in range(2)]
    walked = [list(cursor.walk()) + list(_next_epoch(cursor)) for cursor in cursors]
    assert len(steps.sizes) == len(walked[0])
    for number, at_once in enumerate(zip(*walked, strict=True)):
        samples = np.concatenate([step.samples for step in at_once])
        assert steps.sizes[number] == len(samples)
        assert sorted(steps.uses[steps.steps == number]) == np.unique(samples).tolist()


def _next_epoch(cursor: Cursor) -> Any:
    cursor.set_epoch(1)
    return cursor.walk()


def test_within_the_window_of_its_bound_a_node_fetches_each_shard_about_once() -> None:
    num_shards, held = 400, 60
    window = locality_window(held, shard_bytes=1, ranks=8, ahead_shards=1)
    assert window == 34
    plan = made_plan(num_shards=num_shards, shard_samples=500, batch_seconds=60.0, window=window)
    steps = trace(plan, node_positions(plan, nodes=1, ranks=8))
    assert simulate(steps.uses, capacity=held, policy="belady").fetches <= 1.05 * num_shards
    # A global shuffle pays a fetch for a good part of its samples.
    plan = made_plan(num_shards=num_shards, shard_samples=500, batch_seconds=60.0, window=None)
    steps = trace(plan, node_positions(plan, nodes=1, ranks=8))
    assert simulate(steps.uses, capacity=held, policy="belady").fetches >= 100 * num_shards


def test_a_mixture_of_twelve_languages_fetches_each_shard_about_once_a_pass() -> None:
    found = remote_sim.mixture_rows(num_shards=500, shard_samples=12, batch_seconds=60.0, held=(1050, 300))
    assert [row["order"] for row in found] == ["shards:58", "shards:58", "shards:16", "shards:16"]
    assert max(row["fetches a shard and pass"] for row in found) <= 1.3


def test_the_ratios_of_the_issue() -> None:
    rows = {(row["order"], row["policy"]): row for row in remote_sim.small_rows(remote_sim.SMALL)}
    assert rows["global", "belady"]["bytes x lru"] <= 0.45
    assert rows["shards:16", "belady"]["bytes x lru"] <= 0.8
    assert rows["shards:64", "belady"]["bytes x lru"] <= 0.8
    assert rows["global", "lru"]["fetches a shard and epoch"] == pytest.approx(100, abs=1)
    assert rows["shards:64", "belady"]["fetches a shard and epoch"] == pytest.approx(2 / 3, abs=0.01)


def one_shard_a_step(uses: list[int]) -> Trace:
    return Trace(uses=np.array(uses), steps=np.arange(len(uses)), sizes=np.ones(len(uses), dtype=np.int64))


def starts_of(uses: list[int], feed: Feed, *, capacity: int = 9) -> list[float]:
    steps = one_shard_a_step(uses)
    return step_starts(steps, simulate(steps.uses, capacity=capacity, policy="belady"), feed)


def test_a_link_faster_than_the_steps_is_waited_for_once() -> None:
    assert starts_of([0, 1, 2, 3], Feed(fetch_s=1.0, step_s=2.0)) == [1.0, 3.0, 5.0, 7.0]


def test_a_slower_link_is_waited_for_at_every_step_and_hits_are_free() -> None:
    assert starts_of([0, 1, 2, 3], Feed(fetch_s=3.0, step_s=1.0)) == [3.0, 6.0, 9.0, 12.0]
    assert starts_of([0, 0, 0, 1], Feed(fetch_s=3.0, step_s=1.0)) == [3.0, 4.0, 5.0, 6.0]


def test_a_loader_that_knows_the_plan_downloads_before_its_batches_are_filled() -> None:
    uses = [0] * 10 + [1, 2, 3]
    late = starts_of(uses, Feed(fetch_s=4.0, step_s=1.0, batches=1))
    assert late[9:] == [13.0, 17.0, 21.0, 25.0]
    assert starts_of(uses, Feed(fetch_s=4.0, step_s=1.0, batches=1, ahead=1))[9:] == [13.0, 14.0, 18.0, 22.0]
    assert starts_of(uses, Feed(fetch_s=4.0, step_s=1.0, batches=1, ahead=4))[9:] == [13.0, 14.0, 15.0, 16.0]


def test_a_shard_comes_after_the_last_use_of_the_one_that_it_replaces() -> None:
    uses = [0, 0, 0, 1]
    assert starts_of(uses, Feed(fetch_s=2.0, step_s=1.0, ahead=4), capacity=2) == [2.0, 3.0, 4.0, 5.0]
    assert starts_of(uses, Feed(fetch_s=2.0, step_s=1.0, ahead=4), capacity=1) == [2.0, 3.0, 4.0, 6.0]
    # Room for one shard more than the cache has: it comes at once.
    assert starts_of(uses, Feed(fetch_s=2.0, step_s=1.0, ahead=4, spare=1), capacity=1) == [2.0, 3.0, 4.0, 5.0]


def test_a_tiny_run_prints_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert remote_sim.main(["--tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in document["small"]} == set(POLICIES)
    assert {row["nodes"] for row in document["fetches"]} == {1, 2}
    assert len(document["windows"]) == 6
    assert all(0 <= row["2 nodes"] < 1 for row in document["stalls"])
