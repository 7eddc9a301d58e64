"""`kind = "webdataset"`: tars of clips or images, each beside its metadata in members of its name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError, SampleError, TextError
from forebay.rows.kept_columns import parts_of_rows, with_kept
from forebay.rows.manifest import ROW_SCHEMA, Manifest, Unused, columns_of, storable
from forebay.rows.meanings.canonical_chat import IMAGES, image_names, text_error
from forebay.rows.meanings.image_class import Untyped
from forebay.rows.meanings.recordings import header_duration_s, no_duration
from forebay.rows.media_reader import opened
from forebay.rows.named_files import manifest_files
from forebay.rows.reader import (
    Failures,
    FilePiece,
    Located,
    LocateTask,
    MediaPlace,
    Record,
    RecordingLister,
    RowReader,
    Sink,
)
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.tar_members import (
    AUDIO,
    IMAGE_EXTENSIONS,
    NAMELESS,
    ClipMembers,
    UnreadableTar,
    members_of,
    read_sidecar,
    refusal,
    sidecar_of,
    split_name,
    tar_index,
)
from forebay.store.remote.raw.raw_sources import files_in, is_folder, shown
from forebay.store.source_files import COMPRESSED_TARS
from forebay.tar.header import RefusedHeader, TarIndex

logger = logging.getLogger(__name__)

MEMBERS_PER_RUN = 256
"""Members whose images one task looks at."""

_BESIDE = (".json", ".cls", ".txt")
_NO_OWNER = "(members without an image)"
_LISTED = (
    *("row", "sample_id", "explicit_id", "member", "offset", "size", "language", "prompt", "text"),
    *("stated_s", "duration_s", "group", "file"),
)
_POSITION_BITS = 32
"""`row` is `file number << _POSITION_BITS | position in the tar`."""
_EXACT = frozenset((".wav", ".flac"))
"""Formats whose header gives the exact number of samples, read from a few bytes."""


def read_tar(piece: FilePiece, rows: Sink) -> None:
    """Gives the rows of a tar in archive order; one that cannot be read is one row, `unreadable_tar`.

    Rows that cannot be used beside those of their meaning: `image_count_mismatch`, what the tar's index refuses.
    """
    index = tar_index(piece.path, cache_root=piece.cache_root)
    if isinstance(index, UnreadableTar):
        rows.reject(piece.name, index.reason, index.message)
        rows.is_absent = index.absent
        return
    is_chat = piece.reads == "conversations"
    members = _Members.of(index, _BESIDE[:1] if is_chat else _BESIDE)
    with opened(index.path) as descriptor:
        tar = _Tar(descriptor, index, members)
        (_read_conversations if is_chat else _read_images)(tar, piece, rows)


@dataclass(slots=True)
class _Members:
    """Members by what they are. images: (row in the index, stem). beside: rows by stem and extension.

    refused: by the stem of what they belong to.
    """

    images: list[tuple[int, str]] = field(default_factory=list)
    beside: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, RefusedHeader] = field(default_factory=dict)

    @classmethod
    def of(cls, index: TarIndex, beside: tuple[str, ...]) -> _Members:
        """Returns the members of a tar; of equal names the last counts, as when tar extracts them."""
        found = cls()
        for row, name in enumerate(index.names):
            stem, extension = split_name(name)
            if extension in IMAGE_EXTENSIONS and index.rows[name] == row:
                found.images.append((row, stem))
            elif extension in beside:
                found.beside[stem, extension] = row
        for refused in index.refused:
            stem, extension = split_name(refused.name)
            if extension in {*IMAGE_EXTENSIONS, *beside} or refused.reason in NAMELESS:
                is_owned = extension in IMAGE_EXTENSIONS and len(beside) == 1
                found.refused[(found.owner(stem) or stem) if is_owned else stem] = refused
        return found

    def owner(self, stem: str) -> str | None:
        """The stem of the JSON that an image belongs to: its own, or without its last number."""
        return next((name for name in (stem, stem.rpartition(".")[0]) if (name, ".json") in self.beside), None)


@dataclass(frozen=True, slots=True)
class _Tar:
    descriptor: int
    index: TarIndex
    members: _Members

    def require(self, stem: str) -> None:
        """Raises SampleError where the tar's index refuses a member of a row."""
        if (refused := self.members.refused.get(stem)) is not None:
            raise SampleError(
                refused.reason,
                f"{refused.name} at offset {refused.offset} is refused: {refused.reason}; write the tar again",
            )

    def read(self, stem: str, extension: str) -> bytes | None:
        """Returns the bytes of what lies beside an image, None where there is none."""
        row = self.members.beside.get((stem, extension))
        try:
            return None if row is None else read_sidecar(self.descriptor, self.index, row)
        except JsonError as err:
            raise text_error(err) from err

    def place(self, row: int) -> MediaPlace:
        """Returns the place of a member."""
        offset, size = int(self.index.offsets[row]), int(self.index.sizes[row])
        return MediaPlace(None, storable(self.index.names[row]), offset, size, row // MEMBERS_PER_RUN)

    def reject_refused(self, rows: Sink, name: str, stems: Mapping[str, Any] | set[str]) -> None:
        """Rejects refused members that are of no row: of which nothing else is left, or which have no name."""
        for stem, refused in self.members.refused.items():
            if stem not in stems:
                rows.reject(storable(stem) or f"{name}@{refused.offset}", refused.reason, refusal(refused, name))


def _read_conversations(tar: _Tar, piece: FilePiece, rows: Sink) -> None:
    """Gives a row for each `{id}.json`.

    Its images are the members `{id}.jpg`, `.jpeg`, `.png`, `.webp` (in any case) and `{id}.{n}.jpg`, in the order of
    their numbers; names of images in the JSON only say how many there are. The id is that of the JSON, else the name.
    Images without a JSON are excluded as `no_conversation`.
    """
    entries = {row: stem for (stem, _), row in tar.members.beside.items()}
    images: dict[str, list[int]] = {stem: [] for stem in entries.values()}
    lonely = {}
    for row, stem in tar.members.images:
        if (owner := tar.members.owner(stem)) is None:
            lonely[row] = stem
        else:
            images[owner].append(row)
    for row, stem in sorted([*entries.items(), *lonely.items()]):
        if row in lonely:
            message = f"{piece.name}: member {tar.index.names[row]} has no {stem}.json; add it"
            rows.reject(storable(stem), "no_conversation", message, kind="excluded")
        else:
            record = functools.partial(_conversation, tar, stem, images[stem])
            rows.take(record, where=f"{piece.name}: member {stem}.json", stem=storable(stem))
    tar.reject_refused(rows, piece.name, images)


def _conversation(tar: _Tar, stem: str, images: list[int]) -> Record:
    tar.require(stem)
    fields = _json(tar.read(stem, ".json") or b"")
    members = sorted(images, key=lambda row: _order(tar.index.names[row], stem))
    named = len(image_names(fields))
    if named and named != len(members):
        raise TextError("image_count_mismatch", f"names {named} images, the tar has {len(members)} of them; add them")
    return Record(fields, [*map(tar.place, members)])


def _order(name: str, stem: str) -> tuple[int, str]:
    """Images of a sample by their number, then by name; the one without a number first."""
    number = name[len(stem) :].split(".")[1] if name[len(stem) :].count(".") > 1 else ""
    return (int(number) if number.isdecimal() else -1, name)


def _read_images(tar: _Tar, piece: FilePiece, rows: Sink) -> None:
    """Gives a row for each image.

    Its class is `label` of its JSON, else the text of `{id}.cls`; its text is `text` of its JSON, else that of
    `{id}.txt`. The id is that of the JSON, else the name. Members beside no image are counted.
    """
    stems = {stem for _, stem in tar.members.images}
    for row, stem in tar.members.images:
        where = f"{piece.name}: member {tar.index.names[row]}"
        rows.take(functools.partial(_image, tar, row, stem, piece.reads), where=where, stem=storable(stem))
    tar.reject_refused(rows, piece.name, stems)
    lonely = sum(stem not in stems and stem not in tar.members.refused for stem, _ in tar.members.beside)
    rows.unused.merge({_NO_OWNER: lonely})


def _image(tar: _Tar, row: int, stem: str, reads: str) -> Record:
    tar.require(stem)
    fields: dict[str, Any] = {}
    for extension, data in _beside(tar, stem):
        if extension == ".json":
            fields |= {name: value for name, value in _json(data).items() if name not in IMAGES}
            continue
        text = _text(data, f"{stem}{extension}")
        name, value = ("label", Untyped(text)) if extension == ".cls" else ("text", text)
        if fields.get(name) is None and reads == f"{name}s":
            fields[name] = value
    return Record(fields, [tar.place(row)])


def _beside(tar: _Tar, stem: str) -> Iterator[tuple[str, bytes]]:
    for extension in _BESIDE:
        if (data := tar.read(stem, extension)) is not None:
            yield extension, data


def _json(data: bytes) -> dict[str, Any]:
    try:
        return parse_object(data)
    except JsonError as err:
        raise text_error(err) from err


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as err:
        raise TextError("bad_text", f"{name} is not UTF-8: {err}; write the tar again") from err


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


def _sample_keys(members: ClipMembers) -> dict[str, str]:
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
    descriptor: int, index: TarIndex, members: ClipMembers, stem: str, key: str, unused: Unused, *, keep: Sequence[str]
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
    """ROW_SCHEMA of values as `_values` has them, the duration last; `row` is the one in the tar."""
    kept = parts_of_rows([row[9] for row in rows], task.keep)
    numbered = [(_row(task, row[0]), *row[1:9], *row[10:], task.group, task.group) for row in rows]
    columns = columns_of(numbered, {name: ROW_SCHEMA.field(name).type for name in _LISTED})
    return with_kept(pa.table([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA), kept)


def _add_left_out(task: LocateTask, index: TarIndex, members: ClipMembers, failures: Failures) -> None:
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


READER = RowReader(
    read=read_tar,
    recordings=RecordingLister(list=list_webdataset, locate=locate_webdataset, in_tars=True, lists_tars=True),
)
