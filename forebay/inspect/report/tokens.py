"""The tokens of a text in pieces that can be read, each with what a loss makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forebay.store.layout import Array

MAX_TOKENS = 700
"""Tokens of a sample that a page shows."""

Kind = Literal["given", "learnt", "image"]
_MAX_PIECE = 8
"""Tokens that one character may be made of, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Neighbouring tokens of one kind. text: what they say, None without a tokenizer. count: how many they are."""

    kind: Kind
    text: str | None
    ids: tuple[int, ...]
    count: int


def learnt_mask(tensors: Mapping[str, Any]) -> Array:
    """Returns bool [num_tokens]: which tokens of a sample are targets."""
    ids = tensors["input_ids"]
    if "label_mask" in tensors:
        return np.asarray(tensors["label_mask"] != 0)
    prefix = tensors.get("prefix_len")
    return np.arange(len(ids)) >= (int(prefix[0]) if prefix is not None and len(prefix) else 0)


def repeated_ids(tensors: Mapping[str, Any]) -> frozenset[int]:
    """Returns the ids that stand four times in a row or more where nothing is learnt.

    Beside images these are their places: a cache of any processor does not say which token they have.
    """
    given = np.where(learnt_mask(tensors), -1, tensors["input_ids"])
    same = (given[1:] == given[:-1]) & (given[1:] >= 0)
    runs = same[:-2] & same[1:-1] & same[2:]
    return frozenset(given[3:][runs].tolist())


def pieces_of(tensors: Mapping[str, Any], *, image_ids: Collection[int], tokenizer: Any) -> list[Piece]:
    """Returns the first 700 tokens as pieces: a run of image tokens is one, so are tokens that share a character.

    tokenizer: of `load_tokenizer`; None: pieces have no text.
    """
    ids, learnt = tensors["input_ids"][:MAX_TOKENS].tolist(), learnt_mask(tensors)[:MAX_TOKENS].tolist()
    kinds: list[Kind] = [
        "image" if token in image_ids else "learnt" if target else "given"
        for token, target in zip(ids, learnt, strict=True)
    ]
    found: list[Piece] = []
    start = 0
    for kind, run in itertools.groupby(kinds):
        end = start + len(list(run))
        if kind == "image":
            for token, same in itertools.groupby(ids[start:end]):
                text = None if tokenizer is None else _decoded(tokenizer, [token])
                found.append(Piece(kind=kind, text=text, ids=(token,), count=len(list(same))))
        else:
            found += _read(ids[start:end], kind, tokenizer)
        start = end
    return found


def _read(ids: list[int], kind: Kind, tokenizer: Any) -> list[Piece]:
    if tokenizer is None:
        return [Piece(kind=kind, text=None, ids=(token,), count=1) for token in ids]
    found, start = [], 0
    while start < len(ids):
        end = start + 1
        # A character outside of ASCII may be several tokens, none of which is text by itself.
        while (text := _decoded(tokenizer, ids[start:end])).endswith("\ufffd") and end < min(
            len(ids), start + _MAX_PIECE
        ):
            end += 1
        found.append(Piece(kind=kind, text=text, ids=tuple(ids[start:end]), count=end - start))
        start = end
    return found


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))
