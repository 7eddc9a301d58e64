from __future__ import annotations

import base64
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from forebay.errors import SampleError
from forebay.store.image.pixels import decode_image, resized
from forebay.store.image.settings import ImageSettings
from tests.store.image.variants import PHOTOS, cut_short, photo, saved, variants, with_alpha

LIMIT = 89_478_485
SMALL = [
    data
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    for data in (saved(photo(0).resize((24, 18)), kind), saved(photo(1).resize((9, 30)), kind))
]


def reference(data: bytes) -> np.ndarray[Any, Any]:
    """What the processor makes of a path with these bytes; base64 goes the same way, and a path it leaves open."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images with Transparency")
        return convert_to_rgb(load_image(base64.b64encode(data).decode()), return_numpy=True)


def test_pixels_are_those_of_the_processors_own_loading() -> None:
    for name, data in variants():
        image = decode_image(data, max_pixels=LIMIT, sample_id=name)
        assert image.mode == "RGB", name
        assert np.array_equal(np.asarray(image), reference(data)), name


def test_alpha_is_dropped_and_a_transparent_colour_is_white() -> None:
    image = photo(0)
    decoded = decode_image(saved(with_alpha(image), "PNG"), max_pixels=LIMIT, sample_id="a")
    assert np.array_equal(np.asarray(decoded), np.asarray(image))
    flat = PIL.Image.new("RGB", (4, 4), (9, 8, 7))
    decoded = decode_image(saved(flat, "PNG", transparency=(9, 8, 7)), max_pixels=LIMIT, sample_id="a")
    assert (np.asarray(decoded) == 255).all()


@pytest.mark.parametrize("kind", cut_short())
def test_a_cut_image_is_unreadable(kind: str) -> None:
    with pytest.raises(SampleError, match=r"sample s7: .*write the image again") as caught:
        decode_image(cut_short()[kind], max_pixels=LIMIT, sample_id="s7")
    assert caught.value.reason == "unreadable_image"


@settings(max_examples=400)
@given(data=st.sampled_from(SMALL), changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6))
def test_any_bytes_are_an_image_or_a_sample_that_failed(data: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    image = decoded_or_reason(bytes(damaged))
    if isinstance(image, str):
        assert image in {"unreadable_image", "too_many_pixels", "animated_image", "sixteen_bit_image"}
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
