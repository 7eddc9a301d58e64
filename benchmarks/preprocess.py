"""What preprocessing costs beside the plain way and beside its bare arithmetic: `python -m benchmarks.preprocess [--tiny] [--json]`.

Tars of FLAC to shards of float16 log-mels and tokens, hashed and fsynced, in warm worker processes of one thread each.
The plain way: tarfile, soundfile, transformers' WhisperFeatureExtractor on random batches of 32 with its padding to 30 s;
its output is dropped, not stored, and it makes no tokens. `per clip` is the same without padding. The bare arithmetic: the
same read, soundfile and feature engine in the same blocks, in a loop, nothing checked and nothing kept. Every round takes
another share of the corpus and all contestants in turn; figures are medians of rounds, ratios medians of the ratios within
a round. Before anything counts, shards are compared with the extractor's output.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import BENCH_DATA, Corpus, corpus
from benchmarks.report import Cost, Stages, arguments, machine, median, ratio, show, timed
from forebay.preprocess.cut import cut_rows
from forebay.preprocess.listing import resolve
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.store.layout import GROUPS
from forebay.store.memo import Memo

SAMPLE_RATE_HZ = 16_000
BATCH_SIZE = 32
BLOCK_SAMPLES = 300 * SAMPLE_RATE_HZ
HALF_ULP = 2.0**-11
"""Rounding to float16 of values in [1, 2), relative to 1."""

Clip = tuple[Path, str]
"""(tar, member name)"""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a round works on: whole shards for us, as many seconds of random clips for the plain way."""

    tasks: tuple[ShardTask, ...]
    audio_s: float
    clips: tuple[Clip, ...]
    clips_s: float


# Contestants: called in worker processes, so each imports what it needs there.


def ours(tasks: Sequence[ShardTask]) -> Cost:
    """Returns what making these shards costs; each pass into a folder of its own, for what is there is not made again."""
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        return timed(lambda: [make_shard(replace(task, folder=Path(folder))) for task in tasks])


def bare(tasks: Sequence[ShardTask]) -> Cost:
    """Returns what the libraries alone cost on the media of these shards."""
    import soundfile

    from forebay.preprocess.features import compute

    def work() -> None:
        for task in tasks:
            with open(task.files[0].path, "rb") as file:
                block: list[Any] = []
                for offset, size in zip(*(task.rows[name].to_pylist() for name in ("offset", "size")), strict=True):
                    data = os.pread(file.fileno(), size, offset)
                    block.append(soundfile.read(io.BytesIO(data), dtype="float32")[0])
                    if sum(map(len, block)) >= BLOCK_SAMPLES:
                        compute(task.recipe.features, block)
                        block = []
                compute(task.recipe.features, block)

    return timed(work)


def plain(clips: Sequence[Clip]) -> Cost:
    """Returns what batches of 32 with the extractor's default padding cost."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()

    def work() -> None:
        with _opened(clips) as read:
            for start in range(0, len(clips), BATCH_SIZE):
                batch = [read(clip) for clip in clips[start : start + BATCH_SIZE]]
                extractor(batch, sampling_rate=SAMPLE_RATE_HZ, return_tensors="np")

    return timed(work)


def per_clip(clips: Sequence[Clip]) -> Cost:
    """Returns what the extractor costs when it is asked clip by clip, without padding."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()

    def work() -> None:
        with _opened(clips) as read:
            for clip in clips:
                extractor(read(clip), sampling_rate=SAMPLE_RATE_HZ, padding="longest", return_tensors="np")

    return timed(work)


def stages(tasks: Sequence[ShardTask]) -> dict[str, float]:
    """Returns CPU seconds by stage of making these shards, with a clock put around the product's own functions."""
    import soxr
    import xxhash

    from forebay.preprocess import features, samples
    from forebay.preprocess.sources import MediaReader
    from forebay.preprocess.text import TextEncoder
    from forebay.store import shard, tdz

    clock = Stages()

    class File128:
        def __init__(self) -> None:
            state = xxhash.xxh3_128()
            self.update, self.hexdigest = clock.wrap("hash", state.update), state.hexdigest

    zlib = SimpleNamespace(crc32=clock.wrap("hash", tdz.zlib.crc32))
    with contextlib.ExitStack() as stack:
        for owner, name, stage in (
            (MediaReader, "__call__", "read"),
            (samples, "decode_audio", "decode"),
            (soxr, "resample", "resample"),
            (features, "compute", "features"),
            (TextEncoder, "encode", "tokens"),
            (shard, "sample_hash", "hash"),
            (tdz, "write_all", "write"),
            (os, "fsync", "write"),
        ):
            stack.enter_context(mock.patch.object(owner, name, clock.wrap(stage, getattr(owner, name))))
        stack.enter_context(mock.patch.object(tdz, "zlib", zlib))
        stack.enter_context(mock.patch.object(tdz, "xxhash", SimpleNamespace(xxh3_128=File128)))
        total = ours(tasks)
    return {**{"resample": 0.0}, **clock.cpu_s, "rest": total.cpu_s - sum(clock.cpu_s.values())}


@contextlib.contextmanager
def _opened(clips: Sequence[Clip]) -> Iterator[Any]:
    """Yields a reader of clips as float32, over tars that are opened and listed once."""
    import soundfile

    with contextlib.ExitStack() as stack:
        tars = {path: stack.enter_context(tarfile.open(path)) for path in sorted({path for path, _ in clips})}
        members = {path: {member.name: member for member in tar.getmembers()} for path, tar in tars.items()}

        def read(clip: Clip) -> Any:
            path, name = clip
            file = tars[path].extractfile(members[path][name])
            assert file is not None
            return soundfile.read(io.BytesIO(file.read()), dtype="float32")[0]

        yield read


def difference(task: ShardTask) -> float:
    """Returns by how much the shard of one task differs from the extractor's output, in units of what float16 allows.

    The 30 s input is rebuilt from the stored frames and `pad_value`. Allowed: 1e-6 before rounding, then half an ulp.
    """
    from transformers import WhisperFeatureExtractor

    from forebay.preprocess.samples import sample_fields
    from forebay.store.shard import Shard, shard_fields
    from forebay.train.finish import whisper_input

    extractor = WhisperFeatureExtractor()
    worst = 0.0
    names = task.rows["member"].to_pylist()
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        here = replace(task, folder=Path(folder))
        entry = make_shard(here)[0].entry
        written = Shard(here.path, entry, shard_fields(sample_fields(task.recipe), "media"))
        clips = [(task.files[0].path, name) for name in names[: 2 * BATCH_SIZE]]
        with _opened(clips) as read:
            expected = extractor([read(clip) for clip in clips], sampling_rate=SAMPLE_RATE_HZ, return_tensors="np")
        for index, wanted in enumerate(expected["input_features"]):
            row = written.row(index)
            found = np.empty_like(wanted)
            whisper_input(row["input_features"], float(row["pad_value"][0]), found)
            allowed = HALF_ULP * np.maximum(np.abs(wanted), 2.0**-14) + 1e-6
            worst = max(worst, float((np.abs(found - wanted) / allowed).max()))
    return worst
