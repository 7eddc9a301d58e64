"""Folders of image processors: which class is taken, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from forebay.errors import ConfigError
from forebay.steps.image.processor.processor_call import pil_processor
from forebay.steps.image.qwen2_vl import check_processor, expand, make_processor, patch_table
from forebay.store.image.codec import patchify, resized
from forebay.store.image.image_settings import ImageSettings, grid_thw, is_native, settings_in

HERE = Path("preprocessor_config.json")


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessorPil"),
        ({"image_processor_type": "CLIPImageProcessorFast"}, "CLIPImageProcessorPil"),
        ({"image_processor_type": "CLIPImageProcessorPil"}, "CLIPImageProcessorPil"),
        ({"feature_extractor_type": "CLIPFeatureExtractor"}, "CLIPImageProcessorPil"),
        ({"image_processor_type": "Qwen2_5_VLImageProcessor"}, "Qwen2VLImageProcessorPil"),
        ({"image_processor_type": "VideoLlavaImageProcessor"}, "VideoLlavaImageProcessor"),
    ],
)
def test_the_pil_class_is_taken_under_every_spelling(document: dict[str, Any], name: str) -> None:
    assert type(pil_processor(HERE, document)).__name__ == name


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"image_processor_type": "ClipImageProcesor"}, 'type "ClipImageProcesor" is no class .* nearest is CLIPImage'),
        ({"image_processor_type": "Mine"}, 'type "Mine" is no class of the installed transformers; install'),
        ({"image_processor_type": "VivitImageProcessor"}, "VivitImageProcessor, which exists for torchvision alone"),
        ({"image_processor_type": "TimmWrapperImageProcessor"}, "needs a package that is not installed: .* requires"),
        (
            {"image_processor_type": "CLIPImageProcessor", "auto_map": {"AutoImageProcessor": "a.B"}},
            "auto_map names code",
        ),
        ({"image_processor_type": "CLIPImageProcessor", "size": "huge"}, "does not load as a CLIPImageProcessorPil: "),
        ({"image_processor_type": "../x"}, r'image_processor_type is "../x", wanted the name'),
        ({"image_processor_type": 3}, "image_processor_type is 3, wanted the name"),
        ({}, "image_processor_type is null, wanted the name"),
    ],
)
def test_what_does_not_load_is_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{HERE}.*{message}|{message}") as caught:
        pil_processor(HERE, document)
    assert caught.value.code == "FB123"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 400) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.sampled_from(["size", "crop_size", "resample", "image_mean", "do_resize", "auto_map", "image_processor_type"]),
    JSON,
)
def test_a_strangers_document_loads_or_is_refused(name: str, value: object) -> None:
    document = {"image_processor_type": "CLIPImageProcessor", name: value}
    try:
        found = pil_processor(HERE, document)
    except ConfigError:
        return
    assert type(found).__name__.endswith("ImageProcessorPil")


FAMILY = (
    "Qwen2VLImageProcessor",
    "Qwen2_5_VLImageProcessorFast",
    "Qwen3VLImageProcessor",
    "CohereCompassImageProcessor",
    "Ernie4_5_VLMoeImageProcessor",
    "Glm4vImageProcessor",
    "Glm46VImageProcessorFast",
)
SMALL: dict[str, Any] = {"size": {"shortest_edge": 4096, "longest_edge": 28 * 28 * 40}}


@pytest.mark.parametrize("settings_", [{}, SMALL], ids=["defaults", "small"])
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.few
def test_patches_of_the_whole_family_are_the_processors_bit_for_bit(name: str, settings_: dict[str, Any]) -> None:
    document = {"image_processor_type": name, **settings_}
    settings = settings_in(HERE, document)
    processor = make_processor(HERE, document, "pil")
    table = patch_table(processor, settings)
    check_processor(processor, settings, table)
    rng = np.random.default_rng(0)
    for width, height in ((3, 2), (5, 300), (27, 29), (200, 150), (301, 57)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        wanted = processor(images=[image], return_tensors="np")
        found = expand(patchify(resized(image, settings), settings), table, settings)
        assert np.array_equal(found, wanted["pixel_values"]), (width, height)
        assert wanted["image_grid_thw"].tolist() == [list(grid_thw(width, height, settings))]


def test_only_qwens_own_are_packed_without_being_asked() -> None:
    natives = [name for name in FAMILY if is_native({"image_processor_type": name})]
    assert natives == list(FAMILY[:3])
    assert not is_native({"image_processor_type": ["Qwen2VLImageProcessor"]})


def test_processors_of_another_order_are_no_patches() -> None:
    for name in ("HunYuanVLImageProcessor", "PaddleOCRVLImageProcessor", "VideoLlama3ImageProcessor"):
        with pytest.raises(
            ConfigError, match=r'wanted Qwen2VLImageProcessor or .*images = "processor" under \[vision\]'
        ):
            settings_in(HERE, {"image_processor_type": name})
    with pytest.raises(ConfigError, match="wanted multiples of temporal_patch_size 2"):
        settings_in(HERE, {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 4097}})


def test_settings_of_older_caches_have_the_same_bytes() -> None:
    old = settings_in(HERE, {"image_processor_type": "Qwen2VLImageProcessor"})
    assert "enlarges" not in old.to_json()
    new = settings_in(HERE, {"image_processor_type": "Glm4vImageProcessor"})
    for each in (old, new):
        assert ImageSettings.from_json(json.loads(json.dumps(each.to_json()))) == each
