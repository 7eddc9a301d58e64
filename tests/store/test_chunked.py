"""Slots are checked where they are touched, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import CacheCorruptError
from forebay.store import open_shards as chunked
from forebay.store.cache import open_cache
from forebay.store.metadata import load_array, save_array, write_metadata
from forebay.store.open_shards import SLOTS, SUMS, open_slots, slot_sums
from tests.store.trees import flip
from tests.store_factory import make_cache

CHUNK = 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "SLOTS_A_CHUNK", CHUNK)


def saved(folder: Path, count: int) -> tuple[np.ndarray, dict[str, object]]:
    array = np.arange(count, dtype=np.int64) * 3
    return array, {**save_array(folder, SLOTS, array), **slot_sums(array)}


@pytest.mark.parametrize("count", [0, 1, CHUNK, CHUNK + 1, 4 * CHUNK])
def test_slots_are_those_that_were_written(tmp_path: Path, count: int) -> None:
    array, entry = saved(tmp_path, count)
    assert (SUMS in entry) == (count > CHUNK)  # small caches have the bytes that they always had
    found = open_slots(tmp_path, SLOTS, entry, length=count, verify=True)
    for index in range(count):
        found.require(index)
        assert found.array[index] == array[index]
    assert np.array_equal(found.whole(), load_array(tmp_path, SLOTS, entry, verify=True))
    assert not found.whole().flags.writeable


def test_a_damaged_chunk_is_found_where_it_is_touched_and_nowhere_else(tmp_path: Path) -> None:
    _, entry = saved(tmp_path, 3 * CHUNK)
    flip(tmp_path / SLOTS, 128 + 8 * (CHUNK + 1), 1)
    found = open_slots(tmp_path, SLOTS, entry, length=3 * CHUNK, verify=True)
    found.require(0)
    found.require(2 * CHUNK)
    for index in (CHUNK, 2 * CHUNK - 1, CHUNK):  # not only the first time
        with pytest.raises(
            CacheCorruptError,
            match=r"slots\.npy: items from 4 on \(byte 32 of the array\): stored xxh3-64 [0-9a-f]{16}, computed",
        ):
            found.require(index)
    with pytest.raises(CacheCorruptError, match="items from 4 on"):
        found.whole()
    open_slots(tmp_path, SLOTS, entry, length=3 * CHUNK, verify=False).require(CHUNK)


def test_sizes_and_sums_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, entry = saved(tmp_path, 3 * CHUNK)
    with pytest.raises(CacheCorruptError, match=r"holds int64 \[12\], its metadata says int64 \[11\]"):
        open_slots(tmp_path, SLOTS, entry, length=11, verify=True)
    with pytest.raises(CacheCorruptError, match=r"1 checksums of chunks, wanted 3 for 12 items"):
        open_slots(tmp_path, SLOTS, {**entry, SUMS: ["0" * 16]}, length=12, verify=True)


def test_a_cache_of_many_slots_has_sums_and_is_refused_without(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=11)
    document = json.loads((folder / "metadata.json").read_bytes())
    entry = document["files"][SLOTS]
    assert len(entry[SUMS]) == 3
    for sums, match in (([], "0 checksums of chunks, wanted 3 for 11 items"), (["x", "y", "z"], "are no sums")):
        write_metadata(folder, {**document, "files": {**document["files"], SLOTS: {**entry, SUMS: sums}}})
        with pytest.raises(CacheCorruptError, match=match):
            open_cache(folder)
    del entry[SUMS]
    write_metadata(folder, document)
    with pytest.raises(CacheCorruptError, match="0 checksums of chunks, wanted 3 for 11 items"):
        open_cache(folder)


def test_few_slots_are_checked_when_a_cache_is_opened(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=CHUNK)
    open_cache(folder)
    flip(folder / SLOTS, 128 + 8, 1)
    with pytest.raises(CacheCorruptError, match=r"slots\.npy: stored xxh3-128"):
        open_cache(folder)


def test_a_cache_does_not_hand_out_the_sample_of_a_damaged_slot(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=11)
    flip(folder / SLOTS, 128 + 8 * 9, 1)
    cache = open_cache(folder)
    assert len(cache.read(0)["input_features"])
    for read in (cache.read, cache.sample_id):
        with pytest.raises(CacheCorruptError, match="items from 8 on"):
            read(9)
    with pytest.raises(CacheCorruptError, match="items from 8 on"):
        cache.slots  # noqa: B018
