"""What a key holds instead of the path of a tokenizer's or a processor's folder, and advice where a folder is missing.

forebay downloads nothing: where a name of the Hugging Face Hub stands for a folder, the advice is the line to run.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Literal

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
    if not folder.is_dir():
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
    if not folder.is_dir():
        raise ConfigError(
            f"vision.processor: {folder} is not a folder; point it at one with a preprocessor_config.json"
            f"{hub_advice(folder, 'processor')}",
            code="FB107",
        )
    digest = hashlib.sha256()
    present = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not present:
        raise ConfigError(
            f"vision.processor: {folder} holds no image processor (no {' or '.join(_PROCESSOR_FILES)}); "
            "save one there with processor.save_pretrained(folder)",
            code="FB107",
        )
    try:
        for path in present:
            _add(digest, path.name, path.read_bytes())
    except OSError as err:
        raise ConfigError(f"vision.processor: cannot read {err.filename}: {err.strerror}", code="FB107") from err
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
        raise ConfigError(f"text.tokenizer: {path} is not JSON: {err}", code="FB105") from err
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


Thing = Literal["tokenizer", "processor", "model", "dataset"]

_LINES: dict[Thing, str] = {
    "tokenizer": "from transformers import AutoTokenizer as A; A.from_pretrained({name!r}).save_pretrained({folder!r})",
    "processor": (
        "from transformers import AutoImageProcessor as A; A.from_pretrained({name!r}).save_pretrained({folder!r})"
    ),
    "model": "from huggingface_hub import snapshot_download as s; s({name!r}, local_dir={folder!r})",
    "dataset": "from datasets import load_dataset as l; l({name!r}).save_to_disk({folder!r})",
}


def hub_advice(folder: Path, thing: Thing) -> str:
    """Returns the end of a message about a missing folder; empty where the folder's path looks like no name of the Hub.

    The path of `openai/whisper-small` beside a config ends in such a name, and the folder `openai` is not there either.
    What the advised line saves is then found under the path that the config has.
    """
    name = "/".join(folder.parts[-2:])
    if folder.exists() or folder.parent.exists() or not folder.parent.parent.exists():
        return ""
    line = _LINES[thing].format(name=name, folder=str(folder))
    quoted = shlex.quote(line) if set(line) & set('"$`\\!') else f'"{line}"'
    return (
        f"; forebay takes folders and downloads nothing: if {name} is the name of a {thing} of the Hub, save it there: "
        f"python -c {quoted}"
    )
