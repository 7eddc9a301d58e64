"""`kind = "webdataset"`: tars of `{id}.flac`, each beside its metadata in `{id}.json` or `{id}.txt`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError
from forebay.rows.kept_columns import parts_of_rows, values_in, with_kept
from forebay.rows.manifest import ROW_SCHEMA, Manifest, Unused, storable
from forebay.rows.media_reader import opened
from forebay.rows.named_files import manifest_files
from forebay.rows.reader import Failures, Located, LocateTask, Reader, RecordingLister
from forebay.rows.readers.image_tars import read_tar
from forebay.rows.readers.json_lines import JsonError, id_of, parse_object, seconds_of, string_of
from forebay.rows.readers.tar_members import (
    NAMELESS,
    UnreadableTar,
    read_sidecar,
    refusal,
    split_name,
)
from forebay.rows.recording_rows import header_duration_s, no_duration
from forebay.store.remote.raw.sources import files_in, is_folder, shown
from forebay.store.source_files import COMPRESSED_TARS
from forebay.tar.members import Refused, TarIndex

logger = logging.getLogger(__name__)

_POSITION_BITS = 32
"""`row` is `file number << _POSITION_BITS | position in the tar`."""


def list_webdataset(source: SourceConfig) -> Manifest:
    """Returns the tars that a config names; which samples they hold is only known when they are read.

    Compressed tars in a folder of tars are left out, and named in a warning.
    """
    for folder in map(Path, source.manifests):
        found = files_in(folder, "*") if is_folder(folder) else []
        packed = [path for path in found if path.name.endswith(COMPRESSED_TARS)]
        if packed:
            logger.warning(
                "%d compressed tars are left out, %s first; decompress them", len(packed), shown(str(packed[0]))
            )
    return Manifest(files=tuple(manifest_files(source)), rows=ROW_SCHEMA.empty_table())


def locate_webdataset(task: LocateTask) -> Located:
    """Returns the samples of a tar in archive order, every column known.

    A sample's members share a key, the name up to the first dot of its last part; where several clips share one, each
    is a sample by its name without extension. Clips: wav, flac, ogg, mp3, opus in any case. The id is that of the JSON,
    else the key. The duration of WAV and FLAC is the header's, whatever the JSON says; what that says is compared with
    the audio. Left out, each with its reason: `extra_audio` (a second clip of one name), `no_audio` (JSON alone),
    `bad_metadata`, `repeated_field`, `unknown_duration` (or why, see `duration_of`), what the tar's index refuses.
    """
    index = task.tar_index()
    if isinstance(index, UnreadableTar):
        return _tar_failed(task, index)
    members = members_of(index)
    rows: list[tuple[Any, ...]] = []
    failures, unused = Failures(), Unused()
    with opened(index.path) as descriptor:
        keys = _sample_keys(members)
        for stem in members.audio:
            try:
                values = _values(descriptor, index, members, stem, keys[stem], unused, keep=task.keep)
            except JsonError as err:
                position = _row(task, members.audio[stem][0])
                reason = err.reason or "bad_metadata"
                failures.add(position, keys[stem], reason, f"{task.name}: {err}; write the tar again")
                continue
            clip = members.audio[stem]
            try:
                rows.append((*values, clip_duration_s(descriptor, index, clip, stated_s=values[-1])))
            except DecodeError as err:
                failures.add(_row(task, values[0]), values[1], *no_duration(task.name, values[1], err))
    _add_left_out(task, index, members, failures)
    return Located(rows=_table(task, rows), failed=failures.table(), unused=unused.counts)


def _tar_failed(task: LocateTask, result: UnreadableTar) -> Located:
    """A tar that cannot be read at all: one failure in its name, for nobody knows its samples."""
    failures = Failures()
    failures.add(_row(task, 0), task.name, result.reason, result.message)
    return Located(rows=_table(task, []), failed=failures.table(), absent=(task.group,) if result.absent else ())


def _sample_keys(members: Members) -> dict[str, str]:
    """Sample id by stem: the name up to the first dot where only one clip has it."""
    keys = {stem: _first_dot(stem) for stem in members.audio}
    shared: dict[str, int] = {}
    for key in keys.values():
        shared[key] = shared.get(key, 0) + 1
    return {stem: key if shared[key] == 1 else stem for stem, key in keys.items()}


def _first_dot(stem: str) -> str:
    folder, slash, name = stem.rpartition("/")
    return folder + slash + (name[:1] + name[1:].partition(".")[0])


def _values(
    descriptor: int,
    index: TarIndex,
    members: Members,
    stem: str,
    key: str,
    unused: Unused,
    *,
    keep: Sequence[str],
) -> tuple[Any, ...]:
    """Every value of a clip but its duration, the one that its metadata states last; the kept ones before that."""
    row = members.audio[stem][0]
    sidecar = sidecar_of(descriptor, index, members, (stem, _first_dot(stem)), keep=keep)
    unused.add(sidecar.unused)
    sample_id = storable(key) if sidecar.sample_id is None else sidecar.sample_id
    explicit = sidecar.sample_id is not None
    name = storable(index.names[row])
    place = (int(index.offsets[row]), int(index.sizes[row]))
    texts = (sidecar.language, sidecar.prompt, sidecar.text)
    return row, sample_id, explicit, name, *place, *texts, sidecar.kept or (None,) * len(keep), sidecar.duration_s


def _table(task: LocateTask, rows: list[tuple[Any, ...]]) -> pa.Table:
    texts = ("language", "prompt", "text")
    names = ("row", "sample_id", "explicit_id", "member", "offset", "size", *texts, "kept", "stated_s", "duration_s")
    columns: dict[str, Sequence[Any]] = dict.fromkeys(names, ())
    if rows:
        columns.update(zip(names, zip(*rows, strict=True), strict=True))
    columns["row"] = tuple(_row(task, row) for row in columns["row"])
    columns["group"] = columns["file"] = (task.group,) * len(rows)
    table = pa.table([pa.array(columns[f.name], f.type) for f in ROW_SCHEMA], schema=ROW_SCHEMA)
    return with_kept(table, parts_of_rows(columns["kept"], task.keep))


def _add_left_out(task: LocateTask, index: TarIndex, members: Members, failures: Failures) -> None:
    for row, name in members.extra:
        message = f"{task.name}: member {name} shares its name with another clip; give it another name"
        failures.add(_row(task, row), name, "extra_audio", message, kind="excluded")
    used = {*members.audio, *map(_first_dot, members.audio)}
    for stem, row in members.json.items():
        if stem not in used and not any(stem + extension in members.refused for extension in AUDIO):
            message = f"{task.name}: member {stem}.json has no clip beside it"
            failures.add(_row(task, row), stem, "no_audio", message, kind="excluded")
    for refused in index.refused:
        stem, extension = split_name(refused.name)
        if extension not in AUDIO and (extension in {".json", ".txt"} or refused.reason not in NAMELESS):
            continue
        sample_id = stem if extension in AUDIO else f"{task.name}@{refused.offset}"
        message = refusal(refused, task.name)
        row = int(np.searchsorted(index.offsets, refused.offset))
        failures.add(_row(task, row), sample_id, refused.reason, message)


def _row(task: LocateTask, position: int) -> int:
    return task.group << _POSITION_BITS | position


AUDIO = frozenset((".wav", ".flac", ".ogg", ".mp3", ".opus"))

_EXACT = frozenset((".wav", ".flac"))
"""Formats whose header gives the exact number of samples, read from a few bytes."""

TEXT_FIELDS = ("transcription", "text", "transcript")

_DURATIONS = ("duration", "duration_s")

_TAKEN = frozenset({"id", "language", "prompt", *_DURATIONS})


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
class Members:
    """Members of a tar by stem (name without extension, folders kept), in archive order.

    audio: stem to (row in the index, extension); of two clips with one stem the first. extra: (row, name) of the
    others. json, txt: stem to row. refused: by name.
    """

    audio: dict[str, tuple[int, str]] = field(default_factory=dict)
    extra: list[tuple[int, str]] = field(default_factory=list)
    json: dict[str, int] = field(default_factory=dict)
    txt: dict[str, int] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)


def members_of(index: TarIndex) -> Members:
    """Returns the members of a tar by stem; extensions are compared without case, of equal names the last counts."""
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


def sidecar_of(
    descriptor: int, index: TarIndex, members: Members, stems: tuple[str, ...], *, keep: Sequence[str] = ()
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


def clip_duration_s(descriptor: int, index: TarIndex, clip: tuple[int, str], *, stated_s: float | None) -> float:
    """Returns a clip's duration. stated_s: by the metadata, None where it says none.

    The header of WAV and FLAC is exact and cheap, so it goes before what the metadata states; the others are asked
    last. Raises DecodeError where nothing gives one.
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


READER = Reader(
    read=read_tar,
    recordings=RecordingLister(list=list_webdataset, locate=locate_webdataset, in_tars=True, lists_tars=True),
)
