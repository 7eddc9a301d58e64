from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.image.codec import FIELDS, Codec, decode, decode_image, encode, patchify, resized, unpatchify
from forebay.store.image.image_settings import ImageSettings, grid_thw
from tests.store.image.variants import photo, saved, variants

LIMIT = 89_478_485
SETTINGS = ImageSettings(patch_size=16, min_pixels=16_384, max_pixels=131_072)
CODECS: tuple[Codec, ...] = get_args(Codec)


def test_every_codec_has_its_field() -> None:
    assert tuple(FIELDS) == CODECS


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_stored_gives_the_same_patches(codec: Codec) -> None:
    for name, data in variants():
        pixels = resized(decode_image(data, max_pixels=LIMIT, sample_id=name), SETTINGS)
        patches = patchify(pixels, SETTINGS)
        field, stored = encode(codec, data=data, pixels=pixels, patches=patches)
        assert field == FIELDS[codec]
        assert stored.dtype == np.uint8
        stored.flags.writeable = False  # as a cache's views are
        grid = (1, pixels.shape[0] // 16, pixels.shape[1] // 16)
        found = decode(codec, stored, grid=grid, settings=SETTINGS, max_pixels=LIMIT)
        assert (found.dtype, found.shape) == (np.dtype(np.uint8), patches.shape), name
        assert np.array_equal(found, patches), name
        assert np.shares_memory(found, stored) == (codec == "raw")


def test_a_side_that_webp_cannot_hold_is_stored_all_the_same() -> None:
    settings = ImageSettings(patch_size=16, max_pixels=1 << 22)
    image = photo(0).resize((16_416, 96))
    pixels = resized(image, settings)
    assert max(pixels.shape) > 16_383
    patches = patchify(pixels, settings)
    field, stored = encode("webp", data=b"", pixels=pixels, patches=patches)
    assert field == "image_webp"
    grid = grid_thw(*image.size, settings)
    assert np.array_equal(decode("webp", stored, grid=grid, settings=settings, max_pixels=LIMIT), patches)
    at_limit = np.ascontiguousarray(pixels[:, : 16_383 // 32 * 32])
    assert encode("webp", data=b"", pixels=at_limit, patches=patches)[1][:4].tobytes() == b"RIFF"


def test_photos_shrink_in_the_order_of_the_codecs() -> None:
    image = photo(3)
    pixels = resized(image, SETTINGS)
    patches = patchify(pixels, SETTINGS)
    data = saved(image, "JPEG")
    sizes = [encode(codec, data=data, pixels=pixels, patches=patches)[1].size for codec in CODECS]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pixels.size


def test_rows_are_in_merge_order_and_channel_y_x() -> None:
    settings = ImageSettings(patch_size=2, merge_size=2)
    pixels = np.arange(8 * 12 * 3, dtype=np.uint16).astype(np.uint8).reshape(8, 12, 3)
    patches = patchify(pixels, settings)
    places = [(r + i, c + j) for r in (0, 2) for c in (0, 2, 4) for i in (0, 1) for j in (0, 1)]
    assert patches.shape == (len(places), 12)
    for row, (y, x) in zip(patches, places, strict=True):
        assert np.array_equal(row.reshape(3, 2, 2), pixels[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].transpose(2, 0, 1))


@given(
    blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    patch_size=st.sampled_from([2, 14, 16]),
    merge_size=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_unpatchify_is_the_inverse(blocks: tuple[int, int], patch_size: int, merge_size: int, seed: int) -> None:
    settings = ImageSettings(patch_size=patch_size, merge_size=merge_size)
    height, width = (count * settings.factor for count in blocks)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    patches = patchify(pixels, settings)
    assert (patches.dtype, patches.shape[1]) == (np.dtype(np.uint8), settings.patch_bytes)
    assert np.array_equal(unpatchify(patches, (1, height // patch_size, width // patch_size), settings), pixels)
