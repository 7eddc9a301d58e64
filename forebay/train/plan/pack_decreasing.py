"""Best-fit-decreasing on the histogram of lengths: exactly its packs, equal ones thought of once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from forebay.train.plan.interface import Array
from forebay.train.plan.pack_patterns import Pattern

_Chain = tuple[int, int, "_Chain"] | None
"""What a pack holds: a length, how many of it, and what it held before."""


def best_fit_decreasing(counts: Array, *, seq_len: int) -> list[Pattern]:
    """Returns patterns that use every sample once, none above `seq_len` tokens.

    counts: int64 [seq_len + 1], samples of each length; none of length 0.
    From the longest sample to the shortest, each goes into the pack with the least room that it fits, or a new one
    (Johnson 1974). A pack that is the tightest for a length stays so until the length does not fit any more, so packs of
    equal room take it all in the same way.
    """
    packs: defaultdict[int, list[tuple[int, _Chain]]] = defaultdict(list)
    rooms = 0  # bit r: there are packs with room r
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else seq_len
            times, chain = packs[room].pop() if fitting else (left, None)
            each = min(room // length, left)
            used = min(times, left // each)
            if fitting and used < times:
                packs[room].append((times - used, chain))
            if not packs[room]:
                rooms &= ~(1 << room)
            rest = room - each * length
            packs[rest].append((used, (length, each, chain)))
            rooms |= 1 << rest
            left -= used * each
    return [(times, _lengths(chain)) for groups in packs.values() for times, chain in groups]


def _lengths(chain: _Chain) -> list[int]:
    found: list[int] = []
    while chain is not None:
        length, copies, chain = chain
        found += [length] * copies
    return found
