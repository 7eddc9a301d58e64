"""Measures the store of texts: `python -m benchmarks.text_store [--tiny] [--json]`.

A million different texts are kept, as the workers of a build keep them: 16,384 at a time. Then they are found, in their
order, in an order of chance, one by one, and after the page cache was asked to forget the files. What is not there is
looked for too. Beside it stands what a hash and a dictionary cost in Python, which is the least that a store could.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, arguments, machine, show, timed
from forebay.store.layout import Array
from forebay.store.texts import TextStore, TextValues, digests_of

BLOCK = 16_384
STEPS = {"normalize": [{"step": "Numbers", "version": 1}]}
WORDS = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
)


def texts_of(count: int) -> list[str]:
    """Returns different texts of 3 to 20 words, the same ones every time."""
    dice = random.Random(7)
    return [f"{' '.join(dice.choices(WORDS, k=dice.randint(3, 20)))} {number}" for number in range(count)]


def keep(values: TextValues, digests: Array, data: Sequence[bytes]) -> None:
    """Adds values block by block."""
    for start in range(0, len(data), BLOCK):
        values.add(digests[start : start + BLOCK], data[start : start + BLOCK])
    values.flush()


def find(values: TextValues, digests: Array, *, block: int = BLOCK) -> None:
    """Looks for texts block by block."""
    for start in range(0, len(digests), block):
        values.find(digests[start : start + block])


def forget(folder: Path) -> None:
    """Asks the kernel to drop the files' pages."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(root: Path, count: int) -> tuple[list[Row], dict[str, Any]]:
    """Returns the times, in microseconds a text, and what the store takes."""
    texts = texts_of(count)
    data = [text.encode() for text in texts]
    rows: list[Row] = []

    def time_it(what: str, work: Callable[[], object], number: int = count) -> None:
        cost = timed(work)
        rows.append({"what": what, "wall us": cost.wall_s / number * 1e6, "CPU us": cost.cpu_s / number * 1e6})

    time_it("hash of a text", lambda: digests_of(texts))
    digests = digests_of(texts)
    names = [bytes(digest) for digest in digests]
    known = dict(zip(names, data, strict=True))
    time_it("a dictionary in memory", lambda: list(map(known.get, names)))
    store = TextStore(root)
    time_it("add", lambda: keep(store.of(STEPS), digests, data))
    folder = store.of(STEPS).folder
    forget(folder)
    time_it("find, files not in memory", lambda: find(store.of(STEPS), digests))
    warm = store.of(STEPS)
    time_it("find, new process", lambda: find(warm, digests))
    time_it("find", lambda: find(warm, digests))
    order = np.random.default_rng(1).permutation(count)
    time_it("find, any order", lambda: find(warm, digests[order]))
    few = digests[order[: min(2000, count)]]
    time_it("find, one by one", lambda: find(warm, few, block=1), len(few))
    others = digests_of([f"{text}?" for text in texts[:BLOCK]])
    time_it("not there", lambda: find(warm, others), len(others))
    time_it("open, and find one text", lambda: store.of(STEPS).find(digests[:1]), 1)
    assert warm.find(digests[-BLOCK:]) == data[-BLOCK:]
    sizes = [path.stat().st_size for path in folder.iterdir()]
    return rows, {"texts": count, "files": len(sizes), "bytes": sum(sizes) / count, "raw": sum(map(len, data)) / count}


def main(argv: Sequence[str] | None = None) -> int:
    """Keeps and finds; prints times and sizes, a text."""
    options = arguments(__doc__, argv)
    with tempfile.TemporaryDirectory(prefix="forebay-texts-") as folder:
        rows, sizes = measured(Path(folder), 20_000 if options.tiny else 1_000_000)
    show({"machine": machine("numpy", "xxhash"), "store": sizes, "times": rows}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
