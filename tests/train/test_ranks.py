"""Ranks are found: by torchrun alone, by torch.distributed, by a mesh, and never assumed where they cannot be known."""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from forebay.errors import ConfigError
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.store.cache import open_cache
from forebay.train import CachedVLDataset, build_vl_dataloader, make_loader
from forebay.train.dataset import PlanSampler
from forebay.train.ranks import resolve_ranks
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.processes import torchrun
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.ranks_worker import HEAD
from tests.train.tiny_vl import conversations
from tests.train.vl_cache import make_packs, make_vl_cache


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def world() -> Iterator[Callable[[int, int], None]]:
    """Makes this process one rank of many that are not there."""

    def join(rank: int, size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # meshes of one test are no business of the next


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    corpus = speech_corpus(tmp_path_factory.mktemp("ranks"))
    build_here(corpus.config())
    return corpus


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, samples = tmp_path_factory.mktemp("packs") / "caches", conversations(3, 20)
    cache = make_vl_cache(root, samples)
    make_packs(root, open_cache(cache).key, samples, seq_len=70)
    return cache


@pytest.fixture(scope="module")
def launched(corpus: Corpus, packs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Batches that two ranks of torchrun read, by one launch."""
    out = tmp_path_factory.mktemp("launched")
    outcome = torchrun("tests.train.ranks_worker", corpus.config().path, packs, out)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return [json.loads((out / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("how", ["environment", "initialised", "prepared"])
def test_two_ranks_of_torchrun_read_every_clip_once(launched: list[dict[str, Any]], corpus: Corpus, how: str) -> None:
    """`make_loader(config)` alone; the worst that could happen is two ranks with equal batches, which nobody would see.

    Where the batches are odd, both have a part of the last one.
    """
    whole = make_loader(corpus.config())
    count = whole.plan.num_batches
    assert [len(rank[how]) for rank in launched] == [-(-count // 2)] * 2
    clips = [tuple(clip) for rank in launched for batch in rank[how] for clip in batch]
    assert sorted(clips) == sorted(tuple(samples[:HEAD].tolist()) for samples in corpus.audio.values())


def test_a_rank_that_is_said_to_be_a_world_of_one_asks_no_other(launched: list[dict[str, Any]], corpus: Corpus) -> None:
    """A loader of rank 1 alone, as for an evaluation there: the other rank takes part in nothing."""
    clips = [tuple(clip) for batch in launched[1]["alone"] for clip in batch]
    assert sorted(clips) == sorted(2 * [tuple(samples[:HEAD].tolist()) for samples in corpus.audio.values()])


def test_workers_of_a_dataloader_read_the_packs_of_their_rank(launched: list[dict[str, Any]], packs: Path) -> None:
    """The workers inherit RANK and have no process group; what counts is where the dataset was made."""
    wanted = [[b["input_ids"].flatten().tolist() for b in CachedVLDataset(packs, rank, 2)] for rank in range(2)]
    assert [rank["workers"] for rank in launched] == wanted
    assert wanted[0] != wanted[1]


def test_batches_are_not_shared_twice(launched: list[dict[str, Any]]) -> None:
    first, second = (rank["sampler"] for rank in launched)
    assert first != second
    for rank, found in enumerate(launched):
        assert f"already those of dp_rank {rank} of 2" in found["shared_twice"]


def test_alone_it_is_rank_0_of_1() -> None:
    assert resolve_ranks() == (0, 1)


def test_the_environment_of_torchrun_is_enough(monkeypatch: pytest.MonkeyPatch, corpus: Corpus, packs: Path) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert resolve_ranks() == (2, 3)
    plan = bucket_plan(
        FakeSource([50] * 12).lengths["num_audio_samples"],
        sample_rate_hz=16_000,
        settings=corpus.config().plan,  # type: ignore[arg-type]
    )
    loaders = (
        make_loader(corpus.config()),
        CachedVLDataset(packs),
        PlanSampler(Planned(plan=plan, key="0"), seed=0),
        loader_of(FakeSource([50] * 12), plan, plan_key="", seed=0),
    )
    assert [(each.cursor.rank, each.cursor.world) for each in loaders] == [(2, 3)] * 4


def test_torch_distributed_goes_before_the_environment(
    world: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    world(5, 8)
    assert resolve_ranks() == (5, 8)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 and RANK is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1' in the environment, wanted an integer from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment, wanted an integer from 1 on"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment"),
    ],
)
def test_half_an_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        resolve_ranks()


def test_a_world_of_one_needs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert resolve_ranks() == (0, 1)


def test_explicit_values_win(monkeypatch: pytest.MonkeyPatch, world: Callable[[int, int], None]) -> None:
    assert resolve_ranks(3, 7) == (3, 7)  # no world to compare with
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    for size in (1, 2, 3, 6):
        assert [resolve_ranks(rank, size) for rank in range(size)] == [(rank, size) for rank in range(size)]
    world(0, 8)
    assert resolve_ranks(1, 4) == (1, 4)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    assert resolve_ranks(0, 1, device_mesh=mesh) == (0, 1)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((2, 2), "dp_rank is 2 of dp_world_size 2, wanted 0 <= dp_rank < dp_world_size"),
        ((-1, 2), "dp_rank is -1 of dp_world_size 2"),
        ((0, 0), "dp_rank is 0 of dp_world_size 0"),
        ((0, 4), "dp_world_size is 4, which does not divide the 6 processes of RANK and WORLD_SIZE"),
        ((0, 12), "dp_world_size is 12, which does not divide the 6 processes"),
        ((0, None), "dp_rank is 0 and dp_world_size is None: give both, or neither"),
        ((None, 2), "dp_rank is None and dp_world_size is 2: give both, or neither"),
        (("0", "2"), "dp_rank is '0', wanted an integer; environment variables are text"),
        ((0, 2.0), r"dp_world_size is 2\.0, wanted an integer"),
        ((True, 2), "dp_rank is True, wanted an integer"),
    ],
)
def test_ranks_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus, packs: Path, ranks: tuple[Any, Any], message: str
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=message):
        make_loader(corpus.config(), dp_rank=ranks[0], dp_world_size=ranks[1])
    with pytest.raises(ConfigError, match=message):
        CachedVLDataset(packs, *ranks)


def test_a_mesh_gives_its_data_parallel_dimensions(world: Callable[[int, int], None]) -> None:
    """Every rank of 2 x 2 and of 2 x 2 x 2: the ranks of one model replica read the same data, no others do."""
    shapes = {
        ("dp", "tp"): (2, 2),
        ("dp_replicate", "dp_shard", "tp"): (2, 2, 2),
        ("pp", "dp_shard", "cp"): (2, 2, 2),
        ("pp", "fsdp"): (2, 2),
    }
    for (names, shape), rank in ((item, rank) for item in shapes.items() for rank in range(8)):
        size = 4 if len(shape) == 2 else 8
        if rank >= size:
            continue
        world(rank, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        places = dict(zip(names, list(itertools.product(*map(range, shape)))[rank], strict=True))
        if names == ("dp_replicate", "dp_shard", "tp"):
            wanted = (2 * places["dp_replicate"] + places["dp_shard"], 4)
            part = mesh["dp_replicate", "dp_shard"]
        else:
            [name] = {"dp", "dp_shard", "fsdp"} & set(names)
            wanted = (places[name], 2)
            part = mesh[name]
        assert resolve_ranks(device_mesh=mesh) == resolve_ranks(device_mesh=part) == wanted
        dist.destroy_process_group()


def test_the_loaders_take_a_mesh(world: Callable[[int, int], None], corpus: Corpus, packs: Path) -> None:
    world(3, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dataset = CachedVLDataset(packs, device_mesh=mesh)
    assert (dataset.cursor.rank, dataset.cursor.world) == (1, 2)
    with pytest.raises(ConfigError, match="splits the model over ranks"):
        CachedVLDataset(packs)
    with pytest.raises(ConfigError, match=r"wanted \[vision\]"):
        build_vl_dataloader(corpus.config(), device_mesh=mesh)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 2), None, "device_mesh has 2 dimensions without names"),
        ((4,), ("tp",), "device_mesh has no dimension of data parallelism"),
        ((2, 2), ("cp", "tp"), "device_mesh has no dimension of data parallelism"),
        ((2, 2), ("dp", "rows"), "device_mesh has a dimension 'rows' that says nothing here"),
        ((2, 2), ("dp_shard_cp", "tp"), "device_mesh has a dimension 'dp_shard_cp'"),
    ],
)
def test_a_mesh_that_does_not_say(
    world: Callable[[int, int], None], shape: tuple[int, ...], names: tuple[str, ...] | None, message: str
) -> None:
    world(1, 4)
    with pytest.raises(ConfigError, match=message):
        resolve_ranks(device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def test_a_plain_mesh_is_data_parallel(world: Callable[[int, int], None]) -> None:
    world(1, 4)
    assert resolve_ranks(device_mesh=init_device_mesh("cpu", (4,))) == (1, 4)
    with pytest.raises(ConfigError, match="this process is in no place of device_mesh"):
        resolve_ranks(device_mesh=DeviceMesh("cpu", [0, 2]))
    with pytest.raises(ConfigError, match="device_mesh is a tuple, wanted a torch"):
        resolve_ranks(device_mesh=(2, 2))


@pytest.mark.parametrize("names", [("dp", "tp"), ("dp", "cp"), ("pp", "dp")])
def test_ranks_that_share_a_model_are_not_guessed(
    world: Callable[[int, int], None], names: tuple[str, str], corpus: Corpus
) -> None:
    world(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    [name] = {"tp", "cp", "pp"} & set(names)
    with pytest.raises(ConfigError, match=rf"the DeviceMesh \(.*\) splits the model over ranks \({name} of 2\)"):
        make_loader(corpus.config())
    assert resolve_ranks(device_mesh=mesh) == ((1, 2) if names[1] == "dp" else (0, 2))


def test_a_model_that_all_ranks_share_is_seen_too(world: Callable[[int, int], None]) -> None:
    """transformers' mesh of `tp_size = 4`: its groups are those of the world, and carry no name."""
    world(2, 4)
    mesh = init_device_mesh("cpu", (1, 1, 1, 4), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    with pytest.raises(ConfigError, match="tp of 4"):
        resolve_ranks()
    assert resolve_ranks(device_mesh=mesh) == (0, 1)


def test_meshes_of_data_alone_change_nothing(world: Callable[[int, int], None]) -> None:
    world(2, 4)
    meshes = [
        init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp")),
        init_device_mesh("cpu", (4,)),
    ]
    assert resolve_ranks() == (2, 4)
    assert len(meshes) == 2


def test_megatron_is_asked(monkeypatch: pytest.MonkeyPatch, world: Callable[[int, int], None]) -> None:
    world(2, 4)
    sizes = {"tensor_model_parallel": 1, "pipeline_model_parallel": 1, "context_parallel": 2}
    module: Any = ModuleType("megatron.core.parallel_state")
    module.model_parallel_is_initialized = lambda: True
    for kind in sizes:
        setattr(module, f"get_{kind}_world_size", lambda kind=kind: sizes[kind])
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)
    with pytest.raises(ConfigError, match=r"Megatron splits the model over ranks \(context_parallel of 2\)"):
        resolve_ranks()
    assert resolve_ranks(1, 2) == (1, 2)
    sizes["context_parallel"] = 1
    assert resolve_ranks() == (2, 4)


def test_accelerate_is_asked(monkeypatch: pytest.MonkeyPatch, world: Callable[[int, int], None]) -> None:
    world(2, 4)
    settings = SimpleNamespace(tp_size=1, cp_size=None, sp_size=2)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", settings)
    with pytest.raises(ConfigError, match=r"accelerate's parallelism_config splits the model over ranks \(sp of 2\)"):
        resolve_ranks()
    settings.sp_size = 1
    assert resolve_ranks() == (2, 4)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ConfigError, match=r"accelerate launch splits the model over ranks \(TP of 2\)"):
        resolve_ranks()
