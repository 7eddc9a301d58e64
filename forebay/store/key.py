"""The key that names a cache's values, and canonical JSON with its digest, by which documents are named.

- recipe key: filters of `[source]`, steps with their versions, tokenizer and processor files by content.
- key: the recipe key, and the sources by relative name and content.
- shard key (`forebay.preprocess.groups`): steps of the group, probe, content of the rows, format version.
- plan key and state key: see `forebay.plan.names`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.config.tree import Config

KEY_VERSION = 1

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


def cache_key(recipe: str, sources: Sequence[SourceDigest]) -> str:
    """Returns the key of a cache: sha256 over the recipe key and the sources in their order."""
    return digest({"recipe_key": recipe, "sources": [[s.name, s.xxh3_128] for s in sources]})


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

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold (keys that are not strings included:
    json would turn them into strings, and two documents would share one form). is_parsed: the document came out of
    JSON, and all of its keys are strings.
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
