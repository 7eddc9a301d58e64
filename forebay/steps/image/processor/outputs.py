"""Answers of an image processor as arrays: lists, tuples and numbers become what `return_tensors` makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ConfigError
from forebay.pretrained import offline
from forebay.steps.form import DTYPES, Join
from forebay.store.layout import Array


@dataclass(frozen=True, slots=True)
class RaggedOutput:
    """Arrays of different shapes, or such lists again, in a list."""

    parts: tuple[Array | RaggedOutput, ...]


class NoArrayError(ValueError):
    """An output is no array of a dtype that a batch can have; the text says what it is."""


class UnstorableError(ConfigError):
    """Outputs of a processor cannot be stored. names: of these outputs, and of those that are left out already."""

    code = "FB124"

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message, names)
        self.names = names

    def __str__(self) -> str:
        return str(self.args[0])


Output = Array | RaggedOutput


def ask(processor: Any, images: Any) -> dict[str, Output | NoArrayError]:
    """Returns a processor's outputs for images, a list or lists of them."""
    with offline():
        return outputs_of(processor(images=images))


def outputs_of(answer: Any) -> dict[str, Output | NoArrayError]:
    """Returns the outputs of a processor by name: arrays, lists of arrays that have no common shape, or why neither.

    An empty list is left out: it holds nothing of any image.
    """
    if not isinstance(answer, Mapping) and not hasattr(answer, "items"):
        raise NoArrayError(f"it gives {type(answer).__name__}, wanted outputs by name")
    found: dict[str, Output | NoArrayError] = {}
    for name, value in answer.items():
        if isinstance(value, list | tuple) and not value:
            continue
        try:
            found[str(name)] = as_array(value)
        except NoArrayError as err:
            found[str(name)] = err
    return found


def as_array(value: Any) -> Output:
    """Returns a value as an array, whole numbers as int64, or its parts where they have no common shape.

    Raises NoArrayError for texts, None, broken numbers and dtypes that no batch has.
    """
    if isinstance(value, bool | np.bool_):
        return np.asarray(value, bool)
    if isinstance(value, int):
        return np.asarray(value, np.int64)
    if isinstance(value, float):
        raise NoArrayError("numbers that numpy reads as float64 and torch as float32")
    if isinstance(value, list | tuple):
        return _joined([as_array(part) for part in value])
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.name not in DTYPES:
        raise NoArrayError(f"{type(value).__name__} of dtype {array.dtype.name}")
    return array


def array_of(found: Array, join: Join) -> Array:
    """Returns the array of one image: a processor's output for it alone without the axis of the batch."""
    return found if found.ndim == 0 or join == "cat" else found[0]


def _joined(parts: Sequence[Output]) -> Output:
    arrays = [part for part in parts if not isinstance(part, RaggedOutput)]
    if len(arrays) < len(parts) or len({(array.shape, array.dtype) for array in arrays}) != 1:
        return RaggedOutput(tuple(parts))
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
