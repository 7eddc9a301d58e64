"""A kind of recordings that forebay does not have: tab-separated lines of a file's name and its text."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.rows.locate import SpeechKind, locate_loose
from forebay.rows.manifest import Manifest, row_table
from forebay.rows.named_files import NamedFiles, manifest_files
from forebay.rows.readers.json_lines import manifest_lines


def list_clips(source: SourceConfig) -> Manifest:
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    rows: list[tuple[Any, ...]] = []
    for group, manifest in enumerate(manifests):
        for _, line in manifest_lines(manifest.path):
            name, text = line.decode().split("\t")
            rows.append((name, group, files.number(name, manifest=manifest), text))
    columns = dict(zip(("sample_id", "group", "file", "text"), map(pa.array, zip(*rows, strict=True)), strict=True))
    return Manifest(files=tuple(files.files), rows=row_table(columns, num_rows=len(rows)))


KIND = SpeechKind(list=list_clips, locate=locate_loose)
