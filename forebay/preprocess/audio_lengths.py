"""How long recordings will be once they are decoded, as their headers say it to the sample.

A manifest's durations are often rounded (two decimals in a file list), and then batches of samples made on the fly
could differ from those of the cache, whose lengths are those of the decoded audio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby

import numpy as np
import pyarrow as pa

from forebay.progress import Progress
from forebay.rows.manifest import WHOLE_FILE
from forebay.rows.media_reader import open_parts, sparse_files
from forebay.steps.audio.waveform import Decode
from forebay.store.layout import Array
from forebay.store.memo import SIZE
from forebay.store.remote.raw.raw_sources import source_stat
from forebay.store.sound_headers import AudioInfo, parsed_header
from forebay.store.source_files import SourceFile

UNKNOWN = -1

_HEADERS_A_PIECE = 512
"""Rows that a thread does at once."""

_THREADS = 8
"""Most of them wait if the files lie on a network."""


def exact_lengths(rows: pa.Table, files: Sequence[SourceFile], step: Decode) -> Array:
    """Returns the audio samples of every row after decoding, int64 [num_rows]; UNKNOWN where no header says it exactly.

    rows, files: as in `Manifest`. FLAC and RIFF WAVE say it, in a read of 4 KiB a clip, with a progress bar. Clips
    inside of a table (`hf`) are UNKNOWN: reading them is reading everything. So is what cannot be opened: it will fail
    when it is read.
    """
    columns = [rows[name].to_numpy() for name in ("file", "offset", "size")]
    pieces = [
        [column[start : start + _HEADERS_A_PIECE].tolist() for column in columns]
        for start in range(0, len(rows), _HEADERS_A_PIECE)
    ]
    found = np.full(len(rows), UNKNOWN, np.int64)
    sparse = sparse_files(rows, files)
    bar = Progress(len(rows), unit="clip", desc="audio headers")
    with ThreadPoolExecutor(_THREADS) as threads, bar:
        made = threads.map(lambda piece: list(_lengths(piece, files, step, sparse)), pieces)
        for number, lengths in enumerate(made):
            found[number * _HEADERS_A_PIECE : number * _HEADERS_A_PIECE + len(lengths)] = lengths
            bar.update(len(lengths))
    return found


def _lengths(
    piece: list[list[int]], files: Sequence[SourceFile], step: Decode, sparse: frozenset[int]
) -> Iterator[int]:
    for number, places in groupby(zip(*piece, strict=True), key=lambda place: place[0]):
        file = files[number]
        with ExitStack() as stack:
            read: Callable[[int, int], bytes] | None = None
            for _, offset, size in places:
                if size == WHOLE_FILE and file.listed:
                    yield UNKNOWN
                    continue
                try:
                    if read is None:
                        read = stack.enter_context(open_parts(str(file.path), is_sparse=number in sparse))
                    if size == WHOLE_FILE:
                        size = source_stat(file.path)[SIZE]
                    yield _length(read, offset, size, step)
                except OSError:
                    yield UNKNOWN


def _length(read: Callable[[int, int], bytes], offset: int, size: int, step: Decode) -> int:
    info = parsed_header(lambda start, count: read(max(0, min(count, size - start)), offset + start), size)
    return UNKNOWN if info is None else decoded_length(info, step)


def decoded_length(info: AudioInfo, step: Decode) -> int:
    """Returns the samples of a clip at the step's rate, no more than it clips to; UNKNOWN if the header has none."""
    if info.num_samples <= 0 or info.sample_rate_hz <= 0:
        return UNKNOWN
    # soxr rounds half up.
    length = (2 * info.num_samples * step.sample_rate_hz + info.sample_rate_hz) // (2 * info.sample_rate_hz)
    return max(1, length if step.clip_s is None else min(length, round(step.clip_s * step.sample_rate_hz)))
