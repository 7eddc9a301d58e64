"""Slots are checked where they are touched, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import CacheCorruptError
from forebay.store import chunked as slots_module
from forebay.store.cache import open_cache
from forebay.store.chunked import FILE_NAME, SUMS, Slots, sums_entry
from forebay.store.metadata import load_array, save_array, write_metadata
from tests.store.trees import flip
from tests.store_factory import make_cache

CHUNK = 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "SLOTS_A_CHUNK", CHUNK)


def saved(folder: Path, count: int) -> tuple[np.ndarray, dict[str, object]]:
    array = np.arange(count, dtype=np.int64) * 3
    return array, {**save_array(folder, FILE_NAME, array), **sums_entry(array)}


@pytest.mark.parametrize("count", [0, 1, CHUNK, CHUNK + 1, 4 * CHUNK])
def test_slots_are_those_that_were_written(tmp_path: Path, count: int) -> None:
    array, entry = saved(tmp_path, count)
    assert (SUMS in entry) == (count > CHUNK)  # small caches have the bytes that they always had
    found = Slots(tmp_path, entry, length=count, verify=True)
    for index in range(count):
        found.require(index)
        assert found.at[index] == array[index]
    assert np.array_equal(found.all(), load_array(tmp_path, FILE_NAME, entry, verify=True))
    assert not found.all().flags.writeable


def test_a_damaged_chunk_is_found_where_it_is_touched_and_nowhere_else(tmp_path: Path) -> None:
    _, entry = saved(tmp_path, 3 * CHUNK)
    flip(tmp_path / FILE_NAME, 128 + 8 * (CHUNK + 1), 1)
    found = Slots(tmp_path, entry, length=3 * CHUNK, verify=True)
    found.require(0)
    found.require(2 * CHUNK)
    for index in (CHUNK, 2 * CHUNK - 1, CHUNK):  # not only the first time
        with pytest.raises(
            CacheCorruptError, match=r"slots\.npy slots from 4 on: stored xxh3-64 [0-9a-f]{16}, computed"
        ):
            found.require(index)
    with pytest.raises(CacheCorruptError, match="slots from 4 on"):
        found.all()
    Slots(tmp_path, entry, length=3 * CHUNK, verify=False).require(CHUNK)


def test_sizes_and_sums_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, entry = saved(tmp_path, 3 * CHUNK)
    with pytest.raises(CacheCorruptError, match=r"holds int64 \[12\], its metadata says int64 \[11\]"):
        Slots(tmp_path, entry, length=11, verify=True)
    with pytest.raises(CacheCorruptError, match=r"1 chunks_xxh3_64 in its metadata, wanted 3 for 12 slots"):
        Slots(tmp_path, {**entry, SUMS: ["0" * 16]}, length=12, verify=True)


def test_a_cache_with_and_without_sums_reads_the_same(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=11)
    document = json.loads((folder / "metadata.json").read_bytes())
    assert len(document["files"][FILE_NAME][SUMS]) == 3
    cache = open_cache(folder)
    wanted = [cache.sample_id(index) for index in range(11)]
    del document["files"][FILE_NAME][SUMS]  # as older caches have it
    write_metadata(folder, document)
    assert [open_cache(folder).sample_id(index) for index in range(11)] == wanted
    flip(folder / FILE_NAME, 128 + 8 * 10, 1)
    with pytest.raises(CacheCorruptError, match=r"slots\.npy: stored xxh3-128"):
        open_cache(folder)


def test_a_cache_does_not_hand_out_the_sample_of_a_damaged_slot(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=11)
    flip(folder / FILE_NAME, 128 + 8 * 9, 1)
    cache = open_cache(folder)
    assert len(cache.read(0)["input_features"])
    for read in (cache.read, cache.sample_id):
        with pytest.raises(CacheCorruptError, match="slots from 8 on"):
            read(9)
    with pytest.raises(CacheCorruptError, match="slots from 8 on"):
        cache.slots  # noqa: B018
