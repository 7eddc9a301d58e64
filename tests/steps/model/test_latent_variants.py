"""Windows and mirror images of what a model is given, stored as variants: held against Pillow and the models."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from forebay import load_config
from forebay.errors import CacheCorruptError, ForebayError
from forebay.preprocess.groups import Groups
from forebay.preprocess.listing import listed
from forebay.preprocess.model_group import ModelItems
from forebay.steps.image.cropped import Cropped
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.train import Collator, SampleDataset, make_loader
from forebay.train.augment.draws import EpochDraws
from forebay.train.augment.stored_draws import LatentDraws
from tests.commands import inspected, inspected_json
from tests.preprocess.here_pool import build_here
from tests.rows.test_own_meaning_used import SECTIONS, config_of
from tests.steps.model.test_families import PHOTOS, section
from tests.steps.model.test_latents import BATCHES, FIXED, NAMES, Photos, batches, config
from tests.steps.model.tiny_frozen import save_tiny, save_vae

VARIED = BATCHES.replace("size = 64", "size = 64\ncrops = 3\nflip = true")
FLIPPED = section("siglip", "image", 'flip = true\nkeep = {states = {output = "last_hidden_state", dtype = "float32"}}')
PLACES = {"": 0.5, "crop1": 0.0, "crop2": 1.0}
VIEWS = [(name, place, flip) for flip in ("", "flip") for name, place in PLACES.items()]
VARIANTS = ["~" * bool(name or flip) + "_".join(filter(None, (name, flip))) for name, _, flip in VIEWS]


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Photos, Cache]:
    corpus = Photos(tmp_path_factory.mktemp("varied"))
    save_tiny("siglip", corpus.folder / "siglip")
    return corpus, corpus.cache(VARIED + FLIPPED)


def stored(cache: Cache, index: int, variant: str) -> tuple[Any, Any]:
    """Returns the moments of a variant, and the states of an encoder, which is given whole images."""
    sample = cache.read(index)
    (values,), (shape,) = sample[f"latents{variant}"], sample["latents_shape"]
    return values.reshape(shape), sample["states~flip" if variant.endswith("flip") else "states"][0]


@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    target=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    crops=st.sampled_from([1, 3, 5]),
)
def test_windows_are_those_of_pillow_s_fit(size: tuple[int, int], target: tuple[int, int], crops: int) -> None:
    image = Image.fromarray(np.random.default_rng(crops).integers(0, 256, (size[1], size[0], 3), np.uint8))
    more: Any = {"size": (8, 8), "shapes": None, "areas": (), "step": 8, "least": 1, "resample": "bicubic"}
    step, wanted = Cropped(processor="", crops=crops, **more), (target[0] * 8, target[1] * 8)
    assert sorted(step.windows.values()) == (np.linspace(0, 1, crops).tolist() if crops > 1 else [0.5])
    for place in step.windows.values():
        by_hand = ImageOps.fit(image, wanted, Image.Resampling.BICUBIC, centering=(place, place))
        np.testing.assert_array_equal(step.pixels(image, wanted, place).transpose(1, 2, 0), by_hand)


def test_a_variant_is_what_the_model_gives_of_the_window_and_its_mirror_image(varied: tuple[Photos, Cache]) -> None:
    corpus, cache = varied
    kl: Any = diffusers.AutoencoderKL
    vae, processor = kl.from_pretrained(corpus.folder / "vae").eval(), diffusers.image_processor.VaeImageProcessor()
    encoder = T.SiglipVisionModel.from_pretrained(corpus.folder / "siglip").eval()
    prepare = T.AutoImageProcessor.from_pretrained(corpus.folder / "siglip")
    assert cache.constants.of("vae")["variants"] == [name[1:] for name in VARIANTS[1:]]
    assert (cache.constants.of("siglip")["variants"], set(cache.lengths)) == (
        ["flip"],
        {"num_tokens", "vae_height", "vae_width", "num_siglip"},
    )
    for index, (variant, (_, place, flip)) in itertools.product(range(3), zip(VARIANTS, VIEWS, strict=True)):
        found, states = stored(cache, index, variant)
        image = ImageOps.exif_transpose(Image.open(corpus.path(cache.sample_id(index)))).convert("RGB")
        size = (found.shape[2] * 4, found.shape[1] * 4)
        window = ImageOps.fit(image, size, Image.Resampling.LANCZOS, centering=(place, place))
        whole = prepare(image, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            wanted = vae.encode(processor.preprocess(ImageOps.mirror(window) if flip else window)).latent_dist
            of_encoder = encoder(whole.flip(-1) if flip else whole).last_hidden_state[0]
        np.testing.assert_allclose(found, wanted.parameters[0].numpy(), atol=1e-4)
        np.testing.assert_allclose(states, of_encoder.numpy(), atol=2e-5)


def drawn(cache: Cache, made: Any, *, epoch: int) -> dict[str, str]:
    """Returns the variant of each sample of an epoch; asserts that latents are drawn of it, and states are its own."""
    places, found = {cache.sample_id(index): index for index in range(len(cache))}, {}
    for batch, ids in made:
        draws = EpochDraws(0, epoch)
        numbers = draws.of(ids, "variants of image").uniform(1)[:, 0] * len(VARIANTS)
        for row, (name, number) in enumerate(zip(ids, numbers.astype(int).tolist(), strict=True)):
            values, states = stored(cache, places[name], VARIANTS[number])
            (latent,) = LatentDraws("z").change([{"z": values}], draws.of([name], "latent latents"), [name])
            np.testing.assert_array_equal(batch["latents"][row], latent["z"][:4])
            np.testing.assert_array_equal(batch["states"][row], states)
            found[name] = VARIANTS[number]
    return found


def test_an_epoch_draws_one_of_each_image_on_any_rank_and_after_any_resume(varied: tuple[Photos, Cache]) -> None:
    corpus, cache = varied
    whole = VARIED + FLIPPED
    epochs = [drawn(cache, batches(corpus, text=whole, epoch=n, with_ids=True), epoch=n) for n in range(4)]
    assert set(epochs[0]) == {*NAMES}
    assert len({*itertools.chain(*(found.values() for found in epochs))}) == len(VARIANTS)
    for rank in range(2):
        part = drawn(cache, batches(corpus, text=whole, with_ids=True, dp_rank=rank, dp_world_size=2), epoch=0)
        assert part.items() <= epochs[0].items()
    first, again = (make_loader(str(corpus.folder / "config.toml"), with_ids=True) for _ in range(2))
    next(iter(first))
    again.load_state_dict(first.state_dict())
    assert drawn(cache, again, epoch=0).items() < epochs[0].items()


def test_on_the_fly_it_is_the_same_and_ragged_batches_hold_its_moments(varied: tuple[Photos, Cache]) -> None:
    corpus, cache = varied
    ways = [("require", "padded"), ("off", "padded"), ("require", "ragged")]
    cached, made, ragged = (
        batches(corpus, f"loader.cache={mode}", f"loader.form={form}", text=VARIED + FLIPPED, with_ids=True)
        if form == "padded"
        else [*make_loader(load_config(corpus.folder / "config.toml", overrides=["loader.form=ragged"]), with_ids=True)]
        for mode, form in ways
    )
    taken = drawn(cache, cached, epoch=0)
    for (one, ids), (other, _), (held, _) in zip(cached, made, ragged, strict=True):
        torch.testing.assert_close(one["latents"], other["latents"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one["states"], other["states"], atol=1e-4, rtol=1e-4)
        assert not [name for name in held.fields if "~" in name]
        places = [[cache.sample_id(index) for index in range(len(cache))].index(name) for name in ids]
        moments = [stored(cache, place, taken[name])[0].reshape(-1) for place, name in zip(places, ids, strict=True)]
        np.testing.assert_array_equal(held["latents"], np.concatenate(moments))


def test_evaluations_and_data_sets_have_images_as_they_are(varied: tuple[Photos, Cache]) -> None:
    corpus, cache = varied
    for batch, ids in batches(corpus, text=VARIED + FLIPPED, shuffle=False, with_ids=True):
        for row, name in enumerate(ids):
            place = next(index for index in range(len(cache)) if cache.sample_id(index) == name)
            values, states = stored(cache, place, "")
            np.testing.assert_array_equal(batch["latents"][row], values[:4])
            np.testing.assert_array_equal(batch["states"][row], states)
    batch = Collator(cache)([SampleDataset(cache)[0]])
    np.testing.assert_array_equal(batch["latents"][0], stored(cache, 0, "")[0][:4])


def test_a_cache_says_what_its_variants_are(varied: tuple[Photos, Cache], capsys: pytest.CaptureFixture[str]) -> None:
    _, cache = varied
    groups = inspected_json(capsys, cache.folder)["groups"]
    variants = cache.constants.of("vae")["variants"]
    assert {name: group["variants"] for name, group in groups.items()} == {
        "siglip": ["flip"],
        "vae": variants,
        "text": [],
    }
    assert "vae: crop1, crop2, flip, crop1_flip, crop2_flip" in inspected(capsys, cache.folder)


@pytest.fixture
def corpus(tmp_path: Path) -> Photos:
    return Photos(tmp_path)


def test_the_settings_are_in_the_key_and_the_bytes_in_the_estimate(corpus: Photos) -> None:
    found = {}
    for settings in ("", "crops = 3", "crops = 3\nflip = true"):
        config = corpus.config(FIXED.replace("size = 64", f"size = [64, 48]\n{settings}"))
        report = build_here(config)
        assert report.shards_written == (2 if not settings else 1)
        cache, groups = open_cache(report.cache), Groups.of(config, recipe_of(config))
        items = groups.items[0].items(listed(config, groups)).table
        found[report.key] = (groups.items[0].estimate_bytes(items), cache.metadata["vae_targets"].get("crops_alike"))
    sizes, alike = zip(*found.values(), strict=True)
    assert [size / sizes[0] for size in sizes] == [1, 3, 6]
    images = listed(config, groups).items["image"].select(["width", "height"]).to_pylist()
    shapes = [(image["width"], image["height"]) for image in images]
    assert alike[1:] == (sum(width * 3 == height * 4 for width, height in shapes),) * 2
    assert alike[:2] == (None, 1)


def _require_read_together(cache: Cache) -> None:
    """Asserts that samples that are read together are those that are read one by one; of a damaged list none is."""
    anew, places = open_cache(cache.folder), [5, 0, 3, 0, 11]
    together = anew.read_batch(places)
    assert together is not None
    for place, sample in zip(places, together, strict=True):
        alone = cache.read(place)
        assert list(sample) == list(alone)
        for name, values in alone.items():
            for one, other in zip(values, sample[name], strict=True):
                np.testing.assert_array_equal(one, other)
    for change in (-1, 1 << 40):
        offsets, slots = anew._listed["vae"]
        anew._listed["vae"] = (copy.copy(offsets), slots)
        anew._listed["vae"][0].array = offsets.array + change
        assert anew.read_batch(places) is None
        with pytest.raises(CacheCorruptError, match="sample 0, vae: its items are"):
            anew.read(0)
        anew._listed["vae"] = (offsets, slots)


def test_sound_and_several_images_of_a_row_have_their_own_draws(tmp_path: Path) -> None:
    save_vae(tmp_path / "vae")
    config_of(tmp_path)
    keep = 'keep = {latents = {output = "latent_dist.parameters"}}'
    model = section("vae", "image", "size = 32\ncrops = 3\nflip = true", keep)
    text = SECTIONS.replace('features = "log_mel"', 'features = "log_mel"\nspeeds = [0.9, 1.0]')
    vision = text[text.index("[vision]") : text.index("[text]")]
    (tmp_path / "c.toml").write_text(text.replace(vision, "") + model)
    config = load_config(tmp_path / "c.toml", overrides=["loader.form=ragged"])
    cache = open_cache(build_here(config).cache)
    _require_read_together(cache)
    loader: Any = make_loader(config, with_ids=True)
    seen = set()
    for batch, ids in loader:
        draws = EpochDraws(0, 0)
        images, speeds = (draws.of(ids, place).uniform(1)[:, 0] for place in ("variants of image", 1 << 16))
        offsets, owners = batch["latents_offsets"].tolist(), batch["latents_items"].tolist()
        for row, index in enumerate(loader.indices):
            variant, speed = VARIANTS[int(images[row] * 6)], ("", "~0.9")[int(speeds[row] * 2)]
            sample, (first, last) = cache.read(index), owners[row : row + 2]
            held = [batch["latents"][start:stop] for start, stop in itertools.pairwise(offsets[first : last + 1])]
            for one, other in zip(held, sample[f"latents{variant}"], strict=True):
                np.testing.assert_array_equal(one, other)
            start, stop = batch["input_features_offsets"][row : row + 2].tolist()
            np.testing.assert_array_equal(batch["input_features"][start:stop], sample[f"input_features{speed}"])
            seen.add((variant, speed, last - first))
    assert {speed for _, speed, _ in seen} == {"", "~0.9"}
    assert len({variant for variant, _, _ in seen}) > 3
    assert {count for *_, count in seen} == {1, 2}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vae", "size = 64\ncrops = 2", "crops is 2, wanted an odd number"),
        ("vae", "size = 64\ncrops = 0", "crops is 0, wanted 1 or more"),
        ("siglip", "crops = 3", "crops are of images that are resized; give size"),
        ("viewer", 'flip = true\nkeep = {score = {output = "label"}}', "variants are of arrays, and it gives numbers"),
        ("bert", "flip = true", "flip is of folders that take images"),
        ("mine.py:Own", "flip = true", "flip is of folders that take images"),
    ],
)
def test_variants_that_cannot_be_are_refused(corpus: Photos, name: str, settings: str, message: str) -> None:
    if name == "viewer":
        save_tiny(name, corpus.folder / name)
    takes = "text" if name == "bert" else "image"
    with pytest.raises(ForebayError, match=message):
        corpus.cache(f'{PHOTOS}[[model]]\nname = "m"\nfolder = "{name}"\ntakes = "{takes}"\n{settings}\n')


def test_images_of_which_nothing_is_stored_need_no_processor(corpus: Photos) -> None:
    configs = [FIXED.replace("[text]", f"{vision}[text]") for vision in ("", "[vision]\nimages = 'none'\n")]
    assert len({recipe_of(corpus.config(config)).key for config in configs}) == 1
    with pytest.raises(ForebayError, match="vision: processor is missing"):
        corpus.config(configs[1].replace("'none'", "'processor'"))


def test_a_variant_that_is_not_finite_costs_its_sample(corpus: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelItems._outputs

    def poisoned(self: Any, *args: Any, views: Any = (("", False),), **more: Any) -> Any:
        found = real(self, *args, views=views, **more)
        if len(views) > 1:
            found[1]["latents"][0] = np.inf
        return found

    monkeypatch.setattr(ModelItems, "_outputs", poisoned)
    corpus.config(FIXED.replace("size = 64", "size = 64\ncrops = 3"))
    report = build_here(config(corpus, ["run.max_failed_share=0.5"]))
    assert (report.failed, report.num_samples) == ({"not_finite": 1}, len(NAMES) - 1)
