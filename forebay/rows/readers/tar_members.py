"""Tar members by name: many lookups at once, the parts of a name, and why a name is not there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import TarError
from forebay.rows.kept_columns import values_in
from forebay.rows.manifest import storable
from forebay.rows.media_reader import is_gone, read_fully
from forebay.rows.readers.json_lines import JsonError, id_of, parse_object, seconds_of, string_of
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
_DURATIONS = ("duration", "duration_s")
_TAKEN = frozenset({"id", "language", "prompt", *_DURATIONS})


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


def name_array(index: TarIndex) -> pa.Array:
    """Returns the member names of a tar as large_binary: a tar's names are bytes, UTF-8 or not."""
    buffers = [
        None,
        pa.py_buffer(np.ascontiguousarray(index.name_bounds)),
        pa.py_buffer(np.ascontiguousarray(index.name_bytes)),
    ]
    return pa.Array.from_buffers(pa.large_binary(), len(index), buffers)


def find_rows(wanted: pa.Array, names: pa.Array) -> Array:
    """Returns the position of each wanted name in `names`, int64, else NOT_FOUND; of equal names the last counts."""
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


def take_or_zero(values: Array, rows: Array) -> Array:
    """Returns `values[rows]`, with 0 where a row was not found."""
    return np.where(rows == NOT_FOUND, 0, values[np.maximum(rows, 0)] if len(values) else 0)


def member_stems(names: Any) -> Any:
    """Returns member names without their extension; folders stay, so that ids are unique across them."""
    return pc.replace_substring_regex(names, _STEM, r"\1")


def without_dot(names: Any) -> Any:
    """Returns names without a leading `./`, as the tar index keeps them."""
    dotted = pc.starts_with(names, "./")
    if not pc.any(dotted).as_py():
        return names
    return pc.if_else(dotted, pc.utf8_slice_codeunits(names, 2), names)


def split_name(name: str) -> tuple[str, str]:
    """Returns (name without its extension, extension in lower case with its dot); `.hidden` has no extension."""
    stem, dot, extension = name.rpartition(".")
    if not dot or "/" in extension or not stem or stem.endswith("/"):
        return name, ""
    return stem, f".{extension.lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The fields of a clip's metadata; None where it has none.

    unused: the names of others with a value. kept: the values of those of `source.keep_columns`, empty without a JSON.
    """

    sample_id: str | None = None
    language: str | None = None
    prompt: str | None = None
    text: str | None = None
    duration_s: float | None = None
    unused: tuple[str, ...] = ()
    kept: tuple[Any, ...] = ()


@dataclass(slots=True)
class ClipMembers:
    """Members of a tar by stem (name without extension, folders kept), in archive order.

    audio: stem to (row in the index, extension); of two clips with one stem the first. extra: (row, name) of the
    others. json, txt: stem to row. refused: by name.
    """

    audio: dict[str, tuple[int, str]] = field(default_factory=dict)
    extra: list[tuple[int, str]] = field(default_factory=list)
    json: dict[str, int] = field(default_factory=dict)
    txt: dict[str, int] = field(default_factory=dict)
    refused: dict[str, RefusedHeader] = field(default_factory=dict)


def members_of(index: TarIndex) -> ClipMembers:
    """Returns the members of a tar by stem; extensions are compared without case, of equal names the last counts."""
    members = ClipMembers(refused={refused.name: refused for refused in index.refused})
    for row, name in enumerate(index.names):
        stem, extension = split_name(name)
        hidden = index.rows[name] != row
        if extension in AUDIO:
            if hidden or stem in members.audio:
                members.extra.append((row, name))
            else:
                members.audio[stem] = (row, extension)
        elif hidden:
            continue
        elif extension == ".json":
            members.json.setdefault(stem, row)
        elif extension == ".txt":
            members.txt.setdefault(stem, row)
    return members


def sidecar_of(
    descriptor: int, index: TarIndex, members: ClipMembers, stems: tuple[str, ...], *, keep: Sequence[str] = ()
) -> Sidecar:
    """Returns the metadata of a clip from the first of `{stem}.json`, `{stem}.txt` that is there; empty where none is.

    JSON fields: `id`, `language`, `prompt`, `duration`, and the first of `transcription`, `text` and `transcript`.
    Raises JsonError where it is broken, has a field twice (by its reason) or is refused. A duration that is no number
    counts as none: headers come first.
    """
    for stem in dict.fromkeys(stems):
        for extension, rows in ((".json", members.json), (".txt", members.txt)):
            if (row := rows.get(stem)) is not None:
                try:
                    data = read_sidecar(descriptor, index, row)
                    return _json_sidecar(data, keep) if extension == ".json" else Sidecar(text=_plain_text(data))
                except JsonError as err:
                    raise JsonError(f"member {stem}{extension} {err}", reason=err.reason) from err
            if (refused := members.refused.get(stem + extension)) is not None:
                raise JsonError(f"member {refused.name} at offset {refused.offset} is refused: {refused.reason}")
    return Sidecar()


def _json_sidecar(data: bytes, keep: Sequence[str]) -> Sidecar:
    fields = parse_object(data)
    try:
        duration_s = seconds_of(fields, _DURATIONS)
    except JsonError:
        duration_s = math.nan
    return Sidecar(
        sample_id=id_of(fields, ("id",)) or None,
        language=string_of(fields, ("language",)) or None,
        prompt=string_of(fields, ("prompt",)),
        text=string_of(fields, TEXT_FIELDS),
        duration_s=duration_s if 0 <= duration_s < math.inf else None,
        unused=_unused(fields, keep),
        kept=values_in(fields, keep),
    )


def _unused(fields: dict[str, Any], keep: Sequence[str]) -> tuple[str, ...]:
    others = [name for name in fields if name not in _TAKEN and fields[name] is not None]
    taken = next((name for name in TEXT_FIELDS if name in others), None)
    return tuple(name for name in others if name != taken and name not in keep)


def _plain_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise JsonError(f"is not UTF-8: {err}") from err
