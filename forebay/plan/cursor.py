"""How ranks share one sequence of micro-batches: W ranks take W consecutive ones a step.

From position `start` on, rank r takes at its step s the position start + s * W + r. The state of a run is therefore one
global position, and a run of any W goes on where a run of another W stopped. All ranks do the same number of steps; where
the positions left are not a multiple of W, the end of the epoch is, by `plan.tail`:

- `drop`: the last, incomplete step is not done; up to W - 1 micro-batches are left out.
- `pad`: the step is filled with micro-batches from the epoch's head, which are trained on twice.
- `short`: the step is filled in the same way, so that collective operations find every rank, but the fillers have weight
  0: their loss is to be multiplied by 0, and every sample counts exactly once.

Where a loader stands. The whole of it: order is a function of (plan, seed, epoch, position), so nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from forebay.errors import ConfigError, PlanError, ResumeError
from forebay.plan.disk import why_differ
from forebay.plan.interface import Tail
from forebay.store.layout import Array


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
    """What a rank does at a step.

    position: of the micro-batch in the epoch; weight: 1, or 0 for a filler that is not to be learnt from;
    repeated: whether it stands in for a position behind the epoch's end.
    """

    position: int
    weight: int
    repeated: bool


def num_steps(num_batches: int, dp_world_size: int, *, tail: Tail, start: int = 0) -> int:
    """Returns the steps of each rank from position `start` to the end of the epoch."""
    _check(num_batches, dp_world_size, start)
    left = num_batches - start
    return left // dp_world_size if tail == "drop" else -(-left // dp_world_size)


def turn(num_batches: int, step: int, *, dp_rank: int, dp_world_size: int, tail: Tail, start: int = 0) -> Turn:
    """Returns what rank `dp_rank` does at its step `step`, counted from `start`. IndexError behind the last step."""
    if not 0 <= dp_rank < dp_world_size:
        raise PlanError(f"dp_rank is {dp_rank}, wanted 0 to {dp_world_size - 1} (dp_world_size is {dp_world_size})")
    steps = num_steps(num_batches, dp_world_size, tail=tail, start=start)
    if not 0 <= step < steps:
        raise IndexError(f"step {step} is outside of the {steps} steps left from position {start} of {num_batches}")
    position = start + step * dp_world_size + dp_rank
    repeated = position >= num_batches
    return Turn(position % num_batches, 0 if repeated and tail == "short" else 1, repeated)


def next_position(num_batches: int, steps_done: int, *, dp_world_size: int, start: int = 0) -> int:
    """Returns the position of the state after `steps_done` steps; `num_batches` once the epoch is through."""
    return min(start + steps_done * dp_world_size, num_batches)


def mixed_steps(buckets: Array, dp_world_size: int, *, tail: Tail) -> int:
    """Returns in how many steps of an epoch the ranks do not all hold batches of one bucket.

    buckets: of every micro-batch in the epoch's order (`order.buckets(range(len(order)))`).
    """
    steps = num_steps(len(buckets), dp_world_size, tail=tail)
    positions = np.arange(steps * dp_world_size) % max(len(buckets), 1)
    taken = np.asarray(buckets)[positions].reshape(steps, dp_world_size)
    return int((taken != taken[:, :1]).any(axis=1).sum())


def _check(num_batches: int, dp_world_size: int, start: int) -> None:
    if dp_world_size < 1:
        raise PlanError(f"dp_world_size is {dp_world_size}, wanted 1 or more")
    if not 0 <= start <= num_batches:
        raise PlanError(f"position {start} is outside of the epoch's {num_batches} micro-batches")


STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """The micro-batch that comes next, in the sequence of all ranks together."""

    plan_key: str
    seed: int
    epoch: int
    position: int

    def at(self, position: int) -> LoaderState:
        """Returns the place `position` of the same epoch."""
        return replace(self, position=position)

    def next_epoch(self) -> LoaderState:
        """Returns the head of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {
            "version": STATE_VERSION,
            "plan_key": self.plan_key,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], *, plan_key: str, num_batches: int, earlier_key: str | None = None
    ) -> LoaderState:
        """Returns the state that `to_json` wrote, checked against the plan that is to go on.

        num_batches: micro-batches of an epoch. earlier_key: that forebay gave this plan in states of before. Raises ResumeError naming the field, its value and the wanted one.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(f"loader state is a {type(state).__name__}, wanted what Loader.state_dict() returned")
        version = _integer(state, "version", low=1)
        if version > STATE_VERSION:
            raise ResumeError(
                f"loader state: version is {version}, this forebay reads up to {STATE_VERSION}; "
                "resume with the forebay that wrote it, or a newer one"
            )
        stored = state.get("plan_key")
        if stored != plan_key and (earlier_key is None or stored != earlier_key):
            raise ResumeError(
                f"loader state: plan_key is {_short(stored)}, the plan here has {_short(plan_key)}; {why_differ(stored, plan_key)}"
            )
        position = _integer(state, "position", low=0)
        if position > num_batches:
            raise ResumeError(
                f"loader state: position is {position}, an epoch of the plan has {num_batches} micro-batches"
            )
        return cls(
            plan_key=plan_key, seed=_integer(state, "seed"), epoch=_integer(state, "epoch", low=0), position=position
        )


def _integer(state: Mapping[str, Any], name: str, *, low: int | None = None) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        wanted = "an integer" if low is None else f"an integer from {low} on"
        raise ResumeError(f"loader state: {name} is {value!r}, wanted {wanted}")
    return value


def _short(key: Any) -> str:
    return key[:16] if isinstance(key, str) else repr(key)
