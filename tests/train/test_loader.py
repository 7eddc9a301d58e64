from __future__ import annotations

import gc
import itertools
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader

from forebay.config import BucketConfig
from forebay.errors import CacheCorruptError, ConfigError, PlanError, ResumeError
from forebay.plan.bucket_plan import BucketPlan, Order
from forebay.plan.cursor import FollowedEpochs
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_key
from forebay.steps.step import Batch
from forebay.train.collate.collator import Collator
from forebay.train.collate.patches import fields_of
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.loader import Loader
from forebay.train.prefetch import THREAD_NAME
from tests.train.collate.test_collator import assert_batches_equal
from tests.train.fake_source import FakeSource, plain_batch
from tests.train.loaders import loader_of

NUM_SAMPLES = 53


def make_source(**changes: Any) -> FakeSource:
    lengths = np.random.default_rng(5).integers(10, 400, NUM_SAMPLES).tolist()
    return FakeSource(lengths, **{"features": "qwen3_asr", "prompt": "qwen3_asr", "dtype": "float16", **changes})


def make_plan(source: FakeSource, **changes: Any) -> BucketPlan:
    return bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=plan_settings(**changes))


def plan_settings(**changes: Any) -> BucketConfig:
    return BucketConfig(**{"edges_s": (1.0, 2.0, 4.0), "batch_size": 4, "lockstep": 2, **changes})


def make_loader(source: FakeSource | None = None, *, plan: dict[str, Any] | None = None, **changes: Any) -> Loader:
    source = source or make_source()
    key = plan_key(source.key, plan_settings(**(plan or {})))
    return loader_of(source, make_plan(source, **(plan or {})), **{"plan_key": key, "seed": 7, **changes})


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def copies(batches: Iterator[Batch] | Loader) -> list[Batch]:
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]


def wanted(source: FakeSource, plan: BucketPlan, *, epoch: int, positions: range, seed: int = 7) -> list[Batch]:
    order = Order(plan, seed=seed, epoch=epoch)
    return [plain_batch(source, order.batch(position).tolist()) for position in positions]


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_batches_equal(one, other)


# Order


@pytest.mark.parametrize(("num_threads", "prefetch"), [(0, 1), (1, 1), (2, 4), (3, 7)])
def test_an_iteration_is_an_epoch_of_the_plan_whatever_the_threads(num_threads: int, prefetch: int) -> None:
    source = make_source()
    plan = make_plan(source)
    loader = make_loader(source, num_threads=num_threads, prefetch=prefetch)
    assert len(loader) == plan.num_batches
    for epoch in (0, 1):
        assert loader.epoch == epoch
        assert_equal(copies(loader), wanted(source, plan, epoch=epoch, positions=range(plan.num_batches)))
    assert loader_threads() == []


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.few
def test_ranks_step_through_one_sequence(tail: str, world_size: int) -> None:
    source = make_source()
    plan = make_plan(source, tail=tail)
    loaders = [
        make_loader(source, plan={"tail": tail}, dp_rank=rank, dp_world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(loader) for loader in loaders}) == 1
    weights: list[list[int]] = [[] for _ in loaders]
    steps: list[list[Batch]] = [[] for _ in loaders]
    for rank, loader in enumerate(loaders):
        for batch in loader:
            steps[rank].append({name: tensor.clone() for name, tensor in batch.items()})
            weights[rank].append(loader.weight)
    sequence = [batch for step in zip(*steps, strict=True) for batch in step]
    flat = [weight for step in zip(*weights, strict=True) for weight in step]
    count = plan.num_batches if tail != "drop" else plan.num_batches // world_size * world_size
    fillers = -plan.num_batches % world_size if tail != "drop" else 0
    expected = wanted(source, plan, epoch=0, positions=range(count))
    assert_equal(sequence, expected + expected[:fillers])
    assert flat == [1] * count + [0 if tail == "short" else 1] * fillers
    learnt = sum(loader.report()["samples"] for loader in loaders)
    assert learnt == sum(len(b["labels"]) for b, weight in zip(sequence, flat, strict=True) if weight)


def test_masked_fillers_have_nothing_to_learn() -> None:
    plan = {"tail": "short"}
    loaders = [make_loader(plan=plan, dp_rank=rank, dp_world_size=4, mask_fillers=True) for rank in range(4)]
    fillers = 0
    for loader in loaders:
        for batch in loader:
            assert (loader.weight == 0) == bool((batch["labels"] == -100).all())
            fillers += loader.weight == 0
    assert fillers == -make_plan(make_source()).num_batches % 4 > 0


class OtherLabels(Collator):
    """Gives batches labels of several classes a sample, or none."""

    labels: torch.Tensor | None = None

    def collate(self, *args: Any, **options: Any) -> Batch:
        batch = super().collate(*args, **options)
        del batch["labels"]
        return batch if self.labels is None else {**batch, "labels": self.labels}


@pytest.mark.parametrize("labels", [None, torch.ones(3, 2)])
def test_fillers_whose_labels_cannot_be_masked_are_refused_at_the_first_batch(labels: torch.Tensor | None) -> None:
    collator = OtherLabels(make_source())
    collator.labels = labels
    place: dict[str, Any] = {"dp_rank": 1, "dp_world_size": 4, "collator": collator}
    found = "no labels" if labels is None else "labels are float32, several classes a sample"
    with pytest.raises(
        ConfigError, match=rf"mask_fillers is true, and .*{found}: .* loader\.weight, or set plan\.tail"
    ):
        next(iter(make_loader(**place, mask_fillers=True)))
    assert next(iter(make_loader(**place))) is not None
    assert next(iter(make_loader(plan={"tail": "drop"}, **place, mask_fillers=True))) is not None


def test_epochs_ends_the_run() -> None:
    loader = make_loader(epochs=2, num_threads=1)
    assert [len(list(loader)) for _ in range(4)] == [len(loader), len(loader), 0, 0]


def test_an_epoch_left_early_begins_again() -> None:
    loader = make_loader(num_threads=1)
    first = copies(batch for batch, _ in zip(loader, range(3), strict=False))
    again = copies(loader)
    assert len(again) == len(loader)
    assert_equal(first, again[:3])


def test_set_epoch_goes_to_the_head_of_another_epoch_only() -> None:
    source = make_source()
    loader, plan = make_loader(source, num_threads=0), make_plan(source)
    loader.set_epoch(3)
    batches = iter(loader)
    assert_equal(copies([next(batches)]), wanted(source, plan, epoch=3, positions=range(1)))  # type: ignore[arg-type]
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(3)  # as loops do at the head of each epoch, a resumed one too
    assert loader.state_dict() == state
    with pytest.raises(ConfigError, match="epoch is -1"):
        loader.set_epoch(-1)


def test_an_epoch_that_lightning_leaves_early_goes_on_in_its_next_one() -> None:
    """Lightning leaves epochs under `limit_train_batches`, and says its epoch before each."""
    loader, whole = make_loader(num_threads=0), make_loader(num_threads=0)
    follower, found = loader.batch_sampler.sampler, []
    for epoch in range(4):
        follower.set_epoch(epoch)
        found += copies(itertools.islice(loader, 3))
    assert_equal(found, copies(itertools.islice(itertools.chain(whole, whole), 12)))
    state = {**loader.state_dict(), "epoch": 1, "position": 2}  # of a run that ended in mid-epoch, which counts as done
    loader.load_state_dict(state)
    follower.set_epoch(4)
    assert loader.state_dict() == state
    again, in_order = (make_loader(num_threads=0) for _ in range(2))
    again.batch_sampler.set_epoch(2)  # made by `reload_dataloaders_every_n_epochs`
    assert again.epoch == 2
    assert not hasattr(again, "sampler")  # Lightning takes what has one for a DataLoader of torch
    evaluated = FollowedEpochs(in_order.cursor, is_in_order=True)
    for epoch in range(2):
        evaluated.set_epoch(epoch)
        first = copies(itertools.islice(in_order, 2))
        assert_equal(first, found[:2])


# State


@given(
    first=st.integers(1, 4),
    second=st.integers(1, 4),
    steps=st.integers(0, 8),
    tail=st.sampled_from(["short", "pad"]),
    num_threads=st.integers(0, 2),
)
def test_a_run_goes_on_at_another_world_size_with_nothing_lost_or_twice(
    first: int, second: int, steps: int, tail: str, num_threads: int
) -> None:
    source = make_source(features="waveform", prompt=None, dtype="int16")
    source.lengths = {**source.lengths, "num_audio_samples": source.lengths["num_audio_samples"] * 160}
    plan = make_plan(source, tail=tail)
    taken: list[list[Batch]] = []
    states = []
    for rank in range(first):
        loader = make_loader(source, plan={"tail": tail}, dp_rank=rank, dp_world_size=first, num_threads=num_threads)
        steps = min(steps, len(loader) - 1)
        batches = iter(loader)
        taken.append(copies(next(batches) for _ in range(steps)))
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    assert states[0]["position"] == steps * first
    for rank in range(second):
        loader = make_loader(source, plan={"tail": tail}, dp_rank=rank, dp_world_size=second, num_threads=num_threads)
        loader.load_state_dict(states[0])
        taken.append(copies(loader))
        assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
    begun = [batch for step in zip(*taken[:first], strict=True) for batch in step]
    rest = [batch for step in zip(*taken[first:], strict=True) for batch in step]
    whole = wanted(source, plan, epoch=0, positions=range(plan.num_batches))
    assert_equal((begun + rest)[: plan.num_batches], whole)


def test_the_state_counts_what_was_handed_out_not_what_was_filled_ahead() -> None:
    loader = make_loader(num_threads=2, prefetch=6)
    assert loader.state_dict()["position"] == 0
    batches = iter(loader)
    for position in range(1, 4):
        next(batches)
        assert loader.state_dict() == {
            "version": 1,
            "plan_key": loader.plan_key,
            "seed": 7,
            "epoch": 0,
            "position": position,
        }


def test_the_state_after_an_epochs_last_batch_is_the_next_epoch() -> None:
    loader = make_loader(num_threads=0)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_a_loaded_seed_is_the_loaders() -> None:
    source = make_source()
    state = make_loader(source, seed=11).state_dict()
    loader = make_loader(source, seed=7, num_threads=0)
    loader.load_state_dict(state)
    assert_equal(
        copies(next(iter(loader)) for _ in range(1)),
        wanted(source, make_plan(source), epoch=0, positions=range(1), seed=11),
    )
    assert loader.state_dict()["seed"] == 11


def test_an_older_iterator_does_not_move_the_loader() -> None:
    loader = make_loader(num_threads=1)
    older, newer = iter(loader), iter(loader)
    next(newer)
    for _ in range(5):
        next(older)
    assert loader.state_dict()["position"] == 1
    loader.load_state_dict({**loader.state_dict(), "position": 4})
    next(newer)
    assert loader.state_dict()["position"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan_key": "f" * 64}, r"plan_key is ffffffffffffffff, the plan here has [0-9a-f]{16};"),
        ({"plan_key": None}, r"plan_key is None, the plan here has [0-9a-f]{16};"),
        ({"version": 2}, "version is 2, this forebay reads up to 1"),
        ({"version": 0}, "version is 0, wanted an integer from 1 on"),
        ({"version": "1"}, "version is '1', wanted an integer"),
        ({"position": 1.0}, r"position is 1\.0, wanted an integer from 0 on"),
        ({"position": True}, "position is True, wanted an integer from 0 on"),
        ({"position": -1}, "position is -1, wanted an integer from 0 on"),
        ({"position": 10**6}, "position is 1000000, an epoch of the plan has [0-9]+ micro-batches"),
        ({"epoch": -3}, "epoch is -3, wanted an integer from 0 on"),
        ({"epoch": None}, "epoch is None, wanted an integer"),
        ({"seed": "7"}, "seed is '7', wanted an integer"),
    ],
)
def test_states_that_cannot_be_continued_are_refused_and_change_nothing(changes: dict[str, Any], message: str) -> None:
    loader = make_loader(num_threads=0)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict({**before, **changes})
    assert loader.state_dict() == before


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ResumeError, match="loader state is a list"):
        make_loader().load_state_dict([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(("dp_rank", "dp_world_size"), [(2, 2), (-1, 2), (0, 0), (1, 1)])
def test_impossible_ranks_are_refused(dp_rank: int, dp_world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"dp_rank is {dp_rank} of dp_world_size {dp_world_size}"):
        make_loader(dp_rank=dp_rank, dp_world_size=dp_world_size)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads is -1"):
        make_loader(num_threads=-1)
    with pytest.raises(ConfigError, match=r"prefetch is 0 \(wanted 1 or more\)"):
        make_loader(prefetch=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="pin_memory is true but torch sees no CUDA device"):
            make_loader(pin_memory=True)
    with pytest.raises(PlanError, match="no full step of 1000 ranks"):
        make_loader(plan={"tail": "drop"}, dp_rank=0, dp_world_size=1000)


# Memory


def test_a_kept_batch_is_never_overwritten_and_a_dropped_one_is_used_again() -> None:
    source = make_source(features="log_mel", prompt="whisper")  # batches of one size
    loader, plan = make_loader(source, prefetch=2), make_plan(source)
    kept, addresses = [], []
    for epoch in range(4):
        for position, batch in enumerate(loader):
            addresses.append(batch["input_features"].data_ptr())
            if position % 5 == 0:
                kept.append((epoch, position, batch["input_features"][:, 1:], batch["labels"].numpy()[:, ::2]))
    for epoch, position, features, labels in kept:
        (expected,) = wanted(source, plan, epoch=epoch, positions=range(position, position + 1))
        assert torch.equal(features, expected["input_features"][:, 1:])
        assert np.array_equal(labels, expected["labels"].numpy()[:, ::2])
    assert len(set(addresses)) <= len(kept) + 2 + 2 + 2  # ahead, in the threads, with the user
    assert len(set(addresses)) < len(addresses) / 2


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_plain_loop_needs_a_ring_of_a_few_buffers(num_threads: int) -> None:
    loader = make_loader(make_source(features="log_mel", prompt="whisper"), num_threads=num_threads, prefetch=3)
    addresses = [batch["input_features"].data_ptr() for _ in range(4) for batch in loader]
    assert len(set(addresses)) <= (3 + 2 + 2 if num_threads else 2)


def test_gradients_are_right_when_backward_comes_many_batches_later() -> None:
    source = make_source(features="log_mel", prompt=None)
    plan = make_plan(source)
    weight = torch.ones(80, 1, requires_grad=True)
    losses = []
    for batch in make_loader(source, prefetch=2):
        losses.append((batch["input_features"] * weight).sum())
    for loss, batch in zip(losses, wanted(source, plan, epoch=0, positions=range(plan.num_batches)), strict=True):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert torch.allclose(gradient[:, 0], batch["input_features"].sum((0, 2)), rtol=1e-4, atol=1e-2)


def test_batches_come_as_tensordicts_on_request() -> None:
    source = make_source()
    found = list(make_loader(source, as_tensordict=True))
    plain = wanted(source, make_plan(source), epoch=0, positions=range(len(found)))
    for batch, expected in zip(found, plain, strict=True):
        assert isinstance(batch, TensorDict)
        assert batch.batch_size == expected["labels"].shape[:1]
        assert_batches_equal({name: batch[name] for name in expected}, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_come_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    source = make_source()
    found = copies(make_loader(source, dtype=dtype))
    order = Order(make_plan(source), seed=7, epoch=0)
    assert_equal(found, [plain_batch(source, order.batch(i).tolist(), dtype=dtype) for i in range(len(found))])


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_memory_is_not_refilled_before_its_copy_to_the_device_has_ended(device: str) -> None:
    source = make_source(features="log_mel", prompt=None)
    plan = make_plan(source)
    found = []
    for batch in make_loader(source, prefetch=2):
        assert batch["input_features"].is_pinned() == (device == "cuda")
        if device == "cuda":
            torch.cuda._sleep(10_000_000)  # the copy waits behind it while the loader goes on
        found.append(batch["input_features"].to(device, non_blocking=True, copy=True))
    for tensor, batch in zip(found, wanted(source, plan, epoch=0, positions=range(len(found))), strict=True):
        assert torch.equal(tensor.cpu(), batch["input_features"])


# Report


def test_the_report_counts_what_was_handed_out() -> None:
    source = make_source(features="log_mel", prompt=None)
    loader = make_loader(source)
    assert loader.report()["padding"] == 0.0
    batches = iter(loader)
    sizes = [len(next(batches)["input_features"]) for _ in range(5)]
    report = loader.report()
    assert (report["samples"], report["batches"], report["steps"], report["epoch"]) == (sum(sizes), 5, 5, 0)
    order = Order(make_plan(source), seed=7, epoch=0)
    frames = sum(len(source.samples[i]["input_features"]) for p in range(5) for i in order.batch(p).tolist())
    assert (report["frames"], report["padded_frames"]) == (frames, 3000 * sum(sizes) - frames)
    assert report["padding"] == pytest.approx(1 - frames / (3000 * sum(sizes)))
    assert report["wait_s"] > 0
    list(batches)
    assert loader.report()["samples"] == NUM_SAMPLES
    assert loader.report()["epoch"] == 1


# Threads, errors, forks


def test_threads_start_with_iter_and_end_with_the_iterator() -> None:
    loader = make_loader(num_threads=2)
    assert loader_threads() == []
    batches = iter(loader)
    assert len(loader_threads()) == 2
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert loader_threads() == []
    batches = iter(loader)
    del batches  # never advanced
    gc.collect()
    assert loader_threads() == []
    for _ in loader:
        break
    gc.collect()
    assert loader_threads() == []


class BrokenSource(FakeSource):
    """A source whose sample 11 cannot be read."""

    def read(self, index: int) -> dict[str, np.ndarray[Any, Any]]:
        if index == 11:
            raise CacheCorruptError("audio/00000.tdz: stored checksum 1, computed 2")
        return super().read(index)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_error_of_the_source_reaches_the_caller_with_its_sample_and_cache(num_threads: int) -> None:
    good = make_source()
    broken = BrokenSource(good.lengths["num_frames"].tolist(), features="qwen3_asr", prompt="qwen3_asr")
    loader = make_loader(broken, num_threads=num_threads)
    order = Order(make_plan(broken), seed=7, epoch=0)
    position = next(p for p in range(len(order)) if 11 in order.batch(p).tolist())
    batches = iter(loader)
    for _ in range(position):
        next(batches)
    with pytest.raises(CacheCorruptError, match="stored checksum 1, computed 2") as caught:
        next(batches)
    assert caught.value.__notes__ == [
        f"sample 11 of cache {broken.key[:16]}",
        f"while filling micro-batch {position} of epoch 0",
    ]
    assert loader_threads() == []
    assert loader.state_dict()["position"] == position  # where a later run can go on


def forked(check: Any) -> int:
    """Returns the exit status of a forked child: 0 where `check` is true there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_forked_child_goes_on_where_its_parent_stands(num_threads: int) -> None:
    source = make_source()
    plan = make_plan(source)
    loader = make_loader(source, num_threads=num_threads)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    rest = wanted(source, plan, epoch=0, positions=range(4, plan.num_batches))

    def same_rest() -> bool:
        # The comparisons would wait for ever for OpenMP threads that are not here; DataLoader's workers do the same.
        torch.set_num_threads(1)
        assert_equal(copies(batches), rest)
        return len(copies(loader)) == len(loader)  # and begins iterators of its own

    assert forked(same_rest) == 0
    assert_equal(copies(batches), rest)


def test_children_of_a_process_that_set_torchs_threads_start_theirs() -> None:
    """Where the threads remake torch's pool all at once, a third of the children fail, so 20 of them find it."""
    source = FakeSource([1500] * 24)
    settings = BucketConfig(batch_size=8)
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(200_000).exp()  # OpenMP threads, which a child does not have
        for _ in range(20):
            loader = loader_of(source, plan, plan_key="0", seed=0, dtype=torch.bfloat16, num_threads=2)
            batches = iter(loader)
            next(batches)
            # Nothing of torch in the child's main thread: that alone would remake the pool.
            assert forked(lambda batches=batches: sum(1 for _ in batches) == 2) == 0
            batches.close()  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(threads)


# Others' loaders


def test_samples_of_the_dataset_are_writable_copies() -> None:
    source = make_source()
    dataset = SampleDataset(source)
    assert len(dataset) == NUM_SAMPLES
    sample = dataset[3]
    assert {name: tensor.shape for name, tensor in sample.items()} == {
        name: value.shape for name, value in source.samples[3].items()
    }
    sample["input_features"].zero_()
    assert (source.samples[3]["input_features"] != 0).any()
    assert [
        torch.equal(a["input_ids"], dataset[i]["input_ids"])
        for a, i in zip(dataset.__getitems__([5, 2]), (5, 2), strict=True)
    ] == [True, True]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.few("2")
def test_torchs_dataloader_gives_the_loaders_batches(num_workers: int) -> None:
    source = make_source()
    plan = make_plan(source)
    sampler = PlanSampler(Planned(plan=plan, key="0"), seed=7, dp_rank=1, dp_world_size=2)
    loader = make_loader(source, dp_rank=1, dp_world_size=2)
    peer = DataLoader(
        SampleDataset(source), batch_sampler=sampler, collate_fn=Collator(source), num_workers=num_workers
    )
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert len(peer) == len(loader)
        assert_equal(copies(peer), copies(loader))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_arrays_for_other_frameworks_are_the_tensors_of_the_same_batches(form: str) -> None:
    source = make_source()
    arrays, tensors = make_loader(source, output="numpy", form=form), make_loader(source, form=form)
    for one, other in zip(arrays, tensors, strict=True):
        fields: Any = fields_of(other)
        assert list(one) == list(fields)
        for name, array in one.items():
            assert isinstance(array, np.ndarray)
            assert np.array_equal(array, fields[name].numpy())
            assert array.dtype == fields[name].numpy().dtype


def test_arrays_that_numpy_cannot_hold_are_refused() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dtype": torch.bfloat16}, 'which has no bfloat16; set loader.dtype = "float32"'),
        ({"device": "cuda"}, "arrays on the host: leave device and as_tensordict out"),
        ({"as_tensordict": True}, "leave device and as_tensordict out"),
        ({"output": "jax"}, "output is 'jax', wanted 'torch' or 'numpy'"),
    )
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            make_loader(make_source(), **{"output": "numpy", **settings})
