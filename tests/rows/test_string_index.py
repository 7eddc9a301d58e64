from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.rows import equal_values
from forebay.rows.equal_values import StringIndex, first_rows, hashes_of

TEXTS = st.lists(st.text("ab\u00e9\U0001f600", max_size=3), max_size=40)


def chunked(texts: Sequence[str], size: int = 7) -> pa.ChunkedArray:
    blocks = [texts[at : at + size] for at in range(0, len(texts), size)]
    return pa.chunked_array([pa.array(block, pa.large_string()) for block in blocks], pa.large_string())


@pytest.fixture(params=["xxh3", "a bit"], autouse=True)
def hashing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings have hashes; where these are `a bit` long, most strings share one."""
    monkeypatch.setattr(equal_values, "BLOCK_ROWS", 5)
    if request.param == "a bit":
        monkeypatch.setattr("forebay.rows.equal_values.xxhash.xxh3_64_intdigest", lambda data: len(data) % 2)


@given(TEXTS)
def test_first_rows_are_those_of_a_plain_loop(texts: list[str]) -> None:
    assert first_rows(chunked(texts)).tolist() == [texts.index(text) for text in texts]


@given(st.lists(TEXTS, max_size=6))
def test_numbers_are_those_of_a_dictionary(blocks: list[list[str]]) -> None:
    index, known, numbers = StringIndex(), list[str](), dict[str, int]()

    def all_known() -> pa.Array:
        return pa.array(known, pa.large_string())

    for texts in blocks:
        block = pa.array(list(dict.fromkeys(texts)), pa.large_string())
        hashes = hashes_of(block)
        found = index.find(block, hashes, lambda at: all_known().take(pa.array(at)), all_known)
        assert found.tolist() == [numbers.get(text, -1) for text in block.to_pylist()]
        new = np.flatnonzero(found < 0)
        index.add(hashes[new], len(known))
        added: list[Any] = block.take(pa.array(new)).to_pylist()
        numbers |= {text: len(known) + at for at, text in enumerate(added)}
        known += added


def test_a_large_listing_has_few_runs() -> None:
    index = StringIndex()
    for block in range(64):
        index.add(np.arange(block * 100, block * 100 + 100, dtype=np.uint64), block * 100)
    assert len(index._runs) <= 7


def test_of_new_strings_none_is_compared_with_all_that_are_known() -> None:
    index, nothing = StringIndex(), pa.array([], pa.large_string())
    index.add(np.array([7], np.uint64), 0)
    found = index.find(pa.array(["b"], pa.large_string()), np.array([8], np.uint64), nothing.take, pytest.fail)
    assert found.tolist() == [-1]
