"""The fewest packs of several ways: each is tried only while none has reached what no packing can go below.

On the histogram, along a line of a few thousand samples of which each stands for many, with the shortest samples packed
apart, and under several budgets by best-fit-decreasing of vectors.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter

import numpy as np

from forebay.plan.pack.along_line import stream_packs
from forebay.plan.pack.fit import Pattern, best_fit, best_fit_decreasing, shuffled_groups
from forebay.store.layout import Array, Ints

Packs = tuple[Array, Array]
"""Places pack by pack, and where packs begin and end."""
_LINE, _SHORT_LINE, _SEEN = 4096, 1024, 64
"""Samples of a line that stands for all, or for the shortest of them, and how many of it a packer sees at once."""
_WHOLE = 8192
"""Samples that best-fit-decreasing of vectors looks at together."""
_NEAR = 8192
"""One pack in so many above what the number of samples in a pack allows is good enough."""
_MOST = 64
"""Samples in a pack up to which their number is looked at as a limit."""
_MENDED = 2
"""Times that the packs least full are packed again."""
_SHARES = (1.0, 0.998)
"""How full packs of the shortest samples are to be."""


def num_packs(patterns: list[Pattern]) -> int:
    """Returns how many packs the patterns are."""
    return sum(times for times, _ in patterns)


def fewest_packs(counts: Array, *, seq_len: int, key: int) -> list[Pattern]:
    """Returns patterns that use every sample once, none above `seq_len`: the fewest of several ways.

    counts: int64 [seq_len + 1], samples of each length; none of length 0. key: 64 bits, of the lines' order.
    """
    apart = [partial(_apart, counts, share, seq_len=seq_len, key=key) for share in _SHARES]
    least, by_count = fewest(counts, seq_len=seq_len), _fewest_by_count(counts, seq_len=seq_len)
    # Where the number of samples in a pack is the limit, the way made for it comes close, and a line helps seldom.
    is_counted = by_count > least
    line = partial(_along_lines, counts, _SHORT_LINE if is_counted else _LINE, seq_len=seq_len, key=key)
    ways = [*apart, line] if is_counted else [line, *apart]
    enough = by_count + by_count // _NEAR if is_counted else least
    found = best_fit_decreasing(counts, seq_len=seq_len)
    for make in [partial(best_fit, counts, seq_len=seq_len), *ways]:
        if num_packs(found) > enough:
            found = min(found, make(), key=num_packs)
    for number in range(_MENDED * (len(found) > 1)):
        if num_packs(found) > enough:
            found = min(_mended(found, seq_len=seq_len, key=key + number), found, key=num_packs)
    return found


def _mended(patterns: list[Pattern], *, seq_len: int, key: int) -> list[Pattern]:
    """Returns the packs with those least full, and as many others, packed again along a line."""
    worst = sorted(range(len(patterns)), key=lambda number: sum(patterns[number][1]))
    order = shuffled_groups(np.zeros(len(patterns), np.int64), key=key).tolist()
    left, line = [times for times, _ in patterns], list[int]()
    for numbers, enough in ((worst, _SHORT_LINE), (order, 2 * _SHORT_LINE)):
        for number in numbers:
            lengths = patterns[number][1]
            packs = min(left[number], max(enough - len(line), 0) // len(lengths))
            packs = packs if numbers is worst else min(packs, 1)
            left[number] -= packs
            line += lengths * packs
    loose = np.array(line, np.int64)[shuffled_groups(np.zeros(len(line), np.int64), key=key)]
    places, ends = stream_packs(loose, seq_len=seq_len, patches=None, max_patches=None, buffer_size=_SEEN)
    again = [(1, loose[places[start:end]].tolist()) for start, end in pairwise(ends.tolist())]
    return [(times, lengths) for times, (_, lengths) in zip(left, patterns, strict=True) if times] + again


def fewest(counts: Array, *, seq_len: int) -> int:
    """Returns packs that no packing goes below: by tokens, and by how many samples longer than S / 2, S / 3 ... fit.

    The dual feasible functions of Fekete and Schepers 2001, in integers.
    """
    lengths = np.flatnonzero(counts)
    tokens = counts[lengths] * lengths
    least = -(-int(tokens.sum()) // seq_len)
    for part in range(1, min(seq_len // int(lengths[0]), _MOST) + 1):
        whole, rest = np.divmod((part + 1) * lengths, seq_len)
        shares = np.where(rest == 0, lengths * part, whole * seq_len)
        least = max(least, -(-int(counts[lengths] @ shares) // (part * seq_len)))
    return least


def _fewest_by_count(counts: Array, *, seq_len: int) -> int:
    """Returns packs that no packing goes below by how many can have one sample, two ...: the shortest ones, that fit.

    0 where a pack can have more than `_MOST`: there the tokens are the limit.
    """
    lengths = np.flatnonzero(counts)
    most, samples = seq_len // int(lengths[0]), np.cumsum(counts[lengths])
    tokens, total = np.cumsum(counts[lengths] * lengths), int(samples[-1])

    def excess(packs: int, each: int) -> int:
        place = int(np.searchsorted(samples, each * packs))
        return int(tokens[place]) - (int(samples[place]) - each * packs) * int(lengths[place]) - packs * seq_len

    least, more = 0, 0  # more: packs with at least one sample more than `each`, with two more ..., all together
    for each in range(most if most <= _MOST else 0, 0, -1):
        least = max(least, -(-(total - more) // each))
        more += bisect_right(range(1, total // each + 1), 0, key=partial(excess, each=each))
    return least


def _along_lines(counts: Array, num_samples: int, *, seq_len: int, key: int) -> list[Pattern]:
    """Returns the packs of lines of so many samples, that stand for many of their length, for fewer from line to line.

    Three quarters of a line are used: what its last packs would have to take waits for the next one.
    """
    rest, patterns, times = counts.copy(), [], int(counts.sum())
    while rest.any():
        times = max(min(int(rest.sum()) // num_samples, times // 2), 1)
        line = np.repeat(np.arange(len(rest)), rest // times)
        line = line[shuffled_groups(np.zeros_like(line), key=key ^ times)]
        places, ends = stream_packs(line, seq_len=seq_len, patches=None, max_patches=None, buffer_size=_SEEN)
        kept = len(ends) - 1 if times == 1 else int(np.searchsorted(ends, len(line) * 3 // 4))
        taken = line[places]
        patterns += [(times, taken[start:end].tolist()) for start, end in pairwise(ends[: kept + 1].tolist())]
        rest = rest - times * np.bincount(taken[: ends[kept]], minlength=len(rest))
    return patterns


def _apart(counts: Array, share: float, *, seq_len: int, key: int) -> list[Pattern]:
    """Returns packs of k of the shortest samples each, so many that these fill `share` of them, and those of the rest.

    k is one more than samples of mean length fit a pack: of similar lengths only the shorter ones can stand so close.
    """
    lengths = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    tokens = np.cumsum(lengths, dtype=np.int64)
    each = seq_len * len(lengths) // int(tokens[-1]) + 1
    cut = int(np.count_nonzero(tokens * each <= np.arange(1, len(lengths) + 1) * (share * seq_len)))
    short, long = (np.bincount(part, minlength=len(counts)) for part in (lengths[:cut], lengths[cut:]))
    packs = _along_lines(short, _SHORT_LINE, seq_len=seq_len, key=key) if cut else []
    if cut == len(lengths):
        return packs
    ways = [pack(long, seq_len=seq_len) for pack in (best_fit, best_fit_decreasing)]
    return packs + min(ways, key=num_packs)


def vector_best_fit(sizes: Array, rooms: Sequence[int], *, least: int) -> Packs:
    """Returns the fewest packs of several orders of best-fit-decreasing under budgets; stops where one has `least`.

    By tokens, by each other unit, by the sum of their shares of the budgets and by the largest share: each sample, the
    largest first, goes into the pack with the least room by the same measure. More than 8,192 samples are packed in
    pieces. sizes: integers [budgets, num_samples]. rooms: the budgets, whose common multiple, as often as they are, an
    int64 holds.
    """
    room = np.int64(math.lcm(*rooms))
    shares = sizes * (room // np.array(rooms))[:, None]
    by_one: list[Callable[[Array], Array]] = [itemgetter(number) for number in range(len(rooms))]
    best: Array | None = None
    for measure in [*by_one, lambda v: v.sum(0), lambda v: v.max(0)]:
        owners, count = np.empty(sizes.shape[1], np.int64), 0
        for start in range(0, sizes.shape[1], _WHOLE):
            piece = slice(start, start + _WHOLE)
            owners[piece] = count + _decreasing(shares[:, piece], room, measure)
            count = int(owners[piece].max()) + 1
        if best is None or count <= best.max():
            best = owners
        if best.max() < least:
            break
    assert best is not None
    return np.argsort(best, kind="stable"), np.concatenate(([0], np.cumsum(np.bincount(best))))


def _decreasing(shares: Array, room: np.int64, measure: Callable[[Array], Array]) -> Ints:
    """Returns the pack of each sample. shares: int64 [budgets, num_samples], all of `room`."""
    owners = np.empty(shares.shape[1], np.int64)
    smallest = shares.min(axis=1)
    open_rooms, numbers = np.empty((len(shares), 64), np.int64), np.empty(64, np.int64)
    width = count = 0
    for sample in np.argsort(-measure(shares), kind="stable").tolist():
        size = shares[:, sample]
        held = open_rooms[:, :width]
        fitting = np.flatnonzero((held >= size[:, None]).all(axis=0))
        if len(fitting):
            pack = int(fitting[np.argmin(measure(held[:, fitting]))])
            held[:, pack] -= size
        else:
            if width == len(numbers):
                # Packs that take no sample any more are dropped; else there is room for as many again.
                kept = np.flatnonzero((held >= smallest[:, None]).all(axis=0))
                spare = np.empty(2 * len(kept) + 64, np.int64)
                numbers, width = np.concatenate((numbers[kept], spare)), len(kept)
                open_rooms = np.concatenate((held[:, kept], np.stack([spare] * len(shares))), axis=1)
            pack = width
            open_rooms[:, pack], numbers[pack] = room - size, count
            width, count = width + 1, count + 1
        owners[sample] = numbers[pack]
    return owners
