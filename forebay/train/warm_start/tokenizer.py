"""The tokenizer folder of a warm start: what its tokenizer.json says, and what of it cannot be used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.pretrained_folder import hub_advice
from forebay.errors import ConfigError
from forebay.pretrained import from_folder

FILE = "tokenizer.json"
_KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_AGAIN = "load it in the program that made it and save it again: Tokenizer.from_file(...).save(...) of `tokenizers`"
_PROBES = (
    "The quick brown fox, 1234 times.",
    " naïve café — ¿qué tal? ",
    "नमस्ते दुनिया 你好 Привет\n\n\tx = {y: [1, 2]}",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokenizer:
    """The contents of a tokenizer folder, read without transformers."""

    folder: Path
    ids: Mapping[str, int]
    """Token to id, added tokens among them: 0 to the largest, without a gap and without two tokens of one id."""
    added: frozenset[str]
    """Tokens that stand beside the model's own: control tokens and the like."""
    byte_level: bool
    """Whether the model's own tokens spell bytes (GPT-2's alphabet), not characters."""


def read_tokenizer(folder: Path) -> NewTokenizer:
    """Returns the tokenizer of a folder.

    Raises ConfigError, which names the file and what is wrong, where there is no tokenizer.json, where its ids have
    gaps, where its model is of a kind that `tokenizers` does not have, or where its merges are of another form than the
    one that `tokenizers` writes: transformers meets these with a bare TypeError, or reads other tokens from them.
    """
    path = folder / FILE
    document = _document(path)
    model = document["model"]
    if model.get("type") is not None and model["type"] not in _KINDS:
        raise ConfigError(f"--tokenizer: {path} has a model of type {model['type']!r}, wanted {', '.join(_KINDS)}")
    if "merges" in model or model.get("type") == "BPE":
        _check_merges(path, model)
    loaded, added = _loaded_ids(path), {entry["content"]: entry["id"] for entry in document.get("added_tokens") or ()}
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {row[0]: i for i, row in enumerate(model["vocab"])}
    ids = {**vocab, **added}
    _check_gaps(path, ids)
    for token, number in ids.items():
        if loaded[token] != number:
            raise ConfigError(
                f"--tokenizer: {path} gives {json.dumps(token)} the id {number}, and `tokenizers` the id "
                f"{loaded[token]}; {_AGAIN}"
            )
    return NewTokenizer(folder=folder, ids=ids, added=frozenset(added), byte_level=is_byte_level(document))


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as err:
        raise ConfigError(
            f"--tokenizer: cannot read {path} ({err.strerror}); name a folder with the fast form of a tokenizer: "
            f"tokenizer.save_pretrained({str(path.parent)!r}){hub_advice(path.parent, 'tokenizer')}"
        ) from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"--tokenizer: {path} is not JSON: {err}") from err
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ConfigError(f"--tokenizer: {path} has no `model`; it is not a file that `tokenizers` has written")
    return document


def _check_merges(path: Path, model: Mapping[str, Any]) -> None:
    merges, vocab = model.get("merges"), model.get("vocab")
    if not isinstance(merges, list) or not isinstance(vocab, dict):
        raise ConfigError(
            f"--tokenizer: {path} has merges of type {type(merges).__name__} and a vocabulary of type "
            f"{type(vocab).__name__}, wanted a list and a dict; {_AGAIN}"
        )
    as_text = bool(merges) and isinstance(merges[0], str)
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if as_text and isinstance(merge, str) else merge
        is_pair = isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts)
        if not is_pair or (as_text and not isinstance(merge, str)):
            raise ConfigError(
                f"--tokenizer: {path}: merge {number} is {json.dumps(merge)[:80]}, wanted two tokens, as a list for "
                f'all merges (["a", "b"]) or as a text for all ("a b"); {_AGAIN}'
            )
        prefix = model.get("continuing_subword_prefix") or ""
        for token in (*parts, parts[0] + parts[1].removeprefix(prefix)):
            if token not in vocab:
                raise ConfigError(
                    f"--tokenizer: {path}: merge {number} is {json.dumps(merge)[:80]}, and {json.dumps(token)[:80]} is "
                    f"not in the vocabulary of {len(vocab)} tokens; {_AGAIN}"
                )


def _loaded_ids(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        ids: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as err:  # not our work: tokenizers raises bare Exception for a file that it cannot read
        raise ConfigError(f"--tokenizer: `tokenizers` cannot load {path}: {err}; {_AGAIN}") from err
    if not ids:
        raise ConfigError(f"--tokenizer: {path} has no tokens")
    return ids


def _check_gaps(path: Path, ids: Mapping[str, int]) -> None:
    size, by_id = max(ids.values()) + 1, sorted(ids.items(), key=lambda item: item[::-1])
    for (token, number), (other, next_number) in itertools.pairwise(by_id):
        if number == next_number:
            raise ConfigError(
                f"--tokenizer: {path}: the tokens {json.dumps(token)} and {json.dumps(other)} both have id {number}; "
                "give each token its own id"
            )
    used = set(ids.values())
    if len(used) != size:
        first = next(number for number in range(size) if number not in used)
        raise ConfigError(
            f"--tokenizer: {path} has gaps: {len(used)} ids and a largest id of {size - 1}; the first id without a "
            f"token is {first}; number the tokens from 0 without a gap, or add tokens for those ids"
        )


def is_byte_level(document: Mapping[str, Any]) -> bool:
    """Returns whether the tokens of a tokenizer.json spell bytes."""
    parts = [document.get("pre_tokenizer"), document.get("decoder")]
    return '"ByteLevel"' in json.dumps(parts)


def check_loaded(new: NewTokenizer, beside_model: Path) -> None:
    """Returns where transformers reads the same tokenizer in its own folder and in the model's, as `tokenizers` does.

    transformers chooses the class of a tokenizer by its folder's config.json where tokenizer_config.json names none,
    and a class may add tokens and split text in its own way. Raises ConfigError with both values.
    """
    for folder in (new.folder, beside_model):
        try:
            loaded = from_folder(_auto_tokenizer(), folder)
        except Exception as err:  # not our work, see `_loaded_ids`
            raise ConfigError(f"--tokenizer: transformers cannot load {new.folder}: {err!r}; {_AGAIN}") from err
        name, found = type(loaded).__name__, dict(loaded.get_vocab())
        if found != new.ids:
            token = min(set(found.items()) ^ set(new.ids.items()))[0]
            raise ConfigError(
                f"--tokenizer: {new.folder / FILE} has {new.ids.get(token)} as id of {json.dumps(token)}, and "
                f"transformers' {name} has {found.get(token)}; add the token to the file, or name another "
                "tokenizer_class in its tokenizer_config.json"
            )
        read = [loaded(text, add_special_tokens=False)["input_ids"] for text in _PROBES]
        if folder == new.folder:
            alone, alone_name = read, name
    if read != alone:
        raise ConfigError(
            f"--tokenizer: transformers' {name} splits text in other tokens than its {alone_name}, which it takes for "
            f'{new.folder}; set "tokenizer_class": "{alone_name}" in {new.folder}/tokenizer_config.json'
        )


def _auto_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer
