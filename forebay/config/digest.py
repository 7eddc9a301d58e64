"""The digests of a tokenizer's and a processor's folder: what a key holds instead of the folder's path."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forebay.config.hub import hub_advice
from forebay.errors import ConfigError

_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "normalizer.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
_VOCABULARY_SUFFIXES = (".model", ".tiktoken")


def tokenizer_digest(folder: Path) -> str:
    """Returns the sha256, as 64 hex digits, of the names and contents of the files that define a tokenizer.

    Vocabularies, merges, special tokens, tokenizer settings and chat templates count, and the `model_type` of config.json,
    because transformers chooses the tokenizer's class by it; weights and the rest of the folder do not, nor does its path.
    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no vocabulary.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"text.tokenizer: {folder} is not a folder; point it at a folder with a tokenizer.json"
            f"{hub_advice(folder, 'tokenizer')}"
        )
    files = {p.relative_to(folder).as_posix(): p for pattern in _PATTERNS for p in folder.glob(pattern) if p.is_file()}
    if not any(name in _VOCABULARIES or name.endswith(_VOCABULARY_SUFFIXES) for name in files):
        raise ConfigError(
            f"text.tokenizer: {folder} holds no tokenizer (no tokenizer.json, vocabulary or *.model); "
            "save one there with tokenizer.save_pretrained(folder)"
        )
    digest = hashlib.sha256()
    try:
        for name in sorted(files):
            _add(digest, name, files[name].read_bytes())
        _add(digest, "model_type", _model_type(folder / "config.json").encode())
    except OSError as err:
        raise ConfigError(f"text.tokenizer: cannot read {err.filename}: {err.strerror}") from err
    return digest.hexdigest()


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def processor_digest(folder: Path) -> str:
    """Returns the sha256, as 64 hex digits, of the names and contents of the files that define an image processor.

    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no processor.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"vision.processor: {folder} is not a folder; point it at one with a preprocessor_config.json"
            f"{hub_advice(folder, 'processor')}"
        )
    digest = hashlib.sha256()
    present = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not present:
        raise ConfigError(
            f"vision.processor: {folder} holds no image processor (no {' or '.join(_PROCESSOR_FILES)}); "
            "save one there with processor.save_pretrained(folder)"
        )
    try:
        for path in present:
            _add(digest, path.name, path.read_bytes())
    except OSError as err:
        raise ConfigError(f"vision.processor: cannot read {err.filename}: {err.strerror}") from err
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    # Lengths stand before both, so that no two sets of files run together to the same bytes.
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _model_type(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"text.tokenizer: {path} is not JSON: {err}") from err
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
