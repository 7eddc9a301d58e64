"""Positions against the model's own `get_rope_index`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CacheMismatchError
from forebay.train.collate.packed import mrope_positions
from tests.train.tiny_vl import IMAGE, MERGE_SIZE, conversation, qwen3_vl

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
