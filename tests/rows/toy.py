"""A kind of source that forebay does not have, tab-separated lines of a file and a text or two; and a meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.rows.manifest import MeantRow, Record
from forebay.rows.meanings.recordings import Recorded
from forebay.rows.reader import FilePiece, RowReader, Sink
from forebay.rows.readers.json_lines import manifest_lines


def read(piece: FilePiece, rows: Sink) -> None:
    is_heard = "audio" in piece.meaning.columns
    names = ("audio", "text") if is_heard else ("image", "question", "answer")
    for number, line in manifest_lines(Path(piece.path)):
        fields = dict(zip(names, line.decode().split("\t"), strict=True))
        record = Record({**fields, "sample_id": fields[names[0]]})
        rows.take(record, where=f"{piece.name}, line {number}", number=number)


READER = RowReader(read=read)


class Whispered(Recorded):
    """A meaning that forebay does not have: a recording whose text is written small."""

    def row(self, record: Record, **context: Any) -> MeantRow:
        row = super().row(record, **context)
        return row._replace(text=(row.text or "").lower())
