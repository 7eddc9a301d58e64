"""The contents of a cache, read in a plain loop: a cache that was made of caches must hold them too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.cache import Cache, open_cache
from tests.store_factory import make_cache


def small_cache(root: Path, name: str, *, num_samples: int = 7, seed: int = 0, **options: Any) -> Cache:
    """Returns a cache of short waveforms under `root` whose ids begin with `name`."""
    total = num_samples + len(options.get("failed_rows", ()))
    ids = [f"{name}-{number}" for number in range(total)]
    given = {"features": "waveform", "max_duration_s": 0.15, "rows_per_shard": 3, "sample_ids": ids, **options}
    return open_cache(make_cache(root / name, num_samples=num_samples, seed=seed, **given))


def held(cache: Cache) -> list[dict[str, Any]]:
    """Returns everything that a cache holds of each sample."""
    rows = cache.samples.drop_columns(["index"]).to_pylist()
    return [
        {
            **row,
            "lengths": {name: int(values[index]) for name, values in cache.lengths.items()},
            "tensors": {name: _plain(value) for name, value in cache.read(index).items()},
        }
        for index, row in enumerate(rows)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return (value.dtype.str, value.shape, value.tobytes())


def languages_of(samples: Sequence[dict[str, Any]], *, rate_hz: int) -> dict[str, Any]:
    """Returns samples and hours by language, counted one by one."""
    found: dict[str, Any] = {}
    for name, group in itertools.groupby(sorted(samples, key=_language), key=_language):
        rows = list(group)
        seconds = sum(row["lengths"]["num_audio_samples"] for row in rows) / rate_hz
        found[name or "unknown"] = {"samples": len(rows), "hours": seconds / 3600}
    return found


def _language(row: dict[str, Any]) -> str:
    return str(row["language"])


def value_bytes(cache: Cache, indices: Sequence[int]) -> int:
    """Returns the bytes of the values of these samples, of a cache without images."""
    total = 0
    for index in indices:
        total += sum(value.nbytes for value in cache.read(index).values())
        for spec in cache.fields.values():
            if spec.role == "table":
                value = cache.samples[spec.name][index].as_py()
                total += len(value.encode()) if spec.dtype == "str" else np.dtype(spec.dtype).itemsize
    return total


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file of a folder but its shards."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def write_ids(path: Path, ids: Sequence[str]) -> Path:
    path.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")
    return path
