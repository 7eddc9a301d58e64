"""Several caches of one recipe as one: what `forebay cache merge` does.

Some samples of a cache as a cache of its own: what `forebay cache subset` does.

Where a merge or a subset is put: its shards are hashed, linked, and sealed by one rename.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.remote import is_url, url_or_path
from forebay.errors import CacheError, CacheMismatchError, ConfigError
from forebay.preprocess.combine import (
    Link,
    Linked,
    ManyReport,
    Part,
    Rejection,
    contents_of,
    opened,
    rejections_of,
    require_one_recipe,
)
from forebay.store.by_hand import read_ids
from forebay.store.cache import Cache
from forebay.store.files import TEMPORARY_MARK, require_writable, sweep
from forebay.store.key import SHORT
from forebay.store.layout import INPUTS, PLANS, TAR_INDEX, TEXTS, Array, Ints
from forebay.store.metadata import read_metadata
from forebay.store.remote.carry.tally import for_each
from forebay.store.row_table import strings_digest
from forebay.store.seal import Contents, check_shard, quick_problems, seal
from forebay.store.source_comparison import MERGED, SUBSET
from forebay.store.where import parse_where
from forebay.terminal import Progress

_OURS = (PLANS, TAR_INDEX, TEXTS, INPUTS)
"""Folders of a cache root that hold no cache."""


def target_of(out: str, *, beside: Cache, cache_root: str | None) -> Path:
    """Returns the folder that `--out` names: a name without a slash is one beside the first cache, or in the root.

    Raises ConfigError for a URL, and for a name that forebay has for other things.
    """
    text = url_or_path(out)
    if is_url(text) or (cache_root is not None and is_url(cache_root)):
        raise ConfigError(
            f"--out {text}: shards are linked into a folder of this machine; make it here, then run: forebay cache "
            "push DIR URL"
        )
    is_path = os.sep in text or text in (".", "..")
    folder = Path(os.path.abspath(text) if is_path else Path(cache_root or beside.folder.parent).absolute() / text)
    if folder.name in _OURS or folder.name.startswith(".") or TEMPORARY_MARK in folder.name:
        raise ConfigError(f"--out {text}: no cache is looked for in a folder of the name {folder.name}; name another")
    return folder


def put(folder: Path, contents: Contents, linked: Linked, *, caches: Sequence[Cache], progress: bool = False) -> bool:
    """Makes a folder the sealed cache of these contents; says whether it was that already.

    Every shard is hashed before it is linked. caches: those that the contents are of. Raises CacheCorruptError for a
    damaged shard, CacheMismatchError where something else stands at the folder.
    """
    key = contents.document["key"]
    for cache in caches:
        if os.path.realpath(cache.folder) in map(str, Path(os.path.realpath(folder)).parents):
            raise CacheMismatchError(f"--out {folder} lies in the cache {cache.place}; name a folder outside of it")
    is_there = _is_there(folder, key)
    problems = quick_problems(folder) if is_there else []
    if is_there and not problems:
        return True
    require_writable(folder.parent, setting="--out")
    sweep(folder.parent)
    _check(linked, progress=progress)
    _is_there(folder, key)  # hashing takes a while
    is_sealed_here = seal(folder, contents, scratch=folder.parent, replace=bool(problems))
    return not is_sealed_here and _is_there(folder, key)


def _is_there(folder: Path, key: str) -> bool:
    """Returns whether the cache of a key stands at a folder; False where nothing does.

    Raises CacheMismatchError where something else stands there.
    """
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        standing = str(read_metadata(folder)["key"])
    except (CacheError, KeyError, OSError):
        standing = ""
    if standing == key:
        return True
    found = f"the cache of key {standing[:SHORT]}" if standing else "no sealed cache"
    raise CacheMismatchError(
        f"--out {folder} is there and is {found}, wanted the cache of key {key[:SHORT]}; name another folder, or "
        "remove that one",
        code="FB115",
    )


def _check(linked: Linked, *, progress: bool) -> None:
    """Raises CacheCorruptError where a shard is not, byte for byte, what was sealed."""
    bar = Progress(linked.size_bytes, unit="B", desc="hash", is_shown=progress)

    def check(link: Link) -> None:
        check_shard(link.path, link.entry)
        bar.update(link.entry.size_bytes)

    with bar:
        for_each(check, linked.links, num_threads=4)


OnDuplicate = Literal["refuse", "keep-first"]
_SHOWN = 5
"""Ids that a message lists."""


def merge(
    places: Sequence[str],
    out: str,
    *,
    on_duplicate: OnDuplicate = "refuse",
    cache_root: str | None = None,
    progress: bool = False,
) -> ManyReport:
    """Makes several sealed caches of one recipe one cache, with their shards linked, and returns what was done.

    Samples are in the order of the caches. The recipes may differ in `[source]` alone. on_duplicate: what becomes of a
    sample whose id an earlier cache has: it is an error, or the earlier one is kept.
    out: a folder, or a name beside the first cache, or below `cache_root`.
    Raises CacheMismatchError, which names field, values and caches, where they are not of one recipe or have ids in
    common; ConfigError for fewer than two caches, or one in a store; CacheCorruptError for a damaged shard.
    """
    started_s = time.monotonic()
    if len(places) < 2:
        raise ConfigError("a merge is of two caches or more; to link some samples of one: forebay cache subset")
    caches = [opened(place, command="merge") for place in places]
    _require_different(caches)
    require_one_recipe(caches)
    again = _again(caches)
    if len(again) and on_duplicate == "refuse":
        raise CacheMismatchError(_duplicates_message(caches, again), code="FB414")
    parts = _parts(caches, again)
    if not sum(len(part.kept) for part in parts):
        raise ConfigError("no cache has a sample: nothing is there to be merged")
    section = {"of": [cache.key for cache in caches], **({"on_duplicate": on_duplicate} if len(again) else {})}
    linked = Linked.of(parts)
    rejections = {line: row for cache in caches for line, row in rejections_of(cache).items()}
    contents = contents_of(parts, linked, made={MERGED: section}, rejections=rejections)
    folder = target_of(out, beside=caches[0], cache_root=cache_root)
    is_there = put(folder, contents, linked, caches=caches, progress=progress)
    counts = {"duplicates": len(again), "already_there": is_there, "seconds": time.monotonic() - started_s}
    return ManyReport.of("merge", folder, contents, parts=parts, linked=linked, **counts)


def _require_different(caches: Sequence[Cache]) -> None:
    seen: dict[str, Cache] = {}
    for cache in caches:
        if (first := seen.setdefault(cache.key, cache)) is not cache:
            raise ConfigError(f"{first.place} and {cache.place} have one key, {cache.key[:SHORT]}: name it once")


@dataclass(frozen=True, kw_only=True)
class _Again:
    """Samples whose ids an earlier cache has. Both are int64, counted through all caches: these, and the first ones."""

    places: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.places)


def _offsets(caches: Sequence[Cache]) -> Array:
    return np.cumsum([0, *map(len, caches)])


def _again(caches: Sequence[Cache]) -> _Again:
    columns = [cache.table(["sample_id"])["sample_id"] for cache in caches]
    ids = pa.chunked_array([chunk for column in columns for chunk in column.chunks], type=pa.large_string())
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    first = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last write stays: the first place of each id
    owner = np.repeat(np.arange(len(caches)), np.diff(_offsets(caches)))
    # An id that one cache has twice is that cache's own matter.
    places = np.flatnonzero(owner[first[codes]] < owner)
    return _Again(places=places, first=first[codes[places]])


def _parts(caches: Sequence[Cache], again: _Again) -> list[Part]:
    parts = []
    for cache, start in zip(caches, _offsets(caches).tolist(), strict=False):
        is_kept = np.ones(len(cache), bool)
        inside = again.places[(again.places >= start) & (again.places < start + len(cache))]
        is_kept[inside - start] = False
        parts.append(Part(cache=cache, kept=np.flatnonzero(is_kept)))
    return parts


def _duplicates_message(caches: Sequence[Cache], again: _Again) -> str:
    offsets = _offsets(caches)
    shown = []
    for places in zip(again.first[:_SHOWN].tolist(), again.places[:_SHOWN].tolist(), strict=True):
        numbers = [int(np.searchsorted(offsets, place, side="right")) - 1 for place in places]
        name = caches[numbers[1]].sample_id(places[1] - int(offsets[numbers[1]]))
        shown.append(f"{name!r} of {caches[numbers[0]].place} and {caches[numbers[1]].place}")
    more = f", and {len(again) - _SHOWN} more" if len(again) > _SHOWN else ""
    return (
        f"{len(again)} sample ids are in two of the caches: {'; '.join(shown)}{more}; to keep the sample of the cache "
        "that is named first, add: --on-duplicate keep-first"
    )


def subset(
    place: str,
    out: str,
    *,
    where: str | None = None,
    ids: Path | None = None,
    missing: Literal["refuse", "ok"] = "refuse",
    cache_root: str | None = None,
    progress: bool = False,
) -> ManyReport:
    """Makes some samples of a sealed cache a cache of its own, with its shards linked, and returns what was done.

    Samples are in the order of the cache. Shards that hold none of them are left out; of the others all bytes stay.
    where: an expression over the columns of the row table, see `forebay.store.where`. ids: a file with an id a line.
    One of the two is given. missing: what becomes of ids that the cache does not have. out: as of `merge`.
    Raises ConfigError for an expression or a list that cannot be used, or that leaves no sample.
    """
    started_s = time.monotonic()
    if (where is None) == (ids is None):
        raise ConfigError("which samples? forebay cache subset CACHE --where EXPR, or --ids FILE; one of the two")
    cache = opened(place, command="subset")
    if where is not None:
        chosen = _by_where(cache, where)
    else:
        assert ids is not None
        chosen = _by_ids(cache, ids, missing)
    part = Part(cache=cache, kept=chosen.kept)
    taken = cache.table(["sample_id"])["sample_id"].take(pa.array(chosen.kept))
    section = {"of": cache.key, "samples": strings_digest(taken), **chosen.said}
    linked = Linked.of([part])
    contents = contents_of([part], linked, made={SUBSET: section}, rejections=chosen.rejections)
    folder = target_of(out, beside=cache, cache_root=cache_root)
    counts = {"missing": chosen.missing, "repeated": chosen.repeated}
    counts["already_there"] = put(folder, contents, linked, caches=[cache], progress=progress)
    seconds = time.monotonic() - started_s
    return ManyReport.of("subset", folder, contents, parts=[part], linked=linked, seconds=seconds, **counts)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The samples chosen of a cache.

    kept: int64, indices of samples. said: how, for the recipe document. rejections: of rows that were asked for and are
    no samples. missing: ids that are no samples. repeated: lines that name an id again.
    """

    kept: Ints
    said: dict[str, Any]
    rejections: dict[str, Rejection] = field(default_factory=dict)
    missing: int = 0
    repeated: int = 0


def _by_where(cache: Cache, text: str) -> _Chosen:
    where = parse_where(text, setting="--where")
    where.require_columns(cache.column_names)
    kept = np.flatnonzero(where.mask(cache.table(["index", *where.columns])))
    if not len(kept):
        raise ConfigError(f"--where {where.text}: none of the {len(cache)} samples of {cache.place} is so")
    return _Chosen(kept=kept, said={"where": where.text})


def _by_ids(cache: Cache, path: Path, missing: str) -> _Chosen:
    listed = read_ids(path, setting="--ids")
    wanted = listed.unique()
    known = cache.table(["sample_id"])["sample_id"]
    kept = np.flatnonzero(pc.is_in(known, value_set=wanted).to_numpy())
    absent = wanted.filter(pc.invert(pc.is_in(wanted, value_set=known.combine_chunks())))
    if len(absent) and missing == "refuse":
        shown = ", ".join(map(repr, absent[:_SHOWN].to_pylist())) + (", ..." if len(absent) > _SHOWN else "")
        raise ConfigError(
            f"--ids {path}: {len(absent)} of {len(wanted)} ids are no samples of {cache.place}: {shown}; correct the "
            "list, or leave them out: --missing ok",
            code="FB114",
        )
    if not len(kept):
        raise ConfigError(f"--ids {path}: none of its {len(wanted)} ids is a sample of {cache.place}", code="FB114")
    return _Chosen(
        kept=kept,
        said={},
        rejections=_rejections(cache, absent.to_pylist()),
        missing=len(absent),
        repeated=len(listed) - len(wanted),
    )


def _rejections(cache: Cache, absent: Iterable[str]) -> dict[str, Rejection]:
    asked = set(absent)
    found = rejections_of(cache) if asked else {}
    return {line: row for line, row in found.items() if row["sample_id"] in asked}
