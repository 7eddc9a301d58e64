"""Sealed caches to a store and back."""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from benchmarks.objects.faults import SERVER_ERROR, Fault, Replace, Reset, Rule, Truncate
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket as Emptied
from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheMismatchError,
    CacheNotFoundError,
    RemoteError,
    RemoteExistsError,
)
from forebay.store.metadata import write_metadata
from forebay.store.remote.bucket.bucket import PART, Bucket
from forebay.store.remote.carry.proof import Proof
from forebay.store.remote.carry.transfer import pull, push
from forebay.store.remote.small_files import NAME as COLUMNS
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def settings(tmp_path: Path) -> RemoteConfig:
    return RemoteConfig(shard_dir=str(tmp_path / "node"), retries=0, timeout_s=20)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "caches", num_samples=10)


@pytest.fixture
def url(bucket: Emptied, cache: Path) -> Url:
    return parse_url(f"{bucket.url}/caches/{cache.name}")


def same(left: Path, right: Path) -> bool:
    """Whether two folders hold the same names with the same bytes."""
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in (left, right)]
    return names[0] == names[1] and not filecmp.cmpfiles(left, right, names[0], shallow=False)[1]


def test_round_trip(cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    report = push(cache, url, settings)
    assert report.moved_files == report.files == len(list(cache.rglob("*.*"))) - 1
    assert not report.read_back_bytes
    assert not report.already_there
    found = pull(url, tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")
    assert found.key == report.key
    assert found.size_bytes == report.size_bytes


def test_names_bucket_and_sizes(cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied) -> None:
    """The bucket holds the folder's own files under its own names, and what a store tells of all samples."""
    push(cache, url, settings)
    names = [f"caches/{path.relative_to(cache.parent)}" for path in cache.rglob("*") if path.is_file()]
    assert bucket.names() == sorted([*names, f"{url.key}/{COLUMNS}"])
    assert forebay.open_cache(str(url), remote=settings)[3].keys() == forebay.open_cache(cache)[3].keys()


def test_metadata_is_last_and_only_made(cache: Path, url: Url, settings: RemoteConfig, proxy: Proxy) -> None:
    push(cache, url, settings)
    sent = [one for one in proxy.traffic().exchanges if one.method == "PUT"]
    assert sent[-1].key == f"{url.key}/metadata.json"
    assert [one.status for one in sent] == [200] * len(sent)


def test_push_again_sends_nothing(cache: Path, url: Url, settings: RemoteConfig, proxy: Proxy) -> None:
    push(cache, url, settings)
    proxy.clear()
    report = push(cache, url, settings)
    assert report.already_there
    assert report.kept_files == report.files
    assert not [one for one in proxy.traffic().exchanges if one.method == "PUT"]
    assert next(report.lines()).startswith("already there: s3://")


def test_push_verified_reads_everything_back(cache: Path, url: Url, settings: RemoteConfig, proxy: Proxy) -> None:
    push(cache, url, settings)
    proxy.clear()
    report = push(cache, url, settings, verify=True)
    assert report.already_there
    assert report.read_back_bytes == report.size_bytes
    assert all(proxy.bytes_of(f"{url.key}/{name}") for name in ("slots.npy", "audio/00000.tdz", "text/00002.tdz"))


def test_damage_in_a_sealed_place_is_mended(
    cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path
) -> None:
    push(cache, url, settings)
    whole = bucket.get(f"{url.key}/audio/00001.tdz")
    bucket.put(f"{url.key}/audio/00001.tdz", whole[:-5] + b"wrong")
    with pytest.raises(RemoteError, match=r"audio/00001.tdz has xxh3-128 .* its cache says .* forebay cache push"):
        pull(url, tmp_path / "pulled", settings)
    report = push(cache, url, settings, verify=True)
    assert report.moved_files == 1
    assert bucket.get(f"{url.key}/audio/00001.tdz") == whole
    bucket.put(f"{url.key}/audio/00001.tdz", whole[:-5])
    assert push(cache, url, settings).moved_files == 1, "another size is seen without --verify"
    pull(url, tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")


def test_etags_that_prove_nothing_are_read_back_once(
    cache: Path, url: Url, settings: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores whose etags are no MD5: bytes are proven by reading them, and an interrupted push keeps the proof."""
    monkeypatch.setattr(Proof, "holds", lambda self, etag: False)
    with monkeypatch.context() as patch:
        fail_at(patch, 14)
        with pytest.raises(RemoteError, match="call 14"):
            push(cache, url, settings)
    report = push(cache, url, settings)
    beside_shards = sum(path.stat().st_size for path in cache.iterdir() if path.is_file() and path.suffix != ".json")
    assert report.kept_files >= 5
    assert report.read_back_bytes <= report.size_bytes - beside_shards, "what was proven is not read back again"
    assert not list((settings.folder / "pushes").iterdir())


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the numbered call of any bucket fail, and all after it, as if the network had gone."""
    calls = itertools.count()

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= number:
                raise RemoteError(f"call {number} of the test")
            return real(*args, **kwargs)

        return call

    for name in ("put", "read", "info", "stream", "objects"):
        monkeypatch.setattr(Bucket, name, wrapped(getattr(Bucket, name)))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 6, 8, 10, 12, 13, 14])
@pytest.mark.few("0", "3", "8", "14")
def test_interrupted_push_goes_on(
    number: int, cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, number)
        with pytest.raises(RemoteError, match=f"call {number} of the test"):
            push(cache, url, settings)
    is_sealed = f"{url.key}/metadata.json" in bucket.names()
    there = len(bucket.names()) - is_sealed
    report = push(cache, url, settings)
    assert report.kept_files == there, "what was sent is not sent again"
    assert report.kept_files + report.moved_files == report.files
    pull(url, tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")


@pytest.mark.parametrize("number", range(7))
@pytest.mark.few("0", "3", "6")
def test_interrupted_pull_goes_on(number: int, cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    push(cache, url, settings)
    target = tmp_path / "pulled"
    forebay.open_cache(str(url), remote=settings)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, number)
        with contextlib.suppress(RemoteError):
            pull(url, target, settings)
            pytest.fail("the pull was to be interrupted")
        assert not target.exists()
    report = pull(url, target, settings)
    assert same(cache, target)
    assert report.moved_files <= 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["caches", "no-profiles", "node", "pulled"]


def test_what_the_pulling_folder_holds_is_hashed(cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    push(cache, url, settings)
    aside = tmp_path / ".pulled.pulling"
    (aside / "audio").mkdir(parents=True)
    (aside / "audio" / "00000.tdz").write_bytes((cache / "audio" / "00000.tdz").read_bytes())
    (aside / "audio" / "00001.tdz").write_bytes(b"x" * (cache / "audio" / "00001.tdz").stat().st_size)
    (aside / "audio" / "foreign").write_bytes(b"")
    report = pull(url, tmp_path / "pulled", settings)
    assert report.kept_files == 1
    assert same(cache, tmp_path / "pulled")


def test_pull_takes_what_this_machine_has(
    cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path, proxy: Proxy
) -> None:
    push(cache, url, settings)
    list(map(forebay.open_cache(str(url), remote=settings).read, range(4)))  # its first shards are on the node
    proxy.clear()
    report = pull(url, tmp_path / "pulled", settings)
    assert report.linked_files == 7
    assert not proxy.bytes_of(f"{url.key}/audio/00000.tdz")
    proxy.clear()
    report = pull(url, tmp_path / "again", settings)
    assert report.linked_files == report.files
    assert same(cache, tmp_path / "again")


def test_pull_again_and_pull_of_what_lost_a_file(cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    push(cache, url, settings)
    target = tmp_path / "pulled"
    pull(url, target, settings)
    report = pull(url, target, settings)
    assert report.already_there
    assert report.kept_files == report.files
    (target / "audio" / "00002.tdz").unlink()
    (target / "text" / "00001.tdz").write_bytes(b"short")
    report = pull(url, target, settings)
    assert not report.already_there
    assert report.linked_files >= report.files - 2
    assert same(cache, target)


@pytest.mark.parametrize("content", ["another cache", "other files"])
def test_pull_replaces_nothing_else(
    content: str, cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path
) -> None:
    push(cache, url, settings)
    target = tmp_path / "mine"
    if content == "another cache":
        target = make_cache(tmp_path / "others", num_samples=3, seed=1)
        message = f"the cache of key {target.name[-16:]}, wanted the cache of key {cache.name[-16:]}"
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("years of work")
        message = "is no cache, wanted the cache of key"
    before = sorted(target.rglob("*"))
    with pytest.raises(CacheMismatchError, match=message):
        pull(url, target, settings)
    assert sorted(target.rglob("*")) == before


def test_a_damaged_file_is_not_pushed(cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied) -> None:
    shard = cache / "audio" / "00001.tdz"
    data = shard.read_bytes()
    shard.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    with pytest.raises(CacheCorruptError, match=r"audio/00001.tdz has .* it is not pushed; run: forebay preprocess"):
        push(cache, url, settings)
    assert f"{url.key}/audio/00001.tdz" not in bucket.names()
    assert f"{url.key}/metadata.json" not in bucket.names()


def test_two_caches_never_mix(cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path) -> None:
    other = make_cache(tmp_path / "others", num_samples=10, seed=5)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 9)
        with pytest.raises(RemoteError, match="call 9"):
            push(other, url, settings)
    before = {name: bucket.get(name) for name in bucket.names()}
    with pytest.raises(RemoteExistsError, match=r"is there with .* another cache, or the beginning of one, lies there"):
        push(cache, url, settings)
    push(other, url, settings)
    keys = f"the cache of key {other.name[-16:]}, this one has key {cache.name[-16:]}"
    with pytest.raises(RemoteExistsError, match=rf"metadata.json is {keys} .* push to another URL"):
        push(cache, url, settings)
    assert before.items() <= {name: bucket.get(name) for name in bucket.names()}.items()


def test_same_key_of_another_build(cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    other = make_cache(tmp_path / "others", num_samples=10, rows_per_shard=5)
    assert other.name == cache.name
    push(other, url, settings)
    with pytest.raises(RemoteExistsError, match=r"a cache of the same key .* sealed by another build"):
        push(cache, url, settings)


def test_foreign_objects_are_named(cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied) -> None:
    bucket.put_all((f"caches/other-{number}/x", b"") for number in range(7))
    with pytest.raises(RemoteExistsError, match=r"other-0/x, .* and more; push to another URL \(one that ends with"):
        push(cache, url.parent, settings)
    bucket.put(f"{url.key}-2/x", b"")  # beside it: no part of it
    push(cache, url, settings)


def test_what_changes_meanwhile_is_seen(
    cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Bucket.put

    def put(self: Bucket, name: str, data: bytes | Path, *, create: bool = False) -> str:
        etag = real(self, name, data, create=create)
        if name == "text/00002.tdz":
            bucket.put(f"{url.key}/slots.npy", b"of somebody else")
        return etag

    monkeypatch.setattr(Bucket, "put", put)
    with pytest.raises(RemoteError, match=r"slots.npy was .* and is 16 bytes .* somebody else writes there"):
        push(cache, url, settings)
    assert f"{url.key}/metadata.json" not in bucket.names()


def test_nothing_sealed(url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError, match=r"holds no sealed cache: it has no metadata.json; name another URL"):
        pull(url, tmp_path / "pulled", settings)
    assert not (tmp_path / "pulled").exists()


def test_what_is_replaced_while_it_is_pulled(
    cache: Path, url: Url, settings: RemoteConfig, proxy: Proxy, bucket: Emptied, tmp_path: Path
) -> None:
    push(cache, url, settings)
    bucket.put("longer", bucket.get(f"{url.key}/text/00001.tdz") + b"more")
    proxy.add(Rule(fault=Replace(key="longer"), method="GET", key="*/text/00001.tdz"))
    with pytest.raises(RemoteError, match=r"text/00001.tdz has more than the \d+ bytes that its cache says"):
        pull(url, tmp_path / "pulled", settings)
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "audio.npy\0"])
def test_names_that_lead_out_are_refused(
    name: str, cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path
) -> None:
    """A stranger's metadata may be signed, and name any file."""
    push(cache, url, settings)
    document = json.loads((cache / "metadata.json").read_bytes())
    document["files"] = {name: {"size_bytes": 4, "xxh3_128": "0" * 32}, **document["files"]}
    write_metadata(tmp_path, document)
    bucket.put(f"{url.key}/metadata.json", (tmp_path / "metadata.json").read_bytes())
    bucket.put("caches/evil", b"evil")
    with pytest.raises(CacheCorruptError, match=r"metadata.json is none that forebay writes: .* is no name of a file"):
        pull(url, tmp_path / "pulled", settings)
    assert not list(tmp_path.rglob("evil"))
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize("fault", [SERVER_ERROR, Truncate(after_bytes=100), Reset(after_bytes=100)])
def test_errors_of_the_store(
    fault: Fault, cache: Path, url: Url, settings: RemoteConfig, proxy: Proxy, tmp_path: Path
) -> None:
    push(cache, url, settings)
    proxy.add(Rule(fault=fault, method="GET", key="*/audio/00001.tdz"))
    with pytest.raises(RemoteError, match=r"audio/00001.tdz"):
        pull(url, tmp_path / "pulled", settings)
    proxy.clear()
    report = pull(url, tmp_path / "pulled", settings)
    assert report.moved_files < 6
    assert same(cache, tmp_path / "pulled")


def test_one_pull_at_a_time_into_a_folder(cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path) -> None:
    push(cache, url, settings)
    aside = tmp_path / ".pulled.pulling"
    aside.mkdir()
    descriptor = os.open(aside, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(CacheError, match="another process pulls s3://"):
            pull(url, tmp_path / "pulled", settings)
    finally:
        os.close(descriptor)
    pull(url, tmp_path / "pulled", settings)


def test_large_files_go_in_parts(tmp_path: Path, url: Url, settings: RemoteConfig, proxy: Proxy) -> None:
    """The etag of an object that was sent in parts is no MD5 of its bytes, and proves them all the same."""
    cache = make_cache(tmp_path / "large", num_samples=40, rows_per_shard=40, max_duration_s=40)
    assert (cache / "audio" / "00000.tdz").stat().st_size > PART
    report = push(cache, url, settings)
    assert any(one.method == "POST" for one in proxy.traffic().exchanges)
    assert not report.read_back_bytes
    pull(url, tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")
