"""Texts that steps made, kept by content: no text is detected or normalised twice, in whatever cache it is.

`<cache_root>/texts/<first 16 hex of the identity's sha256>/` holds `identity.json` and segments. An identity is the
document of the steps that made the values. A value is known by the digest of its text, of 128 bits (xxh3): two texts
of one digest are taken for one text, as everywhere in forebay where content is compared.

Nothing here is needed: everything can be made again. So a root that cannot be written, a disk that is full and a file
that is damaged cost work, and stop nothing. Two processes that keep the same texts at once both write a segment, which
a later merging makes one. A process that is killed leaves whole segments, and a file that is swept.

A segment is an arrow IPC file of values by digest, written once, never changed, mapped, and named by its own hash. Its
columns are `high` and `low`, the halves of the digests as uint64 in ascending order, and `value`, bytes. Its metadata
say what the values belong to. A file whose hash is not its name is damaged: it costs the work that it saved, no more.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import mmap
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from forebay.store.files import sweep, write_bytes
from forebay.store.held import open_own
from forebay.store.layout import TEXTS, Array, Ints
from forebay.store.memo import note
from forebay.store.shared_disk import is_gone, is_late, try_alone

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2
SUFFIX = ".texts"


class DamagedSegmentError(ValueError):
    """A file is not the segment that was written. It never leaves the store: such a file is passed over."""


class OtherSegmentError(ValueError):
    """A file is a segment of another version or of other values: it is passed over, and left as it is."""


class Segment:
    """A segment, mapped. Threads and forked children may share it."""

    def __init__(self, path: Path, owner: bytes) -> None:
        """Maps a file of values of `owner`, read once. Raises DamagedSegmentError, OtherSegmentError, OSError."""
        self.path = path
        with open(path, "rb", buffering=0, opener=open_own) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                raise DamagedSegmentError(f"it has {status.st_size} bytes")
            data = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        if xxhash.xxh3_128_hexdigest(data) != path.name.removesuffix(SUFFIX):
            raise DamagedSegmentError("its hash is not its name")
        self.size_bytes, self.is_mine = status.st_size, os.geteuid() in (0, status.st_uid)
        self.table = _table(data, owner)
        self._high, self._low = (self.table[name].to_numpy() for name in ("high", "low"))
        value = self.table["value"].chunk(0)
        _, offsets, values = value.buffers()
        self._offsets: Ints = np.frombuffer(offsets, np.int64)[value.offset :]
        self._values = memoryview(values or b"")

    def find(self, digests: Array, wanted: Ints, found: list[bytes | None]) -> Ints:
        """Fills `found` where this segment has the value of a digest; returns the part of `wanted` that it has not.

        digests: uint64 [n, 2]. wanted: indices of digests, which are indices of `found`.
        """
        places = self._places(digests[wanted])
        if places is None:
            return wanted
        has = places >= 0
        starts, stops = self._offsets[places[has]].tolist(), self._offsets[places[has] + 1].tolist()
        for index, start, stop in zip(wanted[has].tolist(), starts, stops, strict=True):
            found[index] = bytes(self._values[start:stop])
        return wanted[~has]

    def _places(self, digests: Array) -> Ints | None:
        """Returns where digests stand among the sorted ones, int64 [n], -1 where they do not; None where none does."""
        high, low, last = digests[:, 0], digests[:, 1], len(self._high) - 1
        at = np.searchsorted(self._high, high)
        near = np.minimum(at, last)
        is_high = self._high[near] == high
        if not is_high.any():  # the usual end for a text of another segment, soon
            return None
        while True:
            is_here = is_high & (self._low[near] == low)
            if not (goes_on := is_high & ~is_here).any():  # digests of one upper half stand side by side
                return np.where(is_here, near, -1)
            at[goes_on] += 1
            near = np.minimum(at, last)
            is_high = (at <= last) & (self._high[near] == high)


def count_of(file: int) -> int:
    """Returns how many values an open file has, by its frame alone. Raises ValueError for what is no segment."""
    import pyarrow as pa

    with pa.PythonFile(os.fdopen(os.dup(file), "rb"), "r") as opened, pa.ipc.open_file(opened) as reader:
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))


def write_segment(folder: Path, owner: bytes, tables: Sequence[pa.Table]) -> str:
    """Writes a segment of tables of values by digest, of each digest the first; returns its name. Raises OSError."""
    import pyarrow as pa

    table = pa.concat_tables(tables)
    high, low = (table[name].to_numpy() for name in ("high", "low"))
    order = np.lexsort((low, high))  # stable
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    sink = pa.BufferOutputStream()
    batch = table.take(order[is_first]).combine_chunks().replace_schema_metadata(_mark(owner))
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_table(batch, max_chunksize=len(batch))
    data = sink.getvalue()
    name = f"{xxhash.xxh3_128_hexdigest(data)}{SUFFIX}"
    write_bytes(folder / name, data)
    return name


def table_of(digests: Array, values: Sequence[bytes]) -> pa.Table:
    """Returns values by digest as a table. digests: uint64 [n, 2]."""
    import pyarrow as pa

    halves = {name: pa.array(digests[:, number]) for number, name in enumerate(("high", "low"))}
    return pa.table({**halves, "value": pa.array(values, pa.large_binary())})


def _mark(owner: bytes) -> dict[str, str]:
    return {"forebay": f"texts {VERSION}", "owner": owner.hex()}


def _table(data: mmap.mmap, owner: bytes) -> pa.Table:
    """Returns the one batch of a file whose bytes are those that were written."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    found = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    for name, wanted in _mark(owner).items():
        if found.get(name) != wanted:
            raise OtherSegmentError(f"its {name} is {found.get(name)!r}, this forebay reads {wanted!r} there")
    return table


logger = logging.getLogger(__name__)
IDENTITY = "identity.json"
LOCK = "lock"
SEGMENT = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")
OLD = re.compile(rf"{SEGMENT.pattern}\.old")
"""A segment that was merged into another one, on a disk where another machine may still have it mapped."""
_OLD_S = 24 * 3600.0
_LOOK_AGAIN_S = 3600.0
"""After it no segment stays mapped that is old: well before one goes."""
_MOST_SEGMENTS = 8
_LARGEST_BYTES = 1 << 28
"""Larger segments are not merged again."""
_HELD_TEXTS, _HELD_BYTES, _HELD_S = 1 << 16, 1 << 24, 5.0
"""What is held in memory until it is written: a killed process loses no more than this."""


@dataclass(frozen=True, slots=True)
class TextStore:
    """The kept values of a cache root: a path that workers are told of. Nothing is made until it is used."""

    root: Path

    def of(self, identity: Mapping[str, Any]) -> TextValues:
        """Returns the values of an identity: a JSON document of all that decides them, beside the text."""
        return TextValues(self.root / TEXTS, identity)


def digests_of(texts: Iterable[str], languages: Iterable[str] | None = None) -> Array:
    """Returns what texts are known by: uint64 [n, 2]. languages: one a text, where the values depend on them."""
    if languages is None:
        data = (text.encode("utf-8", "surrogatepass") for text in texts)
    else:  # no two pairs are written alike
        pairs = zip(texts, languages, strict=True)
        data = (f"{len(language)} {language}{text}".encode("utf-8", "surrogatepass") for text, language in pairs)
    joined = b"".join([xxhash.xxh3_128_digest(each) for each in data])
    return np.frombuffer(joined, ">u8").astype(np.uint64).reshape(-1, 2)


class TextValues:
    """The values of one identity, by the digests of texts. Threads and forked children may share it."""

    def __init__(self, place: Path, identity: Mapping[str, Any]) -> None:
        """Opens nothing. place: the folder of all identities."""
        document = json.dumps(identity, sort_keys=True, ensure_ascii=True, allow_nan=False)
        self._document = json.dumps({"identity": identity}, sort_keys=True, indent=1, allow_nan=False).encode("ascii")
        self._owner = hashlib.sha256(document.encode("ascii")).digest()
        self.folder = place / self._owner.hex()[:16]
        self._held: dict[bytes, bytes] = {}
        self._held_bytes, self._held_since = 0, 0.0
        self._segments: dict[str, Segment] = {}
        self._passed_over: set[str] = set()
        self._broken: set[str] = set()
        self._listed_at = -_LOOK_AGAIN_S
        self._is_ours: bool | None = None
        self._is_writable, self._is_swept, self._can_remove = True, False, True

    def find(self, digests: Array) -> list[bytes | None]:
        """Returns the values of texts, None where there is none. digests: uint64 [n, 2], see `digests_of`."""
        found: list[bytes | None] = [None] * len(digests)
        wanted = self._find_held(digests, found)
        if time.monotonic() - self._listed_at > _LOOK_AGAIN_S:
            self._segments.clear()
        wanted = self._find_in(list(self._segments), digests, wanted, found)
        if len(wanted) and self._is_its_own():
            self._find_in(self._listed(), digests, wanted, found)
        return found

    def add(self, digests: Array, values: Sequence[bytes]) -> None:
        """Keeps values: found from now on in this process, by others after a `flush`, which much of it brings about."""
        if not self._is_writable:
            return
        if not self._held:
            self._held_since = time.monotonic()
        names = np.ascontiguousarray(digests, np.uint64).tobytes()
        for number, value in enumerate(values):
            self._held[names[16 * number : 16 * number + 16]] = value
            self._held_bytes += len(value)
        is_much = len(self._held) >= _HELD_TEXTS or self._held_bytes >= _HELD_BYTES
        if is_much or time.monotonic() - self._held_since > _HELD_S:
            self.flush()

    def flush(self) -> None:
        """Writes what is held; where that cannot be, it is forgotten, and the log says so once."""
        held, self._held, self._held_bytes = self._held, {}, 0
        values = list(held.items())
        if not values or not self._is_writable or not self._is_its_own():
            return
        try:
            for is_again in (False, True):
                try:
                    self._write(values)
                    break
                except FileNotFoundError:  # the folder was removed just now, by `forebay cache rm`
                    if is_again:
                        raise
            self._merge()
        except OSError as err:
            self._is_writable = False
            _say_once(self.folder.parent, err.strerror or str(err))

    def _find_held(self, digests: Array, found: list[bytes | None]) -> Ints:
        if not (held := self._held):
            return np.arange(len(digests))
        names = np.ascontiguousarray(digests, np.uint64).tobytes()
        for number in range(len(digests)):
            found[number] = held.get(names[16 * number : 16 * number + 16])
        return np.array([number for number, value in enumerate(found) if value is None], np.int64)

    def _find_in(self, names: Sequence[str], digests: Array, wanted: Ints, found: list[bytes | None]) -> Ints:
        for name in names:
            segment = self._segments.get(name)
            if segment is None or not len(wanted):
                continue
            left = segment.find(digests, wanted, found)
            if 2 * len(left) < len(wanted):  # the next texts are likely its neighbours: it is asked first then
                self._segments = {name: segment} | self._segments
            wanted = left
        return wanted

    def _listed(self) -> list[str]:
        """Maps what has come since the last look, forgets what has gone; returns the names of what has come."""
        names = self._names()
        self._listed_at = time.monotonic()
        for gone in self._segments.keys() - set(names):
            self._segments.pop(gone, None)
        new = [name for name in names if name not in self._segments and name not in self._passed_over]
        return [name for name in new if self._map(name)]

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if SEGMENT.fullmatch(name))
        except OSError:
            return []

    def _map(self, name: str) -> bool:
        path = self.folder / name
        try:
            self._segments[name] = Segment(path, self._owner)
        except (DamagedSegmentError, OtherSegmentError) as err:
            self._passed_over.add(name)
            logger.warning("%s is passed over: %s; what it held is made again", path, err)
            if isinstance(err, DamagedSegmentError):
                self._broken.add(name)
            return False
        except OSError as err:
            if not is_gone(err):
                self._passed_over.add(name)
                logger.warning("%s is passed over: %s", path, err.strerror)
            return False
        return True

    def _is_its_own(self) -> bool:
        """Whether the folder is that of this identity, or there is none yet; it is asked until there is one."""
        if self._is_ours is not None:
            return self._is_ours
        try:
            data = (self.folder / IDENTITY).read_bytes()
        except OSError:
            return True
        try:
            is_ours = bool(json.loads(data) == json.loads(self._document))
        except (ValueError, RecursionError):  # damaged: the segments say themselves what they belong to
            is_ours = True
            with contextlib.suppress(OSError):
                write_bytes(self.folder / IDENTITY, self._document)
        if not is_ours:
            logger.warning("%s is of other steps: what is made of texts is not kept", self.folder)
        self._is_ours = is_ours
        if is_ours:
            note(self.folder, below=TEXTS)
        return is_ours

    def _write(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        for folder in (self.folder.parents[1], self.folder.parent, self.folder):
            folder.mkdir(exist_ok=True)  # not what is above the root: a worker may lack the disk of its driver
        if not self._is_swept:
            sweep(self.folder)
            self._is_swept = True
        if not (self.folder / IDENTITY).exists():
            write_bytes(self.folder / IDENTITY, self._document)
        digests = np.frombuffer(b"".join([digest for digest, _ in values]), np.uint64).reshape(-1, 2)
        name = write_segment(self.folder, self._owner, [table_of(digests, [value for _, value in values])])
        self._passed_over.discard(name)

    def _merge(self) -> None:
        """Makes many segments fewer, and removes such as are damaged, unless another process is at it."""
        names = self._names()
        if not self._can_remove or (len(names) <= _MOST_SEGMENTS and not self._broken):
            return
        with self._alone(is_needed=len(names) > 4 * _MOST_SEGMENTS) as is_alone:
            if not is_alone:
                return
            for name in self._broken:
                with contextlib.suppress(OtherSegmentError, OSError):
                    try:
                        Segment(self.folder / name, self._owner)  # one that was written again has the same name
                    except DamagedSegmentError:
                        self._remove(name)
            self._passed_over -= self._broken
            self._broken.clear()
            self._listed()
            self._merge_these([self._segments[name] for name in self._smallest()])
            self._remove_old()

    def _merge_these(self, segments: Sequence[Segment]) -> None:
        """Makes segments one. Only when that is durable, they go. Where they cannot go, nothing is merged again."""
        if len(segments) < 2:
            return
        merged = write_segment(self.folder, self._owner, [segment.table for segment in segments])
        for segment in segments:
            self._segments.pop(segment.path.name, None)
            if segment.path.name != merged:
                self._remove(segment.path.name)

    def _smallest(self) -> list[str]:
        """Returns the segments to merge: so many of the small ones that each byte is written again few times.

        Those of this user alone: in a folder that several users write, one may not remove what is another's.
        """
        sizes = sorted((segment.size_bytes, name) for name, segment in self._segments.items() if segment.is_mine)
        small = [(size, name) for size, name in sizes if size < _LARGEST_BYTES // 2]
        if len(small) <= _MOST_SEGMENTS:
            return []
        chosen: list[str] = []
        total = 0
        for size, name in small:
            if total + size > _LARGEST_BYTES or (len(chosen) > 1 and size > total):
                break
            chosen.append(name)
            total += size
        return chosen

    @contextlib.contextmanager
    def _alone(self, *, is_needed: bool) -> Iterator[bool]:
        """Yields whether no other process merges, as far as locks tell, or it is needed: a lock may stay for good."""
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(self.folder / LOCK, flags | os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # another user's
            file = os.open(self.folder / LOCK, flags | os.O_RDONLY)
        try:
            yield is_needed or try_alone(file) != "taken"
        finally:
            os.close(file)

    def _remove(self, name: str) -> None:
        """Removes a segment that is no longer needed; where another machine may have it mapped, a day later."""
        path = self.folder / name
        try:
            if is_late(self.folder):
                os.utime(path)
                os.rename(path, path.with_name(f"{name}.old"))
            else:
                os.unlink(path)
        except OSError as err:
            self._can_remove &= is_gone(err)

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.folder / LOCK)  # by the clock of the disk
        now = (self.folder / LOCK).stat().st_mtime
        for entry in os.scandir(self.folder):
            if OLD.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > _OLD_S:
                        os.unlink(entry.path)


@functools.cache
def _say_once(place: Path, problem: str) -> None:
    logger.warning("%s: what is made of texts is not kept (%s); the work goes on without that", place, problem)
