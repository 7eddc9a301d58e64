"""Texts that a model with CTC writes: the likeliest id of each frame, equal neighbours once, no blanks, no padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.models import ctc
from forebay.train.models.model_folder import load_model, model_facts
from tests.train.models import foreign


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(0, 4))
def test_frames_become_ids(rows: list[list[int]], blank: int) -> None:
    width = max(map(len, rows))
    logits = torch.nn.functional.one_hot(torch.tensor([row + [3] * (width - len(row)) for row in rows]), 5).float()
    wanted = []
    for row in rows:
        kept = [token for place, token in enumerate(row) if place == 0 or row[place - 1] != token]
        wanted.append([token for token in kept if token != blank])
    assert ctc.greedy(logits, torch.tensor([len(row) for row in rows]), blank_id=blank) == wanted


@pytest.mark.parametrize("kind", ["ctc", "ctc of mel"])
def test_frames_of_a_clip_are_those_that_it_has_alone(kind: str, tmp_path: Path) -> None:
    make, batch = foreign.KINDS[kind]
    facts = model_facts(make(tmp_path))
    model, inputs = load_model(tmp_path, seed=0, init="random").eval(), batch(0)
    main = type(model).main_input_name
    frames = ctc.num_frames(facts, model, inputs)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        clip = {main: inputs[main][row : row + 1, :length], "attention_mask": torch.ones(1, length, dtype=torch.int64)}
        assert model(**clip).logits.shape[1] == frames[row] == ctc.num_frames(facts, model, clip)
        assert ctc.num_frames(facts, model, {main: clip[main]}) == frames[row]
