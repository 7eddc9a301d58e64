"""A loader over caches in a bucket: the batches and states of a local one, and each shard downloaded once."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.objects.faults import FORBIDDEN, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from benchmarks.shard_cache import simulate
from forebay.config import BucketConfig, LoaderConfig
from forebay.config.plan import WindowConfig
from forebay.config.remote import GB, RemoteConfig
from forebay.errors import ConfigError, RemoteError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import Cursor
from forebay.plan.in_order import in_order
from forebay.plan.make import Planned, make_plan, opened_packs, samples_of
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.remote_cost import check_remote, epoch_cost
from forebay.steps.step import Batch
from forebay.store.cache import Cache, open_cache
from forebay.store.remote.foresight import THREAD_NAME, _Post
from forebay.store.remote.node.holdings import FOLDER, NEVER, distances
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.source import SampleSource, SourceUnion
from forebay.train.collate.collator import Collator
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.loader import Loader, LoaderSettings
from forebay.train.select import pack_collator
from tests.remote.stored import node_settings, put_folder
from tests.store_factory import make_cache
from tests.train.collate.test_collator import assert_batches_equal
from tests.train.test_loader import forked
from tests.train.tiny_vl import conversations
from tests.train.vl_cache import make_packs, make_vl_cache

pytestmark = [pytest.mark.usefixtures("environment"), pytest.mark.filterwarnings("error")]
BUCKETS = BucketConfig(edges_s=(0.3, 0.6, 2.0), batch_size=3, lockstep=2)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """47 samples in 12 shards."""
    folder = make_cache(tmp_path_factory.mktemp("local"), num_samples=47, features="waveform", max_duration_s=1.0)
    return open_cache(folder)


@pytest.fixture
def node(tmp_path: Path, proxy: Proxy) -> RemoteConfig:
    return node_settings(tmp_path, proxy.endpoint)


@pytest.fixture
def remote(local: Cache, bucket: Bucket, node: RemoteConfig) -> Cache:
    return open_cache(put_folder(bucket, local.folder), remote=node)


def make_loader(source: SampleSource, *, shuffle: bool = True, plan: BucketConfig = BUCKETS, **changes: Any) -> Loader:
    ranks = {name: changes.pop(name) for name in ("dp_rank", "dp_world_size") if name in changes}
    planned = Planned(plan=make_plan(samples_of(source), plan), key="0")
    return Loader(source, planned if shuffle else in_order(planned), LoaderSettings(**{"seed": 7, **changes}), **ranks)


def copies(loader: Loader, count: int | None = None) -> tuple[list[Batch], list[dict[str, Any]]]:
    found, states = [], []
    for batch in loader:
        found.append({name: tensor.clone() for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)})
        states.append(loader.state_dict())
        if len(found) == count:
            break
    return found, states


def assert_alike(one: Loader, other: Loader, *, count: int | None = None) -> None:
    (batches, states), (wanted, wanted_states) = copies(one, count), copies(other, count)
    assert len(batches) == len(wanted)
    for batch, expected in zip(batches, wanted, strict=True):
        assert_batches_equal(batch, expected)
    assert states == wanted_states
    assert one.report() | {"wait_s": 0} == other.report() | {"wait_s": 0}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def gets(proxy: Proxy) -> dict[str, int]:
    return {key: count for (method, key), count in proxy.requests.items() if method == "GET" and key.endswith(".tdz")}


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


# Order, state, resume


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.few
def test_batches_and_states_are_those_of_a_local_cache(
    local: Cache, remote: Cache, *, shuffle: bool, num_threads: int
) -> None:
    of_ranks: list[dict[str, Any]] = [{}, {"dp_rank": 0}, {"dp_rank": 1, "epochs": 2}]
    for changes in of_ranks:
        changes |= {"dp_world_size": 2} if changes else {}
        one, other = (
            make_loader(source, shuffle=shuffle, num_threads=num_threads, **changes) for source in (remote, local)
        )
        for _ in range(3):
            assert_alike(one, other)
    assert threads() == []


def test_a_state_goes_from_a_local_cache_to_a_remote_one_and_back(local: Cache, remote: Cache) -> None:
    first, second = make_loader(local), make_loader(remote)
    copies(first, 3)
    copies(second, 3)
    assert first.state_dict() == second.state_dict()
    state = first.state_dict()
    for loader in (first, second):
        loader.load_state_dict(state)
    assert_alike(second, first, count=2)
    state = second.state_dict()
    for loader in (first, second):
        loader.load_state_dict(state)
    assert_alike(second, first)
    assert_alike(second, first)  # the next epoch


@pytest.mark.parametrize("batches", ["mixed", "per_source"])
@pytest.mark.few("mixed")
def test_a_mixture_of_a_local_and_a_remote_cache_is_that_of_two_local_ones(
    local: Cache, remote: Cache, tmp_path: Path, batches: Any
) -> None:
    other = open_cache(make_cache(tmp_path / "other", num_samples=30, seed=3, features="waveform"))
    loaders = []
    for part in (remote, local):
        union = SourceUnion([other, part, part], ["a", "b", "c"])
        plan = make_plan(samples_of(union), BUCKETS)
        assert isinstance(plan, BucketPlan)
        mixed = mixture_plan(plan, union.source_of, names="abc", weights=[1, 2, 1], batches=batches)
        loaders.append(Loader(union, Planned(plan=mixed, key="0"), LoaderSettings(seed=3, num_threads=2)))
    assert_alike(*loaders)
    assert_alike(*loaders)
    assert threads() == []


def test_packs_of_images_are_those_of_a_local_cache(bucket: Bucket, node: RemoteConfig, tmp_path: Path) -> None:
    samples = conversations(5, 20)
    there = open_cache(make_vl_cache(tmp_path, samples))
    planned, _ = opened_packs(make_packs(tmp_path, there.key, samples, seq_len=160, pack_seed=1), there)
    loaders = [
        Loader(source, planned, LoaderSettings(seed=7), collator=pack_collator(LoaderConfig(), source))
        for source in (open_cache(put_folder(bucket, there.folder), remote=node), there)
    ]
    for _ in range(2):
        assert_alike(*loaders)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.few("2")
def test_torchs_loader_gets_the_samples_of_a_local_cache_in_its_workers_too(
    local: Cache, remote: Cache, num_workers: int
) -> None:
    found = []
    for source in (remote, local):
        planned = Planned(plan=make_plan(samples_of(source), BUCKETS), key="0")
        batches = DataLoader(
            SampleDataset(source),
            batch_sampler=PlanSampler(planned, seed=3, dp_rank=0, dp_world_size=1),
            num_workers=num_workers,
            collate_fn=Collator(source),
        )
        found.append([{name: tensor.clone() for name, tensor in batch.items()} for batch in batches])
    assert len(found[0]) == len(found[1]) > 0
    for batch, expected in zip(*found, strict=True):
        assert_batches_equal(batch, expected)


# What the node is told, and what it downloads


def test_every_file_crosses_the_network_once_whatever_reads_it(remote: Cache, proxy: Proxy) -> None:
    loaders = [make_loader(remote, dp_rank=rank, dp_world_size=2, num_threads=2) for rank in range(2)]
    for _ in zip(*loaders, strict=True):
        pass
    assert set(gets(proxy).values()) == {1}
    assert len(gets(proxy)) == 2 * remote.num_shards


def test_shards_are_downloaded_in_the_order_of_need_before_a_batch_wants_them(
    local: Cache, bucket: Bucket, node: RemoteConfig, proxy: Proxy
) -> None:
    one_at_a_time = replace(node, max_concurrent=1)
    remote = open_cache(put_folder(bucket, local.folder), remote=one_at_a_time)
    proxy.limit(latency_s=0.01)
    loader = make_loader(remote, num_threads=0)  # nothing is filled before it is asked for
    batches = iter(loader)
    wait_until(lambda: len(gets(proxy)) == 2 * remote.num_shards)
    media = [key for key in gets(proxy) if "/audio/" in key]
    steps = itertools.islice(loader.cursor.ahead(), 3 * len(loader))
    needed = dict.fromkeys(s for step in steps for s in np.unique(local.shards_of(step.samples)).tolist())
    assert [int(Path(key).stem) for key in media] == list(needed)
    before = dict(gets(proxy))
    for _ in batches:
        pass
    assert gets(proxy) == before


def told(loader: Loader, cache: Cache, *, now: int, steps: int) -> list[int]:
    """Needs of shards by a plain look at the coming steps: in how many steps each is needed."""
    found = [NEVER] * cache.num_shards
    needed = [np.unique(cache.shards_of(s.samples)) for s in itertools.islice(loader.cursor.ahead(), steps)]
    for step in range(steps - 1, now - 1, -1):
        for shard in needed[step].tolist():
            found[shard] = step - now
    return found


def test_the_node_is_told_when_each_shard_is_needed_next(remote: Cache) -> None:
    assert remote.mirror is not None
    where = (remote.mirror.node.folder, remote.mirror.folder.name)
    loader = make_loader(remote, num_threads=0)
    wanted = [told(loader, remote, now=now, steps=400) for now in range(len(loader))]
    assert any(max(steps) >= len(loader) - now for now, steps in enumerate(wanted))  # it looks into the next epoch
    batches = iter(loader)
    for now in range(1, len(loader)):
        next(batches)
        wait_until(lambda now=now: distances(*where).tolist() == wanted[now])  # type: ignore[misc,union-attr]
    batches.close()  # type: ignore[attr-defined]
    assert distances(*where) is None


def test_no_step_of_an_epoch_that_is_not_run_is_told(remote: Cache) -> None:
    assert remote.mirror is not None
    where = (remote.mirror.node.folder, remote.mirror.folder.name)
    loader = make_loader(remote, num_threads=0, epochs=1)
    wanted = told(loader, remote, now=1, steps=len(loader))
    batches = iter(loader)
    next(batches)
    wait_until(lambda: distances(*where).tolist() == wanted)  # type: ignore[union-attr]
    assert list(make_loader(remote, epochs=0)) == []


def test_one_process_of_several_downloads_and_another_one_takes_over(remote: Cache) -> None:
    mirror = remote.mirror
    assert mirror is not None
    first, second = (_Post(mirror.node.folder / "post") for _ in range(2))
    assert (first.is_held(), second.is_held(), first.is_held()) == (True, False, True)
    first.close()
    assert second.is_held()
    second.close()


def test_what_cannot_be_downloaded_ahead_is_an_error_where_it_is_read(remote: Cache, proxy: Proxy) -> None:
    proxy.add(Rule(fault=FORBIDDEN, method="GET", key="*/audio/00003.tdz"))
    with pytest.raises(RemoteError, match=r"audio/00003\.tdz"):
        list(make_loader(remote))
    assert threads() == []


# A bound below the whole


def bound_of(cache: Cache, shards: int) -> int:
    """The bytes that so many shards of the mean size and the cache's small files take."""
    remote = RemoteShards(cache)
    return remote.kept_bytes + shards * int(remote.sizes.mean()) + 8 * 4096  # what mirrors say of themselves


def small_node(remote: Cache, shards: int, **changes: Any) -> Cache:
    """The same cache on a node that keeps so many shards."""
    mirror = remote.mirror
    assert mirror is not None
    settings = replace(mirror.settings, cache_size_gb=bound_of(remote, shards) / GB, **changes)
    return open_cache(str(mirror.url), remote=replace(settings, shard_dir=f"{settings.shard_dir}-{shards}"))


def test_a_global_shuffle_that_does_not_fit_is_refused_with_its_price(remote: Cache) -> None:
    small = small_node(remote, 9)
    with pytest.raises(ConfigError, match=r"about [\d.]+ times an epoch.* on each node; set plan.locality") as err:
        make_loader(small)
    total = RemoteShards(small).total_bytes
    for said in (f"{total / 1e6:,.3f} MB in 12 shards", "remote.cache_size_gb", 'remote.global_shuffle = "allow"'):
        assert said in str(err.value)
    make_loader(small, shuffle=False)
    make_loader(small, plan=replace(BUCKETS, locality="shards:4"))
    with pytest.raises(ConfigError, match=r'set plan.kind = "bucket" with plan.locality = "auto", remote'):
        check_remote(small, Cursor(make_plan(samples_of(small), WindowConfig(batch_size=3)), "0", seed=0), threads=0)


def test_a_small_price_is_not_said_to_be_none(remote: Cache) -> None:
    assert remote.mirror is not None
    bound_gb = (RemoteShards(remote).total_bytes - 1) / GB
    settings = replace(remote.mirror.settings, cache_size_gb=bound_gb)
    small = open_cache(str(remote.mirror.url), remote=replace(settings, shard_dir=f"{settings.shard_dir}-small"))
    with pytest.raises(ConfigError, match=r"about (0\.0*[1-9]\d*|[1-9][\d.]*e-\d+) times an epoch"):
        make_loader(small)


def test_a_global_shuffle_that_does_not_fit_may_be_allowed(
    local: Cache, remote: Cache, caplog: pytest.LogCaptureFixture, proxy: Proxy
) -> None:
    small = small_node(remote, 9, global_shuffle="allow")
    assert small.mirror is not None
    loader = make_loader(small, num_threads=1)
    assert "times an epoch" in caplog.text
    other = make_loader(local, num_threads=1)
    for _ in range(2):
        assert_alike(loader, other)
    assert small.mirror.counters.evictions > 0
    assert sum(gets(proxy).values()) > 2 * small.num_shards


def test_ids_beside_batches_cost_no_download(local: Cache, remote: Cache, proxy: Proxy) -> None:
    """They are taken while the shards are there: no more is downloaded than by the best order of a node."""
    small = small_node(remote, 5, global_shuffle="allow")
    loader = make_loader(small, num_threads=1, prefetch=8, with_ids=True, epochs=3)
    steps = list(itertools.takewhile(lambda step: step.place.epoch < 3, loader.cursor.ahead()))
    uses = np.concatenate([np.unique(local.shards_of(step.samples)) for step in steps])
    ids: list[str] = []
    for _ in range(3):
        for _, names in loader:  # pairs
            ids += names
            time.sleep(0.02)  # a training step, in which all that may be prefetched is
    assert ids == [local.sample_id(index) for step in steps for index in step.samples.tolist()]
    best = 2 * simulate(uses, capacity=4, policy="belady").fetches
    assert sum(gets(proxy).values()) <= 1.25 * best


@pytest.mark.parametrize(("kept", "ahead"), [(0.4, 1), (0.6, 1), (0.5, 4), (0.3, 8)])
@pytest.mark.few("0.6-1")
def test_the_price_of_a_global_shuffle_is_what_comes(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, kept: float, ahead: int
) -> None:
    folder = make_cache(tmp_path / "cache", num_samples=160, features="waveform", max_duration_s=1.0)
    whole = RemoteShards(open_cache(put_folder(bucket, folder), remote=node_settings(tmp_path, proxy.endpoint)))
    bound = whole.kept_bytes + int(kept * (whole.total_bytes - whole.kept_bytes))
    settings = node_settings(
        tmp_path / "small", proxy.endpoint, bound_bytes=bound, global_shuffle="allow", prefetch_shards=ahead
    )
    loader = make_loader(open_cache(f"{bucket.url}/{folder.name}", remote=settings), num_threads=1)
    cost = epoch_cost(RemoteShards(loader.source), loader.cursor, ranks=1)
    for _ in range(2):
        for _ in loader:
            time.sleep(0.05)  # a training step, in which all that may be prefetched is
    assert sum(gets(proxy).values()) / 2 == pytest.approx(cost.first + cost.later, rel=0.2)


def test_a_bound_below_one_step_is_an_error_with_both_numbers(remote: Cache) -> None:
    small = small_node(remote, 5, global_shuffle="allow")
    with pytest.raises(ConfigError, match=r"remote.cache_size_gb = .* is less than a step of one rank with 3 threads"):
        make_loader(small, num_threads=3)
    make_loader(small, num_threads=0)


@pytest.mark.parametrize("locality", ["shards:2", "shards:4"])
@pytest.mark.few("shards:2")
def test_within_a_window_that_fits_a_shard_is_downloaded_about_once_an_epoch(
    local: Cache, remote: Cache, proxy: Proxy, locality: str
) -> None:
    small, plan = small_node(remote, 9), replace(BUCKETS, locality=locality, lockstep=1)
    loader, other = (make_loader(source, plan=plan, num_threads=1, epochs=1) for source in (small, local))
    assert_alike(loader, other)
    assert sum(gets(proxy).values()) <= 1.25 * 2 * small.num_shards


# Threads, forks


def test_the_thread_lives_as_long_as_the_iterator(remote: Cache) -> None:
    loader = make_loader(remote)
    assert threads() == []
    batches = iter(loader)
    assert len(threads()) == 1
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threads() == []
    batches = iter(loader)
    del batches  # never advanced
    gc.collect()
    assert threads() == []
    for _ in loader:
        break
    gc.collect()
    assert threads() == []
    assert remote.mirror is not None
    assert remote.mirror.before_demand == []
    assert list((remote.mirror.node.folder / FOLDER).glob("*.uses")) == []


def test_a_local_cache_starts_no_thread(local: Cache) -> None:
    batches = iter(make_loader(local))
    next(batches)
    assert threads() == []


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.few("2")
def test_a_forked_child_looks_ahead_for_itself(local: Cache, remote: Cache, num_threads: int) -> None:
    for _ in make_loader(remote):  # what obstore has started is not in the child, so all is here before
        pass
    loader, other = make_loader(remote, num_threads=num_threads), make_loader(local)
    wanted = copies(other)[0]
    batches = iter(loader)
    for _ in range(2):
        next(batches)

    def same_rest() -> bool:
        torch.set_num_threads(1)
        found = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
        for batch, expected in zip(found, wanted[2:], strict=True):
            assert_batches_equal(batch, expected)
        return len(copies(loader)[0]) == len(loader)

    assert forked(same_rest) == 0
    assert len(threads()) == 1
    for batch, expected in zip(batches, wanted[2:], strict=True):
        assert_batches_equal(batch, expected)
    assert threads() == []
