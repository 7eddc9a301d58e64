"""Token ids back to text, with the tokenizer of a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import Config
from forebay.config.digest import tokenizer_digest
from forebay.errors import ConfigError
from forebay.pretrained import from_folder
from forebay.store.cache import Cache
from forebay.store.layout import Array


def labels_of(cache: Cache, config: Config | None, sample: Mapping[str, Array]) -> dict[str, Any] | None:
    """Returns a sample's ids and, where the recipe's tokenizer is at hand, their text; None for a recipe without text.

    `ids` and `prefix_len` are as stored; `text` is what follows the prefix, without special tokens;
    `with_special_tokens` is all of it. Where they are None, `note` says why.
    """
    if "input_ids" not in sample:
        return None
    ids = [int(i) for i in sample["input_ids"]]
    prefix_len = int(sample["prefix_len"][0])
    labels: dict[str, Any] = {"ids": ids, "prefix_len": prefix_len, "text": None, "with_special_tokens": None}
    note = _why_not(cache, config)
    if note is None and config is not None and config.text is not None:
        tokenizer = _load(Path(config.text.tokenizer))
        labels["text"] = tokenizer.decode(ids[prefix_len:], skip_special_tokens=True)
        labels["with_special_tokens"] = tokenizer.decode(ids, skip_special_tokens=False)
    return {**labels, "note": note}


def learnt_of(cache: Cache, config: Config | None, sample: Mapping[str, Array]) -> dict[str, Any]:
    """Returns a conversation's ids and what is learnt of it, as text where the recipe's tokenizer is at hand.

    `ids` as stored; `learnt`: for every run of targets its `start`, `end` and `text`, control tokens shown;
    `with_special_tokens` is all of it. Where texts are None, `note` says why.
    """
    ids = [int(i) for i in sample["input_ids"]]
    note = _why_not(cache, config)
    tokenizer = _load(Path(config.text.tokenizer)) if note is None and config is not None and config.text else None

    def text(start: int, end: int) -> str | None:
        return None if tokenizer is None else str(tokenizer.decode(ids[start:end], skip_special_tokens=False))

    learnt = [{"start": start, "end": end, "text": text(start, end)} for start, end in _runs(sample["label_mask"])]
    return {"ids": ids, "learnt": learnt, "with_special_tokens": text(0, len(ids)), "note": note}


def _runs(mask: Array) -> list[tuple[int, int]]:
    """Returns (start, end) of every run of values that are not 0."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask != 0, [0])).astype(np.int8)))
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _why_not(cache: Cache, config: Config | None) -> str | None:
    if config is None or config.text is None:
        return "not decoded: a cache does not hold its tokenizer; run: forebay inspect CONFIG --sample I"
    folder = config.text.tokenizer
    stored = str((cache.metadata["recipe"].get("text") or {}).get("tokenizer"))
    found = tokenizer_digest(Path(folder))
    if found == stored:
        return None
    # Another tokenizer would give other text without a word, so nothing is decoded.
    return (
        f"not decoded: text.tokenizer {folder} has digest {found[:16]}, the cache was made with {stored[:16]}; "
        "name the folder that the cache was made with"
    )


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer  # not at import: it takes seconds, and only this needs it

    try:
        tokenizer = from_folder(AutoTokenizer, folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as err:
        raise ConfigError(f"text.tokenizer: transformers cannot load {folder}: {err}") from err
    # The tokenizer itself, where there is one: Whisper's class drops time stamps and tidies spaces on its way.
    return getattr(tokenizer, "backend_tokenizer", None) or tokenizer
