"""How long clips will be once they are decoded, from headers that say it to the sample.

A manifest's durations are often rounded (two decimals in a file list), and then batches could differ from those of the
cache, whose lengths are those of the decoded audio.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from forebay.config.steps import Decode
from forebay.preprocess.headers import AudioInfo, parsed_header
from forebay.preprocess.sources import WHOLE_FILE
from forebay.preprocess.sources.headers import opened
from forebay.store.sources import SourceFile

Array = np.ndarray[Any, Any]

UNKNOWN = -1
_PIECE = 512
"""Rows that a thread does at once."""
_THREADS = 8
"""Of which most wait, where the files lie on a network."""


def exact_lengths(rows: pa.Table, files: Sequence[SourceFile], step: Decode) -> Array:
    """Returns the audio samples of every row after decoding, int64 [num_rows]; UNKNOWN where no header says it exactly.

    rows, files: as in `Manifest`. FLAC and RIFF WAVE say it, in a read of 4 KiB a clip, with a progress bar. Clips inside of
    a table (`hf`) are UNKNOWN: reading them is reading everything. So is what cannot be opened: it will fail when it is read.
    """
    columns = [rows[name].to_numpy() for name in ("file", "offset", "size")]
    pieces = [[column[start : start + _PIECE].tolist() for column in columns] for start in range(0, len(rows), _PIECE)]
    found = np.full(len(rows), UNKNOWN, np.int64)
    with ThreadPoolExecutor(_THREADS) as threads, _bar(len(rows)) as bar:
        made = threads.map(lambda piece: list(_lengths(piece, files, step)), pieces)
        for number, lengths in enumerate(made):
            found[number * _PIECE : number * _PIECE + len(lengths)] = lengths
            bar.update(len(lengths))
    return found


def _bar(count: int) -> Any:
    return tqdm(total=count, desc="audio headers", file=sys.stderr, disable=None)


def _lengths(piece: list[list[int]], files: Sequence[SourceFile], step: Decode) -> Iterator[int]:
    for number, places in groupby(zip(*piece, strict=True), key=lambda place: place[0]):
        file = files[number]
        with ExitStack() as stack:
            descriptor = None
            for _, offset, size in places:
                if size == WHOLE_FILE and file.listed:
                    yield UNKNOWN
                    continue
                try:
                    if descriptor is None:
                        descriptor = stack.enter_context(opened(str(file.path)))
                    yield _length(descriptor, offset, size, step)
                except OSError:
                    yield UNKNOWN


def _length(descriptor: int, offset: int, size: int, step: Decode) -> int:
    if size == WHOLE_FILE:
        size = os.fstat(descriptor).st_size
    info = parsed_header(
        lambda start, count: os.pread(descriptor, max(0, min(count, size - start)), offset + start), size
    )
    return UNKNOWN if info is None else decoded_length(info, step)


def decoded_length(info: AudioInfo, step: Decode) -> int:
    """Returns the samples of a clip at the step's rate and no longer than it clips; UNKNOWN where its header has none."""
    if info.num_samples <= 0 or info.sample_rate_hz <= 0:
        return UNKNOWN
    # soxr rounds half up.
    length = (2 * info.num_samples * step.sample_rate_hz + info.sample_rate_hz) // (2 * info.sample_rate_hz)
    return max(1, length if step.clip_s is None else min(length, round(step.clip_s * step.sample_rate_hz)))
