"""A sealed cache, through `forebay.open_cache` with its default verification."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.peers.interface import Sample, Workload
from forebay.store.cache import Cache, open_cache
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, FieldSpec, Group
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard

NAME = "forebay"
REQUIRES: tuple[str, ...] = ()
_SHARDS = ".building"
_CACHE = "cache"
FRAME_SAMPLES = 160
GROUPS = ("audio", "text")


def fields(workload: Workload) -> tuple[FieldSpec, ...]:
    """Returns the fields of the cache; what collating needs (`prefix_len`) is stored on top of the workload."""
    return (
        FieldSpec(name="input_features", dtype=workload.values.dtype.name, shape=(workload.width,), group="audio"),
        FieldSpec(name="sample_id", dtype="str", group="text", role="table"),
        FieldSpec(name="input_ids", dtype="int32", group="text"),
        FieldSpec(name="prefix_len", dtype="int32", group="text"),
    )


def write(folder: Path, workload: Workload) -> None:
    scratch = folder / _SHARDS
    shards = write_shards(scratch, workload)
    rows, count = workload.rows_per_shard, len(workload)
    frames, tokens = np.diff(workload.offsets), np.diff(workload.id_offsets)
    index = np.arange(count, dtype=np.int64)
    contents = Contents(
        fields=fields(workload),
        shards=shards,
        items={},
        arrays={
            "slots.npy": ((index // rows) << ROW_BITS) | index % rows,
            "lengths.npy": np.array([frames * FRAME_SAMPLES, frames, tokens], "<i4"),
        },
        # What a build keeps beside: here empty, there to be counted.
        files={"rejected.jsonl": b"", "sources.parquet": b"", "hashes.memo": b""},
        document=document(count),
    )
    seal(folder / _CACHE, contents, scratch=scratch)
    for group in GROUPS:
        for path, _ in shards[group]:
            path.unlink()
        (scratch / group).rmdir()
    scratch.rmdir()


def write_shards(folder: Path, workload: Workload, *, at_once: int = 1) -> dict[Group, list[tuple[Path, ShardEntry]]]:
    """Writes the shards of both groups below a folder; a cache has 8 small files more, each fsynced too.

    at_once: shards that are written at a time; a build's workers write one each.
    """
    numbers = range(-(-len(workload) // workload.rows_per_shard))
    with ThreadPoolExecutor(at_once) as threads:
        for group in GROUPS:
            (folder / group).mkdir(parents=True)
        written = {
            group: threads.map(functools.partial(_write_shard, folder, group, workload), numbers) for group in GROUPS
        }
        return {group: list(found) for group, found in written.items()}


def _write_shard(folder: Path, group: Group, workload: Workload, number: int) -> tuple[Path, ShardEntry]:
    start = number * workload.rows_per_shard
    rows = [_row(workload, i, group) for i in range(start, min(start + workload.rows_per_shard, len(workload)))]
    path = folder / shard_name(group, number)
    return path, write_shard(path, shard_fields(fields(workload), group), rows, key=digest([group, number]))


def _row(workload: Workload, index: int, group: Group) -> dict[str, object]:
    sample = workload[index]
    if group == "audio":
        return {"input_features": sample["values"]}
    return {"sample_id": f"clip-{index:06d}", "input_ids": sample["ids"], "prefix_len": np.ones(1, np.int32)}


def document(count: int) -> dict[str, object]:
    """Returns metadata.json of a made-up recipe."""
    constants = {"audio": {"features": "qwen3_asr", "sample_rate_hz": 16_000}, "text": {"prompt": "plain"}}
    return {
        "name": "bench",
        "split": "train",
        "key": digest(["bench", count]),
        "recipe_key": digest("bench"),
        "recipe": {},
        "num_samples": count,
        "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
        "constants": constants,
    }


def open_cache_of(folder: Path) -> Cache:
    """Returns the cache that `write` sealed."""
    return open_cache(folder / _CACHE)


class _Reader:
    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def read(self, index: int) -> Sample:
        sample = self.cache.read(index)
        return {"values": sample["input_features"], "ids": sample["input_ids"]}


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(open_cache_of(folder))
