"""What a page says of a whole cache, gathered once: facts, plans, doubts, and how its samples are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.digest import tokenizer_digest
from forebay.config.tree import Config
from forebay.errors import ForebayError
from forebay.inspect.facts import cache_facts
from forebay.inspect.report.cards import Reader
from forebay.inspect.report.choose import Chosen, by_ids, longest, spread, worst
from forebay.inspect.report.columns import Columns
from forebay.inspect.report.doubts import Doubts, doubts_of
from forebay.inspect.report.plans import PlanView, views_of
from forebay.inspect.report.rows import Rows
from forebay.inspect.report.words import rejected_ids, sealed_at
from forebay.inspect.sample import Sounds, load_tokenizer
from forebay.store.cache import Cache
from forebay.store.filter import Filter


@dataclass(frozen=True, kw_only=True)
class Choice:
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
    columns: Columns
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
    def rows(self) -> Rows:
        """The rows of the table of samples."""
        return Rows(columns=self.columns, doubts=self.doubts)

    @property
    def rate_hz(self) -> int:
        """Of the audio; 0 without."""
        return int(self.columns.cache.constants.get("sample_rate_hz", 0))


def overview_of(
    cache: Cache, config: Config | None, *, choice: Choice, roots: Sequence[Path], sounds: Sounds | None = None
) -> Overview:
    """Returns what a page says of a cache.

    config: whose plan comes first, and whose tokenizer makes tokens readable. roots: under which plans may lie. sounds:
    gives waveforms that the cache does not keep.
    Raises ConfigError for ids that are not there, CacheCorruptError where the metadata describes no cache.
    """
    facts = cache_facts(cache, plan_roots=[])
    columns = Columns(cache)
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


def _chosen(columns: Columns, doubts: Doubts, plans: Sequence[PlanView], choice: Choice) -> tuple[list[Chosen], str]:
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
    return found, "all of them" if len(found) == len(columns) else f"spread over {_spread_over(columns)}"


def _spread_over(columns: Columns) -> str:
    return "languages and lengths" if columns.classes is None else "classes"


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
