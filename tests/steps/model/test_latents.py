"""Latents of images, held against diffusers: its pixels, its autoencoder and its distribution."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from forebay import load_config
from forebay.errors import ForebayError
from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm
from forebay.steps.image.cropped import Cropped
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from forebay.train.augment.draws import EpochDraws, generator_of
from forebay.train.augment.stored_draws import LatentDraws
from tests.preprocess.here_pool import build_here
from tests.steps.model.test_families import PHOTOS, Corpus, section
from tests.steps.model.tiny_frozen import save_tiny, save_vae

DEMO = Path(__file__).parents[3] / "demo" / "vision" / "photos"
NAMES = ("bird", "cat", "coffee", "dogs", "drum", "nuthatch", "brushes")
PLAN = 'kind = "bucket"\nbatch_size = 3\n'
SHAPES = 'size = 64\nshapes = 3\nstep = 16\nkeep = {latents = {output = "latent_dist.parameters", dtype = "float32"}}\n'
BY = PHOTOS.replace(PLAN, f'{PLAN}by = ["area", "aspect"]\n')
BATCHES = BY + section("vae", "image", SHAPES)


class Photos(Corpus):
    """Some photos and an autoencoder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_vae(folder / "vae")
        (folder / "photos").mkdir()
        for path in DEMO.iterdir():
            if path.stem in NAMES:
                shutil.copy(path, folder / "photos")

    def path(self, sample_id: str) -> Path:
        (path,) = (path for path in (self.folder / "photos").rglob("*") if path.stem == sample_id)
        return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Photos, Cache]:
    corpus = Photos(tmp_path_factory.mktemp("photos"))
    return corpus, corpus.cache(BATCHES)


def moments(cache: Cache, index: int) -> Any:
    sample = cache.read(index)
    (values,), (shape,) = sample["latents"], sample["latents_shape"]
    return values.reshape(shape)


def batches(corpus: Corpus, *overrides: str, text: str = BATCHES, epoch: int = 0, **more: Any) -> list[tuple[Any, Any]]:
    corpus.config(text)
    loader: Any = make_loader(config(corpus, overrides), **more)
    loader.set_epoch(epoch)
    return [({name: value.clone() for name, value in batch.items()}, ids) for batch, ids in loader]


def config(corpus: Corpus, overrides: Sequence[str]) -> Any:
    return load_config(corpus.folder / "config.toml", overrides=overrides)


def test_stored_moments_are_those_of_diffusers(photos: tuple[Photos, Cache]) -> None:
    corpus, cache = photos
    kl: Any = diffusers.AutoencoderKL
    model = kl.from_pretrained(corpus.folder / "vae").eval()
    processor, shapes = VaeImageProcessor(vae_scale_factor=4), set()
    for index in range(len(cache)):
        found = moments(cache, index)
        size = (found.shape[2] * 4, found.shape[1] * 4)
        image = ImageOps.exif_transpose(Image.open(corpus.path(cache.sample_id(index)))).convert("RGB")
        fit = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
        with torch.inference_mode():
            wanted = model.encode(processor.preprocess(fit)).latent_dist.parameters[0]
        np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5)
        assert (cache.lengths["vae_height"][index], cache.lengths["vae_width"][index]) == found.shape[1:]
        shapes.add(size)
    targets = cache.metadata["vae_targets"]
    assert {f"{width}x{height}" for width, height in shapes} == set(targets["targets"])
    assert sum(targets["targets"].values()) == len(NAMES)
    assert cache.constants.of("vae")["scaling_factor"] == 0.25
    assert cache.constants.of("vae")["shift_factor"] == 0.5


@given(size=st.tuples(st.integers(1, 90), st.integers(1, 90)), target=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_pixels_are_those_of_pillow_s_fit(size: tuple[int, int], target: tuple[int, int]) -> None:
    rng = np.random.default_rng(size[0] * 100 + size[1])
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))
    step = Cropped(processor="", size=(8, 8), shapes=None, areas=(), step=8, least=1, resample="bicubic")
    wanted = (target[0] * 8, target[1] * 8)
    found = step.pixels(image, wanted)
    np.testing.assert_array_equal(found.transpose(1, 2, 0), ImageOps.fit(image, wanted, Image.Resampling.BICUBIC))
    (made,) = collate(step.pixels_form, [{"x": (found,)}], dtype=torch.float32, allocate=fresh)["x"]
    assert torch.equal(made[None], VaeImageProcessor().preprocess(Image.fromarray(found.transpose(1, 2, 0))))


def test_a_batch_is_of_one_shape_and_drawn_by_seed_epoch_and_id(photos: tuple[Photos, Cache]) -> None:
    corpus, cache = photos
    stored = {cache.sample_id(index): moments(cache, index) for index in range(len(cache))}
    by_id = []
    for epoch, seed in ((0, 0), (0, 0), (1, 0), (0, 7)):
        made = batches(corpus, f"loader.seed={seed}", epoch=epoch, with_ids=True)
        drawn = {name: row for batch, ids in made for name, row in zip(ids, batch["latents"], strict=True)}
        keys = EpochDraws(seed, epoch).of(NAMES, "latent latents").keys
        for name, key in zip(NAMES, keys.tolist(), strict=True):
            wanted = DiagonalGaussianDistribution(torch.from_numpy(stored[name].copy())[None])
            noise = generator_of(key).standard_normal(stored[name].size // 2, dtype=np.float32)
            noise = torch.from_numpy(noise).view(wanted.mean.shape)
            torch.testing.assert_close(drawn[name][None], wanted.mean + wanted.std * noise, atol=1e-5, rtol=1e-5)
        by_id.append(drawn)
    assert all(torch.equal(by_id[0][name], by_id[1][name]) for name in NAMES)
    assert not any(torch.equal(by_id[0][name], other[name]) for other in by_id[2:] for name in NAMES)


@pytest.mark.parametrize("more", [{"shuffle": False}, {}])
def test_means_where_they_are_wanted_and_in_evaluations(photos: tuple[Photos, Cache], more: Any) -> None:
    corpus, cache = photos
    stored = {cache.sample_id(index): moments(cache, index) for index in range(len(cache))}
    overrides = () if more else ('loader.latent="mean"',)
    for batch, ids in batches(corpus, *overrides, with_ids=True, **more):
        for name, row in zip(ids, batch["latents"], strict=True):
            np.testing.assert_array_equal(row, stored[name][:4])


def test_ranks_and_a_resume_have_the_same_draws(photos: tuple[Photos, Cache]) -> None:
    corpus, _ = photos
    alone = {
        name: row
        for batch, ids in batches(corpus, with_ids=True)
        for name, row in zip(ids, batch["latents"], strict=True)
    }
    for rank in range(2):
        for batch, ids in batches(corpus, with_ids=True, dp_rank=rank, dp_world_size=2):
            assert len({tuple(row.shape) for row in batch["latents"]}) == 1
            assert all(torch.equal(row, alone[name]) for name, row in zip(ids, batch["latents"], strict=True))
    first = make_loader(str(corpus.folder / "config.toml"), with_ids=True)
    next(iter(first))
    again: Any = make_loader(str(corpus.folder / "config.toml"), with_ids=True)
    again.load_state_dict(first.state_dict())
    rest = [(ids, batch["latents"].clone()) for batch, ids in again]
    assert sum(len(ids) for ids, _ in rest) < len(NAMES)
    assert all(torch.equal(row, alone[name]) for ids, rows in rest for name, row in zip(ids, rows, strict=True))


@given(
    values=st.lists(st.floats(-60, 60, width=16), min_size=4, max_size=4),
    key=st.integers(0, 2**64 - 1),
    stored=st.sampled_from((np.float16, np.float32)),
)
def test_a_log_variance_is_clamped_as_in_diffusers(values: list[float], key: int, stored: Any) -> None:
    array = np.array(values, stored)
    changed = LatentDraws("z")._changed({"z": (array,)}, key)["z"][0]
    wanted = DiagonalGaussianDistribution(torch.tensor(array.astype(np.float32)).view(1, 4, 1, 1))
    noise = torch.from_numpy(generator_of(key).standard_normal(2, dtype=np.float32)).view(1, 2, 1, 1)
    torch.testing.assert_close(torch.from_numpy(changed[:2]), (wanted.mean + wanted.std * noise).view(-1))
    np.testing.assert_array_equal(array, np.array(values, stored))


def test_on_the_fly_it_is_the_same(photos: tuple[Photos, Cache]) -> None:
    corpus, _ = photos
    cached, made = (batches(corpus, f"loader.cache={mode}", with_ids=True) for mode in ("require", "off"))
    assert [ids for _, ids in cached] == [ids for _, ids in made]
    for (one, _), (other, _) in zip(cached, made, strict=True):
        torch.testing.assert_close(one["latents"], other["latents"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tail", "said"),
    [("short", "2 short batches"), ("pad", "2 repeated"), ("drop", "4 samples left out")],
)
def test_a_plan_says_what_is_left_over(photos: tuple[Photos, Cache], tail: str, said: str) -> None:
    corpus, cache = photos
    counts = cache.metadata["vae_targets"]["targets"]
    made = batches(corpus, f"plan.tail={tail}", "plan.batch_size=3", with_ids=True)
    loader = make_loader(config(corpus, (f"plan.tail={tail}",)))
    assert said in loader.plan.described(), counts
    sizes = [len(ids) for _, ids in made]
    assert (max(sizes), sum(sizes)) == (3, {"short": 7, "pad": 7 + 2, "drop": 7 - 4}[tail]), counts


def test_sizes_a_bucket_are_given_by_their_names(photos: tuple[Photos, Cache]) -> None:
    corpus, _ = photos
    loader: Any = make_loader(str(corpus.folder / "config.toml"))
    names = loader.plan.names
    table = {name: {"batch_size": number + 1} for number, name in enumerate(names)}
    (corpus.folder / "sizes.json").write_text(json.dumps(table))
    corpus.config(BATCHES.replace("batch_size = 3", f'calibration = "{corpus.folder / "sizes.json"}"'))
    sized: Any = make_loader(str(corpus.folder / "config.toml"))
    assert sized.plan.batch_sizes.tolist() == [1, 2, 3]


@pytest.fixture
def corpus(tmp_path: Path) -> Photos:
    return Photos(tmp_path)


FIXED = BATCHES.replace("shapes = 3\n", "").replace('by = ["area", "aspect"]\n', "")


def test_a_target_is_in_the_key_of_its_shard(corpus: Photos) -> None:
    first = build_here(corpus.config(FIXED))
    assert (first.shards_written, first.shards_linked) == (2, 0)
    keys = {first.key}
    for old, new in (("size = 64", "size = [64, 32]"), ("step = 16", "resample = 'bicubic'\nstep = 16")):
        again = build_here(corpus.config(FIXED.replace(old, new)))
        assert again.shards_written == 1
        keys.add(again.key)
    many = build_here(corpus.config(BATCHES))
    named = BATCHES.replace("shapes = 3", "shapes = [[64, 64], [80, 48], [48, 80]]")
    build_here(corpus.config(named))
    Image.new("RGB", (400, 100)).save(corpus.folder / "photos" / "wide.png")
    wide = build_here(corpus.config(BATCHES))  # the sizes are those of another set
    assert len({*keys, many.key, wide.key}) == 5
    found, kept = (open_cache(report.cache) for report in (wide, build_here(corpus.config(named))))
    assert "128x32" in found.metadata["vae_targets"]["targets"]
    assert kept.metadata["vae_targets"]["targets"] == {"48x80": 2, "64x64": 2, "80x48": 4}


def test_an_image_below_a_step_costs_its_sample(corpus: Photos) -> None:
    for size in ((15, 300), (16, 16)):
        Image.new("L", size).save(corpus.folder / "photos" / f"of{size[0]}.png")
    save_vae(corpus.folder / "other", seed=1)
    report = build_here(corpus.config(BATCHES + section("other", "image", "size = [32, 64]\nstep = 16")))
    assert report.excluded == {"below_step": 1}
    assert report.num_samples == len(NAMES) + 1
    cache = open_cache(report.cache)
    assert {*cache.lengths} == {"num_tokens", "vae_height", "vae_width", "num_other"}
    assert {cache.read(index)["other_shape"][0].tolist()[1:] == [16, 8] for index in range(len(cache))} == {True}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size = 64\nshapes = 3\nstep = 16\n", "", "AutoencoderKL takes images of a size in pixels; set size"),
        ("size = 64\nshapes = 3", "size = 66", r"vae.size is \[66, 66\], .* a place for each 4 pixels"),
        ("step = 16", "step = 18", r"vae.step is \[18\], .* multiples of 4"),
        ("size = 64\nshapes = 3", "shapes = 3", "shapes and areas are of images that are resized; give size"),
        ("shapes = 3", "shapes = 0", "shapes is 0, wanted 1 or more"),
        ("shapes = 3", "shapes = []", r"shapes is \(\), wanted"),
        (
            "shapes = 3",
            "shapes = [[32, 0], [32, 32]]",
            r"shapes is \(\(32, 0\), .*, or sizes of 1 pixel or more",
        ),
        ("shapes = 3", "shapes = [[32, 18]]", r"vae.shapes is \[32, 18\], .* a place for each 4 pixels"),
        ("shapes = 3", "areas = [4096]", "areas are of several sizes; give shapes"),
        ("shapes = 3", "shapes = [[32, 32]]\nleast = 3", "least is of sizes that are found; give shapes, a number"),
        ("shapes = 3", "shapes = 1\nareas = [16384, 102400]", "shapes is 1, and these images have 2 areas"),
        ("shapes = 3", "shapes = 3\nareas = [64]", "model.vae: an area of 64 pixels has no size in steps of 16"),
        ('by = ["area", "aspect"]', "", r"the latents have 3 shapes, and a batch has one; set plan.by = \["),
        ("shapes = 3", "", r"no latents of several shapes; set shapes in their \[\[model\]\]"),
        ('by = ["area", "aspect"]', 'by = ["aspect"]', r"by is \['aspect'\], wanted"),
        ("batch_size = 3\nby", "batch_size = 3\nedges_s = [3.0]\nby", "by is of shapes, which have no lengths"),
        ("batch_size = 3\nby", "batch_seconds = 3\nby", "by is of shapes, which have no lengths"),
        ("latent_dist.parameters", "latent_dist.nothing", "gives no latent_dist.nothing"),
    ],
)
def test_a_section_that_cannot_be_is_refused(photos: tuple[Photos, Cache], old: str, new: str, message: str) -> None:
    corpus, _ = photos
    assert old in BATCHES
    with pytest.raises(ForebayError, match=message):
        corpus.cache(BATCHES.replace(old, new))


def test_values_that_float16_does_not_hold_cost_their_sample(corpus: Photos) -> None:
    save_vae(corpus.folder / "vae", scale=1e7)
    with pytest.raises(ForebayError, match=r"not_finite: model\.vae: latents holds .*, which float16 does not"):
        corpus.cache(FIXED.replace('dtype = "float32"', 'dtype = "float16"'))


def test_a_form_of_moments_has_two_halves() -> None:
    step = {"name": "z", "dtype": "float32", "stored_dtype": "float16", "holds_moments": True}
    promise = {"kind": "exact", "limit": 0.0, "why": ""}
    for shape in ([3, None, None], [None, 4], [4, None], []):
        with pytest.raises(ForebayError, match="two halves of z"):
            BatchForm.from_json({"made_by": "X", "promise": promise, "fields": [{**step, "shape": shape}]})
    form = BatchForm.from_json({"made_by": "X", "promise": promise, "fields": [{**step, "shape": [4, 1, 1]}]})
    assert BatchForm.from_json(json.loads(json.dumps(form.to_json()))) == form


def test_captions_stand_beside_latents(corpus: Photos) -> None:
    save_tiny("t5", corpus.folder / "t5")
    rows = [{"id": name, "image": str(corpus.path(name)), "text": f"a photo of {name}"} for name in NAMES]
    (corpus.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = BATCHES.replace('"folder"', '"jsonl"', 1).replace('"photos"', '"rows.jsonl"')
    text = text.replace('prompt = "none"', 'prompt = "plain"\ntokenizer = "t5"') + section("t5", "text")
    cache = corpus.cache(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.folder / "t5")
    for batch, ids in batches(corpus, text=text, with_ids=True):
        wanted = tokenizer([f"a photo of {name}" for name in ids], padding=True, return_tensors="pt")
        assert torch.equal(batch["input_ids"], wanted["input_ids"])
        assert torch.equal(batch["t5_mask"], wanted["attention_mask"])
        assert batch["latents"].shape[:2] == (len(ids), 4)
    assert cache.groups == ("t5", "vae", "text")


def test_a_row_has_several_images_at_one_size(corpus: Photos) -> None:
    tokenizer = Path(__file__).parents[3] / "demo" / "vision" / "model"
    rows = []
    for number in range(3):
        parts = [{"type": "image", "image": str(corpus.path(name))} for name in NAMES[:number]]
        said = [{"role": role, "content": [{"type": "text", "text": "so"}]} for role in ("user", "assistant")]
        said[0]["content"] = [*parts, *said[0]["content"]]
        rows.append({"id": str(number), "messages": said})
    (corpus.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = FIXED.replace('"folder"', '"jsonl"', 1).replace('"photos"', '"rows.jsonl"')
    text = text.replace('prompt = "none"', f'prompt = "chat"\ntokenizer = "{tokenizer}"')
    text += f'[vision]\nprocessor = "{tokenizer}"\nimages = "processor"\n'
    cache = corpus.cache(text)
    assert [len(cache.read(index)["latents"]) for index in range(3)] == [0, 1, 2]
    ((batch, ids),) = batches(corpus, 'loader.latent="mean"', text=text, with_ids=True)
    wanted = [value.reshape(8, 16, 16)[:4] for name in ids for value in cache.read(int(name))["latents"]]
    np.testing.assert_array_equal(batch["latents"], wanted)
    with pytest.raises(ForebayError, match="sample '2' has 2 images, and images of several sizes"):
        corpus.cache(text.replace("size = 64", "size = 64\nshapes = 2"))


def test_transparent_and_turned_images_are_taken_as_displayed(corpus: Photos) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (96, 48), "red").save(file, "JPEG", exif=exif)
    (corpus.folder / "photos" / "turned.jpg").write_bytes(file.getvalue())
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(corpus.folder / "photos" / "clear.png")
    Image.new("RGB", (64, 64), "white").save(corpus.folder / "photos" / "white.png")
    cache = corpus.cache(BATCHES.replace("shapes = 3", "shapes = 9"))
    found = {cache.sample_id(index): moments(cache, index) for index in range(len(cache))}
    assert found["turned"].shape[1] > found["turned"].shape[2]
    np.testing.assert_array_equal(found["clear"], found["white"])
