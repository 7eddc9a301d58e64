"""`kind = "webdataset"`: tars of clips or images, each beside its metadata in members of its name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import SampleError, TextError
from forebay.rows.manifest import MediaPlace, Record, storable
from forebay.rows.meanings import chat_fields
from forebay.rows.meanings.canonical_chat import item_names, text_error
from forebay.rows.meanings.chat_fields import IMAGES, NOUNS_OF_PARTS, VIDEOS
from forebay.rows.meanings.image_class import Untyped
from forebay.rows.media_reader import opened
from forebay.rows.reader import (
    AUDIO,
    IMAGE_EXTENSIONS,
    NAMELESS,
    FilePiece,
    RecordingLister,
    RowReader,
    Sink,
    UnreadableTar,
    read_sidecar,
    refusal,
    split_name,
    tar_index,
)
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.tar_clips import first_dot, list_webdataset, locate_webdataset
from forebay.steps.text.chat.conversation import COUNTED
from forebay.store.layout import Group
from forebay.tar.header import RefusedHeader, TarIndex

MEMBERS_PER_RUN = 256
"""Members whose images one task looks at."""
_BESIDE = (".json", ".cls", ".txt")
_ENDINGS: Mapping[Group, frozenset[str]] = {
    "audio": AUDIO,
    "image": IMAGE_EXTENSIONS,
    VIDEOS: frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"}),
}


def read_tar(piece: FilePiece, rows: Sink) -> None:
    """Gives the rows of a tar in archive order; one that cannot be read is one row, `unreadable_tar`.

    Rows that cannot be used beside those of their meaning: `image_count_mismatch`, what the tar's index refuses.
    """
    index = tar_index(piece.path, cache_root=piece.cache_root)
    if isinstance(index, UnreadableTar):
        rows.reject(piece.name, index.reason, index.message)
        rows.is_absent = index.absent
        return
    meaning = piece.meaning
    read = _read_samples if meaning.in_fields else _read_conversations if meaning.lists_any else _read_images
    with opened(index.path) as descriptor:
        shown = (*meaning.facts.groups, *([VIDEOS] if meaning.facts.has_videos else []))
        beside, groups = (_BESIDE[:1], shown) if meaning.lists_any else (_BESIDE, ("image",))
        read(_Tar(descriptor, index, beside, groups), piece, rows)


@dataclass(slots=True)
class _Tar:
    """An open tar, its members by what they are. extensions: of those beside items. media: (row in the index, stem).

    beside: rows by stem and extension; of equal names the last counts, as when tar extracts them. refused: by the stem
    of what they belong to.
    """

    descriptor: int
    index: TarIndex
    extensions: tuple[str, ...]
    groups: tuple[Group, ...]
    media: dict[Group, list[tuple[int, str]]] = field(init=False)
    beside: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, RefusedHeader] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.media = {group: [] for group in self.groups}
        groups = {extension: group for group in self.groups for extension in _ENDINGS[group]}
        for row, name in enumerate(self.index.names):
            stem, extension = split_name(name)
            if extension in groups and self.index.rows[name] == row:
                self.media[groups[extension]].append((row, stem))
            elif extension in self.extensions:
                self.beside[stem, extension] = row
        for refused in self.index.refused:
            stem, extension = split_name(refused.name)
            if extension in {*groups, *self.extensions} or refused.reason in NAMELESS:
                is_owned = extension in groups and len(self.extensions) == 1
                self.refused[(self.owner(stem) or stem) if is_owned else stem] = refused

    def owner(self, stem: str) -> str | None:
        """Returns the stem of the JSON that an item belongs to: its own, or without its last number."""
        return next((name for name in (stem, stem.rpartition(".")[0]) if (name, ".json") in self.beside), None)

    def require(self, stem: str) -> None:
        """Raises SampleError where the tar's index refuses a member of a row."""
        if (refused := self.refused.get(stem)) is not None:
            raise SampleError(
                refused.reason,
                f"{refused.name} at offset {refused.offset} is refused: {refused.reason}; write the tar again",
            )

    def read(self, stem: str, extension: str) -> bytes | None:
        """Returns the bytes of what lies beside an image, None where there is none."""
        row = self.beside.get((stem, extension))
        return None if row is None else self.read_row(row)

    def read_row(self, row: int) -> bytes:
        """Returns the bytes of a member that describes another one."""
        try:
            return read_sidecar(self.descriptor, self.index, row)
        except JsonError as err:
            raise text_error(err) from err

    def place(self, row: int) -> MediaPlace:
        """Returns the place of a member."""
        offset, size = int(self.index.offsets[row]), int(self.index.sizes[row])
        return MediaPlace(None, storable(self.index.names[row]), offset, size, row // MEMBERS_PER_RUN)

    def reject_refused(self, rows: Sink, name: str, stems: Mapping[str, Any] | set[str]) -> None:
        """Rejects refused members that are of no row: of which nothing else is left, or which have no name."""
        for stem, refused in self.refused.items():
            if stem not in stems:
                rows.reject(storable(stem) or f"{name}@{refused.offset}", refused.reason, refusal(refused, name))


def _read_conversations(tar: _Tar, piece: FilePiece, rows: Sink) -> None:
    """Gives a row for each `{id}.json`.

    Its images are the members `{id}.jpg`, `.jpeg`, `.png`, `.webp` (in any case) and `{id}.{n}.jpg`, in the order of
    their numbers, and so its clips `.wav`, `.flac`, `.ogg`, `.mp3`, `.opus`, and its videos `.mp4`, `.webm` and others;
    names in the JSON only say how many there are. The id is that of the JSON, else the name. Items without a JSON are
    excluded as `no_conversation`.
    """
    entries = {row: stem for (stem, _), row in tar.beside.items()}
    media: dict[str, dict[Group, list[int]]] = {stem: {g: [] for g in tar.groups} for stem in entries.values()}
    lonely = {}
    for group, row, stem in ((group, *each) for group, found in tar.media.items() for each in found):
        if (owner := tar.owner(stem)) is None:
            lonely[row] = stem
        else:
            media[owner][group].append(row)
    for row, stem in sorted([*entries.items(), *lonely.items()]):
        if row in lonely:
            message = f"{piece.name}: member {tar.index.names[row]} has no {stem}.json; add it"
            rows.reject(storable(stem), "no_conversation", message, kind="excluded")
        else:
            record = functools.partial(_conversation, tar, stem, media[stem])
            rows.take(record, where=f"{piece.name}: member {stem}.json", stem=storable(stem))
    tar.reject_refused(rows, piece.name, media)


def _conversation(tar: _Tar, stem: str, media: Mapping[Group, list[int]]) -> Record:
    tar.require(stem)
    fields, places = _json(tar.read(stem, ".json") or b""), {}
    for group, found in media.items():
        members = sorted(found, key=lambda row: _order(tar.index.names[row], stem))
        named = item_names(fields, group)
        if any(isinstance(each, MediaPlace) and each.frames for each in named):
            raise text_error(chat_fields.refusal(chat_fields.FRAMES, "field videos lists frames in a tar"))
        if named and len(named) != len(members):
            raise TextError(
                COUNTED[group],
                f"names {len(named)} {NOUNS_OF_PARTS[group]}s, the tar has {len(members)} of them; add them",
            )
        asked = [each if isinstance(each, MediaPlace) else MediaPlace() for each in named or members]
        places[group] = [
            tar.place(row)._replace(segment=each.segment, still=each.still)
            for row, each in zip(members, asked, strict=True)
        ]
    return Record(fields, places)


def _order(name: str, stem: str) -> tuple[int, str]:
    """Images of a sample by their number, then by name; the one without a number first."""
    number = name[len(stem) :].split(".")[1] if name[len(stem) :].count(".") > 1 else ""
    return (int(number) if number.isdecimal() else -1, name)


def _read_images(tar: _Tar, piece: FilePiece, rows: Sink) -> None:
    """Gives a row for each image.

    Its class is `label` of its JSON, else the text of `{id}.cls`; its text is `text` of its JSON, else that of
    `{id}.txt`. The id is that of the JSON, else the name. Members beside no image are counted.
    """
    stems = {stem for _, stem in tar.media["image"]}
    for row, stem in tar.media["image"]:
        where = f"{piece.name}: member {tar.index.names[row]}"
        rows.take(functools.partial(_image, tar, row, stem, piece.meaning.columns), where=where, stem=storable(stem))
    tar.reject_refused(rows, piece.name, stems)
    lonely = sum(stem not in stems and stem not in tar.refused for stem, _ in tar.beside)
    rows.unused.merge({"(members without an image)": lonely})


def _image(tar: _Tar, row: int, stem: str, columns: Sequence[str]) -> Record:
    tar.require(stem)
    fields: dict[str, Any] = {}
    for extension in _BESIDE:
        if (data := tar.read(stem, extension)) is None:
            continue
        if extension == ".json":
            fields |= {name: value for name, value in _json(data).items() if name not in IMAGES}
            continue
        text = _text(data, f"{stem}{extension}")
        name, value = ("label", Untyped(text)) if extension == ".cls" else ("text", text)
        if fields.get(name) is None and name in columns:
            fields[name] = value
    return Record(fields, {"image": [tar.place(row)]})


def _read_samples(tar: _Tar, piece: FilePiece, rows: Sink) -> None:
    """Gives a row for each name up to its first dot.

    Its fields are those of its JSON, and by extension the texts of `.txt` and `.cls` and the places of other members.
    """
    samples: dict[str, dict[str, int]] = {}
    for row, name in enumerate(tar.index.names):
        if tar.index.rows[name] == row:
            stem = first_dot(name)
            samples.setdefault(stem, {})[name[len(stem) :].lower()] = row
    for stem, members in samples.items():
        record = functools.partial(_sample, tar, stem, members)
        rows.take(record, where=f"{piece.name}: {stem}", stem=storable(stem))
    tar.reject_refused(rows, piece.name, samples)


def _sample(tar: _Tar, stem: str, members: Mapping[str, int]) -> Record:
    tar.require(stem)
    fields: dict[str, Any] = {}
    for ending, row in members.items():
        if ending in _BESIDE:
            data = tar.read_row(row)
            fields |= _json(data) if ending == ".json" else {ending[1:]: _text(data, f"{stem}{ending}")}
        else:
            fields[ending[1:]] = tar.place(row)
    return Record(fields)


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


READER = RowReader(
    read=read_tar,
    recordings=RecordingLister(list=list_webdataset, locate=locate_webdataset, in_tars=True, lists_tars=True),
)
