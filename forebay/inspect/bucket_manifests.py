"""A cache's rows as one table a bucket, for trainers that read buckets from files of their own."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.config import Config
from forebay.errors import ConfigError
from forebay.store.cache import Cache
from forebay.store.files import write_aside, write_bytes
from forebay.store.sources import anchor, load_sources
from forebay.store.tar_index import index_path

if TYPE_CHECKING:
    import pyarrow as pa

CONFIG_NAME = "bucket_config.json"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketRows:
    """One bucket: its range [low_s, high_s), and the indices of its samples in the order of their rows, int64."""

    low_s: float
    high_s: float
    samples: np.ndarray[Any, Any]

    @property
    def file_name(self) -> str:
        """Name of its table: `b_0_3.parquet`."""
        return f"b_{round(self.low_s, 4):.9g}_{round(self.high_s, 4):.9g}.parquet"


def write_bucket_manifests(
    cache: Cache, folder: Path, buckets: Sequence[BucketRows], *, config: Config, seed: int
) -> list[Path]:
    """Makes `folder` hold bucket_config.json and a parquet file for each bucket; returns their paths.

    The tables have the columns of `cache.samples` and `tar_path`, `tar_index_path` (of the sample's tar and its index; null
    where it came from no tar), `bucket_id`, and `bucket_max_duration` (the upper edge, in seconds). bucket_config.json is
    written last. seed: of the shuffle, for bucket_config.json.
    Raises ConfigError where the folder lies inside the cache, or holds tables of other buckets.
    """
    _check_folder(folder, buckets, cache_folder=cache.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = _with_tars(cache, config)
    for number, bucket in enumerate(buckets):
        _write(folder / bucket.file_name, _rows(table, bucket, number))
    durations_s = np.asarray(cache.lengths["num_samples"]) / cache.constants["sample_rate_hz"]
    document = bucket_config(durations_s, buckets, seed=seed)
    write_bytes(folder / CONFIG_NAME, json.dumps(document, indent=1, allow_nan=False).encode("ascii"))
    return [*(folder / bucket.file_name for bucket in buckets), folder / CONFIG_NAME]


def bucket_config(durations_s: np.ndarray[Any, Any], buckets: Sequence[BucketRows], *, seed: int) -> dict[str, Any]:
    """Returns the document of bucket_config.json. durations_s: float64 [num_samples]. Durations are in seconds."""
    total_s = float(durations_s.sum())
    described = []
    for number, bucket in enumerate(buckets):
        own = durations_s[bucket.samples]
        held_s = float(own.sum())
        described.append(
            {
                "bucket_id": number,
                "range": f"{round(float(bucket.low_s), 4)}-{round(float(bucket.high_s), 4)}s",
                "samples": len(own),
                "hours": round(held_s / 3600, 6),
                "pct_samples": round(100 * len(own) / len(durations_s), 4),
                "pct_hours": round(100 * held_s / total_s, 4) if total_s else 0.0,
                "mean_duration": round(held_s / len(own), 4) if len(own) else 0.0,
                "max_duration": round(float(own.max(initial=0.0)), 4),
            }
        )
    return {
        "buckets": described,
        "total_samples": len(durations_s),
        "total_hours": round(total_s / 3600, 6),
        "seed": seed,
    }


def _check_folder(folder: Path, buckets: Sequence[BucketRows], *, cache_folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--bucket-manifests {folder} is a file; name a folder")
    if folder.resolve().is_relative_to(cache_folder.resolve()):
        raise ConfigError(
            f"--bucket-manifests {folder} lies inside the cache {cache_folder}, which is sealed; name another folder"
        )
    names = {bucket.file_name for bucket in buckets}
    foreign = sorted(path.name for path in folder.glob("b_*.parquet") if path.name not in names)
    if foreign:
        raise ConfigError(
            f"--bucket-manifests {folder} holds {foreign[0]}, which is none of the buckets {sorted(names)}; "
            "name an empty folder"
        )


def _with_tars(cache: Cache, config: Config) -> pa.Table:
    """Returns the row table with the path of each row's tar, and of the tar's index."""
    import pyarrow as pa

    anchors = [anchor(entry) for entry in config.source.manifests]
    sources = load_sources(cache.folder / "sources.parquet")
    tars = {s.name: os.path.abspath(anchors[s.entry] / s.name) for s in reversed(sources) if s.name.endswith(".tar")}
    indices = {name: str(index_path(path, cache_root=config.cache_root)) for name, path in tars.items()}
    table = cache.samples
    codes = table["source"].combine_chunks().dictionary_encode()
    if isinstance(codes, pa.ChunkedArray):
        codes = codes.combine_chunks()
    for column, paths in (("tar_path", tars), ("tar_index_path", indices)):
        values = pa.array([paths.get(name) for name in codes.dictionary.to_pylist()], pa.large_string())
        table = table.append_column(column, values.take(codes.indices))
    return table


def _rows(table: pa.Table, bucket: BucketRows, number: int) -> pa.Table:
    import pyarrow as pa

    rows = table.take(pa.array(bucket.samples))
    count = len(bucket.samples)
    rows = rows.append_column("bucket_id", pa.array(np.full(count, number, dtype=np.int32)))
    return rows.append_column("bucket_max_duration", pa.array(np.full(count, float(bucket.high_s))))


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    with write_aside(path) as file:
        # Buffered: pyarrow ignores how much of its bytes a `write` took, and a nearly full disk takes a part.
        buffered = io.BufferedWriter(file)
        pq.write_table(table, buffered)
        buffered.flush()
        buffered.detach()
