"""The index of a tar, kept: read back where it is current, made again where it is not."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.errors import BuildError, TarError
from forebay.store import files
from forebay.store.remote.raw.sources import identity, is_file, source_stat
from forebay.tar.json_index import json_path, load_json
from forebay.tar.members import FileStamp, Refused, TarIndex
from forebay.tar.scan import scan_tar

_log = logging.getLogger(__name__)
_METADATA = b"forebay.tar_index"
_VERSION = 1

_TICK_NS = 20_000_000
"""Change times move in ticks of the kernel's clock, 10 ms at most; two of them."""


def load_index(tar_path: str | os.PathLike[str], *, cache_root: str | os.PathLike[str]) -> TarIndex:
    """Returns the index of a tar: the kept one, else a current `<tar>.index.json`, else a scan, which is then kept.

    What is damaged or of another state of the tar is made again, never trusted. Under a root that cannot be written
    the scan is used without being kept. Raises TarError for a tar that cannot be indexed, BuildError for a full disk.
    """
    index = current_index(tar_path, cache_root=cache_root)
    if index is not None:
        return index
    started_ns = time.time_ns()
    index = scan_tar(tar_path)
    _keep(index, index_path(tar_path, cache_root=cache_root), started_ns)
    if index.refused:
        name, reason, offset = index.refused[0]
        _log.warning(
            "%s: %d members refused, first %r at offset %d: %s", tar_path, len(index.refused), name, offset, reason
        )
    return index


def current_index(tar_path: str | os.PathLike[str], *, cache_root: str | os.PathLike[str]) -> TarIndex | None:
    """Returns the kept or exported index of a tar's present state, or None where a scan is needed.

    Raises TarError for a tar that is absent.
    """
    index, is_settled = _kept(tar_path, cache_root)
    return index if index is not None and is_settled else load_json(tar_path)


def has_index(tar_path: str | os.PathLike[str], *, cache_root: str | os.PathLike[str]) -> bool:
    """Whether an index is kept or lies beside a tar; it may be of another state of the tar: nothing is read."""
    return index_path(tar_path, cache_root=cache_root).exists() or is_file(json_path(tar_path))


def is_indexed(tar_path: str | os.PathLike[str], *, cache_root: str | os.PathLike[str]) -> bool:
    """Whether a tar has an index, kept or exported; also one that a scan will replace since the tar is too young."""
    index, _ = _kept(tar_path, cache_root)
    return index is not None or load_json(tar_path) is not None


def _kept(tar_path: str | os.PathLike[str], cache_root: str | os.PathLike[str]) -> tuple[TarIndex | None, bool]:
    """Returns the kept index of a tar's present state, and whether the tar was old enough at its scan to trust it.

    As git does it: a file that changed in the tick in which it was read may change again in it and keep its times.
    """
    try:
        stamp = FileStamp.of_source(source_stat(tar_path))
    except OSError as err:
        raise TarError(f"cannot read tar {tar_path}: {err.strerror}; check the path and its permissions") from err
    except ValueError as err:  # a NUL in the path, or a surrogate that no file name holds
        raise TarError(f"cannot read tar {tar_path!r}: {err}; check the path") from err
    index, scanned_ns = _read(index_path(tar_path, cache_root=cache_root), os.fspath(tar_path))
    if index is None or index.stamp != stamp:
        return None, False
    return index, stamp.ctime_ns + _TICK_NS < scanned_ns


def index_path(tar_path: str | os.PathLike[str], *, cache_root: str | os.PathLike[str]) -> Path:
    """Returns where the index of a tar is kept: named by the hash of the tar's real path, or of its URL."""
    name = hashlib.sha256(os.fsencode(identity(tar_path))).hexdigest()[:32]
    return Path(cache_root) / "tar_index" / f"{name}.parquet"


def indexed_tar(path: Path) -> tuple[str | None, bool]:
    """Returns the tar that a kept index is of, None where it is not known from here; and whether that is still it.

    Only what the index says of itself is read. Raises TarError where it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        document = json.loads((pq.read_schema(path).metadata or {})[_METADATA])
        tar, stamp = str(document["path"]), FileStamp(*document["stamp"])
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as err:
        raise TarError(f"the index {path} is damaged ({err}); it is made again where it is needed") from err
    if index_path(tar, cache_root=path.parents[1]).name != path.name:
        return None, False
    try:
        return tar, FileStamp.of_source(source_stat(tar)) == stamp
    except (OSError, ValueError):
        return tar, False


def _keep(index: TarIndex, path: Path, started_ns: int) -> None:
    """Writes an index; the time of its scan goes in, so that a tar that changed in the same tick is scanned again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, _to_parquet(index, started_ns))
    except OSError as err:
        if err.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise BuildError(
                f"cannot keep the index of {index.path} at {path}: {err.strerror}; free space there, then run again"
            ) from err
        _log.warning(
            "the index of %s cannot be kept at %s (%s); it is made anew each time", index.path, path, err.strerror
        )


def _to_parquet(index: TarIndex, started_ns: int) -> memoryview:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(index), [None, pa.py_buffer(index.name_bounds), pa.py_buffer(index.name_bytes)]
    )
    table = pa.table({"name": names, "offset": index.offsets, "size": index.sizes})
    document = {
        "version": _VERSION,
        "path": os.fsencode(index.path).decode("utf-8", "backslashreplace"),
        "stamp": list(index.stamp),
        "scanned_ns": started_ns,
        "refused": [list(refused) for refused in index.refused],
        "xxh3": _checksum(index),
    }
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_METADATA: json.dumps(document)}), sink, compression="zstd")
    return sink.getbuffer()


def _read(path: Path, tar_path: str) -> tuple[TarIndex | None, int]:
    """Returns a kept index and when it was made, or None where there is none that can be believed."""
    if not path.exists():
        return None, 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        index, scanned_ns, checksum = _from_table(pq.read_table(path), tar_path)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as err:
        _log.warning("the index %s of %s is damaged (%s); it is made again", path, tar_path, err)
        return None, 0
    if checksum != _checksum(index):
        _log.warning(
            "the index %s of %s is damaged (its checksum is not %s); it is made again", path, tar_path, checksum
        )
        return None, 0
    return index, scanned_ns


def _from_table(table: Any, tar_path: str) -> tuple[TarIndex, int, str]:
    import pyarrow as pa

    document = json.loads((table.schema.metadata or {})[_METADATA])
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}, wanted {_VERSION}")
    names = table.column("name").combine_chunks().cast(pa.large_binary())
    _, bounds, values = names.buffers()
    index = TarIndex(
        path=tar_path,
        stamp=FileStamp(*document["stamp"]),
        name_bytes=np.frombuffer(values or b"", np.uint8),
        name_bounds=np.frombuffer(bounds or bytes(8), np.int64)[: len(names) + 1],
        offsets=table.column("offset").to_numpy(),
        sizes=table.column("size").to_numpy(),
        refused=tuple(Refused(*refused) for refused in document["refused"]),
    )
    return index, document["scanned_ns"], document["xxh3"]


def _checksum(index: TarIndex) -> str:
    """Returns the checksum of all that an index says; parquet's own covers pages, and only where it is asked for."""
    state = xxhash.xxh3_64()
    for array in (index.name_bounds, index.name_bytes, index.offsets, index.sizes):
        state.update(np.ascontiguousarray(array).tobytes())
    state.update(json.dumps([list(index.stamp), [list(refused) for refused in index.refused]]).encode("ascii"))
    return state.hexdigest()
