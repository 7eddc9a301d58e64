"""The arms of raw data: what training finds, the listing, reading, and a temporary cache of some rows, made by the
functions of a build with a clock around its stages.

The arm of codecs: what a pack of this set's items takes to read, and its bytes, under each of the codecs.

The arm of plans: the batches of an epoch, and what other settings of `[plan]` would give, over the real lengths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config.plan import CLASSIC_EDGES_S, BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.errors import PlanError
from forebay.measure.doctor_bench import SAMPLE, Bench, dropped
from forebay.measure.loader_arms import collated, makers
from forebay.measure.machine import StageClock, timed, within
from forebay.measure.predict import (
    Codecs,
    Listed,
    Made,
    OpeningTimes,
    OtherPlan,
    PlanFacts,
    PlannedBatch,
    Reads,
    Skip,
    StageCost,
)
from forebay.plan.interface import Plan
from forebay.plan.make import Samples, make_plan, plan_statistics, samples_of
from forebay.plan.pack.pack_plan import PackPlan
from forebay.preprocess.assemble import assemble, read_rows
from forebay.preprocess.codec_trial import CODECS, Measured, measured
from forebay.preprocess.group import Cut, ItemGroup
from forebay.preprocess.groups import Listing
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.preprocess.workspace import Receipt
from forebay.rows.manifest import WHOLE_FILE
from forebay.rows.segments import Bounds, segment_columns, segment_of
from forebay.spans import DECODE, FEATURES, PATCHES, RAW_READ, RESAMPLE, RESIZE, TOKENS
from forebay.store.cache import Cache
from forebay.store.key import digest
from forebay.store.layout import TEXT, Array, Group
from forebay.store.remote.raw.raw_sources import is_here
from forebay.store.seal import seal
from forebay.store.source import SampleSource, parts_of
from forebay.store.source_files import dump_sources

_READS = 64


def find(bench: Bench, seconds: float) -> OpeningTimes:  # noqa: ARG001  it takes what it takes
    """Returns what training would read."""
    source = bench.sealed
    if source is None:
        return OpeningTimes(place=None, num_samples=0, hours=None, size_bytes=0)
    caches = [part for part in parts_of(source) if isinstance(part, Cache)]
    rate = float(source.constants.get("sample_rate_hz", 0) or 0)
    lengths = source.lengths.get("num_audio_samples")
    return OpeningTimes(
        place=", ".join(str(cache.place) for cache in caches),
        num_samples=len(source),
        hours=float(lengths.sum()) / rate / 3600 if rate and lengths is not None else None,
        size_bytes=sum(int(cache.metadata.get("size_bytes", 0)) for cache in caches),
        num_shards=sum(cache.num_shards for cache in caches),
    )


def listing(bench: Bench, seconds: float) -> Listed:  # noqa: ARG001  its parent ends it
    """Returns what is known of the raw data."""
    return bench.listed(timed(lambda: bench.manifest)[1])


def reads(bench: Bench, seconds: float) -> Reads:
    """Returns what reading an encoded sample takes, out of memory and from the disk."""
    group = next(iter(bench.groups.items), None)
    places = [] if group is None else _places(bench, group)
    if group is None or not places:
        raise Skip("no sample has media to read")
    cold, warm, sizes, why = [], [], [], ""
    with bench.reader(group) as read:
        for file, offset, size, segment in within(seconds, places):
            path = os.fspath(bench.manifest.files[file].path)
            problem = dropped(path, 0 if size == WHOLE_FILE else offset, 0 if size == WHOLE_FILE else size)
            first_s = timed(partial(read, file, offset, size, segment))[1]
            if problem is None:
                cold.append(first_s)
            why = problem or why
            data, again_s = timed(partial(read, file, offset, size, segment))
            warm.append(again_s)
            sizes.append(len(data))
    return Reads(
        warm_ms=1e3 * statistics.median(warm),
        cold_ms=1e3 * statistics.median(cold) if cold else None,
        mean_bytes=statistics.fmean(sizes),
        samples=len(warm),
        why_not_cold="" if cold else why,
    )


def _places(bench: Bench, group: ItemGroup) -> list[tuple[int, int, int, Bounds | None]]:
    """Returns file, offset, size and segment of some encoded items, those that the listing could place."""
    items, files = group.items(bench.picked).table, bench.picked.files
    order = bench.random.permutation(len(items))[: 4 * _READS]
    taken = items.select(["file", "offset", "size", *segment_columns(items)]).take(order).to_pylist()
    here = [row for row in taken if is_here(files[row["file"]].path)][:_READS]
    return [(row["file"], row["offset"], row["size"], segment_of(row)) for row in here]


def codecs(bench: Bench, seconds: float) -> Codecs:
    """Returns milliseconds to read a pack and bytes of a sample by codec: of some items, each stored and read."""
    plan = bench.config.plan
    group = next((each for each in bench.groups.items if each.codec is not None), None)
    if group is None or not isinstance(plan, PackConfig):
        raise Skip("only images have codecs")
    items = bench.groups.items_of(bench.picked)[group.name]
    if not len(items.table):
        raise Skip("no sample has an image")
    rows = group.task_rows(items.table, bench.picked.files)
    found: Measured = {codec: [] for codec in CODECS}
    with bench.reader(group) as read:
        for place in within(seconds, bench.random.permutation(len(rows))[:24].tolist()):
            row = rows.slice(place, 1)
            for codec, own in measured(group, lambda each: each.samples(row, read)).items():  # noqa: B023  called here
                found[codec] += own
    if not found["raw"]:
        raise Skip("no image could be read")
    offsets, _ = items.of_rows(0, len(bench.picked.rows))
    items_a_sample = float(np.diff(offsets).mean())
    samples_a_pack = max(plan.seq_len / max(float(np.asarray(bench.cached.lengths["num_tokens"]).mean()), 1.0), 1.0)
    factor = items_a_sample * samples_a_pack
    return Codecs(
        read_ms={codec: 1e3 * statistics.fmean(s for _, s in each) * factor for codec, each in found.items()},
        bytes_a_sample={codec: statistics.fmean(n for n, _ in each) * items_a_sample for codec, each in found.items()},
        own=str(group.codec),
        samples_a_pack=samples_a_pack,
    )


_FIRST = 512
"""Batches that predictions walk through."""
_MOST_DRAWN = 100_000
"""Samples of a plan whose lengths are drawn from a few."""


def plans(bench: Bench, seconds: float) -> PlanFacts:
    """Returns the plan of the config, and the padding of others."""
    ends, settings = time.perf_counter() + seconds, bench.config.plan
    assert settings is not None  # checked before any arm
    source = bench.cached
    is_exact = source is bench.sealed
    samples, plan = samples_of(source), bench.planned.plan
    if not is_exact:
        count = max(len(bench.manifest.rows), len(source))
        samples = _drawn(source, min(count, _MOST_DRAWN), bench.random)
        plan = make_plan(samples, _local(settings))
    order = plan.order(bench.config.loader.seed, 0)
    batches = [np.asarray(batch) for batch in order.batches(range(min(len(order), _FIRST)))]
    buckets = order.buckets(np.arange(len(batches)))
    frames = _frames_of(samples)
    return PlanFacts(
        num_batches=len(order),
        num_samples=len(samples),
        batches=tuple(
            PlannedBatch(samples=len(batch), frames=int(frames[batch].sum()), room=_room(plan, frames, batch), bucket=b)
            for batch, b in zip(batches, buckets.tolist(), strict=True)
        ),
        padding=_padding(plan, samples),
        is_exact=is_exact,
        room_is_fixed=_room_is_fixed(bench, source),
        others=tuple(within(ends - time.perf_counter(), _others(settings, samples))),
    )


def _drawn(source: SampleSource, count: int, random: np.random.Generator) -> Samples:
    """Returns what a plan of so many samples is made of, whose lengths are those of a few, drawn again and again."""
    known = samples_of(source)
    places = random.integers(0, len(source), count) if count > len(source) else np.arange(len(source))

    def column(name: str) -> Array:
        return np.asarray(source.lengths[name])[places]

    lengths = source.lengths
    return Samples(
        durations=None if known.durations is None else np.asarray(known.durations)[places],
        sample_rate_hz=known.sample_rate_hz,
        frames=(lambda: column("num_frames")) if "num_frames" in lengths else None,
        tokens=lambda: column("num_tokens"),
        patches=(lambda: column("num_patches")) if "num_patches" in lengths else None,
        images=(lambda: column("num_images")) if "num_images" in lengths else None,
        texts=None if known.texts is None else np.asarray(known.texts)[places],
    )


def _frames_of(samples: Samples) -> Array:
    """Returns what batches are padded by: stored frames, of packs and texts tokens."""
    if samples.durations is None or samples.frames is None:
        return samples.lengths
    frames = np.asarray(samples.frames())
    return frames if frames.any() or samples.tokens is None else np.asarray(samples.tokens())


def _room_is_fixed(bench: Bench, source: SampleSource) -> bool:
    """Returns whether audio takes as much room in a batch whatever its length, as Whisper's 30 s do."""
    lengths = np.asarray(source.lengths.get("num_frames", np.zeros(1)))
    if lengths.min() == lengths.max():
        return False
    rooms = []
    for index in (int(lengths.argmin()), int(lengths.argmax())):
        batch = collated(source, makers(bench, source), [source.read(index)], index=index)
        features = [each for each in batch.values() if isinstance(each, torch.Tensor) and each.is_floating_point()]
        rooms.append(sum(each.numel() for each in features))
    return bool(rooms[0] == rooms[1])


def _room(plan: Plan, frames: Array, batch: Array) -> int:
    return int(frames[batch].sum() if isinstance(plan, PackPlan) else frames[batch].max() * len(batch))


def _padding(plan: Plan, samples: Samples) -> float:
    found = plan_statistics(plan, samples)  # type: ignore[arg-type]  # of `make_plan`
    return 1 - float(found["fill"]) if "fill" in found else float(found["padding"])


def _local(settings: PlanConfig) -> PlanConfig:
    """Returns settings that need no shards."""
    return dataclasses.replace(settings, locality="global") if isinstance(settings, BucketConfig) else settings


def _others(settings: PlanConfig, samples: Samples) -> Iterator[OtherPlan]:
    for changed in _candidates(settings):
        try:
            # `k` stands instead of edges.
            more: dict[str, Any] = {"edges_s": CLASSIC_EDGES_S} if "k" in changed else {}
            plan = make_plan(samples, _local(dataclasses.replace(settings, **changed, **more)))
            padding = _padding(plan, samples)
        except (PlanError, ValueError):
            continue  # too few samples for so many buckets
        yield OtherPlan(settings=changed, padding=padding, num_batches=len(plan.order(0, 0)))


def _candidates(settings: PlanConfig) -> Iterator[dict[str, Any]]:
    """Yields settings that may pad less, as changes of those that are given."""
    if isinstance(settings, BucketConfig) and settings.calibration is None:
        least = len(settings.edges_s) if not settings.k else settings.k
        yield from ({"k": k} for k in (8, 16, 32, 64) if k > least and not isinstance(settings.batch_size, tuple))
    elif isinstance(settings, WindowConfig):
        yield from ({"window": factor * settings.window} for factor in (2, 4))
    elif isinstance(settings, PackConfig) and settings.buffer_size:
        yield from ({"buffer_size": size} for size in (0, 4 * settings.buffer_size))


STAGES = (RAW_READ, DECODE, RESAMPLE, RESIZE, PATCHES, FEATURES, TOKENS)
WRITE = "write shard"
_MOST_BYTES = 400 * 1000**2
_LEAST_MEASURED = 8
"""Rows that the clock is to see, if there are as many; those of the first shard load libraries."""
Done = dict[Group, list[tuple[Path, Receipt]]]


def made(bench: Bench, seconds: float) -> Made:
    """Returns what the stages of a build take on some rows, which are then the temporary cache.

    The first shard is made without a clock: libraries and the tokenizer are loaded there. A data set of a few rows is
    made again, so that there is something to count.
    """
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
    rows_per_shard = max(8 // groups.shard_rows(1), 1)
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
        files={"sources.parquet": dump_sources(listing.sources()), "hashes.memo": b""},
        messages={},
    )
    seal(bench.sample_folder, contents, scratch=bench.root / SAMPLE, replace=True)
    return int(np.count_nonzero(found.reasons.codes))
