"""Finds the table of a field: which few values each of its channels takes, and along which axis the channels lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from forebay.steps.form import Table
from forebay.steps.image.processor.codes import Encoder, Floats, blocks, different, even_first
from forebay.store.layout import Array

MAX_VALUES = 1 << 16
"""A channel takes at most so many: codes are uint16."""
_SAMPLE = 1 << 16
"""Values of a channel that are sorted to begin with. Where a quarter of them differ, there is no table."""
_SMALL = 1024
"""Arrays below this have no table: nothing is won, and a scale that was 1 for all images of a probe is no constant."""
_LARGE = 1 << 19
"""Arrays are thinned to about so many values."""
_QUIET = 2
"""So many arrays in a row bring nothing new before a table is believed."""
_ROUNDS = 6
"""More arrays that are asked for where the first ones did not come to rest."""

_RARE = (64, 256)
"""Where a channel has so many values, others that no image showed are looked for with flat ones: small outputs show few
at once. Behind these a channel of pixels has all its values, one for padding among them, and the table is believed."""
FLAT = 1000
"""Images from this number on are flat, sixteen values each."""

Layout = tuple[int, int, int]
"""(axis, inner, channels)."""


def table_of(
    arrays: Sequence[Floats], shape: Sequence[int | None], *, more: Callable[[int], Floats | None]
) -> Table | None:
    """Returns the table of a field, None where its values are too many or do not come to rest.

    arrays: of different images. shape: of the field. more: returns the array of another image, by a number.
    """
    if max(array.size for array in arrays) < _SMALL:
        return None
    arrays = [_thinned(array) for array in arrays if array.size]
    best: Table | None = None
    for layout in sorted(_layouts(shape), key=lambda layout: _few(arrays[0], layout)):
        found = _learned(arrays, layout, more=more)
        if found is not None and (best is None or _bytes(found) < _bytes(best)):
            best = found
        if best is None or best.values.shape[1] <= 256:
            break
    return best


def _thinned(array: Floats) -> Floats:
    """Returns some rows of a large array: a probe shall take no seconds, and what is stored is compared anyway."""
    if array.ndim < 2 or array.shape[-2] <= 4 or array.size <= _LARGE:
        return array
    return array[..., :: max(1, min(array.shape[-2] // 8, array.size // _LARGE)), :]


def _bytes(table: Table) -> tuple[int, int, int]:
    """The order by which tables are chosen: bytes of a code, then values of a channel, then those of the table."""
    count = table.values.shape[1]
    return (1 if count <= 256 else 2), count, table.values.size


def _layouts(shape: Sequence[int | None]) -> Iterator[Layout]:
    yield 0, 1, 1
    for axis, length in enumerate(shape):
        if length is not None and 2 <= length <= 4:
            yield axis, 1, length
    last = shape[-1] if shape else None
    if last is not None and last > 4 and last % 3 == 0:  # rows of patches
        yield len(shape) - 1, last // 3, 3
        yield len(shape) - 1, 1, 3


def _few(array: Floats, layout: Layout) -> tuple[int, int]:
    """The order of layouts: those of codes of one byte first, one channel before several."""
    count = max(map(len, _sampled(array, layout)))
    return (0 if count <= 256 else 1), (layout[2] if count <= 256 else count)


def _sampled(array: Floats, layout: Layout) -> list[Floats]:
    """Returns the different values of a part of each channel."""
    axis, inner, channels = layout
    shape = (1, 1, array.size) if channels == 1 else blocks(array.shape, axis, channels=channels, inner=inner)
    parts = np.ascontiguousarray(array).reshape(shape)
    return [different(parts[:, channel].reshape(-1)[:: _step(parts[:, channel])]) for channel in range(channels)]


def _step(part: Array) -> int:
    # Odd, so that no power of two of a shape makes it hit the same columns.
    return part.size // _SAMPLE * 2 + 1


def _learned(arrays: Sequence[Floats], layout: Layout, *, more: Callable[[int], Floats | None]) -> Table | None:
    sampled = _sampled(arrays[0], layout)
    if max(map(len, sampled)) > _SAMPLE // 4:
        return None
    table = _table(sampled, layout)
    quiet, number, waiting = 0, 0, list(arrays)
    while waiting:
        grown = _with(table, waiting.pop(0), layout)
        if grown is None or grown.values.shape[1] > MAX_VALUES:
            return None
        quiet = quiet + 1 if grown is table else 0
        table = grown
        is_settled = quiet >= _QUIET or number == _ROUNDS
        if not waiting and is_settled and number < FLAT and _is_rare(table):
            number = FLAT
            waiting = [array for array in map(more, range(FLAT, FLAT + 16)) if array is not None]
        if not waiting and quiet < _QUIET and number < _ROUNDS and table.values.shape[1] <= 2 * 256:
            another = more(number)
            number += 1
            if another is not None and another.size:
                waiting.append(_thinned(another))
    return table if quiet >= _QUIET or (number >= FLAT and table.values.shape[1] <= _RARE[1] + 1) else None


def _is_rare(table: Table) -> bool:
    """Returns whether a channel may take values that no image showed, and none has more than pixels can have."""
    counts = [len(different(row)) for row in table.values]
    return max(counts) <= _RARE[1] + 1 and any(_RARE[0] <= count < _RARE[1] for count in counts)


def _with(table: Table, array: Floats, layout: Layout) -> Table | None:
    """Returns the table with the values of an array, itself where they are all in it, None where they are no few."""
    missing = Encoder(table).missing(array)
    if not any(map(len, missing)):
        return table
    if max(map(len, missing)) > MAX_VALUES:
        return None
    return _table([different(np.concatenate(pair)) for pair in zip(table.values, missing, strict=True)], layout)


def _table(channels: Sequence[Floats], layout: Layout) -> Table:
    longest = max(map(len, channels))
    channels = [even_first(row) for row in channels]
    values = np.stack([np.append(row, np.repeat(row[-1:], longest - len(row))) for row in channels])
    return Table(axis=layout[0], values=values, inner=layout[1])
