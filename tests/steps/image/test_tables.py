"""Codes and tables: what is encoded expands to itself, bit for bit, on the host and as devices do it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.form import Table
from forebay.steps.image.processor.codes import Encoder, NotInTable, blocks, different
from forebay.steps.image.processor.processor_probe import table_of
from forebay.steps.image.tables import expand, expand_on_device
from forebay.store.layout import Array

SHAPES = [
    ((3, 5, 7), 0, 1),
    ((5, 7, 3), 2, 1),
    ((2, 3, 9, 9), 1, 1),
    ((4, 12), 1, 4),
    ((4, 12), 1, 2),
    ((6, 12), 1, 1),
    ((3, 40_000), 0, 1),
    ((200, 300, 3), 2, 1),
]
"""(shape, axis, inner) of three channels: first, last, tiles, rows of patches, longer than a piece."""


def linear(channels: int, count: int = 256) -> Array:
    """Values as a processor makes them of bytes: rescaled, minus a mean, over a deviation."""
    scaled = (np.arange(count) * (1 / 255)).astype(np.float32)
    return np.stack([(scaled - np.float32(0.3 + c / 10)) / np.float32(0.2 + c / 50) for c in range(channels)])


def plainly(codes: Array, values: Array, *, axis: int, inner: int) -> Array:
    """`values[channel, code]` by numpy's own indexing."""
    channel = np.arange(codes.shape[axis]) // inner % len(values)
    found: Array = values[channel.reshape([-1 if a == axis else 1 for a in range(codes.ndim)]), codes]
    return found


@pytest.mark.parametrize(("shape", "axis", "inner"), SHAPES)
@pytest.mark.parametrize("count", [256, 257])
def test_expansion_is_plain_indexing_in_every_layout(shape: tuple[int, ...], axis: int, inner: int, count: int) -> None:
    values = linear(3, count)
    codes = np.random.default_rng(0).integers(0, count, shape).astype(np.uint8 if count == 256 else np.uint16)
    wanted = torch.from_numpy(plainly(codes, values, axis=axis, inner=inner))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(shape, dtype=dtype)
        expand(codes, values, axis, out, inner=inner)
        assert torch.equal(out, wanted.to(dtype))
        device = expand_on_device(torch.from_numpy(codes), torch.from_numpy(values), axis, dtype=dtype, inner=inner)
        assert torch.equal(device, out)
    padded = torch.zeros(tuple(length + 2 for length in shape))
    inside = padded[tuple(slice(1, length + 1) for length in shape)]
    expand(codes, values, axis, inside, inner=inner)
    assert torch.equal(inside, wanted)
    turned = codes.transpose()
    expand(turned, values, len(shape) - 1 - axis, inside.permute(*reversed(range(len(shape)))), inner=inner)
    assert torch.equal(inside, wanted)


def test_a_code_that_the_table_does_not_have_is_refused_on_the_host_and_the_last_one_on_a_device() -> None:
    values, codes = linear(1, 3), np.array([0, 3], np.uint8)
    with pytest.raises(IndexError, match="a code is 3, the table has 3 values"):
        expand(codes, values, 0, torch.empty(2))
    found = expand_on_device(torch.from_numpy(codes), torch.from_numpy(values), 0, dtype=torch.float32)
    assert found[1] == values[0, 2]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, Array]:
    """A table of any floats that differ, and an array of its values."""
    shape, axis, inner = draw(st.sampled_from(SHAPES[:6]))
    finite = st.floats(width=32, allow_nan=False)
    rows = [np.array(draw(st.lists(finite, min_size=1, max_size=9)), np.float32) for _ in range(3)]
    rows = [different(row) for row in rows]
    longest = max(map(len, rows))
    values = np.stack([np.append(row, np.repeat(row[-1:], longest - len(row))) for row in rows])
    codes = np.random.default_rng(draw(st.integers(0, 99))).integers(0, longest, shape)
    return Table(axis=axis, values=values, inner=inner), plainly(codes, values, axis=axis, inner=inner)


def test_both_zeros_are_kept_apart() -> None:
    values = np.array([[0.0, -0.0], [-0.0, 0.0]], np.float32)
    array = values[:, [0, 1, 1, 0]]
    assert Encoder(Table(axis=0, values=values)).codes(array).tolist() == [[0, 1, 1, 0]] * 2


@given(tables())
def test_what_is_encoded_expands_to_itself(case: tuple[Table, Array]) -> None:
    table, array = case
    codes = Encoder(table).codes(array)
    out = torch.empty(array.shape)
    expand(codes, table.values, table.axis, out, inner=table.inner)
    assert np.array_equal(out.numpy().view(np.uint32), array.view(np.uint32))


@pytest.mark.parametrize("odd", [0.123, np.nan, np.inf, -np.inf, 1e30, -3.4e38, -0.0])
def test_a_value_outside_of_the_table_is_named(odd: float) -> None:
    table = Table(axis=0, values=linear(3))
    array = table.values[:, :100].reshape(3, 10, 10).copy()
    assert Encoder(table).codes(array).tolist() == np.arange(100).reshape(1, 10, 10).repeat(3, axis=0).tolist()
    array[1, 4, 4] = odd
    with pytest.raises(NotInTable, match="of channel 1 is not in the table") as caught:
        Encoder(table).codes(array)
    assert np.array_equal(np.float32(caught.value.value), np.float32(odd), equal_nan=True)
    missing = Encoder(table).missing(array)
    assert [len(values) for values in missing] == [0, 1, 0]


def test_values_as_the_memory_of_a_processor_has_them_are_encoded_all_the_same() -> None:
    values = linear(3)
    codes = np.random.default_rng(0).integers(0, 256, (3, 30, 40)).astype(np.uint8)
    array = plainly(codes, values, axis=0, inner=1)
    turned = np.ascontiguousarray(array.transpose(1, 2, 0)).transpose(2, 0, 1)
    found = Encoder(Table(axis=0, values=values)).codes(turned)
    assert np.array_equal(found, codes)
    assert found.flags.c_contiguous


def padded_table(*, padding: float, counts: tuple[int, int, int] = (256, 256, 256)) -> Table:
    """Even values, fewer in some channels, and behind them one that lies apart: what a processor pads with."""
    even = linear(3) + np.float32(0.001)  # without 0
    rows = [np.append(row[:count], np.float32(padding)) for row, count in zip(even, counts, strict=True)]
    longest = max(map(len, rows))
    return Table(axis=0, values=np.stack([np.append(row, np.repeat(row[-1:], longest - len(row))) for row in rows]))


@pytest.mark.parametrize("padding", [0.0, 77.0, -1e9])
@pytest.mark.parametrize("counts", [(256, 256, 256), (256, 90, 256), (200, 90, 60)])
def test_padding_beside_values_has_the_last_code_wherever_it_stands(
    padding: float, counts: tuple[int, int, int]
) -> None:
    table = padded_table(padding=padding, counts=counts)
    last = table.values.shape[1] - 1
    codes = np.random.default_rng(0).integers(0, np.array(counts)[:, None, None], (3, 300, 202))
    codes[:, 240:] = last  # pieces of padding alone, and of both
    codes[:, :, 190:] = last
    array = plainly(codes, table.values, axis=0, inner=1)
    found = Encoder(table).codes(array)
    assert found.dtype == (np.uint16 if max(counts) == 256 else np.uint8)
    assert np.array_equal(found, codes)
    assert np.array_equal(Encoder(table).codes(array[:, :31, 1:102]), codes[:, :31, 1:102])  # odd sizes
    for place in ((0, 0), (1, 195), (290, 7)):
        wrong = array.copy()
        wrong[(2, *place)] = np.float32(0.123)
        with pytest.raises(NotInTable, match="of channel 2 is not in the table"):
            Encoder(table).codes(wrong)


def test_a_zero_of_the_other_sign_is_no_padding() -> None:
    table = padded_table(padding=0.0)
    array = np.zeros((3, 40, 50), np.float32)
    array[1, 30, 30] = -0.0
    with pytest.raises(NotInTable, match="of channel 1 is not in the table"):
        Encoder(table).codes(array)


def test_channels_must_divide_their_axis() -> None:
    assert blocks((4, 12), 1, channels=3, inner=2) == (8, 3, 2)
    with pytest.raises(ValueError, match=r"axis 1 of \[4, 10\] has no 3 channels of 1"):
        blocks((4, 10), 1, channels=3, inner=1)


@pytest.mark.parametrize(
    ("shape", "axis", "inner", "channels"),
    [
        ((3, 64, 64), 0, 1, 3),
        ((64, 64, 3), 2, 1, 3),
        ((64, 192), 1, 64, 3),
        ((64, 192), 1, 1, 3),
        ((3, 64, 64), 0, 1, 1),
    ],
)
def test_the_table_and_its_axis_are_found(shape: tuple[int, ...], axis: int, inner: int, channels: int) -> None:
    values = linear(channels)
    rng = np.random.default_rng(0)
    arrays = [plainly(rng.integers(0, 256, shape), values, axis=axis, inner=inner) for _ in range(4)]
    table = table_of(arrays, shape, more=lambda _: None)
    assert table is not None
    assert (table.axis, table.inner) == (axis, inner)
    assert np.array_equal(table.values, values)


def test_zero_that_is_padded_with_stands_last_where_the_others_lie_evenly() -> None:
    values, rng = linear(3), np.random.default_rng(0)
    arrays = [plainly(rng.integers(0, 256, (3, 64, 64)), values, axis=0, inner=1) for _ in range(4)]
    for array in arrays:
        array[:, 60:] = 0
    table = table_of(arrays, (3, 64, 64), more=lambda _: None)
    assert table is not None
    assert table.values.shape == (3, 257)
    assert table.values[0, -1] == 0
    codes = Encoder(table).codes(arrays[0])
    assert codes.dtype == np.uint16
    assert np.array_equal(plainly(codes, table.values, axis=0, inner=1), arrays[0])


def test_what_depends_on_the_image_has_no_table() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 64, 64)).astype(np.float32) for _ in range(4)]
    assert table_of(arrays, (3, 64, 64), more=lambda _: None) is None
    few = [linear(1)[0][rng.integers(0, 256, (3, 64, 64))] * np.float32(1 + n / 7) for n in range(4)]
    assert table_of(few, (3, 64, 64), more=lambda number: few[number % 4] * np.float32(3 + number)) is None
    assert table_of([np.ones(8, np.float32)] * 4, (8,), more=lambda _: None) is None


def test_a_table_waits_until_no_image_brings_anything_new() -> None:
    values, rng = linear(1)[0], np.random.default_rng(0)
    asked: list[int] = []

    def more(number: int) -> Array:
        asked.append(number)
        found: Array = values[rng.integers(0, 256, (1, 64, 64))]
        return found

    first = values[rng.integers(0, 100, (1, 64, 64))]
    table = table_of([first], (1, 64, 64), more=more)
    assert table is not None
    assert np.array_equal(table.values[0], values)
    assert asked[:3] == [0, 1, 2]


def test_values_looked_up_two_at_a_time_are_those_looked_up_one_by_one() -> None:
    rng = np.random.default_rng(3)
    values = np.sort(rng.standard_normal((3, 200)).astype(np.float32), axis=1)
    for shape in ((3, 7, 5), (3, 8, 6), (2, 3, 40_000), (1, 3, 33)):
        axis = shape.index(3)
        codes = rng.integers(0, 200, shape).astype(np.uint8)
        array = np.stack([values[c][codes.take(c, axis)] for c in range(3)], axis)
        encoder = Encoder(Table(axis=axis, values=values))
        np.testing.assert_array_equal(encoder.codes(array), codes, strict=True)
        for place in (0, 1, array.size - 2, array.size - 1):  # either half of a pair, and what stands behind pairs
            wrong = array.copy()
            wrong.reshape(-1).view(np.uint32)[place] ^= 1
            with pytest.raises(NotInTable, match="is not in the table"):
                encoder.codes(wrong)
