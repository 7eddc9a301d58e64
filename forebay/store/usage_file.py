"""A usage log on disk: JSON lines, a head first; written by a training run, read by `forebay inspect --usage`."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import CacheCorruptError, CacheMismatchError

USAGE_VERSION = 1
FILE_NAME = "data_usage.jsonl"

Array = np.ndarray[Any, Any]


def to_line(document: Mapping[str, Any]) -> bytes:
    """Returns a document as one line."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def read_usage(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the head of a usage log and its lines; a last line that a crash has cut short is left out.

    Raises CacheCorruptError, naming file and line, for what is no usage log, CacheMismatchError for a newer version,
    OSError where the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    documents = [_document(line, path, number) for number, line in enumerate(lines[:-1], start=1)]
    if not documents or not isinstance(documents[0].get("version"), int):
        raise CacheCorruptError(f"{path} does not begin like a usage log; name a run's logs/{FILE_NAME}")
    version = documents[0]["version"]
    if version > USAGE_VERSION:
        raise CacheMismatchError(
            f"{path}: version is {version}, this forebay reads up to {USAGE_VERSION}; install a newer forebay"
        )
    for number, document in enumerate(documents[1:], start=2):
        if not isinstance(document.get("step"), int) or not isinstance(document.get("from_step"), int):
            raise CacheCorruptError(f"{path} line {number} has no step; it is no line of a usage log")
    return documents[0], documents[1:]


def _document(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise CacheCorruptError(f"{path} line {number} is not JSON: {err}") from err
    if not isinstance(document, dict):
        raise CacheCorruptError(f"{path} line {number} is a {type(document).__name__}, wanted an object")
    return document


def pack_ids(indices: Array) -> str:
    """Returns rising sample indices, int64 [n], as text: the gaps between them, uint32, zlib, base64.

    A run of neighbours costs next to nothing, a sample among thousands two bytes. Indices are below 2^32.
    """
    gaps = np.diff(indices, prepend=0).astype("<u4")
    return base64.b64encode(zlib.compress(gaps.tobytes(), 6)).decode("ascii")


def unpack_ids(text: str) -> Array:
    """Returns the sample indices of `pack_ids`, int64 [n]. ValueError for a text that it did not make."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as err:
        raise ValueError(f"no packed sample indices: {err}") from err
    return np.cumsum(np.frombuffer(data, "<u4"), dtype=np.int64)
