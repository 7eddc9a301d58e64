"""`kind = "jsonl"`: one JSON object a line, one audio file a sample."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.preprocess.sources.json_lines import (
    JsonError,
    manifest_lines,
    not_lines,
    parse_object,
    seconds_of,
    string_of,
)
from forebay.preprocess.sources.naming import NamedFiles, manifest_files, path_stem, usable_name
from forebay.preprocess.sources.rows import Manifest, Unused, require_rows, row_table, storable
from forebay.preprocess.sources.speech.durations import locate_loose
from forebay.preprocess.sources.speech.task import Failures, SpeechKind
from forebay.store.source_files import SourceFile

_COLUMNS = ("row", "group", "sample_id", "explicit_id", "file", "duration_s", "language", "prompt", "text")

_ID = ("sample_id", "id")

_DURATION = ("duration_s", "duration")

_FIELDS = frozenset({"audio", "text", "language", "prompt", *_ID, *_DURATION})


def list_jsonl(source: SourceConfig) -> Manifest:
    """Returns the rows of JSON lines `{"audio", "text", "language"?, "prompt"?, "sample_id"?, "duration_s"?}`.

    `audio` is relative to the manifest; an id left out is `audio` without its extension. `id` and `duration` are taken
    for `sample_id` and `duration_s`; other fields are counted by name. A text is taken as it is, with
    `language English<asr_text>` in front or not; null where there is none. A line with a field twice fails.
    Raises ManifestError, with the line, for what is no such object; blank lines are passed over.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    unused, failures, count = Unused(), Failures(), 0
    for group, manifest in enumerate(manifests):
        for number, line in manifest_lines(manifest.path):
            try:
                values = _row(line, manifest, files, unused)
            except JsonError as err:
                if err.reason is None:
                    raise not_lines(manifest.path, number, str(err)) from err
                message = f"{manifest.path}, line {number}: {err}; correct the manifest"
                failures.add(count, f"{storable(path_stem(manifest.name))}/{number}", err.reason, message)
            else:
                for column, value in zip(columns.values(), (count, group, *values), strict=True):
                    column.append(value)
            count += 1
    require_rows(count, manifests)
    arrays = {name: pa.array(values, _TYPES.get(name)) for name, values in columns.items()}
    rows = row_table(arrays, num_rows=len(columns["row"]))
    return Manifest(files=tuple(files.files), rows=rows, rejected=failures.table(), unused=unused.counts)


_TYPES = {
    **dict.fromkeys(("sample_id", "language", "prompt", "text"), pa.large_string()),
    **dict.fromkeys(("group", "file"), pa.int32()),
    "row": pa.int64(),
    "explicit_id": pa.bool_(),
    "duration_s": pa.float64(),
}


def _row(line: bytes, manifest: SourceFile, files: NamedFiles, unused: Unused) -> tuple[Any, ...]:
    fields = parse_object(line)
    unused.add_of(fields, _FIELDS)
    audio = string_of(fields, ("audio",), required=True) or ""
    problem = usable_name(audio)
    if problem:
        raise JsonError(f"field audio {problem}")
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, _ID)
    if given == "":
        raise JsonError(f"field {_ID[0]} is empty, wanted an id")
    return (
        given or path_stem(audio),
        given is not None,
        files.number(audio, manifest=manifest),
        seconds_of(fields, _DURATION),
        string_of(fields, ("language",)),
        string_of(fields, ("prompt",)),
        string_of(fields, ("text",)),
    )


KIND = SpeechKind(list=list_jsonl, locate=locate_loose)
