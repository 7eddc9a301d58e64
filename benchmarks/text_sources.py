"""The cost of listing texts: `python -m benchmarks.text_sources [--tiny] [--json] [--rounds N]`.

A million lines in every form of `kind = "text"`: all of them, all and 1,000 that were added, the first 1,000
(`max_samples`), and 1,000 in the middle (`source.rows`): for the first time, with the index, and after growth. Beside
them stands what reading the bytes of the file costs. Files are in memory; CPU seconds are those of the process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from forebay.config.data import SourceConfig
from forebay.rows.list_rows import list_rows
from forebay.rows.manifest import meaning_named
from forebay.rows.readers.line_blocks import CODECS

FORMS = ("txt", "txt.gz", "txt.zst", "jsonl", "jsonl.zst", "parquet")
MORE = 1000


def line_of(number: int) -> str:
    """Returns a text of about 70 bytes."""
    return f"Line {number} says what a sentence of a common length says, and nothing else."


def write(path: Path, count: int) -> Path:
    """Makes a file of texts in the form that its name says."""
    texts = [line_of(number) for number in range(count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=max(1, count // 20))
        return path
    lines = texts if ".txt" in path.name else [json.dumps({"text": text, "language": "en"}) for text in texts]
    data = "".join(f"{line}\n" for line in lines).encode()
    codec = CODECS.get(path.suffix)
    path.write_bytes(data if codec is None else pa.Codec(codec).compress(data, asbytes=True))
    return path


def measure(form: str, *, count: int, rounds: int) -> dict[str, Any]:
    """Returns the CPU seconds of each kind of listing."""
    middle = f"{count // 2}:{count // 2 + MORE}"
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            root, path = Path(folder) / f"root{number}", Path(folder) / f"texts.{form}"

            def took(name: str, work: Callable[[], Any]) -> None:
                found.setdefault(name, []).append(report.timed(work).cpu_s)

            def listed(wanted: int, **settings: Any) -> None:
                source = SourceConfig(kind="text", manifest=str(path), **settings)  # noqa: B023  called in its round
                rows = len(list_rows(source, meaning_named("texts"), cache_root=root).rows)  # noqa: B023
                if rows != wanted:
                    raise SystemExit(f"{path}: {rows} rows, wanted {wanted}; no figure is worth anything")  # noqa: B023

            write(path, count)
            took("read_s", path.read_bytes)
            took("all_s", lambda: listed(count))
            took("first_1000_s", lambda: listed(MORE, max_samples=MORE))
            took("middle_cold_s", lambda: listed(MORE, rows=middle))
            took("middle_s", lambda: listed(MORE, rows=middle))
            write(path, count + MORE)
            took("grown_s", lambda: listed(count + MORE))
            took("middle_grown_s", lambda: listed(MORE, rows=middle))
    return {"form": form, **{name: report.median(costs) for name, costs in found.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    options = report.arguments(__doc__, argv)
    count, rounds = (5000, 1) if options.tiny else (1_000_000, options.rounds or 1)
    rows = [measure(form, count=count, rounds=rounds) for form in FORMS]
    document = {"machine": report.machine("pyarrow"), "lines": count, "rounds": rounds, "listing": rows}
    report.show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
