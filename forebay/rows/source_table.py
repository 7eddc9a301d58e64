"""The files of a listing by column: where each row is a file of its own, an object a file would be a kilobyte."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.store.layout import Array
from forebay.store.memo import SIZE, digests_of, hexes
from forebay.store.source_files import SourceFile, StoredSources, below

_NAME = pa.large_binary()
_DIGEST_BYTES = 16
_IN_CHUNK = 1 << 19
"""Names that one array of arrow with 32-bit offsets holds, however long they are."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceFiles(Sequence[SourceFile]):
    """Source files, each made when it is asked for.

    bases: by entry, the folders that names are relative to. names: as `SourceFile.name`, as bytes. own: the paths of
    those that do not lie below their base under their name, null of all others. entries: int32 [files]. is_listed: bool
    [files]. stats: int64 [files, 5], of those that `has_stat`. digests: V16 [files], of those that are `is_hashed`.
    """

    bases: tuple[str, ...]
    names: Any
    own: Any
    entries: Array
    is_listed: Array
    stats: Array
    has_stat: Array
    digests: Array
    is_hashed: Array

    @classmethod
    def made(
        cls,
        bases: Sequence[str],
        names: Any,
        *,
        own: Any = None,
        entries: Array | int = 0,
        is_listed: bool = True,
    ) -> Self:
        """Returns files that nobody has looked at yet. names, own: arrow's binaries."""
        count = len(names)
        return cls(
            tuple(bases),
            names,
            pa.nulls(count, _NAME) if own is None else own,
            np.broadcast_to(np.asarray(entries, np.int32), count).copy(),
            np.full(count, is_listed),
            np.zeros((count, 5), np.int64),
            np.zeros(count, bool),
            np.zeros(count, "V16"),
            np.zeros(count, bool),
        )

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> SourceFiles:
        """Returns some files, by column."""
        if isinstance(files, SourceFiles):
            return files
        rows = ((os.fsencode(f.name), os.fsencode(f.path), f.entry, f.listed, f.stat, f.xxh3_128) for f in files)
        return cls.of_columns(*(list(zip(*rows, strict=True)) or [()] * 6))

    @classmethod
    def of_columns(
        cls,
        names: Sequence[bytes],
        paths: Sequence[bytes],
        entries: Sequence[int],
        listed: Sequence[bool],
        stats: Sequence[Sequence[int] | None],
        hashes: Sequence[str],
    ) -> SourceFiles:
        """Returns files by what each has, as `SourceFile` names it."""
        nothing = "0" * (2 * _DIGEST_BYTES)
        return replace(
            cls.made((), pa.array(names, _NAME), own=pa.array(paths, _NAME), entries=np.array(entries, np.int32)),
            is_listed=np.array(listed, bool),
            stats=np.array([stat or (0,) * 5 for stat in stats], np.int64).reshape(-1, 5),
            has_stat=np.array([stat is not None for stat in stats], bool),
            digests=digests_of([found or nothing for found in hashes]),
            is_hashed=np.array(hashes, object) != "",
        )

    @classmethod
    def joined(cls, parts: Sequence[SourceFiles]) -> SourceFiles:
        """Returns files that follow each other; the bases of all are one list, or begin as the longest does."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.entries, part.is_listed, part.stats, part.has_stat) for part in parts), strict=True)
        hashed = zip(*((part.digests, part.is_hashed) for part in parts), strict=True)
        return cls(
            max((part.bases for part in parts), key=len),
            pa.concat_arrays([part.names for part in parts]),
            pa.concat_arrays([part.own for part in parts]),
            *map(np.concatenate, columns),
            *map(np.concatenate, hashed),
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> SourceFile: ...
    @overload
    def __getitem__(self, at: slice) -> SourceFiles: ...
    def __getitem__(self, at: int | slice) -> SourceFile | SourceFiles:
        if isinstance(at, slice):
            return self.take(np.arange(len(self))[at])
        at = range(len(self))[at]
        own, name = self.own[at].as_py(), os.fsdecode(self.names[at].as_py())
        path = below(self.bases[self.entries[at]], [name])[0] if own is None else os.fsdecode(own)
        return SourceFile(
            name,
            Path(path),
            entry=int(self.entries[at]),
            listed=bool(self.is_listed[at]),
            stat=tuple(self.stats[at].tolist()) if self.has_stat[at] else None,
            xxh3_128=self.digests[at].tobytes().hex() if self.is_hashed[at] else "",
        )

    def __iter__(self) -> Iterator[SourceFile]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(SourceFile.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def take(self, numbers: Array) -> SourceFiles:
        """Returns some of the files. numbers: int [some]."""
        at = pa.array(numbers, pa.int64())
        columns = (self.entries, self.is_listed, self.stats, self.has_stat, self.digests, self.is_hashed)
        return type(self)(self.bases, self.names.take(at), self.own.take(at), *(column[numbers] for column in columns))

    def blocks(self, size: int = 4096) -> Iterator[SourceFiles]:
        """Yields the files, so many at a time: what is made of a block in Python goes with it."""
        yield from (self[start : start + size] for start in range(0, max(1, len(self)), size))

    def stored(self) -> StoredSources:
        """Returns the files as a sealed cache remembers them."""
        digits = np.frombuffer(self.digests[self.is_hashed].tobytes().hex().encode("ascii"), np.uint8)
        ends = np.cumsum(np.append(0, self.is_hashed * np.int32(2 * _DIGEST_BYTES)), dtype=np.int32)
        hashes = pa.Array.from_buffers(pa.string(), len(self), [None, pa.py_buffer(ends), pa.py_buffer(digits)])
        sizes = np.where(self.has_stat, self.stats[:, SIZE], -1)
        names = pa.chunked_array(
            [self.names.slice(at, _IN_CHUNK).cast(pa.binary()) for at in range(0, len(self), _IN_CHUNK)], pa.binary()
        )
        return StoredSources.of_columns(names, self.entries, self.is_listed, hashes, sizes)

    def with_digests(self, numbers: Array, digests: Array) -> SourceFiles:
        """Returns the files with the hashes of some of them."""
        own, is_hashed = self.digests.copy(), self.is_hashed.copy()
        own[numbers], is_hashed[numbers] = digests, True
        return replace(self, digests=own, is_hashed=is_hashed)

    @property
    def is_of_store(self) -> Array:
        """Whether a file is an object of a store, bool [files]."""
        return np.asarray(self.has_stat & (self.stats[:, 0] < 0))

    def written_paths(self) -> Any:
        """Returns all paths, as arrow's binaries."""
        if not self.bases:
            return self.own
        fronts = pa.array([os.fsencode(below(base, [""])[0]) for base in self.bases], _NAME)
        joined = pc.binary_join_element_wise(fronts.take(pa.array(self.entries)), self.names, pa.scalar(b"", _NAME))
        return pc.coalesce(self.own, joined)

    @property
    def paths(self) -> list[str]:
        """All paths."""
        return _decoded(self.written_paths())

    def each_path(self) -> EachFile:
        """Returns all paths, each made when it is asked for."""
        return EachFile(len(self), lambda at: str(self[at].path))

    def each_name(self) -> EachFile:
        """Returns all names, each made when it is asked for."""
        return EachFile(len(self), lambda at: os.fsdecode(self.names[at].as_py()))

    def each_hash(self) -> EachFile:
        """Returns all hashes, each made when it is asked for."""
        return EachFile(len(self), lambda at: self.digests[at].tobytes().hex() if self.is_hashed[at] else "")

    @property
    def all_names(self) -> list[str]:
        """All names."""
        return _decoded(self.names)

    @property
    def shown_names(self) -> list[str]:
        """All names as `shown_name` has them."""
        return [name.decode("utf-8", "backslashreplace") for name in self.names.to_pylist()]

    def shown(self) -> pa.Array:
        """Returns all names as `shown_name` has them, as arrow's strings."""
        try:
            return self.names.cast(pa.large_string())
        except pa.ArrowInvalid:  # a name that is not UTF-8
            return pa.array(self.shown_names, pa.large_string())

    @property
    def hashes(self) -> list[str]:
        """All hashes, as `SourceFile.xxh3_128`."""
        found = hexes(self.digests)
        for number in np.flatnonzero(~self.is_hashed).tolist():
            found[number] = ""
        return found


@dataclass(frozen=True, slots=True)
class EachFile(Sequence[str]):
    """A text of each of some files, made when it is asked for: of millions of files all would be much."""

    size: int
    make: Callable[[int], str]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        places = range(self.size)[at]
        return list(map(self.make, places)) if isinstance(places, range) else self.make(places)


def _decoded(written: Any) -> list[str]:
    if sys.getfilesystemencoding() == "utf-8":
        with contextlib.suppress(pa.ArrowInvalid):  # a name that is not UTF-8
            found: list[str] = written.cast(pa.large_string()).to_pylist()
            return found
    return [os.fsdecode(data) for data in written.to_pylist()]
