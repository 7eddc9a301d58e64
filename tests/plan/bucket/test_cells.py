"""Buckets of two lengths: cells, ranges of seconds with ranges of label tokens."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.config.plan import BucketRange
from forebay.errors import ConfigError, PlanError
from forebay.inspect.plan_lines import cell_lines, cell_rows
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import Cursor
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.in_order import in_order
from forebay.plan.make import Planned, Samples, make_plan, plan_statistics
from forebay.plan.make_buckets import bucket_plan, optimal_cells
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.names import plan_document, plan_folder

RATE, KEY = 1000, "a" * 64
BY: Any = ("duration", "tokens")
GRID = BucketConfig(by=BY, edges_s=(1.0, 2.0), edges=(8, 16), batch_seconds=4.0, lockstep=1)
BEST = BucketConfig(by=BY, k=6, batch_seconds=4.0, lockstep=2)
Array = np.ndarray[Any, Any]


@st.composite
def two_lengths(draw: st.DrawFn, *, most: int = 80, longest: int = 3000) -> tuple[Array, Array]:
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    pools = rng.integers(1, longest, kinds[0]), rng.integers(1, 60, kinds[1])
    durations, tokens = (rng.choice(pool, count) for pool in pools)
    return durations.astype(np.int32), tokens.astype(np.int32)


def plan_of(lengths: tuple[Array, Array], settings: BucketConfig, **more: Any) -> BucketPlan:
    return bucket_plan(lengths[0], sample_rate_hz=RATE, settings=settings, tokens=lengths[1], **more)


def samples_of(lengths: tuple[Array, Array], **more: Any) -> Samples:
    return Samples(durations=lengths[0], sample_rate_hz=RATE, tokens=lambda: lengths[1], **more)


def some_lengths(count: int = 3000) -> tuple[Array, Array]:
    rng = np.random.default_rng(7)
    durations = rng.integers(300, 3000, count)
    return durations, (durations / 100 * rng.gamma(4, 0.25, count)).astype(np.int64) + 1


def cost(durations: Array, tokens: Array, edges: Any, cells: Any, token_cost: int) -> int:
    """Every sample padded to the upper edges of its cell, in a plain loop."""
    total = 0
    for length, held in zip(durations.tolist(), tokens.tolist(), strict=True):
        row = next(row for row, edge in enumerate(edges) if length < edge or row == len(edges) - 1)
        total += edges[row] + token_cost * next(top for top in cells[row] if held < top)
    return total


def every_cut(tops: list[int]) -> list[tuple[int, ...]]:
    inner = tops[:-1]
    return [(*some, tops[-1]) for n in range(len(tops)) for some in itertools.combinations(inner, n)]


def least_tokens(tokens: Array) -> dict[int, int]:
    """The least that tokens are padded to, by the number of cells."""
    if not len(tokens):
        return {0: 0}
    found: dict[int, int] = {}
    for cut in every_cut((np.unique(tokens) + 1).tolist()):
        padded = sum(next(top for top in cut if held < top) for held in tokens.tolist())
        found[len(cut)] = min(padded, found.get(len(cut), padded))
    return found


@example((np.array([2552, 2552, 1533]), np.array([3, 5, 3])), 3, 4)  # more cells than a range has tokens
@given(two_lengths(most=12), st.integers(1, 6), st.integers(1, 200))
def test_no_other_cells_cost_less(lengths: tuple[Array, Array], k: int, token_cost: int) -> None:
    """All cuts of the seconds, and for each all ways to share the cells, by brute force."""
    durations, tokens = lengths
    edges, cells = optimal_cells(durations, tokens, token_cost=token_cost, k=k)
    assert sum(map(len, cells)) <= k
    width = int(durations.max()) // 1024 + 1
    tops = ((np.unique(durations // width) + 1) * width).tolist()
    least = []
    for rows in every_cut(tops):
        own = [tokens[np.searchsorted(rows[:-1], durations, side="right") == row] for row in range(len(rows))]
        ways = [least_tokens(part) for part in own]
        padded = sum(len(part) * top for part, top in zip(own, rows, strict=True))
        for chosen in itertools.product(*(way.items() for way in ways)):
            if sum(n for n, _ in chosen) <= k:
                least.append(padded + token_cost * sum(tokens_padded for _, tokens_padded in chosen))
    assert cost(durations, tokens, edges, cells, token_cost) == min(least)


@given(two_lengths(), st.sampled_from([GRID, BEST, dataclasses.replace(BEST, k=64)]))
def test_every_sample_is_in_the_cell_of_its_lengths(lengths: tuple[Array, Array], settings: BucketConfig) -> None:
    durations, tokens = lengths
    plan = plan_of(lengths, settings)
    assert len(plan.batch_sizes) == len(plan.names) == len(set(plan.names)) == sum(map(len, plan.cells))
    assert np.array_equal(np.sort(plan.members), np.arange(len(durations)))
    last_row = plan.ranges[-1].seconds
    for cell, holds in enumerate(plan.ranges):
        own = plan.members[plan.offsets[cell] : plan.offsets[cell + 1]]
        assert holds.seconds
        assert holds.tokens
        is_last = cell + 1 == len(plan.ranges) or plan.ranges[cell + 1].seconds != holds.seconds
        for values, (low, high), is_open in (
            (durations[own] / RATE, holds.seconds, holds.seconds == last_row),
            (tokens[own], holds.tokens, is_last),
        ):
            assert (values >= low).all()
            assert is_open or (values < high).all()
        longest = durations[own].max(initial=0) + 20 * tokens[own].max(initial=0)
        assert plan.batch_sizes[cell] == 1 or longest * plan.batch_sizes[cell] <= 4 * RATE
        assert settings.k is None or len(own)


@given(two_lengths(), st.sampled_from([GRID, BEST]), st.sampled_from([1, 2, 3, 8]), st.data())
def test_every_sample_once_on_any_ranks_and_after_a_resume(
    lengths: tuple[Array, Array], settings: BucketConfig, world: int, data: st.DataObject
) -> None:
    plan = plan_of(lengths, settings)
    key, used = "k" * 64, Counter[int]()

    def cursors(ranks: int) -> list[Cursor]:
        return [Cursor(plan, key, seed=3, rank=rank, world=ranks) for rank in range(ranks)]

    def walk(ranks: list[Cursor], steps: int) -> dict[str, Any]:
        for cursor in ranks:
            for step in itertools.islice(cursor.walk(), steps):
                used.update(step.samples.tolist() if step.turn.weight else ())
                cursor.hand_out(step)
        return ranks[0].state_dict()

    first = cursors(world)
    state = walk(first, data.draw(st.integers(0, len(first[0]))))
    other = cursors(data.draw(st.sampled_from([1, 2, 3, 8])))
    if state["epoch"] == 0:
        for cursor in other:
            cursor.load_state_dict(state)
        walk(other, 10**6)
    assert used == Counter(range(len(lengths[0])))


def test_ranks_of_a_step_have_cells_of_like_cost() -> None:
    plan = plan_of(some_lengths(), dataclasses.replace(BEST, k=24, lockstep=8))
    order = plan.order(1, 0)
    buckets = order.buckets(np.arange(len(order)))
    costs = plan.sample_costs[buckets] * np.array([len(batch) for batch in order.batches(np.arange(len(order)))])
    full = int((plan.batch_counts // 8).sum()) * 8
    spreads = [np.ptp(costs[at : at + 8]) / costs[at : at + 8].max() for at in range(full, len(order) - 7, 8)]
    line = np.sort(costs[full:])[::-1]
    assert len(spreads) > 3
    assert np.median(spreads) < 0.1 < 0.5 < np.ptp(costs[full:]) / line[0]
    assert any(order.buckets(range(full, len(order))).tolist() != plan.order(2, 0).buckets(range(full, len(order))))


@pytest.mark.parametrize("settings", [GRID, BEST, dataclasses.replace(BEST, locality="shards:4")])
def test_a_plan_on_disk_is_the_one_that_was_saved(tmp_path: Path, settings: BucketConfig) -> None:
    samples = samples_of(some_lengths(300), shards=lambda: np.arange(300) // 16)
    plan = make_plan(samples, settings)
    assert isinstance(plan, BucketPlan)
    folder = plan_folder(tmp_path, dataset="d", split="train", cache_key=KEY, settings=settings)
    statistics = plan_statistics(plan, samples)
    save_plan(plan, folder, cache_key=KEY, settings=settings, statistics=statistics)
    loaded = load_plan(folder, cache_key=KEY, settings=settings)
    assert isinstance(loaded, BucketPlan)
    assert (loaded.names, loaded.cells, loaded.token_cost) == (plan.names, plan.cells, 20)
    orders = [each.order(4, 1).batches(np.arange(plan.num_batches)) for each in (plan, loaded)]
    assert all(np.array_equal(a, b) for a, b in zip(*orders, strict=True))
    assert sum(len(batch) for batch in in_order(Planned(plan=loaded, key=KEY)).plan.order(0, 0).batches([0, 1])) > 1
    tokens = samples.tokens() if samples.tokens else np.zeros(0)
    padded = sum(tokens[batch].max() * len(batch) for batch in plan.order(0, 0).batches(np.arange(plan.num_batches)))
    assert statistics["token_padding"] == pytest.approx(1 - tokens.sum() / padded, abs=1e-6)
    rows = cell_rows(statistics)
    assert [len(row.cells) for row in rows] == list(map(len, plan.cells))
    assert max(cell.shade for row in rows for cell in row.cells) == 1
    assert len(list(cell_lines(statistics))) == len(rows) + 1


def test_names_and_keys() -> None:
    plan = plan_of((np.array([500, 1500, 2500]), np.array([3, 9, 40])), GRID)
    assert plan.names == ["b_0_1_t8", "b_0_1_t16", "b_1_2_t8", "b_1_2_t16"]
    assert BucketRange((3, 5.0), (10, 40)).name(7) == "b_3_5_t40"
    one, cells = (plan_document(KEY, each)["settings"] for each in (BucketConfig(k=6, batch_size=1), BEST))
    assert not {"by", "token_s"} & set(one)
    assert cells["by"] == ["duration", "tokens"]
    assert plan_document(KEY, dataclasses.replace(BEST, token_s=1)) == plan_document(
        KEY, dataclasses.replace(BEST, token_s=1.0)
    )


def test_parts_without_audio_stand_behind_the_cells() -> None:
    texts = np.array([False, True, False, True, True])
    lengths = np.array([500, 0, 1500, 0, 0]), np.array([3, 9, 12, 30, 2])
    plan = plan_of(lengths, GRID, texts=texts)
    assert plan.names == ["b_0_1_t8", "b_0_1_t16", "b_1_2_t8", "b_1_2_t16", "4", "5"]
    assert [plan.members[a:b].tolist() for a, b in itertools.pairwise(plan.offsets)] == [[0], [], [], [2], [4], [1, 3]]
    assert plan.batch_sizes[-2:].tolist() == [4000 // 40, 4000 // 600]  # a token counts as 20 ms
    mixture = mixture_plan(plan, texts.astype(int), names=["heard", "read"], weights=[1, 1])
    assert mixture.class_names == tuple(plan.names)
    assert {int(s) for batch in mixture.order(1, 0).batches(range(mixture.num_batches)) for s in batch} <= set(range(5))


def test_one_length_and_more_cells_than_lengths() -> None:
    same = plan_of((np.full(40, 900), np.arange(40) % 4 + 5), dataclasses.replace(BEST, k=64))
    assert (same.edges_s, same.cells) == ((0.901,), ((6, 7, 8, 9),))
    both = plan_of((np.full(40, 900), np.full(40, 5)), dataclasses.replace(BEST, k=64))
    assert both.bucket_sizes.tolist() == [40]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"by": BY, "edges": (8,)}, None),
        ({"by": BY}, "give one of k, a number of cells, and edges, in tokens, not none"),
        ({"by": BY, "k": 3, "edges": (8,)}, r"not k = 3 and edges = \[8\]"),
        ({"by": ("tokens", "duration"), "k": 3}, r"by is \['tokens', 'duration'\], wanted \[\"duration\"\] or"),
        ({"by": (), "k": 3}, "by is"),
        ({"k": 3, "token_s": 0.1}, "token_s is 0.1 and tokens count nothing; set by"),
        ({"by": BY, "k": 3, "token_s": 0.0}, "token_s is 0.0, wanted more than 0"),
        ({"by": BY, "k": 3, "token_s": float("inf")}, "token_s is inf, wanted more than 0"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert BucketConfig(**settings, batch_size=1).has_cells
        return
    with pytest.raises(ValueError, match=message):
        BucketConfig(**settings, batch_size=1)


def test_samples_that_have_no_such_lengths() -> None:
    durations = np.array([500, 900])
    with pytest.raises(PlanError, match=r"none of 2 samples has tokens; leave plan.by out, or add a \[text\] section"):
        make_plan(samples_of((durations, np.zeros(2, int))), BEST)
    with pytest.raises(PlanError, match="none of 2 samples has audio"):
        make_plan(samples_of((durations, np.ones(2, int)), texts=np.ones(2, bool)), BEST)
    with pytest.raises(PlanError, match="none of 2 samples has audio"):
        make_plan(
            Samples(tokens=lambda: np.array([3, 4]), are_untimed=True, texts=np.ones(2, bool)),
            dataclasses.replace(BEST, batch_seconds=None, batch_size=2),
        )


def test_a_calibration_is_of_these_cells_by_name(tmp_path: Path) -> None:
    lengths, path = (np.array([500, 1500]), np.array([3, 12])), tmp_path / "sizes.json"
    settings = dataclasses.replace(GRID, batch_seconds=None, calibration=str(path))
    names = ["b_0_1_t8", "b_0_1_t16", "b_1_2_t8", "b_1_2_t16"]
    path.write_text(json.dumps({name: {"batch_size": n + 1, "grad_acc": n + 2} for n, name in enumerate(names)}))
    plan = plan_of(lengths, settings)
    assert (plan.batch_sizes.tolist(), plan.grad_accs) == ([1, 2, 3, 4], (2, 3, 4, 5))
    one = {name: {"batch_size": 1} for name in ("b_0_1", "b_1_2")}
    for wrong in (one, {str(n): {"batch_size": 1} for n in range(4)}):  # of one length, by name and by index
        path.write_text(json.dumps(wrong))
        with pytest.raises(PlanError, match=r"is of other buckets: missing b_0_1_t8.*by name, as plan.by has tokens"):
            plan_of(lengths, settings)
    path.write_text(json.dumps({name: {"batch_size": 1} for name in names}))
    with pytest.raises((PlanError, ConfigError), match="unknown 'b_0_1_t8'"):
        bucket_plan(
            lengths[0], sample_rate_hz=RATE, settings=dataclasses.replace(settings, by=("duration",), edges=None)
        )
