"""All that a page says of a whole cache, gathered once: facts, plans, doubts, and how its samples are read.

The rows of the table of samples: what a page says of each, cheap enough for thousands of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.config.tree import Config
from forebay.errors import ForebayError
from forebay.inspect.facts import cache_facts
from forebay.inspect.listed_groups import names_items
from forebay.inspect.page.cards import Reader
from forebay.inspect.page.page_samples import (
    OWN_LENGTHS,
    Chosen,
    Doubts,
    PageColumns,
    by_ids,
    doubts_of,
    longest,
    spread,
    worst,
)
from forebay.inspect.page.plan_history import PlanView, views_of
from forebay.inspect.page.words import rejected_ids, sealed_at, shortened
from forebay.inspect.sample import Sounds, load_tokenizer, spoken
from forebay.store.cache import Cache
from forebay.store.layout import Array
from forebay.store.selection import Filter
from forebay.visible import printable

MAX_ROWS = 3_000
"""Rows that a file holds."""
_TEXT, _ID, _CELL = 160, 96, 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PageColumn:
    """One column of the table. cells: gives what a page shows of samples by their indices.

    key: gives float64 [num_samples], by which rows are sorted; NaN stands last. places: of numbers behind the point.
    """

    name: str
    is_number: bool
    cells: Callable[[Array], list[Any]]
    key: Callable[[], Array]
    places: int = 0


@dataclass(frozen=True, kw_only=True)
class PageRows:
    """Makes rows of samples by their indices: the index first, then the id, the text last."""

    columns: PageColumns
    doubts: Doubts

    @cached_property
    def shown(self) -> list[PageColumn]:
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
            PageColumn(name="id", is_number=False, cells=partial(_texts, columns.ids), key=partial(_rank, columns.ids)),
            *([self._language()] if any(columns.languages[0]) else []),
            *(_number(name, values, places=places) for name, values, places in numbers),
            *(self._kept(name) for name in columns.kept[:12]),
            PageColumn(name="text", is_number=False, cells=self._said, key=partial(_rank, columns.texts)),
        ]

    def of(self, indices: Array | Sequence[int]) -> list[list[Any]]:
        """Returns a row for each index: numbers and text that may be shown as it is, None where nothing is known."""
        where = np.asarray(indices, np.int64)
        return [list(row) for row in zip(*(column.cells(where) for column in self.shown), strict=True)]

    def _language(self) -> PageColumn:
        names, codes = self.columns.languages
        shown = [_safe(name, _CELL) for name in names]
        return PageColumn(
            name="language",
            is_number=False,
            cells=lambda where: [shown[code] for code in codes[where].tolist()],
            key=lambda: codes.astype(np.float64),
        )

    def _kept(self, name: str) -> PageColumn:
        spec = self.columns.cache.fields.get(name)

        def cells(where: Array) -> list[Any]:
            return [_cell(value) for value in self.columns.kept_table[name].take(where).to_pylist()]

        return PageColumn(
            name=shortened(name, _CELL),
            is_number=spec is not None and spec.dtype != "str",
            cells=cells,
            key=lambda: _rank(self.columns.kept_table[name]),
        )

    def _said(self, where: Array) -> list[str]:
        texts, is_talk = self.columns.texts.take(where).to_pylist(), bool(names_items(self.columns.cache))
        return [_safe(_conversation(text) if is_talk else text, _TEXT) for text in texts]

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
        return np.union1d(first, np.linspace(0, count - 1, MAX_ROWS - len(first)).astype(np.int64))


def _number(name: str, values: Array, *, places: int) -> PageColumn:
    def cells(where: Array) -> list[Any]:
        found = values[where].tolist()
        return found if not places else [round(value, places) if np.isfinite(value) else None for value in found]

    return PageColumn(name=name, is_number=True, cells=cells, key=lambda: values.astype(np.float64), places=places)


def _texts(column: pa.ChunkedArray, where: Array) -> list[str]:
    return [_safe(text, _ID) for text in column.take(where).to_pylist()]


def _rank(column: pa.ChunkedArray) -> Array:
    """Returns float64: the values of numbers, the place of each text among all texts; NaN for null."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)
    encoded = column.dictionary_encode().combine_chunks()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    places = np.empty(len(order), np.float64)
    places[order] = np.arange(len(order))
    return np.asarray(pc.take(pa.array(places), encoded.indices).to_numpy(zero_copy_only=False), np.float64)


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


@dataclass(frozen=True, kw_only=True)
class CardChoice:
    """Which samples a page shows first: a spread over the cache, or those that are asked for by one of these.

    ids: a file with an id a line, or ids with commas between them.
    """

    ids: str | None = None
    longest: bool = False
    worst: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """All that is known of a cache without reading a sample. rejected: first ids of what was left out, by reason.

    token_note: why tokens are shown as numbers, empty where they are text. how: what `chosen` is. filter_line: what the
    config's `[filter]` leaves; None: it has none.
    """

    facts: Mapping[str, Any]
    columns: PageColumns
    doubts: Doubts
    plans: Sequence[PlanView]
    rejected: Mapping[tuple[str, str], Sequence[str]]
    sealed: str | None
    reader: Reader
    token_note: str
    chosen: Sequence[Chosen]
    how: str
    filter_line: str | None = None

    @cached_property
    def rows(self) -> PageRows:
        """The rows of the table of samples."""
        return PageRows(columns=self.columns, doubts=self.doubts)

    @property
    def rate_hz(self) -> int:
        """The rate of the audio; 0 without."""
        return int(self.columns.cache.constants.get("sample_rate_hz", 0))


def overview_of(
    cache: Cache, config: Config | None, *, choice: CardChoice, roots: Sequence[Path], sounds: Sounds | None = None
) -> Overview:
    """Returns what a page says of a cache.

    config: whose plan comes first, and whose tokenizer makes tokens readable. roots: under which plans may lie. sounds:
    gives waveforms that the cache does not keep.
    Raises ConfigError for ids that are not there, CacheCorruptError where the metadata describes no cache.
    """
    facts = cache_facts(cache, plan_roots=[])
    columns = PageColumns(cache)
    filter_ = None if config is None or not config.filter.is_given else Filter.of(config.filter)
    left = None if filter_ is None else filter_.choose(cache, name=cache.place)
    doubts = doubts_of(columns, kept=None if left is None else np.isin(np.arange(len(cache)), left.places))
    plans = views_of(columns, config, roots=roots)
    tokenizer, note = _tokenizer(cache, config)
    sound = None if sounds is None or config is None or "waveform" in cache.fields else sounds(config, cache)
    reasons = len(facts["excluded"]) + len(facts["failed"])
    chosen, how = _chosen(columns, doubts, plans, choice)
    return Overview(
        facts=facts,
        columns=columns,
        doubts=doubts,
        plans=plans,
        rejected=rejected_ids(cache.folder / "rejected.jsonl", wanted=reasons),
        sealed=sealed_at(cache.folder),
        reader=Reader(columns=columns, tokenizer=tokenizer, config=config, sound=sound),
        token_note=note,
        chosen=chosen,
        how=how,
        filter_line=None if left is None else str(left),
    )


def _chosen(
    columns: PageColumns, doubts: Doubts, plans: Sequence[PlanView], choice: CardChoice
) -> tuple[list[Chosen], str]:
    if choice.ids is not None:
        return by_ids(columns, choice.ids), "those named by --ids"
    if choice.longest:
        return longest(columns), "the longest ones"
    if choice.worst:
        padding = next((plan.padding for plan in plans if plan.padding is not None), None)
        found = worst(columns, doubts, padding=padding)
        about = "transcripts that do not fit their length, waveforms at full scale, most padding in their bucket"
        return found, f"the worst ones, in turn: {about}" if found else f"no sample is out of range: {about}"
    found = spread(columns)
    over = "languages and lengths" if columns.classes is None else "classes"
    return found, "all of them" if len(found) == len(columns) else f"spread over {over}"


def _tokenizer(cache: Cache, config: Config | None) -> tuple[Any, str]:
    """Returns the tokenizer that made a cache where the config names it, else None and why tokens are numbers."""
    if cache.tokenizer is None or "input_ids" not in cache.fields:
        return None, ""
    if config is None or config.text is None:
        return None, "Tokens are numbers here: a cache does not hold its tokenizer. Name the config to read them."
    try:
        folder = Path(config.text.tokenizer)
        if tokenizer_digest(folder) != cache.tokenizer:
            return None, "Tokens are numbers here: text.tokenizer of the config is not the one that made this cache."
        return load_tokenizer(folder), ""
    except (ForebayError, OSError) as err:
        return None, f"Tokens are numbers here: the tokenizer cannot be loaded: {err}"
