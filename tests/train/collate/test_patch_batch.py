"""A batch of uint8 patches: read by name, moved by the frameworks, and never taken for a model's arguments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import default_convert

from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import PatchBatch, to_model_inputs
from tests.train.tiny_vl import CONSTANTS, FakeVlSource, conversations, qwen3_vl

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
