"""A build whose nodes share no folder: shards are staged in the bucket, and the store copies them into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.objects.server import Bucket
from forebay.config import Config
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.remote.conftest import bucket, environment, proxy, server

__all__ = ["bucket", "environment", "proxy", "server"]

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return speech_corpus(tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def wanted(raw: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that one process makes in a folder."""
    return Path(build_here(raw.config(f"run.cache_root={tmp_path_factory.mktemp('local')}")).cache)


def node(corpus: Corpus, bucket: Bucket, folder: Path, *overrides: str) -> Config:
    """Returns the config of a corpus on a node of its own."""
    stores = (f"run.cache_root={bucket.url}/caches", f"remote.shard_dir={folder}", "remote.retries=0")
    return corpus.config(*stores, *overrides)


def sealed(bucket: Bucket) -> dict[str, bytes]:
    """The shards of the one cache of the bucket, by their names in it."""
    return {name.split("/", 2)[2]: bucket.get(name) for name in bucket.names("caches") if name.endswith(".tdz")}


def test_a_staged_build_is_the_cache_of_one_process(raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path) -> None:
    report = build_here(node(raw, bucket, tmp_path / "node"), stage=f"{bucket.url}/stage")
    assert report.cache == f"{bucket.url}/caches/{wanted.name}"
    assert (report.sealed, report.shards_written, report.shards_kept) == (True, 10, 0)
    assert sealed(bucket) == shard_bytes(wanted)
    assert bucket.names("stage") == []
