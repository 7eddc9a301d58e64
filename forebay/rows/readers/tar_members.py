"""Tar members by name: many lookups at once, the parts of a name, and why a name is not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import TarError
from forebay.rows.manifest import storable
from forebay.rows.media_reader import is_gone, read_fully
from forebay.rows.readers.json_lines import JsonError
from forebay.store.layout import Array
from forebay.store.memo import SIZE
from forebay.store.remote.raw.raw_sources import is_readable, shown, source_stat
from forebay.tar.header import RefusedHeader, TarIndex
from forebay.tar.index import load_index

NAMELESS = frozenset(("bad_checksum", "bad_extended_header", "extended_header_too_large", "truncated", "no_name"))
"""Reasons after which a member's name cannot be believed: any of them may have been a clip."""

MAX_SIDECAR_BYTES = 16 * 1024 * 1024
"""The largest member that may describe another one."""

NOT_FOUND = -1
_STEM = r"([^/])\.[^./]*$"
IMAGE_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp"))
AUDIO = frozenset((".wav", ".flac", ".ogg", ".mp3", ".opus"))
TEXT_FIELDS = ("transcription", "text", "transcript")


@dataclass(frozen=True, slots=True)
class UnreadableTar:
    """Why a tar has no index; `absent` where it cannot even be opened."""

    message: str
    absent: bool
    reason: str = "unreadable_tar"


def tar_index(path: str, *, cache_root: str) -> TarIndex | UnreadableTar:
    """Returns the index of a tar, or why there is none.

    An error of the machine (EIO, ENOMEM, ...) is raised as it is: it says nothing about the tar.
    """
    try:
        return load_index(path, cache_root=cache_root)
    except TarError as err:
        cause = err.__cause__
        if isinstance(cause, OSError) and not is_gone(cause):
            raise
        is_absent = not is_readable(path)
        is_empty = not is_absent and not source_stat(path)[SIZE]
        return UnreadableTar(storable(shown(str(err))), is_absent, "empty_file" if is_empty else "unreadable_tar")


def find_rows(wanted: pa.Array, index: TarIndex) -> Array:
    """Returns the member of each wanted name, int64, else NOT_FOUND; of equal names the last counts.

    A tar's names are bytes, UTF-8 or not.
    """
    parts = (pa.py_buffer(np.ascontiguousarray(values)) for values in (index.name_bounds, index.name_bytes))
    names = pa.Array.from_buffers(pa.large_binary(), len(index), [None, *parts])
    backwards = names.take(pa.array(np.arange(len(names))[::-1]))
    found = pc.fill_null(pc.index_in(wanted.cast(names.type), value_set=backwards), len(names))
    return np.asarray(len(names) - 1 - found.to_numpy().astype(np.int64))


def missing_reason(index: TarIndex, name: str, tar_name: str) -> tuple[str, str]:
    """Returns reason and message for a member that the index does not have."""
    refused = index.find_refused(name)
    if refused is None:
        return "missing_member", f"{tar_name} has no member {name}; correct the manifest or the tar"
    return refused.reason, refusal(refused, tar_name)


def refusal(refused: RefusedHeader, tar_name: str) -> str:
    """Returns the message for a member that a tar's index refuses."""
    where = f"{tar_name}: member {refused.name} at offset {refused.offset}"
    return f"{where} is refused: {refused.reason}; write the tar again"


def read_sidecar(descriptor: int, index: TarIndex, row: int) -> bytes:
    """Returns the bytes of a member that describes another one.

    Raises JsonError where it is larger than any description, TarError where the tar ends before it does.
    """
    size, offset = int(index.sizes[row]), int(index.offsets[row])
    if size > MAX_SIDECAR_BYTES:
        raise JsonError(f"has {size} bytes, wanted at most {MAX_SIDECAR_BYTES}")
    data = read_fully(descriptor, size, offset)
    if len(data) < size:
        raise TarError(
            f"{index.path}: member at offset {offset} ends after {len(data)} of {size} bytes; write the tar again",
            code="FB212",
        )
    return data


def member_stems(names: Any) -> Any:
    """Returns member names without their extension; folders stay, so that ids are unique across them."""
    return pc.replace_substring_regex(names, _STEM, r"\1")


def split_name(name: str) -> tuple[str, str]:
    """Returns (name without its extension, extension in lower case with its dot); `.hidden` has no extension."""
    stem, dot, extension = name.rpartition(".")
    if not dot or "/" in extension or not stem or stem.endswith("/"):
        return name, ""
    return stem, f".{extension.lower()}"
