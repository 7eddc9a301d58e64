"""The packer along a line of samples: it sees so many of them at once, and keeps to one budget or two."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from math import inf

import numpy as np

from forebay.store.layout import Array

_PIECE = 2**16
_LOOK = 128
"""Samples in sight, the oldest of them, that a completion is made of."""
_LAST = {False: 8, True: 2}
"""Samples of mean size, about, that a completion is to find room for, under one budget and under two: sums of many are
exact, and of sums of few the other budget admits more."""
_ENOUGH = 11
"""Under two budgets 1 / 2^11 of the smaller one may stay free: the other one decides, and sums are found sooner."""
_COMPLETIONS = 16
"""Completions, from the fullest on, that are held against the other budget."""
_Sample = tuple[int, int, int]
"""A sample: its place in the line, its tokens, and its patches."""


def stream_packs(
    tokens: Array,
    *,
    seq_len: int,
    patches: Array | None,
    max_patches: int | None,
    buffer_size: int,
    price: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the places of all samples pack by pack, int64 [num_samples], and where packs end, int64 [num_packs + 1].

    tokens: integers [num_samples] of 1 to `seq_len`; patches: integers [num_samples] of 0 to `max_patches`.
    `buffer_size` samples that wait are in sight at any time: the next of the line takes the place of one that is taken.
    The oldest always begins the next pack, so a sample waits for `buffer_size` packs at most. While there is room for
    many, the pack takes the next oldest; then the subset of those in sight (the oldest of equal ones) that fills it
    most: exact subset sums, the reachable ones as bits of an integer. Under two budgets these are sums of the one of
    which less is left, the fullest that the other admits.
    price: what a sample more in a pack has to fill, as a share of mean size x mean size / `seq_len`; more while large
    samples are in sight. Exact completions like several small samples, so large ones wait, and in the end stand alone:
    with a price a completion has to be better than the largest samples that fit. Infinite: these alone. It is of packs
    under one budget.
    """
    has_two = patches is not None and max_patches is not None
    if patches is None or max_patches is None:
        patches, max_patches = np.zeros_like(tokens), 0
    unit = max(int(np.gcd.reduce(patches)), 1)  # patches come by the merge square: fewer sums to tell apart
    patches, rooms = patches // unit, (seq_len, max_patches // unit)
    means = [float(held.sum(dtype=np.int64)) / max(len(tokens), 1) for held in (tokens, patches)]
    line = chain.from_iterable(_pieces(tokens, patches))
    packer = (_PricedPacker if price and not has_two else _Packer)(line, buffer_size, rooms, means)
    packer.last = [int(_LAST[has_two] * mean) for mean in means]
    packer.smallest = int(tokens.min(initial=seq_len)), int(patches.min(where=patches > 0, initial=rooms[1]))
    packer.enough = (1 << max(min(rooms).bit_length() - _ENOUGH, 0)) - 1 | 1 if has_two else 1
    packer.price = price * means[0] * means[0] / seq_len
    places, ends = array("q"), array("q", [0])
    while packer.waiting:
        places.extend(packer.pack())
        ends.append(len(places))
    return np.asarray(places, np.int64), np.asarray(ends, np.int64)


def _pieces(tokens: Array, patches: Array) -> Iterator[Iterable[_Sample]]:
    # A piece at a time: as Python integers all of them would take ten times the memory of the arrays.
    for start in range(0, len(tokens), _PIECE):
        stop = min(start + _PIECE, len(tokens))
        yield zip(range(start, stop), tokens[start:stop].tolist(), patches[start:stop].tolist(), strict=True)


class _Packer:
    """The samples that wait in sight, the oldest first, and the packs that are made of them."""

    def __init__(self, line: Iterator[_Sample], count: int, rooms: tuple[int, int], means: list[float]) -> None:
        self._line, self._rooms, self._means = line, rooms, means
        self.last = [0, 0]
        self.smallest, self.enough, self.price = (1, 0), 1, 0.0
        self.waiting = list(islice(line, count))

    def pack(self) -> list[int]:
        """Takes the samples of the next pack out of sight and returns their places; as many of the line come."""
        waiting, (low, patch_low) = self.waiting, self.last
        room, patch_room = self._rooms
        places, start, at_least, found = list[int](), 0, 1, [0]
        while found and room >= self.smallest[0] and patch_room >= self.smallest[1]:
            may_take = True
            while may_take:
                count, may_take = 0, bool(waiting)
                for place, tokens, patches in waiting:
                    if count >= at_least and (tokens > room - low or patches > patch_room - patch_low):
                        may_take = False
                        break
                    places.append(place)
                    room -= tokens
                    patch_room -= patches
                    count += 1
                del waiting[:count]
                waiting += islice(self._line, count)
                start, at_least = max(start - count, 0), 0
            found = self._fullest(start, room, patch_room)
            for number in found:
                place, tokens, patches = waiting.pop(number)
                places.append(place)
                room -= tokens
                patch_room -= patches
            # Of those that were looked at none fits any more.
            start = min(start + _LOOK - len(found), len(waiting))
            waiting += islice(self._line, len(found))
        return places

    def _fullest(self, start: int, room: int, patch_room: int) -> list[int]:
        """Returns the numbers, falling, of samples from `start` on that fill most of the budget with less room left."""
        first, other, rest, left = 1, 2, room, patch_room
        if room * self._means[1] > patch_room * self._means[0]:
            first, other, rest, left = 2, 1, patch_room, room
        waiting, enough = self.waiting, self.enough
        sums, reached = 1 << rest, list[int]()  # bit r is set where some of the samples so far leave r free
        for sample in islice(waiting, start, start + _LOOK):
            reached.append(sums)
            size = sample[first]
            if size <= rest:
                sums |= sums >> size
                if sums & enough:
                    break
        found, rest, left = self._admitted(sums, reached, start, (first, other), (rest, left))
        if first == 1 and found:
            return found
        # What takes nothing of the budget (text without images) is in no sum, and no sum may be admitted.
        stop = start + (_LOOK if left < self.last[other - 1] else _LOOK // 4)  # with much left, the oldest will do
        small = [number for number, sample in enumerate(islice(waiting, start, stop), start) if sample[first] <= rest]
        if len(small) > 1:
            small.sort(key=lambda number: waiting[number][other], reverse=True)
        for number in small:
            sample = waiting[number]
            if sample[first] <= rest and sample[other] <= left and number not in found:
                rest -= sample[first]
                left -= sample[other]
                found.append(number)
        return sorted(found, reverse=True)

    def _admitted(
        self, sums: int, reached: list[int], start: int, budgets: tuple[int, int], rooms: tuple[int, int]
    ) -> tuple[list[int], int, int]:
        """Returns the numbers, falling, of the fullest of the sums that the other budget admits, and both rests.

        reached: the sums before each of the samples from `start` on. Later samples are taken only where the earlier
        ones do not reach the sum. There are no numbers if the other budget admits none of the fullest sums.
        """
        (first, other), (room, other_room) = budgets, rooms
        waiting, numbers = self.waiting, range(start + len(reached) - 1, start - 1, -1)
        for _ in range(_COMPLETIONS):
            least = rest = (sums & -sums).bit_length() - 1
            left, found = other_room, list[int]()
            for number, before in zip(numbers, reversed(reached), strict=True):
                if not before >> rest & 1:
                    sample = waiting[number]
                    rest += sample[first]
                    left -= sample[other]
                    found.append(number)
                    if rest == room:
                        break
            if left >= 0:
                return found, least, left
            sums &= sums - 1
        return [], room, other_room


class _PricedPacker(_Packer):
    """Packs under one budget, in which the largest samples that fit stand against exact completions."""

    def __init__(self, line: Iterator[_Sample], count: int, rooms: tuple[int, int], means: list[float]) -> None:
        super().__init__(line, count, rooms, means)
        # The place is negated, so that of equal sizes the oldest comes last.
        self._by_size = sorted((size, -place) for place, size, _ in self.waiting)
        self._total = sum(size for size, _ in self._by_size)

    def pack(self) -> list[int]:
        """See `_Packer`."""
        (room, _), places, numbers = self._rooms, list[int](), [0]
        while numbers:
            for number in numbers:
                place, size, _ = self.waiting.pop(number)
                del self._by_size[bisect_left(self._by_size, (size, -place))]
                self._total -= size
                places.append(place)
                room -= size
            for sample in islice(self._line, len(numbers)):
                self.waiting.append(sample)
                insort(self._by_size, (sample[1], -sample[0]))
                self._total += sample[1]
            numbers = self._next(room)
        return places

    def _next(self, room: int) -> list[int]:
        """Returns the numbers, falling, of the samples that the pack takes next; none if none fits."""
        waiting = self.waiting
        if room < self.smallest[0] or not waiting:
            return []
        if self.price < inf and waiting[0][1] <= room - self.last[0]:
            return [0]
        largest, rest = self._largest(room)
        # The price rises with the fourth power of the mean size in sight. By products: a power differs among machines.
        growth = self._total / len(waiting) / self._means[0]
        price = self.price * (growth * growth) * (growth * growth)
        if rest > price:
            exact = self._fullest(0, room, 0)
            exact_rest = room - sum(waiting[number][1] for number in exact)
            if exact_rest + price * len(exact) < rest + price * len(largest):
                return exact
        return largest[:1]

    def _largest(self, room: int) -> tuple[list[int], int]:
        """Returns the numbers of samples of which each is the largest that still fits, and the room that is left."""
        found, place = list[int](), len(self._by_size)
        while place := bisect_right(self._by_size, (room, 1), hi=place):
            place -= 1
            size, negated = self._by_size[place]
            found.append(bisect_left(self.waiting, (-negated, 0, 0)))
            room -= size
        return found, room
