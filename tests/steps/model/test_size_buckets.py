"""Images of classes in buckets of sizes: a class of the user is given each image resized and cropped to its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError, ForebayError
from forebay.store.cache import open_cache
from forebay.train import make_loader
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import class_folders

CODE = """
class Pixels:
    version = 1
    fields = {"pixels": {"dtype": "uint8", "shape": [3, None, None]}}

    def prepare(self, sample):
        return sample["image"].transpose(2, 0, 1)

    def forward(self, batch):
        return {"pixels": batch}
"""
SIZES = [[64, 64], [96, 64], [64, 96]]
CLASSES = {"dog": ["dogs.jpg"], "cat": ["cat.png", "coffee.webp"], "bird": ["bird.jpg", "nuthatch.jpg"]}


def config(folder: Path, *overrides: str, prompt: str = "label", **model: Any) -> Config:
    given = {"size": 64, "shapes": SIZES, "takes": "image", **model}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items() if value is not None)
    path = folder / "config.toml"
    path.write_text(
        'name = "x"\n[source]\nkind = "folder"\nmanifest = "set"\n[vision]\nimages = "none"\n'
        f'[text]\nprompt = "{prompt}"\n'
        f'[[model]]\nname = "pixels"\nfolder = "own.py:Pixels"\n{lines}'
        '[plan]\nby = ["area", "aspect"]\nbatch_size = 2\n[run]\nallow_code = true\ncache_root = "caches"\n'
        "num_workers = 1\nmax_failed_share = 1.0\n"
    )
    return load_config(path, overrides=overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    class_folders(tmp_path / "set", CLASSES)
    with Image.open(tmp_path / "set" / "bird" / "bird.jpg") as image:
        image.resize((50, 150)).save(tmp_path / "set" / "bird" / "tall.png")  # its longer side is cut
        image.resize((30, 20)).save(tmp_path / "set" / "bird" / "small.png")
    return tmp_path


def fitted(path: Path) -> np.ndarray[Any, Any]:
    """The image at the size of the nearest aspect ratio, by Pillow."""
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    aspect = image.width / image.height
    size = min(SIZES, key=lambda each: abs(np.log(each[0] / each[1] / aspect)))
    made = ImageOps.fit(image, (size[0], size[1]), Image.Resampling.LANCZOS)
    return np.asarray(made).transpose(2, 0, 1)


@pytest.mark.parametrize("prompt", ["label", "none"])
def test_batches_are_of_one_size_and_pixels_those_of_pillow(folder: Path, prompt: str) -> None:
    made = config(folder, prompt=prompt, step=16)
    report = build_here(made)
    cache = open_cache(report.cache)
    assert report.num_samples == 7
    loaders: list[Any] = [
        make_loader(each, with_columns=("images", *(["text"] if prompt == "label" else [])))
        for each in (made, config(folder, 'loader.cache="off"', prompt=prompt, step=16))
    ]
    shapes = set()
    for (batch, columns), (other, _) in zip(*loaders, strict=True):
        assert batch["pixels"].dtype == torch.uint8
        assert torch.equal(batch["pixels"], other["pixels"])
        shapes.add(tuple(batch["pixels"].shape[2:]))
        for place, names in enumerate(columns["images"]):
            assert np.array_equal(batch["pixels"][place], fitted(folder / "set" / json.loads(names)[0]))
            if prompt == "label":
                assert cache.constants["classes"][batch["labels"][place]] == columns["text"][place]
    assert shapes == {(64, 64), (64, 96), (96, 64)}


def test_a_batch_of_one_size_needs_no_shapes(folder: Path) -> None:
    made = config(folder, "plan={batch_size=7}", shapes=None, size=[80, 64])
    build_here(made)
    (batch,) = make_loader(made)
    assert batch["pixels"].shape == (5, 3, 64, 80)  # two are below `step`


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ({"crops": 3}, CODE, "crops are of folders"),
        ({"takes": "audio"}, CODE, 'size is of images; set takes = "image"'),
        ({}, CODE.replace("[3, None, None]", "[3, None, 64]"), r"with shapes its first field has the shape \[channels"),
        ({"size": 0}, CODE, "size"),
        ({"step": 64}, CODE, "below_step"),
    ],
)
def test_what_cannot_be_is_named(folder: Path, model: dict[str, Any], code: str, said: str) -> None:
    (folder / "own.py").write_text(code)
    if said == "below_step":
        assert build_here(config(folder, **model)).excluded == {"below_step": 2}
        return
    with pytest.raises((ConfigError, ForebayError), match=said):
        build_here(config(folder, **model))
