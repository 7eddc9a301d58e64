"""Position to micro-batch of a mixture: one endless stream, cut into epochs, computed at any place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forebay.train.plan.interface import Array, check_epoch
from forebay.train.plan.permutation import Ints, Permutations, derive_key

if TYPE_CHECKING:
    from forebay.train.plan.mixture import MixturePlan

MIXTURE_VERSION = 1
"""Bumped when the same mixture, seed, epoch and position give other samples."""

_MAX_LINES = 256
"""Passes whose permutations are kept: a tiny source of large weight goes through many in one batch."""


class MixtureOrder:
    """One epoch of a mixture: a function of (plan, seed, epoch, position) and nothing else.

    Each cell (source, class) has a line of its samples, put in order by a keyed permutation, another one each pass. Under
    `end`, an epoch is one pass.
    """

    __slots__ = ("_first_group", "_lines", "epoch", "plan", "seed")

    def __init__(self, plan: MixturePlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer)."""
        check_epoch(epoch)
        self.plan, self.seed, self.epoch = plan, seed, epoch
        goes_on = plan.exhausted == "repeat"
        self._first_group = epoch * (plan.num_batches // plan.lockstep) if goes_on else 0
        self._lines: dict[int, Permutations] = {}

    def __len__(self) -> int:
        return self.plan.num_batches

    def batch(self, position: int) -> Ints:
        """Returns the sample indices of one micro-batch, int64 [batch size]. IndexError outside 0..len-1."""
        return self.batches([position])[0]

    def bucket(self, position: int) -> int:
        """Returns the length class of one micro-batch. IndexError outside 0..len-1."""
        return int(self.buckets([position])[0])

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the length classes of several micro-batches, int64 [num_positions]."""
        different, back = np.unique(self._locate(positions)[0], return_inverse=True)
        found: Ints = self.plan.draw.classes(different)[back]
        return found

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """Returns several micro-batches at once: the same as `batch` one by one, at a fraction of the cost a batch."""
        groups, inside = self._locate(positions)
        if not len(groups):
            return []
        drawn = self.plan.draw.batches(groups, inside)
        samples = self._samples(drawn.sources, drawn.classes, drawn.ordinals)
        found, end = [], 0
        while end < len(samples):
            size = int(self.plan.batch_sizes[drawn.classes[end]])
            found.append(samples[end : end + size])
            end += size
        return found

    def drawn(self, position: int) -> Ints:
        """Returns the samples of each source handed out in this epoch before `position`, int64 [num_sources]. 0..len."""
        counted: Ints = (self._cells(position) - self._cells(0)).sum(1)
        return counted

    def repeated(self, position: int) -> int:
        """Returns how many samples, from the head of the stream to `position`, had been handed out in an earlier pass."""
        return int(np.maximum(self._cells(position) - self.plan.sizes, 0).sum())

    def _cells(self, position: int) -> Ints:
        if not 0 <= position <= len(self):
            raise IndexError(f"position {position} is outside of the epoch's {len(self)} micro-batches")
        group, inside = divmod(position, self.plan.lockstep)
        return self.plan.draw.cells(self._first_group + group, inside)

    def _locate(self, positions: Sequence[int] | Array) -> tuple[Ints, Ints]:
        where = np.asarray(positions, dtype=np.int64)
        if len(where) and not (where.min() >= 0 and where.max() < len(self)):
            bad = int(where.min() if where.min() < 0 else where.max())
            raise IndexError(f"position {bad} is outside of the epoch's {len(self)} micro-batches")
        groups, inside = np.divmod(where, self.plan.lockstep)
        return groups + self._first_group, inside

    def _samples(self, sources: Ints, classes: Ints, ordinals: Ints) -> Ints:
        cells = classes * len(self.plan.names) + sources
        passes, places = np.divmod(ordinals, self.plan.sizes[sources, classes])
        found = np.empty_like(places)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            found[chosen] = self._line(number)(places[chosen], member=cells[chosen])
        samples: Ints = self.plan.members[self.plan.offsets[cells] + found].astype(np.int64)
        return samples

    def _line(self, number: int) -> Permutations:
        if number not in self._lines:
            if len(self._lines) >= _MAX_LINES:
                self._lines.clear()
            turn = number if self.plan.exhausted == "repeat" else self.epoch
            key = derive_key("forebay mixture", MIXTURE_VERSION, self.seed, turn, "samples")
            self._lines[number] = Permutations(np.diff(self.plan.offsets).tolist(), key)
        return self._lines[number]
