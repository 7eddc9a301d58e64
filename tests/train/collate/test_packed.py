"""Batches of packs against a plain loop over their samples."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import default_convert

from forebay.errors import CacheMismatchError, ConfigError, PlanError
from forebay.train.collate.mrope import mrope_positions
from forebay.train.collate.packed import PackCollator, PackShapes
from forebay.train.collate.patches import PatchBatch, fields_of, to_model_inputs
from forebay.train.loop.schedule import count_samples
from forebay.train.prefetch import BufferRing
from tests.train.tiny_vl import (
    CONSTANTS,
    IMAGE,
    MERGE_SIZE,
    PAD,
    WIDTH,
    FakeVlSource,
    conversation,
    conversations,
    expanded,
    qwen3_vl,
)

SHAPES = PackShapes(seq_len=328, patch_classes=(64, 128, 512))


def samples_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns random samples, the first with an image, of at most 200 tokens together, so that padding has room."""
    samples = conversations(seed, count)
    while sum(len(sample["input_ids"]) for sample in samples) > 200:
        samples.pop()
    return samples


def stored(collator: PackCollator, samples: Sequence[dict[str, Any]]) -> PatchBatch:
    """Returns the batch of a collator without a dtype."""
    batch = collator(samples)
    assert isinstance(batch, PatchBatch)
    return batch


def assert_samples_stand_in(batch: PatchBatch, samples: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Returns where tokens and patches of the padding begin; the batch holds the samples before that, one by one."""
    token = patch = image = 0
    for sample in samples:
        ids = sample["input_ids"]
        span = slice(token, token + len(ids))
        labels = np.where(sample["label_mask"] == 1, ids, -100)
        labels[0] = -100
        positions = mrope_positions(ids, sample["image_grid_thw"], image_token_id=IMAGE, merge_size=MERGE_SIZE)
        assert batch["input_ids"][0, span].tolist() == ids.tolist()
        assert batch["labels"][0, span].tolist() == labels.tolist()
        assert batch["position_ids"][0, 0, span].tolist() == list(range(len(ids)))
        assert np.array_equal(batch["position_ids"][1:, 0, span].numpy(), positions)
        for patches in sample["patches"]:
            assert np.array_equal(batch["patches"][patch : patch + len(patches)].numpy(), patches)
            patch += len(patches)
        end = image + len(sample["patches"])
        assert np.array_equal(batch["image_grid_thw"][image:end].numpy(), sample["image_grid_thw"])
        token, image = span.stop, end
    return token, patch


@given(seed=st.integers(0, 999), count=st.integers(1, 5), is_fixed=st.booleans(), varlen=st.booleans())
def test_a_batch_holds_its_samples_and_padding_apart(seed: int, count: int, *, is_fixed: bool, varlen: bool) -> None:
    samples = samples_of(seed, count)
    collator = PackCollator(FakeVlSource(), shapes=SHAPES if is_fixed else None, dtype=None, varlen=varlen)
    batch = stored(collator, samples)
    token, patch = assert_samples_stand_in(batch, samples)
    total = batch["input_ids"].shape[1]
    assert total == (SHAPES.seq_len if is_fixed else token)
    assert len(batch["patches"]) in (SHAPES.patch_classes if is_fixed else [patch])
    num_images = (len(batch["patches"]) - patch) // MERGE_SIZE**2
    assert batch["input_ids"][0, token:].tolist() == [IMAGE] * num_images + [PAD] * (total - token - num_images)
    assert (batch["labels"][0, token:] == -100).all()
    assert (batch["position_ids"][:, 0, token:] == torch.arange(total - token)).all()
    assert not batch["patches"][patch:].any()
    assert int(batch["image_grid_thw"].prod(1).sum()) == len(batch["patches"])
    assert (batch["image_grid_thw"][:, 1:] % MERGE_SIZE == 0).all()
    assert collator.count_frames(samples) == (token, total)
    assert count_samples(batch) == len(samples)
    assert {name: value.dtype for name, value in batch.fields.items() if isinstance(value, torch.Tensor)}.items() >= {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "image_grid_thw": torch.int64,
        "patches": torch.uint8,
    }.items()
    if not varlen:
        assert not {"cu_seq_lens_q", "max_length_q"} & set(batch.fields)
        return
    lengths = [*(len(sample["input_ids"]) for sample in samples), *([total - token] if total > token else [])]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["cu_seq_lens_q"].diff().tolist() == batch["cu_seq_lens_k"].diff().tolist() == lengths
    assert type(batch["max_length_q"]) is int
    assert batch["max_length_q"] == batch["max_length_k"] == max(lengths)


@pytest.mark.parametrize("shapes", [None, SHAPES])
def test_a_pack_without_images_has_one_of_padding(shapes: PackShapes | None) -> None:
    samples = [conversation(np.random.default_rng(i), []) for i in range(2)]
    batch = stored(PackCollator(FakeVlSource(), shapes=shapes, dtype=None), samples)
    token, _ = assert_samples_stand_in(batch, samples)
    num_patches = 4 if shapes is None else 64
    assert batch["patches"].shape == (num_patches, WIDTH)
    assert batch["image_grid_thw"].tolist() == [[1, 2, num_patches // 2]]
    assert (batch["input_ids"][0, token:] == IMAGE).sum() == num_patches // 4


def test_large_padding_is_several_images() -> None:
    shapes = PackShapes(seq_len=700, patch_classes=(4 * 600,))
    batch = PackCollator(FakeVlSource(), shapes=shapes)([conversation(np.random.default_rng(0), [(4, 4)])])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 512], [1, 2, 512], [1, 2, 168]]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shapes=st.sampled_from([None, SHAPES]),
)
def test_host_expansion_gives_what_the_device_would_make(
    seed: int, dtype: torch.dtype, shapes: PackShapes | None
) -> None:
    samples = samples_of(seed, 3)
    kept = stored(PackCollator(FakeVlSource(), shapes=shapes, dtype=None), samples).fields
    made = PackCollator(FakeVlSource(), shapes=shapes, dtype=dtype)(samples)
    assert isinstance(made, dict)
    wanted = expanded(kept.pop("patches"), dtype=dtype)
    assert torch.equal(made.pop("pixel_values"), wanted)
    assert made.pop("use_cache") is False
    assert list(kept) == list(made)
    assert all(torch.equal(kept[name], made[name]) for name in kept)


@settings(max_examples=15)
@given(seed=st.integers(0, 99), dtype=st.sampled_from([None, torch.bfloat16]), shapes=st.sampled_from([None, SHAPES]))
def test_every_element_of_reused_memory_is_written(
    seed: int, dtype: torch.dtype | None, shapes: PackShapes | None
) -> None:
    ring = BufferRing(max_free=4, least_bytes=0)

    def poisoned(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        return ring.take(name, shape, dtype=dtype).fill_(torch.nan if dtype.is_floating_point else 77)

    collator = PackCollator(FakeVlSource(), shapes=shapes, dtype=dtype, varlen=True)
    samples = samples_of(seed, 4)
    wanted = fields_of(collator(samples))
    for _ in range(2):
        found = collator.collate(samples, allocate=poisoned)
        for name, value in wanted.items():
            assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def test_tensors_are_collated_as_arrays_are_and_alias_nothing() -> None:
    samples = samples_of(3, 3)
    tensors = [
        {
            name: tuple(torch.tensor(part) for part in value) if name == "patches" else torch.tensor(value)
            for name, value in sample.items()
        }
        for sample in samples
    ]
    collator = pickle.loads(pickle.dumps(PackCollator(FakeVlSource(), dtype=None)))  # noqa: S301 - our own bytes
    batch, other = collator(samples).fields, collator(tensors).fields
    assert all(torch.equal(batch[name], other[name]) for name in batch)
    for value in batch.values():
        assert not any(np.shares_memory(value.numpy(), part) for sample in samples for part in sample["patches"])


def test_samples_without_targets_are_not_counted() -> None:
    samples = samples_of(4, 3)
    samples[1]["label_mask"][:] = 0
    assert count_samples(PackCollator(FakeVlSource())(samples)) == len(samples) - 1
    assert count_samples({"labels": torch.zeros(3, 5)}) == 3


def test_images_that_are_not_those_of_the_grids_are_refused() -> None:
    sample = conversation(np.random.default_rng(0), [(2, 4), (4, 4)])
    wrong = {**sample, "patches": sample["patches"][::-1]}
    with pytest.raises(CacheMismatchError, match=r"images have \[16, 8\] patches, image_grid_thw wants \[8, 16\]"):
        PackCollator(FakeVlSource())([wrong])


def test_packs_that_cannot_be_batches_are_refused() -> None:
    collator = PackCollator(FakeVlSource(), shapes=PackShapes(seq_len=20, patch_classes=(64,)))
    with pytest.raises(PlanError, match=r"a pack has 23 tokens and 32 patches, .* 20 tokens and 64 patches"):
        collator([conversation(np.random.default_rng(0), [(4, 8)])])
    with pytest.raises(ValueError, match="at least one sample"):
        collator([])


@pytest.mark.parametrize("name", ["image_token_id", "pad_token_id", "merge_size", "patch_table"])
def test_constants_that_are_missing_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"its metadata has no {name}, .* forebay preprocess"):
        PackCollator(FakeVlSource((), **{name: None}))


def test_settings_that_give_no_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype of pixel_values is torch\.uint8"):
        PackCollator(FakeVlSource(), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="merge_size is 3, that of the shapes is 2"):
        PackCollator(FakeVlSource(merge_size=3), shapes=SHAPES)


@given(st.integers(0, 100), st.integers(0, 20))
def test_a_pack_has_the_smallest_shape_with_room_for_its_padding(tokens: int, images: int) -> None:
    shapes, tokens = PackShapes(seq_len=100, patch_classes=(8, 80)), max(tokens, images)
    room = [size for size in (8, 80) if size >= 4 * images and tokens + size // 4 - images <= 100]
    if room:
        assert shapes.num_patches(tokens, 4 * images) == room[0]
    else:
        with pytest.raises(PlanError, match=f"{tokens} tokens and {4 * images} patches, .* 8 or 80 patches"):
            shapes.num_patches(tokens, 4 * images)


@pytest.mark.parametrize("classes", [(6,), (0, 4), (8, 4), (4, 4)])
def test_impossible_classes_are_refused(classes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="wanted rising multiples of 4"):
        PackShapes(seq_len=100, patch_classes=classes)


GRIDS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda hw: (2 * hw[0], 2 * hw[1])), max_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return qwen3_vl(tmp_path_factory.mktemp("vl"))


def ours(sample: dict[str, Any]) -> np.ndarray[Any, Any]:
    return mrope_positions(sample["input_ids"], sample["image_grid_thw"], image_token_id=IMAGE, merge_size=MERGE_SIZE)


@given(grids=GRIDS, num_text=st.integers(0, 9), seed=st.integers(0, 99))
def test_positions_are_those_of_the_model(model: Any, grids: list[tuple[int, int]], num_text: int, seed: int) -> None:
    sample = conversation(np.random.default_rng(seed), grids, num_text=num_text)
    ids = torch.from_numpy(sample["input_ids"]).long()[None]
    wanted, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE).int(),
        image_grid_thw=torch.from_numpy(sample["image_grid_thw"]) if grids else None,
    )
    found = ours(sample)
    assert found.dtype == np.int64
    assert np.array_equal(found, wanted[:, 0].numpy())


@given(packed=st.lists(st.tuples(GRIDS, st.integers(0, 9)), min_size=1, max_size=5))
def test_segments_of_a_pack_have_the_positions_of_samples_alone(
    packed: list[tuple[list[tuple[int, int]], int]],
) -> None:
    samples = [conversation(np.random.default_rng(i), grids, num_text=n) for i, (grids, n) in enumerate(packed)]
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    out = np.full((3, lengths.sum()), -1)
    mrope_positions(
        np.concatenate([sample["input_ids"] for sample in samples]),
        np.concatenate([sample["image_grid_thw"] for sample in samples]),
        image_token_id=IMAGE,
        merge_size=MERGE_SIZE,
        starts=np.cumsum(lengths) - lengths,
        out=out,
    )
    assert np.array_equal(out, np.concatenate([ours(sample) for sample in samples], axis=1))


def test_other_merge_size() -> None:
    ids = np.array([5, *[IMAGE] * 2, 5])
    found = mrope_positions(ids, np.array([[1, 3, 6]]), image_token_id=IMAGE, merge_size=3)
    assert found.tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [5, IMAGE, IMAGE, IMAGE, 5]}, "hold 3 image tokens, image_grid_thw wants 4"),
        ({"input_ids": [5, IMAGE, IMAGE, 5, IMAGE, IMAGE]}, "do not stand together"),
        ({"image_grid_thw": [[2, 4, 4]]}, "several frames"),
        ({"image_grid_thw": [[1, 4, 4], [1, 0, 4]]}, "without patches"),
    ],
)
def test_image_tokens_that_are_not_those_of_the_grids_are_refused(change: dict[str, Any], message: str) -> None:
    sample = {"input_ids": [5, *[IMAGE] * 4, 5], "image_grid_thw": [[1, 4, 4]], **change}
    with pytest.raises(CacheMismatchError, match=message):
        ours({name: np.array(value) for name, value in sample.items()})


SAMPLES = conversations(7, 3)


@pytest.fixture
def batch() -> PatchBatch:
    made = PackCollator(FakeVlSource(), dtype=None, varlen=True)(SAMPLES)
    assert isinstance(made, PatchBatch)
    return made


def test_fields_are_read_by_name(batch: PatchBatch) -> None:
    assert batch["patches"].dtype == torch.uint8
    assert "patches" in batch
    assert "pixel_values" not in batch
    assert len(batch) == len(batch.fields) == 9
    assert repr(batch).startswith("PatchBatch(input_ids, labels, ")


def test_a_model_is_never_given_patches(batch: PatchBatch, tmp_path: Path) -> None:
    model = qwen3_vl(tmp_path)
    for call in (lambda: model(**batch), lambda: dict(batch), lambda: {**batch}):
        with pytest.raises(TypeError, match=r"to_model_inputs\(batch, constants\).*loader\.pixels = \"float32\""):
            call()
    assert not isinstance(batch, (Mapping, Iterable))
    with pytest.raises(TypeError, match="not iterable"):
        iter(batch)  # type: ignore[call-overload]
    for name in ("get", "items", "pop", "values"):
        with pytest.raises(AttributeError, match=rf"PatchBatch has no attribute '{name}': .*to_model_inputs"):
            getattr(batch, name)


def test_model_inputs_of_it_are_the_default_batch(batch: PatchBatch) -> None:
    wanted = PackCollator(FakeVlSource(), varlen=True)(SAMPLES)
    found = to_model_inputs(batch, CONSTANTS)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(wanted[name])) for name in found)
    assert to_model_inputs(wanted, {}).keys() == wanted.keys()


@pytest.mark.parametrize("move", [send_to_device, move_data_to_device])
def test_accelerate_and_lightning_move_it_whole(batch: PatchBatch, move: Any) -> None:
    moved = move(batch, torch.device("meta"))
    assert isinstance(moved, PatchBatch)
    assert {value.device.type for value in moved.fields.values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved["max_length_q"] == batch["max_length_q"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch)), default_convert])  # noqa: S301
def test_copies_are_of_the_same_form(batch: PatchBatch, copied: Any) -> None:
    found = copied(batch)
    assert isinstance(found, PatchBatch)
    assert torch.equal(found["patches"], batch["patches"])
