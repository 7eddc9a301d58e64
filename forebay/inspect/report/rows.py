"""The rows of the table of samples: what a page says of each, cheap enough for thousands of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.inspect.report.columns import OWN_LENGTHS, Columns
from forebay.inspect.report.doubts import Doubts
from forebay.inspect.report.words import shortened
from forebay.inspect.sample import spoken
from forebay.store.layout import Array
from forebay.visible import printable

MAX_ROWS = 3_000
"""Rows that a file holds."""

_TEXT, _ID, _CELL = 160, 96, 60
_MAX_KEPT = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of the table. cells: gives what a page shows of samples by their indices.

    key: gives float64 [num_samples], by which rows are sorted; NaN stands last. places: of numbers behind the point.
    """

    name: str
    is_number: bool
    cells: Callable[[Array], list[Any]]
    key: Callable[[], Array]
    places: int = 0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Makes rows of samples by their indices: the index first, then the id, the text last."""

    columns: Columns
    doubts: Doubts

    @cached_property
    def shown(self) -> list[Column]:
        """The columns of the table."""
        columns = self.columns
        count = len(columns)
        numbers: list[tuple[str, Array, int]] = [("tokens", columns.tokens, 0)] if columns.has_tokens else []
        if columns.seconds is not None:
            numbers.insert(0, ("seconds", columns.seconds, 2))
        listed = [found for found in columns.cache.lengths.items() if found[0] not in OWN_LENGTHS]
        numbers += [(name.removeprefix("num_"), values, 0) for name, values in reversed(listed)]
        if columns.rate is not None and self.doubts.z is not None:
            numbers += [("characters/s", columns.rate, 1), ("fit", self.doubts.z, 1)]
        return [
            _number("#", np.arange(count), places=0),
            Column(name="id", is_number=False, cells=partial(_texts, columns.ids, limit=_ID), key=self._ids_key),
            *self._language(),
            *(_number(name, values, places=places) for name, values, places in numbers),
            *(self._kept(name) for name in columns.kept[:_MAX_KEPT]),
            Column(name="text", is_number=False, cells=self._said, key=partial(_rank, columns.texts)),
        ]

    def of(self, indices: Array | Sequence[int]) -> list[list[Any]]:
        """Returns a row for each index: numbers and text that may be shown as it is, None where nothing is known."""
        where = np.asarray(indices, np.int64)
        return [list(row) for row in zip(*(column.cells(where) for column in self.shown), strict=True)]

    def _ids_key(self) -> Array:
        return _rank(self.columns.ids)

    def _language(self) -> Iterator[Column]:
        names, codes = self.columns.languages
        if any(names):
            shown = [_safe(name, _CELL) for name in names]
            yield Column(
                name="language",
                is_number=False,
                cells=lambda where: [shown[code] for code in codes[where].tolist()],
                key=lambda: codes.astype(np.float64),
            )

    def _kept(self, name: str) -> Column:
        spec = self.columns.cache.fields.get(name)

        def cells(where: Array) -> list[Any]:
            return [_cell(value) for value in self.columns.kept_table[name].take(where).to_pylist()]

        return Column(
            name=shortened(name, _CELL),
            is_number=spec is not None and spec.dtype != "str",
            cells=cells,
            key=lambda: _rank(self.columns.kept_table[name]),
        )

    def _said(self, where: Array) -> list[str]:
        texts = self.columns.texts.take(where).to_pylist()
        if not self.columns.cache.listed:
            return [_safe(text, _TEXT) for text in texts]
        return [_safe(_conversation(text), _TEXT) for text in texts]

    def chosen(self, shown: Sequence[int]) -> Array:
        """Returns the indices that a file lists: all of up to 3,000 samples, else those shown and doubtful, and others.

        The others are spread evenly over the cache.
        """
        count = len(self.columns)
        if count <= MAX_ROWS:
            return np.arange(count)
        groups = [*self.doubts.exact.shown, *self.doubts.near.shown]
        doubtful = [*self.doubts.misfits[: MAX_ROWS // 6].tolist(), *(index for group in groups for index in group)]
        first = np.unique(np.array([*shown, *doubtful[: max(0, min(MAX_ROWS // 3, MAX_ROWS - len(shown)))]], np.int64))
        others = np.linspace(0, count - 1, MAX_ROWS - len(first)).astype(np.int64)
        return np.union1d(first, others)


def _number(name: str, values: Array, *, places: int) -> Column:
    def cells(where: Array) -> list[Any]:
        found = values[where].tolist()
        return found if not places else [round(value, places) if np.isfinite(value) else None for value in found]

    return Column(name=name, is_number=True, cells=cells, key=lambda: values.astype(np.float64), places=places)


def _texts(column: pa.ChunkedArray, where: Array, *, limit: int) -> list[str]:
    return [_safe(text, limit) for text in column.take(where).to_pylist()]


def _rank(column: pa.ChunkedArray) -> Array:
    """Returns float64: the values of numbers, the place of each text among all texts; NaN for null."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)
    encoded = column.dictionary_encode().combine_chunks()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    places = np.empty(len(order), np.float64)
    places[order] = np.arange(len(order))
    codes = encoded.indices
    known = np.asarray(codes.is_valid())
    ranks = np.full(len(codes), np.nan)
    ranks[known] = places[np.asarray(codes.fill_null(0))[known]]
    return ranks


def _conversation(text: str) -> str:
    # What is no conversation is shown as it is stored.
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return " / ".join(said for _, said in spoken(json.loads(text)))
    return text


def _safe(text: str | None, limit: int) -> str:
    return printable(shortened(text or "", limit))


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return None if value is None else str(value)
    if isinstance(value, int | float):
        return value if np.isfinite(value) and abs(value) < 2**53 else str(value)
    return _safe(str(value), _CELL)
