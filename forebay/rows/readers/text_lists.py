"""Lists of a row a line: `kind = "filelist"`, TSV of clips in tars; `kind = "ljspeech"`, `metadata.csv` by `wavs/`."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError, ManifestError
from forebay.rows.manifest import (
    UNLOCATED,
    Manifest,
    Unused,
    constant,
    grouped,
    require_rows,
    row_table,
    storable,
)
from forebay.rows.media_reader import opened
from forebay.rows.named_files import NamedFiles, manifest_files, usable_name
from forebay.rows.reader import Failures, Located, LocateTask, Piece, Reader, Record, RecordingLister, Sink
from forebay.rows.readers.json_lines import JsonError, decoded, manifest_lines
from forebay.rows.readers.tar_members import UnreadableTar, missing_reason
from forebay.rows.readers.webdataset import Members, Sidecar, clip_duration_s, members_of, sidecar_of
from forebay.rows.recording_rows import all_failed, located, no_duration
from forebay.store.remote.raw.sources import at_hand, names_in
from forebay.store.source_files import SourceFile
from forebay.tar.members import TarIndex

AUDIO_FOLDER = "wavs"
_EXTENSIONS = (".wav", ".flac")

COLUMNS = ("shard path", "sample id", "language", "duration in seconds")


def list_filelist(source: SourceConfig) -> Manifest:
    """Returns the rows of TSV files without header, media not looked up yet.

    Columns: shard path (relative to the file), sample id (the member's name without extension), language, duration in
    seconds; the last two may be empty. Nothing is quoted; blank lines are passed over.
    Raises ManifestError, with the line, for other numbers of columns and durations that are no number.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    rows = grouped(pa.concat_tables([_read(manifest, files) for manifest in manifests]))
    require_rows(len(rows), manifests)
    return Manifest(files=tuple(files.files), rows=rows)


def locate_filelist(task: LocateTask) -> Located:
    """Returns place, duration, text and language of a task's rows; the text is that of `{id}.json` or `{id}.txt`.

    An id without folders finds a member in a folder where only one has that name.
    """
    index = task.tar_index()
    if isinstance(index, UnreadableTar):
        return all_failed(task, index)
    members = members_of(index)
    finder = _Finder(members)
    failures, unused = Failures(), Unused()
    columns = [task.rows[name].to_pylist() for name in ("row", "sample_id", "member", "language", "duration_s")]
    found: list[tuple[Any, ...]] = []
    with opened(index.path) as descriptor:
        for row, sample_id, written, language, duration_s in zip(*columns, strict=True):
            stem = finder.stem(written)
            values: tuple[Any, ...] = ("", 0, 0, None, math.nan, None, None, None)
            if stem is None:
                failures.add(row, sample_id, *_missing(index, written, task.name))
            else:
                try:
                    values = _values(descriptor, index, members, stem, duration_s, unused)
                except JsonError as err:
                    reason = err.reason or "bad_metadata"
                    failures.add(row, sample_id, reason, f"{task.name}: {err}; write the tar again")
                except DecodeError as err:
                    failures.add(row, sample_id, *no_duration(task.name, sample_id, err))
            found.append((*values[:5], language or values[5], *values[6:]))
    return dataclasses.replace(located(task, _arrays(found), failures), unused=unused.counts)


class _Finder:
    """Sample id to stem."""

    def __init__(self, members: Members) -> None:
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


def _values(
    descriptor: int, index: TarIndex, members: Members, stem: str, duration_s: float, unused: Unused
) -> tuple[Any, ...]:
    row, _ = clip = members.audio[stem]
    sidecar: Sidecar = sidecar_of(descriptor, index, members, (stem,))
    stated_s = sidecar.duration_s if math.isnan(duration_s) else duration_s
    unused.add(sidecar.unused)
    if math.isnan(duration_s):
        duration_s = clip_duration_s(descriptor, index, clip, stated_s=stated_s)
    place = (storable(index.names[row]), index.offsets[row], index.sizes[row])
    return *place, stated_s, duration_s, sidecar.language, sidecar.prompt, sidecar.text


def _arrays(found: list[tuple[Any, ...]]) -> dict[str, Any]:
    names = ("member", "offset", "size", "stated_s", "duration_s", "language", "prompt", "text")
    text = pa.large_string()
    kinds = (text, pa.int64(), pa.int64(), pa.float64(), pa.float64(), text, text, text)
    columns = zip(*found, strict=True) if found else ([] for _ in names)
    return {name: pa.array(values, kind) for name, kind, values in zip(names, kinds, columns, strict=True)}


def _missing(index: TarIndex, written: str, tar_name: str) -> tuple[str, str]:
    for refused in index.refused:
        if refused.name.rpartition(".")[0] == written:
            return missing_reason(index, refused.name, tar_name)
    return "missing_member", f"{tar_name} has no audio member {written}.*; correct the manifest or the tar"


def _read(manifest: SourceFile, files: NamedFiles) -> pa.Table:
    names = [*"abcd"]
    try:
        with at_hand(manifest.path) as local:
            table = _table(local, names)
        seconds = pc.if_else(pc.equal(table["d"], ""), "nan", table["d"])
        durations = pc.cast(seconds, pa.float64())
    except OSError as err:
        raise ManifestError(
            f"cannot read manifest {manifest.path}: {err}; check the path and its permissions", code="FB201"
        ) from err
    except pa.ArrowInvalid as err:
        raise _first_problem(manifest, err) from err
    tars = table["a"].combine_chunks().dictionary_encode()
    for written in tars.dictionary.to_pylist():
        if usable_name(written):
            raise _first_problem(manifest, None)
    if pc.any(pc.equal(table["b"], "")).as_py():
        raise _first_problem(manifest, None)
    by_code = np.asarray(
        [files.number(written, manifest=manifest) for written in tars.dictionary.to_pylist()], np.int32
    )
    numbers = pa.array(by_code[tars.indices.to_numpy()])
    return row_table(
        {
            "sample_id": table["b"],
            "member": table["b"],  # as it is written: the id may yet become another, to be unique
            "group": numbers,
            "file": numbers,
            "size": constant(UNLOCATED, len(table), pa.int64()),
            "duration_s": durations,
            "language": table["c"],
        },
        num_rows=len(table),
    )


def _table(path: Path, names: list[str]) -> pa.Table:
    return pc_csv.read_csv(
        path,
        # One thread: several would split the lines among themselves in another order than they stand in.
        read_options=pc_csv.ReadOptions(column_names=names, use_threads=False),
        parse_options=pc_csv.ParseOptions(delimiter="\t", quote_char=False, escape_char=False),
        convert_options=pc_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=False
        ),
    )


def _first_problem(manifest: SourceFile, err: Exception | None) -> ManifestError:
    """What is wrong and where: looked for line by line, which the fast way cannot tell."""
    with at_hand(manifest.path) as local:
        data = local.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(re.split(rb"\r\n|\n|\r", data), 1):
        problem = _line_problem(decoded(line, manifest.path, number)) if line else None
        if problem:
            return ManifestError(f"{manifest.path}, line {number}: {problem}; correct the manifest", code="FB203")
    return ManifestError(
        f"{manifest.path}: {err or 'no rows'}; wanted tab-separated {', '.join(COLUMNS)}", code="FB203"
    )


def _line_problem(line: str) -> str | None:
    fields = line.split("\t")
    if len(fields) != len(COLUMNS):
        return f"{len(fields)} columns, wanted {len(COLUMNS)}: {', '.join(COLUMNS)}, separated by tabs"
    if problem := usable_name(fields[0]):
        return f"column {COLUMNS[0]} {problem}"
    if not fields[1]:
        return f"column {COLUMNS[1]} is empty, wanted the member's name without extension"
    try:
        if fields[3]:
            pc.cast(pa.scalar(fields[3]), pa.float64())
    except pa.ArrowInvalid:
        return f"column {COLUMNS[3]} is {fields[3]!r}, wanted a number (the file has no header line)"
    return None


def read_ljspeech(piece: Piece, rows: Sink) -> None:
    """Gives the rows of `metadata.csv`: `id|text|normalised text`, audio in `wavs/{id}.wav` or `.flac` beside it.

    The normalised text is taken where there is one, else the text. Quotation marks are text.
    Raises ManifestError, with the line, for other numbers of columns and empty ids, and where there is no `wavs/`.
    """
    path = Path(piece.path)
    present = _audio_names(path)
    for number, line in manifest_lines(path):
        sample_id, text = _ljspeech_fields(decoded(line, path, number), f"{path}, line {number}")
        name = next((n for e in _EXTENSIONS if (n := sample_id + e) in present), sample_id + _EXTENSIONS[0])
        record = Record({"audio": f"{AUDIO_FOLDER}/{name}", "text": text})
        rows.take(record, where=f"{path}, line {number}", stem=sample_id, number=number)


def _ljspeech_fields(line: str, where: str) -> tuple[str, str]:
    fields = line.split("|")
    if len(fields) not in (2, 3):
        raise ManifestError(
            f"{where}: {len(fields)} columns, wanted id|text|normalised text; correct the manifest", code="FB203"
        )
    sample_id, text = fields[0].strip(), fields[-1] if fields[-1].strip() else fields[1]
    if not sample_id or "\0" in sample_id:
        raise ManifestError(
            f"{where}: column id is {sample_id!r}, wanted the name of a file in {AUDIO_FOLDER}/", code="FB203"
        )
    return sample_id, text


def _audio_names(metadata: Path) -> set[str]:
    folder = metadata.parent / AUDIO_FOLDER
    try:
        return names_in(folder)
    except OSError as err:
        raise ManifestError(f"{metadata}: cannot read folder {folder}: {err.strerror}; wanted the audio there") from err


READER = Reader(recordings=RecordingLister(list=list_filelist, locate=locate_filelist, in_tars=True))
LJSPEECH_READER = Reader(read=read_ljspeech)
