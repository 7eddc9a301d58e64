"""A store as a node knows it by small files: the caches of a root, columns of all samples, shards without large values.

`columns.bin` lies beside the metadata.json of a cache in a store. It tells the ids' digest and the columns with few
values of all samples, so that no shard is downloaded for them. It is one object, which is no file of the cache: without
it, or where it is damaged, the shards are asked.

A shard of a store can be a file of this machine with everything in it but its large values: those are holes. What a
seal asks of a shard (which rows failed, ids, languages, lengths) is a few kilobytes beside the recordings. The columns
that are read are compared with their CRC-32 as ever; a column that lies in a hole never is what was sealed.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.config.tree import Config, stand_in
from forebay.errors import RemoteDeniedError, RemoteError, RemoteMissingError
from forebay.store.files import TEMPORARY_MARK, require_writable, write_all, write_bytes
from forebay.store.held import ORIGIN
from forebay.store.layout import Array, FieldSpec, sorted_categories
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.bucket.bucket import Bucket, find_bytes
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.node import WantedFile
from forebay.store.shard import ShardEntry

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)
LISTED = ".listed"
"""Under the folder that stands for a root: metadata.json of each cache below the URL, by the names of their folders."""
_KEYED = re.compile(r"-([0-9a-f]{16})(?:\.\w+)?\Z")
"""The end of the name that forebay gives a cache: its key, and a codec."""


class RemoteRoot:
    """The caches below a URL. folder: what stands for the root on this node; it says so itself, see `of`."""

    def __init__(self, url: Url, settings: RemoteConfig, folder: Path) -> None:
        """Asks nothing yet."""
        self.url, self.settings, self.folder = url, settings, folder

    @classmethod
    def at(cls, url: Url, settings: RemoteConfig) -> RemoteRoot:
        """Returns the root of a URL, with its folder on this node."""
        return cls(url, settings, stand_in(str(url), settings))

    @classmethod
    def of_config(cls, config: Config) -> RemoteRoot | None:
        """Returns the root of a config, None where it is a folder of this machine."""
        return None if config.remote_root is None else cls.at(parse_url(config.remote_root), config.remote)

    @classmethod
    def of(cls, folder: Path) -> RemoteRoot | None:
        """Returns the root that a folder of this node stands for, None where it is a root itself."""
        try:
            document = json.loads((folder / ORIGIN).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(parse_url(document["url"]), RemoteConfig(**document["remote"]), folder)

    @cached_property
    def bucket(self) -> Bucket:
        """Where it lies."""
        return Bucket(self.url, self.settings)

    def prepare(self) -> None:
        """Makes the folder on this node, which then says what it stands for. Raises BuildError where it cannot."""
        require_writable(self.folder, setting="remote.shard_dir")
        data = json.dumps({"url": str(self.url), "remote": asdict(self.settings)}, indent=1).encode()
        path = self.folder / ORIGIN
        if not path.is_file() or path.read_bytes() != data:
            write_bytes(path, data)

    def caches(self) -> Iterator[tuple[Url, Path]]:
        """Yields the URL of each sealed cache, and a folder with its metadata.json, in the order of their names.

        What is known of a folder whose name carries the key is not asked for again, so a known root costs one listing.
        A store that does not answer leaves what is known; RemoteError where nothing is.
        """
        self.prepare()
        names = self._names()
        with ThreadPoolExecutor(self.settings.max_concurrent) as threads:
            for name, folder in zip(names, threads.map(self._kept, names), strict=True):
                if folder is not None:
                    yield self.url / name, folder

    def _names(self) -> list[str]:
        try:
            return [name for name in self.bucket.level()[1] if _is_name(name)]
        except RemoteError as err:
            known = sorted(path.name for path in (self.folder / LISTED).glob("*") if _is_certain(path))
            if known and not isinstance(err, (RemoteMissingError, RemoteDeniedError)):
                logger.warning("%s; going on with what this node knows of %s", err, self.url)
                return known
            raise type(err)(
                f"the cache root {self.url} cannot be listed: {err}; check its name, the credentials of the "
                "environment or the profile, and remote.endpoint, or give a folder of this machine: --cache-root DIR",
                code=err.code,
            ) from err

    def _kept(self, name: str) -> Path | None:
        """Returns the folder with the metadata.json of a cache, which is asked for if need be; None: it is unsealed."""
        folder = self.folder / LISTED / name
        if not _is_certain(folder):
            if (data := find_bytes(self.bucket, f"{name}/{METADATA}")) is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / METADATA, data)
        return folder


def _is_name(name: str) -> bool:
    return name.isprintable() and not name.startswith(".") and TEMPORARY_MARK not in name and "/" not in name


def _is_certain(folder: Path) -> bool:
    """Whether what is kept of a cache holds for good: the name of its folder carries the key that is kept."""
    named = _KEYED.search(folder.name)
    try:
        kept = json.loads((folder / METADATA).read_bytes())
        return named is not None and str(kept["key"]).startswith(named[1])
    except (OSError, ValueError, KeyError, TypeError):
        return False


NAME = "columns.bin"
"""Beside metadata.json, in a store and in its mirror: a checksum and a parquet file."""
MAX_VALUES = 1 << 16
"""Different values of a column that is told; ids and texts have more."""
_CHECKSUM_BYTES = 16
_ABOUT = b"forebay"


@dataclass(frozen=True, kw_only=True)
class ToldColumns:
    """ids_digest: of the samples' ids in their order. table: a row a sample, of text columns with few values."""

    ids_digest: str
    table: pa.Table

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a column, sorted, and which one each sample has; None: it is not told."""
        if name not in self.table.column_names:
            return None
        column = self.table.column(name).combine_chunks().dictionary_encode()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())


def dump_columns(key: str, ids_digest: str, columns: dict[str, tuple[list[str], Array]]) -> bytes:
    """Returns the object of a cache. columns: as `categories` gives them; those of many values are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(values, pa.string()))
        for name, (values, codes) in columns.items()
        if len(values) <= MAX_VALUES
    }
    about = json.dumps({"key": key, "ids_digest": ids_digest}).encode("ascii")
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays).replace_schema_metadata({_ABOUT: about}), buffer, compression="zstd")
    body = buffer.getvalue()
    return xxhash.xxh3_128_digest(body) + body


def parse_columns(data: bytes, *, key: str, num_samples: int) -> ToldColumns:
    """Returns what an object tells of the cache of a key. Raises ValueError where it is damaged or of another one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    body = data[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        raise ValueError("its checksum is another one than that of its bytes")
    try:
        table = pq.read_table(io.BytesIO(body))
        about = json.loads((table.schema.metadata or {})[_ABOUT])
        found, ids_digest = str(about["key"]), str(about["ids_digest"])
    except (pa.ArrowException, LookupError, TypeError) as err:
        raise ValueError(f"it is not what a push writes: {err!r}") from err
    if found != key or (table.num_columns and table.num_rows != num_samples):
        raise ValueError(f"it is of {table.num_rows} samples of the cache {found}, wanted {num_samples} of {key}")
    return ToldColumns(ids_digest=ids_digest, table=table)


def told_columns(mirror: Mirror, *, key: str, num_samples: int) -> ToldColumns | None:
    """Returns what the store tells of a cache, which this node then keeps; None where it tells nothing."""
    path = mirror.folder / NAME
    try:
        data = path.read_bytes() if path.is_file() else mirror.bucket.read(NAME)
        told = parse_columns(data, key=key, num_samples=num_samples)
    except RemoteMissingError:
        return None
    except (RemoteError, ValueError) as err:
        logger.warning("%s/%s is left out, and every shard is asked instead: %s", mirror.url, NAME, err)
        path.unlink(missing_ok=True)
        return None
    mirror.node.keep(path, WantedFile(name=NAME, size_bytes=len(data), is_kept=True), data)
    return told


_GAP_BYTES = 256 * 1024
"""A smaller hole is downloaded: a request more takes as long as so many bytes."""
Range = tuple[int, int]
"""First byte, and the one after the last."""


def skeleton_ranges(entry: ShardEntry, fields: Sequence[FieldSpec], *, kept: Collection[str]) -> list[Range]:
    """Returns the ranges of a shard's file that hold all but the values of its tensor fields.

    fields: of the shard, as `shard_fields` gives them. kept: tensor fields whose values are wanted too.
    """
    holes = []
    for field, (start, count, _) in zip(fields, entry.spans, strict=True):
        size = count * math.prod(field.shape) * field.numpy_dtype.itemsize
        if field.role == "tensor" and field.name not in kept and size >= _GAP_BYTES:
            holes.append((start, start + size))
    ranges, at = [], 0
    for start, stop in sorted(holes):
        ranges.append((at, start))
        at = stop
    return [*ranges, (at, entry.size_bytes)]


def fetch_skeleton(bucket: Bucket, name: str, path: Path, ranges: Sequence[Range], *, etag: str) -> int:
    """Makes a file of these ranges of an object, the last to its end, with holes elsewhere; returns the bytes read.

    etag: of the version that is wanted. Raises RemoteMissingError, RemoteReplacedError, RemoteError.
    """
    with open(path, "wb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            write_all(file, bucket.read_range(name, start, stop, etag=etag))
        file.truncate(ranges[-1][1])
    return sum(stop - start for start, stop in ranges)
