"""Batches that cross over as they lie in the cache, arrays one behind the other, and are finished on the device.

The host copies the values once, contiguously. Padding, masks, casts, tables and normalisation by clip are operations of
torch where the batch lies; on a CPU these are the twin of what `forebay.steps.batch.collate` makes. Half of a shuffled
batch of speech is padding, and float16 in the cache is float32 in most models: a quarter of the bytes crosses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from forebay.errors import ConfigError
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_values import Table, finish_named, places_of
from forebay.steps.image.tables import expand_on_device
from forebay.steps.step import Allocate
from forebay.store.layout import Array, FieldSpec
from forebay.store.source import Sample, column
from forebay.train.augment.augmentation import Augmentation
from forebay.train.augment.changes import Drawn
from forebay.train.augment.draws import Drawing
from forebay.train.collate.device_features import DeviceFeatures
from forebay.train.collate.patches import PatchBatch

OFFSETS, ITEMS = "_offsets", "_items"
"""Behind the name of a field: where each array begins, int64 [arrays + 1]; which arrays are whose, [samples + 1]."""
_LENGTHS, _PADS, _ROOM, _DRAWN = ".lengths", ".pads", ".room", ".drawn."
_COUNTS, _FRAMES = ".counts", ".frames"
"""Behind the name of a field that crosses over: no field of a batch has a name with a dot."""


Crossed = dict[str, Any]
"""Tensors of a batch, and numbers that the host knows of them."""


class RaggedBatch(PatchBatch):
    """A batch as the cache holds its samples, one behind the other: no padding, no cast, nothing made of it.

    `batch["input_features"]` [rows, n_mels] is of the stored dtype, and sample i has the rows from
    `batch["input_features_offsets"][i]` to that of i + 1; so every stored field. `batch.nested(name)` is torch's nested
    tensor of a field, for attention over ragged sequences. transformers' models take any keyword, so `**batch` raises.
    """

    remedy: ClassVar[str] = (
        "a ragged batch is not what a model takes: give it batch[name] and batch[name_offsets], or batch.nested(name); "
        'or leave loader.form = "ragged" out'
    )

    def nested(self, name: str) -> torch.Tensor:
        """Returns a field as a nested tensor of the layout torch.jagged, [samples, ragged, ...], without a copy."""
        found: torch.Tensor = torch.nested.nested_tensor_from_jagged(self.fields[name], self.fields[name + OFFSETS])
        return found

    @classmethod
    def filler(cls) -> type[PatchBatch]:
        """Returns the class of such a batch of weight 0."""
        return RaggedFiller


class RaggedFiller(RaggedBatch):
    """A ragged batch of weight 0."""

    weight = 0


class RaggedCollator:
    """Makes ragged batches of all fields that a source stores. Threads share it."""

    has_rows = False

    def __init__(self, fields: Iterable[FieldSpec]) -> None:
        """fields: of the source."""
        self._nothing = {
            spec.name: np.zeros((0, *spec.shape), spec.numpy_dtype) for spec in fields if spec.role == "tensor"
        }

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate) -> RaggedBatch:
        """Returns the batch of these samples in tensors that `allocate` makes.

        Of items that samples list, offsets are those of the items, and NAME_items says which items are whose.
        """
        batch: dict[str, torch.Tensor] = {}
        for name, nothing in self._nothing.items():
            arrays = column(samples, name)
            if isinstance(arrays[0], tuple):
                batch[name + ITEMS] = _offsets(name + ITEMS, arrays, allocate=allocate)
                arrays = [array for own in arrays for array in own] or [nothing]
            offsets, dtype = _offsets(name + OFFSETS, arrays, allocate=allocate), _crossing_dtype(nothing.dtype)
            batch[name] = _behind(name, arrays, int(offsets[-1]), dtype=dtype, allocate=allocate)
            batch[name + OFFSETS] = offsets
        return RaggedBatch(batch)

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns how many rows, or items, the first field has, twice: nothing is padded."""
        rows = sum(map(len, column(samples, next(iter(self._nothing)))))
        return rows, rows


def _offsets(name: str, parts: Sequence[Any], *, allocate: Allocate) -> torch.Tensor:
    out = allocate(name, (len(parts) + 1,), dtype=torch.int64)
    out.numpy()[:] = [0, *itertools.accumulate(map(len, parts))]
    return out


def _behind(name: str, arrays: Sequence[Array], rows: int, *, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
    out = allocate(name, (rows, *arrays[0].shape[1:]), dtype=dtype)
    memory = out.numpy()
    np.concatenate(arrays, out=memory.view(arrays[0].dtype) if memory.dtype.kind == "i" else memory)
    return out


def _crossing_dtype(stored: np.dtype[Any]) -> torch.dtype:
    """Returns the dtype in which values cross over: theirs; devices hardly know uint16, whose bits go as int16."""
    return torch.int16 if stored == np.uint16 else torch.from_numpy(np.empty(0, stored)).dtype


def can_cross(form: BatchForm) -> bool:
    """Returns whether a device can finish all fields of a form: rows of a batch, of one axis that grows."""
    by_name = {field.name: field for field in form.fields}
    return all(
        field.is_of_lines
        and field.join == "stack"
        and (field.finish is None or (field.length, field.side, field.pad) == (None, "right", 0))
        for field in form.stored
    ) and all(
        by_name[field.mask_of].order[axis] == 0
        for field in form.fields
        if field.mask_of is not None
        for axis in field.marked_axes(by_name[field.mask_of])
    )


@dataclass(frozen=True, slots=True)
class Crossing:
    """The items of a form: on the host one behind the other, on the device their batch. Needs `can_cross`."""

    form: BatchForm
    dtype: torch.dtype
    """Of fields of floats on the device."""
    augmentation: Augmentation | None = None
    """Changes the values of `form.main`, and of the features that are made of it."""
    features: DeviceFeatures | None = None

    def collate(
        self,
        columns: Mapping[str, Sequence[Sequence[Array]]],
        *,
        allocate: Allocate,
        drawing: Drawing | None = None,
    ) -> Crossed:
        """Returns what crosses over. Raises ValueError for items that stand in no batch together."""
        batch: Crossed = {}
        for field in self.form.stored:
            lines = [array for arrays in columns[field.name] for array in arrays]
            if field.pad is None and len({line.shape for line in lines}) > 1:
                raise ValueError(f"{field.name} is not padded: only arrays of one shape stand in a batch together")
            lengths = list(map(len, lines))
            dtype = _crossing_dtype(lines[0].dtype)
            batch[field.name] = _behind(field.name, lines, sum(lengths), dtype=dtype, allocate=allocate)
            batch[field.name + _ROOM] = field.room(max(lengths))
            said = batch[field.name + _LENGTHS] = allocate(field.name + _LENGTHS, (len(lengths),), dtype=torch.int64)
            said.numpy()[:] = lengths
            if field.pad_of is not None:
                pads = allocate(field.name + _PADS, (len(lengths),), dtype=torch.float32)
                pads.numpy()[:] = [value[0] for of_one in columns[field.pad_of] for value in of_one]
                batch[field.name + _PADS] = pads
        main = self.form.main
        lengths = batch[main.name + _LENGTHS].tolist()
        made = lengths if main.finish is None else list(map(finish_named(main.finish).made, lengths))
        if self.features is not None:
            counts = batch[main.name + _COUNTS] = self.features.num_frames(lengths)
            frames = batch[main.name + _FRAMES] = allocate(main.name + _FRAMES, (len(counts),), dtype=torch.int64)
            frames.numpy()[:] = counts
            main_of_features = self.features.form.main
            finish = None if main_of_features.finish is None else finish_named(main_of_features.finish)
            made = counts if finish is None else list(map(finish.made, counts))
        if self.augmentation is not None and drawing is not None:
            ids = _item_ids(drawing.ids, columns[main.name])
            drawn = self.augmentation.draw(ids, drawing.draws, samples=lengths, frames=made)
            batch |= {f"{main.name}{_DRAWN}{name}": values for name, values in drawn.items()}
        return batch

    def finish(self, crossed: Crossed) -> Crossed:
        """Returns the fields of the form on the device where `crossed` lies, and drops what crossed over."""
        main = self.form.main
        if main.name not in crossed:  # none of the samples has an item
            return crossed
        head = main.name + _DRAWN
        drawn = {name.removeprefix(head): crossed.pop(name) for name in list(crossed) if name.startswith(head)}
        if self.features is not None:
            self._make_features(self.features, crossed, drawn)
        form = self.form if self.features is None else self.features.form
        changes = self.augmentation if drawn else None
        if changes is not None and self.features is not None:
            changes = changes.of_features()
        rows = {field.name: _Rows.of(field, crossed) for field in form.stored}
        for field in form.fields:
            wanted = self.dtype if field.dtype == "float32" else getattr(torch, field.dtype)
            if field.mask_of is not None:
                crossed[field.name] = rows[field.mask_of].mask(dtype=wanted)
            elif field.lengths_of is not None:
                crossed[field.name] = rows[field.lengths_of].made
            else:
                of_field = changes if field is form.main else None
                crossed[field.name] = rows[field.name].values(of_field, drawn, dtype=wanted)
        return crossed

    def _make_features(self, features: DeviceFeatures, crossed: Crossed, drawn: Drawn) -> None:
        """Puts features, as they would have crossed over, in the place of waveforms."""
        main, made_of = self.form.main, features.form.main
        counts, frames = crossed.pop(main.name + _COUNTS), crossed.pop(main.name + _FRAMES)
        waves = _Rows.of(main, crossed)
        values = waves.padded(torch.float32)
        if self.augmentation is not None:
            values = self.augmentation.of_waveforms().apply(values, waves.lengths, drawn)
        made = features.make(values, waves.lengths, frames, counts)
        crossed |= {
            made_of.name: made.lines,
            made_of.name + _LENGTHS: frames,
            made_of.name + _ROOM: made_of.room(max(counts)),
        }
        if made.pads is not None:
            crossed[made_of.name + _PADS] = made.pads


def _item_ids(ids: Sequence[str], items: Sequence[Sequence[Array]]) -> list[str]:
    """Returns an id for each item: its sample's, and its number where a sample has several."""
    return [
        sample_id if len(own) == 1 else f"{sample_id}/{number}"
        for sample_id, own in zip(ids, items, strict=True)
        for number in range(len(own))
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A field of a batch on a device. lengths: rows of each array. made, room: of the values made of them."""

    field: FieldForm
    lines: torch.Tensor
    lengths: torch.Tensor
    rows: int
    """That are at most in an array."""
    made: torch.Tensor
    room: int
    pads: torch.Tensor | None

    @classmethod
    def of(cls, field: FieldForm, crossed: Crossed) -> _Rows:
        """Takes the field out of a batch."""
        lines, lengths = crossed.pop(field.name), crossed.pop(field.name + _LENGTHS)
        room, pads = crossed.pop(field.name + _ROOM), crossed.pop(field.name + _PADS, None)
        if field.finish is None:
            return cls(field, lines, lengths, room, lengths, room, pads)
        made = finish_named(field.finish).made
        return cls(field, lines, lengths, room, made(lengths), made(room), pads)

    def mask(self, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns 1 where the values stand and 0 in the padding, [batch, room]."""
        field = self.field
        marked = self.lengths if field.finish is None else finish_named(field.finish).marked(self.lengths)
        places = torch.arange(self.room, device=marked.device)
        starts = self.room - self.made if field.side == "left" else torch.zeros_like(marked)
        return ((places >= starts[:, None]) & (places < (starts + marked)[:, None])).to(dtype)

    def values(self, changes: Augmentation | None, drawn: Drawn, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns the field: the axis that grows is the first in memory, where it lies behind others it is moved.

        changes: made of floats before they are rounded to `dtype`.
        """
        out = self.padded(dtype if changes is None else torch.float32)
        if changes is not None:
            out = changes.apply(out, self.made, drawn).to(dtype)
        return out.movedim(1, self.field.grows[0] + 1) if self.field.grows[0] else out

    def padded(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values, the axis that grows first, and what stands in the padding."""
        if self.field.finish is not None:
            return finish_named(self.field.finish).batch(self.lines.float(), self.lengths, self.rows).to(dtype)
        values = self._made(dtype)
        shape = (len(self.made), self.room, *values.shape[1:])
        if self.pads is not None:
            wide = self.pads.to(dtype).view(-1, *(1 for _ in shape[1:]))
            out = wide.expand(shape).contiguous()
        else:
            out = torch.full(shape, self.field.pad or 0, dtype=dtype, device=values.device)
        out.view(-1, *values.shape[1:]).index_copy_(0, self._places(len(values)), values)
        return out

    def _made(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values, still one behind the other."""
        field, lines = self.field, self.lines
        if field.table is not None:
            table = _table_on(field.table, lines.device)
            axis = field.order[field.table.axis]
            return expand_on_device(lines, table, axis, dtype=dtype, inner=field.table.inner, copies=field.table.copies)
        return (lines.float() * field.scale if field.scale is not None else lines).to(dtype)

    def _places(self, count: int) -> torch.Tensor:
        """Returns the row of the batch in which each value stands, int64 [count]."""
        firsts = torch.arange(len(self.made), device=self.made.device) * self.room
        if self.field.side == "left":
            firsts = firsts + self.room - self.made
        return places_of(firsts, self.made, count)


@functools.cache  # a copy from the host waits for the device
def _table_on(table: Table, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table.values).to(device)


def check_ragged(form: str, *, is_packed: bool, crop_s: float | None, as_tensordict: bool) -> None:
    """Raises ConfigError for settings of a loader that contradict ragged batches."""
    if form != "ragged":
        return
    for is_wrong, what in (
        (is_packed, 'plan.kind is "pack": packs have no padding already, and loader.varlen says where samples end'),
        (crop_s is not None, f"loader.crop_s is {crop_s}: crops have one length, and are not ragged"),
        (as_tensordict, "as_tensordict is true: a model would take a TensorDict of ragged fields"),
    ):
        if is_wrong:
            raise ConfigError(f'loader.form is "ragged", and {what}; set loader.form = "padded"')
