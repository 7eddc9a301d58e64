"""Every way in which images are stored gives what transformers' processor gives, on hundreds of real images."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from forebay import load_config
from forebay.errors import SampleError
from forebay.preprocess.build_report import BuildReport
from forebay.steps.image.qwen2_vl import load_processor
from forebay.store.cache import open_cache
from forebay.store.image.codec import decode_image
from forebay.store.image.formats import EVERY_IMAGE, image_size
from forebay.store.layout import variant_name
from forebay.train import make_loader
from tests.images.real_images import real_images
from tests.images.test_image_windows import corner, values_of
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO
from tests.preprocess.vision.test_alpha import pixel_values
from tests.steps.image.test_any_processor import made

pytestmark = pytest.mark.wide
REFUSED = {"unreadable_image": 263, "format": 17, "too_many_pixels": 4}
"""Of the images of Pillow 13.0 and scikit-image 0.25: other forms, damaged files, two bombs; Pillow opens none."""
BY_CHOICE = {"unreadable_image": 249, "format": 77, "too_many_pixels": 4, "animated_image": 89}
"""Without `source.more_images`."""
BUT_FRAMES = tuple(each for each in EVERY_IMAGE if each != "first_frame")
CLASSES = ["CLIP", "Gemma3", "Idefics3", "Pixtral", "Qwen2VL"]


def document(folder: Path, vision: dict[str, Any], *, more: tuple[str, ...] = EVERY_IMAGE) -> dict[str, Any]:
    """A config over a question about each image."""
    rows = [{"id": str(n), "image": str(path), "question": "q", "answer": "a"} for n, path in enumerate(real_images())]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "manifest": str(folder / "train.jsonl"), "more_images": more, "max_pixels": 1 << 26}
    run = {"cache_root": str(folder / "caches"), "num_workers": 1, "max_failed_share": 1.0}
    return {"name": "real", "source": source, "vision": vision, "loader": {"num_threads": 0}, "run": run}


def opened(number: str) -> Image.Image:
    """The image as `datasets` hands it to a processor."""
    with warnings.catch_warnings(), Image.open(real_images()[int(number)]) as image:
        warnings.simplefilter("ignore")
        return ImageOps.exif_transpose(image)


def require_counted(report: BuildReport, refused: dict[str, int]) -> None:
    assert {**report.failed, **report.excluded} == refused
    assert report.num_samples == len(real_images()) - sum(refused.values()) >= 200


@pytest.mark.parametrize(
    ("codec", "more"), [*((c, EVERY_IMAGE) for c in ("raw", "zstd", "webp", "source")), ("raw", ())]
)
def test_patches_are_those_of_the_processor(codec: str, more: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config(document(tmp_path, {"processor": str(DEMO / "model"), "codec": codec}, more=more))
    report = build_here(config)
    require_counted(report, REFUSED if more else BY_CHOICE)
    cache, processor = open_cache(report.cache), load_processor(DEMO / "model", "pil")
    for index in range(len(cache)):
        number = cache.sample_id(index)
        wanted = processor(images=[opened(number)], return_tensors="np")
        assert cache.read(index)["image_grid_thw"].tolist() == wanted["image_grid_thw"].tolist(), number
        assert np.array_equal(pixel_values(cache, index), wanted["pixel_values"]), number


def test_windows_are_those_of_the_processor(tmp_path: Path) -> None:
    report = build_here(load_config(document(tmp_path, {"processor": str(DEMO / "model"), "crops": 4})))
    require_counted(report, REFUSED)
    cache, processor = open_cache(report.cache), load_processor(DEMO / "model", "pil")
    for index in range(len(cache)):
        image, sample = convert_to_rgb(opened(cache.sample_id(index))), cache.read(index)
        _, rows, columns = sample["image_grid_thw"][0].tolist()
        for window in ("", "crop1", "crop2", "crop3", "crop4"):
            part = corner(image, window, 0.8).resize((columns * 16, rows * 16), 3)
            made = processor([part], do_resize=False, return_tensors="np")["pixel_values"]
            found = values_of(sample[variant_name("patches", window)], cache.constants)
            assert np.array_equal(found, made), (cache.sample_id(index), window)


@pytest.mark.parametrize("name", CLASSES)
def test_batches_of_any_processor_are_its_own(name: str, tmp_path: Path) -> None:
    processor = made(f"{name}ImageProcessorPil")
    processor.save_pretrained(tmp_path / "model")
    vision = {"processor": str(tmp_path / "model"), "images": "processor"}
    config = load_config({**document(tmp_path, vision), "text": {"prompt": "none"}, "plan": {"batch_size": 1}})
    require_counted(build_here(config), REFUSED)
    loader: Any = make_loader(config, shuffle=False, with_ids=True)
    for batch, (number,) in loader:
        wanted = processor(images=[opened(number)], return_tensors="pt")
        assert batch
        for field, values in batch.items():
            assert torch.equal(values, torch.as_tensor(wanted[field])), (field, number)


def test_frames_are_those_that_pillow_seeks() -> None:
    """Frame by frame, of every file with several; what Pillow does not give of one is refused."""
    compared, refused = 0, 0
    for path in real_images():
        data = path.read_bytes()
        try:
            decode_image(data, max_pixels=1 << 26, sample_id="a", more=BUT_FRAMES)
        except SampleError as err:
            for frame in (0, 1, 2, 3, 7) if err.reason == "animated_image" else ():
                own, theirs = _frame(data, frame), _sought(path, frame)
                assert (own is None) == (theirs is None), (path, frame)
                compared, refused = compared + (own is not None), refused + (own is None)
                assert own is None or theirs is None or np.array_equal(own, theirs), (path, frame)
    assert (compared, refused) == (251, 199)


def _frame(data: bytes, frame: int) -> np.ndarray[Any, Any] | None:
    try:
        size = image_size(data, max_pixels=1 << 26, sample_id="a", more=BUT_FRAMES, frame=frame)
        found = decode_image(data, max_pixels=1 << 26, sample_id="a", more=BUT_FRAMES, frame=frame)
    except SampleError:
        return None
    assert found.size == size
    return np.asarray(found)


def _sought(path: Path, frame: int) -> np.ndarray[Any, Any] | None:
    with warnings.catch_warnings(), Image.open(path) as image:
        warnings.simplefilter("ignore")
        try:
            image.seek(frame)
            return np.asarray(convert_to_rgb(ImageOps.exif_transpose(image)))
        except (EOFError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            return None
