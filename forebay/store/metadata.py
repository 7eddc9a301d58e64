"""metadata.json of a cache or plan folder: a document with its own checksum and the checksums of the arrays beside it."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import xxhash

from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheIncompleteError,
    CacheMismatchError,
    CacheNotFoundError,
)
from forebay.store.canonical import canonical_json
from forebay.store.files import hash_file, write_bytes
from forebay.store.held import AnyFile, AnyFolder

FILE_NAME = "metadata.json"
_MAX_BYTES = 64 * 1024 * 1024

Array = np.ndarray[Any, Any]


def checksum(document: Mapping[str, Any]) -> str:
    """Returns the xxh3-128 of a document's canonical JSON without its `checksum` entry."""
    return xxhash.xxh3_128_hexdigest(canonical_json({k: v for k, v in document.items() if k != "checksum"}))


def write_metadata(folder: Path, document: dict[str, Any]) -> None:
    """Writes metadata.json with its checksum; the last act of making a folder."""
    write_bytes(folder / FILE_NAME, _text({**document, "checksum": checksum(document)}))


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"


def read_metadata(folder: AnyFolder, *, format_version: int) -> dict[str, Any]:
    """Returns the document of a folder.

    Raises CacheNotFoundError where there is no folder, CacheIncompleteError where it is not sealed, CacheCorruptError where
    the file is not, byte for byte, what was written, and CacheMismatchError where a newer forebay wrote it.
    """
    path = folder / FILE_NAME
    data = _read(path)
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as err:
        raise CacheCorruptError(f"{path} is not JSON ({err}); run: forebay preprocess CONFIG --rebuild") from err
    if not isinstance(document, dict):
        raise CacheCorruptError(f"{path} holds {type(document).__name__}, wanted an object")
    version = document.get("format_version")
    if isinstance(version, int) and version > format_version:
        raise CacheMismatchError(
            f"{folder}: format_version is {version}, this forebay reads up to {format_version}; upgrade forebay"
        )
    _check(path, document, data)
    return document


def _read(path: AnyFile) -> bytes:
    try:
        return read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as err:
        if not path.parent.is_dir():
            raise CacheNotFoundError(f"{path.parent} is not a folder; run: forebay preprocess CONFIG") from err
        raise CacheIncompleteError(
            f"{path.parent} has no {FILE_NAME}: it is not sealed; run: forebay preprocess CONFIG"
        ) from err
    except OSError as err:
        raise CacheError(f"cannot read {path}: {err.strerror}") from err


def _check(path: AnyFile, document: dict[str, Any], data: bytes) -> None:
    try:
        computed = checksum(document)
    except (ValueError, TypeError, RecursionError) as err:
        raise CacheCorruptError(f"{path} holds values that a cache never has: {err}") from err
    if document.get("checksum") != computed:
        raise CacheCorruptError(
            f"{path}: stored checksum {document.get('checksum')}, computed {computed}; "
            "run: forebay preprocess CONFIG --rebuild"
        )
    if _text(document) != data:  # the same values in another spelling: white space, the case of an exponent
        raise CacheCorruptError(f"{path} is not as it was written; run: forebay preprocess CONFIG --rebuild")


def save_array(folder: Path, name: str, array: Array) -> dict[str, Any]:
    """Writes one .npy file and returns its entry for the document: size and xxh3-128."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return save_file(folder, name, buffer.getbuffer())


def save_file(folder: Path, name: str, data: bytes | memoryview) -> dict[str, Any]:
    """Writes one file and returns its entry for the document."""
    write_bytes(folder / name, data)
    return {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def load_array(folder: AnyFolder, name: str, entry: Mapping[str, Any], *, verify: bool) -> Array:
    """Returns a .npy file as a read-only memory map, after checking its size, and its content where `verify` says so."""
    check_file(folder / name, entry, verify=verify)
    try:
        with (folder / name).open("rb", buffering=0) as file:
            return _mapped(file)
    except OSError as err:  # no handle or memory left: says nothing about the file
        raise CacheError(f"{folder / name} cannot be mapped: {err.strerror}") from err
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, TokenError) as err:
        raise CacheCorruptError(f"{folder / name} is not a .npy file: {err}") from err


def _mapped(file: io.FileIO) -> Array:
    """What `np.load(mmap_mode="r")` returns, which takes a path and no file."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"its version is {version}")
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def check_file(path: AnyFile, entry: Mapping[str, Any], *, verify: bool) -> None:
    """Raises CacheCorruptError where a file is missing, has another size, or (`verify`) other bytes than its entry says.

    What is no regular file is refused: a link leads out of the cache, a named pipe or a device has no end.
    """
    try:
        size = regular_size(path)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheCorruptError(f"{path} is missing; run: forebay preprocess CONFIG") from err
    if size != entry["size_bytes"]:
        raise CacheCorruptError(
            f"{path} has {size} bytes, its metadata says {entry['size_bytes']}; run: forebay preprocess CONFIG"
        )
    if verify and (computed := hash_file(path)) != entry["xxh3_128"]:
        raise CacheCorruptError(
            f"{path}: stored xxh3-128 {entry['xxh3_128']}, computed {computed}; run: forebay preprocess CONFIG --verify"
        )


def read_regular(path: AnyFile) -> bytes:
    """Returns the bytes of a document in a folder of ours.

    Raises CacheCorruptError where it is no regular file (a pipe or a device has no end) or larger than any that is written,
    OSError where it cannot be read.
    """
    size = regular_size(path)
    if size > _MAX_BYTES:
        raise CacheCorruptError(f"{path} has {size} bytes, at most {_MAX_BYTES} are expected")
    return path.read_bytes()


def regular_size(path: AnyFile) -> int:
    """Returns the bytes of a file that is one itself, no link. Raises CacheCorruptError where it is not, OSError."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CacheCorruptError(
            f"{path} is {stat.filemode(status.st_mode)}, no regular file, which forebay never writes; put a copy in its place"
        )
    return status.st_size
