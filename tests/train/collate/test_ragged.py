"""Batches that a device finishes are those of the host, bit for bit; ragged batches are what the cache holds."""

from __future__ import annotations

import itertools
import pickle
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.steps.audio.w2v_bert import NormalisedPairs
from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_values import Table
from forebay.store.layout import FieldSpec
from forebay.train import loader as loader_module
from forebay.train.collate.collator import Collator
from forebay.train.collate.patches import as_filler, weight_of
from forebay.train.collate.ragged import Crossing, RaggedBatch, RaggedCollator, can_cross
from tests.train.collate.test_collator import KINDS, ragged
from tests.train.fake_source import FakeSource
from tests.train.test_device import FakeStream, make_loader, same

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@given(source=ragged(), dtype=st.sampled_from(DTYPES), side=st.booleans())
def test_what_a_device_finishes_is_what_the_host_makes(source: FakeSource, dtype: torch.dtype, *, side: bool) -> None:
    padding_side: Literal["left", "right"] = "left" if side else "right"
    settings: dict[str, Any] = {"dtype": dtype, "padding_side": padding_side}
    wanted = Collator(source, **settings)(source.samples)
    device = Collator(source, **settings, on_device=True)
    crossed = device(source.samples)
    found = device.finish(dict(crossed))
    assert device.is_finished_later == (source.constants.get("features") not in (None, "none"))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].stride()) == (value.dtype, value.stride())
        assert torch.equal(found[name], value), name


def test_values_cross_over_as_they_are_stored_and_without_padding() -> None:
    source = FakeSource([100, 1500, 7], features="qwen3_asr", prompt="plain")
    crossed = Collator(source, on_device=True)(source.samples)
    values = crossed["input_features"]
    assert (values.dtype, values.shape, values.is_contiguous()) == (torch.float16, (1607, 128), True)
    assert np.array_equal(values.numpy(), np.concatenate([s["input_features"] for s in source.samples]))
    assert Collator(source)(source.samples)["input_features"].numel() > 2.8 * values.numel()


@st.composite
def fields(draw: st.DrawFn) -> tuple[FieldForm, list[np.ndarray[Any, Any]]]:
    """Returns a field of one axis that grows, anywhere, and arrays as they lie on disk."""
    rank, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(["float16", "float32", "int16", "uint8", "uint16"]))
    axis = draw(st.integers(0, rank - 1))
    shape = [None if place == axis else draw(st.integers(1, 4)) for place in range(rank)]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    more: dict[str, Any] = {"side": draw(st.sampled_from(["left", "right"])), "multiple": draw(st.integers(1, 5))}
    batch_dtype = "float32"
    if dtype == "int16":
        more["scale"] = 2.0**-15
    elif dtype.startswith("u"):
        others = [place for place in range(rank) if place != axis]
        along = draw(st.sampled_from(others)) if others else axis
        channels = int(shape[along] or 1)
        values = rng.normal(size=(channels, 200)).astype(np.float32)
        more["table"] = Table(axis=along, values=values)
    form = FieldForm(
        name="values",
        dtype=batch_dtype,
        shape=tuple(shape),
        stored_dtype=dtype,
        pad=draw(st.sampled_from([0.0, -1.5])),
        **more,
    )
    inner = [length for length in shape if length is not None]
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
    made = [rng.integers(0, 200, (length, *inner)).astype(dtype) for length in lengths]
    return form, made


@given(drawn=fields(), dtype=st.sampled_from(DTYPES))
def test_any_declared_field_of_one_axis_that_grows_crosses_over(
    drawn: tuple[FieldForm, list[np.ndarray[Any, Any]]], dtype: torch.dtype
) -> None:
    field, lines = drawn
    mask = FieldForm(name="mask", dtype="int32", shape=(None,), stored_dtype="uint8", mask_of="values")
    form = BatchForm.exact("a test", field, mask, field.lengths())
    assert can_cross(form)
    columns = [(line,) for line in lines]
    rows = [{"values": line} for line in columns]
    wanted = collate(form, rows, dtype=dtype, allocate=fresh, are_rows=True)
    crossing = Crossing(form, dtype)
    found = crossing.finish(crossing.collate({"values": columns}, allocate=fresh))
    assert set(found) == {"values", "mask", "values_lengths"}
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_what_a_device_cannot_finish_is_made_on_the_host() -> None:
    image = FieldForm(name="pixels", dtype="float32", shape=(3, None, None), stored_dtype="float32")
    nested = FieldForm(name="pixels", dtype="float32", shape=(3, 4, 4), stored_dtype="float32", join="nest")
    crop = FieldForm(name="x", dtype="float32", shape=(None, 80), stored_dtype="float32", finish="w2v_bert", length=4)
    assert not any(can_cross(BatchForm.exact("a test", field)) for field in (image, nested, crop))


@pytest.mark.parametrize("lengths", [[2, 2], [2, 9, 300], [1500, 1499, 3], [3000]])
def test_normalisation_by_clip_on_a_device_is_within_its_promise(lengths: list[int]) -> None:
    """The operation of a GPU, run here; a CPU does it clip by clip as the host does."""
    rng = np.random.default_rng(1)
    lines = torch.from_numpy((rng.normal(size=(sum(lengths), 80)) * 4 - 9).astype(np.float32))
    counts, room = torch.tensor(lengths), max(lengths) + max(lengths) % 2
    wanted = NormalisedPairs().batch(lines, counts, room)
    found = NormalisedPairs.on_device(lines, counts, room)
    assert found.shape == wanted.shape == (len(lengths), room // 2, 160)
    assert (found - wanted).abs().max() < 2e-6
    for row, length in zip(found, lengths, strict=True):
        assert not row.reshape(-1, 80)[length:].any()


@pytest.mark.parametrize(("features", "prompt", "dtype"), KINDS)
@pytest.mark.few
def test_a_ragged_batch_is_what_is_stored_one_behind_the_other(features: str, prompt: str, dtype: str) -> None:
    source = FakeSource([40, 700, 13], features=features, prompt=prompt, dtype=dtype)
    collator = RaggedCollator(source.fields.values())
    if not source.fields:
        return
    batch = collator.collate(source.samples, allocate=fresh)
    for name in source.fields:
        arrays = [sample[name] for sample in source.samples]
        assert np.array_equal(batch[name].numpy(), np.concatenate(arrays))
        assert batch[name].numpy().dtype == arrays[0].dtype
        assert batch[f"{name}_offsets"].tolist() == [0, *itertools.accumulate(map(len, arrays))]
        if arrays[0].ndim > 1:
            parts = batch.nested(name).unbind()
            assert all(np.array_equal(one.numpy(), array) for one, array in zip(parts, arrays, strict=True))
    assert collator.count_frames(source.samples) == (753, 753)


def test_a_ragged_batch_of_listed_images_says_whose_they_are() -> None:
    rng = np.random.default_rng(0)
    fields = {"patches": FieldSpec(name="patches", dtype="uint8", shape=(6,), group="image")}
    images = [rng.integers(0, 255, (rows, 6), np.uint8) for rows in (4, 2, 7)]
    batch = RaggedCollator(fields.values()).collate(
        [{"patches": (images[0], images[1])}, {"patches": ()}, {"patches": (images[2],)}], allocate=fresh
    )
    assert np.array_equal(batch["patches"].numpy(), np.concatenate(images))
    assert batch["patches_offsets"].tolist() == [0, 4, 6, 13]
    assert batch["patches_items"].tolist() == [0, 2, 2, 3]
    bare = RaggedCollator(fields.values()).collate([{"patches": ()}, {"patches": ()}], allocate=fresh)
    assert bare["patches"].shape == (0, 6)
    assert bare["patches_items"].tolist() == [0, 0, 0]


def test_a_ragged_batch_is_no_mapping_and_goes_from_process_to_process() -> None:
    source = FakeSource([40, 70])
    batch = RaggedCollator(source.fields.values()).collate(source.samples, allocate=fresh)
    with pytest.raises(TypeError, match=r"a ragged batch is not what a model takes: .*batch\.nested\(name\)"):
        dict(**batch)
    copy = pickle.loads(pickle.dumps(batch))  # noqa: S301 - our own bytes
    assert isinstance(copy, RaggedBatch)
    assert torch.equal(copy["input_features"], batch["input_features"])
    assert repr(copy) == "RaggedBatch(input_features, input_features_offsets)"
    filler = as_filler(copy)
    assert isinstance(filler, RaggedBatch)
    assert (weight_of(batch), weight_of(filler)) == (1, 0)


def test_a_loader_of_a_device_copies_ragged_values_and_hands_out_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source, copied = FakeSource(list(range(150, 190))), list[torch.Tensor]()

    class Stream(FakeStream):
        def start(self, batch: Any, finish: Any = None) -> Any:
            copied.append(batch["input_features"])
            return super().start(batch, finish)

    wanted = [{name: tensor.clone() for name, tensor in batch.items()} for batch in make_loader(source)]
    monkeypatch.setattr(loader_module, "side_stream", lambda device: Stream())
    found = list(make_loader(source, device="fake"))
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert {(values.dtype, values.ndim) for values in copied} == {(torch.float16, 2)}


def test_a_loader_hands_out_ragged_batches_where_they_are_asked_for() -> None:
    source = FakeSource(list(range(150, 190)))
    loader = make_loader(source, form="ragged")
    seen = 0
    for batch in loader:
        assert isinstance(batch, RaggedBatch)
        wanted = np.concatenate([source.samples[index]["input_features"] for index in loader.indices])
        assert np.array_equal(batch["input_features"].numpy(), wanted)
        seen += len(batch["input_features"])
    assert loader.report()["frames"] == seen == sum(range(150, 190))
    assert loader.report()["padded_frames"] == 0


def test_settings_that_contradict_ragged_batches_are_refused() -> None:
    source = FakeSource([200, 300], features="waveform", prompt=None, dtype="int16")
    for settings, message in (
        ({"crop_s": 0.01}, "loader.crop_s is 0.01: crops have one length"),
        ({"as_tensordict": True}, "as_tensordict is true"),
        ({"collator": Collator(source)}, 'plan.kind is "pack": packs have no padding already'),
    ):
        with pytest.raises(ConfigError, match=message):
            make_loader(source, form="ragged", **settings)
