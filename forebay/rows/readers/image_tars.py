"""Rows of one image of a tar: an image and what lies beside it, `{id}.json`, `{id}.cls` and `{id}.txt`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import SampleError, TextError
from forebay.rows.manifest import storable
from forebay.rows.meanings.conversation import IMAGES, identifier, text_error
from forebay.rows.meanings.reading import Untyped
from forebay.rows.media_reader import opened
from forebay.rows.parts import PartRows, PartTask, Place
from forebay.rows.readers.json_lines import JsonError, parse_object
from forebay.rows.readers.tar_members import NAMELESS, read_sidecar, refusal, split_name
from forebay.tar.members import Refused, TarIndex

IMAGE_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp"))
MEMBERS_PER_RUN = 256
"""Members whose images one task looks at."""

_BESIDE = (".json", ".cls", ".txt")
_NO_OWNER = "(members without an image)"


def add_images(rows: PartRows, index: TarIndex, task: PartTask) -> None:
    """Adds a row for each image of a tar, in archive order.

    Its class is `label` of its JSON, else the text of `{id}.cls`; its text is `text` of its JSON, else that of
    `{id}.txt`. The id is that of the JSON, else the name. Members beside no image are counted.
    """
    members = _Members.of(index)
    with opened(index.path) as descriptor:
        for row, stem in members.images:
            try:
                _add(rows, descriptor, index, members, row=row, stem=stem)
            except SampleError as err:
                rows.reject(storable(stem), err.reason, f"{task.name}: member {index.names[row]}: {err}")
    for stem, refused in members.refused.items():
        if stem not in members.stems:
            name = storable(stem) or f"{task.name}@{refused.offset}"
            rows.reject(name, refused.reason, refusal(refused, task.name))
    lonely = sum(stem not in members.stems and stem not in members.refused for stem, _ in members.beside)
    rows.unused.merge({_NO_OWNER: lonely})


@dataclass(slots=True)
class _Members:
    """Members by what they are. images: (row in the index, stem). beside: rows by stem and extension."""

    images: list[tuple[int, str]] = field(default_factory=list)
    beside: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)

    @classmethod
    def of(cls, index: TarIndex) -> _Members:
        """Returns the members of a tar; of equal names the last counts, as when tar extracts them."""
        found = cls()
        for row, name in enumerate(index.names):
            stem, extension = split_name(name)
            if extension in IMAGE_EXTENSIONS and index.rows[name] == row:
                found.images.append((row, stem))
            elif extension in _BESIDE:
                found.beside[stem, extension] = row
        for refused in index.refused:
            stem, extension = split_name(refused.name)
            if extension in {*IMAGE_EXTENSIONS, *_BESIDE} or refused.reason in NAMELESS:
                found.refused[stem] = refused
        return found

    @property
    def stems(self) -> set[str]:
        """The stems that have an image."""
        return {stem for _, stem in self.images}


def _add(rows: PartRows, descriptor: int, index: TarIndex, members: _Members, *, row: int, stem: str) -> None:
    if (refused := members.refused.get(stem)) is not None:
        raise SampleError(
            refused.reason,
            f"{refused.name} at offset {refused.offset} is refused: {refused.reason}; write the tar again",
        )
    fields: dict[str, Any] = {}
    for extension, data in _read(descriptor, index, members, stem):
        if extension == ".json":
            fields |= _json(data)
        else:
            text = _text(data, f"{stem}{extension}")
            name, value = ("label", Untyped(text)) if extension == ".cls" else ("text", text)
            if fields.get(name) is None and rows.reads == f"{name}s":
                fields[name] = value
    given = identifier(fields)
    place = Place(
        None, storable(index.names[row]), int(index.offsets[row]), int(index.sizes[row]), row // MEMBERS_PER_RUN
    )
    rows.add(fields, [place], sample_id=given or storable(stem), explicit=given is not None)


def _read(descriptor: int, index: TarIndex, members: _Members, stem: str) -> Iterator[tuple[str, bytes]]:
    for extension in _BESIDE:
        if (place := members.beside.get((stem, extension))) is not None:
            try:
                yield extension, read_sidecar(descriptor, index, place)
            except JsonError as err:
                raise text_error(err) from err


def _json(data: bytes) -> dict[str, Any]:
    try:
        return {name: value for name, value in parse_object(data).items() if name not in IMAGES}
    except JsonError as err:
        raise text_error(err) from err


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as err:
        raise TextError("bad_text", f"{name} is not UTF-8: {err}; write the tar again") from err
