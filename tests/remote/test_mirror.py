from __future__ import annotations

import gc
import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from benchmarks.objects.faults import FORBIDDEN, Reset, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config.remote import RemoteConfig
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheReplacedError,
    ConfigError,
    RemoteError,
    RemoteReplacedError,
)
from forebay.store.cache import Cache
from forebay.store.held import ORIGIN
from forebay.store.remote.mirror import Mirror
from tests.processes import ROOT
from tests.remote.nodes import disk_bytes, files
from tests.remote.stored import node_settings, put_folder
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")
SAMPLES, ROWS = 24, 2
SHARDS = SAMPLES // ROWS


@pytest.fixture
def local(tmp_path: Path) -> Cache:
    return forebay.open_cache(make_cache(tmp_path / "caches", num_samples=SAMPLES, rows_per_shard=ROWS))


@pytest.fixture
def url(local: Cache, bucket: Bucket) -> str:
    return put_folder(bucket, local.folder, "caches/a")


@pytest.fixture
def settings(tmp_path: Path, proxy: Proxy) -> RemoteConfig:
    return node_settings(tmp_path, proxy.endpoint, timeout_s=5, retries=0)


def bound_of(local: Cache, *, pairs: int) -> int:
    """Room for what is small and so many shards of each group."""
    small = sum(-(-path.stat().st_size // 4096) * 4096 for path in local.folder.iterdir() if path.is_file())
    return small + 3 * 4096 + pairs * largest_pair(local)


def largest_pair(local: Cache) -> int:
    return sum(max(-(-e.size_bytes // 4096) * 4096 for _, e in local.shard_entries(group)) for group in local.groups)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def gets(proxy: Proxy, name: str) -> int:
    return sum(count for (method, key), count in proxy.requests.items() if method == "GET" and key.endswith(name))


def test_a_cache_of_a_url_is_the_local_one(
    tmp_path: Path, local: Cache, url: str, settings: RemoteConfig, proxy: Proxy
) -> None:
    cache = forebay.open_cache(url, remote=settings)
    assert files(tmp_path / "node") == set()
    assert gets(proxy, ".tdz") == 0
    for index in range(SAMPLES):
        assert equal(cache.read(index), local.read(index))
        assert cache.sample_id(index) == local.sample_id(index)
    assert cache.samples.equals(local.samples)
    assert {count for (_, key), count in proxy.requests.items() if key.endswith(".tdz")} == {1}
    assert cache.mirror is not None
    counters = cache.mirror.counters
    assert (counters.hits, counters.misses, counters.downloads) == (0, 2 * SHARDS, 2 * SHARDS + _num_small(local))
    assert counters.stalls == 2 * SHARDS


def _num_small(local: Cache) -> int:
    return len(local.metadata["files"]) + 1


def test_opening_again_asks_for_one_object(url: str, settings: RemoteConfig, proxy: Proxy) -> None:
    forebay.open_cache(url, remote=settings).read(0)
    before = proxy.requests
    again = forebay.open_cache(url, remote=settings)
    again.read(0)
    more = {key: count - before.get(key, 0) for key, count in proxy.requests.items() if count > before.get(key, 0)}
    assert [key.rpartition("/")[2] for _, key in more] == ["metadata.json"]
    assert sum(more.values()) == 1


def test_a_pickled_cache_and_the_folder_itself_go_on(local: Cache, url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    other = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert equal(other.read(5), local.read(5))
    assert equal(forebay.open_cache(cache.folder).read(7), local.read(7))


def test_processes_get_every_shard_once(local: Cache, url: str, settings: RemoteConfig, proxy: Proxy) -> None:
    code = (
        "import sys, forebay; from forebay.config.remote import RemoteConfig\n"
        "settings = RemoteConfig(endpoint=sys.argv[2], shard_dir=sys.argv[3])\n"
        "cache = forebay.open_cache(sys.argv[1], remote=settings)\n"
        "print(sum(len(cache.read(i)['input_features']) for i in range(len(cache))))"
    )
    arguments = [sys.executable, "-c", code, url, str(settings.endpoint), str(settings.shard_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    wanted = sum(len(local.read(index)["input_features"]) for index in range(SAMPLES))
    assert [process.communicate(timeout=120)[0] for process in processes] == [f"{wanted}\n"] * 4
    assert {count for (_, key), count in proxy.requests.items() if key.endswith(".tdz")} == {1}
    assert gets(proxy, "slots.npy") == 1


def test_a_small_bound_holds_and_everything_is_right(tmp_path: Path, local: Cache, url: str, proxy: Proxy) -> None:
    bound = bound_of(local, pairs=4)
    settings = node_settings(tmp_path, proxy.endpoint, bound_bytes=bound, timeout_s=5)
    cache = forebay.open_cache(url, remote=settings)

    def read(index: int) -> bool:
        assert cache.mirror is not None
        with cache.mirror.node.room.locked():
            assert disk_bytes(tmp_path / "node") <= bound
        return equal(cache.read(index), local.read(index))

    order = np.random.default_rng(0).permutation(np.tile(np.arange(SAMPLES), 4)).tolist()
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(read, order))
    assert cache.mirror is not None
    assert cache.mirror.counters.evictions > 0


def test_a_view_keeps_its_shard_on_disk(tmp_path: Path, local: Cache, url: str, proxy: Proxy) -> None:
    settings = node_settings(tmp_path, proxy.endpoint, bound_bytes=bound_of(local, pairs=2), timeout_s=0.3)
    cache = forebay.open_cache(url, remote=settings)
    batch = [cache.read(0), cache.read(ROWS)]
    held = {f"{group}/{number:05d}.tdz" for group in ("audio", "text") for number in (0, 1)}
    with pytest.raises(CacheError, match=r"no room after \d+ s: audio/.*\.tdz needs .* by files that are being read"):
        [cache.read(index) for index in range(2 * ROWS, SAMPLES, ROWS)]
    assert held <= files(tmp_path / "node")
    assert equal(batch[0], local.read(0))
    del batch
    gc.collect()
    assert all(equal(cache.read(index), local.read(index)) for index in range(SAMPLES))


def test_a_bound_below_one_shard_is_refused_with_both_numbers(
    tmp_path: Path, local: Cache, url: str, proxy: Proxy
) -> None:
    settings = node_settings(tmp_path, proxy.endpoint, bound_bytes=largest_pair(local) // 2)
    with pytest.raises(ConfigError, match=r"remote\.cache_size_gb = .* MB\) is less than a shard of s3://.* needs at"):
        forebay.open_cache(url, remote=settings)


def test_reading_ahead_downloads_nothing(url: str, settings: RemoteConfig, proxy: Proxy, tmp_path: Path) -> None:
    cache = forebay.open_cache(url, remote=settings)
    cache.will_need(range(SAMPLES))
    assert files(tmp_path / "node") == set()
    assert gets(proxy, ".tdz") == 0
    cache.read(0)
    forebay.open_cache(url, remote=settings).will_need(range(SAMPLES))
    assert gets(proxy, ".tdz") == 2


def test_verify_open_hashes_every_shard(url: str, settings: RemoteConfig, tmp_path: Path) -> None:
    cache = forebay.open_cache(url, remote=settings)
    cache.read(0)
    shard = next(cache.folder.glob("text/*.tdz"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CacheCorruptError, match=r"text/00000\.tdz"):
        forebay.open_cache(url, remote=settings, verify="open")
    shard.unlink()
    forebay.open_cache(url, remote=settings, verify="open")
    assert len(files(tmp_path / "node")) == 2 * SHARDS


def test_a_shard_that_was_removed_by_hand_comes_again(local: Cache, url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    view = cache.read(0)
    for shard in cache.folder.glob("*/*.tdz"):
        shard.unlink()
    assert equal(view, local.read(0))
    assert equal(forebay.open_cache(url, remote=settings).read(0), local.read(0))


def test_a_small_file_that_was_cut_off_comes_again(local: Cache, url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    os.truncate(cache.folder / "slots.npy", 5)
    os.truncate(cache.folder / "metadata.json", 5)
    (cache.folder / "lengths.npy").unlink()
    again = forebay.open_cache(url, remote=settings)
    assert equal(again.read(3), local.read(3))
    assert again.lengths.keys() == local.lengths.keys()


def test_a_mirror_that_was_removed_says_so(url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    cache.read(0)
    subprocess.run(["rm", "-r", str(cache.folder)], check=True)
    with pytest.raises(CacheReplacedError, match=r"was replaced or removed after .*tdz of it is gone; open it again"):
        cache.read(SAMPLES - 1)
    forebay.open_cache(url, remote=settings).read(SAMPLES - 1)


def test_a_shard_that_was_replaced_in_the_bucket_is_never_served(
    local: Cache, url: str, bucket: Bucket, settings: RemoteConfig
) -> None:
    cache = forebay.open_cache(url, remote=settings)
    kept = cache.read(0)
    name = "text/00001.tdz"
    bucket.put(f"caches/a/{name}", bytes(reversed((local.folder / name).read_bytes())))
    with pytest.raises(RemoteReplacedError, match=rf"{url}/{name}: its xxh3-128 is \w+, wanted \w+, after two"):
        cache.read(ROWS)
    assert equal(kept, local.read(0))
    assert equal(cache.read(0), local.read(0))
    with pytest.raises(RemoteReplacedError, match="push the cache again"):
        forebay.open_cache(url, remote=settings, verify="open")


def test_a_shard_that_was_replaced_by_a_shorter_one_is_named_with_both_sizes(
    local: Cache, url: str, bucket: Bucket, settings: RemoteConfig
) -> None:
    cache = forebay.open_cache(url, remote=settings)
    name = "text/00001.tdz"
    data = (local.folder / name).read_bytes()
    bucket.put(f"caches/a/{name}", data[:-1])
    shown = rf"{url}/{name}: it has {len(data) - 1} bytes, wanted {len(data)}, after two downloads.*push the cache"
    with pytest.raises(RemoteReplacedError, match=shown):
        cache.read(ROWS)


def test_a_rebuilt_cache_is_another_mirror(tmp_path: Path, url: str, bucket: Bucket, settings: RemoteConfig) -> None:
    old = forebay.open_cache(url, remote=settings)
    rebuilt = make_cache(tmp_path / "rebuilt", num_samples=SAMPLES, rows_per_shard=ROWS, seed=1)
    put_folder(bucket, rebuilt, "caches/a")
    new = forebay.open_cache(url, remote=settings)
    assert new.folder != old.folder
    assert equal(new.read(0), forebay.open_cache(rebuilt).read(0))


def test_a_store_that_does_not_answer_leaves_what_is_here(
    local: Cache, url: str, proxy: Proxy, settings: RemoteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    first = forebay.open_cache(url, remote=settings)
    first.read(0)
    proxy.add(Rule(fault=Reset()))
    caplog.clear()
    cache = forebay.open_cache(url, remote=settings)
    assert cache.folder == first.folder
    assert equal(cache.read(0), local.read(0))
    assert [record.getMessage() for record in caplog.records if record.name.endswith("mirror")] == [
        record.getMessage()
        for record in caplog.records
        if f"going on with what this node has of it, {first.folder}" in record.getMessage()
    ]
    assert len([record for record in caplog.records if record.name.endswith("mirror")]) == 1
    with pytest.raises(RemoteError, match=rf"{url}/"):
        cache.read(SAMPLES - 1)


def test_a_store_that_does_not_answer_is_an_error_where_something_is_missing(
    url: str, proxy: Proxy, settings: RemoteConfig
) -> None:
    cache = forebay.open_cache(url, remote=settings)
    (cache.folder / "slots.npy").unlink()
    proxy.add(Rule(fault=Reset()))
    with pytest.raises(RemoteError, match=rf"{url}/metadata\.json"):
        forebay.open_cache(url, remote=settings)


def test_a_refusal_is_an_error_though_a_mirror_is_here(url: str, proxy: Proxy, settings: RemoteConfig) -> None:
    forebay.open_cache(url, remote=settings).read(0)
    proxy.add(Rule(fault=FORBIDDEN, method="GET", key="*metadata.json"))
    with pytest.raises(RemoteError, match=r"metadata\.json: denied"):
        forebay.open_cache(url, remote=settings)


def test_a_mirror_describes_itself(url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    mirror = Mirror.of(cache.folder)
    assert mirror is not None
    assert (str(mirror.url), mirror.settings) == (url, settings)
    assert Mirror.of(cache.folder.parent) is None
    assert Mirror.of(cache.folder / ORIGIN) is None


def test_a_folder_that_came_from_elsewhere_is_no_mirror(tmp_path: Path, url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    for place in (tmp_path / "mirrors" / "x", tmp_path / "node" / "others" / "x"):
        shutil.copytree(cache.folder, place)
        assert Mirror.of(place) is None
        with pytest.raises(CacheCorruptError, match=r"00000\.tdz is missing from its cache"):
            forebay.open_cache(place).read(0)


def test_an_origin_that_is_damaged(url: str, settings: RemoteConfig) -> None:
    cache = forebay.open_cache(url, remote=settings)
    for data in (b"", b"[]", b"{}", b'{"url": "s3://", "remote": {}}', b'{"url": "s3://a", "remote": {"x": 1}}'):
        (cache.folder / ORIGIN).write_bytes(data)
        with pytest.raises(CacheCorruptError, match=r"origin\.json is not what forebay writes .* open its URL again"):
            forebay.open_cache(cache.folder)
    assert forebay.open_cache(url, remote=settings).read(0)


def damage(path: Path) -> None:
    """Changes most bytes of a file in place: its size stays, and so do its ends."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(min(100, len(data) // 3))
        file.write(bytes(255 - byte for byte in data[file.tell() : -min(200, len(data) // 3)]))


@pytest.mark.parametrize(
    "name", ["audio/00000.tdz", "text/00000.tdz", "lengths.npy", "slots.npy", "audio.npy", "metadata.json"]
)
@pytest.mark.few("audio/00000.tdz", "metadata.json", "slots.npy")
def test_what_the_disk_damaged_is_fetched_again(
    url: str, settings: RemoteConfig, local: Cache, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = forebay.open_cache(url, remote=settings)
    for index in range(SAMPLES):
        cache.read(index)
    before = cache.mirror.counters.to_json()["damaged"]  # type: ignore[union-attr]
    damage(cache.folder / name)
    again = forebay.open_cache(url, remote=settings)
    assert again.samples.equals(local.samples)
    assert again.categories("language")[0] == local.categories("language")[0]  # type: ignore[index]
    assert [again.sample_id(index) for index in range(SAMPLES)] == local.samples["sample_id"].to_pylist()
    assert [equal(again.read(index), local.read(index)) for index in range(SAMPLES)] == [True] * SAMPLES
    assert {key: value.tolist() for key, value in again.lengths.items()} == {
        key: value.tolist() for key, value in local.lengths.items()
    }
    assert again.mirror.counters.to_json()["damaged"] == before + 1  # type: ignore[union-attr]
    assert f"{name} was damaged on this node's disk; it is fetched again from {url}" in caplog.text


def test_what_the_store_has_of_another_cache_is_refused(url: str, settings: RemoteConfig, bucket: Bucket) -> None:
    cache = forebay.open_cache(url, remote=settings)
    cache.read(0)
    damage(cache.folder / "audio/00000.tdz")
    key = url.removeprefix(f"{bucket.url}/") + "/audio/00000.tdz"
    bucket.put(key, bytes(len(bucket.get(key))))
    with pytest.raises(RemoteReplacedError, match=r"audio/00000\.tdz: its xxh3-128 is \w+, wanted \w+; push the cache"):
        forebay.open_cache(url, remote=settings).read(0)


def test_a_read_costs_what_it_costs_locally(local: Cache, url: str, settings: RemoteConfig) -> None:
    remote = forebay.open_cache(url, remote=settings)
    fastest = {}
    for name, cache in (("local", local), ("remote", remote)):
        times = []
        for _ in range(30):
            began = time.perf_counter()
            for index in range(SAMPLES):
                cache.read(index)
            times.append((time.perf_counter() - began) / SAMPLES)
        fastest[name] = min(times)
    assert fastest["remote"] < fastest["local"] + 5e-6
