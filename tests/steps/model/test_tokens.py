"""Codes as tokens of a language model, held against a plain loop over every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config.frozen_models import TokenPattern
from forebay.errors import ConfigError
from forebay.train import make_loader
from forebay.train.collate.collator import Collator
from forebay.train.collate.forms import in_pattern
from tests.steps.model.test_families import SPEECH, Corpus, of_sample, section

some = st.none() | st.integers(0, 3000)
patterns = st.builds(
    TokenPattern, delay=st.integers(0, 3), offset=st.integers(0, 5000), bos=some, eos=some, pad=st.integers(0, 3000)
)


def by_hand(codes: Any, pattern: TokenPattern) -> list[list[int]]:
    """Returns the tokens of each frame."""
    books = []
    for book, column in enumerate(codes.T.tolist()):
        tokens = [pattern.pad] * (book * pattern.delay)
        tokens += [] if pattern.bos is None else [pattern.bos]
        tokens += [code + book * pattern.offset for code in column]
        books.append(tokens + ([] if pattern.eos is None else [pattern.eos]))
    length = max(map(len, books))
    return [[(book + [pattern.pad] * length)[place] for book in books] for place in range(length)]


@given(patterns, st.integers(0, 4), st.integers(1, 4), st.sampled_from([np.uint8, np.uint16]))
def test_tokens_are_those_of_a_plain_loop(pattern: TokenPattern, frames: int, books: int, dtype: Any) -> None:
    codes = np.random.default_rng(frames).integers(0, 256, (frames, books)).astype(dtype)
    assert in_pattern(codes, pattern).tolist() == by_hand(codes, pattern)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    corpus = Corpus(tmp_path_factory.mktemp("tokens"), "dac")
    corpus.cache(SPEECH + section("dac", "audio"))
    return corpus


def test_a_batch_has_tokens_and_their_mask(corpus: Corpus) -> None:
    pattern = TokenPattern(delay=1, offset=64, bos=200, eos=201, pad=202)
    tokens = "loader.tokens={dac = {delay = 1, offset = 64, bos = 200, eos = 201, pad = 202}}"
    config = load_config(corpus.folder / "config.toml", overrides=[tokens])
    loader: Any = make_loader(config, with_ids=True)
    loader.set_epoch(0)
    source = loader.source
    names = [source.sample_id(index) for index in range(len(source))]
    for batch, ids in loader:
        wanted = [by_hand(of_sample(source, "dac", names.index(name)), pattern) for name in ids]
        assert batch["dac"].dtype == torch.int64
        for row, mask, tokens_of_one in zip(batch["dac"], batch["dac_mask"], wanted, strict=True):
            assert row[: len(tokens_of_one)].tolist() == tokens_of_one
            assert (row[len(tokens_of_one) :] == 202).all()
            assert mask.sum() == len(tokens_of_one)
    samples = [source.read(index) for index in range(len(source))]
    here, there = (Collator(source, tokens={"dac": pattern}, on_device=on_device) for on_device in (False, True))
    for name, value in there.finish(there(samples)).items():
        assert torch.equal(value, here(samples)[name])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loader.tokens={mimi = {delay = 1}}"], r"loader\.tokens\.mimi: .* in these fields: dac"),
        (["loader.tokens={dac = {delay = -1}}"], "delay is -1"),
        (["loader.tokens={dac = {lag = 1}}"], "unknown field"),
        (["loader.tokens={dac = {delay = 1}}", "loader.form=ragged"], r"loader\.tokens are of padded batches"),
    ],
)
def test_patterns_that_cannot_be_are_refused(corpus: Corpus, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(load_config(Path(corpus.folder / "config.toml"), overrides=overrides))
