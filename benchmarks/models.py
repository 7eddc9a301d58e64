"""Writes docs/models.md: `python -m benchmarks.models [--tiny] [--json] [--rounds N]`.

Every class of AutoFeatureExtractor and AutoImageProcessor is made from its defaults, its folder is saved, and forebay
stores what it gives: through the declared form to bytes and back to a batch. Beside that stands a plain call of the
class. What is compared is the same in each run. The column CPU is timed on recordings and photos of the demo.

`--tiny` times two small inputs, writes nothing, and compares the rows with those of the page as it is: it ends with 1
where one differs. Every run ends with 1 where forebay's promise for a class and what was found disagree.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch

from benchmarks.report import arguments
from benchmarks.zoo.classes import Known, extractors, processors
from benchmarks.zoo.conversations import chat_section, sound_section
from benchmarks.zoo.losses_of_sound import loss_section
from benchmarks.zoo.page import PAGE, disagreement, fixed, line, page
from benchmarks.zoo.rows import Row, row_of


def rows_of(classes: Sequence[Known], *, rounds: int, full: bool) -> list[Row]:
    """Returns the row of each class, and says on standard error which one is worked on."""
    found = []
    for known in classes:
        start = time.process_time()
        found.append(row_of(known, rounds=rounds, full=full))
        print(f"{known.label}: {time.process_time() - start:.1f} s", file=sys.stderr)
    return found


def outdated(rows: Sequence[Row]) -> list[str]:
    """Returns the lines, without CPU, that the page does not have."""
    shown = {fixed(text) for text in PAGE.read_text(encoding="utf-8").splitlines() if text.startswith("| `")}
    return [text for row in rows if not row.cannot and (text := fixed(line(row))) not in shown]


def as_json(row: Row) -> dict[str, Any]:
    """Returns the row as JSON values."""
    return {
        "class": row.known.label,
        "cannot": row.cannot,
        "stored": row.stored,
        "bytes_share": row.bytes_share,
        "alone": str(row.alone),
        "batch": str(row.batch),
        "promise": str(row.promise or ""),
        "left_out": list(row.left_out),
        "cpu_times": row.cpu_times,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    torch.set_num_threads(1)
    rounds = options.rounds or (1 if options.tiny else 3)
    sounds = rows_of(extractors(), rounds=rounds, full=not options.tiny)
    pictures = rows_of(processors(), rounds=rounds, full=not options.tiny)
    rows = [*sounds, *pictures]
    if not options.tiny:
        chat = f"{chat_section()}\n{sound_section()}\n{loss_section()}"
        PAGE.write_text(page(sounds, pictures, chat=chat), encoding="utf-8")
    if options.json:
        print(json.dumps([as_json(row) for row in rows], indent=1))
    problems = [found for row in rows if (found := disagreement(row))]
    problems += [f"docs/models.md does not have: {text}" for text in (outdated(rows) if options.tiny else [])]
    for problem in problems:
        print(problem, file=sys.stderr)
    used = sum(not row.cannot for row in rows)
    print(f"{len(rows)} classes, {used} used, {len(problems)} problems", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
