"""Measures opening a cache and reading one sample: `python -m benchmarks.opening [--tiny] [--json] [--rounds N]`.

- **New process.** A new process imports forebay, opens a cache of workload A and reads one sample. Beside it stands a
  process that starts Python and imports numpy.
- **Large cache.** A process that has imported forebay opens a cache of 3 M samples in 3,000 linked shards of tiny
  payloads, and reads the first sample, then a random one. Beside it stand caches of a tenth and a hundredth of its
  size. The slope is a line through the three.
- **One sample.** One random sample is copied. Beside it stands a bare copy of the same values, with the percentiles of
  each.

All files are in the page cache. Figures are medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.data import BENCH_DATA, ROOT
from benchmarks.peers import forebay_cache, workloads
from benchmarks.peers.interface import Workload
from benchmarks.report import arguments, machine, median, show
from forebay.store.cache import open_cache
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, FieldSpec, Group
from forebay.store.seal import Contents, seal
from forebay.store.shard import shard_fields, write_shard

ROWS = 1_000
"""The rows of a tiny shard."""
FIELDS = (
    FieldSpec(name="input_features", dtype="float16", shape=(2,), group="audio"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
)
_NUMPY = "import numpy"
_FIRST = "import forebay\nsample = forebay.open_cache({folder!r}).read(0)\nassert len(sample['input_features'])"

Row = dict[str, Any]


def linked_cache(root: Path, *, num_shards: int) -> Path:
    """Makes a cache whose shards are all links to one, and returns its folder."""
    root.mkdir()
    entries = {}
    for group in ("audio", "text"):
        name = "input_features" if group == "audio" else "input_ids"
        shape = (1, 2) if group == "audio" else (1,)
        rows = [{name: np.full(shape, i, FIELDS[group == "text"].numpy_dtype)} for i in range(ROWS)]
        path = root / f"{group}.tdz"
        entries[group] = (path, write_shard(path, shard_fields(FIELDS, group), rows, key=digest(group)))
    shards: dict[Group, Any] = {group: [entry] * num_shards for group, entry in entries.items()}
    index = np.arange(num_shards * ROWS, dtype=np.int64)
    contents = Contents(
        fields=FIELDS,
        shards=shards,
        items={},
        arrays={
            "slots.npy": ((index // ROWS) << ROW_BITS) | index % ROWS,
            "lengths.npy": np.ones((3, len(index)), "<i4"),
        },
        files={},
        document=forebay_cache.document(len(index)),
    )
    seal(root / "cache", contents, scratch=root)
    return root / "cache"


def first_samples(folder: Path, *, repeats: int) -> tuple[float, float]:
    """Returns milliseconds from nothing open to sample 0, and to a random one; each with a newly opened cache."""
    rng = np.random.default_rng(0)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for found, index in zip(times, (0, None), strict=True):
            began = time.perf_counter()
            cache = open_cache(folder)
            position = int(rng.integers(len(cache))) if index is None else index
            sample = cache.read(position)
            found.append(1e3 * (time.perf_counter() - began))
            row = cache.slots[position] & (2**ROW_BITS - 1)
            assert sample["input_ids"].tolist() == [row], position
            assert cache.shard("audio", 0).entry.rows == ROWS
    return median(times[0]), median(times[1])


def large(root: Path, *, num_shards: int, repeats: int) -> list[Row]:
    """Returns a row for each size of cache, and one for the slope."""
    rows: list[Row] = []
    for count in (num_shards // 100, num_shards // 10, num_shards):
        folder = linked_cache(root / f"{count}-shards", num_shards=max(count, 1))
        first, shuffled = first_samples(folder, repeats=repeats)
        rows.append({"samples": max(count, 1) * ROWS, "first sample ms": first, "first shuffled sample ms": shuffled})
    millions = [row["samples"] / 1e6 for row in rows]
    slopes = {
        name: float(np.polyfit(millions, [row[name] for row in rows], 1)[0])
        for name in ("first sample ms", "first shuffled sample ms")
    }
    return [*rows, {"samples": "slope, a million", **slopes}]


def new_process(folder: Path, *, rounds: int) -> list[Row]:
    """Returns what a new process takes to its first sample."""
    codes = {"python + numpy": _NUMPY, "forebay: import, open, first sample": _FIRST.format(folder=str(folder))}
    times: dict[str, list[float]] = {name: [] for name in codes}
    for number in range(rounds + 1):
        for name, code in codes.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            if number:
                times[name].append(1e3 * (time.perf_counter() - began))
    base = times["python + numpy"]
    return [
        {"new process": name, "ms": median(found), "x numpy": median(a / b for a, b in zip(found, base, strict=True))}
        for name, found in times.items()
    ]


def single(workload: Workload, folder: Path, *, count: int) -> list[Row]:
    """Returns percentiles of one random sample at a time, copied into memory that is used again and again."""
    cache = forebay_cache.open_cache_of(folder)
    out = np.zeros((int(np.diff(workload.offsets).max()), workload.width), workload.values.dtype)
    starts, stops = workload.offsets[:-1].tolist(), workload.offsets[1:].tolist()

    def ours(index: int) -> None:
        values = cache.read(index)["input_features"]
        np.copyto(out[: len(values)], values)

    def bare(index: int) -> None:
        values = workload.values[starts[index] : stops[index]]
        np.copyto(out[: len(values)], values)

    works: dict[str, Callable[[int], None]] = {"memcpy": bare, "forebay": ours}
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(len(workload)):  # the first read of a sample checks its hash
        ours(index)
    for index in np.random.default_rng(1).integers(0, len(workload), count).tolist():
        for name, work in works.items():
            began = time.perf_counter()
            work(index)
            times[name].append(1e6 * (time.perf_counter() - began))
    limit = {share: float(np.percentile(times["memcpy"], share)) for share in (50, 99)}
    rows: list[Row] = []
    for name, found in times.items():
        p50, p99 = (float(np.percentile(found, share)) for share in (50, 99))
        rows.append(
            {"one sample": name, "p50 us": p50, "p99 us": p99, "p50 x": p50 / limit[50], "p99 x": p99 / limit[99]}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = 2 if options.tiny else options.rounds or 11
    workload = workloads.speech(96 if options.tiny else 3_000)
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as name:
        folder = Path(name)
        (folder / "A").mkdir()
        forebay_cache.write(folder / "A", workload)
        document = {
            "machine": machine("numpy", "xxhash"),
            "a new process": new_process(folder / "A" / "cache", rounds=rounds),
            "a large cache": large(folder, num_shards=30 if options.tiny else 3_000, repeats=rounds),
            "a random sample": single(workload, folder / "A", count=200 if options.tiny else 20_000),
        }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
