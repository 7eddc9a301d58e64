"""Whether the source files of a config are those that a cache was made of, and an index of the sources of many caches.

They are compared by name, size and remembered hash, and read only where no hash is known.

A cache that was made of other caches has the sections of their steps in its recipe, and one that no config has. So a
lookup by recipe never takes it: it is used where `loader.cache_dir` names it.

By the index a lookup opens those lists of sources alone that may be meant. The list of a cache's sources is known by
its own hash, which stands in metadata.json, so no entry ever ages. An entry has the digest of the names that the
manifests stand for, and size and hash of the first of these files. Both only rule a cache out: whichever is left is
compared with all of its sources. So a wrong entry costs time and is no wrong cache.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import xxhash

from forebay.config.tree import Config
from forebay.errors import RemoteDeniedError, RemoteMissingError
from forebay.store.files import write_bytes
from forebay.store.inputs import SAMPLES, is_unlisted
from forebay.store.key import SHORT, differences
from forebay.store.layout import Array
from forebay.store.memo import SIZE, Memo, digests_of, hexes, records_in, stats_of
from forebay.store.remote.raw import raw_sources as sources
from forebay.store.remote.raw.raw_sources import localized
from forebay.store.source_files import (
    ABSENT,
    BLOCK_SOURCES,
    StoredSource,
    StoredSources,
    anchor,
    below,
    entry_files,
    listed_files,
)

logger = logging.getLogger(__name__)
SourceState = Literal["same", "changed", "absent", "other", "unknown"]
"""`other`: the config names other files, which are not here."""


class ShownSources:
    """The source files that a config shows now: named once and looked at once, whatever caches are compared with them.

    is_unlisted: it is code whose samples are not listed.
    """

    def __init__(self, config: Config) -> None:
        """Asks no store yet."""
        self._config, self.is_unlisted = config, is_unlisted(config)
        self._looked_at: tuple[list[str], tuple[Array, Array]] = ([], (np.zeros((0, 5), np.int64), np.zeros(0, bool)))

    @cached_property
    def config(self) -> Config:
        """The config with mirrors in place of URLs. Raises RemoteError where a store does not show what they name."""
        return sources.localized(self._config)

    @property
    def manifests(self) -> Sequence[str]:
        """The entries of `source.manifest`."""
        return self._config.source.manifests

    @cached_property
    def listed(self) -> StoredSources:
        """The files that the entries of `source.manifest` stand for; nobody has looked at them.

        An entry of links alone, all to what is gone, stands for none here: its raw data is elsewhere.
        """
        entries = entry_files(self.config.source, meaning=self.config.meaning)
        # One by one: the first is most often there, and paths of all files would fill memory.
        paths = (e.paths or (path for name in e.names for path in below(e.base, [name])) for e in entries)
        found = [e for e, own in zip(entries, paths, strict=True) if any(sources.exists(Path(path)) for path in own)]
        names = [os.fsencode(name) for each in found for name in each.names]
        numbers = np.repeat(
            np.array([each.entry for each in found], np.int32), np.array([len(each.names) for each in found], np.int64)
        )
        return StoredSources.of_columns(
            names, numbers, np.ones(len(names), bool), [b""] * len(names), np.full(len(names), -1)
        )

    def stats(self, paths: list[str]) -> tuple[Array, Array]:
        """Returns what `stats_of` does; of the paths that were asked for last as they were then."""
        if self._looked_at[0] != paths:
            sources.look_up(path for path in paths if sources.MIRRORS in path)
            self._looked_at = paths, stats_of(paths, sources.file_stat)
        return self._looked_at[1]


def compare_sources(
    shown: ShownSources, stored: StoredSources, memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    """Returns whether the raw data is what a cache was made of, and the names that are not.

    `absent` only where nothing that is there differs: a source that is there and changed never hits. What a store does
    not show, or a bucket that is gone, is absent, with a warning: who trains need not be who may read it.
    """
    if shown.is_unlisted:  # edited code yields other samples, as far as anybody knows
        return "changed", [SAMPLES]
    try:
        return _compared(shown, stored, memo, may_hash=may_hash)
    except (RemoteDeniedError, RemoteMissingError) as err:
        if names := _of_other_names(shown.manifests, stored.where(stored.numbers("listed"))):
            return "other", names
        logger.warning("%s; the cache is not compared with its sources", err)
        return "absent", []


def _of_other_names(entries: Sequence[str], own: StoredSources) -> list[str]:
    """Returns by which files entries, which are gone, cannot mean those of a cache: of another name, more or fewer."""
    files = Counter(source.entry for source in own)

    def is_other(source: StoredSource) -> bool:
        if source.entry >= len(entries):
            return True
        path, name = PurePath(entries[source.entry]), PurePath(source.name)
        is_file = files[source.entry] == 1 and path.suffix == name.suffix != ""
        return is_file and path.name != name.name and not glob.has_magic(str(path))

    more = [PurePath(e).name for i, e in enumerate(entries) if i not in files and not glob.has_magic(e)]
    return [source.name for source in own if is_other(source)] + more


def _compared(
    shown: ShownSources, stored: StoredSources, memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    config, listed, own = shown.config, shown.listed, stored.where(stored.numbers("listed"))
    if len(listed) and not are_named_alike(listed, own):
        there, known = ({(source.entry, source.name) for source in each} for each in (listed, own))
        return "changed", sorted({name for _, name in there ^ known} or {name for _, name in there})
    if not len(listed):
        # The cache's manifest is there and the config's is not: it names another one. Or both are gone, of two names.
        found = [s.name for s in own if _file_of(config, s)] or _of_other_names(shown.manifests, own)
        if found:
            return "other", found
    # A file that was not there when the cache was built is missed by nobody.
    asked = stored.where(stored.is_hashed | (stored.numbers("size_bytes") < 0))
    paths = stored_paths(config, asked)
    stats, is_there = shown.stats(paths)
    here, gone = asked.where(is_there), asked.where(~is_there)
    paths, stats = list(itertools.compress(paths, is_there.tolist())), stats[is_there]
    # Sizes first: a file of another size is another file, and costs no reading.
    if (is_other := stats[:, SIZE] != here.numbers("size_bytes")).any():
        return "changed", here.names_at(is_other)
    if not may_hash and not memo.known_of(paths, stats)[1].all():
        return "unknown", []
    is_other = memo.hashed(paths, stats=stats)[1] != digests_of(here.table["xxh3_128"].to_pylist())
    if is_other.any():
        return "changed", here.names_at(is_other)
    absent = gone.names_at(gone.is_hashed)
    return "absent" if absent else "same", absent


def are_named_alike(some: StoredSources, others: StoredSources) -> bool:
    """Whether sources have the same names, of the same entries, in the same order."""
    return len(some) == len(others) and all(some.table[name].equals(others.table[name]) for name in ("name", "entry"))


def stored_paths(config: Config, stored: StoredSources) -> list[str]:
    """Returns where sources of a cache would be by the config's manifests; "" where those have no such entry."""
    bases = [anchor(entry) for entry in sources.localized(config).source.places]
    fronts = [None if sources.place_of(base) is not None else below(str(base), [""])[0] for base in bases]
    found: list[str] = []
    for batch in stored.table.select(["name", "entry"]).to_batches(max_chunksize=BLOCK_SOURCES):
        names, entries = map(os.fsdecode, batch["name"].to_pylist()), batch["entry"].to_pylist()
        for name, entry in zip(names, entries, strict=True):
            if entry >= len(bases):
                found.append("")
            elif (front := fronts[entry]) is None or name.startswith("/"):
                found.append(str(bases[entry] / name))
            else:
                found.append(front + name)
    return found


def source_differences(
    config: Config, stored: Sequence[StoredSource], names: Sequence[str], memo: Memo
) -> list[dict[str, Any]]:
    """Returns how the sources of these names differ, as `{"field", "wanted", "stored"}`: hashes, or else sizes.

    One row says it where the same files stand in another order.
    """
    config = sources.localized(config)
    by_name = {source.name: source for source in stored}
    # A folder may have gained thousands of files, so it is listed once; of two of a name the first one counts.
    listed = {file.name: file.path for file in reversed(listed_files(config.source, meaning=config.meaning))}
    rows = [_source_difference(config, by_name.get(name), name, listed.get(name), memo) for name in names]
    differ = [row for row in rows if row["wanted"] != row["stored"]]
    return differ or [{"field": "source.manifest", "wanted": "its files in this order", "stored": "another order"}]


def _source_difference(
    config: Config, stored: StoredSource | None, name: str, listed: Path | None, memo: Memo
) -> dict[str, Any]:
    path = _file_of(config, stored) if stored is not None and not stored.listed else listed
    path = path if path is not None and sources.is_file(path) else None
    wanted = None if path is None else memo.known(path)
    kept = stored and stored.xxh3_128
    if path is not None and wanted is None:
        wanted, kept = f"{sources.source_stat(path)[SIZE]} bytes", stored and f"{stored.size_bytes} bytes"
    return {"field": f"sources.{name}", "wanted": wanted, "stored": kept}


def path_of(config: Config, source: StoredSource) -> Path | None:
    """Returns where a source of a cache would be by the config's manifests; None where those have no such entry."""
    entries = sources.localized(config).source.places
    return anchor(entries[source.entry]) / source.name if source.entry < len(entries) else None


def _file_of(config: Config, source: StoredSource) -> Path | None:
    """Returns where a source of a cache is by the config's manifests; None where no such file is there."""
    path = path_of(config, source)
    return path if path is not None and sources.is_file(path) else None


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
        return _compared_derived(_seen(config, stored), stored, memo, may_hash=may_hash)
    except (RemoteDeniedError, RemoteMissingError) as err:
        logger.warning("%s; the cache is not compared with its sources", err)
        return "absent", []


Seen = Sequence[tuple[str, Path]]


def _compared_derived(
    seen: Seen, stored: Sequence[StoredSource], memo: Memo, *, may_hash: bool
) -> tuple[SourceState, list[str]]:
    expected: dict[str, set[str]] = {}
    sizes: dict[str, set[int]] = {}
    for source in stored:
        expected.setdefault(source.name, set()).add(source.xxh3_128)
        sizes.setdefault(source.name, set()).add(source.size_bytes)
    paths = [path for _, path in seen]
    stats, is_there = stats_of(paths, sources.file_stat)
    names = [name for (name, _), found in zip(seen, is_there.tolist(), strict=True) if found]
    paths = [path for path, found in zip(paths, is_there.tolist(), strict=True) if found]
    stats = stats[is_there]
    found_sizes = stats[:, SIZE].tolist()
    if changed := sorted({name for name, size in zip(names, found_sizes, strict=True) if size not in sizes[name]}):
        return "changed", changed
    if not may_hash and not memo.known_of(paths, stats)[1].all():
        return "unknown", []
    hashes = hexes(memo.hashed(paths, stats=stats)[1])
    if changed := sorted({name for name, now in zip(names, hashes, strict=True) if now not in expected[name]}):
        return "changed", changed
    known = set(zip(names, hashes, strict=True))
    missing = [s.name for s in stored if s.xxh3_128 != ABSENT and (s.name, s.xxh3_128) not in known]
    return "absent" if missing else "same", missing


def _seen(config: Config, stored: Sequence[StoredSource]) -> Seen:
    """Returns name and path of every file that a cache was made of and that may be there, by the config's manifests."""
    names = {source.name for source in stored if source.xxh3_128 != ABSENT}
    files = listed_files(localized(config).source, meaning=config.meaning)
    listed = {(file.name, file.path) for file in files if file.name in names}
    # What a manifest names is only found where its entry is in the place that it had.
    named = {(s.name, path) for s in stored if s.name in names and (path := path_of(config, s)) is not None}
    found = sorted(listed | named)
    sources.look_up([path for _, path in found])
    return found


FILE_NAME = "sources.index"
_FEW = 16
"""Lists that a lookup reads without keeping what it saw: a root of a few caches has no index."""
_SHORT = 4096
"""Sources of a list that is held until many were read."""
_RECORD = np.dtype([("list", "V16"), ("names", "V16"), ("at", "<i8"), ("size", "<i8"), ("xxh3_128", "V16")])


class SourceIndex:
    """The lists of sources of a root's caches, by what rules most of them out."""

    def __init__(self, root: Path, shown: ShownSources, memo: Memo) -> None:
        """shown: the files of the config that a cache is looked for. memo: of the root."""
        self._path, self._shown, self._memo = root / FILE_NAME, shown, memo
        found = records_in(self._path, _RECORD)
        self._known = {record["list"].tobytes(): record for record in found}
        self._new: dict[bytes, Array] = {}
        self._num_read, self._waiting = 0, list[tuple[str, StoredSources]]()
        self._firsts: dict[int, tuple[Array, bool, bytes | None]] = {}

    def rules_out(self, name: str) -> bool:
        """Whether a list of sources is of other files than the config's. name: its xxh3-128, 32 hex digits."""
        record = self._known.get(bytes.fromhex(name))
        if record is None or not len(self._shown.listed):
            return False
        if record["names"].tobytes() != self._names:
            return True
        first = int(record["at"])
        if first < 0:
            return False
        if first not in self._firsts:
            self._firsts[first] = self._first(first)
        stats, is_there, digest = self._firsts[first]
        if not is_there:
            return False
        return bool(stats[SIZE] != record["size"] or (digest is not None and digest != record["xxh3_128"].tobytes()))

    def add(self, name: str, stored: StoredSources) -> None:
        """Takes in a list that was read, if many were."""
        self._num_read += 1
        if self._num_read <= _FEW:
            self._waiting += [(name, stored)] if len(stored) <= _SHORT else []
            return
        for each in (*self._waiting, (name, stored)):
            self._take(*each)
        self._waiting.clear()

    def _take(self, name: str, stored: StoredSources) -> None:
        own = stored.where(stored.numbers("listed"))
        at = next(iter(np.flatnonzero(own.is_hashed).tolist()), -1)
        first = own[max(at, 0)] if len(own) else None
        record = np.zeros((), _RECORD)
        record["list"], record["names"] = np.void(bytes.fromhex(name)), np.void(names_digest(own))
        record["at"], record["size"] = at, 0 if first is None else first.size_bytes
        if at >= 0 and first is not None:
            record["xxh3_128"] = digests_of([first.xxh3_128])[0]
        self._new[record["list"].tobytes()] = record

    def save(self) -> None:
        """Keeps what was taken in. Of two who write at once one loses it, and lists are read once more."""
        if not self._new:
            return
        body = np.array([*(self._known | self._new).values()], _RECORD).tobytes()
        try:
            write_bytes(self._path, xxhash.xxh3_128_digest(body) + body)
        except OSError as err:
            logger.info("the index of sources is not kept: %s: %s", self._path, err.strerror)

    @cached_property
    def _names(self) -> bytes:
        return names_digest(self._shown.listed)

    def _first(self, at: int) -> tuple[Array, bool, bytes | None]:
        """Returns the stat of a listed file, whether it is there, and its hash, if that is remembered."""
        paths = stored_paths(self._shown.config, self._shown.listed[at : at + 1])
        stats, is_there = self._shown.stats(paths)
        digests, is_known = self._memo.known_of(paths, stats)
        return stats[0], bool(is_there[0]), digests[0].tobytes() if is_known[0] else None


def names_digest(listed: StoredSources) -> bytes:
    """Returns the xxh3-128 of the entries and names of sources, in their order."""
    state = xxhash.xxh3_128(np.ascontiguousarray(listed.numbers("entry"), np.int64).tobytes())
    for chunk in listed.table["name"].chunks:
        for name in chunk.to_pylist():
            state.update(len(name).to_bytes(8, "little") + name)
    return state.digest()
