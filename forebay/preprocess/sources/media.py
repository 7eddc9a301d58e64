"""Encoded bytes of a sample, by the place that its row names: a range of a tar, a file, a row of an `hf` file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from forebay.errors import DecodeError
from forebay.preprocess.sources.hf_file import HfFile, place_row
from forebay.preprocess.sources.rows import WHOLE_FILE
from forebay.store.media_files import MediaFiles, require_listed
from forebay.store.memo import Stat, stat_now
from forebay.store.sources import SourceFile


class MediaReader:
    """`reader(file, offset, size)` over the files of a `Manifest` returns encoded bytes; for any number of threads."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        max_open: int,
        max_bytes: int | None = None,
        audio_column: str = "audio",
        as_listed: bool = False,
    ) -> None:
        """max_open: files kept open at once. max_bytes: of one sample. audio_column: of an `hf` source.

        as_listed: a file that changed after it was listed is an error, for readers that compare nothing later; see `MediaFiles`.
        """
        self._files = files
        self._max_bytes = max_bytes
        self._media = MediaFiles(max_open)
        self._hf = _HfRows(audio_column)
        self._as_listed = as_listed

    def __call__(self, file: int, offset: int, size: int) -> bytes:
        """Returns the encoded bytes of one sample; `file`, `offset` and `size` as in its row.

        Raises SampleError (`too_large`, `missing_file`) for what is wrong with the sample, TarError where a tar is not as
        its index says, OSError for what is wrong with the machine.
        """
        source = self._files[file]
        # A listed file that is media as a whole is a table of clips: manifests hold no audio.
        listed = source.stat if self._as_listed else None
        if size == WHOLE_FILE and source.listed:
            return self._hf.read(source, offset, self._max_bytes, listed)
        return self._media.read(source.path, offset, size, max_bytes=self._max_bytes, listed=listed)

    def close(self) -> None:
        """Closes what is open; a later call opens it again."""
        self._media.close()
        self._hf.close()

    def __enter__(self) -> MediaReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _HfRows:
    """Rows of `hf` files. Only the file read last is kept open: rows of one file follow each other."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._lock = threading.Lock()
        self._open: HfFile | None = None

    def read(self, source: SourceFile, place: int, max_bytes: int | None, listed: Stat | None) -> bytes:
        with self._lock:
            if listed is not None:
                require_listed(source.path, stat_now(source.path), listed)
            if self._open is None or self._open.path != source.path:
                self._open = HfFile(source.path)
            data = self._open.audio(place, self._column)
        row = place_row(place)
        if data is None:
            raise DecodeError("missing_file", f"{source.path}, row {row + 1}: column {self._column} holds no bytes")
        if max_bytes is not None and len(data) > max_bytes:
            raise DecodeError(
                "too_large",
                f"{source.path}, row {row + 1}: {len(data)} bytes, allowed are {max_bytes}; raise source.max_sample_bytes",
            )
        return data

    def close(self) -> None:
        with self._lock:
            self._open = None
