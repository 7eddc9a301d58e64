"""An index of the sources of a root's many caches: by it a lookup opens those lists of sources alone that may be meant.

The list of a cache's sources is known by its own hash, which stands in metadata.json, so no entry ever ages. An entry
has the digest of the names that the manifests stand for, and size and hash of the first of these files. Both only rule
a cache out: whichever is left is compared with all of its sources. So a wrong entry costs time and is no wrong cache.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from forebay.store.files import write_bytes
from forebay.store.layout import Array
from forebay.store.memo import SIZE, Memo, digests_of, records_in
from forebay.store.source_files import ShownSources, StoredSources, stored_paths

logger = logging.getLogger(__name__)
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
