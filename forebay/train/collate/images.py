"""Batches of images as their processor gives them, and of texts beside them, by the forms that a cache declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.errors import ConfigError
from forebay.steps.audio.declared import form_of
from forebay.steps.batch import IGNORED
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_batch import collate
from forebay.steps.image.tables import expand_on_device
from forebay.steps.step import Allocate, AudioBatch, Batch, Dtype, PaddingSide, Stored
from forebay.steps.table import OF_IMAGES, text_step
from forebay.store.image.arrays import FEATURES
from forebay.store.layout import Array
from forebay.store.source import Sample

IDS, MASK, LABELS = "input_ids", "label_mask", "labels"


@dataclass(frozen=True, slots=True)
class ImagesBatch(AudioBatch):
    """The images of a batch by their form. A batch without an image has none of its fields. field: of the pixels."""

    form: BatchForm
    counts_tokens: bool

    @classmethod
    def of(cls, stored: Stored) -> ImagesBatch:
        """Returns the batches of the form that a cache declares. Raises ConfigError where it declares none.

        Where the text is a conversation, batches have the outputs that the model's whole processor hands on.
        """
        form, names = form_of(stored, "form"), stored.constants.get("image_outputs")
        if isinstance(names, list):
            kept = tuple(field for field in form.fields if field.name in names or field.mask_of in names)
            if not any(field.mask_of is None for field in kept):
                raise ConfigError(
                    f"{stored.name}: image_outputs are {names}, and its form has none of them; rebuild it: "
                    "forebay preprocess",
                    code="FB125",
                )
            form = replace(form, fields=kept)
        return cls(form.main.name, form, IDS in stored.fields)

    def as_codes(self) -> ImagesBatch:
        """Returns batches that hold codes where `ImagesExpansion` makes values of them, on a device."""
        coded = {one.name: one for one in map(_Coded.of, self.form.stored) if one is not None}
        fields = (coded[field.name].on_host(field) if field.name in coded else field for field in self.form.fields)
        return replace(self, form=replace(self.form, fields=tuple(fields)))

    def collate(self, samples: Sequence[Sample], *, dtype: Dtype, allocate: Allocate) -> Batch:
        """Returns the fields of the form. Raises ConfigError for images that stand in no batch together."""
        if not any(sample[self.field] for sample in samples):
            return {}
        # As the processor's own batch lacks an output that none of its images has.
        held = [
            f
            for f in self.form.fields
            if f.join != "cat" or any(len(a) for s in samples for a in s[f.mask_of or f.name])
        ]
        try:
            return collate(replace(self.form, fields=tuple(held)), samples, dtype=dtype, allocate=allocate)
        except (ValueError, IndexError) as err:
            raise ConfigError(
                f"images of {self.form.made_by} stand in no batch together: {err}; its promise is {self.form.promise}: "
                "set plan.batch_size = 1, or give the processor a fixed size",
                code="FB125",
            ) from err

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (tokens, without text images, of the samples, those that their batch has room for)."""
        if self.counts_tokens:
            lengths = [len(sample[IDS]) for sample in samples]
            return sum(lengths), len(lengths) * max(lengths)
        images = sum(len(sample[self.field]) for sample in samples)
        return images, images


def has_rows(constants: Mapping[str, Any]) -> bool:
    """Returns whether the first dimension of every field of batches is that of the samples.

    It is not where a sample has several images, or none, and where arrays stand one behind the other.
    """
    if constants.get("features") != FEATURES:
        return True
    joins = {field.get("join", "stack") for field in constants["form"]["fields"]}
    prompt = constants.get("prompt")
    is_one_each = prompt in OF_IMAGES and text_step(prompt, OF_IMAGES).needs_items == 1
    return "cat" not in joins and (is_one_each or joins == {"nest"})


class ImagesExpansion:
    """Makes values of the codes of a batch on the device where it lies: what the host would have made of them."""

    def __init__(self, form: BatchForm, *, dtype: torch.dtype) -> None:
        """Takes the tables of a form. dtype: of what are floats."""
        self._dtype, self._fields = dtype, [one for one in map(_Coded.of, form.stored) if one is not None]
        self._tables = {one.name: torch.from_numpy(one.values) for one in self._fields}

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> Batch:
        """Returns the batch with values in place of codes."""
        values = dict(batch)
        for one in self._fields:
            if one.name not in values:
                continue
            codes = values[one.name]
            # Once a device: a copy from the host waits for the device.
            table = self._tables[one.name] = self._tables[one.name].to(codes.device)
            values[one.name] = expand_on_device(codes, table, one.axis, dtype=self._dtype, inner=one.inner)
        return values


@dataclass(frozen=True, slots=True, eq=False)
class _Coded:
    """A field that crosses over to a device as codes. Padding is a code of its own, behind those of the table."""

    name: str
    values: npt.NDArray[np.float32]
    """Of the table, and behind them what stands in the padding."""
    axis: int
    """Of the batch, along which channels lie."""
    inner: int
    pad: int | None
    """The code of the padding. None: there is none."""

    @classmethod
    def of(cls, field: FieldForm) -> _Coded | None:
        """Returns a field's codes; None for a field that has none, or no room for one of the padding."""
        table = field.table
        if table is None or (field.join == "nest" and field.pad is None):
            return None
        values, pad = table.values.copy(), None
        if _may_be_padded(field):
            pad = values.shape[1]
            column = np.full((len(values), 1), field.pad or 0, np.float32)
            values = np.concatenate([values, column], axis=1)
        if values.shape[1] > 1 << 16:
            return None
        return cls(field.name, values, table.axis + (field.join != "cat"), table.inner, pad)

    def on_host(self, field: FieldForm) -> FieldForm:
        """Returns the form of the codes. Two bytes are held as int16, because devices hardly know uint16."""
        dtype, pad = ("uint8" if self.values.shape[1] <= 256 else "int16"), self.pad
        if pad is not None and dtype == "int16":
            pad = int(np.uint16(pad).view(np.int16))
        return replace(field, dtype=dtype, table=None, pad=field.pad if pad is None else pad)


def _may_be_padded(field: FieldForm) -> bool:
    if field.join == "nest":
        return True
    return field.pad is not None and len(field.grows) > (1 if field.join == "cat" else 0)


@dataclass(frozen=True, slots=True)
class ImagesTextBatch:
    """The text of a batch by its form; `labels` are the ids that `label_mask` marks, where a cache has such."""

    form: BatchForm
    learns: bool

    @classmethod
    def of(cls, stored: Stored) -> ImagesTextBatch | None:
        """Returns the form that a cache declares; None where it has no text."""
        if "text_form" not in stored.constants:
            return None
        form = form_of(stored, "text_form", group="text")
        by_name = {field.name: field for field in form.fields}
        learns = MASK in stored.fields and IDS in by_name and LABELS not in by_name
        if learns:
            kept = [field for field in form.fields if field.name != MASK]
            form = replace(form, fields=(*kept, _labels_like(by_name[IDS])))
        return cls(form, learns)

    def __call__(self, samples: Sequence[Sample], *, padding_side: PaddingSide, allocate: Allocate) -> Batch:
        """Returns the fields of the form. padding_side: "left" wins over the form's own, which is that of the model."""
        form = self.form if padding_side == "right" else _padded_left(self.form)
        return collate(form, list(map(self._arrays, samples)), dtype=torch.float32, allocate=allocate)

    def _arrays(self, sample: Sample) -> Mapping[str, Sequence[Array]]:
        if self.learns:
            labels = np.where(sample[MASK], sample[IDS], sample[IDS].dtype.type(IGNORED))
            sample = {**sample, LABELS: labels}
        return {name: (array,) for name, array in self.form.arrays(sample).items()}


def _labels_like(ids: FieldForm) -> FieldForm:
    return replace(ids, name=LABELS, dtype="int64", pad=IGNORED)


def _padded_left(form: BatchForm) -> BatchForm:
    return replace(form, fields=tuple(replace(field, side="left") for field in form.fields))
