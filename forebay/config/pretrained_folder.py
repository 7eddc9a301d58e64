"""Folders of models: a snapshot of the Hugging Face Hub in the place of a folder, and the content that a key holds.

`openai/whisper-small@COMMIT` is a snapshot in the cache of the Hub's client, laid out as its guide "Understand caching"
says. Nothing here asks the network: `forebay/preprocess/fetch_models.py` does, for `forebay preprocess` and
`forebay fetch` alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.config.remote import is_url, url_or_path
from forebay.errors import ConfigError

Thing = Literal["tokenizer", "processor", "extractor", "model", "dataset"]
_ID = re.compile(r"(?![^@]*(?:--|\.\.))(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?", re.ASCII)
"""The Hub has no `--` and no `..` in names; in its cache `--` stands between owner and name."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface|hf)\.co/((?!datasets/|spaces/)\w[\w.-]*/\w[\w.-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub at one commit. name: `owner/name`. commit: 40 hex digits."""

    name: str
    commit: str

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}"

    @property
    def folder(self) -> Path:
        """The folder of its snapshot in the client's cache, whether it is there or not."""
        return self._repository / "snapshots" / self.commit

    @property
    def list_path(self) -> Path:
        """The file in which forebay lists what it fetches of this commit, before anything is fetched."""
        return self._repository / f"forebay-{self.commit}.json"

    def listed(self) -> tuple[list[str], bool]:
        """Returns the files that forebay fetches of this commit, and whether it looked for weights; else nothing."""
        if not self.list_path.is_file():
            return [], False
        document = json.loads(self.list_path.read_bytes())
        return document["files"], document["weights"]

    @property
    def _repository(self) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE) / f"models--{self.name.replace('/', '--')}"


def split_id(text: str) -> tuple[str, str | None] | None:
    """Returns name and revision of what may be an id of the Hub; None if no id is written so."""
    found = _ID.fullmatch(text)
    return None if found is None else (found[1], found[2])


def model_place(text: str, folder: Path) -> str:
    """Returns the absolute path of a model's folder: a path relative to `folder`, or the snapshot of an id of the Hub.

    A path that exists wins. Raises ConfigError for a URL, and for a revision that is no commit: a branch or a tag names
    other files tomorrow.
    """
    place = url_or_path(text)
    if is_url(place):
        raise ConfigError(url_problem(place))
    path = os.path.normpath(folder / place)
    found = split_id(place)
    if found is None or found[1] is None or os.path.exists(path):
        return path
    name, revision = found
    if not _COMMIT.fullmatch(str(revision)):
        raise ConfigError(
            f"{place}: {revision} is no commit (40 hex digits), and a branch or a tag can move; the commit that it is "
            f"today is said by: forebay fetch {place}"
        )
    return str(HubModel(name, str(revision)).folder)


def model_of(folder: Path) -> HubModel | None:
    """Returns the model of which a folder is the snapshot in the client's cache; None for any other folder."""
    owner, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
    if not name or not _COMMIT.fullmatch(folder.name):
        return None
    model = HubModel(f"{owner}/{name}", folder.name)
    return model if model.folder == folder else None


def is_whole(folder: Path) -> bool:
    """Returns whether a model's folder is there; of a snapshot that forebay fetches, whether all its files are."""
    model = model_of(folder)
    names = [] if model is None else model.listed()[0]
    return folder.is_dir() and all((folder / name).is_file() for name in names)


def url_problem(url: str) -> str:
    """Returns what is wrong with a URL where a folder is wanted; of a page of the Hub, the command that fetches it."""
    said, found = f"{url} is a URL, and this is read from this machine: name a local path", _PAGE.match(url)
    if found is None:
        return said
    return f"{said}, or a commit of it; what to write is said by: forebay fetch {found[1]}"


def hub_advice(folder: Path, thing: Thing) -> str:
    """Returns the end of a message about a missing folder; empty if the folder's path looks like no name of the Hub.

    The path of `openai/whisper-small` beside a config ends in such a name, and the folder `openai` is not there either.
    """
    model = model_of(folder)
    if model is not None:
        return f"; {model} is not in the Hub's cache on this machine, or not whole; bring it: forebay fetch {model}"
    name = "/".join(folder.parts[-2:])
    if folder.exists() or folder.parent.exists() or not folder.parent.parent.exists():
        return ""
    if thing != "dataset":
        return f"; if {name} is a model of the Hub, its commit belongs behind it; it is said by: forebay fetch {name}"
    line = f"from datasets import load_dataset as l; l({name!r}).save_to_disk({str(folder)!r})"
    quoted = shlex.quote(line) if set(line) & set('"$`\\!') else f'"{line}"'
    return f"; if {name} is the name of a dataset of the Hub, save it there: python -c {quoted}"


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
    files = {path.relative_to(folder).as_posix(): path for path in tokenizer_files(folder)}
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


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that define a tokenizer."""
    return [path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()]


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def processor_digest(folder: Path) -> str:
    """Returns the sha256, as 64 hex digits, of the names and contents of the files that define an image processor.

    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no processor.
    """
    return _digest_of(folder, "vision.processor", "processor", "image processor")


def extractor_digest(folder: Path) -> str:
    """Returns the sha256, as 64 hex digits, of the names and contents of the files that define a feature extractor.

    Raises ConfigError, naming the field, where the folder is missing, cannot be read, or holds no extractor.
    """
    return _digest_of(folder, "audio.extractor", "extractor", "feature extractor")


def _digest_of(folder: Path, setting: str, thing: Thing, what: str) -> str:
    if not is_whole(folder):
        raise _refused(
            setting,
            f"{folder} is not a folder; point it at one with a preprocessor_config.json{hub_advice(folder, thing)}",
        )
    digest = hashlib.sha256()
    present = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not present:
        raise _refused(
            setting,
            f"{folder} holds no {what} (no {' or '.join(_PROCESSOR_FILES)}); "
            f"save one there with {thing}.save_pretrained(folder)",
        )
    try:
        for path in present:
            _add(digest, path.name, path.read_bytes())
    except OSError as err:
        raise _refused(setting, f"cannot read {err.filename}: {err.strerror}") from err
    return digest.hexdigest()


def _refused(setting: str, why: str) -> ConfigError:
    message, is_image = f"{setting}: {why}", setting == "vision.processor"
    return ConfigError(message, code="FB107") if is_image else ConfigError(message, code="FB121")


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
