"""Packs from a line of samples, of which only so many are seen at once: under one budget or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from forebay.store.layout import Array

_SPARE = 96
"""Samples that are looked at beyond those that could fill the pack: choices for the exact completion."""


_TRIES = 16
"""Completions, from the fullest on, that are held against the second budget."""


_PIECE = 2**16


_Waiting = tuple[int, int, int]
"""A sample that waits: its place in the line, what it takes of the tighter budget, and of the other one."""


def stream_packs(
    tokens: Array, *, seq_len: int, patches: Array | None, max_patches: int | None, buffer_size: int
) -> tuple[Array, Array]:
    """Returns the places of all samples pack by pack, int64 [num_samples], and where packs end, int64 [num_packs + 1].

    tokens: integers [num_samples] of 1 to `seq_len`; patches: integers [num_samples] of 0 to `max_patches`.
    Of `buffer_size` samples of the line, the oldest always goes into the next pack, with the subset of the others (the
    oldest of equal ones) that fills the tighter budget most: exact subset sums, the reachable ones as bits of an
    integer. Under two budgets the fullest of them that the other budget admits, and then what still fits. The line
    then moves up, so a sample waits for `buffer_size` packs at most.
    """
    if patches is None or max_patches is None:
        sizes, rooms = (tokens, np.zeros_like(tokens)), (seq_len, 0)
    else:
        unit = max(int(np.gcd.reduce(patches)), 1)  # patches come by the merge square: fewer sums to tell apart
        sizes, rooms = (tokens, patches // unit), (seq_len, max_patches // unit)
    demands = [int(size.sum(dtype=np.int64)) for size in sizes]
    if demands[1] * rooms[0] > demands[0] * rooms[1] > 0:
        sizes, rooms = sizes[::-1], rooms[::-1]
    line = _line(*sizes)
    waiting = list(islice(line, buffer_size))
    places, ends = np.empty(len(tokens), dtype=np.int64), [0]
    while waiting:
        chosen = _choose(waiting, *rooms)
        places[ends[-1] : ends[-1] + len(chosen)] = [waiting[number][0] for number in chosen]
        ends.append(ends[-1] + len(chosen))
        taken, end = set(chosen), chosen[-1] + 1
        waiting[:end] = [sample for number, sample in enumerate(waiting[:end]) if number not in taken]
        waiting += islice(line, len(chosen))
    return places, np.array(ends, dtype=np.int64)


def _line(first: Array, second: Array) -> Iterator[_Waiting]:
    # A piece at a time: as Python integers all of them would take ten times the memory of the arrays.
    for start in range(0, len(first), _PIECE):
        stop = min(start + _PIECE, len(first))
        yield from zip(range(start, stop), first[start:stop].tolist(), second[start:stop].tolist(), strict=True)


def _choose(waiting: Sequence[_Waiting], room: int, other_room: int) -> list[int]:
    """Returns which of the waiting samples, rising, are the next pack; the first one always is."""
    _, size, other_size = waiting[0]
    room, other_room = room - size, other_room - other_size
    chosen = [0, *_fullest(waiting, room, other_room)]
    if other_room == 0:
        return chosen
    # What takes nothing of the tighter budget (text without images) is in no sum; and a pack may have found no sum.
    room -= sum(waiting[number][1] for number in chosen[1:])
    other_room -= sum(waiting[number][2] for number in chosen[1:])
    for number in sorted(set(range(min(len(waiting), chosen[-1] + _SPARE))) - set(chosen)):
        _, size, other_size = waiting[number]
        if size <= room and other_size <= other_room:
            chosen.append(number)
            room, other_room = room - size, other_room - other_size
    return sorted(chosen)


def _fullest(waiting: Sequence[_Waiting], room: int, other_room: int) -> list[int]:
    """Returns which of the waiting samples but the first, rising, fill `room` most within `other_room`."""
    numbers: list[int] = []
    reached = [1]  # reached[n]: bit s is set where some of the first n numbers have the sum s
    sums, goal, mask = 1, 1 << room, (2 << room) - 1
    seen, spare = 0, _SPARE
    for number, (_, size, other_size) in enumerate(islice(waiting, 1, None), start=1):
        if not 0 < size <= room or other_size > other_room:
            continue
        sums |= sums << size & mask
        numbers.append(number)
        reached.append(sums)
        seen += size
        spare -= seen > room
        if sums & goal or not spare:
            break
    for _ in range(_TRIES):
        total = sums.bit_length() - 1
        found = _subset(waiting, numbers, reached, total)
        if sum(waiting[number][2] for number in found) <= other_room:
            return found
        sums ^= 1 << total
    return []


def _subset(waiting: Sequence[_Waiting], numbers: list[int], reached: list[int], total: int) -> list[int]:
    """Returns the numbers, rising, whose sizes have the sum `total`: a later one only where the earlier ones do not reach."""
    found = []
    for place in range(len(numbers) - 1, -1, -1):
        if not total:
            break
        if not reached[place] >> total & 1:
            found.append(numbers[place])
            total -= waiting[numbers[place]][1]
    return found[::-1]
