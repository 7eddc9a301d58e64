"""`make_loader` of a config with images: packs of a cache, of any codec, and of no cache, all alike."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forebay.config import Config
from forebay.errors import CacheNotFoundError, ConfigError, PlanError
from forebay.plan.make import plan_of
from forebay.plan.pack.pack_plan import PackPlan
from forebay.steps.image.qwen2_vl import load_processor, patch_form
from forebay.train import CachedVLDataset, build_vl_dataloader, make_loader
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import DeviceExpansion, PatchBatch, fields_of, to_model_inputs
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo_corpus
from tests.train.tiny_vl import expanded as looked_up

CODECS = ("raw", "zstd", "webp", "source")
SEQ_LEN = "plan.seq_len=120"
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    """Photos, questions about them, two without a photo, and a cache of every codec; no test changes them."""
    found = photo_corpus(tmp_path_factory.mktemp("photos"))
    found.rows += [
        {"id": f"text-{length}", "messages": [{"role": "user", "content": "Hm? " * length}, ANSWER]}
        for length in (2, 20)
    ]
    found.write_manifest()
    for codec in CODECS:
        assert build_here(found.config(f"vision.codec={codec}")).num_samples == 15
    return found


ANSWER = {"role": "assistant", "content": "Hm."}


def config(corpus: PhotoCorpus, *overrides: str) -> Config:
    """The corpus's config under packs of a few samples; where the cache is must be said."""
    return corpus.config(SEQ_LEN, 'loader.cache="require"', *overrides)


def batches(config: Config, **options: Any) -> list[Batch]:
    """Every batch of one epoch, as handed out: kept, not copied."""
    found: list[Batch] = list(make_loader(config, **options))
    assert len(found) > 2 // options.get("dp_world_size", 1)
    return found


def assert_equal(left: Batch | PatchBatch, right: Batch | PatchBatch) -> None:
    found, wanted = fields_of(left), fields_of(right)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[name].dtype
            torch.testing.assert_close(value, right[name], rtol=0, atol=0)
        else:
            assert value == right[name]


def tensors(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in batch.items() if isinstance(value, torch.Tensor))


def assert_all_equal(left: list[Batch], right: list[Batch]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert_equal(ours, theirs)


# Values


@pytest.mark.parametrize("pixels", ["uint8", "float32"])
def test_packs_of_the_cache_are_those_made_without_it(corpus: PhotoCorpus, pixels: str) -> None:
    options = (f"loader.pixels={pixels}", "loader.varlen=true")
    cached = batches(config(corpus, *options))
    online = batches(config(corpus, *options, 'loader.cache="off"'))
    assert ("patches" in cached[0]) is (pixels == "uint8")
    assert_all_equal(cached, online)


def test_a_batch_is_right_for_the_model_by_default_and_no_mapping_as_uint8(corpus: PhotoCorpus) -> None:
    [first, *_] = batches(config(corpus))
    assert first["pixel_values"].dtype == torch.float32
    assert first["use_cache"] is False
    [stored, *_] = batches(config(corpus, "loader.pixels=uint8"))
    assert isinstance(stored, PatchBatch)
    with pytest.raises(TypeError, match="to_model_inputs"):
        dict(stored)
    constants = make_loader(config(corpus)).source.constants
    assert_equal(to_model_inputs(stored, constants), first)
    with pytest.raises(
        ConfigError, match=r'pixels is "uint8" and as_tensordict is true: .*set loader\.pixels = "float32"'
    ):
        make_loader(config(corpus, "loader.pixels=uint8"), as_tensordict=True)


@pytest.mark.parametrize("pixels", ["float32", "bfloat16"])
def test_a_device_gets_patches_and_hands_out_what_the_host_does(
    corpus: PhotoCorpus, pixels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for CUDA: it takes the form for a device."""
    settings = config(corpus, f"loader.pixels={pixels}")
    monkeypatch.setattr("forebay.train.loader.side_stream", lambda device: None)
    [on_host, *_], [for_device, *_] = batches(settings), list(make_loader(settings, device="meta"))
    finish = DeviceExpansion(patch_form(make_loader(settings).source.constants), dtype=getattr(torch, pixels))
    assert_equal(finish(for_device), on_host)


def test_the_loop_takes_patches_as_stored_whatever_the_config_says(corpus: PhotoCorpus) -> None:
    from forebay.train.select import as_stored

    assert isinstance(next(iter(make_loader(as_stored(config(corpus))))), PatchBatch)


def test_every_codec_gives_the_same_packs(corpus: PhotoCorpus) -> None:
    raw = batches(config(corpus))
    for codec in CODECS[1:]:
        loader = make_loader(config(corpus, f"vision.codec={codec}"))
        assert Path(loader.source.folder).suffix == f".{codec}"  # type: ignore[attr-defined]
        assert_all_equal(raw, list(loader))


def test_pixel_values_are_those_of_the_processor(corpus: PhotoCorpus) -> None:
    """Every pack, bit for bit: expanded by the loader, and from its uint8 patches; padding is images of zeros."""
    processor = load_processor(DEMO / "model", "pil")
    rows = {row["id"]: row for row in corpus.rows}
    loader = make_loader(config(corpus, "loader.pixels=float32"))
    order = loader.plan.order(0, 0)
    seen = 0
    for place, (batch, stored) in enumerate(zip(loader, batches(config(corpus, "loader.pixels=uint8")), strict=True)):
        ids = [loader.source.sample_id(index) for index in order.batch(place).tolist()]
        names = [name for sample_id in ids for name in np.atleast_1d(rows[sample_id].get("image", []))]
        seen += len(names)
        expanded = looked_up(stored["patches"], loader.source.constants)
        torch.testing.assert_close(batch["pixel_values"], expanded, rtol=0, atol=0)
        if not names:
            assert len(expanded) == 4
            continue
        wanted = processor(images=[Image.open(corpus.folder / name) for name in names], return_tensors="pt")
        torch.testing.assert_close(expanded, wanted["pixel_values"], rtol=0, atol=0)
        assert torch.equal(batch["image_grid_thw"], wanted["image_grid_thw"])
    assert seen == 14


@pytest.mark.parametrize("num_threads", [0, 1])
def test_threads_change_nothing(corpus: PhotoCorpus, num_threads: int) -> None:
    assert_all_equal(batches(config(corpus, f"loader.num_threads={num_threads}")), batches(config(corpus)))


def test_kept_packs_are_not_overwritten(corpus: PhotoCorpus) -> None:
    """The loader has fewer buffers than batches are held, and these only by views."""
    loader = make_loader(config(corpus, "loader.prefetch=1", "loader.num_threads=1"))
    kept = [{name: value[..., :3] for name, value in tensors(batch)} for _ in range(3) for batch in loader]
    again = make_loader(config(corpus, "loader.num_threads=0"))
    fresh = [{name: value[..., :3].clone() for name, value in tensors(batch)} for _ in range(3) for batch in again]
    assert_all_equal(kept, fresh)


# Order


def test_a_state_goes_on_anywhere_and_at_another_world_size(corpus: PhotoCorpus) -> None:
    """The last step of two ranks has parts of the last batch under "split"."""
    settings = config(corpus, 'plan.tail="short"')
    wanted = batches(settings)
    state = make_loader(settings).state_dict()
    for position, world_size in itertools.product(range(1, len(wanted)), (1, 2)):
        ranks = [make_loader(settings, dp_rank=rank, dp_world_size=world_size) for rank in range(world_size)]
        for loader in ranks:
            loader.load_state_dict({**state, "position": position})
        rest = [batch for step in zip(*ranks, strict=True) for batch in step]
        assert_all_equal(rest[: len(wanted) - position], wanted[position:])


def test_the_dataset_and_its_states_are_those_of_the_loader(corpus: PhotoCorpus) -> None:
    wanted = config(corpus, "loader.seed=7")
    loader = make_loader(wanted)
    folder = plan_of(wanted, loader.source).folder  # the cache has a plan of the corpus' own, too
    assert folder is not None
    found = CachedVLDataset(folder, seed=7)
    assert found.cursor.key == loader.plan_key
    assert_all_equal([*found], [*loader])
    assert found.state_dict() == loader.state_dict()


# Shapes


def test_fixed_packs_have_exactly_the_plans_tokens_and_few_numbers_of_patches(corpus: PhotoCorpus) -> None:
    loader = make_loader(config(corpus, "plan.shapes=fixed"))
    order, natural, classes = loader.plan.order(0, 0), PackCollator(loader.source), loader.plan.patch_classes
    found = list(loader)
    assert 1 <= len(classes) <= 2
    for batch, indices in zip(found, order.batches(range(len(order))), strict=True):
        same = natural([loader.source.read(index) for index in indices.tolist()])
        assert batch["input_ids"].shape == batch["labels"].shape == (1, 120)
        assert len(batch["pixel_values"]) == int(batch["image_grid_thw"].prod(1).sum())
        assert len(batch["pixel_values"]) in classes
        used = sum(int(loader.source.lengths["num_tokens"][index]) for index in indices)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(batch[name][..., :used], same[name][..., :used])
        assert bool((batch["labels"][..., used:] == -100).all())
    report = loader.report()
    tokens = int(loader.source.lengths["num_tokens"].sum())
    assert (report["samples"], report["frames"]) == (15, tokens)
    assert report["padded_frames"] == 120 * len(found) - tokens
    again = make_loader(config(corpus, "plan.shapes=fixed"))  # the plan as it was kept
    assert again.plan.patch_classes == classes
    assert f"packs of 120 tokens and {' or '.join(map(str, classes))} rows" in loader.plan.described()
    in_order = make_loader(config(corpus, "plan.shapes=fixed"), shuffle=False)
    assert {len(batch["pixel_values"]) for batch in in_order} <= set(classes)


def test_samples_longer_than_a_pack_are_counted_or_stop_the_plan(corpus: PhotoCorpus) -> None:
    lengths = make_loader(config(corpus)).source.lengths["num_tokens"]
    seq_len = int(np.sort(lengths)[-3])
    limit = f"plan.seq_len={seq_len}"
    plan = make_loader(config(corpus, limit)).plan
    assert isinstance(plan, PackPlan)
    too_long = np.flatnonzero(lengths > seq_len).tolist()
    assert len(too_long) == 2
    assert plan.unplaced["too_long"].tolist() == too_long
    assert sorted(plan.members.tolist() + too_long) == list(range(15))
    with pytest.raises(PlanError, match=rf'2 samples are too_long; the first is sample {too_long[0]}.*"drop"'):
        make_loader(config(corpus, limit, "plan.overlong=error"))


def test_packs_as_tensordicts(corpus: PhotoCorpus) -> None:
    """Packs are of several samples and of a single one: a pack has no dimension of samples."""
    plain = batches(config(corpus, "loader.varlen=true"))
    sizes = set()
    loader = make_loader(config(corpus, "loader.varlen=true"), as_tensordict=True)
    packs: Iterable[Any] = loader
    for place, (packed, batch) in enumerate(zip(packs, plain, strict=True)):
        sizes.add(len(loader.plan.order(0, 0).batch(place)))
        assert packed.batch_size == torch.Size([])
        for name, value in batch.items():
            found = packed[name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else int(found) == value
    assert 1 in sizes
    assert len(sizes) > 1


# Which source


def test_without_a_cache_one_warning_names_the_command(
    corpus: PhotoCorpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = f"run.cache_root={tmp_path / 'none'}"
    with pytest.raises(CacheNotFoundError, match=r"no cache for recipe .*run: forebay preprocess .*config\.toml"):
        make_loader(config(corpus, absent))
    with caplog.at_level(logging.WARNING):
        loader = build_vl_dataloader(config(corpus, absent, "loader.cache=auto"))
    assert len(caplog.records) == 1
    assert "going uncached" in caplog.text
    assert_all_equal(list(loader), batches(config(corpus)))


def test_the_vision_loader_is_that_of_make_loader_and_wants_packs_of_images(corpus: PhotoCorpus) -> None:
    ranks = [build_vl_dataloader(config(corpus), dp_rank=rank, dp_world_size=2) for rank in range(2)]
    steps = [batch for step in zip(*ranks, strict=True) for batch in step]
    wanted = batches(config(corpus))
    assert_all_equal(steps[: len(wanted)], wanted)
    with pytest.raises(ConfigError, match=r"demo_speech\.toml: no \[vision\], wanted .*make_loader"):
        build_vl_dataloader(DEMO.parents[1] / "configs" / "demo_speech.toml")
