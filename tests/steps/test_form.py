"""The declared form of batches: what is stored comes back, and batches are those of a plain loop."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.steps.audio.declared import Declared
from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm, FieldForm, Join, Promise, Table
from forebay.steps.form_values import raw
from forebay.steps.step import Stored
from forebay.store.layout import Array
from forebay.train.collate.forms import BatchItems
from tests.flat_constants import flat

EXACT = Promise(kind="exact")
SHAPES = ((None,), (None, 3), (3, None), (2, None, 3), (None, None), (2, None, None), (2, 3), ())
DTYPES = (("float32", "float32"), ("float32", "float16"), ("int64", "int32"), ("bool", "uint8"))


def form_of(*fields: FieldForm) -> BatchForm:
    return BatchForm(made_by="Maker", fields=fields, promise=EXACT)


def an_array(draw: st.DrawFn, field: FieldForm) -> Array:
    shape = [draw(st.integers(1, 5)) if length is None else length for length in field.shape]
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, shape)
    return values.astype(field.stored_dtype)


@st.composite
def clips(draw: st.DrawFn) -> tuple[FieldForm, list[list[Array]]]:
    shape = draw(st.sampled_from(SHAPES))
    dtype, stored_dtype = draw(st.sampled_from(DTYPES))
    joins: list[Join] = ["stack"] if not shape or shape[0] is not None else ["stack", "cat", "nest"]
    join = draw(st.sampled_from(joins))
    field = FieldForm(
        name="values",
        dtype=dtype,
        shape=shape,
        stored_dtype=stored_dtype,
        pad=1.0,
        side=draw(st.sampled_from(["right", "left"])) if join == "stack" else "right",
        multiple=1 if join == "cat" else draw(st.integers(1, 4)),
        join=join,
    )
    num_samples = draw(st.integers(1, 4))
    return field, [[an_array(draw, field) for _ in range(draw(st.integers(1, 2)))] for _ in range(num_samples)]


def expected(field: FieldForm, samples: list[list[Array]]) -> Array:
    """The batch by a plain loop."""
    units = [array for arrays in samples for array in arrays]
    if field.join != "stack":
        inner = [max(array.shape[axis] for array in units) for axis in range(len(field.shape))]
        inner = [n if axis == 0 else (field.room(n) if axis in field.grows else n) for axis, n in enumerate(inner)]

        def widened(array: Array) -> Array:
            more = [(0, 0)] + [(0, room - n) for room, n in zip(inner[1:], array.shape[1:], strict=True)]
            return np.pad(array, more, constant_values=1)

        units = [np.concatenate([widened(array) for array in arrays]) for arrays in samples]
        if field.join == "cat":
            return np.concatenate(units)
    longest = [max(unit.shape[axis] for unit in units) for axis in range(units[0].ndim)]
    rows = []
    for unit in units:
        more = []
        for axis, length in enumerate(unit.shape):
            room = -(-longest[axis] // field.multiple) * field.multiple if field.shape[axis] is None else length
            more.append((0, room - length) if field.side == "right" else (room - length, 0))
        rows.append(np.pad(unit, more, constant_values=1) if more else unit)
    return np.stack(rows)


@given(clips(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_batches_are_those_of_a_plain_loop(case: tuple[FieldForm, list[list[Array]]], dtype: torch.dtype) -> None:
    field, samples = case
    form = BatchForm.from_json(json.loads(json.dumps(form_of(field).to_json())))
    [field] = form.fields
    kept = [[field.array(field.stored(array)) for array in arrays] for arrays in samples]
    for arrays, back in zip(samples, kept, strict=True):
        assert all(map(np.array_equal, arrays, back))
    batch = collate(form, [{"values": arrays} for arrays in kept], dtype=dtype, allocate=fresh)
    wanted = torch.from_numpy(expected(field, samples).astype(np.float32))
    assert batch["values"].dtype == (dtype if field.dtype == "float32" else getattr(torch, field.dtype))
    assert torch.equal(batch["values"].to(torch.float32), wanted)


def test_specs_are_what_stored_gives() -> None:
    for shape in SHAPES:
        field = FieldForm(name="values", dtype="float32", shape=shape, stored_dtype="float32")
        array = np.arange(np.prod([4 if n is None else n for n in shape], dtype=int), dtype=np.float32)
        fields = field.stored(array.reshape([4 if n is None else n for n in shape]))
        assert list(fields) == [spec.name for spec in field.specs()], shape
        for spec in field.specs():
            assert fields[spec.name].shape[1:] == spec.shape
            assert fields[spec.name].dtype == spec.numpy_dtype
            assert fields[spec.name].flags.c_contiguous


def test_a_mask_marks_the_values_along_all_axes_that_grow() -> None:
    pixels = FieldForm(name="pixels", dtype="float32", shape=(1, None, None), stored_dtype="float32")
    mask = FieldForm(name="mask", dtype="int64", shape=(None, None), stored_dtype="int64", mask_of="pixels")
    form = form_of(pixels, mask)
    arrays = [np.ones((1, 2, 3), np.float32), np.ones((1, 4, 1), np.float32)]
    batch = collate(form, [{"pixels": [array]} for array in arrays], dtype=torch.float32, allocate=fresh)
    assert torch.equal(batch["mask"], batch["pixels"][:, 0].long())
    assert [spec.name for spec in form.specs()] == ["pixels", "pixels_shape"]


def test_a_mask_may_go_along_axes_that_do_not_grow() -> None:
    tiles = FieldForm(name="tiles", dtype="float32", shape=(None, 3, 2, 2), stored_dtype="float32", join="nest")
    mask = FieldForm(name="mask", dtype="int64", shape=(None, 2, 2), stored_dtype="int64", mask_of="tiles")
    form = form_of(tiles, mask)
    assert BatchForm.from_json(json.loads(json.dumps(form.to_json()))) == form
    arrays: list[list[Array]] = [[np.ones((n, 3, 2, 2), np.float32) for n in counts] for counts in ((2, 1), (1,))]
    batch = collate(form, [{"tiles": one} for one in arrays], dtype=torch.float32, allocate=fresh)
    assert batch["mask"].shape == (2, 3, 2, 2)
    assert torch.equal(batch["mask"], batch["tiles"][:, :, 0].long())
    with pytest.raises(ValueError, match=r"mask \[n, 3\] is no mask of tiles \[n, 3, 2, 2\]|mask \[3, n\] is no mask"):
        form_of(tiles, FieldForm(name="mask", dtype="int64", shape=(3, None), stored_dtype="int64", mask_of="tiles"))


def test_arrays_that_are_not_padded_stand_together_only_with_their_like() -> None:
    form = form_of(FieldForm(name="values", dtype="float32", shape=(1, None), stored_dtype="float32", pad=None))
    form = BatchForm.from_json(json.loads(json.dumps(form.to_json())))
    two, three = np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)
    batch = collate(form, [{"values": [two, two]}], dtype=torch.float32, allocate=fresh)
    assert batch["values"].shape == (2, 1, 2)
    with pytest.raises(ValueError, match=r"values is \[1, 2\] and \[1, 3\], and is not padded"):
        collate(form, [{"values": [two, three]}], dtype=torch.float32, allocate=fresh)


def test_cat_goes_along_the_first_axis_that_grows() -> None:
    form = form_of(FieldForm(name="values", dtype="float32", shape=(1, 2, None), stored_dtype="float32", join="cat"))
    arrays = [np.arange(2.0 * n, dtype=np.float32).reshape(1, 2, n) for n in (2, 3)]
    batch = collate(form, [{"values": arrays}], dtype=torch.float32, allocate=fresh)
    np.testing.assert_array_equal(batch["values"].numpy(), np.concatenate(arrays, axis=2))


def test_a_batch_of_a_fixed_length_refuses_what_is_longer() -> None:
    field = FieldForm(name="values", dtype="float32", shape=(None,), stored_dtype="float32", length=4, pad=-1.5)
    form = form_of(field)
    batch = collate(form, [{"values": [np.ones(3, np.float32)]}], dtype=torch.float32, allocate=fresh)
    assert batch["values"].tolist() == [[1, 1, 1, -1.5]]
    with pytest.raises(ValueError, match="values has 5, a batch has 4"):
        collate(form, [{"values": [np.ones(5, np.float32)]}], dtype=torch.float32, allocate=fresh)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4), np.float32), r"values is \[2, 4\], declared \[n, 3\]"),
        (np.zeros(3, np.float32), r"values is \[3\], declared \[n, 3\]"),
        (np.full((1, 3), 1e9, np.float32), "holds values of float32 that float16 does not"),
    ],
)
def test_what_is_not_as_declared_is_refused(array: Array, message: str) -> None:
    field = FieldForm(name="values", dtype="float32", shape=(None, 3), stored_dtype="float16")
    with pytest.raises(ValueError, match=message):
        field.stored(array)


@pytest.mark.parametrize(
    ("given", "stored", "least", "most"),
    [("int64", "uint8", 0, 255), ("int32", "int8", -128, 127), ("int64", "int32", -(1 << 31), (1 << 31) - 1)],
)
def test_whole_numbers_are_stored_narrower_only_where_all_of_them_fit(
    given: str, stored: str, least: int, most: int
) -> None:
    field = FieldForm(name="a", dtype=given, shape=(None,), stored_dtype=stored)
    ends = np.array([least, most, 0], np.int64).astype(given)
    assert field.stored(ends)["a"].tolist() == [least, most, 0]
    assert field.stored(ends[:0])["a"].dtype == stored
    for beyond in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"a holds values of int64 that {stored} does not"):
            field.stored(np.array([0, beyond, 0], np.int64))


def test_a_shape_on_disk_that_does_not_fit_its_values_is_refused() -> None:
    field = FieldForm(name="values", dtype="uint8", shape=(3, None, None), stored_dtype="uint8")
    stored = field.stored(np.zeros((3, 2, 2), np.uint8))
    for shape in ([3, 2, 3], [2, 3, 2], [3, -2, -2], [3, 4]):
        with pytest.raises(ValueError, match="values has 12 values and the shape"):
            field.array({**stored, "values_shape": np.array(shape, np.int32)})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from(["name", "dtype", "shape", "stored_dtype", "pad", "side", "join", "multiple", "mask_of", "x"]), JSON
)
def test_a_strangers_form_is_read_or_refused(name: str, value: object) -> None:
    field = FieldForm(name="values", dtype="float32", shape=(None, 3), stored_dtype="float16")
    document = form_of(field).to_json()
    document["fields"][0][name] = value
    try:
        found = BatchForm.from_json(document)
    except ValueError:
        return
    assert BatchForm.from_json(found.to_json()) == found


def test_tables_come_back_bit_for_bit_and_must_fit_their_codes() -> None:
    values = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    field = FieldForm(
        name="pixel_values",
        dtype="float32",
        shape=(3, 2, 2),
        stored_dtype="uint8",
        table=Table(axis=0, values=values),
    )
    back = FieldForm.from_json(json.loads(json.dumps(field.to_json())))
    assert back.table is not None
    assert back.table.values.tobytes() == values.tobytes()
    with pytest.raises(ValueError, match="a table of 257 values"):
        FieldForm(
            name="x",
            dtype="float32",
            shape=(3, 2, 2),
            stored_dtype="uint8",
            table=Table(axis=0, values=np.zeros((3, 257), np.float32)),
        )
    with pytest.raises(ValueError, match="a table of 3 channels of 1 along axis 1"):
        FieldForm(name="x", dtype="float32", shape=(3, 2, 2), stored_dtype="uint8", table=Table(axis=1, values=values))


def test_a_table_makes_values_of_codes() -> None:
    values = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    codes = np.random.default_rng(1).integers(0, 256, (2, 3, 4, 5)).astype(np.uint8)
    field = FieldForm(
        name="pixel_values",
        dtype="float32",
        shape=(3, 4, 5),
        stored_dtype="uint8",
        table=Table(axis=0, values=values),
    )
    batch = collate(form_of(field), [{"pixel_values": list(codes)}], dtype=torch.float32, allocate=fresh)
    wanted = values[np.arange(3)[None, :, None, None], codes]
    np.testing.assert_array_equal(raw(batch["pixel_values"]), wanted)


def test_a_cache_of_declared_features_collates_and_counts() -> None:
    field = FieldForm(name="features", dtype="float32", shape=(2, None), stored_dtype="float32", multiple=4)
    mask = FieldForm(name="mask", dtype="int32", shape=(None,), stored_dtype="int32", mask_of="features")
    form = form_of(field, mask)
    fields = {spec.name: replace(spec, group="audio") for spec in form.specs()}
    stored = Stored("cache x", flat(features="declared", form=form.to_json()), fields)
    made = Declared.batch(stored)
    with pytest.raises(ConfigError, match=r"cache x: .* the field features is None, the form wants"):
        Declared.batch(replace(stored, fields={}))
    batches = BatchItems(form=pickle.loads(pickle.dumps(made)))  # noqa: S301  our own
    samples = [field.stored(np.full((2, n), n, np.float32)) for n in (3, 5)]
    batch = batches.collate(samples, dtype=torch.float32, allocate=fresh)
    assert batch["features"].shape == (2, 2, 8)
    assert batch["features"][0, 0].tolist() == [3, 3, 3, 0, 0, 0, 0, 0]
    assert batch["mask"].sum(dim=1).tolist() == [3, 5]
    assert batches.count(samples) == (8, 16)
    short = BatchItems(
        form=Declared.batch(
            replace(stored, constants=flat(features="declared", form=form_of(replace(field, length=4)).to_json()))
        )
    )
    with pytest.raises(ConfigError, match=r"stand in no batch together: features has 5, a batch has 4.*batch_size = 1"):
        short.collate(samples, dtype=torch.float32, allocate=fresh)
