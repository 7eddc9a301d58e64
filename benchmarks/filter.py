"""Measures what `[filter]` costs: `python -m benchmarks.filter [--tiny] [--json] [--rounds N]`.

A cache of a million samples with tiny payloads has ids, five languages and a source. The first table is what each
setting costs over all samples, in a process that has opened the cache. The second one is the start of a loader, from
its config to the first batch, with the plan on disk, without a filter and with one that drops a language. The third one
is the rate of batches of both. Figures are medians over the rounds; ratios are taken within a round.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.data import BENCH_DATA
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay import load_config
from forebay.config import Config
from forebay.config.tree import FilterConfig
from forebay.store.cache import Cache, open_cache
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, FieldSpec, Group
from forebay.store.seal import Contents, seal
from forebay.store.selection import Filter
from forebay.store.shard import shard_fields, shard_name, write_shard
from forebay.train.select import make_loader

RATE_HZ = 16_000
LANGUAGES = ("hi", "ta", "te", "bn", "mr")
DROPPED = "filter.where=language != 'mr'"
FIELDS = (
    FieldSpec(name="waveform", dtype="int16", group="audio"),
    FieldSpec(name="sample_id", dtype="str", group="text", role="table"),
    FieldSpec(name="language", dtype="str", group="text", role="table"),
    FieldSpec(name="source", dtype="str", group="text", role="table"),
)

Row = dict[str, Any]


def table_cache(root: Path, *, num_shards: int, rows: int) -> Path:
    """Makes a cache whose samples have ids, languages and a source, and returns its folder."""
    count, scratch = num_shards * rows, root / ".building"
    shards: dict[Group, Any] = {"audio": [], "text": []}
    for number in range(num_shards):
        for group in shards:
            path = scratch / shard_name(group, number)
            path.parent.mkdir(parents=True, exist_ok=True)
            made = list(_rows(group, range(number * rows, (number + 1) * rows)))
            entry = write_shard(path, shard_fields(FIELDS, group), made, key=digest([group, number]))
            shards[group].append((path, entry))
    index = np.arange(count, dtype=np.int64)
    durations = (RATE_HZ + (index * 7919) % (14 * RATE_HZ)).astype("<i4")
    contents = Contents(
        fields=FIELDS,
        shards=shards,
        items={},
        arrays={
            "slots.npy": ((index // rows) << ROW_BITS) | index % rows,
            "lengths.npy": np.stack([durations, np.ones_like(durations), np.zeros_like(durations)]),
        },
        files={},
        document=_document(count),
    )
    folder = root / "table-train-0000000000000000"
    seal(folder, contents, scratch=scratch)
    return folder


def _rows(group: Group, numbers: range) -> Iterator[Row]:
    for number in numbers:
        if group == "audio":
            yield {"waveform": np.zeros(2, np.int16)}
        else:
            name = f"corpus/speaker-{number % 977:04d}/{number:08d}.flac"
            source = f"train-{number // 4096:05d}.tar"
            yield {"sample_id": name, "language": LANGUAGES[number % 5], "source": source}


def _document(count: int) -> dict[str, Any]:
    return {
        "name": "table",
        "key": "f" * 64,
        "recipe_key": "e" * 64,
        "recipe": {"audio": {"features": "waveform"}},
        "constants": {
            "audio": {"features": "waveform", "sample_rate_hz": RATE_HZ, "dtype": "int16"},
            "text": {"prompt": None},
        },
        "num_samples": count,
        "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
    }


def settings_table(cache: Cache, folder: Path, *, rounds: int) -> list[Row]:
    """Returns what each setting costs over all samples."""
    ids = cache.table(["sample_id"])["sample_id"]
    (folder / "half.txt").write_text("\n".join(ids[::2].to_pylist()), encoding="utf-8")
    (folder / "few.txt").write_text("\n".join(ids[:: len(ids) // 100].to_pylist()), encoding="utf-8")
    most = len(cache) // 10
    told: dict[str, dict[str, Any]] = {
        "where duration_s < 12": {"where": "duration_s < 12"},
        "where language != 'mr'": {"where": "language != 'mr'"},
        "where language in ('hi', 'ta') and duration_s < 12": {"where": "language in ('hi', 'ta') and duration_s < 12"},
        "drop_ids, 100 ids": {"drop_ids": str(folder / "few.txt")},
        "ids, half of all": {"ids": str(folder / "half.txt")},
        f"quota language = {most:,}": {"quota": {"language": most}},
    }
    found = []
    for name, settings in told.items():
        costs = [timed(partial(_chosen, cache, settings)) for _ in range(rounds)]
        found.append({"setting": name, "samples left": _chosen(cache, settings), **_row(costs)})
    return found


def _chosen(cache: Cache, settings: dict[str, Any]) -> int:
    return len(Filter.of(FilterConfig(**settings)).choose(cache, name="the cache").places)


def _row(costs: Sequence[Cost]) -> Row:
    return {
        "wall s": round(median(c.wall_s for c in costs), 3),
        "cpu s": round(median(c.cpu_s for c in costs), 3),
    }


def starts(configs: dict[str, Config], *, rounds: int) -> list[Row]:
    """Returns what it costs to come from a config to the first batch."""

    def start(config: Config) -> None:
        next(iter(make_loader(config)))

    for config in configs.values():
        start(config)  # makes the plan
    return _compared({name: partial(start, config) for name, config in configs.items()}, "loader start", rounds)


def batches(configs: dict[str, Config], *, count: int, rounds: int) -> list[Row]:
    """Returns what so many batches cost, the same number of samples with and without a filter."""
    loaders = {name: make_loader(config) for name, config in configs.items()}

    def read(name: str) -> None:
        for _ in islice(loaders[name], count):
            pass

    for name in loaders:
        read(name)
    return _compared({name: partial(read, name) for name in loaders}, f"{count} batches", rounds)


def _compared(ways: dict[str, Callable[[], None]], what: str, rounds: int) -> list[Row]:
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            costs[name].append(timed(way))
    plain = costs["without a filter"]
    return [
        {
            what: name,
            **_row(own),
            "x wall": round(ratio((c.wall_s for c in own), (c.wall_s for c in plain)), 2),
            "x cpu": round(ratio((c.cpu_s for c in own), (c.cpu_s for c in plain)), 2),
        }
        for name, own in costs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; the exit code."""
    options = arguments(__doc__, argv)
    rounds = options.rounds or (1 if options.tiny else 5)
    num_shards, rows = (4, 500) if options.tiny else (100, 10_000)
    BENCH_DATA.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA, prefix="filter-") as name:
        folder = Path(name)
        cache = open_cache(table_cache(folder, num_shards=num_shards, rows=rows))
        path = folder / "config.toml"
        path.write_text(
            'name = "table"\n[source]\nkind = "tar"\nmanifest = "none.parquet"\n[audio]\nfeatures = "waveform"\n'
            "[plan]\nbatch_seconds = 240\nk = 8\n[loader]\nnum_threads = 0\n"
            f'[[mixture.source]]\ncache = "{cache.place}"\nweight = 1\n[run]\ncache_root = "caches"\n'
        )
        configs = {
            "without a filter": load_config(path),
            "without a language": load_config(path, overrides=[DROPPED]),
        }
        show(
            {
                "machine": machine("numpy", "pyarrow"),
                "settings": settings_table(cache, folder, rounds=rounds),
                "starts": starts(configs, rounds=rounds),
                "batches": batches(configs, count=20 if options.tiny else 400, rounds=rounds),
            },
            as_json=options.json,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
