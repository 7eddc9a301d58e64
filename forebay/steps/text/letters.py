"""A CTC tokenizer of letters (`Wav2Vec2CTCTokenizer`, a vocab.json alone) in the form of the library tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError

CLASS = "Wav2Vec2CTCTokenizer"
_NAMES = ("unk_token", "bos_token", "eos_token", "pad_token")


def fast_letters(tokenizer: Any, folder: Path) -> Any:
    """Returns a fast tokenizer that gives the ids and the texts of a `Wav2Vec2CTCTokenizer`, an id a letter.

    Its decoder joins letters and does not group them: labels are no frames. Raises ConfigError for a tokenizer that is
    more than a table of letters: one that makes capitals, has letters by language, or tokens of several letters.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {name: str(token) for name in _NAMES if (token := getattr(tokenizer, name)) is not None}
    table = tokenizer.encoder
    more = sorted(token for token in table if len(token) > 1 and token not in special.values())
    why = (
        "makes capitals of letters (do_lower_case)"
        if tokenizer.do_lower_case
        else "has letters by language"
        if tokenizer.target_lang is not None
        else f"has tokens of several letters ({more[0]})"
        if more
        else None
    )
    if why is not None:
        raise ConfigError(
            f"text.tokenizer: the {CLASS} in {folder} {why}, which forebay does not read; save its fast form "
            "(tokenizer.json) there, or write a table of letters with forebay symbols",
            code="FB105",
        )
    document = _document(table, list(special.values()), delimiter=tokenizer.word_delimiter_token or " ")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(document)), **special)


def _document(table: dict[str, int], special: list[str], *, delimiter: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": delimiter}
    letters = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    words = {"type": "Replace", "pattern": {"String": delimiter}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": table[token], "content": token, **flags} for token in special if token in table],
        "normalizer": spaces,
        "pre_tokenizer": letters,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [words, {"type": "Fuse"}]},
        "model": {"type": "WordLevel", "vocab": table, "unk_token": special[0]},
    }
