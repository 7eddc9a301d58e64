"""The bytes of a usage log: packed indices, lines, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.plan.usage import pack_ids, read_usage, to_line, unpack_ids


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
    (tmp_path / "u.jsonl").write_bytes(to_line({"version": 2}))
    with pytest.raises(CacheMismatchError, match="version is 2, this forebay reads up to 1"):
        read_usage(tmp_path / "u.jsonl")
