"""uint8 patches to the model's inputs, against looking up and repeating."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.steps.batch import collate, fresh
from forebay.steps.image.qwen2_vl import patch_form
from forebay.steps.image.tables import expand, expand_on_device
from forebay.train.collate.patches import to_model_inputs
from tests.train.tiny_vl import CONSTANTS, TABLE, conversation, pixel_values


def plain(patches: torch.Tensor, table: torch.Tensor, *, copies: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the definition: `table[channel, value]`, each plane `copies` times."""
    planes = patches.view(len(patches), 3, patches.shape[1] // 3).long()
    channels = torch.arange(3)[None, :, None]
    return table[channels, planes].to(dtype)[:, :, None].expand(-1, -1, copies, -1).flatten(1)


@given(
    num_patches=st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, 129])),
    patch_size=st.sampled_from([2, 3, 14]),
    copies=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_pixels_are_the_table_looked_up_and_repeated(
    num_patches: int, patch_size: int, copies: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randint(0, 256, (num_patches, 3 * patch_size**2), dtype=torch.uint8, generator=generator)
    table = torch.randn(3, 256, generator=generator)
    wanted = plain(patches, table, copies=copies, dtype=dtype)
    out, where = torch.full(wanted.shape, torch.nan, dtype=dtype), {"inner": patch_size**2, "copies": copies}
    expand(patches.numpy(), table.numpy(), 1, out, **where)
    assert torch.equal(out, wanted)
    assert torch.equal(expand_on_device(patches, table, 1, dtype=dtype, **where), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA; the test above runs the same gathers on the host"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patches_expanded_on_a_cuda_device_are_those_of_the_host(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    patches = torch.randint(
        0, 256, (9_000, 768), dtype=torch.uint8, generator=generator
    )  # more than one piece of a gather
    table = torch.randn(3, 256, generator=generator)
    found = expand_on_device(patches.cuda(), table.cuda(), 1, dtype=dtype, inner=256, copies=2)
    assert found.is_cuda
    assert torch.equal(found.cpu(), expand_on_device(patches, table, 1, dtype=dtype, inner=256, copies=2))


def test_read_only_patches_are_expanded_by_a_pickled_copy() -> None:
    sample = conversation(np.random.default_rng(0), [(4, 6)])
    form = pickle.loads(pickle.dumps(patch_form(CONSTANTS)))  # noqa: S301 - our own bytes
    batch = collate(form, [form.items(sample)], dtype=torch.float32, allocate=fresh, are_rows=True)
    assert torch.equal(batch["pixel_values"], pixel_values(sample))


def test_model_inputs_are_expanded_and_without_a_cache() -> None:
    sample = conversation(np.random.default_rng(1), [(2, 4), (6, 2)])
    batch: dict[str, Any] = {
        "input_ids": torch.arange(3)[None],
        "patches": torch.from_numpy(np.concatenate(sample["patches"])),
        "max_length_q": 3,
    }
    inputs = to_model_inputs(batch, CONSTANTS)
    assert set(inputs) == {"input_ids", "pixel_values", "max_length_q", "use_cache"}
    assert inputs["use_cache"] is False
    assert inputs["max_length_q"] == 3
    assert torch.equal(inputs["pixel_values"], pixel_values(sample))
    half = to_model_inputs(batch, CONSTANTS, dtype=torch.bfloat16)["pixel_values"]
    assert torch.equal(half, pixel_values(sample).bfloat16())
    assert "patches" in batch


def test_constants_give_the_table_bit_for_bit() -> None:
    [_, pixels] = patch_form(CONSTANTS).fields
    assert pixels.table is not None
    np.testing.assert_array_equal(pixels.table.values, TABLE)


def test_patches_without_their_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"need the patch_table .* constants=loader\.source\.constants"):
        to_model_inputs({"patches": torch.zeros(4, 768, dtype=torch.uint8)}, {})
