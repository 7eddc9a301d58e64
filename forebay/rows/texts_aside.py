"""Texts of a listing that are too many to be held: they lie in a file without a name, and are mapped.

Only what is looked at takes memory then, and the machine may take that back. The file is under the cache root; where
that cannot be written, texts are held. A file of a process that was killed is swept like all that is written aside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.store.files import sweep, temporary_name
from forebay.store.layout import BUILDING, Array

HELD_BYTES = 4 << 20
"""Texts of a piece, or of a listing, that are held as they are."""
_BLOCK_ROWS = 4096
_TEXT = pa.large_string()
_SCHEMA = pa.schema([pa.field("text", _TEXT)])


@dataclass(slots=True)
class TextsAside:
    """Texts that are held, or that lie in a file which is gone when it is mapped. A process sends the file's name."""

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
                return cls._written(itertools.chain(held, rest), cache_root)
        return cls(pa.chunked_array(held, _TEXT))

    @classmethod
    def _written(cls, blocks: Iterable[Any], cache_root: str) -> TextsAside:
        path = temporary_name(Path(cache_root) / BUILDING / "texts")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path.parent)
            file = pa.OSFile(str(path), "wb")
        except OSError:
            return cls(pa.chunked_array([*blocks], _TEXT))
        with file, pa.ipc.new_file(file, _SCHEMA) as writer:
            for block in blocks:
                writer.write_table(pa.table([block], schema=_SCHEMA))
        return cls(None, path)

    def column(self) -> pa.ChunkedArray:
        """Returns the texts."""
        if self.path is not None:
            with pa.memory_map(str(self.path)) as mapped:
                self.held = pa.ipc.open_file(mapped).read_all()["text"]
            self.path.unlink()
            self.path = None
        return self.held


def gathered(parts: Sequence[pa.ChunkedArray], places: Array, cache_root: str) -> pa.ChunkedArray:
    """Returns texts by their places in the parts, put together, some rows at a time."""
    whole = [part.combine_chunks() if part.num_chunks > 1 else part.chunk(0) for part in parts if len(part)]
    bases = np.cumsum([0, *map(len, whole)])

    def blocks() -> Iterator[Any]:
        for start in range(0, len(places), _BLOCK_ROWS):
            block = places[start : start + _BLOCK_ROWS]
            owner = np.searchsorted(bases, block, side="right") - 1
            taken = [whole[n].take(pa.array(block[owner == n] - bases[n])) for n in np.unique(owner).tolist()]
            back = np.argsort(np.argsort(owner, kind="stable"), kind="stable")
            yield pa.concat_arrays(taken).take(pa.array(back))

    return TextsAside.of(blocks(), cache_root).column()
