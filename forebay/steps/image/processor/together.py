"""How a processor's own batches compare with batches of what it gives of each image alone: padding, masks, promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.image.processor.processor_call import Output, RaggedOutput, array_of
from forebay.store.layout import Array

_WITHIN = 1e-4
"""Up to this difference a batch is equal within it; above, it is another batch."""
Answer = Mapping[str, Output] | str
"""A processor's outputs by name, or why it gave none."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The outputs of a processor for the images of a probe.

    names: of the outputs that are kept. alone: of each image by itself. chosen: of those that the batches are made of.
    flat: of these two in one list. ones: of two samples with one image each. several: of a sample with the first image
    and a sample with the second and the first. compared: what was found of a field, so that nothing is compared twice.
    """

    processor: Any
    names: tuple[str, ...]
    alone: list[dict[str, Array]]
    chosen: list[dict[str, Array]]
    flat: Answer
    ones: Answer
    several: Answer
    compared: dict[Any, float | str | None] = field(default_factory=dict)

    def arrays(self, field: FieldForm) -> list[Array]:
        """Returns the arrays of a field of the chosen images."""
        return [array_of(found[field.name], field.join) for found in self.chosen]


def padded(seen: Seen, field: FieldForm) -> FieldForm:
    """Returns the form with the padding by which the processor's own batch comes out, where there is one."""
    theirs = _own(seen, field)
    if isinstance(theirs, RaggedOutput) and field.join == "stack" and field.grows:
        return replace(field, pad=None)
    if not isinstance(theirs, np.ndarray) or not (field.grows or field.join == "nest") or theirs.ndim == 0:
        return field
    for side in ("right", "left"):
        for pad in _pads(theirs):
            tried = replace(field, pad=pad, side=side)
            if _difference(seen, tried, theirs, several=tried.join == "nest") is None:
                return tried
    return field


def as_mask(seen: Seen, field: FieldForm, fields: Sequence[FieldForm]) -> FieldForm:
    """Returns the form as one that is not stored, where the field only marks where the values of another one are."""
    if "mask" not in field.name or not field.shape:
        return field
    if not all((found[field.name] == 1).all() for found in seen.alone):
        return field
    for other in fields:
        if other.dtype != "float32" or other.name == field.name or other.join != field.join:
            continue
        tried = replace(
            field, mask_of=other.name, table=None, stored_dtype="uint8" if field.dtype == "bool" else field.dtype
        )
        try:
            tried.marked_axes(other)
        except ValueError:
            continue
        theirs = _own(seen, field)
        several = field.join == "nest"
        if (
            not isinstance(theirs, np.ndarray)
            or _difference(seen, tried, theirs, several=several, beside=other) is None
        ):
            return tried
    return field


def promise_of(seen: Seen, fields: Sequence[FieldForm]) -> Promise:
    """Returns what batches of these fields are, compared with the processor's own.

    `alone`: where samples of one image each already differ. Where samples of several images do, the promise is `exact`
    and `why` says what differs then.
    """
    beside = {field.name: field for field in fields}
    differences = [_compared(seen, field, beside, several=False) for field in fields]
    said = [difference for difference in differences if isinstance(difference, str)]
    if said:
        return Promise(kind="alone", why="; ".join(said))
    limit = max((difference for difference in differences if isinstance(difference, float)), default=0.0)
    if limit > _WITHIN:
        return Promise(kind="alone", why=f"values of a batch differ by up to {limit:.3g}")
    several = [_compared(seen, field, beside, several=True) for field in fields]
    why = "; ".join(str(difference) for difference in several if difference is not None)
    why = f"not of samples with several images: {why}" if why else ""
    return Promise(kind="within", limit=limit, why=why) if limit else Promise(kind="exact", why=why)


def _compared(seen: Seen, field: FieldForm, beside: Mapping[str, FieldForm], *, several: bool) -> float | str | None:
    """Returns what differs in a field of a batch: of samples with one image each, or several."""
    answer = seen.several if several else (seen.ones if field.join == "nest" else seen.flat)
    if isinstance(answer, str):
        # A processor that takes no lists of samples takes a list of images, and that was compared.
        return None if several else f"the processor makes no batch of images of different sizes ({answer})"
    if field.name not in answer:
        return f"{field.name} is not in the processor's batch"
    found = _difference(seen, field, answer[field.name], several=several, beside=beside.get(field.mask_of or ""))
    return f"{field.name} differs by up to {found:.3g}" if several and isinstance(found, float) else found


def _own(seen: Seen, field: FieldForm) -> Output | None:
    """Returns the processor's own batch, in which padding shows."""
    answer = seen.several if field.join == "nest" else seen.flat
    return None if isinstance(answer, str) else answer.get(field.name)


def _difference(
    seen: Seen, field: FieldForm, theirs: Output, *, several: bool, beside: FieldForm | None = None
) -> float | str | None:
    """Returns None where our batch is theirs bit for bit, else by how much it differs, or what does."""
    fields = tuple(_without_table(form) for form in (field, beside) if form is not None)
    key = (fields, several)
    if key not in seen.compared:
        arrays = {form.name: seen.arrays(form) for form in fields}
        groups = [[0], [1, 0]] if several else [[0], [1]]
        samples = [{name: [found[index] for index in group] for name, found in arrays.items()} for group in groups]
        form = BatchForm(made_by="", fields=fields, promise=Promise(kind="exact"))
        try:
            ours = collate(form, samples, dtype=torch.float32, allocate=fresh)[field.name].numpy()
            seen.compared[key] = _unlike(field.name, ours, theirs)
        except ValueError as err:
            seen.compared[key] = str(err)
    return seen.compared[key]


def _unlike(name: str, ours: Array, theirs: Output) -> float | str | None:
    if isinstance(theirs, RaggedOutput):
        rows = len(ours) == len(theirs.parts) and all(
            isinstance(part, np.ndarray)
            and part.ndim == row.ndim
            and np.array_equal(row[tuple(slice(0, length) for length in part.shape)], part)
            for row, part in zip(ours, theirs.parts, strict=True)
        )
        return None if rows else f"{name} of the processor's batch are arrays of different shapes"
    if theirs.ndim == 0 and ours.ndim == 1:
        return None if (ours == theirs).all() else f"{name} is one number for a whole batch of the processor"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return (
            f"{name} is {theirs.dtype} {list(theirs.shape)} in the processor's batch, {ours.dtype} {list(ours.shape)} "
            "of its images alone"
        )
    if ours.dtype.kind != "f":
        return None if np.array_equal(ours, theirs) else f"{name} has other values in the processor's batch"
    if np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)):
        return None
    return float(np.max(np.abs(ours - theirs)))


def _pads(theirs: Array) -> list[float]:
    """Returns values that padding may have: those at the corners of the rows of a batch, zero first."""
    rows = theirs.reshape(len(theirs), -1)
    corners = {float(value) for value in (*rows[:, 0], *rows[:, -1])}
    return [0.0, *sorted(corners - {0.0})]


def _without_table(field: FieldForm) -> FieldForm:
    return field if field.table is None else replace(field, table=None, stored_dtype=field.dtype)
