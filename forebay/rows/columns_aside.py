"""Columns of a listing that lie on disk: a large table is written, mapped, and its file is gone; memory is given back.

So are bytes of the seal. Only what is looked at takes memory then, and the machine may take that back. Where the cache
root cannot be written, columns are held. A file of a process that was killed is swept like all that is written aside.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from forebay.store.files import naming, sweep, temporary_name
from forebay.store.layout import BUILDING, Array

HELD_BYTES = 4 << 20
"""Texts of a piece, or columns of a listing, that are held as they are."""
BLOCK_ROWS = 16_384
"""Rows that are worked on at once."""
_TEXT_ROWS = 4096
_TEXT = pa.large_string()
_SCHEMA = pa.schema([pa.field("text", _TEXT)])
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt` (malloc.h of glibc)."""
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


@contextlib.contextmanager
def one_heap() -> Iterator[None]:
    """Lets arrow allocate as Python does, by malloc: what one has freed the other uses, and large blocks go at once.

    Arrow's own pool keeps what its threads have freed. Malloc keeps freed blocks of up to 32 MiB, once such a block was
    freed; it does so again afterwards, since a training step takes the same blocks again and again.
    """
    before = pa.default_memory_pool()
    if before.backend_name == "system":  # a build lists too
        yield
        return
    pa.set_memory_pool(pa.system_memory_pool())
    _malloc("mallopt", _MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
        _malloc("mallopt", _MMAP_THRESHOLD, 32 << 20)
        _malloc("mallopt", _TRIM_THRESHOLD, 64 << 20)


def free_memory() -> None:
    """Gives back what this process does not use: pages of columns aside, and what malloc keeps."""
    drop_pages()
    _malloc("malloc_trim", 0)


def _malloc(name: str, *values: int) -> None:
    """Calls a function of glibc's malloc; other libraries have none of them, or other ones."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if os.confstr("CS_GNU_LIBC_VERSION"):
            getattr(ctypes.CDLL(None), name)(*values)


def drop_pages() -> None:
    """Takes the pages of columns aside out of this process's memory; what is read again is mapped again."""
    for mapping in list(_mapped):
        with contextlib.suppress(ValueError):  # closed
            mapping.madvise(mmap.MADV_DONTNEED)


def rows_aside(table: pa.Table, cache_root: str) -> pa.Table:
    """Returns a table whose columns lie on disk, if they are large, in one chunk each. cache_root: it lies below."""
    if table.nbytes <= HELD_BYTES:
        return table
    path = _write((table.slice(at, BLOCK_ROWS) for at in range(0, len(table), BLOCK_ROWS)), table.schema, cache_root)
    return table if path is None else _taken(path)


def bytes_aside(write: Callable[[BinaryIO], None], cache_root: Path) -> memoryview:
    """Returns what a function writes, one byte at least, from a file that is gone. cache_root: it lies below."""
    path = temporary_name(cache_root / BUILDING / "bytes")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        buffer = io.BytesIO()
        write(buffer)
        return buffer.getbuffer()
    with naming(cache_root), open(path, "r+b") as file:
        path.unlink()
        write(file)
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    _mapped.add(mapping)
    return memoryview(mapping)


def _write(blocks: Iterable[pa.Table], schema: pa.Schema, cache_root: str) -> Path | None:
    """Writes tables that follow each other; None where the cache root cannot be written."""
    path = temporary_name(Path(cache_root) / BUILDING / "texts")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        file = pa.OSFile(str(path), "wb")
    except OSError:
        return None
    with file, pa.ipc.new_file(file, schema) as writer:
        for block in blocks:
            writer.write_table(block)
            drop_pages()
    return path


def _taken(path: Path) -> pa.Table:
    """Returns a table that was written, mapped, and removes its file."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    path.unlink()
    _mapped.add(mapping)
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapping))).read_all()


@dataclass(slots=True)
class TextsAside:
    """Texts of a listing: held, or, where they are too many, in a file that is gone when it is mapped.

    A process sends the file's name.
    """

    held: Any
    path: Path | None = None

    @classmethod
    def of(cls, blocks: Iterable[Any], cache_root: str) -> TextsAside:
        """Returns the texts of some arrays that follow each other; no more than HELD_BYTES of them are held."""
        held: list[Any] = []
        rest = iter(blocks)
        for block in rest:
            held.append(block)
            if sum(each.nbytes for each in held) > HELD_BYTES:
                left = itertools.chain(held, rest)
                path = _write((pa.table([each], schema=_SCHEMA) for each in left), _SCHEMA, cache_root)
                return cls(None, path) if path is not None else cls(pa.chunked_array([*left], _TEXT))
        return cls(pa.chunked_array(held, _TEXT))

    def column(self) -> pa.ChunkedArray:
        """Returns the texts."""
        if self.path is not None:
            self.held = _taken(self.path)["text"]
            self.path = None
        return self.held


def gathered(parts: Sequence[pa.ChunkedArray], places: Array, cache_root: str) -> pa.ChunkedArray:
    """Returns texts by their places in the parts, put together, some rows at a time."""
    whole = [part.combine_chunks() if part.num_chunks > 1 else part.chunk(0) for part in parts if len(part)]
    bases = np.cumsum([0, *map(len, whole)])

    def blocks() -> Iterator[Any]:
        for start in range(0, len(places), _TEXT_ROWS):
            block = places[start : start + _TEXT_ROWS]
            owner = np.searchsorted(bases, block, side="right") - 1
            taken = [whole[n].take(pa.array(block[owner == n] - bases[n])) for n in np.unique(owner).tolist()]
            back = np.argsort(np.argsort(owner, kind="stable"), kind="stable")
            yield pa.concat_arrays(taken).take(pa.array(back))

    return TextsAside.of(blocks(), cache_root).column()
