from __future__ import annotations

import base64
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from forebay.errors import ConfigError, SampleError
from forebay.steps.image.qwen2_vl import check_processor, expand, load_processor, patch_table, processed_patches
from forebay.store.image.codec import decode_image, patchify, resized
from forebay.store.image.image_settings import grid_thw, image_settings
from tests.store.image.variants import photo, variants

ROOT = Path(__file__).parents[3]


MODEL = ROOT / "demo" / "vision" / "model"


LIMIT = 89_478_485


QWEN2_VL: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 28 * 28 * 100}


PLAIN: dict[str, Any] = {
    **QWEN2_VL,
    "patch_size": 8,
    "merge_size": 1,
    "temporal_patch_size": 1,
    "image_mean": [0.1, 0.5, 0.9],
    "image_std": [0.3, 0.25, 1.0],
    "resample": 2,
}


@pytest.fixture(params=["demo", "qwen2_vl", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folders of processors: the demo's, Qwen2-VL's own constants, and one with every setting changed."""
    if request.param == "demo":
        return MODEL
    document = QWEN2_VL if request.param == "qwen2_vl" else PLAIN
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document), encoding="utf-8")
    return tmp_path


def test_rebuilt_pixel_values_are_the_processors_bit_for_bit(folder: Path) -> None:
    processor, settings = load_processor(folder, "pil"), image_settings(folder)
    table = patch_table(processor, settings)
    seen = 0
    for name, data in variants():
        image = decode_image(data, max_pixels=LIMIT, sample_id=name, alpha="drop")
        patches = patchify(resized(image, settings), settings)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Palette images with Transparency")
            loaded = processor.fetch_images(base64.b64encode(data).decode())
        wanted = processor(images=[loaded], return_tensors="np")
        found = expand(patches, table, settings)
        assert (found.dtype, found.shape) == (np.dtype(np.float32), wanted["pixel_values"].shape), name
        assert np.array_equal(found.view(np.uint32), wanted["pixel_values"].view(np.uint32)), name
        assert wanted["image_grid_thw"].tolist() == [list(grid_thw(*image.size, settings))], name
        seen += 1
    assert seen >= 50 + 19


def test_the_table_is_the_processors_arithmetic(folder: Path) -> None:
    settings = image_settings(folder)
    table = patch_table(load_processor(folder, "pil"), settings)
    values = (np.arange(256) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.array(part, np.float32)[:, None] for part in (settings.image_mean, settings.image_std))
    assert table.dtype == np.float32
    assert np.array_equal(table, (values - mean) / std)


def test_our_path_is_checked_against_the_processor(folder: Path) -> None:
    processor, settings = load_processor(folder, "pil"), image_settings(folder)
    table = patch_table(processor, settings)
    check_processor(processor, settings, table)
    processor.resample = PIL.Image.Resampling.LANCZOS
    with pytest.raises(ConfigError, match=r"Qwen2VLImageProcessorPil gives other values for .* of an image of"):
        check_processor(processor, settings, table)
    processor.size = {"shortest_edge": settings.min_pixels * 9, "longest_edge": settings.max_pixels * 9}
    with pytest.raises(ConfigError, match=r"gives pixel_values \[.*\] for .* pixels, \[.*\] by us"):
        check_processor(processor, settings, table)


class Wrapped:
    """A processor with its output changed."""

    def __init__(self, change: Any) -> None:
        self.processor, self.change = load_processor(MODEL, "pil"), change

    def __call__(self, **options: Any) -> dict[str, Any]:
        return {"pixel_values": self.change(self.processor(**options)["pixel_values"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values[:, ::2], r"pixel_values \[4, 768\] for 32x32 pixels, wanted \[4, 1536\]"),
        (lambda values: values[:, ::-1], "no table of"),
        (lambda values: values + np.arange(len(values), dtype=np.float32)[:, None], "no table of"),
        (lambda values: np.arange(values.size, dtype=np.float32).reshape(values.shape), "no table of"),
    ],
    ids=["half a row", "backwards", "by the row", "by the place"],
)
def test_a_processor_without_a_table_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"Wrapped gives .*{message}"):
        patch_table(Wrapped(change), image_settings(MODEL))


def test_patches_are_found_again_in_the_processors_own_output(folder: Path) -> None:
    processor, settings = load_processor(folder, "pil"), image_settings(folder)
    table = patch_table(processor, settings)
    for index in range(3):
        image = photo(index)
        found = processed_patches(processor, image, settings, table)
        assert found.dtype == np.uint8
        assert np.array_equal(found, patchify(resized(image, settings), settings))


def test_output_that_is_of_no_pixel_is_refused() -> None:
    settings = image_settings(MODEL)
    table = patch_table(load_processor(MODEL, "pil"), settings)
    between = Wrapped(lambda values: values + np.float32(1e-3))
    with pytest.raises(ConfigError, match="Wrapped gives values that are of no uint8 pixel"):
        processed_patches(between, photo(), settings, table)
    fewer = Wrapped(lambda values: values[4:])
    with pytest.raises(ConfigError, match=r"Wrapped gives .* patches for an image of .*, wanted a grid of"):
        processed_patches(fewer, photo(), settings, table)
    with pytest.raises(SampleError, match="more than 200 times"):
        processed_patches(between, PIL.Image.new("RGB", (402, 2)), settings, table)


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no image processor"):
        load_processor(tmp_path, "pil")
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "VivitImageProcessor"}', encoding="utf-8"
    )
    with pytest.raises(
        ConfigError, match=r'image_processor_type is "VivitImageProcessor", wanted Qwen2VLImageProcessor'
    ):
        load_processor(tmp_path, "pil")


LOAD = """
import logging, sys
from pathlib import Path
logging.basicConfig(format="%(message)s")
from forebay.errors import ConfigError
from forebay.steps.image.qwen2_vl import load_processor
try:
    print(type(load_processor(Path("demo/vision/model"), sys.argv[1])).__name__)
except ConfigError as err:
    print(err)
"""


def printed(code: str, backend: str, packages: Path) -> str:
    """The output of the code in a fresh interpreter that finds these packages first."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(1, {str(packages)!r})\n{code}", backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout + result.stderr


@pytest.fixture
def broken_torchvision(tmp_path: Path) -> Path:
    """A folder of packages with a torchvision as it is beside another torch: there, but it does not load."""
    (tmp_path / "torchvision-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\n"
    (tmp_path / "torchvision-0.1.0.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    (tmp_path / "torchvision").mkdir()
    failing = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    (tmp_path / "torchvision" / "__init__.py").write_text(failing, encoding="utf-8")
    return tmp_path


def test_a_broken_torchvision_is_said_to_be_broken(broken_torchvision: Path) -> None:
    text = printed(LOAD, "torchvision", broken_torchvision)
    assert "torchvision is installed but does not load (RuntimeError: operator torchvision::nms does not exist)" in text
    assert 'set vision.backend = "pil"' in text


@pytest.mark.wide
def test_a_broken_torchvision_does_not_break_pil(broken_torchvision: Path) -> None:
    code = "from transformers.utils import is_torchvision_available\nassert is_torchvision_available()\n" + LOAD
    text = printed(code, "pil", broken_torchvision)
    assert "Qwen2VLImageProcessorPil" in text
    assert "going on as if it were not there" in text
