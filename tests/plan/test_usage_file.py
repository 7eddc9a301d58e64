"""The bytes of a usage log: packed indices, lines, and what is refused."""

from __future__ import annotations

import base64
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.plan.plan_usage import add_counts, pack_counts, pack_ids, read_usage, to_line, unpack_ids, walk_usage


@given(st.sets(st.integers(0, 2**32 - 1), max_size=60))
def test_packed_indices_come_back(indices: set[int]) -> None:
    rising = np.array(sorted(indices), np.int64)
    found = unpack_ids(pack_ids(rising))
    assert found.dtype == np.int64
    assert found.tolist() == rising.tolist()


def test_packed_indices_are_compact() -> None:
    """A whole epoch costs next to nothing; 25,600 of 75 M samples less than four bytes each, as text."""
    assert len(pack_ids(np.arange(1_000_000))) < 8_000
    scattered = np.sort(np.random.default_rng(0).choice(75_200_000, 25_600, replace=False))
    assert len(pack_ids(scattered)) < 4 * len(scattered)


@given(st.lists(st.integers(0, 2**20), max_size=60))
def test_packed_counts_are_added_as_those_of_an_object_are(counts: list[int]) -> None:
    totals = np.zeros((2, len(counts)), np.int64)
    add_counts(totals[0], pack_counts(np.array(counts, np.int64)))
    add_counts(totals[1], {str(number): count for number, count in enumerate(counts) if count})
    assert totals.tolist() == [counts, counts]


def test_the_shards_of_a_line_are_compact() -> None:
    """A run has 75 million clips in 146,484 shards: all of these are touched, or those of a window."""
    counts = np.random.default_rng(0).poisson(6.0, 146_484)
    assert len(pack_counts(counts)) < 150_000
    counts[700:] = 0
    assert len(pack_counts(counts)) < 1_200


@pytest.mark.parametrize("text", ["%%%", base64.b64encode(b"not zlib").decode(), "AAA"])
def test_other_text_is_no_indices(text: str) -> None:
    with pytest.raises(ValueError, match="no packed sample indices"):
        unpack_ids(text)


HEAD = to_line({"version": 1, "from_step": 0})
LINE = to_line({"step": 3, "from_step": 0})


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    for end in range(len(LINE)):
        path.write_bytes(HEAD + LINE + LINE[:end])
        assert read_usage(path) == ({"version": 1, "from_step": 0}, [{"step": 3, "from_step": 0}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin like a usage log"),
        (LINE, "does not begin like a usage log"),
        (HEAD + b"{]\n", "line 2 is not JSON"),
        (HEAD + b"[1]\n", "line 2 is a list, wanted an object"),
        (HEAD + to_line({"loss": 3.0}), "line 2 has no step"),
    ],
)
def test_what_is_no_usage_log_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "u.jsonl").write_bytes(content)
    with pytest.raises(CacheCorruptError, match=rf"u\.jsonl.*{message}"):
        read_usage(tmp_path / "u.jsonl")


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u.jsonl").write_bytes(to_line({"version": 3}))
    with pytest.raises(CacheMismatchError, match="version is 3, this forebay reads up to 2"):
        read_usage(tmp_path / "u.jsonl")


def test_a_log_is_walked_a_line_at_a_time(tmp_path: Path) -> None:
    path, shards = tmp_path / "u.jsonl", {str(number): number for number in range(5000)}
    lines = [to_line({"step": step + 1, "from_step": step, "shards": shards}) for step in range(100)]
    path.write_bytes(HEAD + b"".join(lines))
    tracemalloc.start()
    try:
        head, walked = walk_usage(path)
        ends = [end for line, end in walked if line["step"] % 25 == 0]
        assert tracemalloc.get_traced_memory()[1] < 4_000_000 < path.stat().st_size
    finally:
        tracemalloc.stop()
    assert head["version"] == 1
    assert ends == [len(HEAD) + sum(map(len, lines[:step])) for step in (25, 50, 75, 100)]
