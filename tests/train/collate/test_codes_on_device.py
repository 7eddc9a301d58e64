"""Codes that cross over to a device become there what the host would have made of them; the CPU stands for a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm, FieldForm, Join, Promise, Table
from forebay.steps.form_values import Side
from forebay.store.layout import Array
from forebay.train.collate.patches import DeviceExpansion, as_codes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def form_of(field: FieldForm) -> BatchForm:
    """The form of one field."""
    return BatchForm(made_by="X", fields=(field,), promise=Promise(kind="exact"))


def pixels(
    *, count: int, shape: tuple[int | None, ...], axis: int, join: Join = "stack", pad: float = 0.0, multiple: int = 1
) -> FieldForm:
    """A field of codes of three channels along an axis."""
    values = np.random.default_rng(count).standard_normal((3, count)).astype(np.float32)
    return FieldForm(
        name="pixel_values",
        dtype="float32",
        shape=shape,
        stored_dtype="uint8" if count <= 256 else "uint16",
        pad=pad,
        join=join,
        table=Table(axis=axis, values=values),
        multiple=multiple,
    )


def coded(field: FieldForm, *shapes: tuple[int, ...]) -> list[Array]:
    """Arrays of codes, the last one among them."""
    assert field.table is not None
    count, rng = field.table.values.shape[1], np.random.default_rng(1)
    arrays = [rng.integers(0, count, shape).astype(field.stored_dtype) for shape in shapes]
    for array in arrays:
        array.reshape(-1)[-1:] = count - 1
    return arrays


def assert_equal_on_both(field: FieldForm, samples: Sequence[Sequence[Array]]) -> torch.dtype:
    """Compares both ways for every dtype of batches, and returns the dtype of what crosses over."""
    rows = [{"pixel_values": list(arrays)} for arrays in samples]
    form = form_of(field)
    for dtype in DTYPES:
        crossing = collate(as_codes(form), rows, dtype=dtype, allocate=fresh)
        found = DeviceExpansion(form, dtype=dtype)(crossing)["pixel_values"]
        wanted = collate(form, rows, dtype=dtype, allocate=fresh)["pixel_values"]
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    return crossing["pixel_values"].dtype


@pytest.mark.parametrize(
    ("count", "crosses"), [(200, torch.uint8), (256, torch.uint8), (257, torch.int16), (65_536, torch.int16)]
)
def test_codes_of_one_and_of_two_bytes(count: int, crosses: torch.dtype) -> None:
    field = pixels(count=count, shape=(3, 6, 8), axis=0)
    assert assert_equal_on_both(field, [coded(field, (3, 6, 8)), coded(field, (3, 6, 8))]) == crosses


@pytest.mark.parametrize("pad", [0.0, -1.5, 0.1])
@pytest.mark.parametrize(
    ("count", "crosses"), [(255, torch.uint8), (256, torch.int16), (257, torch.int16), (65_535, torch.int16)]
)
@pytest.mark.few
def test_padding_behind_images_of_other_sizes(count: int, crosses: torch.dtype, pad: float) -> None:
    field = pixels(count=count, shape=(3, None, None), axis=0, pad=pad, multiple=4)
    found = assert_equal_on_both(field, [coded(field, (3, 6, 8)), coded(field, (3, 2, 9)), coded(field, (3, 5, 1))])
    assert found == crosses


def test_a_table_without_room_for_padding_stays_on_the_host() -> None:
    field = pixels(count=65_536, shape=(3, None, None), axis=0)
    assert assert_equal_on_both(field, [coded(field, (3, 6, 8)), coded(field, (3, 2, 9))]) == torch.bfloat16


def test_tiles_of_samples_and_samples_without_an_image() -> None:
    nested = pixels(count=256, shape=(None, 3, 4, 4), axis=1, join="nest")
    assert assert_equal_on_both(nested, [coded(nested, (2, 3, 4, 4), (1, 3, 4, 4)), [], coded(nested, (1, 3, 4, 4))])
    behind = pixels(count=257, shape=(None, 3, 4, 4), axis=1, join="cat")
    assert assert_equal_on_both(behind, [coded(behind, (2, 3, 4, 4), (1, 3, 4, 4)), []]) == torch.int16


@given(
    st.sampled_from([3, 256, 300]),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    st.sampled_from(["left", "right"]),
    st.sampled_from([0, 2]),
)
def test_any_sizes_and_either_side(count: int, sizes: list[tuple[int, int]], side: Side, axis: int) -> None:
    shape = (None, None, 3) if axis else (3, None, None)
    values = np.random.default_rng(count).standard_normal((3, count)).astype(np.float32)
    field = FieldForm(
        name="pixel_values",
        dtype="float32",
        shape=shape,
        stored_dtype="uint8" if count <= 256 else "uint16",
        pad=-2.5,
        side=side,
        table=Table(axis=axis, values=values),
    )
    whole = [(*size, 3) if axis else (3, *size) for size in sizes]
    assert assert_equal_on_both(field, [[array] for array in coded(field, *whole)]) in (torch.uint8, torch.int16)
