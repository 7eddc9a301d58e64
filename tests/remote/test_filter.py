"""`[filter]` over a cache in a store: what is left decides what is downloaded, ahead and at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay import load_config
from forebay.config import Config
from forebay.config.remote import RemoteConfig, parse_url
from forebay.config.tree import FilterConfig
from forebay.store.cache import Cache, open_cache
from forebay.store.remote.carry.transfer import push
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.selection import Filter, Selection, filtered
from forebay.store.source import SourceUnion
from forebay.train.select import make_loader, select
from forebay.train.warm import WarmOptions, warm
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")
FIRST = "filter.where=index < 13"
"""The samples of the first four shards of twelve: three whole ones and a sample of the fourth."""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "made", num_samples=48, features="waveform", max_duration_s=1.0)


@pytest.fixture
def config(made: Path, tmp_path: Path, bucket: Bucket) -> Config:
    url = parse_url(f"{bucket.url}/caches/{made.name}")
    push(made, url, RemoteConfig(shard_dir=str(tmp_path / "pusher")))
    path = tmp_path / "config.toml"
    path.write_text(
        'name = "tones"\n[source]\nkind = "tar"\nmanifest = "none.parquet"\n[audio]\nfeatures = "waveform"\n'
        '[text]\ntokenizer = "none"\nprompt = "plain"\n[plan]\nbatch_size = 4\nedges_s = [0.4, 0.7]\nlockstep = 1\n'
        f'[[mixture.source]]\ncache = "{url}"\n[remote]\nshard_dir = "node"\nretries = 0\n'
        '[run]\ncache_root = "caches"\n'
    )
    return load_config(path)


def downloaded(proxy: Proxy) -> set[int]:
    return {int(Path(key).stem) for _, key in proxy.requests if key.endswith(".tdz")}


def test_only_shards_with_a_sample_that_is_left_are_downloaded(config: Config, proxy: Proxy, made: Path) -> None:
    proxy.clear()
    loader = make_loader(load_config(config.path, overrides=[FIRST]), shuffle=False, with_ids=True)
    assert not downloaded(proxy), "no shard is asked for a condition over lengths"
    found = sorted(sample_id for _, ids in loader for sample_id in ids)
    local = open_cache(made)
    assert found == [local.sample_id(index) for index in range(13)]
    assert downloaded(proxy) == {0, 1, 2, 3}


def test_what_the_store_tells_answers_a_condition_over_languages(config: Config, proxy: Proxy) -> None:
    proxy.clear()
    source = select(load_config(config.path, overrides=["filter.where=language == 'en'"]))
    assert len(source) == 16
    assert source.categories("language") is not None
    source.ids_digest()
    assert not downloaded(proxy)


def test_warm_brings_what_is_left_and_nothing_else(config: Config, proxy: Proxy) -> None:
    proxy.clear()
    report = warm(load_config(config.path, overrides=[FIRST]), WarmOptions())
    assert (report.num_shards, report.here_shards) == (4, 4)
    assert downloaded(proxy) == {0, 1, 2, 3}


def test_the_shards_of_a_selection_beside_a_whole_cache(config: Config, made: Path) -> None:
    cache = open_cache(config.mixture.source[0].cache or "", remote=config.remote)
    assert isinstance(cache, Cache)
    chosen = filtered(cache, Filter.of(FilterConfig(where="index in (2, 9, 44)")))
    shards = RemoteShards(chosen)
    assert np.flatnonzero(shards.is_used).tolist() == [0, 2, 11]
    assert shards.num_used == 3
    assert shards.of(np.array([2, 0, 1])).tolist() == [0, 2, 11]
    assert shards.total_bytes == shards.kept_bytes + int(shards.sizes[[0, 2, 11]].sum())
    assert shards.missing_bytes() == int(shards.sizes[[0, 2, 11]].sum())
    local = open_cache(made)
    other = Selection(cache, np.array([2, 5]), key="0" * 64)
    union = RemoteShards(SourceUnion([local, chosen, other], ["a", "b", "c"]))
    assert union.of(np.array([0, 48, 49, 50, 51, 52, 47])).tolist() == [0, 2, 11, 12, 13]
    assert union.total_bytes == union.kept_bytes + int(shards.sizes[[0, 1, 2, 11]].sum())
    whole = RemoteShards(cache)
    assert whole.num_used == len(whole) == 12
