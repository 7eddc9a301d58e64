"""Real recordings as a folder of files beside tables of every form, as people have them."""

from __future__ import annotations

import csv
import functools
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.rows.helpers import SPEECH

FORMS = (
    "commas.csv",
    "semicolons.csv",
    "common_voice.tsv",
    "rows.parquet",
    "lines.jsonl",
    "file.arrow",
    "stream.arrow",
)
COLUMNS = {"audio": "path", "text": "sentence", "language": "locale"}


@functools.cache
def recordings(count: int) -> tuple[tuple[str, bytes, str, str], ...]:
    """The first recordings of the demo: file name, bytes, transcript, language."""
    found = []
    for row in pq.read_table(SPEECH / "train.parquet").slice(0, count).to_pylist():
        with tarfile.open(SPEECH / row["tar_path"]) as tar:
            file = tar.extractfile(row["tar_member_name"])
            assert file is not None
            name = Path(row["tar_member_name"]).name
            found.append((name, file.read(), row["transcript"], row["language"]))
    return tuple(found)


def write_clips(folder: Path, *, count: int = 8) -> list[dict[str, Any]]:
    """Writes recordings, and returns a row for each: Common Voice's columns and some to keep."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (name, data, text, language) in enumerate(recordings(count)):
        (folder / name).write_bytes(data)
        speaker = f"speaker {number % 3}" if number != 4 else None
        kept = {"client_id": speaker, "snr": None if number == 2 else number * 1.25, "up_votes": number % 4}
        rows.append({"path": name, "sentence": text, "locale": language, **kept})
    return rows


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows in the form that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows))
    match path.suffix:
        case ".csv":
            mark = ";" if path.stem.startswith("semi") else ","
            with open(path, "w", newline="", encoding="utf-8-sig") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter=mark)
                writer.writeheader()
                writer.writerows(rows)
        case ".tsv":
            lines = ["\t".join("" if v is None else str(v) for v in row.values()) for row in rows]
            path.write_text("\n".join(["\t".join(rows[0]), *lines]) + "\n", encoding="utf-8")
        case ".parquet":
            pq.write_table(table, path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        case ".arrow":
            opened = pa.ipc.new_stream if path.stem == "stream" else pa.ipc.new_file
            with pa.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
                writer.write_table(table)
    return path
