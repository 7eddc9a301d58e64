"""`kind = "folder"`: recordings at any depth below a folder, with their texts beside them or in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import RECORDINGS, UNREAD, SourceConfig
from forebay.errors import ManifestError
from forebay.rows.locate import Failures, SpeechKind, locate_loose
from forebay.rows.manifest import Manifest, Unused, require_rows, row_table
from forebay.rows.named_files import manifest_files, path_stem, shown_name
from forebay.rows.readers.folder_table import read_texts
from forebay.rows.readers.json_lines import manifest_lines
from forebay.store.memo import SIZE
from forebay.store.remote.raw.sources import at_hand
from forebay.store.source_files import SourceFile

_LISTS = ".trans.txt"
"""LibriSpeech's lists: a line for each recording of their folder, its name and its text."""
_BESIDE = (".txt", ".lab", ".normalized.txt")
_NO_RECORDING = "(texts without a recording)"


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """The recordings of a listing in their order. names: relative to their entry of `source.manifest`, with slashes."""

    numbers: list[int]
    names: list[str]


def list_folder(source: SourceConfig) -> Manifest:
    """Returns the recordings below folders: `.wav`, `.flac`, `.ogg`, `.opus`, `.mp3`, `.aiff`, in the order of paths.

    Id: the path below the folder without its extension. Text: that of `NAME.txt`, else `NAME.lab`, else
    `NAME.normalized.txt` beside it, else of its line in a `*.trans.txt` of its folder; with `source.texts` that of its
    row in the table, and nothing else. Text files that belong to no recording are counted. A text that is not UTF-8
    fails as `bad_text`. Language: with `languages_from_folders` the first folder below the manifest's, else of the
    table. Raises ManifestError for two recordings that a row of the table may mean.
    """
    files = manifest_files(source)
    recordings = _recordings(files)
    require_rows(len(recordings.numbers), files)
    failures, unused = Failures(), Unused()
    columns: dict[str, Any] = {"text": None}
    kept: dict[str, Any] = {}
    if source.texts is None:
        columns["text"] = pa.array(list(_texts(files, recordings, failures, unused)), pa.large_string())
    else:
        columns, kept = read_texts(source, files, recordings.names, failures, unused)
    if source.languages_from_folders:
        folders = [name.partition("/")[0] if "/" in name else None for name in recordings.names]
        columns["language"] = pa.array(folders, pa.large_string())
    rows = row_table({**_places(files, recordings), **columns}, num_rows=len(recordings.names), kept=kept)
    bad = np.isin(np.arange(len(rows)), [row for row, *_ in failures.found])
    return Manifest(
        files=tuple(files), rows=rows.filter(pa.array(~bad)), rejected=failures.table(), unused=unused.counts
    )


def _recordings(files: Sequence[SourceFile]) -> Recordings:
    """A recording of a form that is not read is one where no other of its name is beside it."""
    numbers = [n for n, file in enumerate(files) if file.path.name.lower().endswith(RECORDINGS)]
    read = {path_stem(str(files[number].path)) for number in numbers}
    unread = [n for n, file in enumerate(files) if file.path.name.lower().endswith(UNREAD)]
    numbers = sorted([*numbers, *(n for n in unread if path_stem(str(files[n].path)) not in read)])
    return Recordings(numbers=numbers, names=[shown_name(files[number]) for number in numbers])


def _places(files: Sequence[SourceFile], recordings: Recordings) -> dict[str, Any]:
    """Returns where the recordings are; each entry of `source.manifest` is cut into shards by itself."""
    first: dict[int, int] = {}
    for number in recordings.numbers:
        first.setdefault(files[number].entry, number)
    stats = [files[number].stat for number in recordings.numbers]
    return {
        "sample_id": pa.array([path_stem(name) for name in recordings.names], pa.large_string()),
        "group": pa.array([first[files[number].entry] for number in recordings.numbers], pa.int32()),
        "file": pa.array(recordings.numbers, pa.int32()),
        "member": pa.array(recordings.names, pa.large_string()),
        "size": pa.array([0 if stat is None else stat[SIZE] for stat in stats], pa.int64()),
    }


def _texts(
    files: Sequence[SourceFile], recordings: Recordings, failures: Failures, unused: Unused
) -> Iterator[str | None]:
    """Yields the text of every recording, from the files beside it."""
    taken = set(recordings.numbers)
    others = {
        str(file.path): file
        for number, file in enumerate(files)
        if number not in taken and not file.path.name.lower().endswith(UNREAD)
    }
    listed = _listed_texts([file for file in others.values() if file.path.name.endswith(_LISTS)])
    beside = {path: file for path, file in others.items() if not path.endswith(_LISTS)}
    used = set()
    for row, number in enumerate(recordings.numbers):
        stem = path_stem(str(files[number].path))
        found = next((path for ending in _BESIDE if (path := stem + ending) in beside), None)
        if found is None:
            yield listed.pop(stem, None)
            continue
        used.add(found)
        try:
            yield _text(beside[found].path)
        except UnicodeDecodeError as err:
            message = f"{found} is not UTF-8: {err}; save it as UTF-8"
            failures.add(row, path_stem(recordings.names[row]), "bad_text", message)
            yield None
    unused.merge({_NO_RECORDING: len(beside) - len(used) + len(listed)})


def _text(path: Path) -> str:
    try:
        with at_hand(path) as local:
            return local.read_bytes().decode("utf-8-sig").strip()
    except OSError as err:
        raise ManifestError(
            f"cannot read {path}: {err.strerror}; check its permissions, or remove it", code="FB201"
        ) from err


def _listed_texts(lists: Sequence[SourceFile]) -> dict[str, str]:
    """Returns the texts of `*.trans.txt` by the path of their recording without its extension."""
    texts: dict[str, str] = {}
    for file in lists:
        for number, line in manifest_lines(file.path):
            try:
                name, _, text = line.decode("utf-8").strip().partition(" ")
            except UnicodeDecodeError as err:
                raise ManifestError(
                    f"{file.path}, line {number}: is not UTF-8: {err}; correct the line", code="FB203"
                ) from err
            texts[str(file.path.parent / name)] = text.strip()
    return texts


KIND = SpeechKind(list=list_folder, locate=locate_loose)
