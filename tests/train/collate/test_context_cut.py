"""Packs cut for context parallel: every token on one rank, against plain loops, and equal work of causal attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.train import context_places, cut_for_context
from forebay.train.collate.packed import PackCollator
from tests.train.tiny_vl import PAD, FakeVlSource, conversations

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def by_hand(lengths: list[int], ranks: int, unit: int, layout: str) -> tuple[list[list[int]], list[int]]:
    """Returns tokens by rank, and bounds, by loops over every token."""
    wholes = lengths if layout == "zigzag" else [sum(lengths)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    first, bounds = 0, [0]
    for length in wholes:
        tokens = [*range(first, first + length)]
        while len(tokens) % unit:
            tokens.append(-1)
        size = len(tokens) // (2 * ranks)
        for rank in range(ranks):
            for chunk in (rank, 2 * ranks - 1 - rank):
                found[rank] += tokens[chunk * size : (chunk + 1) * size]
        first += length
        bounds.append(bounds[-1] + len(tokens))
    if layout == "halves":
        bounds = [*np.cumsum([0, *lengths[:-1]]).tolist(), bounds[-1]]
    return found, bounds


@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["zigzag", "halves"]), st.sampled_from([None, 3]))
def test_ranks_have_the_chunks_of_a_plain_loop(lengths: list[int], ranks: int, layout: Any, times: int | None) -> None:
    unit = 2 * ranks * (times or 1)
    places, bounds = context_places(
        np.array(lengths), ranks=ranks, layout=layout, pad_to_multiple_of=None if times is None else unit
    )
    wanted, ends = by_hand(lengths, ranks, unit, layout)
    assert places.tolist() == wanted
    assert bounds.tolist() == ends
    assert sorted(places[places >= 0].tolist()) == list(range(sum(lengths)))


def test_the_work_of_causal_attention_is_equal() -> None:
    places, bounds = context_places(np.array([64, 128, 256]), ranks=4)
    seen = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds)) + 1  # keys that each token looks at
    work = [int(seen[own].sum()) for own in places]
    assert len(set(work)) == 1


@pytest.mark.parametrize("layout", ["zigzag", "halves"])
def test_a_cut_pack_has_the_tokens_and_targets_of_the_whole(layout: Any) -> None:
    samples = conversations(3, 4)
    batch = PackCollator(FakeVlSource(), varlen=True)(samples)
    assert isinstance(batch, dict)
    parts = [cut_for_context(batch, ranks=4, rank=rank, pad_token_id=PAD, layout=layout) for rank in range(4)]
    places, bounds = context_places(np.array([len(s["input_ids"]) for s in samples]), ranks=4, layout=layout)
    shifted = torch.full_like(batch["labels"], -100)[0]
    for start, end in zip(batch["cu_seq_lens_q"][:-1].tolist(), batch["cu_seq_lens_q"][1:].tolist(), strict=True):
        shifted[start : end - 1] = batch["labels"][0, start + 1 : end]
    for own, part in zip(places, parts, strict=True):
        real, where = own >= 0, own[own >= 0]
        assert torch.equal(part["input_ids"][0, real], batch["input_ids"][0, where])
        assert torch.equal(part["position_ids"][..., real], batch["position_ids"][..., where])
        assert torch.equal(part["shift_labels"][0, real], shifted[where])
        assert (part["input_ids"][0, ~real] == PAD).all()
        assert (part["shift_labels"][0, ~real] == -100).all()
        assert part["pixel_values"] is batch["pixel_values"]
        assert "labels" not in part
        assert part["cu_seq_lens_q"].tolist() == bounds.tolist()
        assert part["max_length_q"] == int(np.diff(bounds).max())
    embeds = torch.randn(1, batch["input_ids"].shape[1], 3)
    cut = cut_for_context({**batch, "inputs_embeds": embeds}, ranks=4, rank=1, pad_token_id=PAD, layout=layout)
    assert torch.equal(cut["inputs_embeds"][0, places[1] >= 0], embeds[0, places[1][places[1] >= 0]])


def test_what_cannot_be_cut_is_refused() -> None:
    for options, message in (
        ({"ranks": 2, "pad_to_multiple_of": 6}, "pad_to_multiple_of 6, wanted 1 or more and a multiple of 4"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 2, "layout": "ring"}, "layout is 'ring', wanted \"zigzag\""),
    ):
        with pytest.raises(ConfigError, match=message):
            context_places(np.array([4]), **options)
    with pytest.raises(ConfigError, match="rank is 2, wanted 0 to 1"):
        cut_for_context({}, ranks=2, rank=2, pad_token_id=0)
    with pytest.raises(ConfigError, match="only packs are cut"):
        cut_for_context({"labels": torch.zeros(1, 3)}, ranks=2, rank=0, pad_token_id=0)
