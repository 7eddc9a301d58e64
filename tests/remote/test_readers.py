"""Several processes of a node read one cache of a bucket."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.store.cache import Cache, open_cache
from forebay.store.remote.node.holdings import FOLDER
from tests.processes import python
from tests.remote.reader import digests, loader_of
from tests.remote.stored import put_folder
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")
EPOCHS = 2


@pytest.fixture
def local(tmp_path: Path) -> Cache:
    return open_cache(make_cache(tmp_path, num_samples=47, features="waveform", max_duration_s=1.0))


def test_ranks_of_a_node_download_each_file_once(local: Cache, bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    url = put_folder(bucket, local.folder)
    proxy.limit(latency_s=0.02)

    def read(rank: int) -> str:
        ended = python("-m", "tests.remote.reader", url, proxy.endpoint, tmp_path, rank, 2, EPOCHS)
        assert ended.returncode == 0, ended.stderr[-2000:]
        return ended.stdout

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(read, range(2)))
    for rank, lines in enumerate(found):
        assert lines.split() == digests(loader_of(local, rank=rank, world=2), epochs=EPOCHS)
    gets = {key: count for (method, key), count in proxy.requests.items() if method == "GET" and key.endswith(".tdz")}
    assert set(gets.values()) == {1}
    assert len(gets) == 2 * local.num_shards
    assert list((tmp_path / "node" / FOLDER).glob("*.uses")) == []


def test_a_rank_goes_on_where_the_one_that_downloaded_was_killed(
    local: Cache, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    url = put_folder(bucket, local.folder)
    proxy.limit(latency_s=0.05, bytes_per_s=1_000_000)
    where = ("-m", "tests.remote.reader", url, proxy.endpoint, tmp_path)
    assert python(*where, 0, 2, EPOCHS, 2).returncode == -9
    ended = python(*where, 1, 2, EPOCHS)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == digests(loader_of(local, rank=1, world=2), epochs=EPOCHS)
    assert list((tmp_path / "node").rglob("*.part")) == []


def test_a_process_ends_at_once_though_downloads_are_under_way(
    local: Cache, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    url = put_folder(bucket, local.folder)
    proxy.limit(bytes_per_s=400_000)
    code = (
        "import sys; from pathlib import Path; from tests.remote.reader import loader_of; "
        "from tests.remote.stored import node_settings; from forebay.store.cache import open_cache; "
        "cache = open_cache(sys.argv[1], remote=node_settings(Path(sys.argv[3]), sys.argv[2])); "
        "next(iter(loader_of(cache, rank=0, world=1))); print('begun', flush=True)"
    )
    began = time.monotonic()
    ended = python("-c", code, url, proxy.endpoint, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "begun\n"), ended.stderr[-2000:]
    assert time.monotonic() - began < 60
