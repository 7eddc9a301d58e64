"""Batches that are copied to a device ahead of their use; a fake stream is the CPU twin of CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forebay.config import BucketConfig, PackConfig
from forebay.errors import CacheCorruptError, ConfigError
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.pack.pack_plan import pack_plan
from forebay.steps.image.qwen2_vl import patch_form
from forebay.train import loader as loader_module
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import DeviceExpansion, PatchBatch
from forebay.train.device import Ahead, Batch, SideStream, side_stream
from forebay.train.loader import Loader
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.tiny_vl import FakeVlSource, conversations

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; FakeStream is its twin")


class FakeStream:
    """A device whose copies happen as late as they may: when the batch is waited for."""

    def __init__(self) -> None:
        self.started = self.finished = 0

    def start(self, batch: Batch, finish: Callable[[Any], Batch] | None = None) -> Callable[[], Batch]:
        self.started += 1

        def ready() -> Batch:
            self.finished += 1  # holds the host's memory until then
            copied = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in batch.items()}
            return copied if finish is None else finish(copied)

        return ready


def make_loader(source: FakeSource, **settings: object) -> Loader:
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=BucketConfig(batch_size=4))
    return loader_of(source, plan, plan_key="0", seed=3, **settings)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.few
def test_batches_of_a_device_are_those_of_the_host(
    num_threads: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource(list(range(150, 190)))
    stream = FakeStream()
    wanted = [{name: tensor.clone() for name, tensor in batch.items()} for batch in make_loader(source)]
    monkeypatch.setattr(loader_module, "side_stream", lambda device: stream)
    loader = make_loader(source, device="fake", device_prefetch=depth, num_threads=num_threads, prefetch=1)
    batches = iter(loader)
    for position, expected in enumerate(wanted):
        found = next(batches)
        assert same(found, expected)
        assert stream.started == min(position + 1 + depth, len(wanted))
        assert stream.finished == position + 1
        assert loader.report()["batches"] == position + 1
    assert next(batches, None) is None
    assert loader.epoch == 1


def test_the_state_counts_batches_handed_out_not_batches_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource(list(range(150, 190)))
    monkeypatch.setattr(loader_module, "side_stream", lambda device: FakeStream())
    loader = make_loader(source, device="fake", device_prefetch=3)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["position"] == 1
    resumed = make_loader(source)
    resumed.load_state_dict(loader.state_dict())
    assert same(next(iter(resumed)), next(batches))


def test_an_error_stands_where_its_batch_would_have_stood() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise CacheCorruptError("audio/00000.tdz: stored 1, computed 2")

    found = Ahead(items(), lambda item: lambda: item, depth=2)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(CacheCorruptError, match="stored 1, computed 2"):
        next(found)


def test_devices_that_are_not_there_are_refused() -> None:
    assert side_stream(None) is None
    assert side_stream("cpu") is None
    with pytest.raises(ConfigError, match="device is meta, wanted cpu or a CUDA device"):
        side_stream("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is cuda:1, wanted cpu or a CUDA device that torch sees"):
            side_stream("cuda:1")
    with pytest.raises(ConfigError, match="device_prefetch is -1"):
        make_loader(FakeSource([200]), device_prefetch=-1)


def pack_loader(**settings: object) -> Loader:
    source = FakeVlSource(conversations(3, 20))
    plan = pack_plan(source.lengths["num_tokens"], settings=PackConfig(seq_len=60))
    return loader_of(source, plan, plan_key="0", seed=3, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_are_copied_as_they_are_and_expanded_when_handed_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []

    class Moving(FakeStream):
        def start(self, batch: Batch, finish: Callable[[Any], Batch] | None = None) -> Callable[[], Batch]:
            assert isinstance(batch, PatchBatch)
            assert finish is not None
            copied.append(batch["patches"].dtype)
            return lambda: finish(batch.to("cpu"))

    source = FakeVlSource()
    wanted = list(pack_loader(collator=PackCollator(source, dtype=dtype)))
    monkeypatch.setattr(loader_module, "side_stream", lambda device: Moving())
    stored = PackCollator(source, dtype=None)
    finish = DeviceExpansion(patch_form(source.constants), dtype=dtype)
    found = list(pack_loader(collator=stored, device="fake", finish=finish))
    assert copied == [torch.uint8] * len(wanted)
    assert len(found) == len(wanted) > 3
    for one, other in zip(found, wanted, strict=True):
        assert [batch.pop("use_cache") for batch in (one, other)] == [False, False]
        assert same(one, other)


@pytest.mark.gpu
@needs_cuda
def test_packs_on_a_cuda_device_are_those_of_the_host() -> None:
    source = FakeVlSource()
    wanted = list(pack_loader(collator=PackCollator(source)))
    finish = DeviceExpansion(patch_form(source.constants), dtype=torch.float32)
    loader = pack_loader(collator=PackCollator(source, dtype=None), device="cuda", finish=finish)
    for one, other in zip(loader, wanted, strict=True):
        assert [batch.pop("use_cache") for batch in (one, other)] == [False, False]
        assert all(tensor.is_cuda for tensor in one.values())
        assert same(one, other)


@pytest.mark.gpu
@needs_cuda
def test_batches_on_a_cuda_device_are_those_of_the_host() -> None:
    source = FakeSource(list(range(150, 190)))
    wanted = [{name: tensor.clone() for name, tensor in batch.items()} for batch in make_loader(source)]
    found = []
    for batch in make_loader(source, device="cuda", device_prefetch=2, prefetch=2):
        assert all(tensor.is_cuda for tensor in batch.values())
        torch.cuda._sleep(10_000_000)  # the step is slower than the copies
        found.append({name: tensor.clone() for name, tensor in batch.items()})
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.gpu
@needs_cuda
def test_the_side_stream_keeps_memory_that_a_step_still_reads() -> None:
    stream = SideStream(torch.device("cuda"))
    host = {"x": torch.arange(1_000_000, dtype=torch.float32).pin_memory()}
    batch = stream.start({**host, "max_length_q": 3})()
    assert batch["max_length_q"] == 3
    torch.cuda._sleep(50_000_000)
    total = batch["x"].double().sum()
    del batch
    for _ in range(20):  # would be given the same block if the step's stream were not on record
        stream.start({"x": torch.zeros(1_000_000).pin_memory()})()
    assert total.item() == 1_000_000 * 999_999 / 2
