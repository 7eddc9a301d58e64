"""Encoded bytes of a sample, by the place that its row names: a range of a tar, a file, a row of an `hf` file.

Files are read by offset and size, through a bounded set that is kept open.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.errors import DecodeError, ManifestError, SampleError, TarError
from forebay.rows.manifest import INLINE, WHOLE_FILE
from forebay.rows.readers.arrow_files import HfFile, place_row
from forebay.rows.segments import Bounds, FileStretch, RecordingParts
from forebay.rows.source_table import SourceFiles
from forebay.spans import RAW_READ, span
from forebay.store.memo import SIZE, Stat, stat_now
from forebay.store.remote.raw.raw_sources import is_here, open_source, place_of, reader, shown, stat_of_status
from forebay.store.source_files import SourceFile

_ABSENT = (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError)
_GONE = "ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "ELOOP", "ENAMETOOLONG", "ENXIO"
_FILES = 4096
"""Files whose paths are kept at hand."""
SPARSE_MEMBER_BYTES, SPARSE_SHARE = 8 * 1024 * 1024, 4
"""A tar of a store is read member by member where those needed have this mean size and less than this part of it."""


class _Read(threading.local):
    """The recording that a thread reads segments of; a copy elsewhere has none yet."""

    def __reduce__(self) -> tuple[type[_Read], tuple[()]]:
        return _Read, ()


class MediaReader:
    """`reader(file, offset, size)` over the files of a `Manifest` returns encoded bytes; for any number of threads."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        max_open: int,
        max_bytes: int | None = None,
        column: str = "",
        as_listed: bool = False,
        sparse: frozenset[int] = frozenset(),
    ) -> None:
        """max_open: files kept open at once. max_bytes: of one sample. column: of an `hf` source.

        as_listed: a file that changed after it was listed is an error, for readers that compare nothing later; see
        `MediaFiles`. sparse: numbers of files that are read by requests of their own, see `sparse_files`.
        """
        self._file, self._sparse = lru_cache(_FILES)(files.__getitem__), sparse
        self._max_bytes = max_bytes
        self._media = MediaFiles(max_open)
        self._as_listed = as_listed
        # Rows of data files: only the file read last is kept open, for rows of one file follow each other.
        self._column, self._lock = column, threading.Lock()
        self._rows: HfFile | None = None
        self._own = _Read()
        """The recording that a thread reads segments of."""

    def __call__(self, file: int, offset: int, size: int, segment: Bounds | None = None) -> bytes:
        """Returns the encoded bytes of one sample; the places as in its row, `segment` that of the row.

        Of a segment they are a WAV. Raises SampleError (`too_large`, `missing_file`) for what is wrong with the sample,
        TarError where a tar is not as its index says, OSError for what is wrong with the machine.
        """
        with span(RAW_READ):
            if segment is not None:
                return self._recording(file, offset, size).wav(segment, max_bytes=self._max_bytes)
            return self._encoded(file, offset, size)

    def _recording(self, file: int, offset: int, size: int) -> RecordingParts:
        """Returns the recording that this thread read last, or another one in its place."""
        place = (file, offset, size)
        if getattr(self._own, "place", None) == place:
            found: RecordingParts = self._own.recording
            return found
        self._close_recording()
        source = self._file(file)
        name = shown(str(source.path))
        with contextlib.ExitStack() as opening:
            if size == WHOLE_FILE and source.listed:
                name = f"{name}, row {place_row(offset) + 1}"
            recording = RecordingParts(opening.enter_context(self._opened(file, offset, size)), name=name)
            opening.callback(recording.close)
            stack = opening.pop_all()
        self._own.place, self._own.recording, self._own.stack = place, recording, stack
        return recording

    @contextmanager
    def _opened(self, file: int, offset: int, size: int) -> Iterator[int | io.BytesIO | FileStretch]:
        source = self._file(file)
        if offset >= INLINE:
            yield io.BytesIO(self._encoded(file, offset, size))
        elif size == WHOLE_FILE and source.listed:
            yield io.BytesIO(self._read_row(source, offset, None, is_cut=True))
        else:
            with self._media.held(source.path, size, listed=self._listed(source)) as opened:
                yield opened if size == WHOLE_FILE else FileStretch(opened, offset, size)

    @contextmanager
    def parts(self, file: int, offset: int, size: int) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
        """Yields what reads (offset, count) of an item that may be large, and its size in bytes. Raises as a call."""
        with self._opened(file, offset, size) as found:
            item = FileStretch(found, 0, os.fstat(found).st_size) if isinstance(found, int) else found

            def read(start: int, count: int) -> bytes:
                item.seek(start)
                return item.read(count) or b""

            yield read, item.seek(0, os.SEEK_END)

    def _close_recording(self) -> None:
        if (stack := getattr(self._own, "stack", None)) is not None:
            self._own.place = self._own.stack = self._own.recording = None
            stack.close()

    def _encoded(self, file: int, offset: int, size: int) -> bytes:
        if offset >= INLINE:
            try:
                return base64.b64decode(self._encoded(file, offset - INLINE, size), validate=True)
            except ValueError as err:
                raise DecodeError(
                    "bad_inline_data", f"its data in the manifest is no base64: {err}; write it again"
                ) from err
        source = self._file(file)
        # A listed file that is media as a whole is a table of samples: manifests hold no media.
        listed = self._listed(source)
        if size == WHOLE_FILE and source.listed:
            return self._read_row(source, offset, listed)
        if file in self._sparse and not is_here(source.path):
            return self._read_part(source, offset, size, listed)
        return self._media.read(source.path, offset, size, max_bytes=self._max_bytes, listed=listed)

    def _listed(self, source: SourceFile) -> Stat | None:
        return source.stat if self._as_listed else None

    def _read_part(self, source: SourceFile, offset: int, size: int, listed: Stat | None) -> bytes:
        if listed is not None:
            require_listed(source.path, stat_now(source.path), listed)
        if self._max_bytes is not None and size > self._max_bytes:
            raise _too_large(str(source.path), size, offset, self._max_bytes)
        with open_parts(str(source.path)) as read:
            return read(size, offset)

    def _read_row(self, source: SourceFile, place: int, listed: Stat | None, *, is_cut: bool = False) -> bytes:
        """is_cut: what is wanted is a part of it, which may be large."""
        with self._lock:
            if listed is not None:
                require_listed(source.path, stat_now(source.path), listed)
            if self._rows is None or self._rows.path != source.path:
                self._rows = HfFile(source.path)
            data = self._rows.encoded(place, self._column)
        if data is not None and (is_cut or self._max_bytes is None or len(data) <= self._max_bytes):
            return data
        where = f"{shown(str(source.path))}, row {place_row(place) + 1}"
        if data is None:
            raise DecodeError("missing_file", f"{where}: column {self._column} holds no bytes")
        said = f"{where}: {len(data)} bytes, allowed are {self._max_bytes}"
        raise DecodeError("too_large", f"{said}; raise source.max_sample_bytes")

    def close(self) -> None:
        """Closes what is open; a later call opens it again. What another thread reads segments of ends with it."""
        self._close_recording()
        self._media.close()
        with self._lock:
            self._rows = None

    def __enter__(self) -> MediaReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(eq=False)
class _Holder:
    """Closes files of one mirror when somebody on this node needs their room."""

    folder: Path
    media: weakref.ref[MediaFiles]

    def let_go(self, name: str | None) -> None:
        if (media := self.media()) is not None:
            media.let_go(None if name is None else self.folder / name, folder=self.folder)


@dataclass(slots=True)
class _Open:
    descriptor: int
    size_bytes: int
    version: Stat | None
    copy: Path | None = None
    num_readers: int = 0
    is_evicted: bool = False

    def stat(self) -> Stat:
        """Its stat as it is now; of an object of a store the version that was opened."""
        return stat_of_status(os.fstat(self.descriptor)) if self.version is None else self.version


class MediaFiles:
    """Reads from many files and keeps at most `max_open` of them open between reads, those that were used last.

    For any number of threads. A file stays open while one of them reads from it, so while `n` threads read, up to
    `max_open + n` descriptors exist. A file that is replaced on disk is still read as it was when it was opened.
    """

    def __init__(self, max_open: int = 64) -> None:
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}, wanted 1 or more")
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._holders: dict[Path, _Holder] = {}

    def read(
        self,
        path: str | os.PathLike[str],
        offset: int = 0,
        size: int = -1,
        *,
        max_bytes: int | None = None,
        listed: Stat | None = None,
    ) -> bytes:
        """Returns `size` bytes from `offset`; a size of -1 means all up to the end of the file.

        Raises SampleError `too_large` where that is more than `max_bytes`, before anything is allocated. Where the
        bytes are not there: TarError for a range, SampleError `missing_file` for a whole file. EIO, ENOMEM and the
        like are no property of the file and come through as OSError.

        listed: the stat that the file had when its rows were listed. Where it has another one now: ManifestError for a
        range, whose place may be in another sample, SampleError `source_changed` for a whole file.
        """
        path = os.fspath(path)
        with self._acquire(path, is_whole=size < 0) as file:
            if listed is not None:
                require_listed(path, file.stat(), listed, is_whole=size < 0)
            wanted = size if size >= 0 else max(0, file.size_bytes - offset)
            if max_bytes is not None and wanted > max_bytes:
                raise _too_large(path, wanted, offset, max_bytes)
            if offset + wanted > file.size_bytes:  # before a wrong size makes pread allocate it
                raise self._short(path, offset, wanted, max(0, file.size_bytes - offset))
            data = read_fully(file.descriptor, wanted, offset)
        if len(data) < wanted:
            raise self._short(path, offset, wanted, len(data))
        return data

    @contextmanager
    def held(self, path: str | os.PathLike[str], size: int, *, listed: Stat | None) -> Iterator[int]:
        """Yields a descriptor of a file that stays open while the block lasts. size, listed: see `read`."""
        with self._acquire(os.fspath(path), is_whole=size < 0) as file:
            if listed is not None:
                require_listed(path, file.stat(), listed, is_whole=size < 0)
            yield file.descriptor

    def close(self) -> None:
        """Closes every file that no thread is reading; the others close when their read ends."""
        with self._lock:
            while self._open:
                self._evict_oldest()

    @contextmanager
    def _acquire(self, path: str, *, is_whole: bool) -> Iterator[_Open]:
        with self._lock:
            if (file := self._open.get(path)) is not None:
                self._open.move_to_end(path)
                file.num_readers += 1
        if file is None:
            # Without the lock: an object of a store is downloaded first, and other threads go on meanwhile.
            file = self._added(path, _open_regular(path, is_whole=is_whole))
        try:
            yield file
        finally:
            with self._lock:
                file.num_readers -= 1
                _close_if_unused(file)

    def _added(self, path: str, opened: _Open) -> _Open:
        if (place := place_of(path)) is not None:
            holder = self._holders.setdefault(place.origin.folder, _Holder(place.origin.folder, weakref.ref(self)))
            place.origin.mirror.node.shared.hold(holder)
        with self._lock:
            file = self._open.setdefault(path, opened)
            if file is not opened:  # another thread was faster
                os.close(opened.descriptor)
            self._open.move_to_end(path)
            file.num_readers += 1
            while len(self._open) > self._max_open:
                self._evict_oldest()
            return file

    def let_go(self, copies: Path | None, *, folder: Path) -> None:
        """Closes the node's copy of an object that no thread reads; None: the older half of those of a mirror."""
        with self._lock:
            idle = [
                path
                for path, file in self._open.items()
                if not file.num_readers and file.copy is not None and file.copy.is_relative_to(copies or folder)
            ]
            for path in idle if copies is not None else idle[: -(-len(idle) // 2)]:
                os.close(self._open.pop(path).descriptor)

    def _evict_oldest(self) -> None:
        _, file = self._open.popitem(last=False)
        file.is_evicted = True
        _close_if_unused(file)

    @staticmethod
    def _short(path: str, offset: int, wanted: int, got: int) -> TarError:
        return TarError(
            f"{shown(path)}: wanted {wanted} bytes at offset {offset}, got {got}; the file is shorter than its index "
            "says, copy it again and run `forebay index` on its manifest",
            code="FB212",
        )


def require_listed(path: str | os.PathLike[str], now: Stat | None, listed: Stat, *, is_whole: bool = False) -> None:
    """Raises ManifestError where a file is not the one that was listed; a new name or other rights leave it the same.

    is_whole: the file is one sample, which alone is bad then: SampleError.
    """
    if now is not None and now[:-1] == listed[:-1]:
        return
    message = (
        f"{shown(os.fspath(path))} was changed after it was listed: {_states(listed, now)}; start the run again, so "
        "that it is listed anew"
    )
    raise SampleError("source_changed", message) if is_whole else ManifestError(message, code="FB303")


def _too_large(path: str, wanted: int, offset: int, max_bytes: int) -> SampleError:
    return SampleError(
        "too_large",
        f"{shown(path)}: {wanted} bytes at offset {offset}, allowed are {max_bytes}; raise source.max_sample_bytes",
    )


def _states(listed: Stat, now: Stat | None) -> str:
    if listed[0] < 0:  # an object of a store
        return f"it had {listed[SIZE]} bytes, and has {'none' if now is None else now[SIZE]} under another etag now"
    return (
        f"it had {listed[SIZE]} bytes, changed last at {listed[-2]} ns, and has "
        f"{'none' if now is None else f'{now[SIZE]}, {now[-2]} ns'} now"
    )


def _close_if_unused(file: _Open) -> None:
    # Closing under a reader would let the number name another file in the middle of its read.
    if file.is_evicted and not file.num_readers:
        os.close(file.descriptor)


def _open_regular(path: str, *, is_whole: bool) -> _Open:
    try:
        descriptor, version = open_source(path)
    except (*_ABSENT, ValueError) as err:  # ValueError: a NUL in the path, or a surrogate that no file name holds
        raise _missing(path, getattr(err, "strerror", None) or str(err), is_whole=is_whole) from err
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _missing(path, "not a regular file", is_whole=is_whole)
    place = place_of(path)
    if place is None:
        return _Open(descriptor, status.st_size, None)
    return _Open(descriptor, status.st_size, version, place.origin.path(version))


def _missing(path: str, why: str, *, is_whole: bool) -> SampleError | TarError:
    if is_whole:
        return SampleError("missing_file", f"cannot read {shown(path)!r}: {why}; correct the manifest")
    return TarError(f"cannot read {shown(path)!r}: {why}; check the path in the manifest and its permissions")


def read_fully(descriptor: int, size: int, offset: int) -> bytes:
    """Returns the bytes of a range, fewer only where the file ends."""
    data = os.pread(descriptor, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]  # one call reads at most 2 GiB
    done = len(data)
    while done < size and (data := os.pread(descriptor, size - done, offset + done)):
        parts.append(data)
        done += len(data)
    return b"".join(parts)


def is_gone(err: OSError) -> bool:
    """Whether an error says that a file cannot be had; any other (EIO, ENOMEM, ...) stops the build."""
    return errno.errorcode.get(err.errno or 0) in _GONE


@contextmanager
def open_parts(path: str, *, is_sparse: bool = True) -> Iterator[Callable[[int, int], bytes]]:
    """Yields what reads (size, offset) of a file: of a sparse one that is not here by requests of their own."""
    requests = reader(path) if is_sparse else None
    if requests is not None:
        yield requests
        return
    with opened(path) as descriptor:
        yield partial(read_fully, descriptor)


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Yields a descriptor of a regular file. Raises OSError for anything else, without waiting for a pipe's writer."""
    descriptor, _ = open_source(path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def sparse_files(rows: pa.Table, files: Sequence[SourceFile]) -> frozenset[int]:
    """Returns the numbers of the tars of a store of which few, large members are needed, and that are not here.

    Each member is a request of its own then. A tar of which more is needed is downloaded as a whole: one request, and
    no part of it twice. rows: all that are needed, with `file` and `size`.
    """
    files = SourceFiles.of(files)
    if not files.is_of_store.any():
        return frozenset()
    sizes = rows["size"].to_numpy()
    number = rows["file"].to_numpy()[sizes >= 0]
    needed = np.bincount(number, sizes[sizes >= 0], len(files))
    counts = np.bincount(number, minlength=len(files))
    large = np.flatnonzero(files.is_of_store & (needed >= np.maximum(counts, 1) * SPARSE_MEMBER_BYTES))
    return frozenset(
        index
        for index in large.tolist()
        if (stat := files[index].stat) is not None
        and stat[0] < 0
        and needed[index] * SPARSE_SHARE < stat[SIZE]
        and not is_here(files[index].path)
    )
