"""Rows that are recordings with what is said in them, and rows that are texts alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from forebay.rows.meanings.recording_pieces import BOUNDS
from forebay.rows.named_files import path_stem, usable_name
from forebay.rows.reader import DURATIONS, IDS
from forebay.rows.readers.json_lines import JsonError, seconds_of, string_of
from forebay.rows.record import Meaning, MeantRow, MediaPlace, Record
from forebay.store.source_files import SourceFile

_TAKEN = frozenset({"audio", "text", "language", "prompt", *IDS, *DURATIONS})


class TextOnly(Meaning):
    """A text of a record.

    It has `text` (null where there is none, and taken as it is, with `language English<asr_text>` in front or not), and
    may have `language`, `prompt`, `sample_id` or `id`. Other fields are counted by name.
    """

    bad: ClassVar[str | None] = None
    advice: ClassVar[str] = "; correct the manifest"
    by_column: ClassVar[bool] = True

    def called(self, file: SourceFile) -> str:
        return str(file.path)

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:  # noqa: ARG002
        _note_unknown(record.fields, unknown)
        given, language, prompt, text = said(record.fields)
        return MeantRow(text=text, sample_id=given, language=language, prompt=prompt)


class Recorded(TextOnly):
    """A recording, and its text as of `TextOnly`.

    A record has `audio` too, a name relative to the manifest, and may have `duration_s` or `duration`. An id left out
    is `audio` without its extension.
    """

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:
        fields = record.fields
        _note_unknown(fields, unknown)
        place = _place_of(record, home)
        given, language, prompt, text = said(fields)
        return MeantRow(
            text=text,
            items={"audio": (place,)},
            sample_id=given,
            name=path_stem(place.path or ""),
            language=language,
            prompt=prompt,
            seconds=seconds_of(fields, DURATIONS),
            bounds={name: fields[name] for name in fields.keys() & BOUNDS},
        )


def _place_of(record: Record, home: Path) -> MediaPlace:
    """Returns the place of a recording. Raises JsonError where its record names none."""
    for place in record.media or ():
        if isinstance(place, MediaPlace):
            return place
    audio = string_of(record.fields, ("audio",), required=True) or ""
    if problem := usable_name(audio, home):
        raise JsonError(f"field audio {problem}", reason="missing_file")
    return MediaPlace(audio)


def _note_unknown(fields: dict[str, Any], unknown: set[str]) -> None:
    if not fields.keys() <= _TAKEN:
        unknown.update(name for name in fields.keys() - _TAKEN if fields[name] is not None)


def said(
    fields: dict[str, Any], names: Sequence[str] = ("language", "prompt", "text"), ids: Sequence[str] = IDS
) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a record. Raises JsonError for one without the field of the text."""
    if names[-1] not in fields:
        raise JsonError(f"has no field {names[-1]}, wanted a string or null")
    given = string_of(fields, ids)
    if given == "":
        raise JsonError(f"field {ids[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in names)
