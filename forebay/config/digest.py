"""The content that a key holds in place of the path of a tokenizer's or processor's folder, and advice if it is gone.

forebay downloads nothing: where a name of the Hugging Face Hub stands for a folder, the advice is the line to run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import ConfigError
from forebay.visible import an

Thing = Literal["tokenizer", "processor", "extractor", "model", "dataset"]

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
    if not folder.is_dir():
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


_LINES: dict[Thing, str] = {
    "tokenizer": "from transformers import AutoTokenizer as A; A.from_pretrained({name!r}).save_pretrained({folder!r})",
    "processor": (
        "from transformers import AutoImageProcessor as A; A.from_pretrained({name!r}).save_pretrained({folder!r})"
    ),
    "extractor": (
        "from transformers import AutoFeatureExtractor as A; A.from_pretrained({name!r}).save_pretrained({folder!r})"
    ),
    "model": "from huggingface_hub import snapshot_download as s; s({name!r}, local_dir={folder!r})",
    "dataset": "from datasets import load_dataset as l; l({name!r}).save_to_disk({folder!r})",
}


_HUB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/((?!datasets/|spaces/)\w[\w.-]*/\w[\w.-]*)", re.ASCII)


def url_problem(url: str) -> str:
    """Returns what is wrong with a URL where a folder is wanted, and the command that makes a folder of it."""
    said, found = f"{url} is a URL, and this is read from this machine: name a local path", _HUB.match(url)
    if found is None:
        return said
    return f"{said}; download the folder: hf download {found[1]} --local-dir {found[1].rpartition('/')[2]}"


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
        f"; forebay takes folders and downloads nothing: if {name} is the name of {an(thing)} of the Hub, save it "
        f"there: python -c {quoted}"
    )
