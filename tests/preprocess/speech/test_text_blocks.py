"""Rows of texts in blocks: where they are cut changes nothing."""

from __future__ import annotations

import pytest

from forebay.preprocess import text_group as samples
from forebay.preprocess.group import values_digest
from tests.preprocess.speech.test_text_deaths import table, text_samples
from tests.steps.text.test_encoder import ROWS, encoder


def blocks(*lengths: int) -> list[tuple[int, int]]:
    return list(samples._blocks(["x" * length for length in lengths], [None] * len(lengths)))


def test_blocks_hold_few_texts_and_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_BLOCK_TEXTS", 3)
    monkeypatch.setattr(samples, "_BLOCK_CHARACTERS", 10)
    assert blocks() == []
    assert blocks(1) == [(0, 1)]
    assert blocks(1, 1, 1, 1) == [(0, 3), (3, 4)]
    assert blocks(4, 6, 1) == [(0, 2), (2, 3)]
    assert blocks(50, 1, 50, 50, 0) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert list(samples._blocks(["x" * 6, None, "x"], [None, "x" * 5, "x"])) == [(0, 1), (1, 3)]


@pytest.mark.parametrize("prompt", ["whisper", "plain", "qwen3_asr"])
def test_blocks_of_any_size_give_the_same_values(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table([*(row["transcript"] for row in ROWS), None, "", "\0", "a plain line, of English words"])
    whole = list(text_samples(rows, ["f"], encoder(prompt), needs_text=True))
    assert [values.get("failure") for values in whole[-4:]] == ["no_text", "empty_text", "bad_text", None]
    for most, characters in ((1, 1 << 18), (7, 1 << 18), (1024, 30)):
        monkeypatch.setattr(samples, "_BLOCK_TEXTS", most)
        monkeypatch.setattr(samples, "_BLOCK_CHARACTERS", characters)
        again = list(text_samples(rows, ["f"], encoder(prompt), needs_text=True))
        assert values_digest(again) == values_digest(whole)
        assert [values.get("message") for values in again] == [values.get("message") for values in whole]
