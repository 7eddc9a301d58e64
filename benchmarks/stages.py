"""Measures where the CPU goes when shards are made: `python -m benchmarks.stages [--tiny] [--json] [--rounds N]`.

The product's own `make_shard` runs in one process of one thread over the 5 hour corpus, with a clock around its
functions. A stage inside another stage counts for itself alone, and `rest` is everything without a clock. The clock
costs about 1 us a call and is in the figures: `total` stands beside `without a clock`, which the same run measured.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import soxr
import torch
import xxhash

from benchmarks.data import BENCH_DATA, corpus, shard_tasks
from benchmarks.report import Cost, arguments, machine, median, show, timed
from forebay.preprocess import audio_group
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.rows.media_reader import MediaReader
from forebay.steps.step import AudioStep
from forebay.steps.text.transcript import TextEncoder
from forebay.store import shard, tdz

STAGES = ("read", "decode", "resample", "features", "tokens", "hash", "write", "rest")


class Clock:
    """CPU seconds by stage. A stage inside another one counts for itself alone."""

    def __init__(self) -> None:
        self.cpu_s = dict.fromkeys(STAGES, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with its time put down to `stage`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._put_down()
            self._open.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self._put_down()
                self._open.pop()

        return wrapped

    def _put_down(self) -> None:
        now = time.process_time()
        if self._open:
            self.cpu_s[self._open[-1]] += now - self._since
        self._since = now


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """Yields a clock that runs around the product's functions inside the block."""
    clock = Clock()

    class Xxh3:
        def __init__(self) -> None:
            state = xxhash.xxh3_128()
            self.update, self.hexdigest = clock.around("hash", state.update), state.hexdigest

    with contextlib.ExitStack() as stack:
        for owner, name, stage in (
            (MediaReader, "__call__", "read"),
            (audio_group, "decode_audio", "decode"),
            (soxr, "resample", "resample"),
            (AudioStep, "compute", "features"),
            (TextEncoder, "encode", "tokens"),
            (shard, "sample_hash", "hash"),
            (tdz, "write_all", "write"),
            (os, "fsync", "write"),
        ):
            stack.enter_context(mock.patch.object(owner, name, clock.around(stage, getattr(owner, name))))
        stack.enter_context(mock.patch.object(tdz, "crc32", clock.around("hash", tdz.crc32)))
        stack.enter_context(mock.patch.object(tdz, "xxhash", SimpleNamespace(xxh3_128=Xxh3)))
        yield clock


def make_all(tasks: Sequence[ShardTask]) -> Cost:
    """Returns what making these shards costs; their folder is new, because finished shards are not made again."""
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        return timed(lambda: [make_shard(replace(task, folder=Path(folder))) for task in tasks])


def measure(tasks: Sequence[ShardTask], *, audio_s: float, rounds: int) -> list[dict[str, Any]]:
    """Returns one row a stage: CPU seconds an hour of audio, medians of rounds, and its share."""
    make_all(tasks[:2])  # a round to load libraries and tokenizer, and to touch the buffers
    found, totals, bare_totals = [], [], []
    for _ in range(rounds):
        with clocked() as clock:
            total = make_all(tasks).cpu_s
        found.append({**clock.cpu_s, "rest": total - sum(clock.cpu_s.values())})
        totals.append(total)
        bare_totals.append(make_all(tasks).cpu_s)
    hours = audio_s / 3600
    stages = {stage: median(costs[stage] for costs in found) / hours for stage in STAGES}
    total = median(totals) / hours
    rows = {**stages, "total": total, "without a clock": median(bare_totals) / hours}
    return [{"stage": name, "cpu_s_per_hour": s, "share_percent": 100 * s / total} for name, s in rows.items()]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    torch.set_num_threads(1)
    data = corpus(hours=0.05 if options.tiny else 5, num_tars=2 if options.tiny else 8)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as root, Pool(1) as pool:
        tasks = shard_tasks(data.config(cache_root=Path(root)), pool.map)
    rows = measure(tasks, audio_s=data.audio_s, rounds=1 if options.tiny else options.rounds or 3)
    facts = machine("numpy", "torch", "soundfile", "soxr", "tokenizers", "xxhash")
    largest = max(rows[: len(STAGES)], key=lambda row: row["cpu_s_per_hour"])["stage"]
    document = {"machine": facts, "hours": data.audio_s / 3600, "largest": largest, "stages": rows}
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
