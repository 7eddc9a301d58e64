"""Batches that a model is given of prepared items, and what of its outputs becomes fields: variants of an item too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from forebay.errors import ConfigError
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_values import shown_shape
from forebay.steps.model.model_step import ModelStep
from forebay.steps.step import Batch
from forebay.store.layout import Array, FieldSpec, variant_name


def batches_by_length(shapes: Sequence[list[tuple[int, ...]]], size: int, *, are_alike: bool) -> Iterator[list[int]]:
    """Yields the places of items by length, a batch at a time. are_alike: a batch is of one shape."""
    order = sorted(range(len(shapes)), key=shapes.__getitem__)
    for _, found in itertools.groupby(order, key=shapes.__getitem__ if are_alike else lambda _: None):
        places = list(found)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def own_rows(form: BatchForm, batch: Batch, rows: list[int]) -> list[int]:
    """Returns how many rows of a batch are each item's own: those that its mask marks. rows: where there is none."""
    mask = next((each.name for each in form.fields if each.mask_of == form.main.name and len(each.shape) == 1), None)
    return rows if mask is None else batch[mask].sum(dim=1).tolist()


def too_large(values: Mapping[str, Array], forms: Mapping[str, FieldForm]) -> str | None:
    """Returns which field holds NaN, infinity or what its stored type cannot hold; None where all is well."""
    for name, array in values.items():
        if not array.size:
            continue
        if array.dtype.kind == "f":
            stored = forms[name].stored_dtype if name in forms else "float32"
            largest = float(np.abs(array).max())
            if not largest <= float(np.finfo(stored).max):
                return f"{name} holds {largest:g}, which {stored} does not"
        elif name in forms:  # codes beyond the codebook would come round to others
            stored = forms[name].stored_dtype
            limits = np.iinfo(stored)
            for found in (int(array.min()), int(array.max())):
                if not limits.min <= found <= limits.max:
                    return f"{name} holds {found}, which {stored} does not"
    return None


def varied_fields(form: BatchForm, names: Sequence[str]) -> Iterator[FieldSpec]:
    """Yields the fields of the variants of these names; their shapes are those of the plain ones."""
    values = {field.on_disk for field in form.stored}
    for name, spec in itertools.product(names, form.specs()):
        if spec.name in values:
            yield replace(spec, name=variant_name(spec.name, name))


def require_variants(step: ModelStep, pixels: FieldForm, fields: Sequence[FieldForm]) -> None:
    """Raises ConfigError where variants would not be what they are called. pixels: of the input. fields: stored."""
    where = f"model.{step.label}"
    if not fields:
        raise ConfigError(f"{where}: variants are of arrays, and it gives numbers alone; leave flip out", code="FB147")
    if step.flip and (len(pixels.shape) != 3 or pixels.shape[0] != 3):
        shape = f"{pixels.name} {shown_shape(pixels.shape)}"
        raise ConfigError(f"{where}: flip is of [3, height, width], and it takes {shape}; leave it out", code="FB147")
