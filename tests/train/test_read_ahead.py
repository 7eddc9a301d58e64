"""Pages are read ahead while the disk is cold, and only then."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from forebay.config import BucketConfig
from forebay.plan.make_buckets import bucket_plan
from forebay.store.cache import Cache, open_cache
from forebay.store.source import SampleSource, SourceUnion
from forebay.train import prefetch
from forebay.train.prefetch import ReadAhead
from tests.store_factory import make_cache
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of


class Asked:
    """A source that notes what it is asked to read ahead."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def will_need(self, indices: Iterable[int]) -> None:
        self.indices += indices


def test_only_after_a_wait_for_the_disk_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = iter([3, 3, 3, 4])
    monkeypatch.setattr(prefetch, "_major_faults", lambda: next(faults))
    monkeypatch.setattr(prefetch, "_BATCHES", 2)
    source = Asked()
    ahead = ReadAhead(cast("SampleSource", source))
    with ahead.watch():
        pass
    ahead.announce([1])
    assert source.indices == []
    with ahead.watch():
        pass
    for index in (2, 3, 4):
        ahead.announce([index])
    assert source.indices == [2, 3]


def test_a_source_that_cannot_read_ahead_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_major_faults", iter([0, 1]).__next__)
    source = FakeSource([200])
    ahead = ReadAhead(cast("SampleSource", source))
    with ahead.watch():
        pass
    assert ahead.announce([0]) is None  # type: ignore[func-returns-value]


def test_the_loader_announces_its_batches_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(10**6))
    monkeypatch.setattr(prefetch, "_major_faults", lambda: next(counts))  # every batch meets the disk
    source = FakeSource([200] * 40, prompt=None)
    asked: list[list[int]] = []
    source.will_need = lambda indices: asked.append(list(indices))  # type: ignore[method-assign]
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=BucketConfig(batch_size=4))
    loader = loader_of(source, plan, plan_key="0", seed=0, num_threads=0)
    assert len(list(loader)) == 10
    order = plan.order(0, 0)
    assert asked == [order.batch(position).tolist() for position in range(1, 10)]


def test_reading_ahead_brings_pages_back_and_never_fails(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=6)
    cache = open_cache(folder)
    values = [{name: array.copy() for name, array in cache.read(i).items()} for i in range(6)]
    for path in folder.rglob("*.tdz"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    cache.will_need([0, 3, 5, -1, 99])  # no such sample: whoever reads it is told
    for index, wanted in enumerate(values):
        assert all(np.array_equal(cache.read(index)[name], array) for name, array in wanted.items())
    (folder / "audio" / "00001.tdz").unlink()
    open_cache(folder).will_need(range(6))


def test_a_union_reads_ahead_in_the_sources_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cached, other = FakeSource([200] * 3), FakeSource([200] * 2)
    asked: list[int] = []
    monkeypatch.setattr(cached, "will_need", asked.extend)
    union = SourceUnion([other, cached, other], ["a", "b", "c"])
    union.will_need([0, 2, 6, 4, 3])
    assert asked == [0, 2, 1]


def test_forked_readers_hold_no_more_with_every_epoch(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=24, rows_per_shard=2))
    for index in range(len(cache)):
        cache.read(index)  # what the children inherit has been used
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(4)]
    readers = [context.Process(target=_read_epochs, args=(cache, sender)) for _, sender in ends]
    for reader in readers:
        reader.start()
    grown = [receiver.recv() for receiver, _ in ends]
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0] * 4
    assert max(grown) < 256 * 1024  # of 480 samples read, and 2 MB in every batch


def _read_epochs(cache: Cache, sender: Connection) -> None:
    plan = bucket_plan(cache.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=BucketConfig(batch_size=4))
    loader = loader_of(cache, plan, plan_key="0", seed=0, num_threads=0, dtype=torch.float16, pin_memory=False)
    for epoch in range(25):
        if epoch == 5:
            before = _anonymous_bytes()
        for _ in loader:
            pass
    sender.send(_anonymous_bytes() - before)


def _anonymous_bytes() -> int:
    """This process's memory that is no file's: pages copied after the fork do not add to it, new ones do."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_memory_stays_flat_over_epochs(tmp_path: Path) -> None:
    import tracemalloc

    cache = open_cache(make_cache(tmp_path, num_samples=24, rows_per_shard=2), max_open_shards=3)
    plan = bucket_plan(cache.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=BucketConfig(batch_size=4))
    # In the caller's thread: how many buffers threads hold at once is a matter of timing.
    loader = loader_of(cache, plan, plan_key="0", seed=0, num_threads=0, dtype=torch.float16, pin_memory=False)
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(12):
            for _ in loader:
                pass
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    buffer_bytes = 4 * 3000 * 80 * 2
    assert max(sizes[6:]) - max(sizes[:6]) < buffer_bytes // 4  # less than a part of one batch in six epochs
