"""Which samples go into the packs that are planned: drawn at random among those of a length, in random order inside a pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from forebay.train.plan.interface import Array
from forebay.train.plan.pack_patterns import Pattern
from forebay.train.plan.permutation import mix

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

    groups: integers [num_places], 0 or more. key: a 64-bit integer. first: number of the first place, where the groups are
    a piece of something longer: the random order is a function of (key, first + place).
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
