from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheIncompleteError,
    CacheMismatchError,
    CacheNotFoundError,
    ConfigError,
)
from forebay.store import shard as shard_module
from forebay.store.cache import Cache, open_cache
from forebay.store.metadata import write_metadata
from tests.store.trees import flip, set_writable, tree
from tests.store_factory import make_cache

NUM_SAMPLES = 11
FAILED = (0, 5, 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """11 samples among 14 rows in 4 shards a group; the first and the last row have failed."""
    root = tmp_path_factory.mktemp("caches")
    return make_cache(root, num_samples=NUM_SAMPLES, failed_rows=FAILED, keep_waveform=True, max_duration_s=0.4)


@pytest.fixture(scope="module")
def values(folder: Path) -> list[dict[str, bytes]]:
    """The bytes of every sample, read one after the other."""
    cache = open_cache(folder)
    return [as_bytes(cache.read(index)) for index in range(NUM_SAMPLES)]


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def as_bytes(sample: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in sample.items()}


def test_a_cache_says_what_it_is(folder: Path) -> None:
    cache = forebay.open_cache(folder)
    assert isinstance(cache, forebay.Cache)
    assert len(cache) == NUM_SAMPLES
    assert cache.num_shards == 4
    assert repr(cache) == f"Cache('{folder}', key={cache.key[:16]}, num_samples={NUM_SAMPLES})"
    assert [name for name, spec in cache.fields.items() if spec.role == "tensor"] == [
        *("input_features", "pad_value", "waveform"),
        *("input_ids", "prefix_len"),
    ]
    assert cache.constants["sample_rate_hz"] == 16_000
    assert [path.name for path, _ in cache.shard_entries("text")] == [f"{i:05d}.tdz" for i in range(4)]
    assert [divmod(slot, 1 << 32) for slot in cache.slots.tolist()] == [
        divmod(i, 4) for i in range(14) if i not in FAILED
    ]


def test_a_sample_has_the_fields_dtypes_and_lengths_that_the_cache_declares(folder: Path) -> None:
    cache = open_cache(folder)
    for index in range(len(cache)):
        sample = cache.read(index)
        for name, value in sample.items():
            assert (value.dtype, value.shape[1:]) == (cache.fields[name].numpy_dtype, cache.fields[name].shape)
            assert not value.flags.writeable
        assert len(sample["waveform"]) == cache.lengths["num_audio_samples"][index]
        assert len(sample["input_features"]) == cache.lengths["num_frames"][index]
        assert len(sample["input_ids"]) == cache.lengths["num_tokens"][index]
    assert {name: length.dtype for name, length in cache.lengths.items()} == {
        name: np.dtype("int32") for name in ("num_audio_samples", "num_frames", "num_tokens")
    }


def test_indices_are_those_of_a_list(folder: Path, values: list[dict[str, bytes]]) -> None:
    cache = open_cache(folder)
    for index in range(-NUM_SAMPLES, NUM_SAMPLES):
        assert as_bytes(cache.read(index)) == values[index]
    assert as_bytes(cache.read(np.int64(3))) == values[3]  # type: ignore[arg-type]
    for index in (NUM_SAMPLES, -NUM_SAMPLES - 1):
        with pytest.raises(IndexError, match=f"sample {index} of a cache with {NUM_SAMPLES} samples"):
            cache[index]
    assert len(list(cache)) == NUM_SAMPLES  # type: ignore[call-overload]


def test_a_slice_is_a_list_of_samples(folder: Path) -> None:
    cache = open_cache(folder)
    everything = [{name: value.tolist() for name, value in cache[i].items()} for i in range(NUM_SAMPLES)]
    for part in (slice(0, 2), slice(None, None, -3), slice(-2, None), slice(20, 30), slice(3, 1)):
        found = cache[part]
        assert [{name: value.tolist() for name, value in sample.items()} for sample in found] == everything[part]
    assert {n: v.tolist() for n, v in cache[np.int64(3)].items()} == everything[3]
    assert {n: v.tolist() for n, v in cache[np.uint8(3)].items()} == everything[3]


@pytest.mark.parametrize("index", ["a0", 1.0, None, (0, 1), [0, 1]])
def test_an_index_of_another_type_is_a_type_error(folder: Path, index: Any) -> None:
    with pytest.raises(TypeError, match=f"an integer or a slice, not {type(index).__name__}; the index of an id"):
        open_cache(folder)[index]


def test_tensors_are_copies_that_nobody_else_sees(folder: Path, values: list[dict[str, bytes]]) -> None:
    before = tree(folder)
    cache = open_cache(folder)
    for _ in range(2):
        sample = cache[2]
        assert {name: value.numpy().tobytes() for name, value in sample.items()} == values[2]
        for value in sample.values():
            value.fill_(7)
    assert tree(folder) == before


def test_opening_and_reading_change_nothing_on_disk_and_need_no_right_to(
    copy: Path, values: list[dict[str, bytes]]
) -> None:
    set_writable(copy, is_writable=False)
    try:
        before = tree(copy.parent)
        cache = open_cache(copy)
        assert [as_bytes(cache[index]) for index in range(NUM_SAMPLES)] == values
        assert cache.samples.num_rows == NUM_SAMPLES
        assert int(cache.lengths["num_frames"].sum()) > 0
        assert tree(copy.parent) == before
    finally:
        set_writable(copy, is_writable=True)


@given(st.integers(1, 9), st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=30))
def test_any_order_with_any_number_of_open_shards(
    folder: Path, values: list[dict[str, bytes]], max_open_shards: int, order: list[int]
) -> None:
    cache = open_cache(folder, max_open_shards=max_open_shards)
    descriptors = len(os.listdir("/proc/self/fd"))
    held = []
    for index in order:
        held.append((index, cache.read(index)))
        assert len(os.listdir("/proc/self/fd")) <= descriptors + max(max_open_shards, 2 * len(held))
    for index, sample in held:  # views outlive the shard that was closed
        assert as_bytes(sample) == values[index]


def test_shards_beyond_the_limit_are_closed(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    cache = open_cache(folder, max_open_shards=1)
    opened = len(os.listdir("/proc/self/fd"))
    for index in range(NUM_SAMPLES):
        cache.read(index)
    assert len(os.listdir("/proc/self/fd")) <= opened + 1  # a mapping keeps its file's descriptor
    del cache
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("max_open_shards", [1, 3, 512])
def test_threads_share_a_cache(folder: Path, values: list[dict[str, bytes]], max_open_shards: int) -> None:
    cache = open_cache(folder, max_open_shards=max_open_shards)

    def reads(seed: int) -> int:
        wrong = 0
        for index in np.random.default_rng(seed).integers(0, NUM_SAMPLES, 100).tolist():
            wrong += as_bytes(cache.read(index)) != values[index]
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(reads, range(8))) == [0] * 8
    finally:
        sys.setswitchinterval(interval)


FORK = """
import os, sys, threading
from forebay.store.cache import open_cache
cache = open_cache(sys.argv[1], max_open_shards=2)
wanted = [sum(v.tobytes()[0] if v.size else 0 for v in cache.read(i).values()) for i in range(len(cache))]
def read(times):
    for _ in range(times):
        for i in range(len(cache)):
            assert sum(v.tobytes()[0] if v.size else 0 for v in cache.read(i).values()) == wanted[i]
thread = threading.Thread(target=read, args=(50,))
thread.start()
for _ in range(5):  # at any instant of the other thread's reads
    child = os.fork()
    if child == 0:
        try:
            read(5)
        except BaseException:
            os._exit(1)
        os._exit(0)
    read(2)
    assert os.waitpid(child, 0)[1] == 0
thread.join()
print("read")
"""


def test_a_forked_child_reads_while_the_parent_reads(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "read\n", "")


def test_a_pickle_opens_the_cache_anew(folder: Path, values: list[dict[str, bytes]]) -> None:
    cache = open_cache(folder, verify="never", max_open_shards=3)
    cache.read(0)
    data = pickle.dumps(cache)
    assert len(data) < 1000
    other = pickle.loads(data)  # noqa: S301 - our own bytes
    assert isinstance(other, Cache)
    assert (other.key, other.folder) == (cache.key, cache.folder)
    assert [as_bytes(other.read(index)) for index in range(NUM_SAMPLES)] == values
    assert pickle.dumps(other) == data


def test_a_pickle_does_not_open_another_cache_at_the_same_place(copy: Path, tmp_path: Path) -> None:
    data = pickle.dumps(open_cache(copy))
    shutil.rmtree(copy)
    os.rename(make_cache(tmp_path / "other", seed=1), copy)
    with pytest.raises(CacheMismatchError, match=r"key is [0-9a-f]{16}, wanted [0-9a-f]{16}"):
        pickle.loads(data)  # noqa: S301 - our own bytes


def test_a_relative_path_holds_when_the_process_goes_elsewhere(
    copy: Path, values: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    cache = open_cache(copy.name)
    monkeypatch.chdir("/")
    assert as_bytes(cache.read(1)) == values[1]


def test_a_cache_without_samples_opens(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=0, failed_rows=(0, 1)))
    assert len(cache) == 0
    assert list(cache) == []  # type: ignore[call-overload]
    assert cache.samples.num_rows == 0
    assert cache.lengths["num_frames"].shape == (0,)


def test_a_cache_without_shards_opens(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=0))
    assert (len(cache), cache.num_shards, cache.samples.num_rows) == (0, 0, 0)


def test_a_cache_without_text_has_media_alone(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=3, tokenizer=None))
    assert list(cache.read(2)) == ["input_features", "pad_value"]
    flip(*hash_of_row(cache, "text", 2))
    with pytest.raises(CacheCorruptError, match=r"text/00000\.tdz row 2"):
        open_cache(cache.folder).read(2)


def hash_of_row(cache: Cache, group: Any, row: int) -> tuple[Path, int]:
    path, entry = cache.shard_entries(group)[0]
    return path, entry.hash_offset + 8 * row


def test_every_damaged_sample_is_found_at_its_first_read_and_no_other_is(copy: Path) -> None:
    path, entry = open_cache(copy).shard_entries("audio")[1]
    flip(path, entry.spans[0][0])  # row 4 of the listing, sample 3; row 5 has failed
    cache = open_cache(copy)
    for index in range(NUM_SAMPLES):
        if index != 3:
            cache.read(index)
    for _ in range(2):
        with pytest.raises(
            CacheCorruptError, match=r"audio/00001\.tdz row 0 \(bytes from \d+\): stored xxh3-64 .*; run:"
        ):
            cache.read(3)
    assert len(open_cache(copy, verify="never").read(3)) == 5
    together, others = open_cache(copy), [index for index in range(NUM_SAMPLES) if index != 3]
    assert together.read_batch([2, 3]) is None, "`read` says why"
    assert together.read_batch(others) is not None
    assert together.read_batch([3]) is None


def test_verify_touch_hashes_a_sample_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.store import shard

    calls: list[int] = []
    real = shard.sample_hash

    def counted(values: Any) -> int:
        calls.append(1)
        return real(values)

    monkeypatch.setattr(shard, "sample_hash", counted)
    cache = open_cache(folder)
    for _ in range(3):
        cache.read(4)
    assert len(calls) == 2  # once a group
    for _ in range(3):
        cache.read_batch([4, 2])
    cache.read(2)
    assert len(calls) == 4
    open_cache(folder, verify="never").read_batch([4])
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["audio.npy", "text.npy", "slots.npy"])
def test_a_damaged_array_is_found_at_opening(copy: Path, name: str) -> None:
    for position in (0, 60, (copy / name).stat().st_size - 1):
        flip(copy / name, position)
        with pytest.raises(CacheCorruptError, match=rf"{name}: stored xxh3-128"):
            open_cache(copy)
        flip(copy / name, position)
    assert len(open_cache(copy)) == NUM_SAMPLES


def test_damaged_lengths_are_found_when_they_are_asked_for(copy: Path) -> None:
    flip(copy / "lengths.npy", (copy / "lengths.npy").stat().st_size - 1)
    cache = open_cache(copy)
    cache.read(0)
    with pytest.raises(CacheCorruptError, match=r"lengths\.npy: stored xxh3-128"):
        cache.lengths  # noqa: B018


@pytest.mark.parametrize("name", ["audio.npy", "slots.npy", "lengths.npy", "metadata.json"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises((CacheCorruptError, CacheIncompleteError), match=name):
        open_cache(copy).lengths  # noqa: B018


def test_a_missing_or_truncated_shard_is_named(copy: Path) -> None:
    shard = copy / "audio" / "00001.tdz"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    cache = open_cache(copy)
    cache.read(0)
    with pytest.raises(
        CacheCorruptError, match=rf"audio/00001\.tdz has {len(data) - 1} bytes, its cache says {len(data)}"
    ):
        cache.read(4)
    shard.unlink()
    with pytest.raises(CacheCorruptError, match=r"audio/00001\.tdz is missing from its cache; run: forebay preprocess"):
        cache.read(4)
    shard.write_bytes(data)
    assert len(cache.read(4)) == 5


@given(st.data())
def test_every_changed_byte_of_the_metadata_is_found(folder: Path, draw: st.DataObject) -> None:
    document = (folder / "metadata.json").read_bytes()
    position = draw.draw(st.integers(0, len(document) - 1))
    copy = folder.parent / "damaged"
    shutil.copytree(folder, copy, copy_function=os.link, dirs_exist_ok=False)
    try:
        flip(copy / "metadata.json", position, draw.draw(st.integers(1, 255)))
        with pytest.raises(CacheError, match=str(copy)):
            open_cache(copy)
    finally:
        shutil.rmtree(copy)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    document = json.loads((folder / "metadata.json").read_bytes())
    write_metadata(folder, {**document, "format_version": 99})
    with pytest.raises(CacheMismatchError, match="format_version is 99, this forebay reads up to 4; upgrade forebay"):
        open_cache(folder)


def test_arrays_of_another_shape_than_the_metadata_says_are_refused(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    document = json.loads((folder / "metadata.json").read_bytes())
    write_metadata(folder, {**document, "num_samples": 5})
    with pytest.raises(CacheCorruptError, match=r"slots\.npy holds int64 \[6\], its metadata says int64 \[5\]"):
        open_cache(folder)


def test_a_folder_that_is_no_cache_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(CacheIncompleteError, match="it is not sealed; run: forebay preprocess"):
        open_cache(tmp_path)
    with pytest.raises(CacheNotFoundError, match="nothing is not a folder"):
        open_cache(tmp_path / "nothing")
    write_metadata(tmp_path, {"format_version": 1, "key": "0", "num_batches": 3})  # as a plan has it
    with pytest.raises(CacheMismatchError, match=r"is not a cache: its metadata\.json has no constants, fields"):
        open_cache(tmp_path)


@pytest.mark.parametrize("number", [0, 1_001])
def test_impossible_numbers_of_open_shards_are_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(ConfigError, match=f"max_open_shards is {number}, wanted 1 to 1000"):
        open_cache(make_cache(tmp_path), max_open_shards=number)


def test_verify_open_finds_damage_at_opening_and_hashes_no_sample_later(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    opened = open_cache(copy, verify="open")
    monkeypatch.setattr(shard_module, "sample_hash", None)  # not called
    assert all(opened.read(index) for index in range(len(opened)))
    flip(copy / "audio" / "00000.tdz", (copy / "audio" / "00000.tdz").stat().st_size // 2)
    with pytest.raises(
        CacheCorruptError, match=r"00000.tdz: stored xxh3-128 .*; run: forebay preprocess CONFIG --verify"
    ):
        open_cache(copy, verify="open")


def test_a_cache_that_runs_out_of_handles_keeps_fewer_shards_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=12, rows_per_shard=1, max_duration_s=0.1))
    real = os.open

    def scarce(path: object, *rest: object, **more: object) -> int:
        if str(path).endswith(".tdz") and len(cache._open) >= 8:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", scarce)
    for index in range(12):
        assert cache.read(index)
    assert "out of handles, at most 4 shards are kept open" in caplog.text
    assert len(cache._open) <= 4
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert 1 <= sum(line.endswith(".tdz") for line in mapped) <= 4
