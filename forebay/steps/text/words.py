"""Plain English text to ids by a table of its words, where a tokenizer cuts texts as GPT-2's or Qwen2's does.

Most of what such a tokenizer costs is cutting a text into words (a regular expression over Unicode) and keeping where
each stood. Of printable ASCII the cut is one small expression, and the ids of a text are those of its words, one after
the other: the model of a tokenizer sees one word at a time.
"""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_LETTERS, _OTHERS = "[A-Za-z]", " ?[^ A-Za-z0-9]+| +(?![^ ])| +"

_GPT2 = re.compile(rf"'(?:[stmd]|re|ve|ll)| ?{_LETTERS}+| ?[0-9]+|{_OTHERS}")

_QWEN2 = re.compile(rf"'(?:[stmd]|re|ve|ll|[STMD]|R[eE]|rE|V[eE]|vE|L[lL]|lL)|[^A-Za-z0-9]?{_LETTERS}+|[0-9]|{_OTHERS}")

_QWEN2_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As tokenizer.json of Qwen2, Qwen2-VL and Qwen3 has it."""

_BYTES = {"type": "ByteLevel", "add_prefix_space": False}

_KEPT_BY = ({"type": "NFC"}, {"type": "NFKC"}, None)
"""Normalizers that change no printable ASCII."""

_MOST = 1 << 16
"""Words in the table: a few MB."""


class Words:
    """The ids of printable ASCII by a table of words, which fills as texts come. Equal to the tokenizer's own."""

    def __init__(self, tokenizer: Any, cut: re.Pattern[str], added: re.Pattern[str] | None = None) -> None:
        """tokenizer: of `tokenizers`. cut: finds the words of printable ASCII as that tokenizer does.

        added: finds words that it takes out of a text before that; None: there are none.
        """
        self._tokenizer, self._cut, self._added = tokenizer, cut, added
        self._ids: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Any, document: Mapping[str, Any]) -> Words | None:
        """Returns the table of a tokenizer that keeps special tokens as text; None for one whose cut is not known here.

        document: its tokenizer.json. A cut that is known by name and is another one after all is not taken either.
        """
        cut = _cut_of(document)
        if cut is None or cut.findall(_PROBE) != _pieces(tokenizer, _PROBE):
            return None
        added = [
            re.escape(form) for entry in document["added_tokens"] if not entry["special"] for form in _forms(entry)
        ]
        return cls(tokenizer, cut, re.compile("|".join(added)) if added else None)

    def encode(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Returns the ids of every text; None for all where most of their words are new, and for what is not ASCII."""
        cuts = [self._cut.findall(text) if self._takes(text) else None for text in texts]
        found = set(itertools.chain.from_iterable(filter(None, cuts)))
        if not self._learn(found, sum(len(text) for text, words in zip(texts, cuts, strict=True) if words)):
            return [None] * len(texts)
        ids = self._ids.__getitem__
        chained = itertools.chain.from_iterable
        return [None if words is None else list(chained(map(ids, words))) for words in cuts]

    def _takes(self, text: str) -> bool:
        return text.isascii() and text.isprintable() and not (self._added and self._added.search(text))

    def _learn(self, words: set[str], num_characters: int) -> bool:
        """Takes words into the table; says whether that is worth it."""
        new = list(words.difference(self._ids))
        if 2 * sum(map(len, new)) > num_characters:
            return False
        if len(self._ids) + len(new) > _MOST:
            self._ids, new = {}, list(words)
        made = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update((word, encoding.ids) for word, encoding in zip(new, made, strict=True))
        return True


def _cut_of(document: Mapping[str, Any]) -> re.Pattern[str] | None:
    if document["normalizer"] not in _KEPT_BY or document["model"].get("dropout"):
        return None
    rules = document["pre_tokenizer"]
    if rules is None:
        return None
    if _is_bytes(rules, use_regex=True):
        return _GPT2
    parts = rules.get("pretokenizers", ())
    if rules["type"] != "Sequence" or len(parts) != 2 or not _is_bytes(parts[1], use_regex=False):
        return None
    split = {"type": "Split", "pattern": {"Regex": _QWEN2_RULE}, "behavior": "Isolated", "invert": False}
    return _QWEN2 if parts[0] == split else None


def _is_bytes(rules: Mapping[str, Any], *, use_regex: bool) -> bool:
    """Whether these rules write bytes as characters. use_regex: and cut as GPT-2 does."""
    return {name: rules.get(name) for name in _BYTES} == _BYTES and rules.get("use_regex", True) is use_regex


def _forms(entry: Mapping[str, Any]) -> set[str]:
    """Returns what of an added token is looked for in a text that a normalizer of `_KEPT_BY` left as it is."""
    return {entry["content"], unicodedata.normalize("NFKC", entry["content"])}


def _pieces(tokenizer: Any, text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


_PRINTABLE = string.digits[:2] + "aZz" + string.punctuation + " "
_PROBE = "".join(
    [
        *(a + b for a in _PRINTABLE for b in _PRINTABLE),
        *(f"x'{end} y'{end.upper()}s '{end.capitalize()}" for end in ("s", "t", "re", "ve", "m", "ll", "d")),
        " a  b   c 12  345 .. , ... 'S  ",
    ]
)
"""Every kind of character beside every other."""
