"""When each shard is needed next, as far ahead as the order was looked at; nothing here reads a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from forebay.store.layout import Ints
from forebay.store.remote.node.uses import NEVER


class NextUses:
    """The next use of every shard, kept true while steps go by. Costs about 0.2 us a use, and 16 bytes.

    next_use: int64 [num_shards], the first step from `now` on that needs each shard; NEVER: none that was looked at.
    now: the steps that are done. looked_at: the steps that were looked at, from step 0 on.

    Every use knows the next use of its shard, so a step that is done hands on to them: nothing is searched again.
    """

    def __init__(self, num_shards: int) -> None:
        self.next_use: Ints = np.full(num_shards, NEVER, np.int64)
        self.now = self.looked_at = 0
        # Uses are numbered through, and stand in rings at number % size.
        self._shards, self._following = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
        self._start = self._stop = 0
        self._last: Ints = np.full(num_shards, -1, np.int64)  # the last use of each shard
        self._ends: deque[tuple[int, int]] = deque()  # of every step that is not done: itself, the end of its uses

    def __len__(self) -> int:
        """Uses that are looked at and not done."""
        return self._stop - self._start

    @property
    def num_known(self) -> int:
        """Shards whose next use is known."""
        return int(np.count_nonzero(self.next_use < NEVER))

    def extend(self, needed: Sequence[Ints]) -> None:
        """Looks at the steps that follow. needed: the shards of each, each shard once."""
        first = self.looked_at
        self.looked_at += len(needed)
        sizes = [len(shards) if first + i >= self.now else 0 for i, shards in enumerate(needed)]
        ends = (np.cumsum(sizes) + self._stop).tolist()
        for step, end in enumerate(ends, first):
            if step >= self.now:
                self._ends.append((step, end))
        shards = np.concatenate([np.zeros(0, np.int64), *(s for s, size in zip(needed, sizes, strict=True) if size)])
        if len(shards):
            self._append(shards, np.repeat(np.arange(first, self.looked_at), sizes))

    def _append(self, shards: Ints, steps: Ints) -> None:
        """Adds uses in the order of their steps."""
        numbers = np.arange(self._stop, self._stop + len(shards))
        self._make_room(len(shards))
        places = numbers % len(self._shards)
        self._shards[places], self._following[places] = shards, NEVER
        order = np.argsort(shards, kind="stable")
        is_first = np.ones(len(shards), bool)
        is_first[1:] = shards[order][1:] != shards[order][:-1]
        self._following[places[order[:-1]][~is_first[1:]]] = steps[order[1:]][~is_first[1:]]
        heads, tails = order[is_first], order[np.append(is_first[1:], True)]
        before = self._last[shards[heads]]
        is_open = before >= self._start
        self._following[before[is_open] % len(self._shards)] = steps[heads[is_open]]
        self.next_use[shards[heads[~is_open]]] = steps[heads[~is_open]]
        self._last[shards[tails]] = numbers[tails]
        self._stop += len(shards)

    def advance(self, now: int) -> None:
        """Makes all steps before `now` done."""
        self.now, end = max(now, self.now), self._start
        while self._ends and self._ends[0][0] < self.now:
            end = self._ends.popleft()[1]
        places = np.arange(self._start, end) % len(self._shards)
        # Of a shard that comes several times numpy keeps what is assigned last: the later use.
        self.next_use[self._shards[places]] = self._following[places]
        self._start = end

    def _make_room(self, count: int) -> None:
        size = len(self._shards)
        if len(self) + count <= size:
            return
        while size < len(self) + count:
            size *= 2
        numbers = np.arange(self._start, self._stop)
        for name in ("_shards", "_following"):
            old, new = getattr(self, name), np.zeros(size, np.int64)
            new[numbers % size] = old[numbers % len(old)]
            setattr(self, name, new)
