"""Measures the zarr form of caches beside `.tdz`: `python -m benchmarks.zarr_form [--tiny] [--json] [--rounds N]`.

Three caches of the demo's own data, the shards of each repeated until there is enough of it: log-mel spectra (float16),
waveforms (int16), image patches (uint8). Chunks are compressed one by one, so what is repeated costs and saves what
other recordings of the kind would.

- **Codecs.** The largest field, in chunks of 256 KiB in this process's one thread: its share that is left, and MB of
  values a second. zstd is the form's; Blosc with shuffles is beside it.
- **Folder.** The cache to a folder and back by two threads: sizes, seconds; and one random sample, by forebay from the
  `.tdz`, by zarr from the zarr form.
- **Bucket.** `push --form zarr` to moto's S3 server in a process of its own, with 8 threads. Beside it stands what
  cannot be done without: `zstd` is zstd alone of the same chunks, and `PUT` is obstore's bare puts of the same objects,
  both with 8 threads too. The reference is their sum, zstd first and then the puts: server, compression and client
  share the machine's cores, so that one beside the other costs what one after the other does. `x reference` is the
  reference's seconds by those of the push, 1 is as fast; `x longer one` is the same with the longer of the two alone,
  which no push on these cores can reach. Both belong to one round, and the figure is the median of the rounds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import obstore
import zarr
from numcodecs import Blosc, Zstd

from benchmarks.data import BENCH_DATA, ROOT
from benchmarks.objects import server
from benchmarks.objects.beside import Beside
from benchmarks.objects.server import Bucket
from benchmarks.report import arguments, machine, median, ratio, show, timed
from forebay.config.remote import RemoteConfig
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import load_config
from forebay.store.cache import Cache, open_cache
from forebay.store.cold.pull import pull_any
from forebay.store.cold.push import arrays_of, push_zarr
from forebay.store.layout import ROW_BITS, Array, Group, ListedItems
from forebay.store.seal import Contents, seal

Row = dict[str, Any]
CONFIGS = {"log_mel float16": "demo_speech", "waveform int16": "demo_waveform", "patches uint8": "demo_vision"}
FIELDS = {"log_mel float16": "input_features", "waveform int16": "waveform", "patches uint8": "patches"}
THREADS = 8
CODECS: dict[str, Any] = {
    "zstd 1": Zstd(1),
    "zstd 3": Zstd(3),
    "zstd 9": Zstd(9),
    "blosc shuffle, zstd 3": Blosc("zstd", 3, Blosc.SHUFFLE),
    "blosc bitshuffle, zstd 1": Blosc("zstd", 1, Blosc.BITSHUFFLE),
}


def demo_cache(root: Path, name: str, *, megabytes: float) -> Cache:
    """Returns a cache of a demo config, its shards repeated by links until it has so many MB."""
    config = load_config(ROOT / "configs" / f"{CONFIGS[name]}.toml", overrides=[f'run.cache_root="{root}/built"'])
    cache = open_cache(build(config).cache)
    size = sum(int(entry["size_bytes"]) for _, entry in cache.files())
    times = max(1, round(megabytes * 1e6 / size))
    slots = np.concatenate([np.asarray(cache.slots) + (number * cache.num_shards << 32) for number in range(times)])
    lengths = np.tile(np.array(list(cache.lengths.values()), "<i4"), (1, times))
    document = {k: v for k, v in cache.metadata.items() if k not in ("fields", "files", "checksum", "format_version")}
    contents = Contents(
        fields=tuple(cache.fields.values()),
        shards={group: cache.shard_entries(group) * times for group in cache.groups},
        items={group: _repeated(cache, group, times) for group in cache.listed},
        arrays={"slots.npy": slots, "lengths.npy": lengths},
        files={},
        document={**document, "num_samples": len(slots)},
    )
    folder = root / f"{CONFIGS[name]}-many"
    seal(folder, contents, scratch=root)
    return open_cache(folder)


def _repeated(cache: Cache, group: Group, times: int) -> ListedItems:
    """Returns the items of a cache's samples, these again and again in shards of their own."""
    items, num_shards = cache.items(group), len(cache.shard_entries(group))
    counts = np.tile(np.diff(items.offsets), times)
    slots = [items.slots + (number * num_shards << ROW_BITS) for number in range(times)]
    return ListedItems(np.concatenate(([0], np.cumsum(counts))), np.concatenate(slots))


def codecs(name: str, cache: Cache) -> list[Row]:
    """Returns a row for each codec, of the first 64 MB of the largest field."""
    (filled,) = [
        one for one in arrays_of(cache) if one.array.path == f"{cache.fields[FIELDS[name]].group}/values/{FIELDS[name]}"
    ]
    array = filled.array
    values = filled.read(0, min(array.shape[0], 64_000_000 // array.row_bytes))
    chunks = [values[start : start + array.chunk_rows] for start in range(0, len(values), array.chunk_rows)]
    rows = []
    for codec, with_codec in CODECS.items():
        made: list[bytes] = []
        write = timed(lambda: made.extend(map(with_codec.encode, chunks)))  # noqa: B023  called at once
        read = timed(lambda: [with_codec.decode(one) for one in made])  # noqa: B023
        size = values.nbytes / 1e6
        share = sum(map(len, made)) / values.nbytes
        rows.append(
            {"values": name, "codec": codec, "left": share, "MB/s": size / write.cpu_s, "read": size / read.cpu_s}
        )
    return rows


def in_folder(name: str, cache: Cache, root: Path, *, rounds: int) -> Row:
    """Returns sizes, seconds to a folder and back, and what one random sample costs."""
    settings = RemoteConfig(shard_dir=str(root / "node"), max_concurrent=2)
    writes, reads = [], []
    for number in range(rounds):
        cold, back = root / f"cold-{number}", root / f"back-{number}" / "cache"
        back.parent.mkdir()
        writes.append(timed(partial(push_zarr, cache.folder, str(cold), settings)).wall_s)
        reads.append(timed(partial(pull_any, str(cold), back, settings)).wall_s)
    size = sum(int(entry["size_bytes"]) for _, entry in cache.files())
    stored = sum(path.stat().st_size for path in cold.rglob("*") if path.is_file())
    tdz, by_zarr = one_sample(name, cache, cold)
    return {
        "values": name,
        "tdz MB": size / 1e6,
        "zarr MB": stored / 1e6,
        "left": stored / size,
        "write s": median(writes),
        "back s": median(reads),
        "sample us, tdz": tdz,
        "sample us, zarr": by_zarr,
    }


def one_sample(name: str, cache: Cache, cold: Path) -> tuple[float, float]:
    """Returns microseconds of one random sample's largest field: from the `.tdz`, and by zarr from its form."""
    field = FIELDS[name]
    group = zarr.open_group(cold, mode="r")
    of = cache.fields[field].group
    values, offsets = group[f"{of}/values/{field}"], np.asarray(group[f"{of}/offsets/{field}"][:])
    full = np.flatnonzero(np.diff(offsets))
    rows = full[np.random.default_rng(0).integers(0, len(full), 200)]
    shard_rows = np.asarray(group[f"{of}/shard_rows"][:])

    def by_tdz(row: int) -> Array:
        number = int(np.searchsorted(shard_rows, row, "right")) - 1
        return cache.shard(of, number).row(row - int(shard_rows[number]))[field].copy()

    def by_zarr(row: int) -> Array:
        return np.asarray(values[offsets[row] : offsets[row + 1]])

    times: dict[Callable[[int], Array], list[float]] = {by_tdz: [], by_zarr: []}
    for row in rows.tolist():
        found = []
        for read, taken in times.items():
            began = time.perf_counter()
            found.append(read(row))
            taken.append(1e6 * (time.perf_counter() - began))
        assert found[0].tobytes() == found[1].tobytes()
    return median(times[by_tdz]), median(times[by_zarr])


def in_bucket(name: str, cache: Cache, root: Path, bucket: Bucket, *, rounds: int) -> Row:
    """Returns what a push costs beside zstd alone and bare puts."""
    times: dict[str, list[float]] = {"zstd": [], "put": [], "push": []}
    size = 0
    for number in range(rounds):
        settings = RemoteConfig(endpoint=bucket.endpoint, shard_dir=str(root / "node"), max_concurrent=THREADS)
        place = f"{bucket.url}/{CONFIGS[name]}-{number}"
        times["push"].append(timed(partial(push_zarr, cache.folder, place, settings)).wall_s)
        prefix = place.removeprefix(f"{bucket.url}/")
        objects = {key: bucket.get(key) for key in bucket.names(prefix)}
        times["zstd"].append(_bare_zstd(cache))
        times["put"].append(_bare_puts(bucket, objects, f"bare-{number}"))
        size = sum(map(len, objects.values()))
        _clear(bucket)
    reference = [zstd + put for zstd, put in zip(times["zstd"], times["put"], strict=True)]
    longer = [max(zstd, put) for zstd, put in zip(times["zstd"], times["put"], strict=True)]
    return {
        "values": name,
        "MB": size / 1e6,
        "zstd s": median(times["zstd"]),
        "PUT s": median(times["put"]),
        "push s": median(times["push"]),
        "x reference": ratio(reference, times["push"]),
        "x longer one": ratio(longer, times["push"]),
    }


def _bare_zstd(cache: Cache) -> float:
    """Seconds of zstd alone, of all arrays: what is compressed is in memory already."""
    chunks = []
    for filled in arrays_of(cache):
        array = filled.array
        for index in range(array.num_shards):
            rows = filled.read(*array.rows(index))
            chunks.append([rows[start : start + array.chunk_rows] for start in range(0, len(rows), array.chunk_rows)])

    def compress(parts: list[Array]) -> None:
        zstd = Zstd(level=3, checksum=True)
        for part in parts:
            zstd.encode(np.ascontiguousarray(part))

    with ThreadPoolExecutor(THREADS) as threads:
        return timed(lambda: list(threads.map(compress, chunks))).wall_s


def _bare_puts(bucket: Bucket, objects: dict[str, bytes], prefix: str) -> float:
    """Seconds of obstore's puts alone, of the same bytes."""
    store = bucket.store()

    def put(pair: tuple[str, bytes]) -> None:
        obstore.put(store, f"{prefix}/{pair[0]}", pair[1], chunk_size=8 * 1024 * 1024, max_concurrency=4)

    with ThreadPoolExecutor(THREADS) as threads:
        return timed(lambda: list(threads.map(put, objects.items()))).wall_s


def _clear(bucket: Bucket) -> None:
    obstore.delete(bucket.store(), bucket.names())


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    megabytes, rounds = (4.0, 1) if options.tiny else (100.0, options.rounds or 3)
    BENCH_DATA.mkdir(exist_ok=True)
    found: dict[str, list[Row]] = {"codecs": [], "folder": [], "bucket": []}
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder, Beside() as beside:
        os.environ.update(server.environment(beside.server_endpoint, profiles=Path(folder)))
        bucket = Bucket(name=beside.make_bucket().name, endpoint=beside.server_endpoint)
        for name in CONFIGS:
            root = Path(folder) / CONFIGS[name]
            root.mkdir()
            cache = demo_cache(root, name, megabytes=megabytes)
            found["codecs"] += codecs(name, cache)
            found["folder"].append(in_folder(name, cache, root, rounds=rounds))
            found["bucket"].append(in_bucket(name, cache, root, bucket, rounds=rounds))
    show({"machine": machine("numpy", "zarr", "numcodecs", "obstore", "moto"), **found}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
