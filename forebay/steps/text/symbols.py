"""A symbol table: the tokenizer that has one token a symbol. forebay writes it, transformers loads it.

A symbol is a stretch between spaces (a phone), or a character. A text with a symbol that the table lacks is no sample.
"""

from __future__ import annotations

import json
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
        special = self.special.tokens().values()
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        by_spaces = self.split == "spaces"
        every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(special)],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"} if by_spaces else every,
            "post_processor": None,
            "decoder": None if by_spaces else {"type": "Fuse"},
            "model": {
                "type": "WordLevel",
                "vocab": {token: i for i, token in enumerate(self.tokens)},
                "unk_token": self.special.unknown,
            },
        }

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


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode()
