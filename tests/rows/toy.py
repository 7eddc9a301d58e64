"""A kind of source that forebay does not have: tab-separated lines of a file's name, and a text or two."""

from __future__ import annotations

from pathlib import Path

from forebay.rows.reader import Piece, Reader, Record, Sink
from forebay.rows.readers.json_lines import manifest_lines


def read(piece: Piece, rows: Sink) -> None:
    for number, line in manifest_lines(Path(piece.path)):
        name, *texts = line.decode().split("\t")
        fields = (
            {"text": texts[0], "audio": name}
            if len(texts) == 1
            else dict(zip(("question", "answer"), texts, strict=True))
        )
        record = Record({**fields, "image": name, "sample_id": name})
        rows.take(record, where=f"{piece.name}, line {number}", number=number)


READER = Reader(read=read)
