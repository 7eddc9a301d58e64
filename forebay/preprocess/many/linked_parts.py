"""The caches that a merge or a subset is made of: opened, compared, and each with the samples that are taken of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.config.url import is_url, url_or_path
from forebay.errors import CacheMismatchError, ConfigError
from forebay.store.cache import Cache, open_cache
from forebay.store.derived import steps_differences
from forebay.store.key import SHORT, differences
from forebay.store.layout import Ints
from forebay.store.metadata import check_description


@dataclass(frozen=True, kw_only=True)
class Part:
    """A sealed cache and what is taken of it.

    kept: int64, the indices of the samples that are taken, ascending.
    """

    cache: Cache
    kept: Ints


def opened(place: str | os.PathLike[str], *, command: str) -> Cache:
    """Returns the cache of a folder of this machine. command: what to run once it is here, for messages.

    Raises ConfigError for a cache of a store, whose shards cannot be linked, CacheError where it is not whole.
    """
    text = url_or_path(os.fspath(place))
    cache = None if is_url(text) else open_cache(text)
    if cache is None or cache.mirror is not None:
        url = text if cache is None else cache.place
        raise ConfigError(
            f"{url} lies in a store, and shards are linked from a folder of this machine; run: forebay cache pull "
            f"{url} DIR, then forebay cache {command} DIR"
        )
    check_description(cache.folder, cache.metadata)
    if "sample_id" not in cache.column_names:
        raise CacheMismatchError(f"{cache.place} has no field sample_id; run: forebay preprocess CONFIG --rebuild")
    return cache


def require_one_recipe(caches: Sequence[Cache]) -> None:
    """Raises CacheMismatchError, with the field, both values and both caches, where values were made in two ways.

    What `[source]` chooses, names, splits and the layout of shards may differ.
    """
    for other in caches[1:]:
        first = caches[0]
        for field, one, two in _disagreements(first, other):
            raise CacheMismatchError(
                f"cannot merge {first.place} and {other.place}: {field} is {_short(one)} in the first and "
                f"{_short(two)} in the second; build both with one setting and one forebay, then merge: "
                "forebay preprocess CONFIG",
                code="FB414",
            )


def _disagreements(first: Cache, other: Cache) -> list[tuple[str, Any, Any]]:
    steps = steps_differences(first.metadata["recipe"], other.metadata["recipe"])
    found = [(row["field"], row["wanted"], row["stored"]) for row in steps]
    for name in ("probe", "constants"):
        rows = differences(first.metadata[name], other.metadata[name])
        found += [(f"{name}.{row['field']}", row["wanted"], row["stored"]) for row in rows]
    codecs = (first.metadata.get("codec"), other.metadata.get("codec"))
    found += [("vision.codec", *codecs)] if codecs[0] != codecs[1] else []
    fields: list[Mapping[str, Any]] = [{f["name"]: f for f in cache.metadata["fields"]} for cache in (first, other)]
    found += [(f"field {row['field']}", row["wanted"], row["stored"]) for row in differences(*fields)]
    for name in ("fields", "length_names"):  # their order too
        one, two = first.metadata[name], other.metadata[name]
        found += [(name, one, two)] if one != two else []
    return found


def _short(value: Any) -> str:
    text = value[:SHORT] if isinstance(value, str) and len(value) in (32, 64) else value
    return f"{text!r:.80}"
