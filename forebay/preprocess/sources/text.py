"""`kind = "text"`: JSON lines of texts without audio."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from forebay.config import SourceConfig
from forebay.preprocess.sources.foreign import not_lines
from forebay.preprocess.sources.json_object import JsonError, parse_object, string_of
from forebay.preprocess.sources.lines import manifest_lines
from forebay.preprocess.sources.naming import manifest_files, path_stem
from forebay.preprocess.sources.rows import Manifest, constant, require_rows, row_table, storable
from forebay.preprocess.sources.task import Failures, Located, LocateTask, located

_STRINGS = ("sample_id", "language", "prompt", "text")
_ID = ("sample_id", "id")


def list_text(source: SourceConfig) -> Manifest:
    """Returns the rows of JSON lines `{"text": ..., "sample_id"?, "language"?, "prompt"?}`; each manifest is its own source file.

    `id` is taken for `sample_id`; an id left out is the manifest's name without its extension and the line, `texts/17`.
    Other fields are not looked at, `audio` among them. Raises ManifestError, with the line, for what is no such object.
    """
    manifests = manifest_files(source)
    columns: dict[str, list[Any]] = {name: [] for name in ("sample_id", "explicit_id", "group", *_STRINGS[1:])}
    for group, manifest in enumerate(manifests):
        stem = storable(path_stem(manifest.name))
        for number, line in manifest_lines(manifest.path):
            try:
                given, *values = _row(line)
            except JsonError as err:
                raise not_lines(manifest.path, number, str(err)) from err
            row = (given or f"{stem}/{number}", given is not None, group, *values)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    count = len(columns["text"])
    require_rows(count, manifests)
    arrays = {
        name: pa.array(values, pa.large_string() if name in _STRINGS else None) for name, values in columns.items()
    }
    arrays |= {"file": arrays["group"], "duration_s": constant(0.0, count, pa.float64())}
    return Manifest(files=tuple(manifests), rows=row_table(arrays, num_rows=count))


def locate_text(task: LocateTask) -> Located:
    """Returns the rows as they are: there is nothing to find."""
    return located(task, {}, Failures())


def _row(line: bytes) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a line."""
    fields = parse_object(line)
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, _ID)
    if given == "":
        raise JsonError(f"field {_ID[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in _STRINGS[1:])
