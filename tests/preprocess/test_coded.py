"""Strings of shards by number: the same strings, whatever they hold, and one number for all shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.preprocess.group import Coded, Coder
from forebay.store.layout import FieldSpec
from forebay.store.shard import Shard, write_shard

FIELDS = (FieldSpec(name="why", dtype="str", group="text", role="table"),)
WORDS = st.sampled_from(("", "a", "b", "ab", "é", "\udcff", "\n")) | st.text("xyz", max_size=3)


@given(shards=st.lists(st.lists(WORDS, max_size=6), max_size=3))
def test_numbers_stand_for_the_strings(shards: list[list[str]]) -> None:
    coder, found = Coder(), [np.zeros(0, np.int32)]
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(shards):
            path = Path(folder) / f"{number}.tdz"
            entry = write_shard(path, FIELDS, [{"why": word} for word in words], key="00")
            found.append(coder.column(Shard(path, entry, FIELDS), "why"))
    coded = coder.coded(np.concatenate(found))
    assert [coded.names[code] for code in coded.codes.tolist()] == [word for words in shards for word in words]
    assert coded.names[0] == ""
    assert len(set(coded.names)) == len(coded.names)


def test_counts_are_of_the_rows_that_are_chosen() -> None:
    coded = Coded(("", "en", "fr"), np.array([1, 2, 1, 0], np.int32))
    assert coded.counts().tolist() == [1, 2, 1]
    assert coded.counts(np.array([True, False, True, False])).tolist() == [0, 2, 0]
    assert coded.counts(np.array([True, True, True, False]), np.array([2.0, 3.0, 4.0, 5.0])).tolist() == [0, 6, 3]
