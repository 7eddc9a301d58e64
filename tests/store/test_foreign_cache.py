"""A cache from somebody else: its checksums are right, and what it says is not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.store.cache import open_cache
from forebay.store.metadata import write_metadata
from tests.store_factory import make_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_cache(tmp_path, num_samples=4, rows_per_shard=2, max_duration_s=0.1, features="waveform")


def signed(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "metadata.json").read_bytes())
    write_metadata(folder, {k: v for k, v in {**document, **changes}.items() if k != "checksum"})


def signed_file(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    files = json.loads((folder / "metadata.json").read_bytes())["files"]
    entry = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    signed(folder, files={**files, name: entry})


def changed_table(folder: Path, name: str, value: int) -> None:
    table = np.load(folder / "audio.npy").copy()
    if name == "spans":
        table["spans"][0][0][0] = value
    else:
        table[name][0] = value
    np.save(folder / "audio.npy", table)
    signed_file(folder, "audio.npy", (folder / "audio.npy").read_bytes())


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "", "audio/00000.tdz", "a\0b"])
def test_it_names_no_file_outside_of_its_folder(folder: Path, name: str) -> None:
    files = json.loads((folder / "metadata.json").read_bytes())["files"]
    signed(folder, files={**files, name: {"size_bytes": 1, "xxh3_128": "0" * 32}})
    with pytest.raises(CacheCorruptError, match=r"names a file .* which is not in the cache; run: forebay preprocess"):
        open_cache(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_samples": -1}, "num_samples is -1"),
        ({"num_samples": 1 << 60}, "num_samples is"),
        ({"groups": [2]}, r"groups is \[2\], wanted dict"),
        ({"groups": {}}, "it has no group text"),
        ({"groups": {"text": {"num_shards": "2", "num_items": None}}}, "num_shards is '2'"),
        ({"groups": {"text": {"num_shards": True, "num_items": None}}}, "num_shards is True"),
        ({"groups": {"text": {"num_shards": 2, "num_items": 4}}}, "it has no group text, whose rows are the samples"),
        ({"groups": {"../text": {"num_shards": 2, "num_items": None}}}, "a group is called '../text'"),
        (
            {"groups": {name: {"num_shards": n, "num_items": None} for n, name in enumerate(("audio", "text"), 1)}},
            "audio has 1 shards, text 2",
        ),
        ({"key": None}, "key is None, wanted str"),
        ({"fields": [{"name": "a"}]}, "a field is"),
        ({"fields": [{"name": "a", "dtype": "object"}]}, "a field is"),
        ({"fields": ["x"]}, "a field is"),
        ({"files": {}}, "it names no slots.npy"),
        ({"files": {"slots.npy": 3}}, "the entry of slots.npy is 3"),
        ({"length_names": [3]}, "length_names holds what is no name"),
    ],
)
def test_a_value_of_another_type_is_named(folder: Path, changes: dict[str, Any], match: str) -> None:
    signed(folder, **changes)
    with pytest.raises((CacheCorruptError, CacheMismatchError), match=match):
        open_cache(folder)


@pytest.mark.parametrize(("name", "value"), [("rows", -1), ("rows", 1 << 40), ("hash_offset", -8), ("spans", 1 << 50)])
def test_a_table_that_leads_out_of_its_shard_is_refused(folder: Path, name: str, value: int) -> None:
    changed_table(folder, name, value)
    with pytest.raises(CacheCorruptError, match=r"00000.tdz: its entry in the shard table leads out of the file"):
        open_cache(folder).read(0)


@pytest.mark.parametrize("slot", [-1, 5 << 32, 7])
def test_a_slot_that_is_not_there_is_named(folder: Path, slot: int) -> None:
    slots = np.load(folder / "slots.npy").copy()
    slots[1] = slot
    np.save(folder / "slots.npy", slots)
    signed_file(folder, "slots.npy", (folder / "slots.npy").read_bytes())
    cache = open_cache(folder)
    for read in (lambda: cache.read(1), lambda: cache.sample_id(1), lambda: cache.samples):
        with pytest.raises(CacheCorruptError, match=r"slots.npy: sample 1 is said to lie in shard"):
            read()


@pytest.mark.parametrize("name", ["audio/00000.tdz", "slots.npy", "metadata.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    outside = folder.parent / "outside"
    shutil.move(path, outside)
    if kind == "link":
        path.symlink_to(outside)
    else:
        os.mkfifo(path)
    with pytest.raises(CacheCorruptError, match=r"no regular file|cannot be opened|bytes, its cache says"):
        open_cache(folder).read(0)


def test_a_linked_group_is_refused(folder: Path) -> None:
    shutil.move(folder / "audio", folder.parent / "outside")
    (folder / "audio").symlink_to(folder.parent / "outside")
    with pytest.raises(CacheCorruptError, match=r"audio is a link and leads out of its cache"):
        open_cache(folder)


def test_lengths_of_another_forebay_are_named_when_the_cache_is_opened(folder: Path) -> None:
    signed(folder, length_names=["num_samples", "num_frames", "num_tokens"])
    wanted = (
        r"length_names has no num_audio_samples, it has num_samples, num_frames, num_tokens; "
        r"run: forebay preprocess CONFIG --rebuild"
    )
    with pytest.raises(CacheCorruptError, match=wanted):
        open_cache(folder)


def test_a_row_table_that_lacks_its_rate_is_refused(folder: Path) -> None:
    signed(folder, constants={"audio": {}, "text": {}})
    cache = open_cache(folder)
    with pytest.raises(CacheCorruptError, match=r"none that forebay writes: sample_rate_hz is"):
        assert cache.samples
