"""Batches of images as their processor gives them: by form and plan, for ranks, resumed, for torch's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from forebay.config import Config
from forebay.errors import ConfigError, PlanError
from forebay.plan.make import plan_of
from forebay.steps.batch import fresh
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from forebay.train.collate.collator import Collator
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.select import as_stored
from tests.images.processors import KINDS, SIDE, TABLE, TinyCorpus, tiny, tiny_corpus
from tests.preprocess.here_pool import build_here

pytestmark = pytest.mark.usefixtures(tiny.__name__)


@pytest.fixture
def corpus(tmp_path: Path) -> TinyCorpus:
    return tiny_corpus(tmp_path)


def built(corpus: TinyCorpus, *overrides: str) -> tuple[Config, Cache]:
    config = corpus.config(*overrides)
    return config, open_cache(build_here(config).cache)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name])


def expanded(codes: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    """Returns the values of codes, by indexing."""
    moved = np.moveaxis(codes, axis, 0)
    return np.moveaxis(np.stack([TABLE[channel][part] for channel, part in enumerate(moved)]), 0, axis)


def test_a_run_and_a_loader_of_a_processor_have_the_same_settings(corpus: TinyCorpus) -> None:
    config = corpus.config("loader.cache=off")
    assert "input_ids" in next(iter(make_loader(as_stored(config))))


def test_images_of_one_shape_stand_in_rows_and_text_beside_them(corpus: TinyCorpus) -> None:
    config, cache = built(corpus)
    seen = 0
    loader = make_loader(config, shuffle=False)
    for batch in loader:
        images = [image for i in loader.indices for image in cache.read(i)["pixel_values"]]
        ids = [cache.read(i)["input_ids"] for i in loader.indices]
        longest = max(map(len, ids))
        assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["labels"].shape == (len(ids), longest)
        for row, own in enumerate(ids):
            assert batch["input_ids"][row].tolist() == [*own.tolist(), *[1] * (longest - len(own))]
            assert batch["attention_mask"][row].sum() == len(own)
            learnt = cache.read(loader.indices[row])["label_mask"] != 0
            wanted = [*np.where(learnt, own, -100).tolist(), *[-100] * (longest - len(own))]
            assert batch["labels"][row].tolist() == wanted
        if images:
            assert batch["pixel_values"].dtype == torch.float32
            np.testing.assert_array_equal(batch["pixel_values"].numpy(), expanded(np.stack(images), 1))
        else:
            assert "pixel_values" not in batch
        seen += len(ids)
    assert seen == len(cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few("cat", "padded", "nest", "free", "stack")
def test_batches_without_a_cache_are_those_of_the_cache(kind: str, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, kind=kind)
    config, _ = built(corpus, "vision.codec=zstd")
    cached, online = make_loader(config), make_loader(corpus.config("loader.cache=off"))
    assert cached.plan_key == online.plan_key
    for left, right in zip(cached, online, strict=True):
        same(left, right)


def test_tiles_stand_one_behind_the_other_or_a_row_a_sample(tmp_path: Path) -> None:
    shapes = {}
    for kind in ("padded", "cat", "nest", "free"):
        (tmp_path / kind).mkdir()
        config, cache = built(tiny_corpus(tmp_path / kind, kind=kind), "plan.batch_size=10")
        loader = make_loader(config)
        (batch,) = loader
        shapes[kind] = tuple(batch["pixel_values"].shape)
        tiles = [[len(image) for image in cache.read(i)["pixel_values"]] for i in loader.indices]
        if kind == "cat":
            flat = [length for own in tiles for length in own]
            assert batch["num_tiles"].tolist() == flat
            assert shapes[kind] == (sum(flat), 3, SIDE, SIDE)
        if kind == "nest":
            assert shapes[kind] == (10, max(map(sum, tiles)), 3, SIDE, SIDE)
            assert all(not batch["pixel_values"][row, sum(own) :].any() for row, own in enumerate(tiles))
        if kind == "padded":
            assert shapes[kind] == (10, max(max(own, default=0) for own in tiles), 3, SIDE, SIDE)
        if kind == "free":
            assert batch["pixel_mask"].shape == (10, *shapes[kind][2:])
            sizes = [image.shape[1] * image.shape[2] for i in loader.indices for image in cache.read(i)["pixel_values"]]
            assert batch["pixel_mask"].sum(dim=(1, 2)).tolist() == sizes


def test_one_number_is_plan_enough_and_tokens_give_buckets_and_windows(corpus: TinyCorpus) -> None:
    config, cache = built(corpus)
    assert plan_of(config, cache).plan.num_batches == 4
    by_tokens = plan_of(corpus.config("plan={batch_size=3, edges=[16, 26]}"), cache).plan
    lengths = cache.lengths["num_tokens"]
    for batch in by_tokens.order(0, 0).batches(range(by_tokens.num_batches)):
        assert len({int(np.searchsorted([16], lengths[i], side="right")) for i in batch}) == 1
    budget = plan_of(corpus.config("plan={k=2, batch_tokens=60}"), cache).plan
    for batch in budget.order(0, 0).batches(range(budget.num_batches)):
        assert lengths[batch].max() * len(batch) <= 60
    window = plan_of(corpus.config("plan={kind='window', window=2, batch_size=2}"), cache).plan
    assert window.num_batches == 5


def test_images_alone_have_no_tokens_to_be_planned_by(corpus: TinyCorpus) -> None:
    config = corpus.config(prompt="none")
    corpus.rows = [{"image": f"p{n}.jpg"} for n in range(4)]
    corpus.write_manifest()
    cache = open_cache(build_here(config).cache)
    assert [len(batch["pixel_values"]) for batch in make_loader(config)] == [3, 1]
    for plan in ("plan={k=2, batch_tokens=60}", "plan={batch_size=2, edges=[4]}"):
        with pytest.raises(PlanError, match=r"plan\.batch_tokens and plan\.edges are of tokens"):
            plan_of(corpus.config(plan, prompt="none"), cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.few
def test_what_a_device_makes_of_codes_is_what_the_host_makes(kind: str, dtype: str, tmp_path: Path) -> None:
    _, cache = built(tiny_corpus(tmp_path, kind=kind), f"loader.dtype={dtype}")
    coded = Collator(cache, dtype=getattr(torch, dtype), on_device=True)
    assert coded.is_finished_later == (kind != "float")
    samples = [cache.read(i) for i in range(3)]
    codes = coded.collate(samples, allocate=fresh)
    assert (codes["pixel_values"].dtype == torch.uint8) == (kind in ("stack", "cat"))
    host = Collator(cache, dtype=getattr(torch, dtype)).collate(samples, allocate=fresh)
    same(host, coded.finish(codes))


def test_two_ranks_share_the_batches_of_one(corpus: TinyCorpus) -> None:
    config, _ = built(corpus)
    whole = list(make_loader(config))
    ranks = [list(make_loader(config, dp_rank=rank, dp_world_size=2)) for rank in range(2)]
    merged = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert len(whole) == len(merged) == 4
    for left, right in zip(whole, merged, strict=True):
        same(left, right)


def test_a_loader_goes_on_where_its_state_stands_also_without_the_cache(corpus: TinyCorpus) -> None:
    config, _ = built(corpus)
    loader = make_loader(config)
    batches = list(loader)
    again = make_loader(config)
    walk = iter(again)
    next(walk)
    state = again.state_dict()
    for overrides in ((), ("loader.cache=off",)):
        resumed = make_loader(corpus.config(*overrides))
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == 3
        for left, right in zip(batches[1:], rest, strict=True):
            same(left, right)


def test_a_tensordict_has_rows_where_every_sample_has_one_image(corpus: TinyCorpus) -> None:
    config, _ = built(corpus)
    tensordicts: list[Any] = list(make_loader(config, as_tensordict=True))
    for batch, found in zip(make_loader(config), tensordicts, strict=True):
        assert found.batch_size == torch.Size([])  # "both" has two images, "blind" none
        same(batch, dict(found.items()))


def test_torchs_dataloader_gives_the_same_batches(corpus: TinyCorpus) -> None:
    config, cache = built(corpus)
    planned = plan_of(config, cache)
    sampler = PlanSampler(planned, seed=config.loader.seed, dp_rank=0, dp_world_size=1)
    data: DataLoader[Any] = DataLoader(SampleDataset(cache), batch_sampler=sampler, collate_fn=Collator(cache))
    batches = list(zip(make_loader(config), data, strict=True))
    assert len(batches) > 1
    for left, right in batches:
        assert left.keys() == right.keys()
        same(left, right)


def test_what_a_prompt_sees_of_several_images_is_one_tensor_a_field(tmp_path: Path) -> None:
    for kind, shape in (("stack", (2, 3, SIDE, SIDE)), ("free", None)):
        (tmp_path / kind).mkdir()
        _, cache = built(tiny_corpus(tmp_path / kind, kind=kind))
        sample = cache[cache.find("both")]
        if shape is not None:
            assert sample["pixel_values"].shape == shape
        else:
            assert sample["pixel_values_shape"].shape == (2, 3)
            assert sample["pixel_values"].numel() == int(sample["pixel_values_shape"].prod(dim=1).sum())
        assert cache[cache.find("blind")]["pixel_values"].numel() == 0


def test_images_that_stand_in_no_batch_together_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = tiny_corpus(tmp_path, kind="alone")
    config, cache = built(corpus)
    assert "batches of TinyAlone are alone only: sizes differ" in caplog.text
    wanted = r"images of TinyAlone stand in no batch together.*alone only: sizes differ.*plan\.batch_size = 1"
    with pytest.raises(ConfigError, match=wanted):
        list(make_loader(config))
    alone = make_loader(corpus.config("plan.batch_size=1", "filter.where=num_images<2"), shuffle=False)
    shapes = [tuple(batch["pixel_values"].shape[1:]) for batch in alone if "pixel_values" in batch]
    images = [cache.read(i)["pixel_values"] for i in range(len(cache))]
    assert shapes == [own[0].shape for own in images if len(own) == 1]
