"""Tokens as pieces that can be read."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.inspect.page.words import MAX_TOKENS, learnt_mask, pieces_of
from forebay.inspect.sample import load_tokenizer
from tests.preprocess.vision.corpus import DEMO


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode("utf-8", "replace")


def tensors(text: bytes, *, prefix: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.frombuffer(text, np.uint8).astype(np.int32), "prefix_len": np.array([prefix], np.int32)}


def test_tokens_that_share_a_character_are_one_piece() -> None:
    found = pieces_of(tensors("aé😀".encode(), prefix=1), image_ids=(), tokenizer=Bytes())
    assert [(piece.kind, piece.text, piece.count) for piece in found] == [
        ("given", "a", 1),
        ("learnt", "é", 2),
        ("learnt", "😀", 4),
    ]


def test_a_character_that_never_ends_does_not_take_the_rest() -> None:
    found = pieces_of(tensors(b"\xff" * 20 + b"ab", prefix=0), image_ids=(), tokenizer=Bytes())
    assert sum(piece.count for piece in found) == 22
    assert max(piece.count for piece in found) <= 8


def test_without_a_tokenizer_pieces_are_numbers() -> None:
    found = pieces_of(tensors(b"abc", prefix=2), image_ids=(), tokenizer=None)
    assert [(piece.kind, piece.text, piece.ids) for piece in found] == [
        ("given", None, (97,)),
        ("given", None, (98,)),
        ("learnt", None, (99,)),
    ]


def test_image_tokens_are_one_piece_a_run() -> None:
    values = {"input_ids": np.array([1, 7, 7, 7, 2, 7], np.int32), "label_mask": np.array([0, 0, 0, 0, 1, 0], np.uint8)}
    found = pieces_of(values, image_ids=(7,), tokenizer=None)
    assert [(piece.kind, piece.count) for piece in found] == [("given", 1), ("image", 3), ("learnt", 1), ("image", 1)]
    assert learnt_mask(values).tolist() == [False, False, False, False, True, False]


def test_a_long_text_is_shown_in_part() -> None:
    found = pieces_of(tensors(b"x" * (MAX_TOKENS + 50), prefix=0), image_ids=(), tokenizer=Bytes())
    assert sum(piece.count for piece in found) == MAX_TOKENS


@pytest.mark.parametrize("text", ["Hello there.", "Ça va? 你好 नमस्ते"])
def test_pieces_of_a_real_tokenizer_say_the_text_again(text: str) -> None:
    tokenizer = load_tokenizer(DEMO / "model")
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    found = pieces_of({"input_ids": ids}, image_ids=(), tokenizer=tokenizer)
    assert "".join(piece.text or "" for piece in found) == text
