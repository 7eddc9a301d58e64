"""Best fit with exact completion, on the histogram of lengths: packs of which thousands are alike are thought of once."""

from __future__ import annotations

import numpy as np

from forebay.train.plan.interface import Array

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
    for target in range(room, max(longest, room - _TRIES), -1):
        if pair := stock.pair(target):
            return pair
    return [longest]


class _Stock:
    """The samples that are left, by length.

    The lengths that occur are bits of an integer, and of its mirror image: which pairs have a given sum is then one shift
    and one AND over all lengths.
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

    def pair(self, target: int) -> list[int]:
        """Returns two lengths of this sum, of all such pairs the one with the longest; none where there is none."""
        longer = (self._bits & (self._mirrored >> (self._top - target))).bit_length() - 1
        if longer <= 0 or (2 * longer == target and self._counts[longer] < 2):
            return []
        return [longer, target - longer]

    def cross_section(self, room: int, longest: int) -> list[int]:
        """Returns lengths at even distances in the sorted line of all samples, so many that about `longest` stays free."""
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
        """Takes the samples of more packs of these lengths, as many as there are up to `at_most`; returns how many packs."""
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
