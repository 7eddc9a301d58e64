"""`kind = "jsonl"`: one JSON object a line, one audio file a sample; `kind = "text"`: the same lines without audio."""

from __future__ import annotations

from functools import partial
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
from forebay.preprocess.sources.speech.locate import (
    DURATIONS,
    IDS,
    Failures,
    Located,
    LocateTask,
    SpeechKind,
    locate_loose,
    located,
)

_TYPES = {
    "row": pa.int64(),
    "group": pa.int32(),
    "sample_id": pa.large_string(),
    "explicit_id": pa.bool_(),
    "file": pa.int32(),
    "duration_s": pa.float64(),
    **dict.fromkeys(("language", "prompt", "text"), pa.large_string()),
}

_OF_TEXT = frozenset({"text", "language", "prompt", *IDS})
_OF_AUDIO = frozenset({"audio", *_OF_TEXT, *DURATIONS})


def list_jsonl(source: SourceConfig, *, has_audio: bool = True) -> Manifest:
    """Returns the rows of JSON lines `{"audio", "text", "language"?, "prompt"?, "sample_id"?, "duration_s"?}`.

    `audio` is relative to the manifest; an id left out is `audio` without its extension. `id` and `duration` are taken
    for `sample_id` and `duration_s`; other fields are counted by name. A text is taken as it is, with
    `language English<asr_text>` in front or not; null where there is none. A line with a field twice fails.
    Without audio a manifest is its own source file, an id left out is the manifest's name without its extension and the
    line, `texts/17`, and `audio` and durations are fields like any other.
    Raises ManifestError, with the line, for what is no such object; blank lines are passed over.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    rows: list[tuple[Any, ...]] = []
    unused, failures, count = Unused(), Failures(), 0
    for group, manifest in enumerate(manifests):
        stem = storable(path_stem(manifest.name))
        for number, line in manifest_lines(manifest.path):
            try:
                fields = parse_object(line)
                unused.add_of(fields, _OF_AUDIO if has_audio else _OF_TEXT)
                audio = _audio(fields) if has_audio else None
                given, *texts = _texts(fields)
                seconds = 0.0 if audio is None else seconds_of(fields, DURATIONS)
                file = group if audio is None else files.number(audio, manifest=manifest)
                sample_id = given or (f"{stem}/{number}" if audio is None else path_stem(audio))
                rows.append((count, group, sample_id, given is not None, file, seconds, *texts))
            except JsonError as err:
                if err.reason is None:
                    raise not_lines(manifest.path, number, str(err)) from err
                message = f"{manifest.path}, line {number}: {err}; correct the manifest"
                failures.add(count, f"{stem}/{number}", err.reason, message)
            count += 1
    require_rows(count, manifests)
    values = zip(*rows, strict=True) if rows else [()] * len(_TYPES)
    columns = {name: pa.array(c, kind) for c, (name, kind) in zip(values, _TYPES.items(), strict=True)}
    table = row_table(columns, num_rows=len(rows))
    return Manifest(files=tuple(files.files), rows=table, rejected=failures.table(), unused=unused.counts)


def _audio(fields: dict[str, Any]) -> str:
    audio = string_of(fields, ("audio",), required=True) or ""
    if problem := usable_name(audio):
        raise JsonError(f"field audio {problem}")
    return audio


def _texts(fields: dict[str, Any]) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a line."""
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, IDS)
    if given == "":
        raise JsonError(f"field {IDS[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in ("language", "prompt", "text"))


def _as_listed(task: LocateTask) -> Located:
    """Returns the rows as they are: there is nothing to find."""
    return located(task, {}, Failures())


KIND = SpeechKind(list=list_jsonl, locate=locate_loose)
TEXT = SpeechKind(list=partial(list_jsonl, has_audio=False), locate=_as_listed)
