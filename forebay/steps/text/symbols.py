"""A symbol table: the tokenizer that has one token a symbol. forebay writes it, transformers loads it.

A symbol is a stretch between spaces (a phone), or a character. A text with a symbol that the table lacks is no sample.

Plain English text to ids by a table of its words, where a tokenizer cuts texts as GPT-2's or Qwen2's does.

Most of what such a tokenizer costs is cutting a text into words (a regular expression over Unicode) and keeping where
each stood. Of printable ASCII the cut is one small expression, and the ids of a text are those of its words, one after
the other: the model of a tokenizer sees one word at a time.

A CTC tokenizer of letters (`Wav2Vec2CTCTokenizer`, a vocab.json alone) in the form of the library tokenizers.
"""

from __future__ import annotations

import itertools
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forebay.errors import ConfigError

Split = Literal["spaces", "characters"]
MARK = "forebay_symbols"
"""The field of tokenizer_config.json by which a symbol table is known; its value is the version of the form."""
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Special:
    """The tokens of a table that no text has. The first id is that of pad, the second that of unknown."""

    pad: str = "<pad>"
    unknown: str = "<unk>"
    bos: str | None = None
    eos: str | None = None

    def tokens(self) -> dict[str, str]:
        """Returns the tokens by the names that transformers has for them, in the order of their ids."""
        found = {"pad_token": self.pad, "unk_token": self.unknown, "bos_token": self.bos, "eos_token": self.eos}
        return {name: token for name, token in found.items() if token is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class SymbolTable:
    """Symbols with how often they were seen, in the order of their ids: that of their code points."""

    counts: Mapping[str, int]
    split: Split
    special: Special

    @classmethod
    def of(cls, texts: Iterable[str], *, split: Split, special: Special) -> SymbolTable:
        """Returns the table of texts. Raises ConfigError where a special token is a symbol of the texts, or twice."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(symbols_of(text, split))
        tokens = list(special.tokens().values())
        taken = [token for token in tokens if counts[token] or tokens.count(token) > 1 or not token]
        if taken:
            message = f"forebay symbols: {taken[0]!r} is a special token and a symbol too; choose another one"
            raise ConfigError(message, code="FB119")
        return cls(counts={symbol: counts[symbol] for symbol in sorted(counts)}, split=split, special=special)

    @property
    def tokens(self) -> list[str]:
        """All tokens; a token's id is its place."""
        return [*self.special.tokens().values(), *self.counts]

    def files(self) -> dict[str, bytes]:
        """Returns the files of the tokenizer's folder. The same symbols give the same bytes."""
        return {"tokenizer.json": _json(self._tokenizer()), "tokenizer_config.json": _json(self._config())}

    def _tokenizer(self) -> dict[str, Any]:
        """Returns the document of the library tokenizers."""
        by_spaces = self.split == "spaces"
        return _word_level(
            {token: i for i, token in enumerate(self.tokens)},
            list(self.special.tokens().values()),
            unknown=self.special.unknown,
            pre_tokenizer={"type": "WhitespaceSplit"} if by_spaces else _EVERY,
            decoder=None if by_spaces else {"type": "Fuse"},
        )

    def _config(self) -> dict[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special.tokens(),
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000_000,
            MARK: _VERSION,
        }


def symbols_of(text: str, split: Split) -> Sequence[str]:
    """Returns the symbols of a text."""
    return text.split() if split == "spaces" else text


def is_symbol_table(folder: Path) -> bool:
    """Says whether a folder holds a table that forebay wrote."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and MARK in config


_EVERY = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
"""Cuts a text into its characters."""


def _word_level(
    vocab: Mapping[str, int],
    special: Sequence[str],
    *,
    unknown: str,
    pre_tokenizer: Any,
    decoder: Any,
    normalizer: Any = None,
) -> dict[str, Any]:
    """Returns the document, of the library tokenizers, of a tokenizer that looks pieces of a text up in a table."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[token], "content": token, **flags} for token in special if token in vocab],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": unknown},
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode()


_LETTERS, _OTHERS = "[A-Za-z]", " ?[^ A-Za-z0-9]+| +(?![^ ])| +"
GPT2 = re.compile(rf"'(?:[stmd]|re|ve|ll)| ?{_LETTERS}+| ?[0-9]+|{_OTHERS}")
QWEN2 = re.compile(rf"'(?:[stmd]|re|ve|ll|[STMD]|R[eE]|rE|V[eE]|vE|L[lL]|lL)|[^A-Za-z0-9]?{_LETTERS}+|[0-9]|{_OTHERS}")

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
        cut = cut_of(document)
        if cut is None:
            return None
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE)
        if cut.findall(_PROBE) != [_PROBE[start:stop] for _, (start, stop) in pieces]:
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


def cut_of(document: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Returns `GPT2` or `QWEN2`, by which a tokenizer.json cuts printable ASCII into words; None for another cut."""
    if document["normalizer"] not in _KEPT_BY or document["model"].get("dropout"):
        return None
    rules = document["pre_tokenizer"]
    if rules is None:
        return None
    if _is_bytes(rules, use_regex=True):
        return GPT2
    parts = rules.get("pretokenizers", ())
    if rules["type"] != "Sequence" or len(parts) != 2 or not _is_bytes(parts[1], use_regex=False):
        return None
    split = {"type": "Split", "pattern": {"Regex": _QWEN2_RULE}, "behavior": "Isolated", "invert": False}
    return QWEN2 if parts[0] == split else None


def _is_bytes(rules: Mapping[str, Any], *, use_regex: bool) -> bool:
    """Whether these rules write bytes as characters. use_regex: and cut as GPT-2 does."""
    return {name: rules.get(name) for name in _BYTES} == _BYTES and rules.get("use_regex", True) is use_regex


def _forms(entry: Mapping[str, Any]) -> set[str]:
    """Returns what of an added token is looked for in a text that a normalizer of `_KEPT_BY` left as it is."""
    return {entry["content"], unicodedata.normalize("NFKC", entry["content"])}


_PRINTABLE = string.digits[:2] + "aZz" + string.punctuation + " "
_PROBE = "".join(
    [
        *(a + b for a in _PRINTABLE for b in _PRINTABLE),
        *(f"x'{end} y'{end.upper()}s '{end.capitalize()}" for end in ("s", "t", "re", "ve", "m", "ll", "d")),
        " a  b   c 12  345 .. , ... 'S  ",
    ]
)
"""Every kind of character beside every other."""


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
    delimiter, tokens = tokenizer.word_delimiter_token or " ", list(special.values())
    words = {"type": "Replace", "pattern": {"String": delimiter}, "content": " "}
    document = _word_level(
        table,
        tokens,
        unknown=tokens[0],
        pre_tokenizer=_EVERY,
        decoder={"type": "Sequence", "decoders": [words, {"type": "Fuse"}]},
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": delimiter},
    )
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(document)), **special)
