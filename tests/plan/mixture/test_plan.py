from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import mixed_steps, num_steps, turn
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.draw import ClassSplit
from forebay.plan.mixture.mixture_plan import MIXTURE_VERSION, MixturePlan, mixture_plan
from forebay.plan.mixture.sources import Assignment
from forebay.plan.permutation import derive_key
from tests.plan.mixture.test_assignment import TWELVE, random_weights

RATE = 1000
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Made:
    """A mixture and what it was made of."""

    plan: MixturePlan
    buckets: BucketPlan
    lengths: Array
    source_of: Array

    def classes(self) -> Array:
        """The length class of every sample."""
        found = np.empty(len(self.lengths), int)
        found[self.buckets.members] = np.repeat(np.arange(len(self.buckets.batch_sizes)), self.buckets.bucket_sizes)
        return found


def make(
    lengths: Array,
    source_of: Array,
    weights: Any,
    *,
    edges_s: tuple[float, ...] = (15.0,),
    batch_size: int | tuple[int, ...] = 4,
    lockstep: int = 1,
    tail: str = "short",
    locality: str = "global",
    shards: Array | None = None,
    **rules: Any,
) -> Made:
    """shards: of the samples; left out: four samples that follow each other lie in one."""
    wanted = BucketConfig(
        edges_s=edges_s,
        batch_size=batch_size,
        lockstep=lockstep,
        tail=tail,  # type: ignore[arg-type]
        locality=locality,
    )
    shards = np.arange(len(lengths)) // 4 if shards is None else shards
    buckets = bucket_plan(lengths, sample_rate_hz=RATE, settings=wanted, shards=shards)
    names = [f"source {number}" for number in range(len(weights))]
    plan = mixture_plan(buckets, source_of, names=names, weights=weights, **rules)
    return Made(plan, buckets, lengths, source_of)


@st.composite
def mixtures(draw: st.DrawFn, *, batches: str | None = None) -> Made:
    """1 to 6 sources, 1 to 5 classes, every rule; `end` only where an epoch has a batch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_sources = draw(st.integers(1, 6))
    num_samples = draw(st.integers(num_sources, 300))
    source_of = np.concatenate([np.arange(num_sources), rng.integers(0, num_sources, num_samples - num_sources)])
    edges = sorted(draw(st.sets(st.integers(1, 14), min_size=1, max_size=5)))
    rules: dict[str, Any] = {
        "edges_s": tuple(map(float, edges)),
        "batch_size": tuple(rng.integers(1, 7, len(edges)).tolist()),
        "lockstep": draw(st.integers(1, 4)),
        "tail": draw(st.sampled_from(["short", "drop", "pad"])),
        "batches": batches or draw(st.sampled_from(["mixed", "per_source"])),
        "locality": draw(st.sampled_from(["global", "shards:1", "shards:4", "shards:16"])),
    }
    # Their sum divides the period, so they are exact and one period is short: the period's own sum takes 0.1 s.
    weights = rng.multinomial(2 ** draw(st.integers(0, 8)), rng.dirichlet(np.full(num_sources, 0.7)))
    lengths = rng.integers(0, 15 * RATE, num_samples)
    if draw(st.booleans()):
        try:
            return make(lengths, source_of, weights, exhausted="end", **rules)
        except PlanError:
            return make(lengths, source_of, weights, **{**rules, "tail": "short"})
    return make(lengths, source_of, weights, **{**rules, "tail": "short"})


def epoch(plan: MixturePlan, number: int, *, seed: int = 3) -> list[Array]:
    order = plan.order(seed, number)
    return order.batches(np.arange(len(order)))


def simulated(plan: MixturePlan, num_groups: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """The first groups of a mixed stream by walking it sample by sample: (class, [(source, class, ordinal), ...])."""
    split = ClassSplit(plan.sizes, derive_key("forebay mixture", MIXTURE_VERSION, "classes"))
    assignment = Assignment(plan.weights)
    waiting: dict[int, list[tuple[int, int, int]]] = {number: [] for number in range(len(plan.batch_sizes))}
    left: list[tuple[int, list[tuple[int, int, int]]]] = []
    place = 0
    while len(left) < num_groups:
        source, its_turn = assignment.locate(np.array([place]))
        label, ordinal = split.locate(source, its_turn)
        line = waiting[int(label[0])]
        line.append((int(source[0]), int(label[0]), int(ordinal[0])))
        if len(line) == plan.batch_sizes[label[0]] * plan.lockstep:
            left.append((int(label[0]), line.copy()))
            line.clear()
        place += 1
    return left


@given(mixtures(batches="mixed"), st.integers(0, 3))
def test_a_mixed_stream_is_what_walking_it_gives(made: Made, first: int) -> None:
    plan, count = made.plan, 4
    walked = simulated(plan, first + count)[first:]
    for group, (label, samples) in enumerate(walked, start=first):
        inside = np.arange(plan.lockstep)
        drawn = plan.draw.batches(np.full(plan.lockstep, group), inside)
        assert list(zip(*(part.tolist() for part in drawn), strict=True)) == samples
        assert plan.draw.classes(np.array([group])).tolist() == [label]


@given(mixtures(), st.integers(0, 5), st.integers(-(2**70), 2**70))
def test_every_batch_is_full_and_of_one_class(made: Made, number: int, seed: int) -> None:
    plan, order = made.plan, made.plan.order(seed, number)
    assert len(order) == plan.num_batches > 0
    labels, classes = order.buckets(np.arange(len(order))), made.classes()
    for label, batch in zip(labels.tolist(), epoch(plan, number, seed=seed), strict=True):
        assert batch.dtype == np.int64
        assert len(batch) == plan.batch_sizes[label]
        assert set(classes[batch].tolist()) == {label}
        if plan.batches == "per_source":
            assert len(set(made.source_of[batch].tolist())) == 1
    groups = labels.reshape(-1, plan.lockstep)
    assert (groups == groups[:, :1]).all()


@given(mixtures(batches="mixed"))
def test_mixed_batches_stay_within_the_bound_over_epochs(made: Made) -> None:
    plan = made.plan
    epochs = 3 if plan.exhausted == "repeat" else 1
    batches = [batch for number in range(epochs) for batch in epoch(plan, number)]
    counts = np.cumsum([np.bincount(made.source_of[batch], minlength=len(plan.names)) for batch in batches], axis=0)
    off = np.abs(counts - counts.sum(1, keepdims=True) * plan.shares)
    assert off.max() < plan.bound
    if plan.sizes[plan.weights > 0].any(axis=0).sum() == 1:
        assert plan.bound == 1
        samples = made.source_of[np.concatenate(batches)]
        running = np.cumsum(samples[:, None] == np.arange(len(plan.names)), axis=0)
        assert np.abs(running - np.arange(1, len(samples) + 1)[:, None] * plan.shares).max() < 1


@given(mixtures(batches="per_source"))
def test_batches_of_one_source_are_within_a_group_of_their_share_at_every_prefix(made: Made) -> None:
    plan = made.plan
    epochs = 3 if plan.exhausted == "repeat" else 1
    owners = made.source_of[[batch[0] for number in range(epochs) for batch in epoch(plan, number)]]
    running = np.cumsum(owners[:, None] == np.arange(len(plan.names)), axis=0)
    off = np.abs(running - np.arange(1, len(owners) + 1)[:, None] * plan.shares)
    assert off.max() < plan.bound == plan.lockstep


@given(mixtures(), st.integers(0, 4), st.data())
def test_any_position_is_reached_without_those_before(made: Made, number: int, data: st.DataObject) -> None:
    plan, order = made.plan, made.plan.order(9, number)
    places = data.draw(st.lists(st.integers(0, len(order) - 1), max_size=12))
    together = order.batches(places)
    alone = [plan.order(9, number).batch(place) for place in places]
    assert [batch.tolist() for batch in together] == [batch.tolist() for batch in alone]
    assert order.buckets(places).tolist() == [order.bucket(place) for place in places]


@given(mixtures(), st.integers(0, 3))
def test_counts_before_a_position_are_those_of_its_batches(made: Made, number: int) -> None:
    plan, order = made.plan, made.plan.order(9, number)
    batches = epoch(plan, number, seed=9)
    for position in {0, 1, len(order) // 2, len(order)} - {len(order) + 1}:
        seen = made.source_of[np.concatenate([np.zeros(0, int), *batches[:position]])]
        assert order.drawn(position).tolist() == np.bincount(seen, minlength=len(plan.names)).tolist()


@given(mixtures())
def test_a_source_that_repeats_gives_every_sample_once_a_pass(made: Made) -> None:
    plan, epochs = made.plan, 3
    if plan.exhausted == "end":
        for number in range(epochs):
            used = np.concatenate(epoch(plan, number))
            assert len(set(used.tolist())) == len(used)
            assert plan.order(3, number).repeated(len(plan.order(3, number))) == 0
        return
    counted = Counter(np.concatenate([batch for number in range(epochs) for batch in epoch(plan, number)]).tolist())
    classes = made.classes()
    for source, label in np.ndindex(plan.sizes.shape):
        cell = np.flatnonzero((made.source_of == source) & (classes == label))
        counts = [counted[sample] for sample in cell.tolist()]
        assert not counts or max(counts) - min(counts) <= 1
        assert plan.weights[source] or not any(counts)
    order = plan.order(3, epochs - 1)
    assert order.repeated(len(order)) == sum(counted.values()) - len(counted)


def test_an_ending_epoch_ends_because_a_source_is_through() -> None:
    source_of = np.repeat([0, 1], [1000, 50])
    made = make(np.zeros(1050, int), source_of, [0.5, 0.5], exhausted="end")
    assert made.plan.num_batches == 25
    first, second = (np.concatenate(epoch(made.plan, number)) for number in (0, 1))
    assert sorted(first[source_of[first] == 1].tolist()) == list(range(1000, 1050))
    assert first.tolist() != second.tolist()
    assert make(np.zeros(1050, int), source_of, [0.5, 0.5]).plan.num_batches == 1050 // 4


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.few("16", "64")
def test_the_twelve_languages(size: int) -> None:
    rng = np.random.default_rng(1)
    source_of = rng.integers(0, 12, 5000)
    plan = make(np.zeros(5000, int), source_of, list(TWELVE.values()), batch_size=size, lockstep=8).plan
    order = plan.order(0, 20)  # an epoch that ends behind one period of the assignment
    flat = [batch for number in range(21) for batch in epoch(plan, number, seed=0)]
    assert {len(batch) for batch in flat} == {size}
    samples = source_of[np.concatenate(flat)]
    running = np.cumsum(samples[:, None] == np.arange(12), axis=0)
    assert len(samples) > 65_536 - 21 * size * 8 * 2
    assert np.abs(running - np.arange(1, len(samples) + 1)[:, None] * plan.shares).max() < 1
    assert order.batch(len(order) - 1).tolist() == flat[-1].tolist()


@pytest.mark.wide
def test_the_twelve_languages_in_seven_buckets() -> None:
    rng = np.random.default_rng(2)
    source_of = rng.integers(0, 12, 20_000)
    lengths = (rng.gamma(4, 2, 20_000) * RATE * (1 + source_of / 12)).astype(int)  # of unlike lengths
    edges = (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)
    made = make(lengths, source_of, list(TWELVE.values()), edges_s=edges, batch_size=(32, 24, 16, 12, 8, 6, 4))
    batches = [batch for number in range(5) for batch in epoch(made.plan, number)]
    counts = np.cumsum([np.bincount(source_of[batch], minlength=12) for batch in batches], axis=0)
    off = np.abs(counts - counts.sum(1, keepdims=True) * made.plan.shares).max(axis=1)
    assert made.plan.bound == 1 + 102 - 7
    assert off.max() < made.plan.bound
    assert off[-100:].max() < made.plan.bound / 2  # and it does not grow: 100,000 samples are behind it


@pytest.mark.parametrize("count", [150, pytest.param(1200, marks=pytest.mark.wide)])
def test_many_random_weights_through_the_plan(count: int) -> None:
    """Users see whole batches of sample indices, under many weights, within one sample at every prefix."""
    rng = np.random.default_rng(8)
    for _ in range(count):
        weights = random_weights(rng, 512)
        source_of = np.repeat(np.arange(len(weights)), 3)
        plan = make(np.zeros(len(source_of), int), source_of, weights, batch_size=int(rng.integers(1, 9))).plan
        samples = source_of[np.concatenate(epoch(plan, 0) + epoch(plan, 1))]
        running = np.cumsum(samples[:, None] == np.arange(len(weights)), axis=0)
        assert np.abs(running - np.arange(1, len(samples) + 1)[:, None] * plan.shares).max() < 1


@given(mixtures(), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_stopped_run_goes_on_with_another_world_size(
    made: Made, before: int, after: int, data: st.DataObject
) -> None:
    plan = made.plan
    total, order = plan.num_batches, plan.order(1, 2)
    steps = data.draw(st.integers(0, num_steps(total, before, tail="drop")))
    done = [
        turn(total, step, dp_rank=rank, dp_world_size=before, tail="drop").position
        for step in range(steps)
        for rank in range(before)
    ]
    left = num_steps(total, after, tail="short", start=len(done))
    turns = [
        turn(total, step, dp_rank=rank, dp_world_size=after, tail="short", start=len(done))
        for step in range(left)
        for rank in range(after)
    ]
    positions = done + [place.position for place in turns if place.weight]
    assert positions == list(range(total))
    assert [b.tolist() for b in order.batches(positions)] == [b.tolist() for b in epoch(plan, 2, seed=1)]


def test_ranks_that_divide_the_lockstep_never_mix_shapes() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 15 * RATE, 3000)
    for batches in ("mixed", "per_source"):
        plan = make(
            lengths, rng.integers(0, 3, 3000), [3, 2, 1], edges_s=(3.0, 6.0, 15.0), lockstep=8, batches=batches
        ).plan
        order = plan.order(0, 1)
        labels = order.buckets(np.arange(len(order)))
        assert len(set(labels.tolist())) == 3
        assert [mixed_steps(labels, world, tail="short") for world in (1, 2, 4, 8)] == [0, 0, 0, 0]
        assert mixed_steps(labels, 3, tail="short") > 0


def test_seed_and_epoch_change_the_samples() -> None:
    made = make(np.arange(3000), np.arange(3000) % 3, [3, 2, 1], edges_s=(1.0, 15.0))
    same, other, later = (made.plan.order(*place).batch(5).tolist() for place in ((1, 0), (2, 0), (1, 1)))
    assert made.plan.order(1, 0).batch(5).tolist() == same
    assert len({tuple(same), tuple(other), tuple(later)}) == 3


def test_the_plan_says_what_it_mixes() -> None:
    made = make(np.zeros(30, int), np.arange(30) % 3, [2, 1, 0], lockstep=2)
    plan = made.plan
    assert (plan.names[0], plan.weights[0], plan.shares[0], plan.sizes[0].sum()) == (
        "source 0",
        43691,
        43691 / 65536,
        10,
    )
    assert (plan.bound, plan.batches, plan.exhausted) == (1, "mixed", "repeat")
    assert plan.num_batches == 20 // 8 * 2
    assert make(np.arange(30) * 400, np.arange(30) % 3, [2, 1, 0], edges_s=(5.0, 15.0)).plan.bound == 1 + 2 * 3
    weights = made.plan.sample_weights()
    assert np.bincount(made.source_of, weights=weights).tolist() == pytest.approx(made.plan.shares.tolist())


def test_what_gives_no_mixture_is_refused() -> None:
    lengths, source_of = np.zeros(30, int), np.arange(30) % 2
    with pytest.raises(PlanError, match=r"source 'source 2' of the mixture has weight 1 and no samples; leave it out"):
        make(lengths, source_of, [1, 1, 1])
    ended = (
        r"^mixture.exhausted = .end. leaves no batch: 'source \d', of \d+ samples, is .* 8 batches .*lower plan.lock"
    )
    with pytest.raises(PlanError, match=ended):
        make(lengths, source_of, [1, 1], lockstep=8, exhausted="end")
    with pytest.raises(PlanError, match=r'"end" leaves no batch'):
        make(lengths, source_of, [1, 1], lockstep=8, exhausted="end", batches="per_source")
    with pytest.raises(
        PlanError, match=r"a mixture of 2 names has 2 weights, and sources of 29 samples for the plan's 30"
    ):
        make(lengths, source_of[:-1], [1, 1])
    order = make(lengths, source_of, [1, 1]).plan.order(0, 0)
    with pytest.raises(IndexError, match=r"position 7 is outside of the epoch's 7 micro-batches"):
        order.batch(7)
    with pytest.raises(IndexError, match=r"position 8 is outside"):
        order.drawn(8)
    assert order.batches([]) == []
    with pytest.raises(PlanError, match=r"epoch is -1, wanted 0 or more"):
        make(lengths, source_of, [1, 1]).plan.order(0, -1)


@given(mixtures(), st.integers(0, 3))
def test_windows_change_which_sample_of_a_source_comes_and_nothing_else(made: Made, number: int) -> None:
    plan, free = made.plan, replace(made.plan, shards=None)
    order, other = plan.order(5, number), free.order(5, number)
    every = np.arange(len(order))
    assert len(order) == len(other)
    assert order.buckets(every).tolist() == other.buckets(every).tolist()
    owners = [[made.source_of[batch].tolist() for batch in found.batches(every)] for found in (order, other)]
    assert owners[0] == owners[1]


@pytest.mark.parametrize("exhausted", ["repeat", "end"])
@pytest.mark.parametrize("batches", ["mixed", "per_source"])
@pytest.mark.few
def test_every_source_goes_through_its_shards_window_by_window(batches: Any, exhausted: Any) -> None:
    rng = np.random.default_rng(0)
    count, per_shard, window = 30_000, 100, 12
    shards = np.arange(count) // per_shard
    source_of = shards % 3
    made = make(
        rng.integers(0, 15 * RATE, count),
        source_of,
        [4, 3, 1],
        edges_s=(7.0, 15.0),
        locality=f"shards:{window}",
        shards=shards,
        batches=batches,
        exhausted=exhausted,
    )
    assert made.plan.windows is not None
    assert (made.plan.windows.held(blocks=3), made.plan.windows.held(blocks=1)) == (54, 18)
    line, orders = np.concatenate(epoch(made.plan, 0)), []
    stretches = [line[start : start + 200] for start in range(0, len(line) - 200, 200)]
    reach = np.array([np.unique(shards[own[source_of[own] == 0]]).size for own in stretches])
    assert np.mean(reach <= 3 * window // 2) > 0.95  # a pass ends with a block that is not whole
    assert reach.max() <= 2 * window
    for number in range(2):
        own = np.concatenate(epoch(made.plan, number))
        orders.append(list(dict.fromkeys(shards[own[source_of[own] == 0]].tolist())))
    assert orders[0] != sorted(orders[0])
    assert orders[0][:20] != orders[1][:20]


def test_sources_of_the_same_shards_and_pace_read_them_together() -> None:
    shards = np.arange(8000) // 40
    source_of = np.arange(8000) % 2
    made = make(np.full(8000, 5000), source_of, [1, 1], locality="shards:8", shards=shards)
    line = np.concatenate(epoch(made.plan, 0))
    for start in range(0, 8000, 100):
        assert len(np.unique(shards[line[start : start + 100]])) <= 12
