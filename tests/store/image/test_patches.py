from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.image.codec import patchify, unpatchify
from forebay.store.image.image_settings import ImageSettings


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
