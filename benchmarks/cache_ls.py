"""Measures what `forebay cache` costs on a root of many caches: `python -m benchmarks.cache_ls [--tiny] [--json]`.

- **Many caches.** A root of 1,000 sealed caches, each with four shards of both groups and its notes of use, is listed,
  by lines and as JSON, added up, and asked what a rule would remove. Half of the shards are hard links to another
  cache's. Each figure is the command's own work, in a process that has imported it.
- **The whole command.** The same by a shell's clock, beside a `forebay --version` that starts and does nothing.
- **A lookup.** `forebay key` looks for its cache among 300 of one recipe, each of other sources; then for one that is
  not there. `first` has no index of sources yet.
- **A note of use.** What a loader pays when it opens a cache: the first note, and one that is there already.

All files are in the page cache. Figures are medians.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.data import BENCH_DATA, ROOT
from benchmarks.report import arguments, machine, median, show, timed
from benchmarks.source_kinds import write_kind
from forebay import load_config
from forebay.caches.cache_list import ListReport, UsageReport
from forebay.caches.guard import Guard
from forebay.caches.prune import Rules, decide
from forebay.caches.root_items import opened_root
from forebay.caches.survey import survey
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, FieldSpec, Group
from forebay.store.lookup import SOURCES_NAME, Lookup, find_cache
from forebay.store.memo import note
from forebay.store.metadata import read_metadata, save_file, write_metadata
from forebay.store.seal import Contents, seal
from forebay.store.shard import shard_fields, write_shard
from forebay.store.source_files import dump_sources, load_sources

SHARDS, ROWS = 4, 16
TARGET_S, LOOKUP_S = 0.5, 0.2
FIELDS = (
    FieldSpec(name="input_features", dtype="float16", shape=(80,), group="audio"),
    FieldSpec(name="pad_value", dtype="float32", group="audio"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
    FieldSpec(name="prefix_len", dtype="int32", group="text"),
)
RECIPE: dict[str, Any] = {
    "source": {"kind": "tar", "split": "train", "min_duration_s": 0.0, "max_duration_s": 30.0, "exclude": []},
    "audio": {"features": "log_mel", "n_mels": 80, "dtype": "float16", "sample_rate_hz": 16_000, "version": [3, 1]},
    "text": {"prompt": "whisper", "tokenizer": "c2" * 32, "normalize": "nfkc", "version": 2},
}

Row = dict[str, Any]


def document_of(number: int) -> dict[str, Any]:
    """Returns metadata.json of a made-up cache, as long as that of a real one."""
    return {
        "name": f"bench-{number:04d}",
        "split": "train",
        "key": digest(["bench", number]),
        "recipe_key": digest(["recipe", number % 50]),
        "recipe": {**RECIPE, "source": {**RECIPE["source"], "min_duration_s": float(number % 50)}},
        "num_samples": SHARDS * ROWS,
        "languages": {name: {"hours": 0.01 * number, "samples": 11} for name in ("en", "es", "fr", "it", "ru")},
        "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
        "constants": {
            "audio": {"features": "log_mel", "n_mels": 80, "sample_rate_hz": 16_000},
            "text": {"prompt": "whisper"},
        },
        "excluded": {},
        "failed": {},
        "probe": {"audio": "bb" * 16, "text": "0e" * 16},
        "made_with": {"forebay": "0", "numpy": "0", "python": "0"},
        "size_bytes": 3_000_000,
        "rows_per_shard": ROWS,
    }


def first_cache(root: Path) -> Path:
    """Seals one cache and returns its folder."""
    shards: dict[Group, Any] = {"audio": [], "text": []}
    rng = np.random.default_rng(0)
    for group in shards:
        for number in range(SHARDS):
            path = root / f"{group}-{number}.tdz"
            rows = [_row(group, rng) for _ in range(ROWS)]
            entry = write_shard(path, shard_fields(FIELDS, group), rows, key=digest([group, number]))
            shards[group].append((path, entry))
    index = np.arange(SHARDS * ROWS, dtype=np.int64)
    arrays = {"slots.npy": ((index // ROWS) << ROW_BITS) | index % ROWS, "lengths.npy": np.ones((3, len(index)), "<i4")}
    files = {"hashes.memo": b"m" * 272, "rejected.jsonl": b"", "sources.parquet": b"s" * 1800}
    seal(
        root / "bench-0000",
        Contents(fields=FIELDS, shards=shards, items={}, arrays=arrays, files=files, document=document_of(0)),
        scratch=root,
    )
    for path in root.glob("*.tdz"):
        path.unlink()
    return root / "bench-0000"


def _row(group: Group, rng: np.random.Generator) -> dict[str, Any]:
    if group == "audio":
        return {"input_features": rng.random((9, 80)).astype(np.float16), "pad_value": np.zeros(1, np.float32)}
    return {"input_ids": np.arange(7, dtype=np.int32), "prefix_len": np.ones(1, np.int32)}


def many_caches(root: Path, count: int) -> None:
    """Makes a root of so many caches; every other one has hard links to the shards of the one before."""
    first = first_cache(root)
    sealed = json.loads((first / "metadata.json").read_text())
    sealed = {name: sealed[name] for name in ("format_version", "fields", "files", "groups")}
    for number in range(1, count):
        folder = root / f"bench-{number:04d}"
        before = root / f"bench-{number - 1:04d}"
        shutil.copytree(before, folder, copy_function=os.link if number % 2 else shutil.copy)
        (folder / "metadata.json").unlink()
        write_metadata(folder, {**document_of(number), **sealed})
    for folder in root.iterdir():
        note(folder)


def works(folder: Path) -> dict[str, Callable[[], Any]]:
    """Returns what is timed: the commands' own work, without the printing."""

    def ls(*, as_json: bool) -> int:
        with opened_root(folder) as root:
            report = ListReport(survey=survey(root), wanted=None, sort="used")
            return len(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))

    def du() -> int:
        with opened_root(folder) as root:
            return len("\n".join(UsageReport(survey=survey(root)).lines()))

    def prune() -> int:
        with opened_root(folder) as root:
            found = survey(root)
            return len(decide(found, Rules(older_than_s=30 * 86400.0), Guard(survey=found), None))

    return {
        "ls": lambda: ls(as_json=False),
        "ls --json": lambda: ls(as_json=True),
        "du": du,
        "prune --older-than": prune,
    }


def own_work(folder: Path, *, count: int, rounds: int) -> list[Row]:
    """Returns seconds of each command's own work, the best and the median."""
    rows: list[Row] = []
    for name, work in works(folder).items():
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            assert work() > 0
            times.append(time.perf_counter() - began)
        is_target = name.startswith("ls")
        reached = ("yes" if median(times) <= TARGET_S else "no") if is_target else None
        target = f"<= {TARGET_S}" if is_target else None
        rows.append({"command": name, "caches": count, "s": median(times), "target": target, "reached": reached})
    return rows


def whole(folder: Path, *, rounds: int) -> list[Row]:
    """Returns seconds of whole processes."""
    commands = {"forebay --version": ["--version"], "forebay cache ls": ["cache", "ls", str(folder)]}
    rows: list[Row] = []
    for name, words in commands.items():
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "forebay", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        rows.append({"process": name, "s": median(times)})
    return rows


def lookups(folder: Path, *, count: int, rounds: int) -> list[Row]:
    """Returns seconds of finding a cache among so many of its recipe, and of finding that there is none."""
    path = write_kind("text", folder / "source", num_rows=20)
    config = load_config(path, overrides=[f"run.cache_root={folder / 'caches'}"])
    first = Path(build(config, Options(progress=False)).cache)
    stored = list(load_sources(first / SOURCES_NAME))
    for number in range(1, count):
        other = first.with_name(f"kinds-{number:04d}")
        shutil.copytree(first, other)
        document = read_metadata(other)
        data = dump_sources([replace(source, xxh3_128=f"{number:032x}") for source in stored])
        document |= {"key": digest(["other", number]), "name": other.name}
        document["files"][SOURCES_NAME] = save_file(other, SOURCES_NAME, data)
        (other / "metadata.json").unlink()
        write_metadata(other, {name: value for name, value in document.items() if name != "checksum"})
    os.utime(first / "metadata.json", ns=(1, 1))  # the last that a lookup comes to
    rows, recipe, found = list[Row](), recipe_of(config), list[Lookup]()

    def look() -> None:
        found.append(find_cache(config, recipe))

    for name, text in (("is there", None), ("is not there", "one more\n")):
        if text is not None:
            with open(folder / "source" / "train.txt", "a", encoding="utf-8") as file:
                file.write(text)
        costs = [timed(look) for _ in range(rounds + 1)]
        assert (found[-1].found is None) == (text is not None)
        took = median(cost.wall_s for cost in costs[1:])
        row = {"lookup": name, "caches": count, "first_s": costs[0].wall_s, "s": took}
        row |= {"cpu_s": median(cost.cpu_s for cost in costs[1:]), "target": f"<= {LOOKUP_S}"}
        rows.append({**row, "reached": "yes" if took <= LOOKUP_S else "no"})
    return rows


def notes(folder: Path, *, rounds: int) -> list[Row]:
    """Returns microseconds of a note of use: of one that is written, and of one that is there."""
    times: dict[str, list[float]] = {"first": [], "again": []}
    for _ in range(rounds):
        shutil.rmtree(folder.parent / ".used" / folder.name)
        for found in times.values():
            began = time.perf_counter()
            note(folder)
            found.append(1e6 * (time.perf_counter() - began))
    return [{"note": name, "us": median(found), "target": "< 200"} for name, found in times.items()]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    count, rounds = (20, 2) if options.tiny else (1_000, options.rounds or 7)
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as name:
        folder = Path(name)
        many_caches(folder, count)
        document = {
            "machine": machine("numpy", "xxhash"),
            "own work": own_work(folder, count=count, rounds=rounds),
            "whole processes": whole(folder, rounds=rounds),
            "lookups": lookups(folder / "lookups", count=20 if options.tiny else 300, rounds=rounds),
            "notes": notes(folder / "bench-0000", rounds=10 * rounds),
        }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
