"""A cold form in a bucket: interrupted, damaged, of others, named as what it is not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import forebay
from benchmarks.objects.faults import SERVER_ERROR, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket as Emptied
from forebay.cli.program import main
from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.errors import (
    CacheIncompleteError,
    CacheNotFoundError,
    ConfigError,
    RemoteError,
    RemoteExistsError,
)
from forebay.store.cold import arrays
from forebay.store.cold.pull import pull_any
from forebay.store.cold.push import push_zarr
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.carry.transfer import push
from forebay.store.remote.small_files import RemoteRoot
from tests.store.cold.caches import same, settings_of
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features of the cache of these tests have several objects, which end in the middle of shards."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 16_000)
    monkeypatch.setattr(arrays, "SHARD_BYTES", 48_000)


@pytest.fixture
def settings(tmp_path: Path) -> RemoteConfig:
    return settings_of(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "caches", num_samples=10, failed_rows=[1])


@pytest.fixture
def url(bucket: Emptied, cache: Path) -> Url:
    return parse_url(f"{bucket.url}/cold/{cache.name}")


@pytest.fixture
def pushed(cache: Path, url: Url, settings: RemoteConfig) -> Url:
    """The URL of the cold form."""
    push_zarr(cache, str(url), settings)
    return url


def test_round_trip(cache: Path, url: Url, settings: RemoteConfig, tmp_path: Path, proxy: Proxy) -> None:
    report = push_zarr(cache, str(url), settings)
    assert report.moved_files == report.files
    assert not report.read_back_bytes, "the etags prove all of it"
    proxy.clear()
    assert push_zarr(cache, str(url), settings).already_there
    assert not [name for method, name in proxy.requests if method == "PUT"]
    found = pull_any(str(url), tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")
    assert found.key == report.key
    assert forebay.open_cache(tmp_path / "pulled").key == report.key
    assert pull_any(str(url), tmp_path / "pulled", settings).already_there


def fail_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the call of that number, of all that ask the bucket, a failure, and each one after it."""
    calls = iter(range(1_000_000))

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= number:
                raise RemoteError(f"call {number} of the test")
            return real(*args, **kwargs)

        return call

    for name in ("put", "read", "objects"):
        patch.setattr(Bucket, name, wrapped(getattr(Bucket, name)))


@pytest.mark.parametrize("number", [1, 5, 60])
@pytest.mark.few("5")
def test_interrupted_push_goes_on(
    number: int, cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, number)
        with pytest.raises(RemoteError, match=f"call {number} of the test"):
            push_zarr(cache, str(url), settings)
    there = bucket.names()
    if there:
        assert f"{url.key}/zarr.json" not in there
        with pytest.raises(CacheIncompleteError, match=r"the push of the zarr form .* did not end; run it again"):
            pull_any(str(url), tmp_path / "pulled", settings)
    report = push_zarr(cache, str(url), settings)
    assert report.kept_files == len(there), "what was sent is not sent again"
    assert report.kept_files + report.moved_files == report.files
    pull_any(str(url), tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")


@pytest.mark.wide
def test_another_machine_goes_on(
    cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path
) -> None:
    """The second machine has no journal and compresses again: etags prove that the same bytes are there."""
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 60)
        with pytest.raises(RemoteError, match="call 60"):
            push_zarr(cache, str(url), settings)
    there = len(bucket.names())
    report = push_zarr(cache, str(url), settings_of(tmp_path / "other"))
    assert (report.kept_files, report.read_back_bytes) == (there, 0)


@pytest.mark.parametrize("number", [3, 20])
@pytest.mark.few("3")
def test_interrupted_pull_goes_on(
    number: int, pushed: Url, cache: Path, settings: RemoteConfig, tmp_path: Path
) -> None:
    target = tmp_path / "pulled"
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, number)
        with pytest.raises(RemoteError, match="call"):
            pull_any(str(pushed), target, settings)
    assert not target.exists()
    whole = len([path for path in (tmp_path / ".pulled.pulling").rglob("*") if path.is_file()])
    report = pull_any(str(pushed), target, settings)
    assert (report.kept_files, report.moved_files) == (whole, report.files - whole)
    assert same(cache, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["caches", "no-profiles", "node", "pulled"]


@pytest.mark.wide
def test_neither_form_goes_over_the_other(
    cache: Path, url: Url, settings: RemoteConfig, bucket: Emptied, tmp_path: Path
) -> None:
    push(cache, url, settings)
    with pytest.raises(RemoteExistsError, match=r"holds a cache in its own form: .* push \S+ to another place"):
        push_zarr(cache, str(url), settings)
    other = parse_url(f"{url}-2")
    push_zarr(cache, str(other), settings)
    with pytest.raises(RemoteExistsError, match="holds objects that are not of"):
        push(cache, other, settings)


def test_a_cold_form_is_no_cache(
    pushed: Url, cache: Path, settings: RemoteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = f"is the zarr form of the cache of key {cache.name[-16:]}.*run: forebay cache pull {pushed} DIR"
    with pytest.raises(CacheNotFoundError, match=hint):
        forebay.open_cache(str(pushed), remote=settings)
    root = RemoteRoot.at(pushed.parent, settings)
    assert list(root.caches()) == []
    push_zarr(cache, str(tmp_path / "cold"), settings)
    with pytest.raises(CacheIncompleteError, match=r"is the zarr form .* run: forebay cache pull \S+/cold DIR"):
        forebay.open_cache(tmp_path / "cold")
    assert main(["inspect", str(tmp_path / "cold")]) == 1
    assert "run: forebay cache pull" in capsys.readouterr().err


def test_requests_that_fail_are_made_again(
    cache: Path, url: Url, settings: RemoteConfig, proxy: Proxy, tmp_path: Path
) -> None:
    again = settings_of(tmp_path, retries=3, timeout_s=2)
    for method in ("PUT", "GET"):
        proxy.add(Rule(fault=SERVER_ERROR, method=method, key="*/values/*", times=2))
    push_zarr(cache, str(url), again)
    pull_any(str(url), tmp_path / "pulled", again)
    assert same(cache, tmp_path / "pulled")


def test_the_commands(
    cache: Path, bucket: Emptied, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    place = f"{bucket.url}/many/"
    assert main(["cache", "push", str(cache), place, "--form", "zarr", "--level", "1", "--json", "--no-progress"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == f"{place}{cache.name}"
    assert report["stored_bytes"] < report["size_bytes"] + 200_000
    assert main(["cache", "pull", f"{place}{cache.name}", str(tmp_path / "there") + "/", "--no-progress"]) == 0
    assert same(cache, tmp_path / "there" / cache.name)
    assert "zarr: " in capsys.readouterr().out
    assert main(["cache", "push", str(cache), str(tmp_path / "cold"), "--form", "zarr", "--no-progress"]) == 0
    assert main(["cache", "pull", str(tmp_path / "cold"), str(tmp_path / "back"), "--no-progress"]) == 0
    assert same(cache, tmp_path / "back")
    capsys.readouterr()
    assert main(["cache", "push", str(cache), place, "--level", "1"]) == 2
    assert "--level is of the form zarr" in capsys.readouterr().err
    assert main(["cache", "push", str(cache), place, "--form", "zarr", "--level", "40"]) == 2
    assert "level is 40, wanted 1 to 22" in capsys.readouterr().err
    assert main(["cache", "pull", str(cache), str(tmp_path / "back")]) == 2
    assert "is a cache of this machine already" in capsys.readouterr().err
    assert main(["cache", "pull", str(tmp_path / "home"), str(tmp_path / "back")]) == 3
    assert "holds neither a sealed cache (metadata.json) nor the zarr form" in capsys.readouterr().err


def test_a_file_in_the_way(cache: Path, settings: RemoteConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, wanted a folder"):
        push_zarr(cache, str(tmp_path / "file"), settings)
    with contextlib.suppress(CacheNotFoundError):
        pull_any(str(tmp_path / "nothing"), tmp_path / "pulled", settings)
        pytest.fail("there is nothing to pull")
