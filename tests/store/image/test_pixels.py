from __future__ import annotations

import base64
import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from forebay.errors import SampleError
from forebay.store.image.codec import Alpha, decode_image, resized
from forebay.store.image.image_settings import ImageSettings
from tests.store.image.variants import PHOTOS, cut_short, photo, saved, transparent_images, variants, with_alpha

LIMIT = 89_478_485
SMALL = [
    data
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    for data in (saved(photo(0).resize((24, 18)), kind), saved(photo(1).resize((9, 30)), kind))
]


def of_a_path(data: bytes) -> np.ndarray[Any, Any]:
    """The processor's values of a path with these bytes; base64 goes the same way, and a path it leaves open."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images with Transparency")
        return np.asarray(convert_to_rgb(load_image(base64.b64encode(data).decode()), return_numpy=True))


def of_an_open_image(data: bytes) -> np.ndarray[Any, Any]:
    """The processor's values of the open image, turned as `datasets` turns it."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        return np.asarray(convert_to_rgb(PIL.ImageOps.exif_transpose(image), return_numpy=True))


def on_white(data: bytes) -> np.ndarray[Any, Any]:
    """The rule in whole numbers: colour * alpha + 255 * (255 - alpha), over 255, rounded."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        rgba = np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGBA"), np.int64)
    colour, alpha = rgba[..., :3], rgba[..., 3:]
    return ((2 * (colour * alpha + 255 * (255 - alpha)) + 255) // 510).astype(np.uint8)


def to_rgb(data: bytes) -> np.ndarray[Any, Any]:
    """The rule of qwen_vl_utils (`to_rgb`): only mode RGBA is pasted on white, and the orientation is not applied."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        if image.mode != "RGBA":
            return np.asarray(image.convert("RGB"))
        white = PIL.Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return np.asarray(white)


def pixels_of(data: bytes, alpha: Alpha) -> np.ndarray[Any, Any]:
    image = decode_image(data, max_pixels=LIMIT, sample_id="a", alpha=alpha)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_pixels_are_those_of_the_processors_own_loading() -> None:
    for name, data in variants():
        assert np.array_equal(pixels_of(data, "drop"), of_a_path(data)), name
        assert np.array_equal(pixels_of(data, "white"), of_an_open_image(data)), name


def test_alpha_is_dropped_and_a_transparent_colour_is_white() -> None:
    image = photo(0)
    assert np.array_equal(pixels_of(saved(with_alpha(image), "PNG"), "drop"), np.asarray(image))
    flat = PIL.Image.new("RGB", (4, 4), (9, 8, 7))
    assert (pixels_of(saved(flat, "PNG", transparency=(9, 8, 7)), "drop") == 255).all()


def test_white_is_the_default() -> None:
    data = saved(with_alpha(photo(0)), "PNG")
    image = decode_image(data, max_pixels=LIMIT, sample_id="a")
    assert np.array_equal(np.asarray(image), pixels_of(data, "white"))


@pytest.mark.parametrize("name", transparent_images())
def test_what_is_transparent_is_laid_on_white(name: str) -> None:
    data = transparent_images()[name]
    found = pixels_of(data, "white")
    assert np.array_equal(found, of_an_open_image(data))
    assert np.array_equal(found, on_white(data))
    with PIL.Image.open(io.BytesIO(data)) as image:
        mode, is_one_colour = image.mode, not isinstance(image.info.get("transparency", b""), bytes)
    # A single transparent colour is white also where a path is given, so "drop" shows no other.
    assert np.array_equal(found, of_a_path(data)) == is_one_colour
    assert np.array_equal(pixels_of(data, "drop"), of_a_path(data))
    if mode == "RGBA" and "turned" not in name:
        assert np.array_equal(found, to_rgb(data))


def test_every_colour_under_every_alpha() -> None:
    colours, alphas = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    data = saved(PIL.Image.fromarray(np.dstack([colours, colours[::-1], colours.T, alphas])), "PNG")
    found = pixels_of(data, "white")
    for rule in (on_white, of_an_open_image, to_rgb):
        assert np.array_equal(found, rule(data)), rule.__name__


def test_a_transparent_image_in_ten_ways_is_warned_of_by_nobody() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for data in transparent_images().values():
            pixels_of(data, "white")
            pixels_of(data, "drop")
    assert [str(warning.message) for warning in said] == []


@pytest.mark.parametrize("kind", cut_short())
def test_a_cut_image_is_unreadable(kind: str) -> None:
    with pytest.raises(SampleError, match=r"sample s7: .*write the image again") as caught:
        decode_image(cut_short()[kind], max_pixels=LIMIT, sample_id="s7")
    assert caught.value.reason == "unreadable_image"


@given(data=st.sampled_from(SMALL), changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6))
def test_any_bytes_are_an_image_or_a_sample_that_failed(data: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    image = decoded_or_reason(bytes(damaged))
    if isinstance(image, str):
        assert image in {"unreadable_image", "too_many_pixels", "animated_image", "format"}
    else:
        assert image.mode == "RGB"
        assert image.width * image.height <= 1 << 20


def decoded_or_reason(data: bytes) -> PIL.Image.Image | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of corrupt metadata
        try:
            return decode_image(data, max_pixels=1 << 20, sample_id="a")
        except SampleError as err:
            return err.reason


def test_a_small_image_is_resized_as_said() -> None:
    image = photo(0)
    pixels = resized(image, ImageSettings(patch_size=16, min_pixels=1024, max_pixels=32 * 32 * 6))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (64, 64, 3)
    assert np.array_equal(pixels, np.asarray(image.resize((64, 64), PIL.Image.Resampling.BICUBIC)))


def test_an_image_of_the_right_size_is_not_touched() -> None:
    image = photo(0).resize((128, 96))
    assert np.array_equal(resized(image, ImageSettings(patch_size=16)), np.asarray(image))


def test_threads_get_the_same_pixels() -> None:
    files = [path.read_bytes() for path in PHOTOS] * 3

    def pixels(data: bytes) -> bytes:
        return resized(
            decode_image(data, max_pixels=LIMIT, sample_id="a"), ImageSettings(max_pixels=28 * 28 * 60)
        ).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pixels, files)) == [pixels(data) for data in files]
