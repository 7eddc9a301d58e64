from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from forebay.errors import ConfigError, SampleError
from forebay.pretrained import from_folder
from forebay.store.image.image_settings import ImageSettings, grid_thw, image_settings

KIND = {"image_processor_type": "Qwen2VLImageProcessorFast"}
DOCUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    {"min_pixels": 3136, "max_pixels": 200_704},
    {"min_pixels": 3136, "size": {"shortest_edge": 1, "longest_edge": 4_000_000}},
    {"size": {"shortest_edge": 4096, "longest_edge": 99_999}, "resample": 2, "merge_size": 1, "temporal_patch_size": 1},
    {"do_resize": False, "do_normalize": False, "do_rescale": False},
    {"rescale_factor": 1 / 127.5, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 1, 0.25], "size": None},
)


def folder_of(folder: Path, document: object, name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_are_those_of_the_loaded_processor(document: dict[str, Any], tmp_path: Path) -> None:
    found = image_settings(folder_of(tmp_path, {**KIND, **document}))
    loaded = from_folder(AutoImageProcessor, tmp_path, backend="pil")
    assert found.min_pixels == loaded.size["shortest_edge"]
    assert found.max_pixels == loaded.size["longest_edge"]
    for name in (
        "patch_size",
        "merge_size",
        "temporal_patch_size",
        "resample",
        "do_resize",
        "do_rescale",
        "do_normalize",
    ):
        assert getattr(found, name) == getattr(loaded, name), name
    assert (found.rescale_factor, list(found.image_mean)) == (loaded.rescale_factor, list(loaded.image_mean))
    assert list(found.image_std) == list(loaded.image_std)
    assert ImageSettings.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_nested_processor_wins_as_in_transformers(tmp_path: Path) -> None:
    folder_of(tmp_path, {**KIND, "patch_size": 14})
    folder_of(tmp_path, {"processor_class": "Qwen3VLProcessor"}, "processor_config.json")
    assert image_settings(tmp_path).patch_size == 14
    folder_of(tmp_path, {"image_processor": {**KIND, "patch_size": 16}}, "processor_config.json")
    assert image_settings(tmp_path).patch_size == 16
    assert from_folder(AutoImageProcessor, tmp_path, backend="pil").patch_size == 16


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, 'image_processor_type is "CLIPImageProcessor", wanted'),
        ({}, "image_processor_type is null"),
        ([1], "holds no JSON object"),
        ({**KIND, "patch_size": "16"}, 'patch_size is "16", wanted int'),
        ({**KIND, "merge_size": True}, "merge_size is true, wanted int"),
        ({**KIND, "merge_size": 0}, "merge_size is 0, wanted 1 or more"),
        ({**KIND, "do_resize": 1}, "do_resize is 1, wanted bool"),
        ({**KIND, "image_mean": [0.5]}, "image_mean is .0.5., wanted 3 numbers"),
        ({**KIND, "rescale_factor": float("inf")}, "rescale_factor is Infinity, wanted float"),
        ({**KIND, "do_convert_rgb": False}, "do_convert_rgb is false, wanted true"),
        ({**KIND, "resample": 9}, "resample is 9, wanted 0 to 5"),
        ({**KIND, "size": 224}, "size is 224, wanted an object"),
    ],
)
def test_what_is_no_such_processor_is_refused_by_file_and_field(document: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}/preprocessor_config.json.*{message}"):
        image_settings(folder_of(tmp_path, document))


def test_a_folder_without_a_processor_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no image processor"):
        image_settings(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is no JSON"):
        image_settings(tmp_path)


sides = st.integers(1, 5000)


@given(
    width=sides,
    height=sides,
    patch=st.sampled_from([14, 16]),
    pixels=st.tuples(st.integers(1, 1 << 18), st.integers(0, 1 << 22)),
)
def test_grids_are_those_of_smart_resize(width: int, height: int, patch: int, pixels: tuple[int, int]) -> None:
    settings = ImageSettings(patch_size=patch, min_pixels=pixels[0], max_pixels=sum(pixels))
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(SampleError, match="more than 200 times") as caught:
            grid_thw(width, height, settings)
        assert caught.value.reason == "aspect_ratio"
        return
    wanted = smart_resize(height, width, patch * 2, *(settings.min_pixels, settings.max_pixels))
    assert grid_thw(width, height, settings) == (1, wanted[0] // patch, wanted[1] // patch)


def test_without_resizing_sides_must_fit() -> None:
    settings = ImageSettings(do_resize=False)
    assert grid_thw(56, 84, settings) == (1, 6, 4)
    with pytest.raises(SampleError, match="57x84 pixels are no multiples of 28") as caught:
        grid_thw(57, 84, settings)
    assert caught.value.reason == "indivisible_size"
