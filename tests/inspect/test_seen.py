"""Stored values as pixels: the colours of the image that was read, whatever the order of axes, tiles and patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from forebay import load_config
from forebay.inspect.listed_groups import SeenItem
from forebay.inspect.seen_images import View, view_of
from forebay.steps.form import BatchForm, FieldForm, Promise, Table
from forebay.steps.image.processor.codes import is_padding, levels_of
from forebay.store.files import hash_file
from forebay.store.layout import Array

RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)
MEAN, STD = np.array([0.48, 0.45, 0.4]), np.array([0.26, 0.27, 0.28])
VALUES = ((np.arange(256) / 255 - MEAN[:, None]) / STD[:, None]).astype(np.float32)


def form(shape: tuple[int | None, ...], *, by: str = "Any", **settings: Any) -> BatchForm:
    main = {"name": "pixel_values", "dtype": "float32", "stored_dtype": "uint8", "shape": shape, **settings}
    return BatchForm(made_by=by, fields=(FieldForm(**main),), promise=Promise(kind="exact"))


def seen(found: BatchForm, array: Array, **beside: Array) -> View:
    view = view_of(found, {"pixel_values": array, **beside})
    assert view is not None
    return view


@pytest.mark.parametrize(
    ("shape", "axis", "array"),
    [
        ((3, None, None), 0, IMAGE.transpose(2, 0, 1)),
        ((8, 12, 3), 2, IMAGE),
        ((1, 3, 8, 12), 1, IMAGE.transpose(2, 0, 1)[None]),
    ],
)
def test_normalised_values_have_their_colours_again(shape: tuple[int | None, ...], axis: int, array: Array) -> None:
    table = Table(axis=axis, values=VALUES)
    view = seen(form(shape, table=table), array)
    assert np.array_equal(view.pixels, IMAGE)
    assert "rescaled to 0 to 255" in view.how


def test_grey_and_floats_and_bytes_are_shown() -> None:
    grey = seen(form((1, 8, 12)), IMAGE[None, ..., 0])
    assert np.array_equal(grey.pixels, np.repeat(IMAGE[..., :1], 3, axis=2))
    assert grey.how == "as the model sees it"
    floats = seen(form((None, None), stored_dtype="float32"), np.linspace(-2, 5, 96, dtype=np.float32).reshape(8, 12))
    assert (floats.pixels.min(), floats.pixels.max(), floats.pixels.shape) == (0, 255, (8, 12, 3))
    assert "from the least to the greatest" in floats.how
    flat = seen(form((3, 8, 12), stored_dtype="float32"), np.full((3, 8, 12), np.nan, np.float32))
    assert not flat.pixels.any()
    assert view_of(form((None, 3, 4, 4)), {"pixel_values": np.zeros((0, 3, 4, 4), np.uint8)}) is None


def test_tiles_stand_side_by_side() -> None:
    tiles = np.stack([np.full((3, 4, 6), level, np.uint8) for level in (10, 20, 30)])
    view = seen(form((None, 3, 4, 6), join="cat"), tiles)
    assert view.how.endswith("3 tiles of 6 x 4, in their order")
    assert [view.pixels[1, 1, 0], view.pixels[7, 1, 0], view.pixels[13, 1, 0]] == [10, 20, 30]
    assert view.pixels.shape == (3 * 4 + 2 * 2, 6, 3)


def test_patches_are_put_together_where_their_order_is_known() -> None:
    rows = IMAGE.reshape(2, 4, 3, 4, 3).transpose(0, 2, 1, 3, 4).reshape(6, 48)
    padded = np.concatenate([rows, np.zeros((2, 48), np.uint8)])
    siglip = form((8, 48), by="Siglip2ImageProcessorPil")
    assert np.array_equal(seen(siglip, padded, spatial_shapes=np.array([2, 3])).pixels, IMAGE)
    for wrong in ([3, 3], [0, 2], [2]):
        assert view_of(siglip, {"pixel_values": padded, "spatial_shapes": np.array(wrong)}) is None
    places = np.array([[1 + n // 3, 1 + n % 3] for n in range(6)] + [[0, 0]] * 2)
    pix = np.concatenate([places, padded], axis=1).astype(np.float32)
    pix2struct = form((8, 50), by="Pix2StructImageProcessor", stored_dtype="float32")
    assert np.abs(seen(pix2struct, pix).pixels.astype(int) - IMAGE).max() <= 2
    blocks = IMAGE.reshape(2, 2, 2, 3, 2, 2, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    twice = np.repeat(blocks.reshape(24, 3, 1, 4), 2, axis=2).reshape(24, 24)
    qwen = form((None, 24), by="Qwen2VLImageProcessorPil", join="cat", table=Table(axis=1, inner=8, values=VALUES))
    assert np.array_equal(seen(qwen, twice, image_grid_thw=np.array([1, 4, 6])).pixels, IMAGE)
    assert view_of(qwen, {"pixel_values": twice, "image_grid_thw": np.array([1, 5, 6])}) is None
    assert view_of(form((8, 48)), {"pixel_values": padded}) is None


def test_the_value_that_pads_is_told_from_black() -> None:
    values = np.append(np.linspace(-1, 1, 256), 0).astype(np.float32)[None]
    (field,) = form((1, 2, 2), table=Table(axis=0, values=values), stored_dtype="uint16").fields
    array = np.array([[[0, 256], [128, 255]]], np.uint16)
    assert is_padding(field, array).tolist() == [[[False, True], [False, False]]]
    assert levels_of(field, array).reshape(-1)[[0, 3]].tolist() == [0, 255]
    assert not is_padding(form((2,)).fields[0], array).any()


def test_of_patches_in_an_unknown_order_the_file_is_shown_if_it_is_still_that_one(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "a.png"
    PIL.Image.fromarray(IMAGE).save(path)
    (tmp_path / "config.toml").write_text(
        'name = "x"\n[source]\nkind = "folder"\nmanifest = "set"\n[vision]\nprocessor = "p"\n[text]\nprompt = "none"\n'
    )
    config = load_config(tmp_path / "config.toml")

    def shown(name: str) -> Any:
        image = SeenItem(
            name=name,
            hash=known,
            media_row=0,
            arrays={"pixel_values": IMAGE.reshape(8, 36)},
            stored_bytes=1,
            float32_bytes=1,
            form=form((8, 36)),
        )
        return image.picture(config)

    known = hash_file(path)
    assert np.array_equal(shown("a.png").pixels, IMAGE)
    assert shown("a.png").about[-1].startswith("the file itself")
    for name in ("b.png", "../set/a.png", str(path)):
        assert shown(name).pixels.shape == (8, 36, 3)
        assert "a row a patch" in shown(name).about[-1]
    known = "0" * 32
    assert shown("a.png").pixels.shape == (8, 36, 3)
