"""Rows of a new embedding: the copies, and the statistics of what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import WhisperConfig, WhisperForConditionalGeneration

from forebay.errors import ForebayError
from forebay.train.vocabulary_ids import Moves, Spread

NUM_DRAWS = 20_000


def correlated(num_rows: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """Returns rows whose columns depend on each other and have very different scales."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(width, width)) * np.geomspace(0.01, 3, width)
    return torch.from_numpy(rng.normal(size=(num_rows, width)) @ mix + rng.normal(size=width)).float()


def names(count: int) -> list[str]:
    return [f"token {number}" for number in range(count)]


@pytest.mark.parametrize("width", [1, 6, 16])
@pytest.mark.few("6")
def test_draws_have_the_mean_and_the_whole_covariance_of_the_rows(width: int) -> None:
    rows = correlated(500, width)
    drawn = Spread.of(rows, range(500)).draw(names(NUM_DRAWS), seed=1, name="input")
    mean, covariance = rows.double().mean(0), torch.cov(rows.double().T).reshape(width, width)
    scale = covariance.diagonal().sqrt()
    # The error of a mean of n draws is scale / sqrt(n), of a covariance at most scale_i scale_j sqrt(2 / n). 6 of these
    # among 16 + 136 numbers is met once in a million seeds.
    assert ((drawn.mean(0) - mean).abs() / scale).max() < 6 / math.sqrt(NUM_DRAWS)
    found = torch.cov(drawn.T).reshape(width, width)
    assert ((found - covariance).abs() / torch.outer(scale, scale)).max() < 6 * math.sqrt(2 / NUM_DRAWS)


def test_transformers_draws_the_mean() -> None:
    """The docstring of `Spread.of` says this of `mean_resizing`, and why it is not used."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "pad_token_id": 0}
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=200, **sizes, **heads))
    old = model.get_input_embeddings().weight.detach().clone()
    new = model.resize_token_embeddings(300, mean_resizing=True).weight.detach()
    assert (new[200:] - old.mean(0)).abs().max() < 1e-3 * old.std()
    spread = Spread.of(old, range(200)).draw(names(100), seed=0, name="input")
    assert spread.std() == pytest.approx(old.std().item(), rel=0.1)


def test_fewer_rows_than_columns_and_columns_of_zeros_have_a_factor() -> None:
    rows = correlated(5, 12)
    rows[:, 3] = 0
    drawn = Spread.of(rows, range(5)).draw(names(50), seed=0, name="input")
    centred = rows.double() - rows.double().mean(0)
    plane = torch.linalg.svd(centred).Vh[:4]  # five rows span four directions around their mean
    offset = drawn - rows.double().mean(0)
    beside = offset - offset @ plane.T @ plane
    assert beside.abs().max() < 1e-2 * offset.abs().max()
    assert offset.abs().max() > 0.1


def test_equal_rows_and_one_row_give_themselves() -> None:
    for count in (1, 7):
        rows = torch.arange(4.0).repeat(count, 1)
        drawn = Spread.of(rows, range(count)).draw(names(3), seed=0, name="input")
        assert torch.equal(drawn, rows[:1].double().expand(3, -1))


def test_numbers_that_are_not_finite_are_refused() -> None:
    rows = correlated(20, 4)
    rows[3, 2] = math.inf
    with pytest.raises(ForebayError, match=r"the covariance of the embeddings has no Cholesky factor"):
        Spread.of(rows, range(20))


@given(st.data())
def test_a_row_depends_on_seed_matrix_and_token_alone(data: st.DataObject) -> None:
    """Neither on the order of the tokens nor on how many there are, but for the rounding of a product in float64."""
    spread = Spread.of(correlated(60, 33), range(60))
    tokens = data.draw(st.lists(st.text(st.characters(codec=None)), min_size=1, max_size=700, unique=True))
    drawn = dict(zip(tokens, spread.draw(tokens, seed=7, name="input"), strict=True))
    part = data.draw(st.lists(st.sampled_from(tokens), unique=True, min_size=1))
    for token, row in zip(part, spread.draw(part, seed=7, name="input"), strict=True):
        torch.testing.assert_close(row, drawn[token], rtol=1e-12, atol=1e-12)
    for seed, name in ((8, "input"), (7, "output")):
        assert not torch.equal(spread.draw(part[:1], seed=seed, name=name)[0], drawn[part[0]])


@given(st.data())
def test_moves_copy_bit_for_bit_and_pass_over_rows_without_a_token(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    old_size, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    named = sorted(data.draw(st.sets(st.integers(0, old_size - 1), min_size=1)))
    targets = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=len(named)))
    copied = dict(zip(targets, data.draw(st.permutations(named)), strict=False))
    drawn = {new: f"token {new}" for new in range(size) if new not in copied}
    old = correlated(old_size, 5).to(dtype)
    moves = Moves(size=size, copied=copied, drawn=drawn, named=named)
    new = moves.apply(old, seed=3, name="input")
    assert (new.dtype, new.shape) == (dtype, (size, 5))
    assert all(torch.equal(new[target], old[source]) for target, source in copied.items())
    if drawn:
        wanted = Spread.of(old[named], range(len(named))).draw(list(drawn.values()), seed=3, name="input")
        assert torch.equal(new[list(drawn)], wanted.to(dtype))
