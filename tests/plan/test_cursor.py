"""The cursor by itself: against a plain loop over the positions of each epoch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError, PlanError, ResumeError
from forebay.plan.cursor import Cursor
from forebay.plan.interface import Tail

KEY = "k" * 64
SEED = 3
TAILS: tuple[Tail, ...] = ("split", "short", "drop", "pad")
Taken = tuple[int, int, int]
"""Epoch, micro-batch and weight of a step."""


class Line:
    """A plan whose micro-batch at a position of an epoch is one number; satisfies `Plan` and `EpochOrder`."""

    lockstep = 1
    grad_accs = None

    patch_classes = ()

    def __init__(self, num_batches: int, tail: Tail = "short", *, epoch: int = 0) -> None:
        self.num_batches, self.tail, self.epoch = num_batches, tail, epoch

    def described(self) -> str:
        return f"{self.num_batches} numbers"

    def order(self, seed: int, epoch: int) -> Any:
        assert seed == SEED
        return Line(self.num_batches, self.tail, epoch=epoch)

    def batches(self, positions: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        return [np.array([1000 * self.epoch + position]) for position in positions]


def cursor_of(plan: Line, *, rank: int = 0, world: int = 1, **changes: Any) -> Cursor:
    return Cursor(plan, **{"key": KEY, "seed": SEED, **changes}, rank=rank, world=world)


def plain(count: int, tail: Tail, *, epoch: int, rank: int, world: int, start: int = 0) -> list[Taken]:
    """One epoch of a rank, by a loop over its steps."""
    found: list[Taken] = []
    for first in range(start, count, world):
        if tail == "drop" and first + world > count:
            break
        place = first + rank
        filler = (min(place, count - 1), 0) if tail == "split" else (place % count, int(tail == "pad"))
        found.append((epoch, *(filler if place >= count else (place, 1))))
    return found


def walk(cursor: Cursor, stop: int | None = None, **workers: int) -> list[Taken]:
    """The steps that are handed out until the walk ends, or `stop` of them."""
    taken: list[Taken] = []
    steps = cursor.walk(**workers)
    while stop is None or len(taken) < stop:
        step = next(steps, None)
        if step is None:
            break
        cursor.hand_out(step)
        assert step.samples.tolist() == [1000 * step.place.epoch + step.turn.position]
        taken.append((step.place.epoch, step.turn.position, step.turn.weight))
    return taken


shapes = st.tuples(st.integers(1, 300), st.integers(1, 9), st.sampled_from(TAILS)).filter(
    lambda shape: shape[0] >= shape[1] or shape[2] != "drop"
)


@given(shape=shapes)
def test_epochs_are_those_of_a_plain_loop(shape: tuple[int, int, Tail]) -> None:
    count, world, tail = shape
    for rank in range(world):
        cursor = cursor_of(Line(count, tail), rank=rank, world=world)
        for epoch in range(3):
            wanted = plain(count, tail, epoch=epoch, rank=rank, world=world)
            assert len(cursor) == len(wanted)
            assert walk(cursor) == wanted
            assert cursor.state == cursor.start == cursor.state.at(0)
            assert cursor.state.epoch == epoch + 1


@given(shape=shapes, stop=st.integers(0, 700), data=st.data())
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_had_not_been(
    shape: tuple[int, int, Tail], stop: int, data: st.DataObject
) -> None:
    count, world, tail = shape
    rank = data.draw(st.integers(0, world - 1))
    first, second = (cursor_of(Line(count, tail), rank=rank, world=world) for _ in range(2))
    taken: list[Taken] = []
    while len(taken) < stop and first.start.epoch < 3:
        taken += walk(first, stop - len(taken))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    while second.start.epoch < 3:
        taken += walk(second)
    assert taken == [step for epoch in range(3) for step in plain(count, tail, epoch=epoch, rank=rank, world=world)]


@given(shape=shapes, stop=st.integers(0, 60), other=st.integers(1, 9))
def test_a_state_of_some_ranks_goes_on_at_another_number(shape: tuple[int, int, Tail], stop: int, other: int) -> None:
    count, world, tail = shape
    if tail == "drop" and other > count:
        return
    cursors = [cursor_of(Line(count, tail), rank=rank, world=world) for rank in range(world)]
    before = [step for cursor in cursors for step in walk(cursor, stop)]
    (state,) = {tuple(cursor.state_dict().items()) for cursor in cursors}  # the same on every rank
    place = dict(state)
    learnt = sorted(position for _, position, weight in before if weight)
    again = [cursor_of(Line(count, tail), rank=rank, world=other) for rank in range(other)]
    for cursor in again:
        cursor.load_state_dict(place)
    epoch, start = int(place["epoch"]), int(place["position"])
    if start and not plain(count, tail, epoch=epoch, rank=0, world=other, start=start):
        epoch, start = epoch + 1, 0  # no full step is left for so many ranks
    assert {(cursor.start.epoch, cursor.start.position) for cursor in again} == {(epoch, start)}
    after = [walk(cursor) for cursor in again]
    for rank, steps in enumerate(after):
        assert steps == plain(count, tail, epoch=epoch, rank=rank, world=other, start=start)
    if epoch == 0 and tail in ("split", "short"):  # every micro-batch counts once
        learnt += [position for steps in after for _, position, weight in steps if weight]
        assert sorted(learnt) == list(range(count))


@given(
    shape=shapes,
    num_workers=st.integers(1, 5),
    stop=st.integers(0, 80),
    is_endless=st.booleans(),
)
def test_workers_take_turns_and_go_on_from_their_own_states(
    shape: tuple[int, int, Tail], num_workers: int, stop: int, *, is_endless: bool
) -> None:
    count, world, tail = shape
    wanted = [step for epoch in range(9) for step in plain(count, tail, epoch=epoch, rank=world - 1, world=world)]
    per_epoch = len(wanted) // 9
    limit = min(stop + 20, len(wanted)) if is_endless else per_epoch

    def made(worker: int, state: dict[str, Any] | None) -> tuple[Cursor, Any]:
        cursor = cursor_of(Line(count, tail), rank=world - 1, world=world, is_endless=is_endless)
        if state is not None:
            cursor.load_state_dict(state, num_workers=num_workers)
        return cursor, cursor.walk(worker=worker, num_workers=num_workers)

    workers, found = [made(worker, None) for worker in range(num_workers)], []
    for number in range(limit):
        if number == stop:
            states = [cursor.state_dict(num_workers=num_workers) for cursor, _ in workers]
            workers = [made(worker, copy.deepcopy(state)) for worker, state in enumerate(states)]
        cursor, steps = workers[number % num_workers]
        step = next(steps)
        cursor.hand_out(step)
        found.append((step.place.epoch, step.turn.position, step.turn.weight))
    assert found == wanted[:limit]
    if not is_endless:
        assert [list(steps) for _, steps in workers] == [[]] * num_workers


def test_the_cursor_moves_when_a_step_is_handed_out_and_not_before() -> None:
    cursor = cursor_of(Line(200))
    steps = list(cursor.walk())
    assert cursor.state.position == 0
    cursor.hand_out(steps[4])
    assert (cursor.state.position, cursor.start.position) == (5, 0)


def test_an_earlier_walk_moves_the_cursor_no_more() -> None:
    cursor = cursor_of(Line(10))
    earlier = cursor.walk()
    cursor.hand_out(next(earlier))
    walk(cursor, 3)
    cursor.hand_out(next(earlier))
    assert cursor.state.position == 3
    later = cursor.walk()
    cursor.load_state_dict({**cursor.state_dict(), "position": 7})
    cursor.hand_out(next(later))
    assert cursor.state.position == 7


def test_an_epoch_is_begun_at_its_head_unless_the_cursor_stands_in_it() -> None:
    cursor = cursor_of(Line(6))
    cursor.load_state_dict({**cursor.state_dict(), "epoch": 2, "position": 4})
    cursor.set_epoch(2)
    assert walk(cursor) == plain(6, "short", epoch=2, rank=0, world=1, start=4)
    cursor.set_epoch(np.int64(5))  # type: ignore[arg-type]
    assert walk(cursor) == plain(6, "short", epoch=5, rank=0, world=1)
    assert cursor.state_dict()["epoch"] == 6


@pytest.mark.parametrize("epoch", [-1, True, 1.0, "1", None])
def test_what_is_no_epoch_is_refused(epoch: Any) -> None:
    cursor = cursor_of(Line(6))
    with pytest.raises(ConfigError, match=f"epoch is {epoch!r}, wanted an integer from 0 on"):
        cursor.set_epoch(epoch)
    assert cursor.start.epoch == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan_key": "f" * 64}, "plan_key is ffffffffffffffff, the plan here has kkkkkkkkkkkkkkkk"),
        ({"plan_key": ""}, "plan_key is , the plan here has kkkkkkkkkkkkkkkk"),
        ({"version": 2}, "version is 2, this forebay reads up to 1"),
        ({"epoch": -1}, "epoch is -1, wanted an integer from 0 on"),
        ({"position": 7}, "position is 7, an epoch of the plan has 6 micro-batches"),
        ({"position": True}, "position is True, wanted an integer from 0 on"),
        ({"num_workers": 2}, "it is that of one of 2 workers, here are 0; resume with num_workers = 2"),
    ],
)
def test_a_state_that_cannot_be_continued_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    cursor = cursor_of(Line(6))
    walk(cursor, 2)
    before = cursor.state_dict()
    with pytest.raises(ResumeError, match=message):
        cursor.load_state_dict({**before, **changes})
    assert cursor.state_dict() == before


def test_a_state_is_refused_whatever_key_the_plan_has() -> None:
    for key in ("", "0"):
        with pytest.raises(ResumeError, match="plan_key is kkkkkkkkkkkkkkkk"):
            cursor_of(Line(6), key=key).load_state_dict(cursor_of(Line(6)).state_dict())


def test_a_state_brings_its_seed() -> None:
    cursor = cursor_of(Line(6), seed=99)
    cursor.load_state_dict(cursor_of(Line(6)).state_dict())
    assert walk(cursor) == plain(6, "short", epoch=0, rank=0, world=1)
    cursor.set_epoch(4)
    assert cursor.state.seed == SEED


def test_ranks_without_a_step_are_refused() -> None:
    with pytest.raises(PlanError, match=r'6 micro-batches are no full step of 7 ranks and plan.tail is "drop"'):
        cursor_of(Line(6, "drop"), world=7)
    with pytest.raises(ConfigError, match="dp_rank is 2 of dp_world_size 2"):
        cursor_of(Line(6), rank=2, world=2)
