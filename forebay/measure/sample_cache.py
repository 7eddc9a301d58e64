"""A temporary cache of some rows, made by the functions of a build, with a clock around its stages."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forebay.measure.doctor_bench import SAMPLE, Bench
from forebay.measure.predict import Made, Skip, StageCost
from forebay.measure.step_clock import StageClock
from forebay.preprocess.assemble import assemble
from forebay.preprocess.cut import Cut
from forebay.preprocess.finished_rows import read_rows
from forebay.preprocess.groups import Listing
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.preprocess.workspace import Receipt
from forebay.spans import DECODE, FEATURES, PATCHES, RAW_READ, RESAMPLE, RESIZE, TOKENS
from forebay.store.key import digest
from forebay.store.layout import TEXT, Group
from forebay.store.seal import seal

STAGES = (RAW_READ, DECODE, RESAMPLE, RESIZE, PATCHES, FEATURES, TOKENS)
WRITE = "write shard"

_ROWS_A_SHARD = 8
_MOST_BYTES = 400 * 1000**2
_LEAST_MEASURED = 8
"""Rows that the clock is to see, if there are as many; those of the first shard load libraries."""

Done = dict[Group, list[tuple[Path, Receipt]]]


def made(bench: Bench, seconds: float) -> Made:
    """Returns what the stages of a build take on some rows, which are then the temporary cache.

    The first shard is made without a clock: libraries and the tokenizer are loaded there. A data set of a few rows is
    made again, so that there is something to count.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker of a build
    try:
        return _make(bench, seconds)
    finally:
        torch.set_num_threads(threads)


def _make(bench: Bench, seconds: float) -> Made:
    listing = _listing(bench)
    ends, clock = time.perf_counter() + seconds, StageClock()
    done: Done = {group: [] for group in bench.groups.names}
    rows = counted = passes = 0
    wall_s = cpu_s = 0.0
    while not passes or (counted < min(_LEAST_MEASURED, len(listing.rows)) and passes < 3):
        folder = bench.root / SAMPLE / f"shards-{passes}"
        for tasks in _tasks(bench, listing, folder):
            began = time.perf_counter(), time.process_time()
            with clock.running() if rows or passes else contextlib.nullcontext():
                receipts = [make_shard(task)[0] for task in tasks]
            if rows or passes:
                wall_s, cpu_s = wall_s + time.perf_counter() - began[0], cpu_s + time.process_time() - began[1]
                counted += _rows_of(tasks)
            else:
                ends = time.perf_counter() + seconds  # loading libraries is not what is measured
            if not passes:
                rows += _rows_of(tasks)
                for task, receipt in zip(tasks, receipts, strict=True):
                    done[task.group].append((task.path, receipt))
            if time.perf_counter() > ends or _size(done) > _MOST_BYTES:
                break
        passes += 1
        if time.perf_counter() > ends:
            break
    failed = _seal(bench, listing, done, rows)
    if not counted:
        raise Skip(f"the first {rows} rows took all of the {seconds:.0f} s; give the doctor more --seconds")
    return Made(
        stages=_stages(clock, wall_s, counted),
        samples=counted,
        cpu_ms=1e3 * cpu_s / counted,
        bytes_a_sample=_size(done) / max(rows, 1),
        failed=failed,
    )


def _stages(clock: StageClock, wall_s: float, counted: int) -> tuple[StageCost, ...]:
    found = {name: clock.wall_s[name] for name in STAGES if clock.wall_s[name] > 0}
    raw = [StageCost(name=name, kind="raw", ms=1e3 * s / counted, samples=counted) for name, s in found.items()]
    rest_ms = 1e3 * max(wall_s - sum(found.values()), 0.0) / counted
    return (*raw, StageCost(name=WRITE, kind="build", ms=rest_ms, samples=counted))


def _listing(bench: Bench) -> Listing:
    """Returns the picked rows as a build has them. Their hashes are made up: no other cache is to know these shards."""
    picked = bench.picked
    files = tuple(
        dataclasses.replace(file, xxh3_128=digest({"doctor": number})[:32]) for number, file in enumerate(picked.files)
    )
    key = digest({"doctor": bench.recipe.key})
    return Listing(groups=bench.groups, manifest=dataclasses.replace(picked, files=files), key=key)


def _tasks(bench: Bench, listing: Listing, folder: Path) -> Iterator[list[ShardTask]]:
    """Yields the tasks of each shard of texts: its own, and those of its items that no shard before it has."""
    groups = listing.groups
    probe = dict.fromkeys(groups.names, "0" * 32)
    # `shard_rows` of texts alone is a multiple of what it is given.
    rows_per_shard = max(_ROWS_A_SHARD // groups.shard_rows(1), 1)
    left: dict[Group, deque[Cut]] = {name: deque() for name in groups.names}
    for cut in groups.cuts(listing, probe=probe, rows_per_shard=rows_per_shard):
        left[cut.group].append(cut)
    for text in left.pop(TEXT):
        wanted = []
        for name, cuts in left.items():
            last = max(listing.items[name].of_rows(text.start, text.stop)[1], default=-1)
            while cuts and cuts[0].start <= last:
                wanted.append(cuts.popleft())
        same: dict[str, Any] = {"folder": folder, "groups": groups, "max_open_tars": bench.config.run.max_open_tars}
        parts = [(cut, *groups.task_rows(listing, cut)) for cut in (*wanted, text)]
        yield [ShardTask(group=cut.group, key=cut.key, rows=rows, files=files, **same) for cut, files, rows in parts]


def _rows_of(tasks: list[ShardTask]) -> int:
    """Returns the samples of a cut: the text rows, which every recipe has."""
    return sum(len(task.rows) for task in tasks if task.group == TEXT)


def _size(done: Done) -> int:
    return sum(receipt.entry.size_bytes for made in done.values() for _, receipt in made)


def _seal(bench: Bench, listing: Listing, done: Done, rows: int) -> int:
    """Makes the temporary cache of the shards that were made; returns the rows that are no samples."""
    manifest = dataclasses.replace(listing.manifest, rows=listing.rows.slice(0, rows))
    listing = dataclasses.replace(listing, manifest=manifest)
    finished = {group: [(path, receipt.entry) for path, receipt in made] for group, made in done.items()}
    found = read_rows(listing, finished)
    config = dataclasses.replace(bench.raw_config, source=dataclasses.replace(bench.config.source, confined=False))
    contents = assemble(
        config,
        listing,
        finished,
        found,
        probe=dict.fromkeys(bench.groups.names, "0" * 32),
        constants=bench.groups.constants(),
        memo=b"",
        messages={},
    )
    seal(bench.sample_folder, contents, scratch=bench.root / SAMPLE, replace=True)
    return int(np.count_nonzero(found.reasons.codes))
