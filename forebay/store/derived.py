"""Caches that were made of other caches: what their recipe documents say, and which configs may name one.

A recipe document of such a cache has the sections of its steps, which are those of the caches that it was made of, and
one section more, `merged` or `subset`. No config has such a section. So the recipe key of the cache is none that a
config gives, and a lookup by recipe never takes the cache: it is used where `loader.cache_dir` names it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import RemoteDeniedError, RemoteMissingError
from forebay.store.key import SHORT, differences
from forebay.store.memo import SIZE, Memo
from forebay.store.remote.raw.raw_sources import is_file, localized, look_up, source_stat
from forebay.store.source_files import ABSENT, SourceState, StoredSource, listed_files, path_of

logger = logging.getLogger(__name__)

MERGED, SUBSET = "merged", "subset"
"""The section that a recipe document has on top."""


def is_derived(recipe: Mapping[str, Any]) -> bool:
    """Returns whether a recipe document is that of a cache which was made of other caches."""
    return MERGED in recipe or SUBSET in recipe


def steps_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a recipe document that decide values: not which rows of which caches are samples."""
    return {name: section for name, section in recipe.items() if name not in ("source", MERGED, SUBSET)}


def steps_differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the fields in which the steps of two recipe documents differ, as `differences` does."""
    return differences(steps_of(wanted), steps_of(stored))


def described(recipe: Mapping[str, Any]) -> str:
    """Returns what a derived cache is, in words for a log line; `recipe` is its document."""
    if (merged := recipe.get(MERGED)) is not None:
        return f"a merge of the caches {', '.join(str(key)[:SHORT] for key in merged.get('of', ()))}"
    found = recipe.get(SUBSET) or {}
    chosen = f"where {found['where']}" if "where" in found else "by a list of ids"
    return f"a subset of the cache {str(found.get('of'))[:SHORT]}, {chosen}"


def compare_derived(
    config: Config, stored: Sequence[StoredSource], memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    """Returns whether raw data that a config shows is what a derived cache was made of, and the names that are not.

    A config may name other manifests than the caches were made of, or some of them. So only those files are compared
    that a manifest entry of the config leads to: a file of that name must have the content that one of the caches was
    made of. `absent` where some file of the cache is not seen from the config, or a store refuses to show it.
    """
    try:
        return _compared(_seen(config, stored), stored, memo, may_hash=may_hash)
    except (RemoteDeniedError, RemoteMissingError) as err:
        logger.warning("%s; the cache is not compared with its sources", err)
        return "absent", []


Seen = Sequence[tuple[str, Path]]


def _compared(
    seen: Seen, stored: Sequence[StoredSource], memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    expected: dict[str, set[str]] = {}
    sizes: dict[str, set[int]] = {}
    for source in stored:
        expected.setdefault(source.name, set()).add(source.xxh3_128)
        sizes.setdefault(source.name, set()).add(source.size_bytes)
    if changed := sorted({name for name, path in seen if source_stat(path)[SIZE] not in sizes[name]}):
        return "changed", changed
    if not may_hash and any(memo.known(path) is None for _, path in seen):
        return "unknown", []
    hashes = memo.hashes([path for _, path in seen])
    if changed := sorted({name for (name, _), now in zip(seen, hashes, strict=True) if now not in expected[name]}):
        return "changed", changed
    found = {(name, now) for (name, _), now in zip(seen, hashes, strict=True)}
    missing = [s.name for s in stored if s.xxh3_128 != ABSENT and (s.name, s.xxh3_128) not in found]
    return "absent" if missing else "same", missing


def _seen(config: Config, stored: Sequence[StoredSource]) -> Seen:
    """Returns name and path of every file that is there and that a cache was made of, by the config's manifests."""
    names = {source.name for source in stored if source.xxh3_128 != ABSENT}
    files = listed_files(localized(config).source, reads=config.reads)
    listed = {(file.name, file.path) for file in files if file.name in names}
    # What a manifest names is only found where its entry is in the place that it had.
    named = {(s.name, path) for s in stored if s.name in names and (path := path_of(config, s)) is not None}
    found = sorted(listed | named)
    look_up([path for _, path in found])
    return [(name, path) for name, path in found if is_file(path)]
