"""Arrays of samples to a batch by their declared form: rows, padding, masks, and codes to values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forebay.steps.batch import PIECE, copy_values, raw, raw_values
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import Allocate, Batch
from forebay.store.layout import Array

Samples = Sequence[Mapping[str, Sequence[Array]]]
Place = tuple[slice | int, ...]
Block = tuple[Place, Array]


def collate(form: BatchForm, samples: Samples, *, dtype: torch.dtype, allocate: Allocate) -> Batch:
    """Returns the batch of some samples. samples: of each field its arrays, one for a clip, one an image for images.

    dtype: of float32 fields. Raises ValueError for arrays that stand in no batch together.
    """
    places = {field.name: _Places.of(field, [sample[field.name] for sample in samples]) for field in form.stored}
    batch: Batch = {}
    by_name = {field.name: field for field in form.stored}
    for field in form.fields:
        wanted = dtype if field.dtype == "float32" else getattr(torch, field.dtype)
        if field.mask_of is None:
            batch[field.name] = _values(field, places[field.name], dtype=wanted, allocate=allocate)
        else:
            marked = by_name[field.mask_of]
            batch[field.name] = _mask(field, marked, places[marked.name], dtype=wanted, allocate=allocate)
    return batch


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each array stands in a batch. shape: of the batch. blocks: (place along each axis, array)."""

    shape: tuple[int, ...]
    blocks: list[Block]
    grows: tuple[int, ...]
    """The axes of the batch that padding may stand along."""

    @classmethod
    def of(cls, field: FieldForm, arrays: Sequence[Sequence[Array]]) -> _Places:
        """Raises ValueError for arrays that stand in no batch together."""
        flat = [array for of_one in arrays for array in of_one]
        if not flat:
            inner = tuple(length or 0 for length in field.shape)
            shape = inner if field.join == "cat" else (0 if field.join == "stack" else len(arrays), *inner)
            return cls(shape, [], ())
        if field.join == "stack" and field.grows == (0,) and field.side == "right" and field.pad is not None:
            return cls._lines(field, flat)
        if field.pad is None and len({array.shape for array in flat}) > 1:
            shapes = sorted({array.shape for array in flat})
            raise ValueError(
                f"{field.name} is {list(shapes[0])} and {list(shapes[-1])}, and is not padded: only arrays of one "
                "shape stand in a batch together; take batches of one sample, or samples of one size"
            )
        longest = [max(array.shape[axis] for array in flat) for axis in range(len(field.shape))]
        rooms = [field.room(n) if axis in field.grows else n for axis, n in enumerate(longest)]
        if field.join == "stack":
            blocks: list[Block] = [
                ((row, *_slices(field, array.shape, rooms)), array) for row, array in enumerate(flat)
            ]
            return cls((len(flat), *rooms), blocks, tuple(axis + 1 for axis in field.grows))
        if field.join == "cat":
            along = field.grows[0] if field.grows else 0
            rooms[along] = sum(array.shape[along] for array in flat)
            grows = tuple(axis for axis in field.grows if axis != along)
            return cls(tuple(rooms), list(_behind(field, flat, rooms, along=along)), grows)
        rooms[0] = field.room(max(sum(len(array) for array in of_one) for of_one in arrays))
        nested: list[Block] = [
            ((row, *place), array)
            for row, of_one in enumerate(arrays)
            for place, array in _behind(field, of_one, rooms)
        ]
        return cls((len(arrays), *rooms), nested, tuple(sorted({1, *(axis + 1 for axis in field.grows)})))

    @classmethod
    def _lines(cls, field: FieldForm, arrays: Sequence[Array]) -> _Places:
        """Returns the places of arrays whose first axis alone grows, padded behind: most batches of sound."""
        inner = arrays[0].shape[1:]
        whole = tuple(slice(0, length) for length in inner)
        blocks: list[Block] = [((row, slice(0, len(array)), *whole), array) for row, array in enumerate(arrays)]
        return cls((len(arrays), field.room(max(map(len, arrays))), *inner), blocks, (1,))


def _slices(field: FieldForm, shape: Sequence[int], rooms: Sequence[int]) -> tuple[slice, ...]:
    """Returns where an array stands in a block of these lengths."""
    if field.side == "right":
        return tuple(slice(0, length) for length in shape)
    return tuple(slice(room - length, room) for length, room in zip(shape, rooms, strict=True))


def _behind(field: FieldForm, arrays: Sequence[Array], rooms: Sequence[int], *, along: int = 0) -> Iterator[Block]:
    """Yields the places of arrays one behind the other along an axis."""
    lengths = [array.shape[along] for array in arrays]
    start = rooms[along] - sum(lengths) if field.side == "left" else 0
    for array, length in zip(arrays, lengths, strict=True):
        place = list(_slices(field, array.shape, rooms))
        place[along] = slice(start, start + length)
        yield tuple(place), array
        start += length


def _values(field: FieldForm, places: _Places, *, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
    """Returns a field of a batch. An axis that grows behind others is the first in memory, as it is on disk."""
    moved = field.grows[0] + 1 if field.join == "stack" and len(field.grows) == 1 else 1
    if moved == 1:
        out = allocate(field.name, places.shape, dtype=dtype)
        view = out
    else:
        order = [0, moved, *(axis for axis in range(1, len(places.shape)) if axis != moved)]
        out = allocate(field.name, tuple(places.shape[axis] for axis in order), dtype=dtype)
        view = out.movedim(1, moved)
    write = _Writer(field, view, allocate=allocate)
    if sum(array.size for _, array in places.blocks) < out.numel():
        write.pad(places)
    for place, array in places.blocks:
        write(place, array)
    return view


class _Writer:
    """Writes arrays into a tensor of a batch."""

    def __init__(self, field: FieldForm, out: torch.Tensor, *, allocate: Allocate) -> None:
        self._field, self._out, self._rows = field, out, raw(out)
        self._is_float, self._allocate = out.is_floating_point(), allocate
        self._scratch: torch.Tensor | None = None

    def pad(self, places: _Places) -> None:
        """Writes the padding value where no array stands, rows that hold one array: beside that; else everywhere."""
        value = self._field.pad or 0
        padding = raw_values([value], self._out.dtype)[0] if self._is_float else value
        if self._field.join != "stack" or len(places.grows) != 1:
            self._rows[...] = padding
            return
        [axis] = places.grows
        for place, _ in places.blocks:
            held = place[axis]
            assert isinstance(held, slice)
            row = self._rows[place[0]] if axis == 1 else np.moveaxis(self._rows[place[0]], axis - 1, 0)
            row[: held.start] = padding
            row[held.stop :] = padding

    def __call__(self, place: Place, array: Array) -> None:
        """Writes one array."""
        if self._field.table is not None:
            self._expand(array, self._out[place])
        elif not self._is_float or array.dtype == self._rows.dtype:
            self._rows[place] = array
        else:
            self._copy(array, self._out[place])

    def _copy(self, array: Array, target: torch.Tensor) -> None:
        """Casts floats. In the order in which both lie in memory, where that is one."""
        if self._scratch is None:
            self._scratch = self._allocate("piece", (PIECE,), dtype=torch.float32)
        if len(self._field.grows) == 1 and self._field.join == "stack":
            axis = self._field.grows[0]
            array, target = np.moveaxis(array, axis, 0), target.movedim(axis, 0)
        source = np.ascontiguousarray(array)
        if target.is_contiguous():
            copy_values(source, target, scratch=self._scratch)
            return
        cast = torch.empty(source.shape, dtype=target.dtype)
        copy_values(source, cast, scratch=self._scratch)
        raw(target)[...] = raw(cast)

    def _expand(self, codes: Array, target: torch.Tensor) -> None:
        from forebay.steps.image.tables import expand

        table = self._field.table
        assert table is not None
        expand(codes, table.values, table.axis, target, inner=table.inner)


def _mask(
    mask: FieldForm, marked: FieldForm, places: _Places, *, dtype: torch.dtype, allocate: Allocate
) -> torch.Tensor:
    """Returns 1 where the values of the marked field stand and 0 in its padding, along the axes of the mask."""
    first = 0 if marked.join == "cat" else 1
    kept = [*range(first), *(axis + first for axis in mask.marked_axes(marked))]
    out = allocate(mask.name, tuple(places.shape[axis] for axis in kept), dtype=dtype)
    rows = out.numpy()
    rows[...] = 0
    for place, _ in places.blocks:
        rows[tuple(place[axis] for axis in kept)] = 1
    return out


def count(field: FieldForm, arrays: Sequence[Sequence[Array]]) -> tuple[int, int]:
    """Returns (values along the counted axis of the samples, those that their batch has room for).

    field: by which samples are counted. arrays: of each sample.
    """
    places = _Places.of(field, arrays)
    if not field.grows:
        return len(places.blocks), len(places.blocks)
    axis = field.grows[0]
    used = sum(array.shape[axis] for _, array in places.blocks)
    inner = axis if field.join == "cat" else axis + 1
    return used, places.shape[inner] * (1 if inner == 0 else math.prod(places.shape[:1]))
