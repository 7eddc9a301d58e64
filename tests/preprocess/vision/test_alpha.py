"""Transparent images from the raw files to a sample: the pixels that the processor makes of the open image."""

from __future__ import annotations

import base64
import io
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from forebay.config import Config
from forebay.errors import CacheCorruptError, ConfigError
from forebay.steps.image.qwen2_vl import load_processor
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import StoredImages
from forebay.store.image.image_settings import ImageSettings
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo
from tests.store.image.variants import exif, saved, transparent_images
from tests.store.image.variants import photo as demo_photo

IMAGES = {
    **transparent_images(),
    "JPEG": photo(1),
    "JPEG, turned": saved(demo_photo(2).resize((120, 70)), "JPEG", exif=exif(6)),
}
CODECS = ("raw", "zstd", "webp", "source")


@cache
def processor() -> Any:
    return load_processor(DEMO / "model", "pil")


def rows() -> list[dict[str, Any]]:
    return [{"id": str(n), "image": f"{n}.img", "question": "q", "answer": "a"} for n in range(len(IMAGES))]


def jsonl(folder: Path) -> str:
    for number, data in enumerate(IMAGES.values()):
        (folder / f"{number}.img").write_bytes(data)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return 'kind = "jsonl"\nmanifest = "train.jsonl"'


def saved_dataset(folder: Path) -> datasets.Dataset:
    """The rows as a dataset of the library, saved, and read from there."""
    images = [{"bytes": data, "path": None} for data in IMAGES.values()]
    table = {**{name: [row[name] for row in rows()] for name in ("id", "question", "answer")}, "image": images}
    features = datasets.Features({**dict.fromkeys(("id", "question", "answer"), datasets.Value("string"))})
    features["image"] = datasets.Image()
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(table, features=features).save_to_disk(str(folder / "data"))
    datasets.enable_progress_bars()
    return datasets.load_from_disk(str(folder / "data"))


def config(folder: Path, source: str, *overrides: str) -> Config:
    path = folder / "config.toml"
    path.write_text(
        f'name = "alpha"\n[source]\n{source}\n[vision]\nprocessor = "{DEMO / "model"}"\n[run]\ncache_root = "caches"\n'
    )
    return load_config(path, overrides=overrides)


def pixel_values(source: Any, index: int) -> np.ndarray[Any, Any]:
    """The values that a model is given of a sample's one image, by the table that the cache keeps."""
    (patches,) = source.read(index)["patches"]
    table = np.asarray(source.constants["patch_table"], np.float32)
    by_channel = table[np.arange(3)[:, None], patches.reshape(len(patches), 3, -1)]
    return np.repeat(by_channel[:, :, None], 2, axis=2).reshape(len(patches), -1)


def processed(image: PIL.Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(processor()(images=[image], return_tensors="np")["pixel_values"])


def of_the_open_image(data: bytes) -> np.ndarray[Any, Any]:
    with PIL.Image.open(io.BytesIO(data)) as image:
        return processed(PIL.ImageOps.exif_transpose(image))


def of_a_path(data: bytes) -> np.ndarray[Any, Any]:
    """base64 goes the way of a path, which transformers leaves open."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images with Transparency")
        return processed(processor().fetch_images(base64.b64encode(data).decode()))


def names_of(source: Any) -> list[str]:
    return [list(IMAGES)[int(source.sample_id(index))] for index in range(len(source))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cache]:
    folder = tmp_path_factory.mktemp("alpha")
    return folder, open_cache(build_here(config(folder, jsonl(folder))).cache)


def test_samples_are_what_the_processor_makes_of_the_open_image(built: tuple[Path, Cache]) -> None:
    cache = built[1]
    assert len(cache) == len(IMAGES)
    for index, name in enumerate(names_of(cache)):
        assert np.array_equal(pixel_values(cache, index), of_the_open_image(IMAGES[name])), name


@pytest.mark.parametrize("codec", CODECS[1:])
def test_every_codec_keeps_what_is_laid_on_white(built: tuple[Path, Cache], codec: str) -> None:
    folder, raw = built
    cache = open_cache(build_here(config(folder, jsonl(folder), f"vision.codec={codec}")).cache)
    for index, name in enumerate(names_of(raw)):
        assert np.array_equal(cache.read(index)["patches"][0], raw.read(index)["patches"][0]), name


def test_uncached_samples_are_those_of_the_cache(built: tuple[Path, Cache]) -> None:
    folder, raw = built
    online = select(config(folder, jsonl(folder), 'loader.cache="off"'))
    assert online.constants == raw.constants
    for index, name in enumerate(names_of(raw)):
        assert np.array_equal(online.read(index)["patches"][0], raw.read(index)["patches"][0]), name


def test_a_dataset_s_samples_are_what_the_processor_makes_of_its_images(tmp_path: Path) -> None:
    dataset = saved_dataset(tmp_path)
    cache = open_cache(build_here(config(tmp_path, 'kind = "hf"\nmanifest = "data"')).cache)
    assert len(cache) == len(dataset) == len(IMAGES)
    for index, name in enumerate(names_of(cache)):
        handed_over = dataset[int(cache.sample_id(index))]["image"]
        assert np.array_equal(pixel_values(cache, index), processed(handed_over)), name


@pytest.mark.parametrize("codec", ["raw", "source"])
def test_drop_shows_the_colours_under_the_alpha(tmp_path: Path, codec: str) -> None:
    made = config(tmp_path, jsonl(tmp_path), 'vision.alpha="drop"', f"vision.codec={codec}")
    cache = open_cache(build_here(made).cache)
    for index, name in enumerate(names_of(cache)):
        found = pixel_values(cache, index)
        assert np.array_equal(found, of_a_path(IMAGES[name])), name
        is_one_colour = any(word in name for word in ("an entry", "a value", "a colour", "JPEG"))
        assert np.array_equal(found, of_the_open_image(IMAGES[name])) == is_one_colour, name


def test_a_cache_says_what_became_of_the_alpha() -> None:
    constants: dict[str, Any] = {"image": ImageSettings().to_json(), "max_pixels": 100}
    fields = [{"name": name, "role": "tensor"} for name in ("image_file", "image_rows", "image_grid_thw")]
    metadata = {"media_rows": "image_rows", "codec": "source", "fields": fields, "constants": {"image": constants}}
    for alpha in ("drop", "white"):
        constants["alpha"] = alpha
        stored = StoredImages.of(metadata, folder=Path("x"))
        assert stored is not None
        assert stored.alpha == alpha
    del constants["alpha"]
    with pytest.raises(CacheCorruptError, match=r"none that forebay writes.*alpha"):
        StoredImages.of(metadata, folder=Path("x"))
    for wrong in ("black", 1, ["white"]):
        constants["alpha"] = wrong
        with pytest.raises(CacheCorruptError, match="none that forebay writes"):
            StoredImages.of(metadata, folder=Path("x"))


def test_alpha_is_one_of_two_and_in_the_key(tmp_path: Path) -> None:
    source = jsonl(tmp_path)
    steps = [
        recipe_of(config(tmp_path, source, f'vision.alpha="{alpha}"')).groups[0].steps[0] for alpha in ("white", "drop")
    ]
    assert recipe_of(config(tmp_path, source)).groups[0].steps[0] == steps[0] != steps[1]
    with pytest.raises(ConfigError, match="alpha"):
        config(tmp_path, source, 'vision.alpha="black"')
