"""Which file or folder a field of a recipe is the digest of, so that messages name what changed and not its hash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.config.data import AudioConfig
from forebay.config.tree import Config
from forebay.store.inputs import SAMPLES
from forebay.visible import printable

_SHOWN = 16
_OF_PROCESSORS = ("vision.processor", "text.processor")


def content_of(config: Config, row: Mapping[str, Any]) -> str | None:
    """Returns the file or folder whose content a row of `differences` compares; None for a row of a setting.

    row: `field`, `wanted`, `stored`. Of files that a step lists these are the names of those that differ.
    """
    name = row["field"]
    if name == "audio.files":
        return ", ".join(_changed_files(row["wanted"], row["stored"])) or None
    if not (_is_digest(row["wanted"]) and _is_digest(row["stored"])):
        return None
    if name == "audio.digest":
        return _of_step(config)
    if name == "text.tokenizer" and config.text is not None:
        return config.text.tokenizer or None
    return config.vision.processor if name in _OF_PROCESSORS and config.vision else None


def difference(config: Config, row: Mapping[str, Any]) -> str:
    """Returns a row of `differences` as a message has it, with what its values are digests of."""
    name, wanted, stored = row["field"], row["wanted"], row["stored"]
    content = content_of(config, row)
    if name == f"sources.{SAMPLES}" and wanted is None:
        code = printable(config.source.manifests[0])
        return f"the samples of {code} are not listed: it was edited, or the folder of its samples was deleted"
    if content is None:
        return f"{name} differs ({wanted!r} wanted, {stored!r} stored)"
    return f"{name} differs ({_of(content, wanted, stored)})"


def explained(row: Mapping[str, Any]) -> str:
    """Returns a row of `forebay key` as its lines have it. row: with `content_of`, where that is known."""
    name, wanted, stored = row["field"], row["wanted"], row["stored"]
    if "content_of" in row:
        return f"{name}: {_of(row['content_of'], wanted, stored)}"
    return f"{name}: {wanted!r} wanted, {stored!r} stored"


def _of(content: str, wanted: object, stored: object) -> str:
    said = f"the content of {printable(content)} changed"
    if not (isinstance(wanted, str) and isinstance(stored, str)):
        return said
    return f"{said}: sha256 {wanted[:_SHOWN]} wanted, {stored[:_SHOWN]} stored"


def _of_step(config: Config) -> str:
    """Returns what the features of a config are made by: the file of a class, an extractor's folder, or a package."""
    audio = config.audio or AudioConfig()
    features = audio.features
    if features == "extractor":
        return str(audio.settings.get("extractor", ""))
    file, colon, _ = features.rpartition(":")
    return file if colon else f'the package that brings features = "{features}"'


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _changed_files(wanted: object, stored: object) -> Iterator[str]:
    """Yields the names of the files, of lists of names and digests, that are not the same in both."""
    ours, theirs = _digests(wanted), _digests(stored)
    yield from (name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))


def _digests(value: object) -> dict[str, object]:
    pairs = value if isinstance(value, (list, tuple)) else ()
    return {str(pair[0]): pair[1] for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) == 2}
