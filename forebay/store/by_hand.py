"""Samples taken by hand: by index, slice or id, as tensordicts, HTML or WAV; ids, listed in files or hashed."""

from __future__ import annotations

import html
import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
import xxhash

from forebay.errors import ConfigError
from forebay.store.layout import Array, FieldSpec, Ints
from forebay.store.source import Sample, SampleSource
from forebay.terminal import first_of
from forebay.visible import human_bytes, printable

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from forebay.store.lazy_tensordict import SamplesTensorDict

_SHOWN = 5
"""Indices of one id that a message lists."""
_MAX_BYTES = (1 << 32) - 1 - 36
"""What the 32-bit sizes of a WAV can say."""
_MAX_ROWS = 12
"""Languages, or fields, that are shown."""
_MAX_CHARACTERS = 300


class ByHand(SampleSource):
    """A source whose samples are taken one by one."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, torch.Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, torch.Tensor]]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]:
        """Returns the tensor fields of one sample as torch tensors that are copies, never aliases of the mapping.

        index: any integer, numpy's too, negative from the end; of a slice a list of samples.
        Raises IndexError outside the source, TypeError for anything else, `read`'s errors for damage.
        """
        import torch

        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        try:
            position = operator.index(index)
        except TypeError as err:
            raise TypeError(
                f"an index of samples is an integer or a slice, not {type(index).__name__}; the index of an id: "
                ".find(id)"
            ) from err
        return {name: torch.from_numpy(value.copy()) for name, value in self.arrays(position).items()}

    def find(self, sample_id: str) -> int:
        """Returns the index of the sample that has an id.

        The first call keeps a hash of each id, 16 bytes a sample; a later one takes microseconds. Raises KeyError, with
        ids written alike, where no sample has the id, LookupError where several have it.
        """
        found = self.find_all(sample_id)
        if len(found) == 1:
            return found[0]
        if not found:
            near = near_ids(self._ids(), sample_id)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise KeyError(f"no sample of {self.place} has the id {sample_id!r}{hint}")
        shown = ", ".join(map(str, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")
        raise LookupError(
            f"{len(found)} samples of {self.place} have the id {sample_id!r}: {shown}; all of them: .find_all(id)"
        )

    def find_all(self, sample_id: str) -> list[int]:
        """Returns the indices of the samples that have an id, rising; none where no sample has it."""
        if not isinstance(sample_id, str):
            raise TypeError(f"an id is a text, not {type(sample_id).__name__}")
        return self._id_index.places(sample_id)

    def as_tensordict(self) -> SamplesTensorDict:
        """Returns a LazyStackedTensorDict that reads a sample when it is asked for; see `SamplesTensorDict`."""
        from forebay.store.lazy_tensordict import SamplesTensorDict

        return SamplesTensorDict(self, range(len(self)))

    def _repr_html_(self) -> str:
        return table_html(type(self).__name__, source_facts(self))

    # Two threads that ask together for the first time both make it: no lock, which a fork could leave locked.
    @cached_property
    def _id_index(self) -> IdIndex:
        return IdIndex(self._ids(), self.sample_id)

    def _ids(self) -> pa.ChunkedArray:
        if "sample_id" not in self.column_names:
            raise KeyError(f"{self.place} has no field sample_id, so no sample has an id")
        return self.table(["sample_id"])["sample_id"]

    def arrays(self, index: int) -> dict[str, Any]:
        """Returns the tensor fields of one sample as arrays, the patches of several images as one."""
        return self.joined(self.read(index))

    def joined(self, sample: Sample) -> dict[str, Any]:
        """Returns a sample of `read` with the values of several images as one array."""
        return dict(sample)


def pcm16_wav(samples: Array, sample_rate_hz: int) -> bytes:
    """Returns a mono 16-bit PCM WAV, a header of 44 bytes and the samples: the same bytes for the same samples.

    samples: int16 [num_samples]. Raises OverflowError for 4 GiB or more, about 37 hours at 16 kHz.
    """
    data = samples.astype("<i2", copy=False).tobytes()
    if len(data) > _MAX_BYTES:
        raise OverflowError(f"{len(data)} bytes of samples do not fit a WAV, which holds {_MAX_BYTES}")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, 2 * sample_rate_hz, 2, 16)
    riff = struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
    return riff + form + struct.pack("<4sI", b"data", len(data)) + data


def table_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values. title, facts: plain text, whoever wrote it."""
    rows = "".join(
        f'<tr><th style="text-align:left">{_escaped(name)}</th><td style="text-align:left">{_escaped(value)}</td></tr>'
        for name, value in facts
    )
    return f"<div><strong>{_escaped(title)}</strong><table>{rows}</table></div>"


def source_facts(source: SampleSource) -> Iterator[tuple[str, str]]:
    """Yields what a source is, by name. Of a cache: what stands in its metadata."""
    choice, metadata = getattr(source, "choice", None), getattr(source, "metadata", None)
    yield "place", source.place
    yield "key", source.key[:16]
    yield "samples", f"{len(source):,}"
    if choice is not None:
        yield "filter", str(choice)
    if isinstance(metadata, Mapping):
        yield from _stored(metadata)
    yield "fields", first_of([_described(spec) for spec in source.fields.values() if spec.role == "tensor"], _MAX_ROWS)
    yield "columns", first_of([spec.name for spec in source.fields.values() if spec.role == "table"], _MAX_ROWS)


def _stored(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what the metadata of a cache say; anybody may have written them."""
    found = metadata.get("languages")
    rows = [
        (str(name), row["samples"], row["hours"])
        for name, row in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(row, Mapping) and _is_number(row.get("samples")) and _is_number(row.get("hours"))
    ]
    if hours := sum(row[2] for row in rows):
        yield "hours", f"{hours:,.2f}"
    if rows:
        rows.sort(key=lambda row: -row[1])
        yield "languages", first_of([f"{name} {samples:,}" for name, samples, _ in rows], _MAX_ROWS)
    size_bytes: Any = metadata.get("size_bytes")
    if _is_number(size_bytes):
        yield "size", human_bytes(size_bytes)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _described(spec: FieldSpec) -> str:
    return f"{spec.name} {spec.dtype} {['n', *spec.shape]}".replace("'", "")


def _escaped(text: str) -> str:
    shown = printable(text)
    return html.escape(shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]}...")


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
    """Which sample has an id: the hashes of all ids, sorted, 16 bytes a sample. Threads may share one."""

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
