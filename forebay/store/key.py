"""Documents: the key that names a cache's values, canonical JSON and its digest, differences, checks of values.

- recipe key: filters of `[source]`, steps with their versions, tokenizer and processor files by content.
- key: the recipe key, and the sources by relative name and content.
- shard key (`forebay.preprocess.groups`): steps of the group, probe, content of the rows, format version.
- plan key and state key: see `forebay.plan.names`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.config.tree import AudioConfig, Config
from forebay.store.inputs import SAMPLES
from forebay.visible import printable

KEY_VERSION = 1
_BLOCK = 4096
SHORT = 16
"""Hex digits of a key in names and messages."""
ABSENT = "(absent)"
"""Stands for the value of a setting that a recipe does not have."""


class KeyedRecipe(Protocol):
    """A recipe as it is looked up: all of a key that a miss needs, known without touching raw data."""

    @property
    def document(self) -> dict[str, Any]:
        """Everything that changes values, by content."""

    @property
    def key(self) -> str:
        """`recipe_key` of the document."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SourceDigest:
    """One source file as it enters the key: its name relative to the manifest and the xxh3-128 of its bytes."""

    name: str
    xxh3_128: str


def recipe_key(document: Mapping[str, Any]) -> str:
    """Returns the digest of a recipe's document."""
    return digest({"version": KEY_VERSION, "recipe": document})


def cache_key(recipe: str, sources: Iterable[SourceDigest]) -> str:
    """Returns the key of a cache: sha256 over the recipe key and the sources in their order.

    It is the `digest` of a document of both, taken piece by piece: loose files may be millions.
    """
    before, after = canonical_json({"recipe_key": recipe, "sources": []}).split(b"[]")
    state = hashlib.sha256(before + b"[")
    left, mark = iter(sources), b""
    while block := [[source.name, source.xxh3_128] for source in itertools.islice(left, _BLOCK)]:
        state.update(mark + canonical_json(block, is_parsed=True)[1:-1])
        mark = b","
    state.update(b"]" + after)
    return state.hexdigest()


def folder_name(config: Config, key: str) -> str:
    """Returns the name of a cache's folder; the codec of images ends it, where it is not raw."""
    ending = "" if config.codec in (None, "raw") else f".{config.codec}"
    return f"{config.name}-{config.source.split}-{key[:SHORT]}{ending}"


def differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the fields in which two recipe documents differ, as `{"field", "wanted", "stored"}`, sorted by field.

    A section that only one of them has is one field; so is a setting, whose other value is then `ABSENT`.
    """
    return sorted(_differences(wanted, stored, ""), key=lambda difference: str(difference["field"]))


def _differences(wanted: Mapping[str, Any], stored: Mapping[str, Any], prefix: str) -> Iterator[dict[str, Any]]:
    for name in wanted.keys() | stored.keys():
        left, right = wanted.get(name, ABSENT), stored.get(name, ABSENT)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _differences(left, right, f"{prefix}{name}.")
        # Types count: 1, 1.0 and True are different values of a setting; a tuple and a list are not.
        elif canonical_json(left) != canonical_json(right):
            yield {"field": f"{prefix}{name}", "wanted": left, "stored": right}


def canonical_json(document: Any, *, is_parsed: bool = False) -> bytes:
    """Returns the one byte string of a document: sorted keys, no white space, ASCII, types kept (1 is not 1.0).

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold and for keys that are not strings: two
    documents would share a form. is_parsed: the document came out of JSON, and all of its keys are strings.
    """
    if not is_parsed:
        _refuse_foreign_keys(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(document: Any) -> str:
    """Returns the sha256 of the canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(document)).hexdigest()


def _refuse_foreign_keys(document: Any) -> None:
    if isinstance(document, dict):
        for name, value in document.items():
            if not isinstance(name, str):
                raise TypeError(f"key {name!r} of a canonical document is {type(name).__name__}, wanted str")
            _refuse_foreign_keys(value)
    elif isinstance(document, (list, tuple)):
        for value in document:
            _refuse_foreign_keys(value)


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
    if name.startswith("model."):
        return next((model.folder for model in config.model if name == f"model.{model.name}.digest"), None)
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
    return f"{said}: sha256 {wanted[:SHORT]} wanted, {stored[:SHORT]} stored"


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


Check = Callable[[Any, str], None]
"""Raises ValueError where a value, which stands at this place, is of another kind."""
_MAX_NUMBER = 1e300
"""JSON holds integers that no float can."""


def _kind(what: str, is_right: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> None:
        if not is_right(value):
            raise ValueError(f"{where} is {value!r:.60}, wanted {what}")

    return check


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER


TEXT = _kind("a text", lambda value: isinstance(value, str))
COUNT = _kind("a count", lambda value: type(value) is int and 0 <= value < 1 << 63)
POSITIVE = _kind("a count of 1 or more", lambda value: type(value) is int and 0 < value < 1 << 63)
NUMBER = _kind("a number", _is_number)
OBJECT = _kind("an object", lambda value: isinstance(value, dict))
_LIST = _kind("a list", lambda value: isinstance(value, list))
_FULL_LIST = _kind("a list that is not empty", lambda value: isinstance(value, list) and bool(value))


def or_null(check: Check) -> Check:
    """Returns a check that lets None pass too."""
    return lambda value, where: None if value is None else check(value, where)


def all_of(*checks: Check) -> Check:
    """Returns a check for values that pass each of these."""

    def check(value: Any, where: str) -> None:
        for one in checks:
            one(value, where)

    return check


def list_of(part: Check, *, may_be_empty: bool = True) -> Check:
    """Returns a check for lists of one kind of values."""

    def check(value: Any, where: str) -> None:
        (_LIST if may_be_empty else _FULL_LIST)(value, where)
        for number, found in enumerate(value):
            part(found, f"{where}[{number}]")

    return check


def map_of(part: Check) -> Check:
    """Returns a check for objects of one kind of values."""

    def check(value: Any, where: str) -> None:
        OBJECT(value, where)
        for name, found in value.items():
            part(found, f"{where}.{name}")

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Returns a check for objects with these entries; what else they have is not looked at."""
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        OBJECT(value, where)
        if missing := sorted(required.keys() - value.keys()):
            raise ValueError(f"{where} has no {', '.join(missing)}")
        for name in known.keys() & value.keys():
            known[name](value[name], f"{where}.{name}")

    return check
