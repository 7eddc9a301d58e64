"""Patches as they are stored are read a batch at a time, and are those that samples have one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.store.cache import open_cache
from tests.train.tiny_vl import conversation, conversations
from tests.train.vl_cache import make_vl_cache

SAMPLES = [*conversations(3, 9), conversation(np.random.default_rng(0), [])]


@pytest.mark.parametrize("indices", [[0, 9, 4, 4], [8, 0, 2]])
def test_a_batch_has_the_samples_of_single_reads(tmp_path: Path, indices: list[int]) -> None:
    cache = open_cache(make_vl_cache(tmp_path, SAMPLES))
    together = cache.read_batch(indices)
    assert together is not None
    for found, index in zip(together, indices, strict=True):
        wanted = cache.read(index)
        assert found.keys() == wanted.keys()
        assert len(found["patches"]) == len(wanted["patches"])
        assert all(map(np.array_equal, found["patches"], wanted["patches"]))
        for name in found.keys() - {"patches"}:
            assert found[name].dtype == wanted[name].dtype
            assert np.array_equal(found[name], wanted[name])
    assert cache.read_batch([0, 10]) is cache.read_batch([9]) is None  # no such sample, and not one with an image


def test_what_is_decoded_is_read_one_by_one(tmp_path: Path) -> None:
    assert open_cache(make_vl_cache(tmp_path, SAMPLES, codec="zstd")).read_batch([0, 1]) is None
