"""`<tar>.index.json`, `{member: {"offset": ..., "size": ...}}`: the form in which other tools keep a tar's index."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import TarError
from forebay.store.remote.raw.sources import (
    at_hand,
    modified_ns,
    open_source,
    place_of,
    put_beside,
    reader,
    source_stat,
)
from forebay.tar.header import BLOCK, SIZE_FIELD, header_name, parse_number, valid_headers
from forebay.tar.members import CURRENT_DIRECTORY, FileStamp, TarIndex, flat_names
from forebay.visible import an

_log = logging.getLogger(__name__)
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
    name_bytes, name_bounds = flat_names(names)
    return TarIndex(
        path=tar_path,
        stamp=stamp,
        name_bytes=name_bytes,
        name_bounds=name_bounds,
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int64),
    )


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
