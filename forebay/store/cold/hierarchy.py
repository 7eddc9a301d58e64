"""The zarr hierarchy of a cache: its arrays, where their values come from, and its zarr.json documents."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.store.cache import Cache
from forebay.store.cold.arrays import CHUNK_BYTES, ROOT, SHARD_BYTES, ColdArray, Mark, cold_array, zarr
from forebay.store.cold.strips import GroupStrips
from forebay.store.held import HeldFile
from forebay.store.layout import ROW_BITS, ROW_MASK, TEXT, Array, Group
from forebay.store.metadata import FILE_NAME
from forebay.store.remote.carry.transfer import metadata_bytes
from forebay.store.shard import shard_fields, to_table

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of fields and files that are names of arrays too."""
_MAX_SHOWN = 1 << 20
"""Bytes of a metadata.json that the root has among its attributes; the array files/metadata.json always has it."""
_MAX_CHUNK = 1 << 28
"""Values of a chunk of a foreign form, in bytes: they are in memory at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """An array and its values. read: gives rows. shards: the shards of `strips` that have some of these rows."""

    array: ColdArray
    read: Callable[[int, int], Array]
    strips: GroupStrips | None = None
    shards: Callable[[int, int], Sequence[int]] = lambda _start, _stop: ()


def mark_of_cache(cache: Cache, *, level: int) -> Mark:
    """Returns the mark of the cold form of a cache."""
    return Mark(
        key=cache.key,
        metadata=xxhash.xxh3_128_hexdigest(metadata_bytes(cache)),
        level=level,
        chunk_bytes=CHUNK_BYTES,
        shard_bytes=SHARD_BYTES,
    )


def arrays_of(cache: Cache) -> list[Filled]:
    """Returns all arrays of a cache's cold form. Raises CacheCorruptError for names that none of forebay's has."""
    found = [*_files(cache), *_samples(cache)]
    for group in cache.groups:
        fields = shard_fields(tuple(cache.fields.values()), group)
        table = to_table([entry for _, entry in cache.shard_entries(group)], len(fields))
        strips = GroupStrips(cache.folder, group, fields, table)
        for strip in strips.strips:
            read = partial(strips.read, strip)
            found.append(Filled(array=strip.array, read=read, strips=strips, shards=strip.shards))
        found.append(_in_memory(*strips.shard_rows))
    for filled in found:
        if not all(_NAME.fullmatch(part) for part in filled.array.path.split("/")):
            raise CacheCorruptError(
                f"{cache.folder}: {filled.array.path!r} is no name that a field or a file of a cache has; run: forebay "
                "preprocess CONFIG --rebuild"
            )
    return found


def _files(cache: Cache) -> list[Filled]:
    """The files beside the shards, byte for byte."""
    found = [_in_memory(file_array(FILE_NAME, len(data := metadata_bytes(cache))), np.frombuffer(data, np.uint8))]
    for file, entry in cache.files():
        if "/" not in file.place:
            array = file_array(file.place, int(entry["size_bytes"]))
            found.append(Filled(array=array, read=partial(_read_file, file)))
    return found


def _read_file(file: HeldFile, start: int, stop: int) -> Array:
    with file.open() as opened:
        opened.seek(start)
        return np.frombuffer(opened.read(stop - start), np.uint8)


def file_array(name: str, size_bytes: int) -> ColdArray:
    """Returns the array of a file that stands beside the shards."""
    return cold_array(f"files/{name}", "uint8", (size_bytes,), (f"{name}_byte",), content=f"the file {name}")


def _samples(cache: Cache) -> list[Filled]:
    """The table by which a reader without forebay finds a sample: its shard, its row in the arrays, and its lengths."""
    slots = cache.slots

    def shards(start: int, stop: int) -> Array:
        return (slots[start:stop] >> ROW_BITS).astype("<i4")

    found = [
        Filled(array=_of_samples("row", "int64", cache), read=_rows(cache, TEXT, slots)),
        Filled(array=_of_samples("shard", "int32", cache), read=shards),
    ]
    for group in cache.listed:
        items = cache.items(group)
        listed = cold_array(f"items/{group}_row", "int64", (len(items.slots),), (f"{group}_item",))
        found.append(Filled(array=listed, read=_rows(cache, group, items.slots)))
        found.append(_in_memory(_of_samples(f"{group}_first", "int64", cache), items.offsets[:-1]))
    return found + [_in_memory(_of_samples(name, "int32", cache), values) for name, values in cache.lengths.items()]


def _rows(cache: Cache, group: Group, slots: Array) -> Callable[[int, int], Array]:
    """Returns what gives the rows, in the arrays of a group, of these slots."""
    counts = np.array([entry.rows for _, entry in cache.shard_entries(group)], np.int64)
    starts = np.cumsum(counts) - counts
    return lambda start, stop: np.asarray(starts[slots[start:stop] >> ROW_BITS] + (slots[start:stop] & ROW_MASK))


def _of_samples(name: str, dtype: str, cache: Cache) -> ColdArray:
    return cold_array(f"samples/{name}", dtype, (len(cache),), ("sample",))


def _in_memory(array: ColdArray, values: Array) -> Filled:
    return Filled(array=array, read=lambda start, stop: values[start:stop])


def documents(arrays: Sequence[ColdArray], mark: Mark, metadata: bytes) -> dict[str, bytes]:
    """Returns every zarr.json of a hierarchy by its name, the root's last, with all of them inside (consolidated)."""
    memory: dict[str, Any] = {}
    store = zarr().storage.MemoryStore(memory)
    about: dict[str, Any] = mark.to_json()
    if len(metadata) <= _MAX_SHOWN:
        about["metadata"] = json.loads(metadata)
    root = zarr().create_group(store, attributes=about)
    for path in sorted({str(parent) for array in arrays for parent in PurePosixPath(array.path).parents} - {"."}):
        root.create_group(path, attributes=mark.to_json() if path == "files" else {})
    for array in arrays:
        _create(root, array, level=mark.level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns that other readers may pass over what they do not know
        zarr().consolidate_metadata(store)
    texts = {name: document.to_bytes() for name, document in memory.items()}
    return {name: texts[name] for name in sorted(texts, key=lambda name: (name == ROOT, name))}


def _create(root: Any, array: ColdArray, *, level: int) -> None:
    rest = tuple(max(1, axis) for axis in array.shape[1:])
    root.create_array(
        array.path,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(array.chunk_rows, *rest),
        shards=(array.shard_rows, *rest),
        compressors=[zarr().codecs.ZstdCodec(level=level, checksum=True)],
        fill_value=0,
        dimension_names=array.dimensions,
        attributes=dict(array.attributes),
    )


def written_as(array: ColdArray, documents: Mapping[str, Any], where: object) -> ColdArray:
    """Returns the array as a cold form has cut it.

    documents: of all arrays by path, from the root's document. Raises CacheMismatchError where the array is not there,
    of another shape or in another code than forebay writes.
    """
    try:
        document = documents[array.path]
        (codec,) = document["codecs"]
        inner = codec["configuration"]
        names = [one["name"] for one in inner["codecs"]]
        chunk_rows, shard_rows = inner["chunk_shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
        found = (codec["name"], names, inner.get("index_location", "end"), tuple(document["shape"]))
        dtype = np.dtype(document["data_type"]).newbyteorder("<")
        is_cut = 0 < chunk_rows <= shard_rows and shard_rows % chunk_rows == 0
        is_cut = is_cut and (chunk_rows == 1 or chunk_rows * array.row_bytes <= _MAX_CHUNK)
    except (LookupError, TypeError, ValueError) as err:
        raise CacheMismatchError(f"{where}: {array.path} is missing, or none that forebay writes: {err!r:.80}") from err
    wanted = ("sharding_indexed", ["bytes", "zstd"], "end", array.shape)
    if found != wanted or dtype != array.dtype or not is_cut:
        raise CacheMismatchError(
            f"{where}: {array.path} is {dtype} {found}, the cache's metadata wants {array.dtype} {wanted}; push the "
            "cache again to another URL"
        )
    return ColdArray(
        path=array.path,
        dtype=array.dtype,
        shape=array.shape,
        dimensions=array.dimensions,
        chunk_rows=chunk_rows,
        chunks=shard_rows // chunk_rows,
    )
