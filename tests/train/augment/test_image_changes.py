"""Flips and colours of images, packs of patches among them: what the processor makes of the changed image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from forebay.errors import ConfigError
from forebay.steps.image.qwen2_vl import load_processor
from forebay.store.cache import Cache
from forebay.store.image.codec import mirrored, patchify, resized
from forebay.store.image.image_settings import ImageSettings, image_settings
from forebay.train import make_loader, to_model_inputs
from forebay.train.augment.changes import Colour
from forebay.train.augment.draws import EpochDraws
from tests.images.processors import TABLE, tiny, tiny_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo_corpus

FLIP = '{kind="flip", probability=0.5}'
COLOUR = '{kind="colour", probability=0.7, brightness=[0.6, 1.4], contrast=[0.5, 1.5]}'
BOTH = f"augment=[{FLIP}, {COLOUR}]"
SETTINGS = image_settings(DEMO / "model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    """Photos of several sizes, two rows of several images."""
    corpus = photo_corpus(tmp_path_factory.mktemp("changes"))
    for path in sorted((DEMO / "photos").iterdir())[:3]:
        corpus.add_photo(path.name, path.read_bytes())
        corpus.ask(path.stem, path.name)
    return corpus


def built(corpus: PhotoCorpus, *overrides: str) -> Any:
    config = corpus.config("plan.seq_len=800", *overrides)
    build_here(config)
    return config


def wanted(corpus: PhotoCorpus, cache: Cache, names: list[str], epoch: int, processor: Any) -> np.ndarray[Any, Any]:
    """The values of a pack whose images are mirrored, resized, and looked up in a table of their colour, by Pillow."""
    rows, found = {row["id"]: row["image"] for row in corpus.rows}, []
    draws, as_it_is = EpochDraws(0, epoch), {"do_resize": False}
    flips, colours = draws.of(names, 0).uniform(1)[:, 0] < 0.5, draws.of(names, 1).uniform(3)
    colour = Colour(field="", probability=0.7, brightness=(0.6, 1.4), contrast=(0.5, 1.5))
    for name, flip, numbers in zip(names, flips, colours, strict=True):
        images = rows[name] if isinstance(rows[name], list) else [rows[name]]
        for image in (Image.open(corpus.folder / each).convert("RGB") for each in images):
            shown = ImageOps.mirror(image) if flip else image
            made = Image.fromarray(resized(shown, SETTINGS))
            if numbers[0] < 0.7:
                made = made.point([*colour.table(numbers[1:]).tolist()] * 3)
            else:  # of what is mirrored alone the processor itself
                assert np.array_equal(
                    processor([shown])["pixel_values"], processor([made], do_resize=False)["pixel_values"]
                )
            found.append(processor([made], **as_it_is)["pixel_values"])
    return np.concatenate(found)


@pytest.mark.parametrize("codec", ["raw", "webp"])
@pytest.mark.few("webp")
def test_packs_hold_what_the_processor_makes_of_changed_images(corpus: PhotoCorpus, codec: str) -> None:
    config = built(corpus, f"vision.codec={codec}", BOTH)
    loader: Any = make_loader(config, with_ids=True)
    plain: Any = make_loader(built(corpus, f"vision.codec={codec}"), with_ids=True)
    processor, changed = load_processor(DEMO / "model", "pil"), 0
    for epoch in range(2):
        for (batch, names), (other, others) in zip(loader, plain, strict=True):
            assert names == others
            assert np.array_equal(batch["pixel_values"].numpy(), wanted(corpus, loader.source, names, epoch, processor))
            changed += not torch.equal(batch["pixel_values"], other["pixel_values"])
            for field in ("input_ids", "labels", "position_ids", "image_grid_thw"):
                assert torch.equal(batch[field], other[field])
    assert changed


def test_they_are_the_same_anywhere_and_off_for_evaluation(corpus: PhotoCorpus) -> None:
    config = built(corpus, BOTH)
    whole: Any = list(make_loader(config))
    loader: Any = make_loader(config)
    next(iter(loader))
    state = loader.state_dict()
    resumed: Any = make_loader(config)
    resumed.load_state_dict(state)
    online: Any = list(make_loader(built(corpus, BOTH, 'loader.cache="off"')))
    coded = make_loader(built(corpus, BOTH, 'loader.pixels="uint8"'))
    expanded: Any = [to_model_inputs(batch, coded.source.constants) for batch in coded]
    ranks: Any = [list(make_loader(config, dp_rank=rank, dp_world_size=2)) for rank in range(2)]
    together = [batch for step in zip(*ranks, strict=True) for batch in step][: len(whole)]
    for others in (online, expanded, together):
        for one, other in zip(whole, others, strict=True):
            assert torch.equal(one["pixel_values"], other["pixel_values"])
    for one, other in zip(whole[1:], resumed, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    evaluated: Any = make_loader(config, shuffle=False)
    for one, other in zip(evaluated, make_loader(built(corpus), shuffle=False), strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    merge=st.integers(1, 3),
    side=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_mirrored_patches_are_those_of_the_mirrored_pixels(
    rows: int, columns: int, merge: int, side: int, seed: int
) -> None:
    settings = ImageSettings(patch_size=side, merge_size=merge)
    height, width = rows * settings.factor, columns * settings.factor
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    found = mirrored(patchify(pixels, settings), (1, rows * merge, columns * merge), settings)
    assert np.array_equal(found, patchify(np.ascontiguousarray(pixels[:, ::-1]), settings))


@given(
    width=st.integers(1, 300),
    height=st.integers(1, 60),
    side=st.sampled_from([14, 16]),
    resample=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 99),
)
def test_a_mirrored_image_is_resized_to_the_mirrored_one(
    width: int, height: int, side: int, resample: int, seed: int
) -> None:
    settings = ImageSettings(patch_size=side, min_pixels=1024, max_pixels=40_000, resample=resample)
    if max(width, height) > 200 * min(width, height):
        return
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
    assert np.array_equal(resized(ImageOps.mirror(image), settings), resized(image, settings)[:, ::-1])


def test_a_flip_is_refused_where_a_resize_does_not_mirror(tmp_path: Path) -> None:
    corpus = photo_corpus(tmp_path)
    shutil.copytree(DEMO / "model", tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "resample": 0}))
    config = corpus.config(f"augment=[{FLIP}]", f"vision.processor={tmp_path / 'model'}")
    build_here(config)
    with pytest.raises(ConfigError, match=r"flip is exact where the processor's resample is 1, 2, 3 or 5, and it is 0"):
        make_loader(config)


@pytest.mark.usefixtures(tiny.__name__)
def test_the_colour_of_images_of_any_processor_is_a_table_over_their_bytes(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, kind="stack")
    config = corpus.config('augment=[{kind="colour", contrast=[0.2, 0.4]}]')
    build_here(config)
    for one, other in zip(make_loader(config), make_loader(corpus.config()), strict=True):
        codes = [np.searchsorted(TABLE[0], batch["pixel_values"][:, 0].numpy()) for batch in (one, other)]
        for image, plain in zip(*codes, strict=True):
            told = np.abs(image - 127.5).max() / np.abs(plain - 127.5).max()
            assert 0.15 < told < 0.45
            assert len({(a, b) for a, b in zip(plain.ravel(), image.ravel(), strict=True)}) == len({*plain.ravel()})


@pytest.mark.usefixtures(tiny.__name__)
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("float", COLOUR, r"colour is exact for one field of the bytes.*pixel_values \[3, 8, 8\]"),
        ("padded", COLOUR, r"colour is exact for one field of the bytes.*image_sizes"),
        ("padded", FLIP, r"flip is exact for patches of packs, or one field of \[3, height, width\]"),
    ],
)
def test_images_that_no_change_is_exact_for_are_refused(kind: str, change: str, said: str, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, kind=kind)
    build_here(corpus.config())
    with pytest.raises(ConfigError, match=said):
        make_loader(corpus.config(f"augment=[{change}]"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('{kind="colour"}', "needs brightness or contrast"),
        ('{kind="colour", brightness=[1.2, 0.8]}', r"brightness is \[1.2, 0.8\], wanted \[lowest, highest\]"),
        ('{kind="colour", contrast=[-1.0, 1.0]}', "wanted factors of 0 or more"),
        ('{kind="flip", contrast=[1.0, 1.0]}', 'contrast is of kind colour, and kind is "flip"'),
        ('{kind="gain", db=[-3, 3]}', 'augment of kind gain changes padded batches, and plan.kind is "pack"'),
    ],
)
def test_wrong_settings_are_named(corpus: PhotoCorpus, change: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        corpus.config(f"augment=[{change}]")
