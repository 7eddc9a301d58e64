"""The rows of the table of samples: what a page says of each, cheap enough for thousands of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forebay.inspect.report.columns import Columns
from forebay.inspect.report.doubts import OUT_OF_RANGE, Doubts
from forebay.inspect.report.words import shortened
from forebay.inspect.sample import holds_images, spoken
from forebay.store.layout import Array
from forebay.visible import printable

MAX_ROWS = 3_000
"""Rows that a file holds."""

_TEXT, _ID, _CELL = 160, 96, 60
_MAX_KEPT = 12


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Makes rows of samples by their indices.

    names: of the columns with whether they are numbers, the first one is the index, then the id.
    """

    columns: Columns
    doubts: Doubts

    @cached_property
    def names(self) -> list[tuple[str, bool]]:
        """The columns: the name that a page shows, and whether it holds numbers."""
        columns = self.columns
        found = [("#", True), ("id", False)]
        if any(columns.languages[0]):
            found.append(("language", False))
        if columns.seconds is not None:
            found.append(("seconds", True))
        found.append(("tokens", True))
        if holds_images(columns.cache):
            found += [("patches", True), ("images", True)]
        if columns.rate is not None:
            found += [("characters/s", True), ("fit", True)]
        found += [(shortened(name, _CELL), self._is_number(name)) for name in self.kept]
        return [*found, ("text", False)]

    @property
    def kept(self) -> list[str]:
        """The kept columns that are shown."""
        return self.columns.kept[:_MAX_KEPT]

    def _is_number(self, name: str) -> bool:
        spec = self.columns.cache.fields.get(name)
        return spec is not None and spec.dtype != "str"

    def of(self, indices: Array | Sequence[int]) -> list[list[Any]]:
        """Returns a row for each index: numbers and text that may be shown as it is, None where nothing is known."""
        where = np.asarray(indices, np.int64)
        columns, cache = self.columns, self.columns.cache
        found: list[list[Any]] = [where.tolist(), [_said(text, _ID) for text in columns.ids.take(where).to_pylist()]]
        if any(columns.languages[0]):
            names, codes = columns.languages
            found.append([_said(names[code], _CELL) for code in codes[where].tolist()])
        if columns.seconds is not None:
            found.append(_numbers(columns.seconds[where], places=2))
        found.append(columns.tokens[where].tolist())
        if holds_images(cache):
            found += [cache.lengths[name][where].tolist() for name in ("num_patches", "num_images")]
        if columns.rate is not None:
            found += [_numbers(columns.rate[where], places=1), _numbers(self._fit[where], places=1)]
        found += [[_cell(value) for value in columns.kept_table[name].take(where).to_pylist()] for name in self.kept]
        texts = columns.texts.take(where).to_pylist()
        found.append([self._text(text) for text in texts])
        return [list(row) for row in zip(*found, strict=True)]

    @cached_property
    def _fit(self) -> Array:
        return np.full(len(self.columns), np.nan) if self.doubts.z is None else self.doubts.z

    def _text(self, text: str) -> str:
        if holds_images(self.columns.cache):
            # What is no conversation is shown as it is stored.
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                text = " / ".join(said for _, said in spoken(json.loads(text)))
        return _said(text, _TEXT)

    def chosen(self, shown: Sequence[int]) -> Array:
        """Returns the indices that a file lists: all of up to 3,000 samples, else those shown and doubtful, and others.

        The others are spread evenly over the cache.
        """
        count = len(self.columns)
        if count <= MAX_ROWS:
            return np.arange(count)
        groups = [*self.doubts.exact.shown, *self.doubts.near.shown]
        doubtful = [*self.doubts.misfits[: MAX_ROWS // 6].tolist(), *(index for group in groups for index in group)]
        first = np.unique(np.array([*shown, *doubtful[: MAX_ROWS // 3]], np.int64))
        others = np.linspace(0, count - 1, MAX_ROWS - len(first)).astype(np.int64)
        return np.union1d(first, others)


def is_doubtful(z: Array | None, index: int) -> bool:
    """Whether the transcript of a sample does not fit its length."""
    return z is not None and bool(abs(np.nan_to_num(z[index])) > OUT_OF_RANGE)


def _said(text: str | None, limit: int) -> str:
    return printable(shortened(text or "", limit))


def _numbers(values: Array, *, places: int) -> list[float | None]:
    return [round(value, places) if np.isfinite(value) else None for value in values.tolist()]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return None if value is None else str(value)
    if isinstance(value, int | float):
        return value if np.isfinite(value) and abs(value) < 2**53 else str(value)
    return _said(str(value), _CELL)
