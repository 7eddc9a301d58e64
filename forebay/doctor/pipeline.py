"""How long a step waits for its batch: a queue between hands that fill batches and a loop that takes them. Pure.

The model: `hands` threads or processes take batches in their order, at most `ahead` of these are asked for before the
loop wants them, and a batch takes what its frames take. The loop takes a batch, then steps. Without hands the loop
fills each batch itself. On a CPU that trains, step and hands share the cores: where they want more cores than there
are, both become slower in proportion.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What an epoch, or its beginning, took."""

    total_s: float
    wait_s: float
    fill_s: float
    """Seconds of all hands together."""

    @property
    def idle(self) -> float:
        """The share in which the loop waited."""
        return self.wait_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The cores that the loop's steps and the hands share. step_cores: that a step keeps busy."""

    cores: int
    step_cores: float


def run(
    fills_s: Sequence[float], steps_s: Sequence[float], *, hands: int, ahead: int, shared: Shared | None = None
) -> Timeline:
    """Returns what a loop over some batches takes. fills_s, steps_s: of each batch in its order, as many of both.

    shared: None: a step needs no core.
    """
    found = _run(fills_s, steps_s, hands=hands, ahead=ahead)
    if shared is None or not hands or not found.total_s:
        return found
    wanted = (found.fill_s + shared.step_cores * sum(steps_s)) / found.total_s
    slower = max(wanted / shared.cores, 1.0)
    if slower == 1.0:
        return found
    return _run([slower * s for s in fills_s], [slower * s for s in steps_s], hands=hands, ahead=ahead)


def _run(fills_s: Sequence[float], steps_s: Sequence[float], *, hands: int, ahead: int) -> Timeline:
    if not hands:
        return Timeline(total_s=sum(fills_s) + sum(steps_s), wait_s=sum(fills_s), fill_s=sum(fills_s))
    free = [0.0] * hands
    asked: list[float] = []  # when the loop wanted each batch
    now = wait_s = 0.0
    done: list[float] = []
    for number, step_s in enumerate(steps_s):
        asked.append(now)
        # A batch is given to a hand when the loop wants the one that stands `ahead` places before it.
        while len(done) < min(number + ahead + 1, len(fills_s)):
            place = len(done)
            given = 0.0 if place < ahead else asked[place - ahead]
            begins = max(heapq.heappop(free), given)
            done.append(begins + fills_s[place])
            heapq.heappush(free, done[-1])
        ready = max(now, done[number])
        wait_s += ready - now
        now = ready + step_s
    return Timeline(total_s=now, wait_s=wait_s, fill_s=sum(fills_s))
