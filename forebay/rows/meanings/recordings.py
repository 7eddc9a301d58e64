"""Rows that are recordings with what is said in them, and rows that are texts alone.

Where no column is named as the start of a segment a recording is read whole, and the text of a row that is of a piece
of it would be of another sound. What a table says of pieces stands beside the rows of a listing, in columns of seconds,
until durations are known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ManifestError
from forebay.rows.manifest import SPAN, WHOLE_FILE, Meaning, MeantRow, MediaPlace, Record
from forebay.rows.named_files import path_stem, usable_name
from forebay.rows.reader import DURATIONS, IDS
from forebay.rows.readers.json_lines import JsonError, seconds_of, string_of
from forebay.rows.segments import BOUNDS, ENDS, SEGMENT_COLUMNS, STARTS, segment_name
from forebay.rows.windows import WindowRules
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

logger = logging.getLogger(__name__)
SPANS = BOUNDS | frozenset(DURATIONS)
_LEAST_S, _SHARE = 0.5, 0.05
"""Without `source.duration_tolerance`: the larger of these seconds and this share of the stated duration."""
SEVERAL = f"{SPAN}several texts"
_ADVICE = (
    "a recording is read whole, so a row would have the text of a piece; name such columns as source.columns.start and "
    "source.columns.end, or rename the column where it is no time of the recording"
)


_TAKEN = frozenset({"audio", "text", "language", "prompt", *IDS, *DURATIONS})


def allowed_s(tolerance_s: float | None, seconds: Array) -> Array:
    """Returns by how much durations may differ. tolerance_s: `source.duration_tolerance`."""
    return np.maximum(_LEAST_S, _SHARE * seconds) if tolerance_s is None else np.full(len(seconds), tolerance_s)


def spans_of(table: pa.Table) -> dict[str, pa.Array]:
    """Returns the columns of a table that tell of pieces, as a listing's rows have them."""
    names = [name for name in table.column_names if name in SPANS and table.column_names.count(name) == 1]
    return {SPAN + name: _seconds(table[name]) for name in names}


def span_columns(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, pa.ChunkedArray]:
    """Returns fields of JSON objects as columns of seconds."""
    return {n: pa.chunked_array([[_number(row.get(n)) for row in rows]], pa.float64()) for n in names}


def _seconds(column: Any) -> Any:
    try:
        seconds = pc.cast(column, pa.float64(), safe=False)
    except pa.ArrowException:
        seconds = pa.array([_number(value) for value in column.to_pylist()], pa.float64())
    return pc.if_else(pc.is_finite(seconds), seconds, pa.scalar(None, pa.float64()))


def _number(value: Any) -> float | None:
    """Returns seconds, of `1:02.5` too; None where a value is no time."""
    try:
        parts = str(value).replace(",", ".").split(":")
        return float(sum(float(part) * 60**place for place, part in enumerate(reversed(parts))))
    except (ValueError, OverflowError):
        return None


def refuse_differing(rows: pa.Table, name_of: Callable[[int, str], str]) -> pa.Table:
    """Returns the rows with those marked whose recording has rows of other texts, which one warning counts.

    name_of: (file, member) -> what a recording is called. Raises ManifestError for rows of one recording that are of
    other pieces of it.
    """
    first = _first_of_recording(rows)
    again = first != np.arange(len(rows))
    for name, values in _columns(rows, BOUNDS) if again.any() else ():
        if (other := np.flatnonzero(again & (values != values[first]) & ~np.isnan(values))).size:
            row, before = (rows.slice(at, 1).to_pylist()[0] for at in (other[0], first[other[0]]))
            raise ManifestError(
                f"{name_of(row['file'], row['member'])}: rows of one recording differ in column {name}: "
                f"{before[SPAN + name]} (sample {before['sample_id']}), {row[SPAN + name]} (sample "
                f"{row['sample_id']}); {_ADVICE}",
                code="FB131",
            )
    differs = pc.not_equal(rows["text"], rows["text"].take(pa.array(first))) if again.any() else None
    if differs is None or not pc.any(differs).as_py():
        return rows
    recordings = np.unique(first[np.asarray(pc.fill_null(differs, fill_value=False))])
    several = np.isin(first, recordings)
    logger.warning(
        "%d recordings have several rows with different texts, %d rows: each row is of its whole recording",
        *(len(recordings), int(several.sum())),
    )
    return rows.append_column(SEVERAL, pa.array(several))


def to_judge(rows: pa.Table) -> Array:
    """Returns bool [rows], whether the duration of a row's recording tells if the row is of a piece of it."""
    if not any(name.startswith(SPAN) for name in rows.column_names):
        return np.zeros(len(rows), bool)
    start, end, _ = _bounds(rows)
    return ~np.isnan(start) | ~np.isnan(end)


def refuse_uncovered(
    rows: pa.Table, seconds: Array, tolerance_s: float | None, name_of: Callable[[int, str], str]
) -> None:
    """Raises ManifestError for a row that does not cover its recording. seconds: of the recordings, NaN: not known."""
    start, end, is_cut = _bounds(rows)
    allowed = allowed_s(tolerance_s, seconds)
    begins = np.isnan(start) | (start <= np.where(np.isnan(seconds), _LEAST_S, allowed))
    ends = np.isnan(end) | np.isnan(seconds) | (np.abs(end - seconds) <= allowed)
    bad = np.flatnonzero(~(begins & ends) & ~(is_cut & (np.abs(end - start - seconds) <= allowed)))
    if not bad.size:
        return
    row, at = rows.slice(bad[0], 1).to_pylist()[0], bad[0]
    names = [name for name, values in _columns(rows, SPANS) if not np.isnan(values[at])] or ["duration"]
    said = (
        f"{name_of(row['file'], row['member'])}: sample {row['sample_id']} is from {np.nan_to_num(start[at]):.2f} s"
        f"{'' if np.isnan(end[at]) else f' to {end[at]:.2f} s'} by column {', '.join(names)}, and its recording has "
        f"{seconds[at]:.2f} s; {_ADVICE}"
    )
    if BOUNDS.intersection(names):
        raise ManifestError(said, code="FB131")
    raise ManifestError(said, code="FB132")


def _bounds(rows: pa.Table) -> tuple[Array, Array, Array]:
    """Returns start and end of rows, NaN where there is none, and bool [rows], whether columns have both of them.

    A start and an end as far apart as the recording is long are those of a piece that was cut out already.
    """
    start, end, length = (_first_of(rows, kind) for kind in (STARTS, ENDS, DURATIONS))
    length = np.where(np.isnan(length), rows["stated_s"].to_numpy().astype(np.float64), length)
    several = np.asarray(pc.fill_null(rows[SEVERAL], fill_value=False)) if SEVERAL in rows.column_names else False
    by_length = np.where(np.isnan(start) & several, length, start + length)
    return start, np.where(np.isnan(end), by_length, end), ~np.isnan(start) & ~np.isnan(end)


def _first_of(rows: pa.Table, names: tuple[str, ...]) -> Array:
    found = np.full(len(rows), np.nan)
    for _, values in _columns(rows, names):
        found = np.where(np.isnan(found), values, found)
    return found


def _columns(rows: pa.Table, among: Container[str]) -> Iterator[tuple[str, Array]]:
    for name in (each.removeprefix(SPAN) for each in rows.column_names if each.startswith(SPAN) and each != SEVERAL):
        if name.lower() in among:
            yield name, np.asarray(pc.fill_null(rows[SPAN + name], float("nan")).to_numpy())


def _first_of_recording(rows: pa.Table) -> Array:
    """Returns the position of the first row of the same recording, for every row."""
    file = rows["file"].to_numpy().astype(np.int64)
    own = np.arange(len(rows))
    if (np.diff(file) > 0).all():
        return own
    member = rows["member"].combine_chunks().dictionary_encode()
    key = file * (1 + len(member.dictionary)) + member.indices.to_numpy()
    # Sound in the row of a data file is of that row alone.
    inside = (file == rows["group"].to_numpy()) & (rows["size"].to_numpy() == WHOLE_FILE)
    _, first, inverse = np.unique(np.where(inside, -1 - own, key), return_index=True, return_inverse=True)
    return np.asarray(first[inverse])


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


@dataclass(frozen=True)
class Recorded(TextOnly):
    """A recording, and its text as of `TextOnly`.

    A record has `audio` too, a name relative to the manifest, and may have `duration_s` or `duration`. An id left out
    is `audio` without its extension. segments: the fields of `source.columns.start`, `end` and `channel`. windows: how
    segments are joined, where `source.window_s` says that they are.
    """

    segments: tuple[str | None, str | None, str | None] = (None, None, None)
    windows: WindowRules | None = None

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:
        fields = record.fields
        _note_unknown(fields, unknown)
        unknown.difference_update(name for name in self.segments if name is not None)
        place = _place_of(record, home)
        given, language, prompt, text = said(fields)
        bounds = self._bounds(fields)
        return MeantRow(
            text=text,
            items={"audio": (place,)},
            sample_id=given,
            name=path_stem(place.path or "") + (segment_name(*bounds.values()) if bounds else ""),
            language=language,
            prompt=prompt,
            seconds=seconds_of(fields, DURATIONS),
            bounds=bounds or {name: fields[name] for name in fields.keys() & BOUNDS},
        )

    def _bounds(self, fields: Mapping[str, Any]) -> dict[str, float]:
        """Returns SEGMENT_COLUMNS of a record, NaN for what it does not say; nothing for whole recordings."""
        if self.segments == (None, None, None):
            return {}
        start, end, channel = (math.nan if name is None else seconds_of(fields, (name,)) for name in self.segments)
        start = 0.0 if self.segments[0] is None else start
        seconds = math.nan if self.segments[0] is None else seconds_of(fields, DURATIONS)
        end = start + seconds if self.segments[1] is None else end
        return dict(zip(SEGMENT_COLUMNS, (start, end, channel), strict=True))


def _place_of(record: Record, home: Path) -> MediaPlace:
    """Returns the place of a recording. Raises JsonError where its record names none."""
    for place in (record.media or {}).get("audio", ()):
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
