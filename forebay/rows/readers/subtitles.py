"""`kind = "subtitles"`: the cues of `.srt`, `.vtt` and `.TextGrid` files beside recordings, each of them a segment.

SubRip and WebVTT are read cue by cue, so that a damaged one costs itself. Of a TextGrid a tier is read, or several.
"""

from __future__ import annotations

import codecs
import fnmatch
import html
import io
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from forebay.config.data import RECORDINGS, SUBTITLES, UNREAD, SourceConfig
from forebay.errors import DecodeError, SampleError
from forebay.extras import require_module
from forebay.rows.audio_facts import header_duration_s, locate_files
from forebay.rows.kept_columns import TEXT
from forebay.rows.manifest import SPAN, Manifest, require_rows, row_table
from forebay.rows.meanings.recordings import allowed_s
from forebay.rows.media_reader import opened
from forebay.rows.named_files import manifest_files, path_stem
from forebay.rows.reader import Failures, RecordingLister, RowReader
from forebay.rows.readers.media_folders import places_of, sound_files
from forebay.rows.segments import SEGMENT_COLUMNS, named_segments
from forebay.rows.source_table import SourceFiles
from forebay.rows.windows import LOST
from forebay.store.memo import SIZE
from forebay.store.remote.raw.raw_sources import at_hand, place_of

LONELY = "(subtitles without a recording)"
_MAX_BYTES = 64 * 1024 * 1024
_ARROW = "-->"
_LINES = re.compile(r"\r\n|\n|\r")
_CODE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,4})?")
_MARKUP = re.compile(r"</?(i|b|u|s|font|c|v|lang|ruby|rt)\b[^<>]*>|<[\d:.]+>|\{\\an?\d+\}", re.IGNORECASE)
_OTHER_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|\{\\[^{}]*\}")
_VOICE = re.compile(r"<v(?:\.[^\s<>]+)?[ \t]([^<>]*)>")
_NEGATIVE = re.compile(r"^[ \t]*(?:(?:xmin|xmax|number) ?= ?)?-[\d.]{0,20}[1-9]", re.MULTILINE)
_HALVES = re.compile("[\ud800-\udfff]")
_BLOCKS = ("NOTE", "STYLE", "REGION")
_EMPTY = "empty_cue", "the cue has no text; correct it, or remove it"
_SLACK_S = 0.002
"""Praat writes times as they were computed."""


class Cue(NamedTuple):
    """A stretch of a recording in seconds and what is said there. problem: reason and message of one of no use.

    recording: its place among those that are listed. stem: of the cue's id.
    """

    start_s: float
    end_s: float
    text: str | None
    speaker: str | None = None
    problem: tuple[str, str] | None = None
    kept: Mapping[str, str] = {}
    recording: int = 0
    stem: str = ""
    language: str | None = None


def list_subtitles(source: SourceConfig) -> Manifest:
    """Returns the cues of the subtitles beside recordings, which may lie at any depth below a folder.

    Of `talk.flac` `talk.srt`, `talk.vtt`, `talk.TextGrid` are read, and `talk.en.srt` as a text in English. A recording
    without any has one row without text. Cues that cannot be used fail by themselves: `bad_cue` (no times),
    `bad_segment` (the end is not behind the start), `cue_out_of_order`, `empty_cue`, `unknown_markup`, `bad_text`; a
    file as a whole as `bad_subtitles`, `no_such_tier` or `length_mismatch`.
    Raises MissingExtraError without what reads the files that there are.
    """
    files = manifest_files(source)
    numbers = sound_files(files)
    require_rows(len(numbers), files)
    recordings, cues = files.take(numbers), list[Cue]()
    beside, unused = _beside(files, recordings.paths)
    names = recordings.shown()
    for number, (path, name) in enumerate(zip(recordings.paths, names.to_pylist(), strict=True)):
        stem = path_stem(name)
        for subtitles, size in beside[path_stem(path)]:
            more = path_stem(os.path.basename(subtitles)).removeprefix(os.path.basename(path_stem(path)))
            code = None if not more or _is_sound(more[1:]) else more[1:]
            found = _cues_of(Path(subtitles), size, path, source)
            cues += [cue._replace(recording=number, stem=stem + more, language=code) for cue in found]
        if not beside[path_stem(path)]:
            cues.append(Cue(0.0, math.nan, None, recording=number, stem=stem))
    return _manifest(source, files, pa.table(places_of(files, numbers, names)), cues, unused)


def _manifest(
    source: SourceConfig, files: SourceFiles, places: pa.Table, cues: Sequence[Cue], unused: Mapping[str, int]
) -> Manifest:
    failures, times = Failures(), [(cue.start_s, cue.end_s, math.nan) for cue in cues]
    bounds = dict(zip(SEGMENT_COLUMNS, np.array(times, np.float64).T, strict=True))
    ids = named_segments(pa.array([cue.stem for cue in cues], pa.large_string()), None, bounds)
    for row, (cue, name) in enumerate(zip(cues, ids.to_pylist(), strict=True)):
        if cue.problem is not None:
            failures.add(row, name, *cue.problem)
    said = [{"speaker": cue.speaker, **cue.kept} for cue in cues]
    columns = {
        **dict(zip(places.column_names, places.take([cue.recording for cue in cues]).columns, strict=True)),
        **{"sample_id": ids, "text": [cue.text for cue in cues]},
        "language": pa.array([cue.language for cue in cues], TEXT),
        **{SPAN + name: pa.array(column) for name, column in bounds.items()},
    }
    kept = {name: pa.chunked_array([pa.array([each.get(name) for each in said], TEXT)]) for name in source.keep_columns}
    rows = row_table(columns, num_rows=len(cues), kept=kept)
    # What was said in a cue that failed is not known, and is no silence of a window either.
    rows = rows.append_column(LOST, pa.array([cue.problem is not None for cue in cues], pa.bool_()))
    held = [cue.problem is None or (source.window_s is not None and cue.end_s > cue.start_s) for cue in cues]
    return Manifest(files=files, rows=rows.filter(pa.array(held, pa.bool_())), rejected=failures.table(), unused=unused)


def _beside(files: SourceFiles, recordings: Sequence[str]) -> tuple[dict[str, list[tuple[str, int]]], dict[str, int]]:
    """Returns paths and bytes of subtitles by the path of their recording without extension, and how many have none."""
    found: dict[str, list[tuple[str, int]]] = {path_stem(path): [] for path in recordings}
    lonely = 0
    for path, size in zip(files.paths, files.stats[:, SIZE].tolist(), strict=True):
        if not path.lower().endswith(SUBTITLES):
            continue
        stem = path_stem(path)
        front, _, code = stem.rpartition(".")
        is_named = _CODE.fullmatch(code) is not None or _is_sound(code)
        owner = stem if stem in found else front if is_named else ""
        if owner in found:
            found[owner].append((path, size))
        else:
            lonely += 1
    return found, {LONELY: lonely} if lonely else {}


def _is_sound(code: str) -> bool:
    """Returns whether `talk.wav.srt` is of `talk.wav`."""
    return f".{code.lower()}" in (*RECORDINGS, *UNREAD)


def _cues_of(path: Path, size: int, recording: str, source: SourceConfig) -> list[Cue]:
    """Returns the cues of a file, those that are wrong by themselves and one after the other with their reasons."""
    try:
        if size > _MAX_BYTES:
            raise SampleError("bad_subtitles", f"has {size} bytes, wanted at most {_MAX_BYTES}")
        text = _decoded(path)
        is_grid = path.suffix.lower() == ".textgrid"
        found = [*(_intervals(text, recording, source) if is_grid else _in_order(_cues(text, path), path))]
        if not found:
            raise SampleError("bad_subtitles", "holds nothing that is said; correct it, or remove it")
        return found
    except SampleError as err:
        return [Cue(0.0, math.nan, None, problem=(err.reason, f"{path}: {err}"))]


def _decoded(path: Path) -> str:
    """Returns the text of a file; a byte that is no UTF-8 becomes half of a surrogate pair."""
    with at_hand(path) as local, open(local, "rb") as file:
        data = file.read()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "surrogatepass" if len(data) % 2 == 0 else "replace")
    return data.decode("utf-8-sig", "surrogateescape")


def _cues(text: str, path: Path) -> Iterator[tuple[int, Cue]]:
    """Yields the line and the cue of SubRip or WebVTT; a cue goes from its times up to those of the next one."""
    require_module("webvtt", "segments", what=f"{path.name}")
    form = path.suffix.lower().removeprefix(".")
    lines = _LINES.split(text)
    if form == "vtt" and not re.match(r"WEBVTT(\s|$)", lines[0]):
        raise SampleError("bad_subtitles", f"begins with {lines[0][:40]!r}, wanted WEBVTT; correct the file")
    times = [number for number, line in enumerate(lines) if _ARROW in line]
    if not times and form == "srt" and text.strip():
        raise SampleError("bad_subtitles", f"has no line with {_ARROW}, and is no SubRip; correct the file")
    ends = [*(number - _has_name(lines, number, form) for number in times[1:]), len(lines)]
    for start, end in zip(times, ends, strict=False):
        yield start + 1, _cue(lines[start:end], form, f"{path}, line {start + 1}")


def _has_name(lines: Sequence[str], number: int, form: str) -> bool:
    """Returns whether the line before the times of a cue is its number or name."""
    before = lines[number - 1].strip()
    is_alone = number < 2 or not lines[number - 2].strip()
    return bool(before) and _ARROW not in before and (is_alone or (form == "srt" and before.isdigit()))


def _cue(lines: Sequence[str], form: str, where: str) -> Cue:
    import webvtt

    head = ["1"] if form == "srt" else ["WEBVTT", ""]
    try:
        found = webvtt.from_buffer(io.StringIO("\n".join([*head, *lines, "", ""])), format=form).captions
    except webvtt.MalformedFileError:
        found = []
    if len(found) != 1:
        is_timed = re.search(r"\d\s*-->\s*\d", lines[0]) and not "".join(lines[1:]).strip()
        reason, said = _EMPTY if is_timed else ("bad_cue", f"{lines[0][:60]!r} has no times; correct the line")
        return Cue(0.0, math.nan, None, problem=(reason, f"{where}: {said}"))
    times = (found[0].start_time, found[0].end_time)
    start, end = (3600 * t.hours + 60 * t.minutes + t.seconds + t.milliseconds / 1000 for t in times)
    raw = found[0].raw_text
    plain, voices = _MARKUP.sub("", raw), {*_VOICE.findall(raw)}
    text = " ".join(html.unescape(plain).split())
    problem = _wrong(start, end, raw, plain) or (None if text else _EMPTY)
    behind = (line for before, line in itertools.pairwise(lines[1:]) if line.strip() and not before.strip())
    if form == "vtt" and not all(line.startswith(_BLOCKS) for line in behind):
        problem = "bad_cue", "text stands behind an empty line, and belongs to no cue; correct the file"
    if problem is not None:
        return Cue(start, end, None, problem=(problem[0], f"{where}: {problem[1]}"))
    return Cue(start, end, text, html.unescape(voices.pop()).strip() if len(voices) == 1 else None)


def _wrong(start: float, end: float, raw: str, plain: str) -> tuple[str, str] | None:
    """Returns reason and message for a cue of no use."""
    if _HALVES.search(raw):
        return "bad_text", "the cue is not UTF-8; save the file as UTF-8"
    if end <= start:
        return "bad_segment", f"the cue is from {start:g} s to {end:g} s; correct its times"
    if (other := _OTHER_MARKUP.search(plain)) is not None:
        return "unknown_markup", f"the cue has {other[0][:40]!r}, which is no markup of subtitles; remove it"
    return None


def _in_order(cues: Iterable[tuple[int, Cue]], path: Path) -> Iterator[Cue]:
    """Yields cues, one that begins before the one above it as `cue_out_of_order`."""
    last = 0.0
    for line, cue in cues:
        if cue.problem is not None:
            yield cue
            continue
        said = f"{path}, line {line}: the cue begins at {cue.start_s:g} s, and the one above it at {last:g} s"
        problem = "cue_out_of_order", f"{said}; correct the times or the order"
        yield cue._replace(problem=problem) if cue.start_s < last else cue
        last = cue.start_s


def _intervals(text: str, recording: str, source: SourceConfig) -> Iterator[Cue]:
    """Yields the intervals with a label of the tiers that `source.columns.text` names, a pattern; else of the only one.

    A point or interval of another tier is kept by the name of its tier where its middle lies within.
    """
    if _HALVES.search(text):
        raise SampleError("bad_text", "is not UTF-8; save the file as UTF-8")
    grid = _text_grid(text)
    tiers = {tier["name"]: tier for tier in grid["tiers"] if tier["class"] == "IntervalTier"}
    pattern = source.columns.text
    named = [name for name in tiers if fnmatch.fnmatchcase(name, pattern)] or [*tiers] * (len(tiers) == 1)
    if not named:
        said = f"no tier of intervals is {pattern!r}, there are {', '.join(map(repr, tiers)) or 'none'}"
        raise SampleError("no_such_tier", f"{said}; set source.columns.text to one of them, or to a pattern")
    _require_length(grid["xmax"], recording, source)
    others = [tier for tier in grid["tiers"] if tier["name"] in source.keep_columns]
    for name in named:
        for start, end, label in _entries(tiers[name], grid):
            if label:
                kept = {tier["name"]: " ".join(_within(tier, start, end)) for tier in others}
                yield Cue(start, end, " ".join(label.split()), name, kept=kept)


def _text_grid(text: str) -> Mapping[str, Any]:
    require_module("praatio", "segments", what="a TextGrid")
    from praatio.utilities import textgrid_io

    try:
        found: Mapping[str, Any] = textgrid_io.parseTextgridStr(text, includeEmptyIntervals=True)
        if _NEGATIVE.search(text):
            raise ValueError("it has times before zero")
        names = [tier["name"] for tier in found["tiers"]]
        if len({*names}) < len(names):
            raise ValueError("two tiers have one name")
    except Exception as err:  # the parser raises what its lines happen to give
        raise SampleError("bad_subtitles", f"is no TextGrid that can be read ({err}); save it again") from err
    return found


def _entries(tier: Mapping[str, Any], grid: Mapping[str, Any]) -> list[tuple[float, float, str]]:
    """Returns the intervals of a tier. Raises SampleError for one that does not end behind its start, or is cut off."""
    entries = [(float(start), float(end), str(label)) for start, end, label in tier["entries"]]
    if wrong := next(((start, end) for start, end, _ in entries if end <= start), None):
        raise SampleError("bad_subtitles", f"an interval is from {wrong[0]:g} s to {wrong[1]:g} s; correct it")
    last = entries[-1][1] if entries else 0.0
    if abs(last - float(grid["xmax"])) > _SLACK_S:  # the intervals of a tier fill it
        said = f"tier {tier['name']!r} ends at {last:g} s of {grid['xmax']:g} s"
        raise SampleError("bad_subtitles", f"{said}: the file is cut, or the tier damaged; save it again")
    return entries


def _within(tier: Mapping[str, Any], start: float, end: float) -> Iterator[str]:
    for *times, label in tier["entries"]:
        if label and start <= sum(map(float, times)) / len(times) < end:
            yield str(label)


def _require_length(seconds: float, recording: str, source: SourceConfig) -> None:
    """Raises SampleError where a TextGrid is of another length than its recording, whose header says it."""
    if place_of(recording) is not None:
        return
    try:
        with opened(recording) as descriptor:
            found = header_duration_s(descriptor, offset=0, size=os.fstat(descriptor).st_size)
    except (OSError, DecodeError):  # decoding will say why
        return
    if abs(found - seconds) > allowed_s(source.duration_tolerance, np.array([found]))[0]:
        said = f"is of {seconds:.2f} s, and {os.path.basename(recording)} has {found:.2f} s"
        raise SampleError("length_mismatch", f"{said}; correct one of them, or raise source.duration_tolerance")


READER = RowReader(recordings=RecordingLister(list=list_subtitles, locate=locate_files))
