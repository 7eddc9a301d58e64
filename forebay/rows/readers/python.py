"""`kind = "python"`: what a user's iterator yielded when it was listed; see `forebay.rows.readers.python_inputs`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError, ManifestError
from forebay.rows.kept_columns import parts_of_rows, require_values, values_in
from forebay.rows.locate import (
    Failures,
    Located,
    LocateTask,
    SpeechKind,
    header_duration_s,
    located,
    no_duration,
)
from forebay.rows.manifest import Manifest, Unused, require_rows, row_table
from forebay.rows.media_reader import opened
from forebay.rows.named_files import manifest_files, require_confined
from forebay.rows.readers.json_lines import JsonError, manifest_lines, parse_object, string_of
from forebay.store.source_files import SourceFile

_TYPES = {
    "row": pa.int64(),
    "sample_id": pa.large_string(),
    "file": pa.int32(),
    "offset": pa.int64(),
    "size": pa.int64(),
    **dict.fromkeys(("text", "language", "prompt"), pa.large_string()),
}
_FIELDS = frozenset({"id", "xxh3_128", "media", "offset", "size", "text", "language", "prompt"})
_MEDIA = re.compile(r"[0-9]{5}\.media")


def list_python(source: SourceConfig) -> Manifest:
    """Returns the rows that were written down when the iterator ran.

    Raises ManifestError where it has not run yet, or where the list is not as it was written.
    """
    [manifest] = manifest_files(source)
    path = manifest.path
    rows: list[tuple[Any, ...]] = []
    kept: list[tuple[Any, ...]] = []
    files, numbers, unused = [manifest], dict[str, int](), Unused()
    taken = _FIELDS.union(source.keep_columns)
    for number, line in manifest_lines(path):
        try:
            fields = parse_object(line)
            media = string_of(fields, ("media",), required=True) or ""
            offset, size = _place(fields)
            if _MEDIA.fullmatch(media) is None:
                raise JsonError(f"field media is {media!r:.40}, wanted a name as 00000.media")
            if media not in numbers:
                numbers[media] = len(files)
                files.append(SourceFile(media, path.parent / media, listed=False))
            texts = (string_of(fields, (name,)) for name in ("text", "language", "prompt"))
            sample_id = string_of(fields, ("id",), required=True)
            kept.append(values_in(fields, source.keep_columns))
            rows.append((len(rows), sample_id, numbers[media], offset, size, *texts))
            unused.add_of(fields, taken)
        except JsonError as err:
            raise ManifestError(
                f"{path}, line {number}: {err}; correct what the iterator yields, or run: forebay preprocess CONFIG "
                "--rebuild",
                code="FB129",
            ) from err
    require_rows(len(rows), [manifest])
    require_confined(files, source)
    columns = {name: pa.array(c, kind) for c, (name, kind) in zip(zip(*rows, strict=True), _TYPES.items(), strict=True)}
    columns |= {"group": columns["file"], "explicit_id": pa.array([True] * len(rows))}
    table = row_table(columns, num_rows=len(rows), kept=parts_of_rows(kept, source.keep_columns))
    require_values(table, unused.counts, where=", ".join(source.manifests))
    return Manifest(files=tuple(files), rows=table, unused=unused.counts)


def _place(fields: dict[str, Any]) -> tuple[int, int]:
    offset, size = fields.get("offset"), fields.get("size")
    if type(offset) is not int or type(size) is not int or not (0 <= offset < 1 << 62 and 0 <= size < 1 << 62):
        raise JsonError(f"offset and size are {offset!r:.40} and {size!r:.40}, wanted integers")
    return offset, size


def locate_python(task: LocateTask) -> Located:
    """Returns the durations that the headers of a task's sounds give."""
    failures = Failures()
    durations = np.full(len(task.rows), np.nan)
    columns = [task.rows[name].to_pylist() for name in ("row", "sample_id", "offset", "size")]
    with opened(task.paths[task.group]) as descriptor:
        for position, (row, sample_id, offset, size) in enumerate(zip(*columns, strict=True)):
            try:
                durations[position] = header_duration_s(descriptor, offset=offset, size=size)
            except DecodeError as err:
                failures.add(row, sample_id, *no_duration(task.name, sample_id, err))
    return located(task, {"duration_s": pa.array(durations)}, failures)


KIND = SpeechKind(list=list_python, locate=locate_python)
