"""Recordings in tars by what stands beside them: those of a tar itself, and those that a file lists by their ids."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError
from forebay.rows.audio_facts import all_failed, header_duration_s, located, no_duration
from forebay.rows.kept_columns import parts_of_rows, values_in, with_kept
from forebay.rows.manifest import ROW_SCHEMA, Manifest, Unused, columns_of, storable, table_of
from forebay.rows.media_reader import opened
from forebay.rows.named_files import manifest_files
from forebay.rows.reader import (
    AUDIO,
    NAMELESS,
    TEXT_FIELDS,
    Failures,
    Located,
    LocateTask,
    UnreadableTar,
    missing_reason,
    read_sidecar,
    refusal,
    split_name,
)
from forebay.rows.readers.json_lines import JsonError, id_of, parse_object, seconds_of, string_of
from forebay.store.remote.raw.raw_sources import files_in, is_folder, shown
from forebay.store.source_files import COMPRESSED_TARS
from forebay.tar.header import RefusedHeader, TarIndex

logger = logging.getLogger(__name__)
_DURATIONS = ("duration", "duration_s")
_TAKEN = frozenset({"id", "language", "prompt", *_DURATIONS})
_POSITION_BITS = 32
"""`row` of a tar that is a manifest is `file number << _POSITION_BITS | position in the tar`."""
_EXACT = frozenset((".wav", ".flac"))
"""Formats whose header gives the exact number of samples, read from a few bytes."""
_FOUND = {
    name: ROW_SCHEMA.field(name).type
    for name in ("member", "offset", "size", "duration_s", "stated_s", "language", "prompt", "text")
}
_NOTHING = ("", 0, 0, math.nan, None, None, None, None)


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

    Extensions are compared without case. audio: stem to (row in the index, extension); of two clips with one stem the
    first. extra: (row, name) of the others. beside: rows of `.json` and `.txt`, by their names with these endings.
    refused: by name.
    """

    audio: dict[str, tuple[int, str]] = field(default_factory=dict)
    extra: list[tuple[int, str]] = field(default_factory=list)
    beside: dict[str, int] = field(default_factory=dict)
    refused: dict[str, RefusedHeader] = field(default_factory=dict)

    @classmethod
    def of(cls, index: TarIndex) -> ClipMembers:
        """Returns the members of a tar; of equal names the last counts."""
        found = cls(refused={refused.name: refused for refused in index.refused})
        for row, name in enumerate(index.names):
            stem, extension = split_name(name)
            is_hidden = index.rows[name] != row
            if extension in AUDIO and (is_hidden or stem in found.audio):
                found.extra.append((row, name))
            elif extension in AUDIO:
                found.audio[stem] = (row, extension)
            elif not is_hidden and extension in (".json", ".txt"):
                found.beside.setdefault(stem + extension, row)
        return found


class TarClip(NamedTuple):
    """A recording of a tar. place: member, offset, size. seconds: its duration, and the one that is stated of it."""

    sample_id: str
    place: tuple[str, int, int]
    seconds: tuple[float, float | None]
    sidecar: Sidecar


@dataclass(slots=True)
class _Clips:
    """The recordings of an open tar, one after the other; those that cannot be used are gathered."""

    task: LocateTask
    descriptor: int
    index: TarIndex
    members: ClipMembers
    failures: Failures = field(default_factory=Failures)
    unused: Unused = field(default_factory=Unused)

    def clip(
        self, row: int, stem: str, stems: tuple[str, ...], *, key: str = "", given: str = "", stated_s: float = math.nan
    ) -> TarClip | None:
        """Returns a recording; None where it has failed. key, given: its id without one of its own, and in any case.

        stems: those of its metadata, the first that is there. stated_s: by what lists it, which goes before its header.
        """
        sample_id, member = given or key, self.members.audio[stem]
        try:
            sidecar = self._sidecar(stems)
            sample_id = given or sidecar.sample_id or storable(key)
            self.unused.add(sidecar.unused)
            seconds = (stated_s, stated_s) if not math.isnan(stated_s) else self._seconds(member, sidecar.duration_s)
        except JsonError as err:
            message = f"{self.task.name}: {err}; write the tar again"
            self.failures.add(row, sample_id, err.reason or "bad_metadata", message)
            return None
        except DecodeError as err:
            self.failures.add(row, sample_id, *no_duration(self.task.name, sample_id, err))
            return None
        at = member[0]
        place = (storable(self.index.names[at]), int(self.index.offsets[at]), int(self.index.sizes[at]))
        return TarClip(sample_id, place, seconds, sidecar)

    def _seconds(self, clip: tuple[int, str], stated_s: float | None) -> tuple[float, float | None]:
        """Returns a clip's duration. stated_s: by the metadata, None where it says none.

        The header of WAV and FLAC is exact and cheap, so it goes before what the metadata states; the others are asked
        last. Raises DecodeError where nothing gives one.
        """
        row, extension = clip
        if extension not in _EXACT and stated_s is not None:
            return stated_s, stated_s
        offset, size = int(self.index.offsets[row]), int(self.index.sizes[row])
        try:
            return header_duration_s(self.descriptor, offset=offset, size=size), stated_s
        except DecodeError:
            if stated_s is None:
                raise
            return stated_s, stated_s

    def _sidecar(self, stems: tuple[str, ...]) -> Sidecar:
        """Returns the metadata of the first of `{stem}.json`, `{stem}.txt` that is there; empty where none is.

        JSON fields: `id`, `language`, `prompt`, `duration`, and the first of `transcription`, `text` and `transcript`.
        Raises JsonError where it is broken, has a field twice (by its reason) or is refused. A duration that is no
        number counts as none: headers come first.
        """
        for name in (stem + extension for stem in dict.fromkeys(stems) for extension in (".json", ".txt")):
            if (row := self.members.beside.get(name)) is not None:
                try:
                    data = read_sidecar(self.descriptor, self.index, row)
                    is_json = name.endswith(".json")
                    return _json_sidecar(data, self.task.keep) if is_json else Sidecar(text=_plain_text(data))
                except JsonError as err:
                    raise JsonError(f"member {name} {err}", reason=err.reason) from err
            if (refused := self.members.refused.get(name)) is not None:
                raise JsonError(f"member {refused.name} at offset {refused.offset} is refused: {refused.reason}")
        return Sidecar()


def _json_sidecar(data: bytes, keep: Sequence[str]) -> Sidecar:
    fields = parse_object(data)
    try:
        duration_s = seconds_of(fields, _DURATIONS)
    except JsonError:
        duration_s = math.nan
    others = [name for name in fields if name not in _TAKEN and fields[name] is not None]
    taken = next((name for name in TEXT_FIELDS if name in others), None)
    return Sidecar(
        sample_id=id_of(fields, ("id",)) or None,
        language=string_of(fields, ("language",)) or None,
        prompt=string_of(fields, ("prompt",)),
        text=string_of(fields, TEXT_FIELDS),
        duration_s=duration_s if 0 <= duration_s < math.inf else None,
        unused=tuple(name for name in others if name != taken and name not in keep),
        kept=values_in(fields, keep),
    )


def _plain_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise JsonError(f"is not UTF-8: {err}") from err


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
    return Manifest(files=manifest_files(source), rows=ROW_SCHEMA.empty_table())


def locate_webdataset(task: LocateTask) -> Located:
    """Returns the samples of a tar in archive order, every column known.

    A sample's members share a key, the name up to the first dot of its last part; where several clips share one, each
    is a sample by its name without extension. Clips: wav, flac, ogg, mp3, opus in any case. The id is that of the JSON,
    else the key. The duration of WAV and FLAC is the header's, whatever the JSON says; what that says is compared with
    the audio. Left out, each with its reason: `extra_audio` (a second clip of one name), `no_audio` (JSON alone),
    `bad_metadata`, `repeated_field`, `unknown_duration` (or why, see `duration_of`), what the tar's index refuses.
    """
    index = task.tar_index()
    rows: list[tuple[Any, ...]] = []
    kept: list[tuple[Any, ...]] = []
    if isinstance(index, UnreadableTar):  # one failure in its name, for nobody knows its samples
        failures, unused = Failures(), Unused()
        failures.add(_row(task, 0), task.name, index.reason, index.message)
    else:
        with opened(index.path) as descriptor:
            clips = _Clips(task, descriptor, index, ClipMembers.of(index))
            failures, unused = clips.failures, clips.unused
            for stem, key in _sample_keys(clips.members).items():
                row = _row(task, clips.members.audio[stem][0])
                if (clip := clips.clip(row, stem, (stem, first_dot(stem)), key=key)) is not None:
                    side = clip.sidecar
                    own = (row, clip.sample_id, side.sample_id is not None, task.group, task.group)
                    rows.append((*own, *clip.place, *clip.seconds, side.language, side.prompt, side.text))
                    kept.append(side.kept or (None,) * len(task.keep))
        _add_left_out(clips)
    return Located(
        rows=with_kept(table_of(rows, ROW_SCHEMA), parts_of_rows(kept, task.keep)),
        failed=failures.table(),
        absent=(task.group,) if isinstance(index, UnreadableTar) and index.absent else (),
        unused=unused.counts,
    )


def _sample_keys(members: ClipMembers) -> dict[str, str]:
    """Sample id by stem: the name up to the first dot where only one clip has it."""
    keys = {stem: first_dot(stem) for stem in members.audio}
    shared = Counter(keys.values())
    return {stem: key if shared[key] == 1 else stem for stem, key in keys.items()}


def first_dot(stem: str) -> str:
    """Returns a member's name up to the first dot of its last part."""
    folder, slash, name = stem.rpartition("/")
    return folder + slash + (name[:1] + name[1:].partition(".")[0])


def _add_left_out(clips: _Clips) -> None:
    task, index, members, failures = clips.task, clips.index, clips.members, clips.failures
    for row, name in members.extra:
        message = f"{task.name}: member {name} shares its name with another clip; give it another name"
        failures.add(_row(task, row), name, "extra_audio", message, kind="excluded")
    used = {*members.audio, *map(first_dot, members.audio)}
    for name, row in members.beside.items():
        stem, extension = split_name(name)
        if extension == ".json" and stem not in used and not any(stem + each in members.refused for each in AUDIO):
            message = f"{task.name}: member {name} has no clip beside it"
            failures.add(_row(task, row), stem, "no_audio", message, kind="excluded")
    for refused in index.refused:
        stem, extension = split_name(refused.name)
        if extension not in AUDIO and (extension in {".json", ".txt"} or refused.reason not in NAMELESS):
            continue
        sample_id = stem if extension in AUDIO else f"{task.name}@{refused.offset}"
        row = int(np.searchsorted(index.offsets, refused.offset))
        failures.add(_row(task, row), sample_id, refused.reason, refusal(refused, task.name))


def _row(task: LocateTask, position: int) -> int:
    return task.group << _POSITION_BITS | position


def locate_filelist(task: LocateTask) -> Located:
    """Returns place, duration, text and language of a task's rows; the text is that of `{id}.json` or `{id}.txt`.

    An id without folders finds a member in a folder where only one has that name.
    """
    index = task.tar_index()
    if isinstance(index, UnreadableTar):
        return all_failed(task, index)
    columns = [task.rows[name].to_pylist() for name in ("row", "sample_id", "member", "language", "duration_s")]
    found: list[tuple[Any, ...]] = []
    with opened(index.path) as descriptor:
        clips = _Clips(task, descriptor, index, ClipMembers.of(index))
        finder = _Finder(clips.members)
        for row, sample_id, written, language, duration_s in zip(*columns, strict=True):
            values: tuple[Any, ...] = _NOTHING
            if (stem := finder.stem(written)) is None:
                clips.failures.add(row, sample_id, *_missing(index, written, task.name))
            elif (clip := clips.clip(row, stem, (stem,), given=sample_id, stated_s=duration_s)) is not None:
                side = clip.sidecar
                values = (*clip.place, *clip.seconds, language or side.language, side.prompt, side.text)
            found.append(values)
    return dataclasses.replace(located(task, columns_of(found, _FOUND), clips.failures), unused=clips.unused.counts)


class _Finder:
    """Sample id to stem."""

    def __init__(self, members: ClipMembers) -> None:
        self._audio = members.audio
        self._by_name: dict[str, str | None] | None = None

    def stem(self, written: str) -> str | None:
        written = written.removeprefix("./")
        if written in self._audio:
            return written
        if self._by_name is None:
            self._by_name = {}
            for stem in self._audio:
                name = stem.rpartition("/")[2]
                self._by_name[name] = None if name in self._by_name else stem
        return self._by_name.get(written)


def _missing(index: TarIndex, written: str, tar_name: str) -> tuple[str, str]:
    for refused in index.refused:
        if refused.name.rpartition(".")[0] == written:
            return missing_reason(index, refused.name, tar_name)
    return "missing_member", f"{tar_name} has no audio member {written}.*; correct the manifest or the tar"
