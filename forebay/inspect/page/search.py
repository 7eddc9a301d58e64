"""The table of all samples a page at a time, searched and sorted here: a browser holds fifty rows of a million."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.inspect.page.overview import PageRows
from forebay.store.layout import Array

_MAX_SIZE = 200
_MAX_TEXT = 200
_KEPT = 6
"""Orders, and answers to searches, that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What is asked for: `size` rows from `first` on, sorted by column `by`, of those that hold `text`.

    language: the number of one; None: all of them.
    """

    first: int = 0
    size: int = 50
    by: int = 0
    is_falling: bool = False
    text: str = ""
    language: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, list[str]], *, columns: int, languages: int) -> Query | None:
        """Returns the query of a URL's parameters; None where one of them is none that a page sends."""
        one = {name: values[0] for name, values in given.items() if len(values) == 1}
        language, text = one.get("language", ""), one.get("text", "")
        numbers = [one.get("first", "0"), one.get("size", "50"), one.get("by", "0"), language or "0"]
        if len(one) < len(given) or not all(_is_number(number) for number in numbers):
            return None
        first, size, by, number = map(int, numbers)
        is_there = 1 <= size <= _MAX_SIZE and by < columns and number < max(languages, 1) and len(text) <= _MAX_TEXT
        if not is_there or one.get("down", "0") not in ("0", "1"):
            return None
        chosen = number if language else None
        return cls(first=first, size=size, by=by, is_falling=one.get("down") == "1", text=text, language=chosen)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


class PageSearch:
    """Answers queries over all samples of a cache, and keeps its last orders and masks. Threads share it."""

    def __init__(self, *, rows: PageRows) -> None:
        self.rows = rows
        # Two threads may make one value at once; either is right.
        self._order, self._mask = (functools.lru_cache(_KEPT)(make) for make in (self._ordered, self._masked))

    def answer(self, query: Query) -> dict[str, Any]:
        """Returns `total`, how many samples are found, and `rows`, those that are asked for."""
        order = self._order(query.by, query.is_falling)
        if query.text or query.language is not None:
            order = order[self._mask(query.text, query.language)[order]]
        return {"total": len(order), "rows": self.rows.of(order[query.first : query.first + query.size])}

    def _ordered(self, by: int, is_falling: bool) -> Array:  # noqa: FBT001  the key of what is kept
        key = self.rows.shown[by].key()
        return np.argsort(-key if is_falling else key, kind="stable")

    def _masked(self, text: str, language: int | None) -> Array:
        columns = self.rows.columns
        found = np.ones(len(columns), bool)
        if language is not None:
            found &= columns.languages[1] == language
        if text:
            found &= _holds(columns.ids, text) | _holds(columns.texts, text)
        return found


def _holds(column: pa.ChunkedArray, text: str) -> Array:
    held = pc.match_substring(column, text, ignore_case=True)
    return np.asarray(pc.fill_null(held, fill_value=False).to_numpy(), bool)
