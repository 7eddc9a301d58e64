"""Sets of speech in the forms of three toolkits: `kind = "kaldi"`, `"nemo"` and `"lhotse"`.

Each becomes the rows of a table with the columns of `_COLUMNS`, read as `kind = "table"` reads one: forms of Kaldi by
its "Data preparation" page, NeMo's manifest, cuts or recordings with supervisions of lhotse. Rows are segments.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.config.data import SourceColumns, SourceConfig
from forebay.errors import ManifestError
from forebay.rows.audio_facts import locate_files
from forebay.rows.manifest import Manifest
from forebay.rows.named_files import NamedFiles, manifest_files
from forebay.rows.reader import RecordingLister, RowReader, reader_of
from forebay.rows.readers.csv_tables import TextTable
from forebay.rows.readers.json_lines import BAD_ROW, JsonError, parse_nested
from forebay.rows.readers.table_files import TableRows, listed_tables
from forebay.rows.segments import segmented
from forebay.store.remote.raw.raw_sources import at_hand, names_in
from forebay.store.source_files import SourceFile

_TEXT, _SECONDS = pa.large_string(), pa.float64()
_COLUMNS: Mapping[str, pa.DataType] = {
    **dict.fromkeys(("audio", "id", "text", "language", "speaker"), _TEXT),
    **dict.fromkeys(("start", "end", "channel", "seconds"), _SECONDS),
}
_READ = SourceColumns(id="id", start="start", end="end", channel="channel", duration="seconds")
_WAV_SCP, _SEGMENTS, _TEXTS = "wav.scp", "segments", "text"
_CHANNELS = {"A": 0, "B": 1, "1": 0, "2": 1}
_ARK = re.compile(r"\.ark:\d+$")
_MAX_LINE = 64 * 1024 * 1024
"""Bytes: a line that a stranger packed fills no memory."""
_FOLDER = "name the folder that holds it: a Kaldi data folder is read as a whole"


@dataclass(slots=True)
class _Rows:
    """The rows of a set, gathered one by one, and why some cannot be used: reason and message, by place."""

    values: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    problems: dict[int, tuple[str, str]] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)

    def add(self, problem: tuple[str, str] | None = None, **row: Any) -> None:
        """Adds a row by columns; what is left out is null, and the start 0."""
        if problem is not None:
            self.problems[len(self.values["id"])] = problem
        for name, column in self.values.items():
            column.append(row.get(name, 0.0 if name == "start" else None))

    def table(self) -> TextTable:
        """Returns the rows as a table."""
        values = {name: pa.chunked_array([pa.array(self.values[name], kind)]) for name, kind in _COLUMNS.items()}
        schema = pa.schema([*_COLUMNS.items()])
        return TextTable(
            schema=schema, num_rows=len(self.values["id"]), values=values, parts={}, problems=self.problems
        )


def _listed(source: SourceConfig, sets: Callable[[Sequence[SourceFile]], Iterator[tuple[int, _Rows]]]) -> Manifest:
    """Returns the rows of sets. sets: gives the number of a file of each, by which it is called, and its rows."""
    manifests, read = manifest_files(source), replace(source, columns=_READ)
    unused: Counter[str] = Counter()

    def tables() -> Iterator[TableRows]:
        for number, rows in sets(manifests):
            unused.update(rows.unused)
            yield TableRows(manifests[number], number, read, rows.table())

    found = listed_tables(tables(), NamedFiles(manifests, source))
    kept = {"speaker", *_COLUMNS}
    return replace(found, unused={**{n: c for n, c in found.unused.items() if n not in kept}, **unused})


def list_kaldi(source: SourceConfig) -> Manifest:
    """Returns the rows of Kaldi data folders: `wav.scp`, and `segments`, `text`, `utt2spk`, `utt2lang`,
    `reco2file_and_channel` where they are there.

    Paths are relative to the folder, or to `source.audio_dir`. Raises ManifestError for a `wav.scp` that pipes a
    command or names a place in an archive, and for files that are no UTF-8. A segment of another form costs itself.
    """
    return _listed(source, _kaldi_sets)


def _kaldi_sets(files: Sequence[SourceFile]) -> Iterator[tuple[int, _Rows]]:
    folders: dict[Path, dict[str, tuple[int, SourceFile]]] = {}
    for number, file in enumerate(files):
        folders.setdefault(file.path.parent, {})[file.path.name] = (number, file)
    for folder, named in folders.items():
        if _WAV_SCP not in named:
            raise ManifestError(f"{folder}: no {_WAV_SCP} among its files; {_FOLDER}", code="FB205")
        if missing := sorted({_SEGMENTS, _TEXTS}.intersection(names_in(folder)) - named.keys()):
            said = f"{folder / _WAV_SCP}: {', '.join(missing)} beside it is not read; {_FOLDER}"
            raise ManifestError(said, code="FB205")
        yield named[_WAV_SCP][0], _kaldi_rows({name: file.path for name, (_, file) in named.items()})


def _kaldi_rows(paths: Mapping[str, Path]) -> _Rows:
    wavs = {name: _usable(path, paths[_WAV_SCP], line) for line, name, path in _pairs(paths[_WAV_SCP])}
    texts, speakers, languages = (
        {name: value for _, name, value in _pairs(paths[each])} if each in paths else {}
        for each in (_TEXTS, "utt2spk", "utt2lang")
    )
    channels = _kaldi_channels(paths["reco2file_and_channel"]) if "reco2file_and_channel" in paths else {}
    rows, missing = _Rows(), dict[str, str]()

    def add(name: str, recording: str, problem: tuple[str, str] | None = None, **bounds: float) -> None:
        said = {"id": name, "text": texts.get(name), "speaker": speakers.get(name), "language": languages.get(name)}
        rows.add(problem, audio=wavs.get(recording), channel=channels.get(recording), **said, **bounds)

    if _SEGMENTS not in paths:
        for name in wavs:
            add(name, name)
        return rows
    for line, name, rest in _pairs(paths[_SEGMENTS]):
        where = f"{paths[_SEGMENTS]}, line {line}"
        recording, *times = rest.split() or [""]
        if len(times) < 2 or None in (bounds := [_number(each) for each in times[:2]]):
            said = f"{where}: {1 + len(rest.split())} fields, wanted UTTERANCE RECORDING START END; correct the line"
            add(name, recording, (BAD_ROW, said))
            continue
        problem = None
        if recording not in wavs:
            first = missing.setdefault(recording, where)  # one message for all of its segments
            problem = "missing_file", f"{first}: recording {recording} is not in {_WAV_SCP}; correct the line"
        start, end = (number or 0.0 for number in bounds)
        add(name, recording, problem, start=start, **({"end": end} if end != -1 else {}))  # -1: to the end, as in Kaldi
    return rows


def _usable(path: str, scp: Path, line: int) -> str:
    if path.endswith("|") or path.startswith("|"):
        said = f"pipes a command: {path[:60]!r}; run it once, write its output to files, and name these"
    elif _ARK.search(path):
        said = f"names a place in an archive: {path[:60]!r}; copy the recordings out (wav-copy), and name the files"
    else:
        return path
    raise ManifestError(f"{scp}, line {line} {said}", code="FB203")


def _kaldi_channels(path: Path) -> dict[str, float]:
    found = {}
    for line, name, rest in _pairs(path):
        channel = _CHANNELS.get((rest.split() or [""])[-1])
        if channel is None:
            raise ManifestError(f"{path}, line {line}: wanted RECORDING FILE A or B; correct the line", code="FB203")
        found[name] = float(channel)
    return found


def _pairs(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields number, first word and rest of every line that holds something. Raises ManifestError for no UTF-8."""
    for number, line in enumerate(_lines(path), 1):
        try:
            name, _, rest = line.decode("utf-8").strip().partition(" ")
        except UnicodeDecodeError as err:
            raise ManifestError(f"{path}, line {number}: {err}; write it as UTF-8", code="FB203") from err
        name, _, more = name.partition("\t")
        if name:
            yield number, name, f"{more} {rest}".strip()


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, unpacked where its name ends in .gz. Raises ManifestError where it is cut short."""
    try:
        is_packed = path.suffix == ".gz"
        with at_hand(path) as local, gzip.open(local) if is_packed else open(local, "rb") as file:
            for line in iter(lambda: file.readline(_MAX_LINE), b""):
                if len(line) == _MAX_LINE:
                    raise ManifestError(f"{path}: a line has {_MAX_LINE} bytes or more; it is none of this form")
                yield line
    except (EOFError, zlib.error, OSError) as err:
        raise ManifestError(f"{path}: cannot be read to its end: {err}; copy it again", code="FB203") from err


def _objects(path: Path, rows: _Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where each JSON object of a file of lines stands, and the object; a line that is none is a bad row."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            found = parse_nested(line.decode("utf-8-sig"))
            if not isinstance(found, dict):
                raise JsonError("is no JSON object")
        except (UnicodeDecodeError, JsonError) as err:
            rows.add((BAD_ROW, f"{where}: {err}; correct the line"))
            continue
        yield where, found


_NEMO = frozenset(("audio_filepath", "text", "lang", "offset", "duration", "speaker"))


def list_nemo(source: SourceConfig) -> Manifest:
    """Returns the rows of NeMo manifests.

    Lines have `audio_filepath`, `text`, `duration`?, `offset`?, `lang`?, `speaker`?. Where there is an offset, the
    duration is that of the segment, else of the recording.
    """

    def sets(files: Sequence[SourceFile]) -> Iterator[tuple[int, _Rows]]:
        for number, file in enumerate(files):
            rows = _Rows()
            for where, fields in _objects(file.path, rows):
                rows.add(**_nemo_row(where, fields))
                rows.unused.update(fields.keys() - _NEMO)
            yield number, rows

    return _listed(source, sets)


def _nemo_row(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    path, said = fields.get("audio_filepath"), [fields.get("offset"), fields.get("duration")]
    start, seconds = map(_number, said)
    if not isinstance(path, str) or [start is None, seconds is None] != [value is None for value in said]:
        wanted = "wanted audio_filepath as a string, offset and duration as numbers; correct the line"
        return {"problem": (BAD_ROW, f"{where}: {wanted}")}
    bounds: dict[str, Any] = {"seconds": seconds}
    if start is not None:
        bounds = {"start": start, "end": None if seconds is None else start + seconds}
    texts = {name: _string(fields.get(key)) for name, key in (("text", "text"), ("language", "lang"))}
    return {"audio": path, **texts, "speaker": _string(fields.get("speaker")), **bounds}


def list_lhotse(source: SourceConfig) -> Manifest:
    """Returns the rows of lhotse's cuts (MonoCut over file recordings), or of recordings with their supervisions.

    The files are JSON lines, as `.gz` too. Cuts that are mixed, padded, of several channels, of no file, or changed
    when they are read (speed, volume) are left out as `unsupported_cut`. The texts of a cut are in the order of time.
    """
    return _listed(source, _lhotse_sets)


def _lhotse_sets(files: Sequence[SourceFile]) -> Iterator[tuple[int, _Rows]]:
    recordings: dict[str, dict[str, Any]] = {}
    rest = []
    for number, file in enumerate(files):
        rows = _Rows()
        for where, cut in _objects(file.path, rows):
            if "sources" in cut:
                recordings[str(cut.get("id"))] = cut
            elif "recording_id" in cut and "type" not in cut:
                rest.append((number, where, cut))
            else:
                rows.add(**_cut_row(where, cut))
        if rows.values["id"]:
            yield number, rows
    rows, missing = _Rows(), dict[str, str]()
    for _, where, said in rest:
        recording = recordings.get(name := str(said["recording_id"]))
        if recording is None:
            first = missing.setdefault(name, where)
            problem = "missing_file", f"{first}: recording {name} is in no file of recordings; name that file too"
            rows.add(problem, id=_string(said.get("id")))
            continue
        rows.add(**_cut_row(where, {**said, "type": "MonoCut", "recording": recording, "supervisions": [said]}))
    if rest:
        yield rest[0][0], rows


def _cut_row(where: str, cut: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a MonoCut, or why it is none that is read."""
    named, recording, kind = {"id": _string(cut.get("id"))}, cut.get("recording"), cut.get("type", "MonoCut")
    start, seconds, channel = _number(cut.get("start")), _number(cut.get("duration")), cut.get("channel", 0)
    why = None
    if kind != "MonoCut" or isinstance(channel, list):
        why = f"is a {kind} of channel {channel}"
    elif not isinstance(recording, dict) or not isinstance(recording.get("sources"), list):
        why = "has no recording"
    elif recording.get("transforms"):
        why = "is of a recording that is changed when it is read"
    elif start is None or seconds is None:
        why = "has no start and duration"
    sources = recording["sources"] if why is None and isinstance(recording, dict) else []
    held = next((each for each in sources if isinstance(each, dict) and channel in _listed_in(each, "channels")), None)
    if why is None and (held is None or held.get("type") != "file" or not isinstance(held.get("source"), str)):
        why = f"has no file of channel {channel}"
    if why is not None or held is None or start is None or seconds is None:
        wanted = "wanted a MonoCut over a file: cut_set.save_audios(...) writes such"
        problem = "unsupported_cut", f"{where}: the cut {why}; {wanted}"
        return {"problem": problem, **named}
    spoken = [each for each in _listed_in(cut, "supervisions") if isinstance(each, dict)]
    spoken.sort(key=lambda each: _number(each.get("start")) or 0.0)
    texts = [text for each in spoken if (text := _string(each.get("text")))]
    one = spoken[0] if spoken else {}
    said = {"text": " ".join(texts) if texts else None, "language": _string(one.get("language"))}
    place = float(held["channels"].index(channel)) if len(held["channels"]) > 1 else None
    bounds = {"start": start, "end": start + seconds, "channel": place}
    return {"audio": held["source"], "speaker": _string(one.get("speaker")), **named, **said, **bounds}


def _listed_in(fields: Mapping[str, Any], name: str) -> list[Any]:
    found = fields.get(name)
    return found if isinstance(found, list) else []


def _number(value: Any) -> float | None:
    """Returns a finite number; None for anything else, as for NaN, which would say "to the end" further on."""
    try:
        found = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def segments_of(source: SourceConfig) -> Manifest:
    """Returns the rows of a kind that has segments, with the seconds of each, as far as its files say them."""
    lister = reader_of(source).recordings
    assert lister is not None
    assert lister.list is not None
    return segmented(lister.list(source))


KALDI_READER = RowReader(recordings=RecordingLister(list=list_kaldi, locate=locate_files))
NEMO_READER = RowReader(recordings=RecordingLister(list=list_nemo, locate=locate_files))
LHOTSE_READER = RowReader(recordings=RecordingLister(list=list_lhotse, locate=locate_files))
