"""`kind = "ljspeech"`: `metadata.csv` beside `wavs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.locate import SpeechKind, locate_loose
from forebay.rows.manifest import Manifest, require_rows, row_table
from forebay.rows.named_files import NamedFiles, manifest_files
from forebay.rows.readers.json_lines import decoded, manifest_lines
from forebay.store.remote.raw.sources import names_in
from forebay.store.source_files import SourceFile

AUDIO_FOLDER = "wavs"

_EXTENSIONS = (".wav", ".flac")


def list_ljspeech(source: SourceConfig) -> Manifest:
    """Returns the rows of `metadata.csv`: `id|text|normalised text`, audio in `wavs/{id}.wav` or `.flac` beside it.

    The normalised text is taken where there is one, else the text. Quotation marks are text.
    Raises ManifestError, with the line, for other numbers of columns and empty ids, and where there is no `wavs/`.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    rows: list[tuple[Any, ...]] = []
    for group, manifest in enumerate(manifests):
        present = _audio_names(manifest.path)
        for number, line in manifest_lines(manifest.path):
            sample_id, text = _fields(decoded(line, manifest.path, number), manifest, number)
            name = next((n for e in _EXTENSIONS if (n := sample_id + e) in present), sample_id + _EXTENSIONS[0])
            rows.append((sample_id, group, files.number(f"{AUDIO_FOLDER}/{name}", manifest=manifest), text))
    require_rows(len(rows), manifests)
    ids, groups, numbers, texts = zip(*rows, strict=True)
    columns = {
        "sample_id": pa.array(ids, pa.large_string()),
        "group": pa.array(groups, pa.int32()),
        "file": pa.array(numbers, pa.int32()),
        "text": pa.array(texts, pa.large_string()),
    }
    return Manifest(files=tuple(files.files), rows=row_table(columns, num_rows=len(rows)))


def _fields(line: str, manifest: SourceFile, number: int) -> tuple[str, str]:
    fields = line.split("|")
    where = f"{manifest.path}, line {number}"
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


KIND = SpeechKind(list=list_ljspeech, locate=locate_loose)
