"""How ranks share one sequence of micro-batches: W ranks take W consecutive ones a step.

From position `start` on, rank r takes at its step s the position start + s * W + r. The state of a run is therefore one
global position, and a run of any W goes on where a run of another W stopped. All ranks do the same number of steps; where
the positions left are not a multiple of W, the end of the epoch is, by `plan.tail`:

- `drop`: the last, incomplete step is not done; up to W - 1 micro-batches are left out.
- `pad`: the step is filled with micro-batches from the epoch's head, which are trained on twice.
- `short`: the step is filled in the same way, so that collective operations find every rank, but the fillers have weight
  0: their loss is to be multiplied by 0, and every sample counts exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np

from forebay.errors import ConfigError, PlanError
from forebay.train.plan.interface import Array, Tail


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
