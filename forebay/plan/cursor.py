"""Where a rank stands in the micro-batches of a plan: how ranks share them, what comes next, how an epoch ends.

W ranks take W consecutive micro-batches a step. From position `start` on, rank r takes at its step s the position
start + s * W + r. The state of a run is therefore one global position, and a run of any W goes on where a run of
another W stopped: order is a function of (plan, seed, epoch, position), so nothing is replayed. All ranks do the same
number of steps. Where the positions left are not a multiple of W, `plan.tail` says how the epoch ends:

- `drop`: the last, incomplete step is not done; up to W - 1 micro-batches are left out.
- `pad`: micro-batches from the epoch's head fill the step, and are trained on twice.
- `split`: the samples of the last, incomplete step are dealt over all ranks, see `dealt`. Only where they are fewer
  than the ranks, the other ranks have fillers.
- `short`: micro-batches from the epoch's head fill the step, so that collective operations find every rank. They are
  fillers, too.

A filler has weight 0: its loss is to be multiplied by 0, and every sample counts exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import numpy as np

from forebay.errors import ConfigError, PlanError, ResumeError
from forebay.plan.interface import EpochOrder, Plan, Tail
from forebay.plan.names import why_differ
from forebay.store.layout import Array, Ints
from forebay.visible import an


def check_ranks(dp_rank: int, dp_world_size: int) -> None:
    """Raises ConfigError for a rank that is none of so many."""
    for name, value in (("dp_rank", dp_rank), ("dp_world_size", dp_world_size)):
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, wanted an integer; environment variables are text: int(...)")
    if dp_world_size < 1 or not 0 <= dp_rank < dp_world_size:
        raise ConfigError(
            f"dp_rank is {dp_rank} of dp_world_size {dp_world_size}, wanted 0 <= dp_rank < dp_world_size; "
            "leave both out, and they are found"
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """The work of a rank at a step.

    position: of the micro-batch in the epoch, or of the one that the rank has a part of; weight: 1, or 0 for a filler
    that is not to be learnt from; repeated: whether its samples are another turn's, too.
    """

    position: int
    weight: int
    repeated: bool


def num_steps(num_batches: int, dp_world_size: int, *, tail: Tail, start: int = 0) -> int:
    """Returns the steps of each rank from position `start` to the end of the epoch."""
    if dp_world_size < 1:
        raise PlanError(f"dp_world_size is {dp_world_size}, wanted 1 or more")
    if not 0 <= start <= num_batches:
        raise PlanError(f"position {start} is outside of the epoch's {num_batches} micro-batches")
    left = num_batches - start
    return left // dp_world_size if tail == "drop" else -(-left // dp_world_size)


def turn(num_batches: int, step: int, *, dp_rank: int, dp_world_size: int, tail: Tail, start: int = 0) -> Turn:
    """Returns what rank `dp_rank` does at its step `step`, counted from `start`. IndexError behind the last step.

    The last, incomplete step under `split` depends on the samples: `Cursor` deals it, and here it is that of `short`.
    """
    if not 0 <= dp_rank < dp_world_size:
        raise PlanError(f"dp_rank is {dp_rank}, wanted 0 to {dp_world_size - 1} (dp_world_size is {dp_world_size})")
    steps = num_steps(num_batches, dp_world_size, tail=tail, start=start)
    if not 0 <= step < steps:
        raise IndexError(f"step {step} is outside of the {steps} steps left from position {start} of {num_batches}")
    position = start + step * dp_world_size + dp_rank
    repeated = position >= num_batches
    return Turn(position % num_batches, 0 if repeated and tail in WEIGHTLESS else 1, repeated)


def dealt(sizes: Sequence[int], ranks: int) -> list[tuple[int, slice]]:
    """Returns which samples each rank takes of the fewer micro-batches of a last step: the number of one, its part.

    sizes: samples of each micro-batch. A part is never of two, so it has the shape class, the source and the room of a
    whole one. The largest parts are cut first. Fewer parts than ranks: there are no more samples.
    """
    parts = [1] * len(sizes)
    for _ in range(min(ranks, sum(sizes)) - len(sizes)):
        parts[max(range(len(sizes)), key=lambda number: sizes[number] / parts[number])] += 1
    return [
        (number, slice(size * part // count, size * (part + 1) // count))
        for number, (size, count) in enumerate(zip(sizes, parts, strict=True))
        for part in range(count)
    ]


def num_fillers(order: EpochOrder, dp_world_size: int, *, tail: Tail) -> int:
    """Returns the turns of weight 0 that end an epoch for all ranks together."""
    left = len(order) % dp_world_size
    if not left or tail not in WEIGHTLESS:
        return 0
    taken = left if tail == "short" else sum(map(len, order.batches(range(len(order) - left, len(order)))))
    return max(dp_world_size - taken, 0)


def next_position(num_batches: int, steps_done: int, *, dp_world_size: int, start: int = 0) -> int:
    """Returns the position of the state after `steps_done` steps; `num_batches` once the epoch is through."""
    return min(start + steps_done * dp_world_size, num_batches)


def mixed_steps(buckets: Array, dp_world_size: int, *, tail: Tail) -> int:
    """Returns in how many steps of an epoch the ranks do not all hold batches of one bucket.

    buckets: of every micro-batch in the epoch's order (`order.buckets(range(len(order)))`).
    """
    steps = num_steps(len(buckets), dp_world_size, tail=tail)
    positions = np.arange(steps * dp_world_size)
    # Under "split" all ranks of the last step have parts of what is left.
    positions = np.minimum(positions, len(buckets) - 1) if tail == "split" else positions % max(len(buckets), 1)
    taken = np.asarray(buckets)[positions].reshape(steps, dp_world_size)
    return int((taken != taken[:, :1]).any(axis=1).sum())


WEIGHTLESS: tuple[Tail, ...] = ("split", "short")
"""The ends of an epoch that may have fillers of weight 0."""
STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """The micro-batch that comes next, in the sequence of all ranks together."""

    plan_key: str
    seed: int
    epoch: int
    position: int

    def at(self, position: int) -> LoaderState:
        """Returns position `position` of the same epoch."""
        return LoaderState(plan_key=self.plan_key, seed=self.seed, epoch=self.epoch, position=position)

    def next_epoch(self) -> LoaderState:
        """Returns the head of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {"version": STATE_VERSION, **asdict(self)}

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], *, plan_key: str, num_batches: int, tail: Tail | None = None
    ) -> LoaderState:
        """Returns the state that `to_json` wrote, checked against the plan that is to go on.

        num_batches, tail: of the plan. Raises ResumeError naming the field, its value and the wanted one.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(f"loader state is {an(type(state).__name__)}, wanted what Loader.state_dict() returned")
        version = _integer(state, "version", low=1)
        if version > STATE_VERSION:
            raise ResumeError(
                f"loader state: version is {version}, this forebay reads up to {STATE_VERSION}; "
                "resume with the forebay that wrote it, or a newer one",
                code="FB512",
            )
        stored = state.get("plan_key")
        if stored != plan_key:
            was, now = _that_differ(stored, plan_key)
            raise ResumeError(
                f"loader state: plan_key is {was}, the plan here has {now}; {why_differ(stored, plan_key, tail=tail)}",
                code="FB511",
            )
        position = _integer(state, "position", low=0)
        if position > num_batches:
            raise ResumeError(
                f"loader state: position is {position}, an epoch of the plan has {num_batches} micro-batches"
            )
        return cls(
            plan_key=plan_key, seed=_integer(state, "seed"), epoch=_integer(state, "epoch", low=0), position=position
        )


@dataclass(frozen=True, slots=True)
class CursorStep:
    """The next work of a rank.

    place: of the step. turn: what the rank takes there. samples: int64, of its micro-batch. following: the place of the
    step that comes after it in this walk. walk: which walk of the cursor it is of.
    """

    place: LoaderState
    turn: Turn
    samples: Ints
    following: LoaderState
    walk: int


_WORKERS = "num_workers"
"""In the state of one of several workers: how many there are. `position` is then that of the worker's own next step."""
_CHANGES = "changes"
"""In the state of a mixture whose weights were changed in the run: the changes that came before, place and weights."""
_LOCALITY = "locality"
"""In the state of a plan whose locality is "auto": what that came to."""
_NO_WALK = -1
_AT_ONCE = 64
"""Steps whose samples are computed at once: a fraction of the cost of one by one."""
_AHEAD_AT_ONCE = 1024
"""So many where nobody waits for the first of them."""


@runtime_checkable
class Revised(Protocol):
    """A plan that may be changed from a micro-batch of the run on, while the run goes on; a mixture is one."""

    @property
    def revisions(self) -> tuple[tuple[int, str], ...]:
        """The micro-batch of each change over all epochs, rising, and a word for what it is."""


class Cursor:
    """Where one rank stands in the epochs of a plan. The next walk begins where `start` is; `state` is the next batch.

    A walk goes from there to the end of the epoch, and the walk after it is the next epoch. Steps may be computed
    ahead: the cursor moves when a step is handed out. A walk that was begun earlier than the last one moves it no more.
    Several workers of a rank share its steps: each takes every `num_workers`-th, with a cursor and state of its own.
    """

    def __init__(
        self,
        plan: Plan,
        key: str,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        is_endless: bool = False,
        locality: str | None = None,
    ) -> None:
        """key: of the plan, by which states are checked. is_endless: a walk goes on from epoch to epoch.

        locality: what `plan.locality = "auto"` came to: a state says it, so that a plan of another node's bound is
        told from other data.

        Raises ConfigError for a rank that is none of so many, PlanError where no rank has a step.
        """
        check_ranks(rank, world)
        self.plan, self.key, self.rank, self.world, self.is_endless = plan, key, rank, world, is_endless
        self._locality = locality
        self._num_batches = plan.num_batches  # which a plan of buckets counts each time
        self.start = self.state = LoaderState(plan_key=key, seed=seed, epoch=0, position=0)
        self._is_own = False  # whether `start` is the next step of this worker, not of all of them
        self._num_workers = 0
        self._walk = 0
        if not len(self):
            raise PlanError(
                f'{plan.num_batches} micro-batches are no full step of {world} ranks and plan.tail is "{plan.tail}": '
                'use fewer ranks, smaller batches, or plan.tail = "split"',
                code="FB502",
            )

    def __len__(self) -> int:
        """Steps of this rank, as of every other, in a whole epoch."""
        return self.steps_left(self.start.at(0))

    def steps_left(self, place: LoaderState) -> int:
        """Returns the steps of each rank from a place to the end of its epoch."""
        return num_steps(self._num_batches, self.world, tail=self.plan.tail, start=place.position)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next walk that of `epoch`, from its head; in the epoch where the cursor stands nothing changes.

        Raises ConfigError for what is no epoch.
        """
        if not isinstance(epoch, Integral) or isinstance(epoch, bool) or epoch < 0:
            raise ConfigError(f"epoch is {epoch!r}, wanted an integer from 0 on")
        if epoch != self.start.epoch:
            self._stand_at(replace(self.start, epoch=int(epoch), position=0))

    def state_dict(self, *, num_workers: int = 0) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values: the same on every rank, and good for any number of ranks.

        num_workers: of the rank, in one of its workers. The state is then the worker's own, good for as many workers.
        """
        locality = {} if self._locality is None else {_LOCALITY: self._locality}
        changes = {_CHANGES: made} if (made := self._changes_before(self.state)) else {}
        return self.state.to_json() | locality | changes | ({_WORKERS: num_workers} if num_workers else {})

    def _changes_before(self, place: LoaderState) -> list[list[Any]]:
        """Returns the changes of the plan that samples before a place were drawn with, as JSON values."""
        done = place.epoch * self._num_batches + place.position
        revisions = self.plan.revisions if isinstance(self.plan, Revised) else ()
        return [[at, what] for at, what in revisions if at < done]

    def load_state_dict(self, state: Mapping[str, Any], *, num_workers: int = 0) -> None:
        """Makes the next walk begin at the batch that `state` names; the seed of `state` becomes the cursor's.

        Raises ResumeError, naming field and both values, for another plan, a newer version, wrong types, a place
        outside of the plan or a worker's state where there is another number of workers; nothing has changed then.
        """
        _check_locality(state, self.key, self._locality)
        loaded = LoaderState.from_json(state, plan_key=self.key, num_batches=self._num_batches, tail=self.plan.tail)
        before, made = self._changes_before(loaded), state.get(_CHANGES, [])
        if made != before:
            raise ResumeError(
                f"loader state: mixture.change has places {_places(made)} before micro-batch "
                f"{loaded.epoch * self._num_batches + loaded.position} of the run in the state, and {_places(before)} "
                "here, or other weights there; what came before cannot change: give a change a later place",
                code="FB511",
            )
        stored = state.get(_WORKERS)
        if stored is not None and stored != num_workers:
            raise ResumeError(
                f"loader state: it is that of one of {stored} workers, here are {num_workers}; "
                f"resume with num_workers = {stored}"
            )
        is_own = stored is not None
        # A worker at its end stays there: the others still have batches of this epoch.
        self._stand_at(loaded if is_own or self.steps_left(loaded) else loaded.next_epoch(), is_own=is_own)

    def walk(self, *, worker: int = 0, num_workers: int = 0) -> Iterator[CursorStep]:
        """Returns the steps from where the cursor stands to the end of the epoch, or without end.

        A few steps are computed at once. worker, num_workers: which steps of the rank are this worker's. With 0 workers
        the rank has none, and all steps are taken.
        """
        self._walk += 1
        self._num_workers = num_workers
        self.state = self._after(self.start, 0 if self._is_own else worker)
        first, number = self.state, self._walk
        if not self.steps_left(first):
            self._end(first)
        return self._steps(first, stride=max(num_workers, 1), walk=number)

    def ahead(self, *, worker: int = 0, num_workers: int = 0) -> Iterator[CursorStep]:
        """Returns the steps of the walk from where the cursor stands, and of those after it; the cursor stays there.

        worker, num_workers: as of `walk`.
        """
        first = self._after(self.start, 0 if self._is_own else worker)
        return self._epochs(first, worker=worker, stride=max(num_workers, 1))

    def _epochs(self, place: LoaderState, *, worker: int, stride: int) -> Iterator[CursorStep]:
        while True:
            yield from self._steps(place, stride=stride, walk=_NO_WALK, at_most=_AHEAD_AT_ONCE)
            place = self._after(place.next_epoch(), worker)
            if not self.steps_left(place):  # more workers than steps
                return

    def hand_out(self, step: CursorStep) -> None:
        """Moves the cursor behind a step of its last walk; a step of an earlier walk moves nothing."""
        if step.walk == self._walk:
            self.state = step.following
            if not self.steps_left(step.following):
                self._end(step.following)

    def _steps(self, place: LoaderState, *, stride: int, walk: int, at_most: int = _AT_ONCE) -> Iterator[CursorStep]:
        at_once = _AT_ONCE
        order, epoch = self.plan.order(place.seed, place.epoch), place.epoch
        while left := self.steps_left(place):
            if place.epoch != epoch:
                order, epoch = self.plan.order(place.seed, place.epoch), place.epoch
            numbers = range(0, min(left, at_once * stride), stride)
            at_once = min(2 * at_once, at_most)
            places = [place.at(place.position + number * self.world) for number in numbers]
            who = {"dp_rank": self.rank, "dp_world_size": self.world}
            turns = [turn(self._num_batches, 0, **who, tail=self.plan.tail, start=here.position) for here in places]
            batches = order.batches([mine.position for mine in turns])
            if self.plan.tail == "split" and places[-1].position + self.world > self._num_batches:
                turns[-1], batches[-1] = self._part(order, places[-1].position)
            place = self._after(places[-1], stride)
            for here, mine, samples, following in zip(places, turns, batches, [*places[1:], place], strict=True):
                yield CursorStep(here, mine, samples, following, walk)

    def _part(self, order: EpochOrder, start: int) -> tuple[Turn, Ints]:
        """Returns what this rank takes of the samples from `start` on, of a last step that is dealt over the ranks."""
        batches = order.batches(range(start, self._num_batches))
        parts = dealt([len(batch) for batch in batches], self.world)
        number, part = parts[min(self.rank, len(parts) - 1)]
        is_filler = self.rank >= len(parts)
        return Turn(start + number, int(not is_filler), is_filler), batches[number][part]

    def _after(self, place: LoaderState, steps: int) -> LoaderState:
        """Returns the place `steps` steps behind `place`: at most the end of its epoch, unless it is endless."""
        while self.is_endless and steps >= (left := self.steps_left(place)):
            place, steps = place.next_epoch(), steps - left
        steps = min(steps, self.steps_left(place))
        return place.at(next_position(self._num_batches, steps, dp_world_size=self.world, start=place.position))

    def _end(self, place: LoaderState) -> None:
        """Makes the next walk the next epoch; one of several workers still says that it is at the end of this one."""
        self.start, self._is_own = place.next_epoch(), False
        if not self._num_workers:
            self.state = self.start

    def go_on(self) -> None:
        """Makes the next walk begin at the next step, also where the last walk was left in mid-epoch."""
        if self.state != self.start:
            self._stand_at(self.state, is_own=self._is_own)

    def _stand_at(self, state: LoaderState, *, is_own: bool = False) -> None:
        self._walk += 1  # earlier walks no longer move the cursor
        self.start = self.state = state
        self._is_own = is_own


class FollowedEpochs:
    """The epochs of a framework that leaves epochs early, or makes its loader anew, such as Lightning.

    Where it left an epoch early, its next one goes on behind what was handed out: every sample comes as often. With
    `is_in_order`, of an evaluation, each begins at the head.
    """

    def __init__(self, cursor: Cursor, *, is_in_order: bool = False) -> None:
        self._cursor, self._is_in_order, self._last = cursor, is_in_order, 0

    @property
    def sampler(self) -> FollowedEpochs:
        """This: Lightning tells its epoch to `batch_sampler.sampler` of a loader, and of a DataLoader."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Makes the next walk, before the framework's `epoch`, go on; of a loader made anew it is that of `epoch`."""
        place = self._cursor.state
        if not (place.epoch or place.position):
            self._cursor.set_epoch(epoch)
        elif epoch > self._last and not self._is_in_order:
            self._cursor.go_on()
        self._last = epoch


class Resumable:
    """Epochs of one rank that stand at a cursor: begun where the cursor is, and gone on with from a state."""

    cursor: Cursor

    def __len__(self) -> int:
        """Steps of this rank, as of every other, in a whole epoch."""
        return len(self.cursor)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`, from its head; in the epoch where it stands nothing changes.

        Needed before an epoch where the one before it was left early; after a whole one the next begins by itself.
        """
        self.cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values; what was made ahead but not handed out does not count.

        `position` is the next micro-batch of all ranks together: the same on every rank, and usable at any world size.
        """
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin at the batch that `state` names, at once; the seed of `state` is taken over.

        Raises ResumeError, naming field and both values, for another plan, a newer version, wrong types or a place
        outside of the plan; nothing has changed then.
        """
        self.cursor.load_state_dict(state)


def _check_locality(state: Mapping[str, Any], key: str, locality: str | None) -> None:
    """Raises ResumeError where "auto" came to something else: with the bound of another node, or local files."""
    if not isinstance(state, Mapping) or state.get("plan_key") == key:
        return
    stored = state.get(_LOCALITY)
    if isinstance(stored, str) and locality is not None and stored != locality:
        raise ResumeError(
            f'loader state: plan.locality = "auto" was "{stored}" where it was made, and is "{locality}" with '
            f'remote.cache_size_gb here; resume with plan.locality = "{stored}"'
        )


def _places(changes: Any) -> list[Any]:
    return [change[0] if isinstance(change, list) and change else change for change in changes or ()]


def _integer(state: Mapping[str, Any], name: str, *, low: int | None = None) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        wanted = "an integer" if low is None else f"an integer from {low} on"
        raise ResumeError(f"loader state: {name} is {value!r}, wanted {wanted}")
    return value


def _that_differ(stored: Any, wanted: str) -> tuple[str, str]:
    """Returns for a message the first 16 digits of two state keys that differ: keys have a digest in each 16."""
    if not isinstance(stored, str):
        return repr(stored), wanted[:16]
    start = next(
        (i for i in range(0, max(len(stored), len(wanted)), 16) if stored[i : i + 16] != wanted[i : i + 16]), 0
    )
    return stored[start : start + 16], wanted[start : start + 16]
