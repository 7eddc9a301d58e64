"""What stands beside a clip in a tar: `{id}.json` or `{id}.txt`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import DecodeError
from forebay.preprocess.sources.headers import header_duration_s
from forebay.preprocess.sources.json_object import JsonError, parse_object, seconds_of, string_of
from forebay.preprocess.sources.members import read_member
from forebay.store.tar_members import Refused, TarIndex

AUDIO = frozenset((".wav", ".flac", ".ogg", ".mp3", ".opus"))
_EXACT = frozenset((".wav", ".flac"))
"""Formats whose header gives the exact number of samples, read from a few bytes."""

MAX_SIDECAR_BYTES = 16 * 1024 * 1024
TEXT_FIELDS = ("transcription", "text", "transcript")
_DURATIONS = ("duration", "duration_s")
_TAKEN = frozenset({"id", "language", "prompt", *_DURATIONS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The fields of a clip's metadata; None where it has none. unused: the names of others with a value."""

    sample_id: str | None = None
    language: str | None = None
    prompt: str | None = None
    text: str | None = None
    duration_s: float | None = None
    unused: tuple[str, ...] = ()


@dataclass(slots=True)
class Members:
    """Members of a tar by stem (name without extension, folders kept), in archive order.

    audio: stem to (row in the index, extension); of two clips with one stem the first. extra: (row, name) of the others.
    json, txt: stem to row. refused: by name.
    """

    audio: dict[str, tuple[int, str]] = field(default_factory=dict)
    extra: list[tuple[int, str]] = field(default_factory=list)
    json: dict[str, int] = field(default_factory=dict)
    txt: dict[str, int] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)


def members_of(index: TarIndex) -> Members:
    """Returns the members of a tar by stem; extensions are compared without case, of two equal names the last counts."""
    members = Members(refused={refused.name: refused for refused in index.refused})
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


def split_name(name: str) -> tuple[str, str]:
    """Returns (name without its extension, extension in lower case with its dot); `.hidden` has no extension."""
    stem, dot, extension = name.rpartition(".")
    if not dot or "/" in extension or not stem or stem.endswith("/"):
        return name, ""
    return stem, f".{extension.lower()}"


def read_sidecar(descriptor: int, index: TarIndex, members: Members, stems: tuple[str, ...]) -> Sidecar:
    """Returns the metadata of a clip from the first of `{stem}.json`, `{stem}.txt` that is there; empty where none is.

    JSON fields: `id`, `language`, `prompt`, `duration`, and the first of `transcription`, `text` and `transcript`.
    Raises JsonError where it is broken, has a field twice (by its reason) or is refused. A duration that is no number
    counts as none: headers come first.
    """
    for stem in dict.fromkeys(stems):
        for extension, rows in ((".json", members.json), (".txt", members.txt)):
            if (row := rows.get(stem)) is not None:
                try:
                    data = _small_member(descriptor, index, row)
                    return _json_sidecar(data) if extension == ".json" else Sidecar(text=_plain_text(data))
                except JsonError as err:
                    raise JsonError(f"member {stem}{extension} {err}", reason=err.reason) from err
            if (refused := members.refused.get(stem + extension)) is not None:
                raise JsonError(f"member {refused.name} at offset {refused.offset} is refused: {refused.reason}")
    return Sidecar()


def clip_duration_s(descriptor: int, index: TarIndex, clip: tuple[int, str], *, stated_s: float | None) -> float:
    """Returns a clip's duration. stated_s: by the metadata, None where it says none.

    The header of WAV and FLAC is exact and cheap, so it goes before what the metadata states; the others are asked last.
    Raises DecodeError where nothing gives one.
    """
    row, extension = clip
    if extension not in _EXACT and stated_s is not None:
        return stated_s
    try:
        return header_duration_s(descriptor, offset=int(index.offsets[row]), size=int(index.sizes[row]))
    except DecodeError:
        if stated_s is None:
            raise
        return stated_s


def _json_sidecar(data: bytes) -> Sidecar:
    fields = parse_object(data)
    try:
        duration_s = seconds_of(fields, _DURATIONS)
    except JsonError:
        duration_s = math.nan
    identifier = fields.get("id")
    if isinstance(identifier, int) and not isinstance(identifier, bool) and abs(identifier) < 10**30:
        identifier = str(identifier)
    return Sidecar(
        sample_id=string_of({"id": identifier}, ("id",)) or None,
        language=string_of(fields, ("language",)) or None,
        prompt=string_of(fields, ("prompt",)),
        text=string_of(fields, TEXT_FIELDS),
        duration_s=duration_s if 0 <= duration_s < math.inf else None,
        unused=_unused(fields),
    )


def _unused(fields: dict[str, Any]) -> tuple[str, ...]:
    others = [name for name in fields if name not in _TAKEN and fields[name] is not None]
    taken = next((name for name in TEXT_FIELDS if name in others), None)
    return tuple(name for name in others if name != taken)


def _plain_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise JsonError(f"is not UTF-8: {err}") from err


def _small_member(descriptor: int, index: TarIndex, row: int) -> bytes:
    size_bytes = int(index.sizes[row])
    if size_bytes > MAX_SIDECAR_BYTES:
        raise JsonError(f"has {size_bytes} bytes, wanted at most {MAX_SIDECAR_BYTES}")
    return read_member(descriptor, index, row)
