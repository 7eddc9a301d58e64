"""Stored values of a processor as levels from 0 to 255: for eyes, and for checks that compare with eight-bit images."""

from __future__ import annotations

import math

import numpy as np

from forebay.steps.form import FieldForm
from forebay.store.layout import Array


def levels_of(field: FieldForm, array: Array) -> Array:
    """Returns values as uint8 of the same shape, 0 for the least that a channel can have and 255 for the greatest.

    Bytes without a table are as they are. Floats without one are between the least and the greatest of this image.
    """
    if field.table is None:
        return array if array.dtype == np.uint8 else scaled(array, array.min(), array.max())
    values, axis, inner = field.table.values, field.table.axis, field.table.inner
    shown = np.stack([scaled(row, row.min(), row.max()) for row in values])
    codes = np.minimum(array, values.shape[1] - 1)
    if len(shown) == 1:
        return np.asarray(shown[0][codes])
    along = [1] * array.ndim
    along[axis] = array.shape[axis]
    channels = (np.arange(array.shape[axis]) // inner % len(shown)).reshape(along)
    return np.asarray(shown[channels, codes])


def is_padding(field: FieldForm, array: Array) -> Array:
    """Returns which codes are the value that a processor pads with, where that is none of an image: zero, the last."""
    values = None if field.table is None else field.table.values
    if values is None or values.shape[1] < 2 or values[:, -1].any() or not (values[:, :-1] != 0).all():
        return np.zeros(array.shape, bool)
    return np.asarray(array == values.shape[1] - 1)


def scaled(values: Array, low: float, high: float) -> Array:
    """Returns values as uint8, 0 for `low` and 255 for `high`; all 0 where there is no span between them."""
    span = float(high) - float(low)
    if not math.isfinite(span) or span <= 0:
        return np.zeros(values.shape, np.uint8)
    share = (values.astype(np.float64) - float(low)) / span
    return np.asarray(np.clip(np.rint(share * 255), 0, 255).astype(np.uint8))
