"""`kind = "jsonl"`: one JSON object a line, or an array of them; one audio file a sample."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.rows.kept_columns import parts_of_rows, require_values, values_in
from forebay.rows.locate import (
    DURATIONS,
    IDS,
    Failures,
    SpeechKind,
    locate_loose,
)
from forebay.rows.manifest import SPAN, Manifest, Unused, require_rows, row_table, storable
from forebay.rows.named_files import NamedFiles, manifest_files, path_stem, usable_name
from forebay.rows.readers.json_lines import (
    JsonError,
    manifest_objects,
    not_lines,
    parse_object,
    seconds_of,
    string_of,
)
from forebay.rows.recording_pieces import BOUNDS, span_columns

_TYPES = {
    "row": pa.int64(),
    "group": pa.int32(),
    "sample_id": pa.large_string(),
    "explicit_id": pa.bool_(),
    "file": pa.int32(),
    "duration_s": pa.float64(),
    **dict.fromkeys(("language", "prompt", "text"), pa.large_string()),
}

TEXT_FIELDS = frozenset({"text", "language", "prompt", *IDS})
_FIELDS = frozenset({"audio", *TEXT_FIELDS, *DURATIONS})


def list_jsonl(source: SourceConfig) -> Manifest:
    """Returns the rows of JSON lines, or of one array, of `{"audio", "text", "language"?, "prompt"?, "sample_id"?,
    "duration_s"?}`.

    `audio` is relative to the manifest; an id left out is `audio` without its extension. `id` and `duration` are taken
    for `sample_id` and `duration_s`; other fields are counted by name. A text is taken as it is, with
    `language English<asr_text>` in front or not; null where there is none. A line with a field twice fails.
    Raises ManifestError, with the line, for what is no such object; blank lines are passed over. ConfigError for a
    field of `source.keep_columns` that no line has.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    rows: list[tuple[Any, ...]] = []
    kept: list[tuple[Any, ...]] = []
    spans: list[dict[str, Any]] = []
    taken = _FIELDS.union(source.keep_columns)
    unused, failures, count = Unused(), Failures(), 0
    for group, manifest in enumerate(manifests):
        stem = storable(path_stem(manifest.name))
        for where, line in manifest_objects(manifest.path):
            try:
                fields = parse_object(line)
                unused.add_of(fields, taken)
                audio = _audio(fields)
                given, *texts = texts_of(fields)
                seconds = seconds_of(fields, DURATIONS)
                to_keep = values_in(fields, source.keep_columns)
                file = files.number(audio, manifest=manifest)
                kept.append(to_keep)
                spans.append({name: fields[name] for name in fields.keys() & BOUNDS})
                rows.append((count, group, given or path_stem(audio), given is not None, file, seconds, *texts))
            except JsonError as err:
                if err.reason is None:
                    raise not_lines(manifest.path, where, str(err)) from err
                message = f"{manifest.path}, {where}: {err}; correct the manifest"
                failures.add(count, f"{stem}/{where.number}", err.reason, message)
            count += 1
    require_rows(count, manifests)
    values = zip(*rows, strict=True) if rows else [()] * len(_TYPES)
    columns = {name: pa.array(c, kind) for c, (name, kind) in zip(values, _TYPES.items(), strict=True)}
    bounds = span_columns(spans, sorted({name for row in spans for name in row}))
    columns |= {SPAN + name: column for name, column in bounds.items()}
    table = row_table(columns, num_rows=len(rows), kept=parts_of_rows(kept, source.keep_columns))
    require_values(table, unused.counts, where=", ".join(source.manifests))
    return Manifest(files=tuple(files.files), rows=table, rejected=failures.table(), unused=unused.counts)


def _audio(fields: dict[str, Any]) -> str:
    audio = string_of(fields, ("audio",), required=True) or ""
    if problem := usable_name(audio):
        raise JsonError(f"field audio {problem}")
    return audio


def texts_of(fields: dict[str, Any]) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a line. Raises JsonError for a line without the field `text`."""
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, IDS)
    if given == "":
        raise JsonError(f"field {IDS[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in ("language", "prompt", "text"))


KIND = SpeechKind(list=list_jsonl, locate=locate_loose)
