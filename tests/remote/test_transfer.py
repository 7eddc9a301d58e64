"""Sealed caches to a store and back."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

from benchmarks.objects.server import Bucket as Emptied
from forebay.config.remote import RemoteConfig
from forebay.config.url import Url, parse_url
from forebay.store.remote.transfer import pull, push
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
    assert not report.read_back_bytes and not report.already_there
    found = pull(url, tmp_path / "pulled", settings)
    assert same(cache, tmp_path / "pulled")
    assert found.key == report.key and found.size_bytes == report.size_bytes
