"""A cold form that is damaged, of somebody else, or of another cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from forebay.errors import (
    CacheCorruptError,
    CacheMismatchError,
    CacheNotFoundError,
    RemoteError,
    RemoteExistsError,
)
from forebay.store.cache import open_cache
from forebay.store.cold import arrays
from forebay.store.cold.pull import pull_zarr
from forebay.store.cold.push import push_to, push_zarr
from tests.store.cold.caches import Memory, same, settings_of
from tests.store.faults import Faults
from tests.store.trees import flip
from tests.store_factory import make_cache


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features of the cache of these tests have several objects, which end in the middle of shards."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 16_000)
    monkeypatch.setattr(arrays, "SHARD_BYTES", 48_000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "caches", num_samples=10, failed_rows=[1])


@pytest.fixture
def place(tmp_path: Path) -> Memory:
    return Memory(settings_of(tmp_path))


@pytest.fixture
def pushed(cache: Path, place: Memory) -> Memory:
    push_to(place, open_cache(cache))
    return place


def middle(data: bytes) -> bytes:
    """The data with a bit flipped."""
    third = len(data) // 3
    return data[:third] + bytes([data[third] ^ 1]) + data[third + 1 :]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("audio/values/input_features/c/1/0", r"c/1/0 is damaged, audio/0000\d.tdz needs it: chunk \d"),
        ("text/offsets/text/c/0", r"text/offsets/text/c/0 is damaged, text/0000\d.tdz needs it: chunk"),
        ("audio/frame/c/0", r"audio/frame/c/0 is damaged, audio/0000\d.tdz needs it"),
        ("files/slots.npy/c/0", r"files/slots.npy/c/0 is damaged, slots.npy needs it"),
    ],
)
def test_damage_is_named_and_mended(name: str, message: str, pushed: Memory, cache: Path, tmp_path: Path) -> None:
    pushed.data[name] = middle(pushed.data[name])
    with pytest.raises(RemoteError, match=f"{message}.*: forebay cache push CACHE /memory --form zarr --verify"):
        pull_zarr(pushed, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    report = push_to(pushed, open_cache(cache), verify=True)
    assert report.moved_files == 1
    assert report.read_back_bytes
    pull_zarr(pushed, tmp_path / "pulled")
    assert same(cache, tmp_path / "pulled")


def test_a_missing_object_is_no_zeros(pushed: Memory, cache: Path, tmp_path: Path) -> None:
    """zarr itself gives the fill value, without a word."""
    del pushed.data["audio/values/input_features/c/0/0"]
    with pytest.raises(RemoteError, match=r"input_features/c/0/0 is missing, audio/00000.tdz needs it; push the cache"):
        pull_zarr(pushed, tmp_path / "pulled")
    report = push_to(pushed, open_cache(cache))
    assert (report.already_there, report.moved_files) == (False, 1)
    pull_zarr(pushed, tmp_path / "pulled")
    assert same(cache, tmp_path / "pulled")


def test_other_values_that_are_well_compressed(pushed: Memory, tmp_path: Path) -> None:
    """Only the hash of the shard shows it: both hashes are named."""
    name = "audio/values/input_features/c/{}/0"
    pushed.data[name.format(0)] = pushed.data[name.format(1)]
    wanted = r"audio/00000.tdz made of /memory has xxh3-128 [0-9a-f]{32}, its cache says [0-9a-f]{32}; push the cache"
    with pytest.raises(RemoteError, match=wanted):
        pull_zarr(pushed, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    assert not list((tmp_path / ".pulled.pulling").rglob("audio/00000*"))


@pytest.mark.parametrize("name", ["files/metadata.json/c/0", "files/audio.npy/c/0"])
def test_damage_to_what_describes_the_cache(name: str, pushed: Memory, tmp_path: Path) -> None:
    pushed.data[name] = middle(pushed.data[name])
    with pytest.raises(CacheCorruptError, match=rf"is no zarr form of a cache: {name} is damaged or missing: chunk 0"):
        pull_zarr(pushed, tmp_path / "pulled")


def test_a_damaged_shard_is_not_pushed(cache: Path, place: Memory) -> None:
    flip(cache / "audio" / "00001.tdz", 20_000)
    with pytest.raises(CacheCorruptError, match=r"audio/00001.tdz: stored xxh3-128 .* computed .* --verify"):
        push_to(place, open_cache(cache))
    assert "zarr.json" not in place.data


def test_another_cache_is_refused(cache: Path, place: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_cache(make_cache(tmp_path / "others", num_samples=10, seed=5))
    with monkeypatch.context() as patch:
        patch.setattr(Memory, "read", _refused_at(Memory.read, "zarr.json", after=1))
        with pytest.raises(RemoteError, match="refused by the test"):
            push_to(place, other)
    del place.data["zarr.json"]
    before = dict(place.data)
    keys = f"cache of key {other.key[:16]}, this cache has key {cache.name[-16:]}"
    with pytest.raises(RemoteExistsError, match=f"files/zarr.json is of the zarr form of the {keys}"):
        push_to(place, open_cache(cache))
    push_to(place, other)
    with pytest.raises(RemoteExistsError, match=rf"/zarr.json is of the zarr form of the {keys}; use what is there"):
        push_to(place, open_cache(cache))
    with pytest.raises(RemoteExistsError, match="at level 3, wanted level 9"):
        push_to(place, other, level=9)
    again = make_cache(tmp_path / "again", num_samples=10, seed=5, rows_per_shard=5)
    assert open_cache(again).key == other.key
    with pytest.raises(RemoteExistsError, match="was sealed by another build"):
        push_to(place, open_cache(again))
    assert before.items() <= place.data.items()


def _refused_at(real: Callable[..., bytes], name: str, *, after: int) -> Callable[..., bytes]:
    """A `read` that fails for one name, but for the first times."""
    calls = iter(range(1_000))

    def read(self: Memory, wanted: str) -> bytes:
        if wanted == name and next(calls) >= after:
            raise RemoteError("refused by the test")
        return real(self, wanted)

    return read


def test_foreign_objects_are_named(cache: Path, place: Memory) -> None:
    place.data["thesis.txt"] = b"years of work"
    with pytest.raises(RemoteExistsError, match=r"holds what is not of the zarr form of this cache: thesis.txt; push"):
        push_to(place, open_cache(cache))
    place.data = {"audio/zarr.json": b"{}"}
    with pytest.raises(RemoteExistsError, match=r"has no files/zarr.json and holds audio/zarr.json: a part of a zarr"):
        push_to(place, open_cache(cache))


def test_a_foreign_hierarchy_and_a_newer_form(pushed: Memory, cache: Path, tmp_path: Path) -> None:
    memory: dict[str, Any] = {}
    zarr.create_group(zarr.storage.MemoryStore(memory)).create_array("x", data=np.arange(3))
    foreign = Memory(pushed.settings)
    foreign.data = {name: data.to_bytes() for name, data in memory.items()}
    with pytest.raises(CacheNotFoundError, match="is of a zarr hierarchy that forebay did not write"):
        pull_zarr(foreign, tmp_path / "pulled")
    with pytest.raises(RemoteExistsError, match="is of another zarr hierarchy"):
        push_to(foreign, open_cache(cache))
    root = json.loads(pushed.data["zarr.json"])
    root["attributes"]["forebay"]["form_version"] = 2
    pushed.data["zarr.json"] = json.dumps(root).encode()
    newer = "form_version is 2, this forebay reads up to 1; upgrade forebay"
    with pytest.raises(CacheMismatchError, match=newer):
        pull_zarr(pushed, tmp_path / "pulled")
    with pytest.raises(CacheMismatchError, match=newer):
        push_to(pushed, open_cache(cache))


def _arrays(root: Any) -> Any:
    return root["consolidated_metadata"]["metadata"]


def _codec(root: Any) -> Any:
    return _arrays(root)["audio/frame"]["codecs"][0]["configuration"]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda root: root.pop("consolidated_metadata"), "it has no consolidated metadata"),
    "no metadata": (lambda root: _arrays(root).pop("files/metadata.json"), "it has no files/metadata.json"),
    "no array": (lambda root: _arrays(root).pop("audio/frame"), "audio/frame is missing, or none that forebay writes"),
    "shape": (lambda root: _arrays(root)["audio/frame"].update(shape=[7]), r"audio/frame is uint8 .*'s metadata wants"),
    "type": (lambda root: _arrays(root)["audio/frame"].update(data_type="int8"), "audio/frame is int8 .* wants uint8"),
    "huge": (lambda root: _codec(root).update(chunk_shape=[1 << 40]), "audio/frame is uint8 .* wants uint8"),
    "zero": (lambda root: _codec(root).update(chunk_shape=[0]), "audio/frame is uint8 .* wants uint8"),
    "hash": (lambda root: root["attributes"]["forebay"].update(metadata="0" * 32), "stored xxh3-128 0{32}, computed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_documents_of_somebody_else(change: str, pushed: Memory, tmp_path: Path) -> None:
    root = json.loads(pushed.data["zarr.json"])
    changed, message = CHANGES[change]
    changed(root)
    pushed.data["zarr.json"] = json.dumps(root).encode()
    with pytest.raises((CacheCorruptError, CacheMismatchError), match=message):
        pull_zarr(pushed, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize("fail_at", [0, 7, 20])
@pytest.mark.few("7")
def test_a_full_disk(fail_at: int, cache: Path, tmp_path: Path) -> None:
    """Both ways: what was finished stays, nothing has a name that is not whole, and the next command goes on."""
    settings = settings_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, fail_at=fail_at, stays=True)
        with pytest.raises(OSError, match="No space left on device"):
            push_zarr(cache, str(tmp_path / "cold"), settings)
    push_zarr(cache, str(tmp_path / "cold"), settings)
    place = Memory(settings)
    push_to(place, open_cache(cache))
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, fail_at=fail_at, stays=True)
        with pytest.raises(OSError, match="No space left on device"):
            pull_zarr(place, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    pull_zarr(place, tmp_path / "pulled")
    assert same(cache, tmp_path / "pulled")
