"""The packers on the histogram of all lengths: packs of which thousands are alike are thought of once.

`best_fit` has exact completion; `best_fit_decreasing` makes exactly the packs of the usual algorithm. `hand_out` then
draws at random which samples of a length go where, and `shuffle_inside` puts the samples of a pack into random order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from forebay.plan.permutation import mix
from forebay.store.layout import Array

Pattern = tuple[int, list[int]]
"""So many packs of these lengths each."""
_ROUNDS = 64
"""A pattern is repeated at most for this share of the packs to come, so that what is left keeps its mix of lengths."""
_TRIES = 256
"""Tokens that may stay free before a completion by one sample alone is taken."""
_GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it modulo 2^32 are spread evenly (Weyl's sequence)."""


def best_fit(counts: Array, *, seq_len: int) -> list[Pattern]:
    """Returns patterns that use every sample once, none above `seq_len` tokens.

    counts: int64 [seq_len + 1], samples of each length; none of length 0.
    A pack begins with the longest sample left. While two more cannot fill it, it takes a cross-section of what is left;
    then the two (or the one) whose sum fills it exactly, or as nearly as can be, the longer of them as long as
    possible. The pack is repeated as often as its lengths allow. A cross-section leaves as many short samples as long
    ones for the last packs; best-fit-decreasing, which leaves only short ones, cannot fill them: it loses 0.6 % where
    lengths lie between 200 and 400. Histogram packing: Krell et al. 2021, arXiv 2107.02027.
    """
    stock = _Stock(counts, seq_len=seq_len)
    patterns = []
    while stock.num_samples:
        lengths = _one_pack(stock, seq_len)
        times = 1 + stock.take_again(lengths, at_most=stock.num_tokens // seq_len // _ROUNDS)
        patterns.append((times, lengths))
    return patterns


def _one_pack(stock: _Stock, seq_len: int) -> list[int]:
    """Takes the samples of one pack and returns their lengths."""
    lengths: list[int] = []
    room, found = seq_len, [stock.longest(seq_len)]
    while found:
        for length in found:
            stock.take(length)
        lengths += found
        room -= sum(found)
        found = _next(stock, room)
    return lengths


def _next(stock: _Stock, room: int) -> list[int]:
    """Returns the lengths that a pack with `room` left takes next; none where nothing fits."""
    longest = stock.longest(room)
    if longest == 0:
        return []
    if room > 2 * longest:
        return stock.cross_section(room, longest)
    for target in range(room, max(longest, room - _TRIES, 2 * stock.shortest() - 1), -1):
        if pair := stock.pair(target):
            return pair
    return [longest]


class _Stock:
    """The samples that are left, by length.

    The lengths that occur are bits of an integer, and of its mirror image: which pairs have a given sum is then one
    shift and one AND over all lengths.
    """

    def __init__(self, counts: Array, *, seq_len: int) -> None:
        self._counts = counts.astype(np.int64)
        self._lengths = np.arange(len(counts))
        self._top = seq_len
        self._phase = 0
        self._bits = self._mirrored = 0
        for length in np.flatnonzero(counts).tolist():
            self._flip(length)
        self.num_samples = int(self._counts.sum())
        self.num_tokens = int(self._counts @ self._lengths)

    def longest(self, room: int) -> int:
        """Returns the longest length of at most `room`, 0 where there is none."""
        return max((self._bits & ((2 << room) - 1)).bit_length() - 1, 0)

    def shortest(self) -> int:
        """Returns the shortest length that is left."""
        return (self._bits & -self._bits).bit_length() - 1

    def pair(self, target: int) -> list[int]:
        """Returns two lengths of this sum, of all such pairs the one with the longest; none where there is none."""
        longer = (self._bits & (self._mirrored >> (self._top - target))).bit_length() - 1
        if longer <= 0 or (2 * longer == target and self._counts[longer] < 2):
            return []
        return [longer, target - longer]

    def cross_section(self, room: int, longest: int) -> list[int]:
        """Returns lengths at even distances in the sorted line of all samples; about `longest` stays free."""
        count = (room - longest) * self.num_samples // self.num_tokens
        count = max(1, min(count, self.num_samples))
        self._phase = (self._phase + _GOLDEN) % 2**32
        ranks = (np.arange(count) * self.num_samples + (self._phase * self.num_samples >> 32)) // count
        found = []
        for length in np.searchsorted(np.cumsum(self._counts), ranks, side="right")[::-1].tolist():
            if length <= room:
                found.append(length)
                room -= length
        return found

    def take(self, length: int) -> None:
        """Takes one sample."""
        self._counts[length] -= 1
        self.num_samples -= 1
        self.num_tokens -= length
        if not self._counts[length]:
            self._flip(length)

    def take_again(self, lengths: list[int], *, at_most: int) -> int:
        """Takes the samples of up to `at_most` more packs of these lengths; returns how many packs."""
        values, copies = np.unique(lengths, return_counts=True)
        times = min(int((self._counts[values] // copies).min()), at_most)
        if times > 0:
            self._counts[values] -= times * copies
            self.num_samples -= times * len(lengths)
            self.num_tokens -= times * sum(lengths)
            for length in values[self._counts[values] == 0].tolist():
                self._flip(length)
        return times

    def _flip(self, length: int) -> None:
        self._bits ^= 1 << length
        self._mirrored ^= 1 << (self._top - length)


_Chain = tuple[int, int, "_Chain"] | None
"""What a pack holds: a length, how many of it, and what it held before."""


def best_fit_decreasing(counts: Array, *, seq_len: int) -> list[Pattern]:
    """Returns patterns that use every sample once, none above `seq_len` tokens.

    counts: int64 [seq_len + 1], samples of each length; none of length 0.
    From the longest sample to the shortest, each goes into the pack with the least room that it fits, or a new one
    (Johnson 1974). A pack that is the tightest for a length stays so until the length does not fit any more, so packs
    of equal room take it all in the same way.
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


_PIECE = 2**16
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def hand_out(lengths: Array, patterns: Sequence[Pattern], *, key: int) -> tuple[Array, Array]:
    """Returns the samples pack by pack, int32 [num_samples], and where packs begin, int64 [num_packs + 1].

    lengths: integers [num_samples], of which the patterns use each as often as it occurs. Which samples of a length go
    where is drawn under `key`, a 64-bit integer.
    """
    line = shuffled_groups(lengths, key=key)
    starts = np.cumsum(np.bincount(lengths))
    starts = np.concatenate(([0], starts[:-1])).tolist()
    members, done = np.empty_like(line), 0
    for times, pattern in patterns:
        block = members[done : done + times * len(pattern)].reshape(times, len(pattern))
        for column, length in enumerate(pattern):
            block[:, column] = line[starts[length] : starts[length] + times]
            starts[length] += times
        done += block.size
    sizes = np.repeat([len(pattern) for _, pattern in patterns], [times for times, _ in patterns])
    return members, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def shuffle_inside(members: Array, offsets: Array, *, key: int) -> None:
    """Puts the samples of every pack into a random order: members[offsets[p] : offsets[p + 1]], in place."""
    cuts = np.searchsorted(offsets, [*range(0, len(members), _PIECE), len(members)])
    for low, high in pairwise(np.unique(cuts).tolist()):
        start, stop = offsets[low], offsets[high]
        packs = np.repeat(np.arange(high - low), np.diff(offsets[low : high + 1]))
        members[start:stop] = members[start:stop][shuffled_groups(packs, key=key, first=int(start))]


def shuffled_groups(groups: Array, *, key: int, first: int = 0) -> Array:
    """Returns the places 0..len-1, int32 (int64 from 2^31 on), group by group as they rise, inside one in random order.

    groups: integers [num_places], 0 or more. key: a 64-bit integer. first: number of the first place, where the groups
    are a piece of something longer: the random order is a function of (key, first + place).
    One sort of flat integers that hold group, random bits and place: four times as fast as an argsort.
    """
    count = len(groups)
    place_bits = max(count - 1, 1).bit_length()
    random_bits = 64 - place_bits - max(int(groups.max(initial=0)), 1).bit_length()
    keys = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _PIECE):
        places = np.arange(start, min(start + _PIECE, count), dtype=np.uint64)
        piece = mix(np.uint64(key) + (places + np.uint64(first + 1)) * _INCREMENT)
        piece >>= np.uint64(64 - random_bits)
        piece |= groups[start : start + _PIECE].astype(np.uint64) << np.uint64(random_bits)
        keys[start : start + _PIECE] = piece << np.uint64(place_bits) | places
    keys.sort()
    found = np.empty(count, dtype=np.int32 if count < 2**31 else np.int64)
    for start in range(0, count, _PIECE):
        found[start : start + _PIECE] = keys[start : start + _PIECE] & np.uint64(2**place_bits - 1)
    return found
