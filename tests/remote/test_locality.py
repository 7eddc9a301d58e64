"""`plan.locality = "auto"`: what the bound of a node makes of it, and what a state says of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config import BucketConfig, Config, LoaderConfig, MixtureConfig, SourceConfig, WindowConfig
from forebay.config.remote import GB
from forebay.config.train import RunConfig
from forebay.errors import ConfigError, ResumeError
from forebay.plan.make import Planned, plan_of
from forebay.plan.mixture.mix_sources import mix
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.shard_line import locality_window, with_locality
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import Ints
from forebay.store.remote.remote_shards import RemoteShards
from forebay.train.loader import Loader, LoaderSettings
from tests.remote.stored import node_settings, put_folder
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")
AUTO = BucketConfig(edges_s=(0.3, 0.6, 2.0), batch_size=1, lockstep=1, locality="auto")


@pytest.fixture
def local(tmp_path: Path) -> Cache:
    folder = make_cache(tmp_path, num_samples=60, rows_per_shard=2, features="waveform", max_duration_s=1.0)
    return open_cache(folder)


@pytest.fixture
def remote(local: Cache, bucket: Bucket, proxy: Proxy, tmp_path: Path) -> Cache:
    return open_cache(put_folder(bucket, local.folder), remote=node_settings(tmp_path, proxy.endpoint))


def with_bound(remote: Cache, share: float) -> Cache:
    """The same cache on a node that keeps so much of it."""
    assert remote.mirror is not None
    shards = RemoteShards(remote)
    bound = shards.kept_bytes + share * (shards.total_bytes - shards.kept_bytes)
    settings = replace(remote.mirror.settings, cache_size_gb=bound / GB)
    return open_cache(str(remote.mirror.url), remote=replace(settings, shard_dir=f"{settings.shard_dir}-{share}"))


def config_of(tmp_path: Path, plan: BucketConfig = AUTO) -> Config:
    return Config(
        name="tiny",
        source=SourceConfig(kind="tar", manifest=str(tmp_path / "train.parquet")),
        plan=plan,
        loader=LoaderConfig(),
        run=RunConfig(cache_root=str(tmp_path / "root")),
        path=str(tmp_path / "tiny.toml"),
    )


def loader_of(source: Cache, planned: Planned) -> Loader:
    return Loader(source, planned, LoaderSettings(num_threads=0))


def test_what_fits_is_shuffled_globally_and_the_plan_is_that_of_global(
    local: Cache, remote: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wanted = plan_of(config_of(tmp_path, replace(AUTO, locality="global")), local)
    for source in (local, remote):
        planned = plan_of(config_of(tmp_path), source)
        assert (planned.key, planned.folder, planned.locality) == (wanted.key, wanted.folder, "global")
    assert wanted.locality is None
    assert "do not fit" not in caplog.text
    assert "locality" not in loader_of(local, wanted).state_dict()


def test_what_does_not_fit_is_shuffled_within_a_window_of_what_does(
    remote: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    small = with_bound(remote, 0.5)
    shards = RemoteShards(small)
    room = shards.bound_bytes - shards.kept_bytes
    window = locality_window(room, shard_bytes=int(shards.sizes.max()), ranks=1, ahead_shards=4)
    planned = plan_of(config_of(tmp_path), small)
    assert planned.locality == f"shards:{window}"
    assert caplog.text.count(f'plan.locality = "auto" is "shards:{window}": 30 shards of') == 1
    named = plan_of(config_of(tmp_path, replace(AUTO, locality=f"shards:{window}")), small)
    assert (named.key, named.folder) == (planned.key, planned.folder)
    loader = loader_of(small, planned)
    assert loader.state_dict()["locality"] == f"shards:{window}"
    loader.load_state_dict(loader.state_dict())
    loader_of(small, named).load_state_dict(loader.state_dict())


def test_a_state_of_another_bound_says_which_locality_it_had(remote: Cache, tmp_path: Path) -> None:
    loaders = [loader_of(source, plan_of(config_of(tmp_path), source)) for source in (with_bound(remote, 0.5), remote)]
    stored = loaders[0].state_dict()["locality"]
    with pytest.raises(ResumeError, match=rf'was "{stored}" where it was made, and is "global".*locality = "{stored}"'):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_other_plans_know_no_window(remote: Cache) -> None:
    other = WindowConfig(batch_size=2)
    assert with_locality(other, with_bound(remote, 0.5), sizes=lambda: np.zeros(0, np.int64)) is other


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """80 shards of four clips of one language each: en in 40, es in 28, and 12 that say none."""
    spoken = [language for language, count in (("en", 40), ("es", 28), ("", 12)) for _ in range(4 * count)]
    folder = make_cache(
        tmp_path_factory.mktemp("languages"),
        num_samples=len(spoken),
        features="waveform",
        max_duration_s=0.4,
        languages=spoken,
    )
    return open_cache(folder)


def every_batch(plan: MixturePlan, epoch: int) -> list[Ints]:
    return plan.order(0, epoch).batches(np.arange(plan.num_batches))


def mixed(tmp_path: Path, plan: BucketConfig, **changes: Any) -> Config:
    mixture = MixtureConfig(column="language", weights={"en": 3.0, "es": 2.0, "unknown": 1.0})
    return replace(config_of(tmp_path, plan), mixture=mixture, **changes)


@pytest.mark.wide
def test_a_mixture_of_languages_downloads_each_shard_about_once_a_pass(
    languages: Cache, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    there = open_cache(put_folder(bucket, languages.folder), remote=node_settings(tmp_path, proxy.endpoint))
    small = with_bound(there, 0.42)
    auto = replace(AUTO, edges_s=(2.0,), batch_size=4)
    config = mixed(tmp_path, auto)
    planned = mix(config, small, plan_of(config, small))
    assert isinstance(planned.plan, MixturePlan)
    assert planned.locality == "shards:4"
    assert planned.plan.windows is not None
    assert planned.plan.windows.sizes.tolist() == [12, 40, 28]
    proxy.requests.clear()
    counts, line = np.zeros(3, int), []
    codes = (small.categories("language") or ([], np.zeros(0, int)))[1]
    state: dict[str, Any] | None = None
    for world in (1, 2):  # two epochs on one rank, then two on two
        loaders = [
            Loader(small, planned, LoaderSettings(num_threads=0), dp_rank=rank, dp_world_size=world)
            for rank in range(world)
        ]
        for loader in loaders:
            loader.load_state_dict(state or loader.state_dict())
        for _ in range(2):
            for _ in zip(*loaders, strict=True):
                for loader in loaders:
                    counts += loader.weight * np.bincount(codes[loader.indices], minlength=3)
                    line += [loader.indices] * loader.weight
                    assert np.abs(counts - counts.sum() * planned.plan.shares).max() < planned.plan.bound == 1
        state = loaders[0].state_dict()
    wanted = [batch.tolist() for epoch in range(4) for batch in every_batch(planned.plan, epoch)]
    assert line == wanted
    passes = counts / (4 * planned.plan.windows.sizes)
    downloads = sum(number for (method, key), number in proxy.requests.items() if method == "GET" and "audio/" in key)
    assert downloads <= 1.3 * float(passes @ planned.plan.windows.sizes)
    # A window that is written is the plan's too, and a state of auto goes on under it.
    written = mixed(tmp_path, replace(auto, locality="shards:4"))
    assert mix(written, small, plan_of(written, small)).key == planned.key


def test_a_bound_below_three_shards_a_language_is_an_error(
    languages: Cache, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    there = open_cache(put_folder(bucket, languages.folder), remote=node_settings(tmp_path, proxy.endpoint))
    config = mixed(tmp_path, AUTO)
    with pytest.raises(ConfigError, match=r"holds \d shards of \d+ bytes, and the smallest window needs 9 \("):
        plan_of(config, with_bound(there, 0.1))


def test_a_bound_for_no_window_is_an_error_with_both_numbers(remote: Cache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bytes holds \d shards of \d+ bytes, .* remote.cache_size_gb"):
        plan_of(config_of(tmp_path), with_bound(remote, 0.05))


def test_a_window_wider_than_the_node_is_told(remote: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = with_bound(remote, 0.5)
    for window, is_told in ((30, True), (4, False)):
        caplog.clear()
        loader_of(small, plan_of(config_of(tmp_path, replace(AUTO, locality=f"shards:{window}")), small))
        assert (f'plan.locality is "shards:{window}", whose steps reach into' in caplog.text) is is_told
