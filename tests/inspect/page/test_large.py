"""A page and `forebay lint` of a large cache: they need few bytes a row, and find what plain code finds."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.here_pool import HerePool
from benchmarks.looked import made_cache
from forebay.inspect.checks.judge import _groups
from forebay.inspect.checks.lint import LintOptions, Target, lint
from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.page_samples import NEAR_S, PageColumns, _near_codes, content_codes, doubts_of
from forebay.inspect.page.write_pages import write_report
from forebay.store.cache import open_cache
from forebay.store.layout import Array
from tests.processes import python


def look(command: str, folder: Path) -> list[tuple[str, int, str | None]]:
    """Makes the page of a cache, or lints it in this process; returns what was found."""
    if command == "page":
        write_report(overview_of(open_cache(folder), None, choice=CardChoice(), roots=[]), folder.parent / "page.html")
        return []
    with mock.patch("forebay.inspect.checks.measured.Pool", HerePool):
        found = lint([Target(place=str(folder))], [], LintOptions(progress=False)).findings
    return [(each.check, each.row, each.other) for each in found]


def peak(command: str, folder: Path) -> int:
    """Returns the bytes that Python and numpy had at most, and those that arrow had at most in this process."""
    tracemalloc.start()
    look(command, folder)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found + int(pa.default_memory_pool().max_memory() or 0)


@pytest.mark.wide
@pytest.mark.parametrize("command", ["page", "lint"])
def test_it_needs_few_bytes_a_row(command: str, tmp_path: Path) -> None:
    small, large = (made_cache(tmp_path / str(count), num_shards=count) for count in (4, 8))
    # In a process of its own, since arrow counts from the beginning of one.
    done = python("-m", "tests.inspect.page.test_large", command, small, large)
    assert done.returncode == 0, done.stderr
    _, before, after = map(int, done.stdout.split())
    assert (after - before) / (4 * 999) < 400


def plain_near_codes(columns: PageColumns, exact: Array) -> Array:
    """Returns what `_near_codes` does, sample by sample."""
    texts = [text.strip().lower() for text in columns.texts.to_pylist()]
    first = {text: place for place, text in reversed(list(enumerate(texts)))}
    order = sorted(range(len(texts)), key=lambda i: (first[texts[i]], columns.length[i], i))
    found, seen, run = -1 - np.arange(len(texts)), set(), 0
    runs = {order[0]: 0}
    for one, two in itertools.pairwise(order):
        follows = texts[one] == texts[two] and columns.length[two] <= columns.length[one] * (1 + NEAR_S)
        runs[two] = run = run + (not follows)
    for place in range(len(texts)):
        if len(columns.texts[place].as_py()) >= 12 and (runs[place], exact[place]) not in seen:
            found[place] = runs[place]
        seen.add((runs[place], exact[place]))
    return found


def test_near_duplicates_are_those_that_plain_code_finds(tmp_path: Path) -> None:
    columns = PageColumns(open_cache(made_cache(tmp_path / "made", num_shards=1)))
    rng, count = np.random.default_rng(0), len(columns)
    said = [
        "A text of some length",
        "  a TEXT of some length\t",
        "short",
        "ÄHNLICHE WÖRTER, viele",
        "ähnliche wörter, VIELE",
    ]
    texts = [said[place] if place < 5 else f"a text with the number {place}" for place in rng.integers(0, 60, count)]
    columns.__dict__.update(
        texts=pa.chunked_array([texts[:300], texts[300:]], pa.large_string()), seconds=rng.integers(1, 400, count) / 40
    )
    exact = rng.integers(0, 200, count)
    found = _near_codes(columns, exact)
    assert found.tolist() == plain_near_codes(columns, exact).tolist()
    assert (np.unique(found, return_counts=True)[1] > 1).sum() > 50


@pytest.mark.parametrize("values", [0, 1, 2, 5, 50, 5000])
def test_groups_of_lint_are_rows_of_one_hash(values: int) -> None:
    hashes = np.random.default_rng(values).integers(0, values, 300) if values else np.zeros(0, np.int64)
    rows: dict[int, list[int]] = {}
    for row, value in enumerate(hashes.tolist()):
        rows.setdefault(value, []).append(row)
    assert list(_groups(hashes)) == [own for value, own in rows.items() if value and len(own) > 1]


def test_what_is_found_is_what_was_made_twice(tmp_path: Path) -> None:
    """The same twins are found as by the code before, which held all texts and rows as objects."""
    folder = made_cache(tmp_path / "made", num_shards=2)
    columns = PageColumns(open_cache(folder))
    doubts = doubts_of(columns)
    # A row of each shard failed: what is row 1499 of the shards is sample 1498.
    assert (doubts.exact.num_groups, doubts.exact.shown) == (2, ((249, 499), (1248, 1498)))
    assert len(np.unique(content_codes(columns.cache))) == len(columns) - 2
    assert (doubts.near.num_groups, doubts.near.shown) == (0, ())
    ids = columns.ids.to_pylist()
    assert look("lint", folder) == [
        ("format", -1, None),
        ("format", -1, None),
        ("duplicate", 499, ids[249]),
        ("duplicate", 1498, ids[1248]),
    ]


if __name__ == "__main__":
    print(*(peak(sys.argv[1], Path(name)) for name in (sys.argv[2], *sys.argv[2:])))
