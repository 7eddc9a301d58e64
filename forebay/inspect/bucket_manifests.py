"""The files that `inspect` writes, each whole or not at all: the row table, a waveform, a table for each bucket."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.config.plan import BucketRange
from forebay.config.tree import Config
from forebay.errors import ConfigError, TarError
from forebay.plan.bucket_plan import BucketPlan, shuffled_buckets
from forebay.plan.make import plan_of
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.files import write_aside, write_bytes
from forebay.store.layout import Array
from forebay.store.lookup import find_cache, require
from forebay.store.selection import Filter, Selection, filtered, origin
from forebay.store.source import length_of
from forebay.tar.index import json_path, load_json

if TYPE_CHECKING:
    import pyarrow as pa


def write_table(cache: Cache, path: Path) -> None:
    """Makes `path` a parquet file of `cache.samples`, one row a sample."""
    _write(path, cache.samples)


def write_wav(cache: Cache, tensors: Mapping[str, Array], path: Path) -> None:
    """Makes `path` a mono WAV of a sample's `waveform`: 16-bit from int16, bit for bit, 32-bit float from float32.

    Raises ConfigError where the cache keeps no waveforms.
    """
    import soundfile

    if "audio" not in cache.groups:
        raise ConfigError(f"--wav: {cache.place} has no audio (its fields: {', '.join(tensors)}); leave --wav out")
    if "waveform" not in tensors:
        raise ConfigError(
            f"--wav: {cache.place} keeps no waveforms (its fields: {', '.join(tensors)}); name the config where its "
            "sources are on this machine, as they were read; or set audio.keep_waveform = true in the config and run: "
            "forebay preprocess CONFIG"
        )
    waveform = tensors["waveform"]
    subtype = "PCM_16" if waveform.dtype == np.int16 else "FLOAT"
    buffer = io.BytesIO()
    soundfile.write(buffer, waveform, cache.constants["sample_rate_hz"], format="WAV", subtype=subtype)
    write_bytes(path, buffer.getbuffer())


CONFIG_NAME = "bucket_config.json"
Places = Callable[[Config], "pa.Table | None"]
"""Gives the `places` that `write_bucket_manifests` takes; only `preprocess` lists sources, which is not known here."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketRows:
    """One bucket: its range [low_s, high_s), and the indices of its samples in the order of their rows, int64.

    tokens: the range of a cell beside that.
    """

    low_s: float
    high_s: float
    samples: np.ndarray[Any, Any]
    tokens: tuple[int, int] | None = None

    @property
    def file_name(self) -> str:
        """Name of its table: `b_0_3.parquet`."""
        return f"{self.name}.parquet"

    @property
    def name(self) -> str:
        """The name of the bucket: `b_0_3`."""
        return BucketRange((self.low_s, self.high_s), self.tokens).name(0)


def bucket_manifests(config: Config, folder: Path, *, seed: int, places: Places) -> list[Path]:
    """Makes `folder` hold a shuffled table for each bucket of a config's plan, for trainers that read such files.

    Returns the paths as `write_bucket_manifests` does. places: says where the samples of a config lie. Raises
    ConfigError for a plan whose buckets are no ranges of seconds.
    """
    recipe = recipe_of(config)
    if recipe.image is not None and recipe.audio is None:
        raise ConfigError(f"--bucket-manifests: buckets are ranges of seconds, and {config.path} is of images")
    cache = open_cache(require(config, find_cache(config, recipe)).folder)
    source = filtered(cache, Filter.of(config.filter)) if config.filter.is_given else cache
    plan = plan_of(config, source).plan
    if not isinstance(plan, BucketPlan):
        raise ConfigError('--bucket-manifests: plan.kind = "window" has no buckets; use --set plan.kind="bucket"')
    if plan.edges:
        raise ConfigError(f"--bucket-manifests: buckets are ranges of seconds, and {cache.place} has no audio")
    parts = [(*(each.seconds or (0.0, 0.0)), each.tokens) for each in plan.ranges]
    rows = [
        BucketRows(low_s=low, high_s=high, tokens=tokens, samples=samples)
        for (low, high, tokens), samples in zip(parts, shuffled_buckets(plan, seed=seed), strict=True)
    ]
    return write_bucket_manifests(source, folder, rows, places=places(config), seed=seed)


def write_bucket_manifests(
    source: Cache | Selection, folder: Path, buckets: Sequence[BucketRows], *, places: pa.Table | None, seed: int
) -> list[Path]:
    """Makes `folder` hold bucket_config.json and a parquet file for each bucket; returns their paths.

    The tables are manifests of `kind = "tar"`: `tar_path` (absolute), `tar_member_name`, `transcript`, and beside the
    columns of `cache.samples`, of which `duration_s` is as decoded, `bucket_id` (the table's name without `.parquet`)
    and `bucket_max_duration` (the upper edge, in seconds). `tar_index_path` is the JSON that `forebay index
    --export-json` wrote, null where a tar has no current one, and left out where none has. Where samples come from no
    tar, `tar_path` and `tar_member_name` are null. bucket_config.json is written last.
    places: `sample_id`, `tar_path` and `tar_member_name` of all samples; None where they come from no tar. seed: of the
    shuffle, for bucket_config.json.
    Raises ConfigError where the folder lies inside the cache or holds tables of other buckets, or a sample has no
    place.
    """
    if isinstance(cache := origin(source)[0], Cache):
        _check_folder(folder, buckets, cache_folder=cache.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = _with_tars(source, places)
    for bucket in buckets:
        _write(folder / bucket.file_name, _rows(table, bucket))
    durations_s = length_of(source, "num_audio_samples") / source.constants.get("sample_rate_hz", 1)
    document = bucket_config(durations_s, buckets, seed=seed)
    write_bytes(folder / CONFIG_NAME, json.dumps(document, indent=1, allow_nan=False).encode("ascii"))
    return [*(folder / bucket.file_name for bucket in buckets), folder / CONFIG_NAME]


def bucket_config(durations_s: np.ndarray[Any, Any], buckets: Sequence[BucketRows], *, seed: int) -> dict[str, Any]:
    """Returns the document of bucket_config.json. durations_s: float64 [num_samples]. Durations are in seconds."""
    total_s = float(durations_s.sum())
    described = []
    for bucket in buckets:
        own = durations_s[bucket.samples]
        held_s = float(own.sum())
        described.append(
            {
                "bucket_id": bucket.name,
                "name": bucket.name,
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


def _with_tars(source: Cache | Selection, places: pa.Table | None) -> pa.Table:
    """Returns the row table with the columns that a manifest over tars has more."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = source.table()
    table = table.append_column("transcript", table["text"])
    if places is None:
        nothing = pa.nulls(len(table), pa.large_string())
        return table.append_column("tar_path", nothing).append_column("tar_member_name", nothing)
    found = pc.index_in(table["sample_id"].cast(pa.large_string()), value_set=places["sample_id"].combine_chunks())
    if found.null_count:
        missing = table["sample_id"].filter(pc.is_null(found))[0].as_py()
        raise ConfigError(
            f"the manifest lists no sample {missing!r} of {source.place}; make the cache of what it lists: "
            "forebay preprocess CONFIG"
        )
    places = places.take(found)
    tars = places["tar_path"].combine_chunks().dictionary_encode()
    for name in ("tar_path", "tar_member_name"):
        table = table.append_column(name, places[name])
    exported: dict[str, str | None] = dict.fromkeys(tars.dictionary.to_pylist())
    for tar in exported:
        with contextlib.suppress(TarError):  # an index that is not current is none
            exported[tar] = str(json_path(tar)) if load_json(tar) is not None else None
    indices = pa.array(exported.values(), pa.large_string()).take(tars.indices)
    return table if indices.null_count == len(table) else table.append_column("tar_index_path", indices)


def _rows(table: pa.Table, bucket: BucketRows) -> pa.Table:
    import pyarrow as pa

    rows = table.take(pa.array(bucket.samples))
    count = len(bucket.samples)
    rows = rows.append_column("bucket_id", pa.repeat(pa.scalar(bucket.name, pa.large_string()), count))
    return rows.append_column("bucket_max_duration", pa.array(np.full(count, float(bucket.high_s))))


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    with write_aside(path) as file:
        # Buffered: pyarrow ignores how much of its bytes a `write` took, and a nearly full disk takes a part.
        buffered = io.BufferedWriter(file)
        pq.write_table(table, buffered)
        buffered.flush()
        buffered.detach()
