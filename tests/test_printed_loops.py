"""Every loop of the documents, as it is printed, learns from each sample once, on any number of ranks."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from forebay.config import BucketConfig
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.store.cache import open_cache
from forebay.train import CachedVLDataset, Collator, PlanSampler, SampleDataset, weight_of
from forebay.train.loader import Loader
from tests.test_documents import GUIDES, ROOT
from tests.train.fake_source import FakeSource
from tests.train.integrations.hf_worker import pack_loader
from tests.train.loaders import loader_of
from tests.train.tiny_vl import conversations
from tests.train.vl_cache import make_packs, make_vl_cache

WORLDS = (1, 3, 8)
LOOPS = [
    (name, block)
    for name in GUIDES
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.M)
    if "for batch in loader" in block
]
SOURCE = FakeSource(range(20, 81), features="qwen3_asr", prompt="qwen3_asr")
PLAN = bucket_plan(
    SOURCE.lengths["num_audio_samples"],
    sample_rate_hz=16_000,
    settings=BucketConfig(edges_s=(0.5, 1.0), batch_size=1, lockstep=1),  # 61 batches: on 8 ranks 3 have fillers
)


def speech_loader(*, dp_rank: int, dp_world_size: int) -> Loader:
    return loader_of(SOURCE, PLAN, dp_rank=dp_rank, dp_world_size=dp_world_size)


class Loss:
    """The loss of a batch: what it is multiplied by is how often its samples are learnt from."""

    def __init__(self, learnt: Counter[int], samples: list[int]) -> None:
        self.learnt, self.samples = learnt, samples
        learnt.update(samples)

    def __mul__(self, weight: int) -> Loss:
        self.learnt.update(dict.fromkeys(self.samples, weight - 1))
        return self


def run(block: str, loader: Loader) -> Counter[int]:
    """Returns how often each sample was learnt from by a printed loop."""
    learnt: Counter[int] = Counter()
    train = SimpleNamespace(make_loader=lambda *_, **__: loader, build_vl_dataloader=lambda *_, **__: loader)
    of_config = SimpleNamespace(build=lambda _: None)
    names: dict[str, Any] = {
        "forebay": SimpleNamespace(load_config=lambda *_, **__: None, preprocess=of_config, train=train),
        "model": lambda **_: SimpleNamespace(loss=Loss(learnt, loader.indices)),
        "config": None,
    }
    exec(block.replace("import forebay\n", ""), names)
    return learnt


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("make", [speech_loader, partial(pack_loader, tail="split")], ids=["speech", "packs"])
@pytest.mark.parametrize(("name", "block"), LOOPS, ids=[f"{name}:{i}" for i, (name, _) in enumerate(LOOPS)])
@pytest.mark.few
def test_a_printed_loop_learns_from_every_sample_once(
    name: str, block: str, make: Callable[..., Loader], world: int
) -> None:
    loaders = [make(dp_rank=rank, dp_world_size=world) for rank in range(world)]
    learnt = sum((run(block, loader) for loader in loaders), Counter())
    assert learnt == Counter(range(len(loaders[0].source))), name


def test_the_documents_print_loops() -> None:
    assert len(LOOPS) >= 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.few("1-2", "3-0", "8-0")
def test_a_dataloader_hands_the_weight_on_with_the_batch(world: int, num_workers: int) -> None:
    """61 batches of one sample: behind worker processes, which run ahead of the loop."""
    learnt: Counter[tuple[int, ...]] = Counter()
    for rank in range(world):
        sampler = PlanSampler(Planned(plan=PLAN, key="0"), seed=0, dp_rank=rank, dp_world_size=world)
        batches: Any = DataLoader(
            SampleDataset(SOURCE), batch_sampler=sampler, collate_fn=Collator(SOURCE), num_workers=num_workers
        )
        taken = [(tuple(batch["input_ids"].flatten().tolist()), weight_of(batch)) for batch in batches]
        assert len(taken) == -(-61 // world)
        learnt.update([ids for ids, weight in taken if weight])
    assert set(learnt.values()) == {1}
    assert len(learnt) == 61


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.few("3-2", "1-0", "8-0")
def test_packs_of_a_folder_have_their_weight(tmp_path: Path, world: int, num_workers: int) -> None:
    samples = conversations(3, 11)
    cache = make_vl_cache(tmp_path, samples)
    make_packs(tmp_path, open_cache(cache).key, samples, seq_len=70)
    learnt = 0
    for rank in range(world):
        dataset = CachedVLDataset(cache, rank, world, mask_fillers=False)
        with pytest.raises(RuntimeError, match=r"no batch itself; ask forebay\.train\.weight_of\(batch\)"):
            _ = dataset.weight
        for batch in _batches(dataset, num_workers):
            assert num_workers or dataset.weight == weight_of(batch)
            targets = int((batch["labels"] != -100).sum())
            assert targets > 0  # of a filler too
            learnt += weight_of(batch) * targets
    assert learnt == sum(int((batch["labels"] != -100).sum()) for batch in CachedVLDataset(cache, 0, 1))


def _batches(dataset: CachedVLDataset, num_workers: int) -> Iterator[Any]:
    if not num_workers:
        return iter(dataset)
    return itertools.chain(DataLoader(dataset, batch_size=None, num_workers=num_workers))
