"""Ids of samples: lists of them in files, their hashes, and which sample has an id."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from forebay.errors import ConfigError
from forebay.store.layout import Array, Ints

if TYPE_CHECKING:
    import pyarrow as pa

_NEAR = 3
"""Ids that a message names beside one that is unknown."""
_LOOKED_AT = 1_000
"""Ids that are compared letter by letter with one that is unknown."""


def read_ids(path: Path, *, setting: str, may_be_empty: bool = False) -> pa.Array:
    """Returns the ids of a file, one a line, as large strings. UTF-8, with or without a mark at its beginning.

    Lines may end like those of Windows; empty ones are passed over. setting: what to call the file in messages.
    Raises ConfigError for a file that is not there, is no UTF-8, or holds no id where that is not allowed.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as err:
        raise ConfigError(f"{setting} {path} cannot be read: {err.strerror}") from err
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise ConfigError(
            f"{setting} {path}: line {line} is no UTF-8 (byte {data[err.start]:#04x}); save it as UTF-8"
        ) from err
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    offsets = np.concatenate(([0], ends, [len(data)])).astype(np.int64)
    lines = pa.Array.from_buffers(
        pa.large_string(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    ids = pc.utf8_rtrim(lines, characters="\r\n")
    ids = ids.filter(pc.not_equal(ids, ""))
    if not len(ids) and not may_be_empty:
        raise ConfigError(f"{setting} {path} holds no id; write one id a line")
    return ids


def id_hashes(ids: pa.ChunkedArray, *, seed: int = 0) -> Array:
    """Returns the xxh3-64 of each id, uint64 [num_samples]; about 0.3 us an id."""
    import pyarrow as pa

    found = [np.zeros(0, np.uint64)]
    for chunk in ids.cast(pa.large_binary()).chunks:
        offsets = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        data = memoryview(chunk.buffers()[2] or b"")
        hashed = (xxhash.xxh3_64_intdigest(data[a:b], seed) for a, b in itertools.pairwise(offsets.tolist()))
        found.append(np.fromiter(hashed, np.uint64, len(chunk)))
    return np.concatenate(found)


class IdIndex:
    """Which sample has an id: the hashes of all ids, sorted. 16 bytes a sample, whatever the ids are.

    Threads may share one; it never changes.
    """

    def __init__(self, ids: pa.ChunkedArray, sample_id: Callable[[int], str]) -> None:
        """ids: of all samples, in their order. sample_id: gives the id of one."""
        hashes = id_hashes(ids)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        self._sample_id = sample_id

    def places(self, wanted: str) -> list[int]:
        """Returns the indices of the samples that have an id, rising."""
        written = _as_in_a_table(wanted)
        hashed = np.uint64(xxhash.xxh3_64_intdigest(written.encode("utf-8", "surrogatepass"), 0))
        start, stop = np.searchsorted(self._hashes, hashed, "left"), np.searchsorted(self._hashes, hashed, "right")
        places: Ints = self._order[start:stop]
        return [place for place in places.tolist() if _as_in_a_table(self._sample_id(place)) == written]


def _as_in_a_table(text: str) -> str:
    """Returns a text with bytes that are no UTF-8 as the row table writes them: as escapes."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def near_ids(ids: pa.ChunkedArray, wanted: str) -> list[str]:
    """Returns a few ids that are written like one that is unknown: those that hold it, or begin or end like it."""
    import difflib

    import pyarrow.compute as pc

    stem = wanted.rpartition("/")[2].partition(".")[0]
    pieces = [wanted, stem, wanted[: len(wanted) // 2], wanted[len(wanted) // 2 :]]
    found: dict[str, None] = {}
    for piece in pieces:
        if len(piece) > 1 and len(found) < _LOOKED_AT:
            holding = ids.filter(pc.match_substring(ids, piece, ignore_case=True))
            found |= dict.fromkeys(holding[: _LOOKED_AT - len(found)].to_pylist())
    holding = [each for each in itertools.islice(found, _LOOKED_AT) if len(wanted) > 1 and wanted in each]
    return holding[:_NEAR] or difflib.get_close_matches(wanted, found, n=_NEAR)
