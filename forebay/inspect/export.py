"""`forebay export`: a sealed cache as files of another form, written once, whole or to be gone on with.

parquet: a row a sample, every table field and every tensor; a row group is a run of samples of one shard.
webdataset: tars whose members of one name, up to its first dot, are a sample.
zarr: a whole cache as a zarr v3 hierarchy, which is also what `forebay cache push --form zarr` makes.
"""

from __future__ import annotations

import io
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from forebay.errors import CacheCorruptError, ConfigError
from forebay.store.by_hand import pcm16_wav
from forebay.store.cache import Cache
from forebay.store.cold.push import write_zarr
from forebay.store.files import write_aside
from forebay.store.image.stored_items import StoredItems, stored_items
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, FieldSpec, Group, Ints
from forebay.store.metadata import foreign_values
from forebay.store.open_shards import no_such_row
from forebay.store.output import Entry, Filling, Summed, filling
from forebay.store.remote.carry.tally import TransferReport
from forebay.store.row_table import SampleColumns, rate_of, row_columns, row_table
from forebay.store.selection import Filter
from forebay.store.shard import Shard
from forebay.tar.header import TarWriter, member_key, member_size
from forebay.terminal import Progress
from forebay.visible import from_here, human_bytes

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ShardRun:
    """Consecutive samples of one shard. start: the place of the first among those that are exported.

    indices: int64, in the cache. table: their rows, as in `cache.samples`.
    """

    start: int
    indices: Ints
    table: pa.Table


@dataclass(frozen=True)
class ExportedSamples:
    """The samples of a cache that are exported. indices: int64, rising."""

    cache: Cache
    indices: Ints

    def __len__(self) -> int:
        return len(self.indices)

    def runs(self, start: int) -> Iterator[ShardRun]:
        """Yields the samples from a place on, in runs of one shard."""
        numbers = self.cache.shards_of(self.indices[start:])
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
        for first, stop in itertools.pairwise(edges):
            indices = self.indices[start + first : start + stop]
            yield ShardRun(start=start + first, indices=indices, table=self._table(indices, int(numbers[first])))

    @cached_property
    def _stored(self) -> Mapping[Group, StoredItems]:
        return stored_items(self.cache.metadata, folder=self.cache.folder)

    @cached_property
    def tensors(self) -> list[FieldSpec]:
        """The fields of `read` in their order; `patches` of images are those of each image."""
        own = [s for s in self.cache.fields.values() if s.role == "tensor" and s.group not in self._stored]
        return own + [spec for stored in self._stored.values() for spec in stored.columns()]

    def read(self, index: int) -> dict[str, Any]:
        """Returns the fields of a sample; of images as their processor gives them one array a field."""
        sample = self.cache.read(index)
        for stored in self._stored.values():
            sample = stored.in_columns(sample)
        return sample

    def about(self) -> dict[str, Any]:
        """Returns what an export says of the cache: its keys, how its samples were made, what its fields are."""
        cache = self.cache
        fields = {spec.name: {"dtype": spec.dtype, "shape": ["n", *spec.shape]} for spec in self.tensors}
        return {
            "key": cache.key,
            "recipe_key": cache.recipe_key,
            "recipe": cache.metadata["recipe"],
            "constants": dict(cache.constants),
            "fields": fields,
            "num_samples": len(self),
        }

    def _table(self, indices: Ints, number: int) -> pa.Table:
        cache = self.cache

        def shard(group: Group, _: int) -> Shard:
            return cache.shard(group, number)

        columns = SampleColumns(
            fields={s.name: s for s in cache.fields.values() if s.role == "table" and s.group not in self._stored},
            num_shards=1,
            slots=cache.slots[indices] & ROW_MASK,
            shard=shard,
            no_such_row=lambda index, slot: no_such_row(cache.folder, int(indices[index]), number << ROW_BITS | slot),
        )
        lengths = dict(cache.lengths)
        rate_hz = rate_of(cache.folder, cache.constants, lengths) if "num_audio_samples" in lengths else None
        taken = {name: values[indices] for name, values in lengths.items()}
        return row_table(row_columns(columns, taken, rate_hz=rate_hz)).set_column(0, "index", pa.array(indices))


def selected(
    cache: Cache, *, ids: Path | None, max_samples: int | None, filter_: Filter | None = None
) -> ExportedSamples:
    """Returns the first `max_samples` samples of a cache, of those whose ids stand in a file if there is one.

    ids: an id a line, UTF-8, in any order. filter_: leaves some of the cache. Raises ConfigError for an id that is not
    there then, and where no sample is left.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"--max-samples {max_samples}: wanted 1 or more")
    kept = np.arange(len(cache)) if filter_ is None else filter_.choose(cache, name=cache.place).places
    indices = (kept if ids is None else _of_ids(cache, ids, kept))[:max_samples]
    if not len(indices):
        raise ConfigError(f"{cache.place} has no samples, so there is nothing to export; name another cache")
    return ExportedSamples(cache, indices)


def _of_ids(cache: Cache, path: Path, kept: Ints) -> Ints:
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as err:
        raise ConfigError(f"--ids {path}: {err.strerror}; name a file with an id a line", code="FB114") from err
    # Not `splitlines`: an id may hold what Unicode calls a line end.
    wanted = {line.removesuffix("\r") for line in text.split("\n")} - {""}
    if not wanted:
        raise ConfigError(f"--ids {path} names no id; write an id a line", code="FB114")
    found = np.array([i for i in kept.tolist() if cache.sample_id(i) in wanted], np.int64)
    if len(found) < len(wanted):
        absent = sorted(wanted - {cache.sample_id(i) for i in found.tolist()})
        shown = ", ".join(map(repr, absent[:_SHOWN])) + (", ..." if len(absent) > _SHOWN else "")
        raise ConfigError(
            f"--ids {path}: {cache.place} has no sample with {len(absent)} of its {len(wanted)} ids ({shown}); every "
            f"id: forebay inspect {cache.place} --export FILE.parquet",
            code="FB114",
        )
    return found


ABOUT = b"forebay"
"""The key of the schema's metadata under which our own stands, as JSON."""
_GROUP_BYTES = 64 * 1024 * 1024
"""A row group holds no more values than this, or one sample. A writer has about eight times as much in memory."""


def write_parquet(samples: ExportedSamples, start: int, file: Summed, *, max_bytes: int) -> Generator[int]:
    """Writes samples from a place on, until the file has `max_bytes` after a row group; yields where it stands.

    A tensor [n] is a list, a tensor [n, k] a list of fixed-size lists; `patches` of images are such a list an image.
    float16 is halffloat. The schema's metadata hold `ExportedSamples.about` as JSON under `forebay`.
    """
    writer = None
    try:
        for at, table in _groups(samples, start, max_bytes=min(max_bytes, _GROUP_BYTES)):
            if writer is None:
                writer = _opened(file, table.schema.with_metadata({ABOUT: json.dumps(samples.about())}))
            writer.write_table(table.cast(writer.schema), row_group_size=len(table))
            yield at
            if file.size_bytes >= max_bytes:
                return
    finally:
        if writer is not None:
            writer.close()


def _opened(file: Summed, schema: pa.Schema) -> pq.ParquetWriter:
    # A dictionary of floats only costs time, and so do the largest and smallest value of a tensor.
    plain = [field.name for field in schema if not pa.types.is_list(field.type)]
    texts = [name for name in plain if pa.types.is_large_string(schema.field(name).type)]
    return pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=texts, write_statistics=plain)


def _groups(samples: ExportedSamples, start: int, *, max_bytes: int) -> Iterator[tuple[int, pa.Table]]:
    """Yields a table for each row group, and where the samples behind its last begin."""
    specs = samples.tensors
    for run in samples.runs(start):
        first, held, size = 0, [], 0
        for place, index in enumerate(run.indices.tolist()):
            values = samples.read(index)
            held.append(values)
            size += sum(_size(values[spec.name]) for spec in specs)
            if size >= max_bytes or place + 1 == len(run.indices):
                table = run.table.slice(first, len(held))
                for spec in specs:
                    table = table.append_column(spec.name, _column(spec, [each[spec.name] for each in held]))
                yield run.start + place + 1, table
                first, held, size = place + 1, [], 0


def _size(values: Any) -> int:
    return sum(each.nbytes for each in values) if isinstance(values, tuple) else int(values.nbytes)


def _column(spec: FieldSpec, values: Sequence[Any]) -> pa.Array:
    if isinstance(values[0], tuple):
        return _lists(list(map(len, values)), _tensors(spec, [image for of_sample in values for image in of_sample]))
    return _tensors(spec, values)


def _tensors(spec: FieldSpec, values: Sequence[Array]) -> pa.Array:
    flat = np.concatenate([np.zeros((0, *spec.shape), spec.numpy_dtype), *values])
    made = pa.array(flat.reshape(-1))
    for size in reversed(spec.shape):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return _lists(list(map(len, values)), made)


def _lists(lengths: Sequence[int], values: pa.Array) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


_ROWS = 256
"""Rows of the table that are Python objects at once."""


def write_webdataset(samples: ExportedSamples, start: int, file: Summed, *, max_bytes: int) -> Generator[int]:
    """Writes samples from a place on, as long as the tar stays within `max_bytes`; yields where it stands.

    A sample is `{key}.json` (its row of the table, with its id as `id`), `{key}.{field}.npy` for each tensor, and
    `{key}.wav` for an int16 waveform; `patches` of images are `{key}.patches.{number}.npy`, one an image. The key is
    `member_key` of the id. A sample that is larger than `max_bytes` has a tar of its own.
    """
    tar = TarWriter(file)
    for run in samples.runs(start):
        for first in range(0, len(run.indices), _ROWS):
            rows = run.table.slice(first, _ROWS).to_pylist()
            for place, row in enumerate(rows, run.start + first):
                members = _members(samples, row)
                size = sum(member_size(name, len(data)) for name, data in members.items())
                if tar.size_bytes and tar.size_bytes + size > max_bytes:
                    tar.close()
                    return
                for name, data in members.items():
                    tar.add(name, data)
                yield place + 1
    tar.close()


def _members(samples: ExportedSamples, row: Mapping[str, Any]) -> dict[str, bytes]:
    cache, index = samples.cache, row["index"]
    key = member_key(cache.sample_id(index))
    values = cache.read(index)
    fields = {"id": row["sample_id"], **{name: value for name, value in row.items() if name != "sample_id"}}
    members = {f"{key}.json": json.dumps(fields).encode("ascii")}
    for spec in samples.tensors:
        if spec.name not in values:  # a shape, which the array of an image says itself
            continue
        value = values[spec.name]
        if isinstance(value, tuple):
            name = member_key(spec.name)
            members |= {f"{key}.{name}.{number}.npy": _npy(image) for number, image in enumerate(value)}
        elif spec.name == "waveform" and spec.dtype == "int16":
            members[f"{key}.wav"] = pcm16_wav(value, cache.constants["sample_rate_hz"])
        else:
            members[f"{key}.{member_key(spec.name)}.npy"] = _npy(value)
    return members


def _npy(value: Array) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(value), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


DOCUMENT = "_export.json"
"""The file that is written last and says that an export is whole. Readers of a folder of parquet pass over `_`."""
_FORMAT = 1
"""Moves when the same cache gives other bytes."""
_MB, _SIZE_MB = 1_000_000, 1000

_FORMS: Mapping[str, tuple[str, Callable[..., Generator[int]]]] = {
    "parquet": ("parquet", write_parquet),
    "webdataset": ("tar", write_webdataset),
}
"""Extension and writer by form. A writer yields the place behind the samples that it has written so far."""

FORMS = tuple(sorted(_FORMS))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export. shard_size_mb: about how large a file becomes, 1000 where it is left out. ids, max_samples: which
    samples, see `selected`; filter: that of a config, which leaves some of them."""

    form: str
    out: Path
    shard_size_mb: int | None = None
    ids: Path | None = None
    max_samples: int | None = None
    filter: Filter | None = None
    progress: bool = True

    @property
    def size_mb(self) -> int:
        """The size of a file, roughly."""
        return _SIZE_MB if self.shard_size_mb is None else self.shard_size_mb


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The report of an export; its fields are those of its JSON document. files_kept: whole ones of an earlier run."""

    form: str
    folder: str
    cache: str
    key: str
    num_samples: int
    num_files: int
    files_kept: int
    size_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yields what `forebay export` prints."""
        kept = f", {self.files_kept} of them were there" if self.files_kept else ""
        yield (
            f"{self.form}: {self.num_samples} samples in {self.num_files} files{kept}, {human_bytes(self.size_bytes)}, "
            f"{self.seconds:.1f} s: {from_here(self.folder)}"
        )


def export(cache: Cache, options: ExportOptions) -> ExportReport:
    """Makes a folder hold the samples of a cache as files, and returns what was done.

    A new file is begun where one has `shard_size_mb`. What is whole is kept: interrupted, the same call goes on.
    Raises ConfigError for samples that the cache does not have, and for a folder that holds anything else.
    """
    started_s = time.monotonic()
    _check(cache, options)
    samples = selected(cache, ids=options.ids, max_samples=options.max_samples, filter_=options.filter)
    with filling(options.out, DOCUMENT, identity=_identity(samples, options), option="--out") as folder:
        whole = folder.document
        kept = list(folder.finished) if whole is None else whole["files"]
        if whole is None:
            with foreign_values(cache.folder):
                _fill(folder, samples, options)
                folder.seal({"about": samples.about(), "files": folder.finished})
    files = folder.finished if whole is None else kept
    return ExportReport(
        form=options.form,
        folder=str(options.out),
        cache=cache.place,
        key=cache.key,
        num_samples=len(samples),
        num_files=len(files),
        files_kept=len(kept),
        size_bytes=sum(entry["size_bytes"] for entry in files),
        seconds=time.monotonic() - started_s,
    )


def _check(cache: Cache, options: ExportOptions) -> None:
    if options.form not in _FORMS:
        raise ConfigError(f"--form {options.form}: wanted one of {', '.join(FORMS)}")
    if options.size_mb < 1:
        raise ConfigError(f"--shard-size-mb {options.size_mb}: wanted 1 or more")
    require_outside(options.out, cache)


def require_outside(out: Path, cache: Cache) -> None:
    """Raises ConfigError for a folder inside a cache."""
    if out.resolve().is_relative_to(cache.folder.resolve()):
        raise ConfigError(f"--out {out} lies inside the cache {cache.folder}, which is sealed; name a folder elsewhere")


def _identity(samples: ExportedSamples, options: ExportOptions) -> dict[str, Any]:
    chosen = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(samples.indices, "<i8").data)
    return {
        "format": _FORMAT,
        "form": options.form,
        "key": samples.cache.key,
        "num_samples": len(samples),
        "samples": chosen,
        "shard_size_mb": options.size_mb,
    }


def _fill(folder: Filling, samples: ExportedSamples, options: ExportOptions) -> None:
    """Writes every file that is not there; each begins where the one before it ended."""
    known = {entry["start"]: entry for entry in folder.finished}
    folder.finished.clear()
    start = 0
    with Progress(len(samples), unit="sample", desc="export", is_shown=options.progress) as bar:
        while start < len(samples):
            entry = known.get(start)
            if entry is None:
                entry = _written(folder, samples, options, start, bar)
                folder.add(entry)
            else:
                folder.finished.append(entry)
                bar.update(entry["stop"] - start)
            start = entry["stop"]


def _written(folder: Filling, samples: ExportedSamples, options: ExportOptions, start: int, bar: Progress) -> Entry:
    extension, write = _FORMS[options.form]
    metadata = samples.cache.metadata
    stem = "-".join(member_key(str(metadata[name])) for name in ("name", "split") if metadata.get(name))
    name = f"{stem}-{len(folder.finished):06d}.{extension}"
    stop = start
    with write_aside(folder.folder / name) as raw:
        file = Summed(raw)
        with closing(write(samples, start, file, max_bytes=options.size_mb * _MB)) as writing:
            for at in writing:
                bar.update(at - stop)
                stop = at
    if stop == start:
        raise CacheCorruptError(f"{samples.cache.place}: nothing could be written from sample {start} on")
    return {"name": name, "start": start, "stop": stop, **file.sums()}


def export_zarr(cache: Cache, options: ExportOptions) -> TransferReport:
    """Makes a folder the cold form of a cache, and returns what that took; interrupted, it goes on.

    `forebay cache pull` makes the very cache of it again, so it is always all of its samples. Raises ConfigError for
    options that choose some of them or the size of files, and what `write_zarr` raises.
    """
    given = {"--ids": options.ids, "--max-samples": options.max_samples, "--shard-size-mb": options.shard_size_mb}
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{named[0]} does not go with --form zarr, which is of a whole cache; to export some of its samples: "
            f"forebay cache subset {cache.place} --ids FILE --out DIR, then export that"
        )
    require_outside(options.out, cache)
    return write_zarr(cache, options.out, progress=options.progress)
