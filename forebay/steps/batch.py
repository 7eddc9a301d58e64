"""Items of samples to a batch by their declared form, and what batches share: rows of text, and copies that cast.

numpy's float16 casts take about 20 times as long as torch's (one EPYC core, 240,000 values: 390 us against 17), so
torch casts. It gets pieces below its parallel grain: a loader thread must not start an OpenMP team beside the training
step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_values import finish_named, place_in, raw
from forebay.steps.image.tables import expand
from forebay.steps.step import Allocate, Batch, PaddingSide, TextBatch
from forebay.store.layout import Array
from forebay.store.source import Sample, column

PIECE = 32_000
"""Elements; torch runs element-wise work of fewer than 32,768 in the calling thread."""
IGNORED = -100
"""Label that torch's cross entropy passes over, as in transformers."""


def fresh(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    """Returns newly allocated memory; `name` does not matter."""
    return torch.empty(shape, dtype=dtype)


def raw_values(values: Sequence[float], dtype: torch.dtype) -> list[float]:
    """Returns the values rounded to `dtype` as `raw` shows them."""
    found: list[float] = raw(torch.tensor(values, dtype=dtype)).tolist()
    return found


def copy_values(values: Array, out: torch.Tensor, *, scratch: torch.Tensor) -> None:
    """Makes `out` equal to `values`, rounded to nearest even.

    values: float16 or float32, C-contiguous, read-only is fine. out: float16, float32 or bfloat16, contiguous, as many
    elements. scratch: float32 [PIECE], overwritten.
    """
    source = torch.from_numpy(_Writable.alias(values)).view(-1)
    target = out.view(-1)
    # Straight from float16 to bfloat16 torch takes 2.6 times as long as over float32.
    over_float32 = source.dtype == torch.float16 and target.dtype == torch.bfloat16
    if not over_float32 and torch.get_num_threads() == 1:
        target.copy_(source)
        return
    for piece, part in zip(torch.split(source, PIECE), torch.split(target, PIECE), strict=True):
        part.copy_(scratch[: len(piece)].copy_(piece) if over_float32 else piece)


class _Writable:
    """Alias of an array that does not say that it is read-only: torch warns of such arrays even where it only reads."""

    __slots__ = ("__array_interface__",)

    def __init__(self, values: Array) -> None:
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}

    @classmethod
    def alias(cls, values: Array) -> Array:
        """Returns the alias; it is to be read only, and only while `values` lives."""
        return np.asarray(cls(values))


def counted(name: str, values: Sequence[int], *, allocate: Allocate) -> torch.Tensor:
    """Returns int64 [batch]: a number a sample."""
    out = allocate(name, (len(values),), dtype=torch.int64)
    out.numpy()[:] = values
    return out


def filled(name: str, shape: tuple[int, int], value: int, *, allocate: Allocate) -> torch.Tensor:
    """Returns int64 of this shape with one value everywhere."""
    tensor = allocate(name, shape, dtype=torch.int64)
    tensor.numpy().fill(value)
    return tensor


@dataclass(frozen=True, slots=True)
class BatchesOfOne:
    """The row of a pack, made of the batches of its samples alone; their mask says nothing there."""

    text: TextBatch
    row_tokens: Callable[[int, int], int]
    """See `TextStep`."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Returns the tokens of each sample."""
        return [self.row_tokens(len(each["input_ids"]), len(each.get("input_features", ()))) for each in samples]

    def __call__(self, samples: Sequence[Sample]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the fields of tokens, int64, and those of one number a sample."""
        made = [self.text([sample], padding_side="right", allocate=fresh) for sample in samples]
        joined = {
            name: np.concatenate([batch[name].numpy().reshape(-1) for batch in made])
            for name in made[0]
            if name != "attention_mask"
        }
        tokens = {name for name in joined if made[0][name].ndim == 2}
        return {name: joined[name] for name in joined if name in tokens}, {
            name: joined[name] for name in joined if name not in tokens
        }


class MarkedText:
    """The row of a pack of conversations; labels are the ids that `label_mask` marks."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Returns the tokens of each sample."""
        return list(map(len, column(samples, "input_ids")))

    def __call__(self, samples: Sequence[Sample]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns `input_ids` and `labels`."""
        ids, mask = (np.concatenate(column(samples, name)) for name in ("input_ids", "label_mask"))
        return {"input_ids": ids, "labels": np.where(mask != 0, ids, ids.dtype.type(IGNORED))}, {}


def rows_of_tokens(
    name: str, lines: Sequence[Array], pad: int, *, side: PaddingSide = "right", allocate: Allocate
) -> torch.Tensor:
    """Returns int64 [batch, longest]: integers [n] of each sample, and padding."""
    out = filled(name, (len(lines), max(map(len, lines))), pad, allocate=allocate)
    room = out.shape[1]
    for row, line in zip(out.numpy(), lines, strict=True):
        start = room - len(line) if side == "left" else 0
        row[start : start + len(line)] = line
    return out


def ignore_to(labels: torch.Tensor, ends: Sequence[int]) -> None:
    """Makes the first so many labels of each row `IGNORED`."""
    longest = max(ends)
    if longest > 0:
        columns = labels.numpy()[:, :longest]
        columns[np.arange(columns.shape[1]) < np.array(ends)[:, None]] = IGNORED


ArraysOf = Mapping[str, Sequence[Sequence[Array]]]
"""Of each field the arrays of every sample: one of a clip, one an image of several images."""
Place = tuple[slice | int, ...]
Block = tuple[Place, Array]


def collate(
    form: BatchForm,
    samples: Sequence[Mapping[str, Sequence[Array]]],
    *,
    dtype: torch.dtype,
    allocate: Allocate,
    are_rows: bool = False,
) -> Batch:
    """Returns the batch of some samples. samples: of each field its arrays, one for a clip, one an image for images.

    See `collate_fields`.
    """
    columns = {name: [sample[name] for sample in samples] for name in form.read}
    return collate_fields(form, columns, dtype=dtype, allocate=allocate, are_rows=are_rows)


def collate_fields(
    form: BatchForm, arrays: ArraysOf, *, dtype: torch.dtype, allocate: Allocate, are_rows: bool = False
) -> Batch:
    """Returns the batch of some samples.

    dtype: of float32 fields. are_rows: arrays are as on disk, see `BatchForm.columns`. Raises ValueError for arrays
    that stand in no batch together.
    """
    places = {field.name: _places(field, arrays[field.name], are_rows=are_rows) for field in form.stored}
    batch: Batch = {}
    for field in form.fields:
        wanted = dtype if field.dtype == "float32" and field.is_rounded else getattr(torch, field.dtype)
        held = places[field.mask_of or field.lengths_of or field.name]
        if field.mask_of is not None:
            batch[field.name] = held.mask(field, dtype=wanted, allocate=allocate)
        elif field.lengths_of is not None:
            batch[field.name] = counted(field.name, held.lengths(), allocate=allocate)
        elif field.pad_of is not None:
            pads = [float(values[0]) for of_one in arrays[field.pad_of] for values in of_one]
            batch[field.name] = held.values(pads, dtype=wanted, allocate=allocate)
        else:
            batch[field.name] = held.values(None, dtype=wanted, allocate=allocate)
    return batch


def _places(field: FieldForm, arrays: Sequence[Sequence[Array]], *, are_rows: bool) -> _Lines | _Places:
    """Raises ValueError for arrays that stand in no batch together."""
    flat = [array for of_one in arrays for array in of_one]
    if field.pad is None and len({array.shape for array in flat}) > 1:
        shapes = sorted({array.shape for array in flat})
        raise ValueError(
            f"{field.name} is {list(shapes[0])} and {list(shapes[-1])}, and is not padded: only arrays of one "
            "shape stand in a batch together; take batches of one sample, or samples of one size"
        )
    if field.holds_moments:
        arrays = [[array[: len(array) // 2] for array in of_one] for of_one in arrays]
    if flat and field.is_of_lines and not field.holds_moments:
        return _Lines(field, flat if are_rows else list(map(field.rows, flat)))
    return _Places.of(field, arrays)


class _Lines:
    """Arrays with one axis that grows, the first one, as on disk: rows of a batch, or one behind the other."""

    def __init__(self, field: FieldForm, lines: Sequence[Array]) -> None:
        self._field, self._lines, self._inner = field, lines, lines[0].shape[1:]
        self._finish = None if field.finish is None else finish_named(field.finish)
        rows = list(map(len, lines))
        made = rows if self._finish is None else [self._made(n)[0] for n in rows]
        self._marked = rows if self._finish is None else list(map(self._finish.marked, rows))
        self._made_lengths = made
        if field.join == "cat":
            ends = list(itertools.accumulate(made))
            self._starts, self._shape = [0, *ends[:-1]], (ends[-1], *self._made(max(rows))[1:])
            return
        shape = self._made(field.room(max(rows)))
        self._starts = [0] * len(made) if field.side == "right" else [shape[0] - length for length in made]
        self._shape = (len(lines), *shape)

    def _made(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of the values that are made of so many rows."""
        if self._finish is not None:
            return self._finish.shape(self._field.length or rows, self._inner)
        copies = 1 if self._field.table is None else self._field.table.copies
        return (rows, *self._inner) if copies == 1 else (rows, self._inner[0] * copies, *self._inner[1:])

    def lengths(self) -> list[int]:
        """Returns the lengths of the arrays along the axis that grows."""
        return self._made_lengths

    def values(self, pads: Sequence[float] | None, *, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
        """Returns the field of a batch. An axis that grows behind others is the first in memory, as it is on disk."""
        field, is_cat = self._field, self._field.join == "cat"
        out = allocate(field.name, self._shape, dtype=dtype)
        write = _Writer(field, out, allocate=allocate)
        rows = write.rows
        padding = write.padding([field.pad or 0] if pads is None else pads)
        padding = padding * len(self._lines) if pads is None else padding
        if write.assigns and is_cat:
            np.concatenate(self._lines, out=rows, casting="unsafe")
        elif write.assigns and field.side == "right":  # most batches, in as few steps as can be
            flat, size, start = rows.reshape(-1), rows[0].size, 0
            for line, pad in zip(self._lines, padding, strict=True):
                stop = start + line.size
                flat[start:stop] = line.reshape(-1)
                flat[stop : start + size] = pad
                start += size
        elif write.casts and not is_cat and field.side == "right":
            scratch = allocate("piece", (PIECE,), dtype=torch.float32)
            for part, row, line, pad in zip(out.unbind(), rows, self._lines, padding, strict=True):
                copy_values(np.ascontiguousarray(line), part[: len(line)], scratch=scratch)
                row[len(line) :] = pad
        else:
            self._write(write, rows, out, padding)
        return out.movedim(1, field.grows[0] + 1) if not is_cat and field.grows[0] else out

    def _write(self, write: _Writer, rows: Array, out: torch.Tensor, padding: Sequence[float]) -> None:
        is_cat = self._field.join == "cat"
        parts = out.unbind() if write.takes_tensors and not is_cat else ()
        spans = zip(self._lines, self._starts, self._made_lengths, padding, strict=True)
        for index, (line, start, length, pad) in enumerate(spans):
            row, stop = rows if is_cat else rows[index], start + length
            if write.takes_tensors:
                write(line, row[start:stop], (out if is_cat else parts[index])[start:stop])
            else:
                write(line, row[start:stop], out)
            if not is_cat:
                row[:start] = pad
                row[stop:] = pad

    def mask(self, mask: FieldForm, *, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
        """Returns 1 where the values stand and 0 in the padding, along the axes of the mask."""
        field, is_cat = self._field, self._field.join == "cat"
        along = [field.order[axis] + (not is_cat) for axis in mask.marked_axes(field)]
        kept = along if is_cat else [0, *along]
        # Axes of the batch in memory, as they follow each other in the mask.
        out = allocate(mask.name, tuple(self._shape[axis] for axis in kept), dtype=dtype)
        rows, along = out.numpy(), [axis - (not is_cat) for axis in along]
        if along == [0] and not is_cat and field.side == "right":
            for row, length in zip(rows, self._marked, strict=True):
                row[:length] = 1
                row[length:] = 0
            return out
        rows[...] = 0
        for index, (start, length) in enumerate(zip(self._starts, self._marked, strict=True)):
            row = rows if is_cat else rows[index]
            row[tuple(slice(start, start + length) if axis == 0 else slice(None) for axis in along)] = 1
        return out


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each array stands in a batch. shape: of the batch. blocks: (place along each axis, array)."""

    field: FieldForm
    shape: tuple[int, ...]
    blocks: list[Block]
    grows: tuple[int, ...]
    """The axes of the batch that padding may stand along."""

    @classmethod
    def of(cls, field: FieldForm, arrays: Sequence[Sequence[Array]]) -> _Places:
        """Returns the places of arrays, one or more of each sample."""
        flat = [array for of_one in arrays for array in of_one]
        if not flat:
            inner = tuple(length or 0 for length in field.shape)
            shape = inner if field.join == "cat" else (0 if field.join == "stack" else len(arrays), *inner)
            return cls(field, shape, [], ())
        longest = [max(array.shape[axis] for array in flat) for axis in range(len(field.shape))]
        rooms = [field.room(n) if axis in field.grows else n for axis, n in enumerate(longest)]
        if field.join == "stack":
            blocks: list[Block] = [
                ((row, *place_in(array.shape, rooms, field.side)), array) for row, array in enumerate(flat)
            ]
            return cls(field, (len(flat), *rooms), blocks, tuple(axis + 1 for axis in field.grows))
        if field.join == "cat":
            along = field.grows[0] if field.grows else 0
            rooms[along] = sum(array.shape[along] for array in flat)
            grows = tuple(axis for axis in field.grows if axis != along)
            return cls(field, tuple(rooms), list(_behind(field, flat, rooms, along=along)), grows)
        rooms[0] = field.room(max(sum(len(array) for array in of_one) for of_one in arrays))
        nested: list[Block] = [
            ((row, *at), array) for row, of_one in enumerate(arrays) for at, array in _behind(field, of_one, rooms)
        ]
        return cls(field, (len(arrays), *rooms), nested, tuple(sorted({1, *(axis + 1 for axis in field.grows)})))

    def lengths(self) -> list[int]:
        """Returns the lengths of the arrays along the first axis that grows."""
        return [array.shape[self.field.grows[0]] for _, array in self.blocks]

    def values(self, pads: Sequence[float] | None, *, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
        """Returns the field of a batch; where no array stands, the padding value."""
        out = allocate(self.field.name, self.shape, dtype=dtype)
        write = _Writer(self.field, out, allocate=allocate)
        if sum(array.size for _, array in self.blocks) < out.numel():
            write.rows[...] = write.padding(pads or [self.field.pad or 0])[0]
        for place, array in self.blocks:
            if write.assigns:  # of no axis too
                write.rows[place] = array
            else:
                write(array, write.rows[place], out[place])
        return out

    def mask(self, mask: FieldForm, *, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
        """Returns 1 where the values stand and 0 in the padding, along the axes of the mask."""
        first = 0 if self.field.join == "cat" else 1
        kept = [*range(first), *(axis + first for axis in mask.marked_axes(self.field))]
        out = allocate(mask.name, tuple(self.shape[axis] for axis in kept), dtype=dtype)
        rows = out.numpy()
        rows[...] = 0
        for place, _ in self.blocks:
            rows[tuple(place[axis] for axis in kept)] = 1
        return out


def _behind(field: FieldForm, arrays: Sequence[Array], rooms: Sequence[int], *, along: int = 0) -> Iterator[Block]:
    """Yields the places of arrays one behind the other along an axis."""
    lengths = [array.shape[along] for array in arrays]
    start = rooms[along] - sum(lengths) if field.side == "left" else 0
    for array, length in zip(arrays, lengths, strict=True):
        at = list(place_in(array.shape, rooms, field.side))
        at[along] = slice(start, start + length)
        yield tuple(at), array
        start += length


class _Writer:
    """Makes parts of a tensor of a batch the values of arrays.

    rows: its memory as numpy has it. assigns: whether values go there as they are, by numpy's own assignment.
    casts: whether floats go there, rounded. takes_tensors: whether a part is to be given as a tensor too.
    """

    def __init__(self, field: FieldForm, out: torch.Tensor, *, allocate: Allocate) -> None:
        self.rows = raw(out)
        self._field, self._dtype, self._shape, self._allocate = field, out.dtype, out.shape, allocate
        self._is_computed = field.finish is not None or field.scale is not None
        is_same = not out.is_floating_point() or field.stored_dtype == self.rows.dtype
        self.assigns = is_same and field.table is None and not self._is_computed
        self.casts = not self.assigns and field.table is None and not self._is_computed
        self.takes_tensors = not self.assigns and not (self._is_computed and out.dtype == torch.float32)
        self._kept: dict[str, torch.Tensor] = {}

    def padding(self, values: Sequence[float]) -> list[Any]:
        """Returns values as `rows` shows them."""
        return raw_values(values, self._dtype) if self._dtype.is_floating_point else list(values)

    def __call__(self, array: Array, rows: Array, target: torch.Tensor) -> None:
        """Writes one array. rows: the memory of `target`, which is any tensor where none is taken."""
        if self.assigns:
            rows[...] = array
        elif self._field.table is not None:
            self._expand(array, target)
        elif self._is_computed:
            self._compute(array, rows, target)
        elif array.dtype == rows.dtype:
            rows[...] = array
        else:
            self._copy(array, target)

    def _copy(self, array: Array, target: torch.Tensor) -> None:
        """Casts floats. In the order in which both lie in memory, where that is one."""
        scratch, source = self._scratch("piece", (PIECE,)), np.ascontiguousarray(array)
        if target.is_contiguous():
            copy_values(source, target, scratch=scratch)
            return
        cast = torch.empty(source.shape, dtype=target.dtype)
        copy_values(source, cast, scratch=scratch)
        raw(target)[...] = raw(cast)

    def _compute(self, array: Array, rows: Array, target: torch.Tensor) -> None:
        """Writes what is computed of an array, in float32; for other dtypes in scratch of a row first."""
        made = rows
        if self._dtype != torch.float32:
            row = self._scratch("row", self._shape if self._field.join == "cat" else self._shape[1:])
            made = row.numpy().reshape(-1)[: rows.size].reshape(rows.shape)
        if self._field.finish is not None:
            finish_named(self._field.finish).write(self._wide(array), made)
        else:
            np.multiply(array, np.float32(self._field.scale or 0), out=made)
        if made is not rows:
            copy_values(made, target, scratch=self._scratch("piece", (PIECE,)))

    def _wide(self, array: Array) -> Array:
        """Returns rows in float32; with a length of the form so many, those behind the array of what is padded."""
        rows = self._field.length or len(array)
        if len(array) == rows and array.dtype == np.float32:
            return array
        wide = self._scratch("wide", (rows, *array.shape[1:]))[:rows]
        copy_values(array, wide[: len(array)], scratch=self._scratch("piece", (PIECE,)))
        if len(array) < rows:  # as what is padded would have been stored
            wide[len(array) :] = float(np.asarray(self._field.pad, array.dtype))
        return wide.numpy()

    def _scratch(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        found = self._kept.get(name)
        if found is None or len(found) < shape[0]:
            found = self._kept[name] = self._allocate(name, tuple(shape), dtype=torch.float32)
        return found

    def _expand(self, codes: Array, target: torch.Tensor) -> None:
        table = self._field.table
        assert table is not None
        axis = self._field.order[table.axis] if self._field.is_of_lines else table.axis
        expand(codes, table.values, axis, target, inner=table.inner, copies=table.copies)


def count(field: FieldForm, arrays: Sequence[Sequence[Array]], *, are_rows: bool = False) -> tuple[int, int]:
    """Returns (values along the counted axis of the samples, those that their batch has room for).

    field: by which samples are counted. arrays: of each sample. are_rows: see `collate_fields`.
    """
    if field.join == "stack" and field.is_of_lines:
        axis = 0 if are_rows else field.grows[0]
        lengths = [array.shape[axis] for of_one in arrays for array in of_one]
        return sum(lengths), len(lengths) * field.room(max(lengths))
    places = _Places.of(field, arrays)
    if not field.grows:
        return len(places.blocks), len(places.blocks)
    axis = field.grows[0]
    used = sum(array.shape[axis] for _, array in places.blocks)
    inner = axis if field.join == "cat" else axis + 1
    return used, places.shape[inner] * (1 if inner == 0 else math.prod(places.shape[:1]))
