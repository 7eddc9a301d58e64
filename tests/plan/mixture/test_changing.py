"""Weights that change over a run: shares of every prefix, seeks, resumes, and changes of a run that has begun."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import PlanError, ResumeError
from forebay.plan.cursor import Cursor
from forebay.plan.mixture.draw import ClassSplit
from forebay.plan.mixture.mix_sources import with_changes
from forebay.plan.mixture.mixture_plan import MIXTURE_VERSION, MixturePlan
from forebay.plan.mixture.sources import (
    MAX_STRETCHES,
    PERIOD,
    Assignment,
    ChangingAssignment,
    WeightChange,
    stretches_of,
)
from forebay.plan.permutation import derive_key
from tests.plan.mixture.test_plan import Made, epoch, make, mixtures

Array = np.ndarray[Any, Any]


@st.composite
def changing(draw: st.DrawFn, *, batches: str | None = None) -> Made:
    made = draw(mixtures(batches=batches).filter(lambda made: made.plan.exhausted == "repeat"))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    places = sorted(draw(st.sets(st.integers(1, 3 * made.plan.num_batches), min_size=1, max_size=4)))
    held = made.plan.sizes.sum(1) > 0
    curve = [(at, rng.multinomial(2 ** int(rng.integers(0, 8)), rng.dirichlet(held + 0.01)) * held) for at in places]
    curve = [(at, weights if weights.any() else held.astype(int)) for at, weights in curve]
    return replace(made, plan=with_changes(made.plan, curve))


def run(plan: MixturePlan, epochs: int = 4, *, seed: int = 3) -> list[Array]:
    return [batch for number in range(epochs) for batch in epoch(plan, number, seed=seed)]


def shares_at(plan: MixturePlan, count: int) -> Array:
    """The share of each source at each of the first micro-batches, in a plain loop."""
    found, change = [], dict[int, Array]()
    for each in plan.changes:
        change[-(-each.at // plan.lockstep) * plan.lockstep] = each.weights
    weights = plan.weights
    for position in range(count):
        weights = change.get(position, weights)
        found.append(weights / PERIOD)
    return np.array(found)


@given(changing())
def test_shares_of_every_prefix_stay_within_the_bound(made: Made) -> None:
    plan, batches = made.plan, run(made.plan)
    counts = np.array([np.bincount(made.source_of[batch], minlength=len(plan.names)) for batch in batches])
    unit = counts.sum(1, keepdims=True) if plan.batches == "mixed" else 1
    if plan.batches == "per_source":
        counts = (counts > 0).astype(int)
    shares = shares_at(plan, len(batches))
    off = np.abs(np.cumsum(counts - unit * shares, axis=0))
    assert off.max() < plan.bound
    for end in (1, len(batches) // 2 or 1, len(batches)):
        assert plan.shares_until(end) == pytest.approx(shares[:end].mean(0))


@given(changing(batches="mixed"))
def test_a_changing_stream_is_what_walking_it_gives(made: Made) -> None:
    plan = made.plan
    split = ClassSplit(plan.sizes, derive_key("forebay mixture", MIXTURE_VERSION, "classes"))
    steps = {-(-each.at // plan.lockstep): Assignment(each.weights) for each in plan.changes}
    assignment, begun, turns = Assignment(plan.weights), 0, np.zeros(len(plan.names), int)
    waiting: dict[int, list[tuple[int, int, int]]] = {number: [] for number in range(len(plan.batch_sizes))}
    left: list[list[tuple[int, int, int]]] = []
    place, group_at = 0, -1
    while len(left) < 3 * plan.num_batches // plan.lockstep + 4:
        if len(left) in steps and group_at != len(left):
            assignment, begun, group_at = steps[len(left)], place, len(left)
        source = int(assignment.locate(np.array([place - begun]))[0][0])
        label, ordinal = split.locate(np.array([source]), turns[[source]])
        turns[source] += 1
        line = waiting[int(label[0])]
        line.append((source, int(label[0]), int(ordinal[0])))
        if len(line) == plan.batch_sizes[label[0]] * plan.lockstep:
            left.append(line.copy())
            line.clear()
        place += 1
    for group in {0, len(left) // 2, len(left) - 1, *(min(step, len(left) - 1) for step in steps)}:
        drawn = plan.draw.batches(np.full(plan.lockstep, group), np.arange(plan.lockstep))
        assert list(zip(*(part.tolist() for part in drawn), strict=True)) == left[group]
        assert plan.draw.place_behind(group + 1) <= place


@given(changing(), st.data())
def test_seeks_and_counts_are_those_of_the_whole_run(made: Made, data: st.DataObject) -> None:
    plan, number = made.plan, data.draw(st.integers(0, 3))
    order, batches = plan.order(9, number), epoch(made.plan, number, seed=9)
    places = data.draw(st.lists(st.integers(0, len(order) - 1), max_size=8))
    assert [order.batch(place).tolist() for place in places] == [batches[place].tolist() for place in places]
    for position in (0, len(order) // 2, len(order)):
        seen = made.source_of[np.concatenate([np.zeros(0, int), *batches[:position]])]
        assert order.drawn(position).tolist() == np.bincount(seen, minlength=len(plan.names)).tolist()


@settings(max_examples=settings().max_examples // 3)
@given(changing(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40))
def test_another_world_size_and_a_resume_change_nothing(made: Made, before: int, after: int, steps: int) -> None:
    plan = made.plan
    used: list[Array] = []

    def walk(world: int, count: int, state: dict[str, Any] | None) -> dict[str, Any]:
        cursors = [Cursor(plan, "k", seed=3, rank=rank, world=world) for rank in range(world)]
        for cursor in cursors:
            if state is not None:
                cursor.load_state_dict(state)
        while count > 0:
            walks = [cursor.walk() for cursor in cursors]
            for turns in zip(*walks, strict=True):
                used.extend(step.samples for step in turns if step.turn.weight)
                for cursor, step in zip(cursors, turns, strict=True):
                    cursor.hand_out(step)
                count -= 1
                if not count:
                    break
        return cursors[0].state_dict()

    walk(after, 20, walk(before, steps, None) if steps else None)
    whole = np.concatenate(run(plan, (steps * before + 20 * after) // plan.num_batches + 2))
    assert np.array_equal(np.concatenate(used), whole[: len(np.concatenate(used))])


@given(changing(), st.data())
def test_a_change_of_a_run_keeps_what_came_before_and_loses_nothing_after(made: Made, data: st.DataObject) -> None:
    plan = made.plan
    at = data.draw(st.integers(1, 3 * plan.num_batches))
    held = (plan.sizes.sum(1) > 0).astype(int)
    curve = [(each.at, each.weights.tolist()) for each in plan.changes]
    revised = with_changes(replace(plan, changes=()), curve, revised=[(at, held)])
    assert [each.at for each in revised.changes] == [*(c.at for c in plan.changes if c.at < at), at]
    assert revised.num_batches == plan.num_batches
    first, second = run(plan, 5), run(revised, 5)
    assert [batch.tolist() for batch in first[:at]] == [batch.tolist() for batch in second[:at]]
    counted, classes = Counter(np.concatenate(second).tolist()), made.classes()
    for source, label in np.ndindex(plan.sizes.shape):
        counts = [counted[s] for s in np.flatnonzero((made.source_of == source) & (classes == label)).tolist()]
        assert not counts or max(counts) - min(counts) <= 1


def revised_plan(*places: int, weights: tuple[float, float] = (1, 3)) -> MixturePlan:
    made = make(np.zeros(40, int), np.arange(40) % 2, [1, 1])
    return with_changes(made.plan, [], revised=[(at, weights) for at in places])


def test_states_know_the_changes_that_came_before() -> None:
    def cursor(plan: MixturePlan, state: dict[str, Any] | None = None) -> Cursor:
        found = Cursor(plan, "k", seed=1)
        if state is not None:
            found.load_state_dict(state)
        return found

    def state_at(plan: MixturePlan, steps: int) -> dict[str, Any]:
        walked = cursor(plan)
        while steps:
            for step in walked.walk():
                walked.hand_out(step)
                steps -= 1
                if not steps:
                    break
        return walked.state_dict()

    plain = state_at(revised_plan(), 7)
    assert "changes" not in plain
    assert cursor(revised_plan(7), plain).state.position == 7  # the change is of what comes next
    with pytest.raises(ResumeError, match=r"places \[\] before micro-batch 7 of the run in the state, and \[6\] here"):
        cursor(revised_plan(6), plain)
    later = state_at(revised_plan(7), 13)
    assert (later["epoch"], later["position"], [at for at, _ in later["changes"]]) == (1, 3, [7])
    assert cursor(revised_plan(7, 13), later).state.position == 3
    for other in (revised_plan(), revised_plan(8), revised_plan(7, weights=(1, 2)), revised_plan(7, 12)):
        with pytest.raises(ResumeError, match=r"has places \[7\] before micro-batch 13 of the run in the state"):
            cursor(other, later)


@given(st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(0, 9), min_size=3, max_size=3)), max_size=4))
def test_a_changing_assignment_is_its_own_inverse(steps: list[tuple[int, list[int]]]) -> None:
    starts = np.cumsum([0, *(length for length, _ in steps)]).tolist()
    weights = [np.array([w + 1 if i == n % 3 else w for i, w in enumerate(own)]) for n, (_, own) in enumerate(steps)]
    parts = [Assignment(np.array([1, 2, 1])), *map(Assignment, weights)]
    one, places = ChangingAssignment(parts, starts), np.arange(starts[-1] + 60)
    sources, ordinals = one.locate(places)
    assert one.places(sources, ordinals).tolist() == places.tolist()
    running = np.cumsum(sources[:, None] == np.arange(3), axis=0)
    assert one.counts(places + 1).tolist() == running.tolist()
    assert one.counts(np.zeros((1, 2), int)).tolist() == [[[0, 0, 0], [0, 0, 0]]]


@given(st.integers(1, 400), st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any))
def test_the_head_of_a_sequence_is_made_alone(length: int, weights: list[int]) -> None:
    whole, head, places = Assignment(np.array(weights)), Assignment(np.array(weights), length=length), np.arange(length)
    for a, b in zip(whole.locate(places), head.locate(places), strict=True):
        assert a.tolist() == b.tolist()
    assert whole.counts(places).tolist() == head.counts(places).tolist()


def test_steps_and_lines() -> None:
    steps = ((0.0, 1.0), (10.0, 0.5)), 2.0, ((0.0, 0.0), (4.0, 1.0), (10.0, 3.0))
    assert stretches_of(steps) == [(0, [1, 2, 0]), (4, [1, 2, 1]), (10, [0.5, 2, 3])]
    assert stretches_of([1.0, 2.0]) == [(0, [1, 2])]
    line = stretches_of([((0.0, 1.0), (8.0, 0.0)), 1.0], between="line", line_step=2)
    assert line == [(0, [0.875, 1]), (2, [0.625, 1]), (4, [0.375, 1]), (6, [0.125, 1]), (8, [0, 1])]
    with pytest.raises(PlanError, match=r"change \d+ times, at most 255 are possible; raise mixture.line_step"):
        stretches_of([((0.0, 1.0), (1e9, 0.0)), 1.0], between="line", line_step=2)
    assert len(stretches_of([((0.0, 1.0), (255.0, 0.0)), 1.0], between="line", line_step=1)) == MAX_STRETCHES


def test_weights_that_cannot_be() -> None:
    plan = make(np.zeros(30, int), np.arange(30) % 2, [1, 1, 0]).plan
    with pytest.raises(PlanError, match=r"'source 2' of the mixture has weight 1 from micro-batch 5 on and no samples"):
        with_changes(plan, [(5, [1, 1, 1])])
    with pytest.raises(PlanError, match=r"mixture.change at 5 has 2 weights for 3 sources: source 0, source 1, "):
        with_changes(plan, [], revised=[(5, [1, 1])])
    assert plan.revisions == ()
    assert len(replace(plan, changes=(WeightChange(5, plan.weights, is_revision=True),)).revisions) == 1
