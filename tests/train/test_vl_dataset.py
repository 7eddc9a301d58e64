"""Packs as an iterable dataset: one order whatever the workers and ranks, a cursor for a state, named by a folder."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from forebay.errors import (
    CacheCorruptError,
    CacheMismatchError,
    CacheNotFoundError,
    ConfigError,
    PlanError,
    ResumeError,
)
from forebay.plan.cursor import num_steps
from forebay.store.cache import Cache, open_cache
from forebay.train import CachedVLDataset
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import PatchBatch, to_model_inputs
from tests.store_factory import make_cache
from tests.train.loaders import loader_of
from tests.train.tiny_vl import CONSTANTS, conversations
from tests.train.vl_cache import make_packs, make_vl_cache

SAMPLES = conversations(3, 50)
SEQ_LEN = 70
Batch = dict[str, Any]


@dataclass(frozen=True)
class Worker:
    """The facts that torch tells a DataLoader's worker about itself."""

    id: int
    num_workers: int


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with one cache and one plan, which no test changes."""
    folder = tmp_path_factory.mktemp("vl") / "caches"
    cache = make_vl_cache(folder, SAMPLES)
    make_packs(folder, open_cache(cache).key, SAMPLES, seq_len=SEQ_LEN)
    return folder


def cache_of(root: Path) -> Path:
    return next(root.glob("tiny-*"))


def dataset(root: Path, dp_rank: int = 0, dp_world_size: int = 1, **options: Any) -> CachedVLDataset:
    return CachedVLDataset(cache_of(root), dp_rank, dp_world_size, **{"seed": 5, **options})


def names(batches: Any) -> list[tuple[int, ...]]:
    """Tokens, by which batches are told apart."""
    return [tuple(batch["input_ids"].flatten().tolist()) for batch in batches]


def epochs(root: Path, *numbers: int) -> list[tuple[int, ...]]:
    """The packs of these epochs in order, by the definition."""
    found = dataset(root)
    batches = []
    for epoch in numbers:
        for indices in found.cursor.plan.order(5, epoch).batches(range(found.cursor.plan.num_batches)):
            batches.append(found.collator([found.source.read(index) for index in indices.tolist()]))
    return names(batches)


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) if isinstance(left[name], torch.Tensor) else left[name] == right[name]
        for name in left
    )


def as_worker(monkeypatch: pytest.MonkeyPatch, worker: Worker | None) -> None:
    monkeypatch.setattr("forebay.train.dataset.get_worker_info", lambda: worker)


# Order


def test_every_iteration_is_an_epoch_of_the_loader(root: Path) -> None:
    found = dataset(root)
    assert len(found) == found.cursor.plan.num_batches > 6
    loader = loader_of(
        found.source, found.cursor.plan, plan_key=found.cursor.key, seed=5, collator=PackCollator(found.source)
    )
    for _ in range(2):
        assert all(itertools.starmap(same, zip(found, loader, strict=True)))
    assert found.state_dict() == loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.few("0", "2")
def test_a_data_loader_gives_the_same_order_with_any_number_of_workers(root: Path, num_workers: int) -> None:
    found = dataset(root, varlen=True)
    loader = DataLoader(found, batch_size=None, num_workers=num_workers)
    assert len(loader) == len(found)
    for epoch in (1, 0):
        found.set_epoch(epoch)
        batches = list(loader)
        assert names(batches) == epochs(root, epoch)
        assert batches[0]["max_length_q"] == int(batches[0]["cu_seq_lens_q"].diff().max())


def test_workers_that_stay_go_on_with_the_next_epoch(root: Path) -> None:
    loader = DataLoader(dataset(root), batch_size=None, num_workers=2, persistent_workers=True)
    assert names(loader) + names(loader) == epochs(root, 0, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.few("2")
def test_an_infinite_one_goes_on_with_the_next_epoch(root: Path, num_workers: int) -> None:
    found = dataset(root, infinite=True)
    wanted = epochs(root, 0, 1, 2)
    loader = DataLoader(found, batch_size=None, num_workers=num_workers)
    assert names(itertools.islice(loader, len(wanted))) == wanted
    with pytest.raises(TypeError, match="no length"):
        len(found)


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.few
def test_ranks_share_one_sequence(tmp_path: Path, tail: str, world_size: int) -> None:
    cache = make_vl_cache(tmp_path, SAMPLES)
    make_packs(tmp_path, open_cache(cache).key, SAMPLES, seq_len=SEQ_LEN, tail=tail)
    wanted = epochs(tmp_path, 0)
    ranks = [dataset(tmp_path, rank, world_size, mask_fillers=True) for rank in range(world_size)]
    steps = [batch for step in zip(*ranks, strict=True) for batch in step]
    count = num_steps(len(wanted), world_size, tail=tail) * world_size  # type: ignore[arg-type]
    assert names(steps) == (wanted + wanted[:world_size])[:count]
    for batch in steps[len(wanted) :]:
        assert bool((batch["labels"] == -100).all()) is (tail == "short")


# State


def with_tail(dataset: CachedVLDataset, tail: str) -> None:
    plan: Any = dataset.cursor.plan
    dataset.cursor.plan = replace(plan, settings=replace(plan.settings, tail=tail))


@given(
    data=st.data(),
    num_workers=st.integers(0, 5),
    world=st.integers(1, 4),
    infinite=st.booleans(),
    tail=st.sampled_from(["short", "drop"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_workers_together_give_the_rank_s_steps_and_go_on_from_their_states(
    root: Path, data: st.DataObject, num_workers: int, world: int, *, infinite: bool, tail: str
) -> None:
    """Workers in one process, taken in turn as torch does, stopped anywhere and made anew from their own states."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain = dataset(root, world - 1, world, infinite=infinite)
        with_tail(plain, tail)
        monkeypatch.setattr(
            CachedVLDataset, "_batch", lambda self, step, allocate: (step.place.epoch, step.place.position)
        )
        per_epoch = len(dataset(root, world - 1, world)) if tail == "short" else plain.cursor.plan.num_batches // world
        steps = [(epoch, world * step) for epoch in range(4) for step in range(per_epoch)]
        limit = 3 * per_epoch if infinite else per_epoch
        stop = data.draw(st.integers(0, limit), label="stop")

        def made(worker: int, state: dict[str, Any] | None) -> tuple[CachedVLDataset, Iterator[Any]]:
            found = copy.deepcopy(plain)
            with_tail(found, tail)
            as_worker(monkeypatch, Worker(worker, num_workers) if num_workers else None)
            if state is not None:
                found.load_state_dict(json.loads(json.dumps(state)))
            return found, iter(found)

        def turns(workers: list[tuple[CachedVLDataset, Iterator[Any]]], first: int, count: int) -> list[Any]:
            given_out: list[Any] = []
            alive, place = [True] * len(workers), first
            while any(alive) and len(given_out) < count:
                number = place % len(workers)
                as_worker(monkeypatch, Worker(number, num_workers) if num_workers else None)
                batch = next(workers[number][1], None) if alive[number] else None
                alive[number] = batch is not None
                given_out += [batch] if batch is not None else []
                place += 1
            return given_out

        workers = [made(number, None) for number in range(max(num_workers, 1))]
        assert turns(workers, 0, stop) == steps[:stop]
        states = []
        for number, (found, _) in enumerate(workers):
            as_worker(monkeypatch, Worker(number, num_workers) if num_workers else None)
            states.append(found.state_dict())
        workers = [made(number, state) for number, state in enumerate(states)]
        if not infinite and stop == per_epoch:
            # All have said so: without workers the next epoch comes, workers are at the end of this one.
            wanted = [] if num_workers else steps[per_epoch : 2 * per_epoch]
        else:
            wanted = steps[stop : limit + (per_epoch if infinite else 0)]
        assert turns(workers, stop % max(num_workers, 1), len(wanted) + (not infinite)) == wanted
        if (
            not infinite and num_workers
        ):  # workers that stay: the epoch is over for all, those that had no batch of it too
            following = []
            for number, (found, _) in enumerate(workers):
                as_worker(monkeypatch, Worker(number, num_workers))
                following.append((found, iter(found)))
            assert turns(following, 0, per_epoch + 1) == steps[per_epoch : 2 * per_epoch]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 under torch 2.13
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.few("False-2", "True-0")
def test_a_stateful_data_loader_goes_on_where_it_stopped(root: Path, num_workers: int, *, infinite: bool) -> None:
    wanted = epochs(root, 0, 1)
    count = len(wanted) if infinite else len(wanted) // 2
    first = StatefulDataLoader(dataset(root, infinite=infinite), batch_size=None, num_workers=num_workers)
    taken = names(itertools.islice(first, 5))
    state = copy.deepcopy(first.state_dict())
    second = StatefulDataLoader(dataset(root, infinite=infinite), batch_size=None, num_workers=num_workers)
    second.load_state_dict(state)
    assert taken + names(itertools.islice(second, count - 5)) == wanted[:count]


def test_states_go_to_the_loader_and_back_and_to_another_world_size(root: Path) -> None:
    wanted = epochs(root, 0)
    found = dataset(root, 1, 2)
    taken = iter(found)
    assert names(itertools.islice(taken, 2)) == wanted[1:4:2]
    loader = loader_of(found.source, found.cursor.plan, plan_key=found.cursor.key, seed=0, collator=found.collator)
    loader.load_state_dict(found.state_dict())
    batches = iter(loader)
    assert names([next(batches)]) == [wanted[4]]
    again = dataset(root, seed=99)
    again.load_state_dict(loader.state_dict())
    assert (names(again), again.cursor.state.seed) == (wanted[5:], 5)
    # Left before its end an iteration begins again; its state goes on.
    again = dataset(root)
    assert names([next(iter(again))]) == names([next(iter(again))]) == wanted[:1]
    assert len(json.dumps(again.state_dict())) < 200


def test_states_that_are_not_of_this_place_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataset(root)
    with pytest.raises(ResumeError, match=r"plan_key is [0f]{16}, the plan here has"):
        found.load_state_dict({**found.state_dict(), "plan_key": "f" * 64})
    as_worker(monkeypatch, Worker(1, 3))
    state = found.state_dict()
    as_worker(monkeypatch, Worker(1, 2))
    with pytest.raises(ResumeError, match="that of one of 3 workers, here are 2; resume with num_workers = 3"):
        found.load_state_dict(state)
    as_worker(monkeypatch, None)
    with pytest.raises(ResumeError, match="here are 0"):
        found.load_state_dict(state)
    with pytest.raises(ConfigError, match="epoch is -1"):
        found.set_epoch(-1)


# Batches


def test_batches_are_as_the_collator_of_the_wanted_kind_makes_them(tmp_path: Path) -> None:
    cache = make_vl_cache(tmp_path, SAMPLES)
    make_packs(tmp_path, open_cache(cache).key, SAMPLES, seq_len=SEQ_LEN, shapes="fixed")
    found = dataset(tmp_path, pixels="bfloat16", varlen=True)
    shapes = found.collator.shapes
    assert shapes is not None
    assert (shapes.seq_len, 1 <= len(shapes.patch_classes) <= 2) == (SEQ_LEN, True)
    batches = list(found)
    assert {batch["input_ids"].shape[1] for batch in batches} == {SEQ_LEN}
    assert {len(batch["pixel_values"]) for batch in batches} <= set(shapes.patch_classes)
    assert batches[0]["pixel_values"].dtype == torch.bfloat16
    assert "max_length_q" in batches[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_uint8_patches_come_through_a_data_loader_as_no_mapping(root: Path, num_workers: int) -> None:
    found = DataLoader(dataset(root, pixels="uint8"), batch_size=None, num_workers=num_workers)
    for batch, wanted in zip(found, dataset(root), strict=True):
        assert isinstance(batch, PatchBatch)
        assert isinstance(wanted, dict)
        assert same(to_model_inputs(batch, CONSTANTS), wanted)


def test_a_kept_batch_is_not_overwritten(root: Path) -> None:
    kept = list(dataset(root))
    copies = [{name: torch.as_tensor(value).clone() for name, value in batch.items()} for batch in kept]
    for _ in dataset(root, infinite=False):
        pass
    assert all(itertools.starmap(same, zip(kept, copies, strict=True)))
    views = {batch["pixel_values"].data_ptr() for batch in kept}
    assert len(views) == len(kept)


def test_a_pickled_one_maps_its_plan_again(root: Path) -> None:
    found = dataset(root)
    data = pickle.dumps(found)
    assert len(data) < 20_000
    assert names(pickle.loads(data)) == names(found)  # noqa: S301


# Folders


def test_a_plan_s_folder_finds_the_cache_whose_codec_is_read_fastest(tmp_path: Path) -> None:
    packed = make_vl_cache(tmp_path, SAMPLES, codec="zstd")
    plan = make_packs(tmp_path, open_cache(packed).key, SAMPLES, seq_len=SEQ_LEN)
    first = CachedVLDataset(plan, seed=5)
    assert isinstance(first.source, Cache)
    assert first.source.folder == packed
    raw = make_vl_cache(tmp_path, SAMPLES)
    second = CachedVLDataset(str(plan), seed=5)
    assert isinstance(second.source, Cache)
    assert second.source.folder == raw
    assert all(itertools.starmap(same, zip(first, second, strict=True)))


def test_of_several_plans_one_has_to_be_named(tmp_path: Path) -> None:
    cache = make_vl_cache(tmp_path, SAMPLES)
    key = open_cache(cache).key
    with pytest.raises(CacheNotFoundError, match=r"no plan of packs for .*run: forebay preprocess CONFIG"):
        CachedVLDataset(cache)
    one = make_packs(tmp_path, key, SAMPLES, seq_len=SEQ_LEN)
    make_packs(tmp_path, "0" * 64, SAMPLES, seq_len=SEQ_LEN)  # of another cache
    assert CachedVLDataset(cache).plan_folder == one
    other = make_packs(tmp_path, key, SAMPLES, seq_len=2 * SEQ_LEN)
    with pytest.raises(ConfigError, match=f"(?s)has several plans: .*{one.name}.*name one"):
        CachedVLDataset(cache)
    assert CachedVLDataset(cache, plan=one.name).plan_folder == one
    assert CachedVLDataset(cache, seq_len=2 * SEQ_LEN).plan_folder == other
    with pytest.raises(ConfigError, match=rf"no plan of plan=None, seq_len=7: .*{one.name} \(seq_len {SEQ_LEN}\)"):
        CachedVLDataset(cache, seq_len=7)
    assert len(CachedVLDataset(other)) < len(CachedVLDataset(one))
    (other / "metadata.json").write_bytes(b"{}")  # damaged: left out
    assert CachedVLDataset(cache).plan_folder == one
    with pytest.raises(CacheCorruptError, match="metadata"):
        CachedVLDataset(other)


def test_folders_that_are_something_else_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no cache of images: features are 'log_mel'"):
        CachedVLDataset(make_cache(tmp_path))
    with pytest.raises(CacheNotFoundError, match="is not a folder"):
        CachedVLDataset(tmp_path / "nothing")
    plan = make_packs(tmp_path, "0" * 64, SAMPLES, seq_len=SEQ_LEN)
    with pytest.raises(CacheNotFoundError, match=r"its cache 0{16} is not in"):
        CachedVLDataset(plan)
    cache = make_vl_cache(tmp_path, SAMPLES)
    short = make_packs(tmp_path, open_cache(cache).key, SAMPLES[:-1], seq_len=SEQ_LEN)
    with pytest.raises(CacheMismatchError, match="num_samples differs"):
        CachedVLDataset(short)


def test_impossible_values_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dp_rank is 2 of dp_world_size 2"):
        dataset(root, 2, 2)
    with pytest.raises(ConfigError, match='pixels is "int8"'):
        dataset(root, pixels="int8")
    cache = make_vl_cache(tmp_path, SAMPLES)
    make_packs(tmp_path, open_cache(cache).key, SAMPLES, seq_len=SEQ_LEN, tail="drop")
    with pytest.raises(PlanError, match="no full step of 99 ranks"):
        dataset(tmp_path, 0, 99)
