"""The content that a key holds in place of the path of a tokenizer's or a processor's folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from forebay.config.hub import Thing, hub_advice, is_whole
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

    Vocabularies, merges, special tokens, tokenizer settings and chat templates count. The `model_type` of config.json
    counts too, because transformers chooses the tokenizer's class by it. Weights, the rest of the folder and its path
    do not count.
    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no vocabulary.
    """
    if not is_whole(folder):
        raise ConfigError(
            f"text.tokenizer: {folder} is not a folder; point it at a folder with a tokenizer.json"
            f"{hub_advice(folder, 'tokenizer')}",
            code="FB105",
        )
    files = {p.relative_to(folder).as_posix(): p for pattern in _PATTERNS for p in folder.glob(pattern) if p.is_file()}
    if not any(name in _VOCABULARIES or name.endswith(_VOCABULARY_SUFFIXES) for name in files):
        raise ConfigError(
            f"text.tokenizer: {folder} holds no tokenizer (no tokenizer.json, vocabulary or *.model); "
            "save one there with tokenizer.save_pretrained(folder)",
            code="FB105",
        )
    digest = hashlib.sha256()
    try:
        for name in sorted(files):
            _add(digest, name, files[name].read_bytes())
        _add(digest, "model_type", _model_type(folder / "config.json").encode())
    except OSError as err:
        raise ConfigError(f"text.tokenizer: cannot read {err.filename}: {err.strerror}", code="FB105") from err
    return digest.hexdigest()


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def processor_digest(folder: Path) -> str:
    """Returns the sha256, as 64 hex digits, of the names and contents of the files that define an image processor.

    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no processor.
    """
    return _digest_of(folder, _IMAGES).hexdigest()


def extractor_digest(folder: Path) -> str:
    """Returns the sha256, as 64 hex digits, of the names and contents of the files that define a feature extractor.

    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no extractor.
    """
    return _digest_of(folder, _SOUND).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The words of messages about a folder with a processor: the setting, the word for it in code, and what it is."""

    setting: str
    thing: Thing
    what: str


_IMAGES = _Kind(setting="vision.processor", thing="processor", what="image processor")
_SOUND = _Kind(setting="audio.extractor", thing="extractor", what="feature extractor")


def _digest_of(folder: Path, kind: _Kind) -> hashlib._Hash:
    if not is_whole(folder):
        raise _refused(
            kind,
            f"{folder} is not a folder; point it at one with a preprocessor_config.json"
            f"{hub_advice(folder, kind.thing)}",
        )
    digest = hashlib.sha256()
    present = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not present:
        raise _refused(
            kind,
            f"{folder} holds no {kind.what} (no {' or '.join(_PROCESSOR_FILES)}); "
            f"save one there with {kind.thing}.save_pretrained(folder)",
        )
    try:
        for path in present:
            _add(digest, path.name, path.read_bytes())
    except OSError as err:
        raise _refused(kind, f"cannot read {err.filename}: {err.strerror}") from err
    return digest


def _refused(kind: _Kind, why: str) -> ConfigError:
    message = f"{kind.setting}: {why}"
    return ConfigError(message, code="FB107") if kind is _IMAGES else ConfigError(message, code="FB121")


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
        raise ConfigError(f"text.tokenizer: {path} is not JSON: {err}", code="FB105") from err
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
