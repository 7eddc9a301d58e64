"""Segments joined to windows, as Whisper was trained on: Radford et al. 2022 (arXiv 2212.04356), section 2.3.

The first window of a recording and channel begins at 0, and each other one where the one before it ended: `window_s`
further on, or where a segment begins that ends behind the window. With timestamps that start is written and the sound
stays whole; without them the sound ends there. Whatever no segment says something of counts as silence.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from forebay.rows.kept_columns import PREFIX
from forebay.rows.manifest import ROW_SCHEMA, SPAN, Manifest
from forebay.rows.reader import Failures
from forebay.rows.segments import recordings_of
from forebay.steps.text.row_encoder import STEP_S
from forebay.store.layout import Array

SPOKEN = "spoken"
"""The column of windows that says which part of the text is spoken when: a JSON list of a segment's first and last step
of 20 ms behind the window's start, and its first and last character; of a segment that only begins in the window its
first step."""
NO_SPEECH = "[]"
"""The value of a window without speech."""
LOST = f"{SPAN}lost"
"""The column of rows that have failed already, and are listed because their stretch is no silence."""
_MOST_SILENT = 10_000
"""Windows before or behind one segment: a time that no recording has fills no memory."""
_SLACK_S = 1e-6
"""Sums of seconds miss by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRules:
    """Settings of windows. timestamps: they are written. needs_text: segments without text are of no use.

    previous_text: share of windows that have the text of the one before as prompt. no_speech: share of the windows
    without speech that are kept. Which ones the hash of an id says, so nothing is random.
    """

    timestamps: bool = False
    previous_text: float = 0.0
    no_speech: float = 0.0
    needs_text: bool = False


class _Segment(NamedTuple):
    """kind: what all segments of a window have in common. is_lost: of no use, and no silence."""

    place: int
    start_s: float
    end_s: float
    text: str
    kind: tuple[Any, ...]
    is_lost: bool


class _Window(NamedTuple):
    """segments: those in it; none: it is without speech. place: of the row that it takes its other values from.

    begins_s: where a further segment begins in it. earlier: the text of the window before it. number: of windows
    without speech before one segment, from 1 on; behind the last one, from -1 down.
    """

    start_s: float
    end_s: float
    segments: Sequence[_Segment]
    place: int
    begins_s: float | None = None
    earlier: str | None = None
    number: int = 0

    @property
    def text(self) -> str:
        return " ".join(each.text for each in self.segments if each.text)

    @property
    def ending(self) -> str:
        """The end of the window's id, behind that of a segment."""
        if self.segments:
            return f"+{len(self.segments)}"
        return f"-{self.number}" if self.number > 0 else f"-end{-self.number}"


def windowed(
    manifest: Manifest, length_s: float, rules: WindowRules, *, until_s: Callable[[pa.Table], Array] | None = None
) -> Manifest:
    """Returns a listing whose rows are windows, made of rows that are segments in the order of time.

    A window has the id of its first segment and `+N`, N: how many it has; one without speech the id of the segment
    behind it and `-N`, N: the how many-th before it, or `-endN` behind the last segment. Another language, prompt or
    kept value begins a new window.
    Segments that fail: `segment_too_long` above `length_s`, `open_segment` without an end, `no_text`.
    until_s: gives where the recordings of rows end, float64 [rows], NaN where that is not known; it is asked where
    windows without speech are wanted. None: no recording's end is known.
    """
    rows = manifest.rows
    ends = until_s(rows) if until_s is not None and rules.no_speech > 0 else np.full(len(rows), np.nan)
    segments, failed = _segments(manifest, length_s, rules)
    recordings, channels = recordings_of(rows), np.asarray(rows["channel"].fill_null(-1))
    keys = np.stack([rows["group"].to_numpy(), recordings, channels], axis=1)
    order = np.lexsort((np.arange(len(rows)), *keys.T[::-1])).tolist()
    made: list[_Window] = []
    for _, run in groupby(order, key=lambda at: keys[at].tolist()):
        line = _Line(length_s, timestamps=rules.timestamps, silence=rules.no_speech > 0)
        for at in run:
            line.add(segments[at])
        made += line.ended(float(ends[at]))
    return dataclasses.replace(
        manifest, rows=_table(rows, made, rules), rejected=pa.concat_tables([manifest.rejected, failed])
    )


def _segments(manifest: Manifest, length_s: float, rules: WindowRules) -> tuple[list[_Segment], pa.Table]:
    """Returns the segments of rows, and those that fail here."""
    rows, failures = manifest.rows, Failures()
    start, end = (rows[name].to_numpy() for name in ("start_s", "end_s"))
    end = np.where(np.isnan(end), start + rows["duration_s"].to_numpy(), end).tolist()
    texts = ["" if text is None else text.strip() for text in rows["text"].to_pylist()]
    lost = rows[LOST].to_pylist() if LOST in rows.column_names else [False] * len(rows)
    names = ["language", "prompt", *(name for name in rows.column_names if name.startswith(PREFIX))]
    kinds = zip(*(rows[name].to_pylist() for name in names), strict=True)
    places = zip(*(rows[name].to_pylist() for name in ("row", "sample_id", "group", "start_s")), strict=True)
    found = []
    for at, ((row, name, group, start_s), kind) in enumerate(zip(places, kinds, strict=True)):
        where = f"{manifest.files[group].path}: sample {name} is from {start_s:g} s to"
        problem = None
        if rules.needs_text and not texts[at]:
            problem = "no_text", f"{where} {end[at]:g} s, and nothing gives its text; add it, or remove the segment"
        elif math.isnan(end[at]):
            problem = "open_segment", f"{where} the end, and source.window_s needs ends; name source.columns.end"
        elif end[at] - start_s > length_s + _SLACK_S:
            problem = "segment_too_long", f"{where} {end[at]:g} s, and source.window_s is {length_s:g}; cut it"
        if problem is not None and not lost[at]:
            failures.add(row, name, *problem)
        found.append(_Segment(at, start_s, end[at], texts[at], kind, lost[at] or problem is not None))
    return found, failures.table()


class _Line:
    """The windows of one recording and channel, made as its segments come in the order of their starts."""

    def __init__(self, length_s: float, *, timestamps: bool, silence: bool) -> None:
        """silence: windows without speech are wanted."""
        self._length_s, self._timestamps, self._silence = length_s, timestamps, silence
        self._at = 0.0
        self._kind: tuple[Any, ...] = ()
        self._earlier: str | None = None
        """The text of the window before, where nothing lies in between."""
        self._held: list[_Segment] = []
        self._windows: list[_Window] = []
        self._place: int | None = None
        """Of the last segment that is of use; None: silence behind the last segment begins nowhere."""

    def add(self, each: _Segment) -> None:
        """Takes the next segment."""
        self._place = each.place if not each.is_lost else None if math.isnan(each.end_s) else self._place
        if not self._held:
            self._at = min(self._at, each.start_s)
        if each.is_lost:
            self._close(min(self._at + self._length_s, max(each.start_s, self._heard_s)), then_s=each.start_s)
            self._at = max(self._at, each.start_s if math.isnan(each.end_s) else each.end_s)
            self._earlier = None
            return
        if self._kind != each.kind:
            end_s = self._at + self._length_s
            if self._held:
                self._close(min(end_s, max(each.start_s, self._heard_s)), then_s=min(end_s, each.start_s))
            self._kind, self._earlier = each.kind, None
        while each.end_s > self._at + self._length_s + _SLACK_S and (self._held or self._at < each.start_s):
            self._forward(each)
        self._held.append(each)

    def ended(self, until_s: float) -> list[_Window]:
        """Returns the windows, the last one with speech up to the end of its last segment.

        until_s: where the recording ends; NaN: not known, so that there may be no sound behind that segment.
        """
        self._close(self._heard_s, then_s=self._heard_s)
        if self._place is not None and until_s > self._at:
            self._pass_silence(until_s, self._place, sign=-1)
        return self._windows

    @property
    def _heard_s(self) -> float:
        return max((each.end_s for each in self._held), default=self._at)

    def _forward(self, each: _Segment) -> None:
        """Moves the window on for a segment that ends behind it."""
        end_s = self._at + self._length_s
        if each.start_s >= end_s - _SLACK_S and not self._held:
            self._pass_silence(each.start_s, each.place)
        elif each.start_s >= end_s - _SLACK_S:
            self._close(end_s, then_s=end_s)
        else:
            stop_s = end_s if self._timestamps else max(each.start_s, self._heard_s)
            self._close(stop_s, then_s=each.start_s, begins_s=each.start_s if self._timestamps else None)

    def _pass_silence(self, until_s: float, place: int, *, sign: int = 1) -> None:
        """Moves on by whole windows without speech."""
        count = int((until_s - self._at + _SLACK_S) // self._length_s)
        starts = [self._at + number * self._length_s for number in range(min(count, _MOST_SILENT))]
        silent = (_Window(at, at + self._length_s, (), place, number=sign * n) for n, at in enumerate(starts, 1))
        self._windows += silent if self._silence else ()
        self._at, self._earlier = self._at + count * self._length_s, None

    def _close(self, end_s: float, *, then_s: float, begins_s: float | None = None) -> None:
        if self._held:
            made = _Window(self._at, end_s, tuple(self._held), self._held[0].place, begins_s, self._earlier)
            self._windows.append(made)
            self._earlier = made.text
        self._held, self._at = [], then_s


def _table(rows: pa.Table, windows: Sequence[_Window], rules: WindowRules) -> pa.Table:
    """Returns the windows as rows of a listing, as segments are: by recording, then by time."""
    ids = rows["sample_id"].to_pylist()
    named = [(f"{ids[w.place]}{w.ending}", w) for w in windows]
    kept = [(name, w) for name, w in named if w.segments or _is_of("no speech", name, rules.no_speech)]
    table = rows.take(pa.array([w.place for _, w in kept], pa.int64()))
    given = table["prompt"].to_pylist()
    prompts = [
        w.earlier if prompt is None and _is_of("previous text", name, rules.previous_text) else prompt
        for (name, w), prompt in zip(kept, given, strict=True)
    ]
    languages = [x if w.segments else None for (_, w), x in zip(kept, table["language"].to_pylist(), strict=True)]
    seconds = [round(w.end_s - w.start_s, 6) for _, w in kept]  # 30 s are no more than 30 s
    columns = {
        **{"sample_id": [name for name, _ in kept], "duration_s": seconds, "stated_s": seconds},
        **{"language": languages, "prompt": prompts, "text": [w.text for _, w in kept]},
        **{"start_s": [w.start_s for _, w in kept], "end_s": [w.end_s for _, w in kept]},
    }
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    table = table.append_column(SPOKEN, pa.array([json.dumps(_spoken(w)) for _, w in kept], pa.large_string()))
    keys = [table[name].to_numpy() for name in ("end_s", "start_s")]
    order = np.lexsort((*keys, recordings_of(table), table["group"].to_numpy()))
    table = table.take(pa.array(order)).combine_chunks()
    return table.set_column(0, ROW_SCHEMA.field("row"), pa.array(np.arange(len(table))))


def _spoken(window: _Window) -> list[list[int]]:
    """Returns the value of SPOKEN; steps never go back, also where segments overlap."""
    found: list[list[int]] = []
    last = at = 0
    for each in window.segments:
        first = max(last, round((each.start_s - window.start_s) / STEP_S))
        last = max(first, round((each.end_s - window.start_s) / STEP_S))
        found.append([first, last, at, at + len(each.text)])
        at += len(each.text) + 1 if each.text else 0
    if window.begins_s is not None:
        found.append([max(last, round((window.begins_s - window.start_s) / STEP_S))])
    return found


def _is_of(what: str, name: str, share: float) -> bool:
    """Returns whether a window is one of a share of all of them, by its id."""
    return xxhash.xxh3_64_intdigest(f"{what} {name}".encode()) < share * 2**64
