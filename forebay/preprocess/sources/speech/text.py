"""`kind = "text"`: JSON lines of texts without audio."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.preprocess.sources.json_lines import JsonError, manifest_lines, not_lines, parse_object, string_of
from forebay.preprocess.sources.naming import manifest_files, path_stem
from forebay.preprocess.sources.rows import Manifest, Unused, constant, require_rows, row_table, storable
from forebay.preprocess.sources.speech.task import Failures, Located, LocateTask, SpeechKind, located

_STRINGS = ("sample_id", "language", "prompt", "text")

_ID = ("sample_id", "id")

_FIELDS = frozenset({*_STRINGS, *_ID})


def list_text(source: SourceConfig) -> Manifest:
    """Returns the rows of JSON lines `{"text", "sample_id"?, "language"?, "prompt"?}`.

    A manifest is its own source file.
    `id` is taken for `sample_id`; an id left out is the manifest's name without its extension and the line, `texts/17`.
    Other fields, `audio` among them, are counted by name; a line with a field twice fails. Raises ManifestError, with
    the line, for what is no such object.
    """
    manifests = manifest_files(source)
    columns: dict[str, list[Any]] = {name: [] for name in ("row", "sample_id", "explicit_id", "group", *_STRINGS[1:])}
    unused, failures, count = Unused(), Failures(), 0
    for group, manifest in enumerate(manifests):
        stem = storable(path_stem(manifest.name))
        for number, line in manifest_lines(manifest.path):
            try:
                given, *values = _row(line, unused)
            except JsonError as err:
                if err.reason is None:
                    raise not_lines(manifest.path, number, str(err)) from err
                message = f"{manifest.path}, line {number}: {err}; correct the manifest"
                failures.add(count, f"{stem}/{number}", err.reason, message)
            else:
                row = (count, given or f"{stem}/{number}", given is not None, group, *values)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
            count += 1
    require_rows(count, manifests)
    num_rows = len(columns["row"])
    arrays = {name: pa.array(values, _TYPES[name]) for name, values in columns.items()}
    arrays |= {"file": arrays["group"], "duration_s": constant(0.0, num_rows, pa.float64())}
    rows = row_table(arrays, num_rows=num_rows)
    return Manifest(files=tuple(manifests), rows=rows, rejected=failures.table(), unused=unused.counts)


_TYPES = {
    **dict.fromkeys(_STRINGS, pa.large_string()),
    "row": pa.int64(),
    "explicit_id": pa.bool_(),
    "group": pa.int32(),
}


def locate_text(task: LocateTask) -> Located:
    """Returns the rows as they are: there is nothing to find."""
    return located(task, {}, Failures())


def _row(line: bytes, unused: Unused) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a line."""
    fields = parse_object(line)
    unused.add_of(fields, _FIELDS)
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, _ID)
    if given == "":
        raise JsonError(f"field {_ID[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in _STRINGS[1:])


KIND = SpeechKind(list=list_text, locate=locate_text)
