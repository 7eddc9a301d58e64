"""`[filter]` of a config that is linted: what it leaves out has no findings, and is no twin of another sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from forebay.config.filter import FilterConfig
from forebay.lint.measured import Measured
from forebay.store.cache import Cache
from forebay.store.filter import Filter
from forebay.store.layout import Array
from forebay.store.sample_ids import read_ids


def chosen_of_cache(found: Measured, settings: FilterConfig, cache: Cache) -> Measured:
    """Returns a measured cache without what a filter leaves out. Raises ConfigError where the filter cannot be used."""
    if not settings.is_given:
        return found
    is_kept = np.zeros(len(cache), bool)
    is_kept[Filter.of(settings).choose(cache, name=cache.place).places] = True
    return _without(found, ~is_kept[: len(found)])


def chosen_of_raw(found: Measured, settings: FilterConfig) -> Measured:
    """Returns measured raw data without what the lists of a filter leave out. Raises ConfigError for a bad list.

    Conditions and quotas are of the columns of a cache: a note says that they were not looked at.
    """
    if not settings.is_given:
        return found
    is_dropped = np.zeros(len(found), bool)
    lists: Mapping[str, str | None] = {"ids": settings.ids, "drop_ids": settings.drop_ids}
    for name, path in lists.items():
        if path is not None:
            ids = read_ids(Path(path), setting=f"filter.{name}", may_be_empty=name == "drop_ids")
            is_listed = np.asarray(pc.is_in(found.ids, value_set=ids).to_numpy(zero_copy_only=False), bool)
            is_dropped |= is_listed if name == "drop_ids" else ~is_listed
    others = [name for name in ("where", "quota") if getattr(settings, name)]
    note = f"[filter] {' and '.join(others)}: of a cache's columns, and not looked at in raw data"
    return _without(found, is_dropped, *([note] if others else []))


def _without(found: Measured, is_dropped: Array, *notes: str) -> Measured:
    count = int(is_dropped.sum())
    said = [f"[filter] leaves out {count} of {len(found)} samples, which have no findings"] if count else []
    return replace(found, dropped=is_dropped, notes=[*found.notes, *said, *notes])
