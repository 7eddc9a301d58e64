"""Operations that make the values of a batch of rows on disk, where more than padding and casts is to be done.

A form names them (`FieldForm.finish`), so this table is all that a cache can ask for. Each lies where its step does.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol

from forebay.store.layout import Array

FINISHES = {
    "w2v_bert": "forebay.steps.audio.w2v_bert:NormalisedPairs",
    "w2v_bert_crop": "forebay.steps.audio.w2v_bert:NormalisedCrops",
}
"""Name -> module and class. The module is imported when the name is asked for."""


class Finish(Protocol):
    """An operation on the rows of an array, in the calling thread."""

    def shape(self, rows: int, inner: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the values that are made of so many rows of this shape."""
        ...

    def marked(self, rows: int) -> int:
        """Returns how many of the values a mask marks."""
        ...

    def write(self, values: Array, out: Array) -> None:
        """Makes `out`, C-contiguous float32 of that shape, the values of float32 rows."""
        ...


@cache
def finish_named(name: str) -> Finish:
    """Returns an operation of the table."""
    module, _, cls = FINISHES[name].partition(":")
    found: Finish = getattr(importlib.import_module(module), cls)()
    return found
