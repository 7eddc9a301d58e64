"""The key: what a cache's values are named by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.config import Config
from forebay.config.recipe import AnyRecipe, recipe_document, recipe_of
from forebay.store.canonical import canonical_json, digest

KEY_VERSION = 1
SHORT = 16
"""Hex digits of a key in names and messages."""
ABSENT = "(absent)"
"""Stands for the value of a setting that a recipe does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeKey:
    """A recipe, its document and the digest of that: all of a key that a miss needs, known without touching raw data."""

    recipe: AnyRecipe
    document: dict[str, Any]
    key: str


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SourceDigest:
    """One source file as it enters the key: its name relative to the manifest and the xxh3-128 of its bytes."""

    name: str
    xxh3_128: str


def recipe_key(config: Config) -> RecipeKey:
    """Returns the recipe key of a config; reads the config's own files (tokenizer), never the raw data.

    Raises ConfigError where such a file is missing.
    """
    recipe = recipe_of(config)
    document = recipe_document(config, recipe)
    return RecipeKey(recipe=recipe, document=document, key=digest({"version": KEY_VERSION, "recipe": document}))


def cache_key(recipe: str, sources: Sequence[SourceDigest]) -> str:
    """Returns the key of a cache: sha256 over the recipe key and the sources in their order."""
    return digest({"recipe_key": recipe, "sources": [[s.name, s.xxh3_128] for s in sources]})


def folder_name(config: Config, key: str) -> str:
    """Returns the name of a cache's folder; the codec of images ends it, where it is not raw."""
    suffix = "" if codec_of(config) in (None, "raw") else f".{codec_of(config)}"
    return f"{config.name}-{config.source.split}-{key[:SHORT]}{suffix}"


def codec_of(config: Config) -> str | None:
    """Returns how a config stores images: the `codec` of its caches' metadata. None for audio."""
    return None if config.vision is None else config.vision.codec


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
