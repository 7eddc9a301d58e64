"""The index of a tar, kept: read back where it is current, made again where it is not.

Other tools keep `<tar>.index.json`, `{member: {"offset": ..., "size": ...}}`. The index.json of an evaluation set says
what its tars hold; they hold nothing but files of plain names.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.errors import BuildError, TarError
from forebay.store import files
from forebay.store.layout import TAR_INDEX
from forebay.store.remote.carry.fetch_list import problem_of
from forebay.store.remote.raw.raw_sources import (
    at_hand,
    is_file,
    kept_path,
    modified_ns,
    open_source,
    place_of,
    put_beside,
    reader,
    source_stat,
)
from forebay.tar.header import (
    BLOCK,
    CURRENT_DIRECTORY,
    SIZE_FIELD,
    FileStamp,
    RefusedHeader,
    TarIndex,
    header_name,
    parse_number,
    valid_headers,
)
from forebay.tar.scan import scan_tar
from forebay.visible import an

_SPOT_CHECKS = 16
_MAX_OCTAL_SIZE = 8**11 - 1


def json_path(tar_path: str | os.PathLike[str]) -> Path:
    """Returns where other tools look for the index of a tar: beside it."""
    return Path(f"{os.fspath(tar_path)}.index.json")


def export_json(index: TarIndex, path: str | os.PathLike[str]) -> None:
    """Writes `{member: {"offset", "size"}}` in archive order; of members with one name the last stands there.

    Refused members are left out. The file appears complete or not at all. Of a tar of a store it is put there.
    """
    offsets, sizes = index.offsets.tolist(), index.sizes.tolist()
    document = {name: {"offset": offsets[row], "size": sizes[row]} for name, row in index.rows.items()}
    put_beside(Path(path), json.dumps(document).encode("ascii"))


def load_json(tar_path: str | os.PathLike[str]) -> TarIndex | None:
    """Returns the index that stands beside a tar, or None where there is none that is current and true.

    Current: not older than the tar; in a store, where the time is that of the upload, that says nothing. True: every
    range lies within the tar, and 16 members spread over the file stand behind a header of that name and size. Raises
    TarError where the tar itself cannot be read.
    """
    path = json_path(tar_path)
    try:
        changed_ns = modified_ns(path)
    except (OSError, ValueError):
        return None
    try:
        if place_of(tar_path) is None and changed_ns < modified_ns(tar_path):
            _log.info("%s is older than its tar; reading the tar's headers instead", path)
            return None
        index = _parse(path, os.fspath(tar_path), FileStamp.of_source(source_stat(tar_path)))
        problem = _problem(index)
    except _JsonError as err:
        problem = str(err)
    except OSError as err:
        raise TarError(f"cannot read tar {tar_path}: {err.strerror}; check the path and its permissions") from err
    if problem:
        _log.warning("%s is not used: %s; reading the tar's headers instead", path, problem)
        return None
    return index


class _JsonError(ValueError):
    """The file does not hold an index."""


def _parse(path: Path, tar_path: str, stamp: FileStamp) -> TarIndex:
    try:
        with at_hand(path) as file:
            document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise _JsonError(f"it is no JSON document ({err})") from err
    if not isinstance(document, dict):
        raise _JsonError(f"it holds {an(type(document).__name__)}, wanted an object")
    names, offsets, sizes = [], [], []
    for name, entry in document.items():
        offset, size = _range(name, entry, stamp.size_bytes)
        try:
            names.append(name.removeprefix("./").encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as err:
            raise _JsonError(f"member {name!r} is no name that a tar holds") from err
        offsets.append(offset)
        sizes.append(size)
    return TarIndex.of(tar_path, stamp, names, offsets, sizes)


def _range(name: str, entry: Any, end: int) -> tuple[int, int]:
    offset, size = (entry.get("offset"), entry.get("size")) if isinstance(entry, dict) else (None, None)
    if type(offset) is not int or type(size) is not int:  # a bool is an int, but no offset
        raise _JsonError(f"member {name!r} has no whole-number offset and size")
    if offset < BLOCK or offset % BLOCK or size < 0 or offset + size > end:
        raise _JsonError(f"member {name!r} (offset {offset}, size {size}) is not within the tar's {end} bytes")
    return offset, size


def _problem(index: TarIndex) -> str | None:
    """Returns what contradicts the index in the headers of some members, the first and the last among them."""
    if not len(index):
        return None
    rows = np.unique(np.linspace(0, len(index) - 1, _SPOT_CHECKS).astype(np.int64))
    with _reading(index.path) as read:
        for row in rows.tolist():
            block = read(BLOCK, int(index.offsets[row]) - BLOCK)
            if not _is_header_of(block, index.names[row].encode("utf-8", "surrogateescape"), int(index.sizes[row])):
                return f"no header of {index.sizes[row]} bytes {index.names[row]!r} stands in front of its offset"
    return None


@contextlib.contextmanager
def _reading(path: str) -> Iterator[Callable[[int, int], bytes]]:
    """Yields what reads (size, offset) of a tar: by requests of their own where it is not on this node yet."""
    if (requests := reader(path)) is not None:
        yield requests
        return
    descriptor, _ = open_source(path)
    try:
        yield functools.partial(os.pread, descriptor)
    finally:
        os.close(descriptor)


def _is_header_of(block: bytes, name: bytes, size: int) -> bool:
    """Says whether a block can be the header of a member; long names and sizes stand in extended headers before it."""
    if len(block) < BLOCK or not valid_headers(np.frombuffer(block, np.uint8).reshape(1, BLOCK)).all():
        return False
    is_size = size == parse_number(block[SIZE_FIELD]) or size > _MAX_OCTAL_SIZE
    is_name = header_name(block).removeprefix(CURRENT_DIRECTORY) == name or len(name) > 98 or not name.isascii()
    return is_size and is_name


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
    """Returns the kept or exported index of a tar's present state, None: scan it; TarError for a tar that is absent."""
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
    return kept_path(tar_path, Path(cache_root) / TAR_INDEX, ".parquet")


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
        refused=tuple(RefusedHeader(*refused) for refused in document["refused"]),
    )
    return index, document["scanned_ns"], document["xxh3"]


def _checksum(index: TarIndex) -> str:
    """Returns the checksum of all that an index says; parquet's own covers pages, and only where it is asked for."""
    state = xxhash.xxh3_64()
    for array in (index.name_bounds, index.name_bytes, index.offsets, index.sizes):
        state.update(np.ascontiguousarray(array).tobytes())
    state.update(json.dumps([list(index.stamp), [list(refused) for refused in index.refused]]).encode("ascii"))
    return state.hexdigest()


_MAKE = "have the set made again: forebay evalset CONFIG --out DIR"


def check_members(path: Path, name: str, said: Any) -> None:
    """Raises TarError for a member that is a link or leads out, or that is not as index.json says.

    path: where the tar is now. name: what it is called. said: of index.json, its members in their order; or None.
    """
    index = scan_tar(path)
    if index.refused:
        member, reason, offset = index.refused[0]
        raise TarError(f"{name}: its member {member!r} at offset {offset} is refused: {reason}; {_MAKE}")
    for member in index.names:
        if problem := problem_of(member):
            raise TarError(f"{name}: its member {member!r} {problem}; {_MAKE}")
    if len(index.rows) < len(index):
        twice = next(member for row, member in enumerate(index.names) if index.rows[member] != row)
        raise TarError(f"{name}: its member {twice!r} is there twice; {_MAKE}")
    if said is not None:
        _compare(index, name, said)


def _compare(index: TarIndex, name: str, said: Any) -> None:
    try:
        wanted = [(entry["name"], entry["offset"], entry["size"]) for entry in said["members"]]
    except (TypeError, KeyError) as err:
        raise TarError(f"{name}: its index.json says not which members it has ({err!r}); {_MAKE}") from err
    found = list(zip(index.names, index.offsets.tolist(), index.sizes.tolist(), strict=True))
    for here, there in itertools.zip_longest(found, wanted):
        if here != there:
            raise TarError(f"{name} has {_shown(here)} where its index.json says {_shown(there)}; {_MAKE}")


def _shown(member: tuple[Any, Any, Any] | None) -> str:
    return "no member" if member is None else "the member {!r} at offset {} of {} bytes".format(*member)
