"""What the metadata of a cache must hold before anything is believed: its checksum proves no good will."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.store.layout import GROUPS, FieldSpec, Group
from forebay.store.tdz import TORCH_DTYPES

_TYPES: Mapping[str, type] = {
    "constants": dict,
    "fields": list,
    "files": dict,
    "key": str,
    "length_names": list,
    "num_samples": int,
    "num_shards": int,
    "recipe_key": str,
}
_ARRAYS = ("slots.npy", "lengths.npy")
_MAX_SHARDS = 1 << 31


def checked_fields(folder: Path, metadata: Mapping[str, Any]) -> list[FieldSpec]:
    """Returns the field specifications of a cache whose metadata holds what a cache needs, in the types that it needs.

    Raises CacheMismatchError where something is not there, CacheCorruptError where it is of another type, names a file
    outside of the folder, or where the folder leads elsewhere by a link.
    """
    if absent := _TYPES.keys() - metadata.keys():
        raise CacheMismatchError(f"{folder} is not a cache: its metadata.json has no {', '.join(sorted(absent))}")
    for name, wanted in _TYPES.items():
        if not isinstance(metadata[name], wanted) or isinstance(metadata[name], bool):
            raise _foreign(folder, f"{name} is {metadata[name]!r:.60}, wanted {wanted.__name__}")
    for name in ("num_samples", "num_shards"):
        if not 0 <= metadata[name] < _MAX_SHARDS:
            raise _foreign(folder, f"{name} is {metadata[name]}, wanted 0 to {_MAX_SHARDS - 1}")
    if not all(isinstance(name, str) for name in metadata["length_names"]):
        raise _foreign(folder, "length_names holds what is no name")
    fields = [_field(folder, document) for document in metadata["fields"]]
    _check_files(folder, metadata["files"], groups_of(fields))
    return fields


def groups_of(fields: Iterable[FieldSpec]) -> tuple[Group, ...]:
    """Returns the groups of a cache of these fields: there is no media where no field is of it."""
    return GROUPS if any(field.group == "media" for field in fields) else ("text",)


def _check_files(folder: Path, files: Mapping[str, Any], groups: Sequence[Group]) -> None:
    for name, entry in files.items():
        if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise _foreign(folder, f"it names a file {name!r}, which is not in the cache")
        types = {"size_bytes": int, "xxh3_128": str}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), wanted) for k, wanted in types.items()):
            raise _foreign(folder, f"the entry of {name} is {entry!r:.60}, wanted size_bytes and xxh3_128")
    if missing := [name for name in (*_ARRAYS, *(f"{group}.npy" for group in groups)) if name not in files]:
        raise _foreign(folder, f"it names no {', '.join(missing)}")
    for group in groups:
        if (folder / group).is_symlink():
            raise CacheCorruptError(f"{folder / group} is a link and leads out of its cache; put a copy in its place")


def _field(folder: Path, document: Any) -> FieldSpec:
    try:
        field = FieldSpec.from_json(document)
        is_right = (
            isinstance(field.name, str)
            and field.group in GROUPS
            and (field.dtype == "str" or field.dtype in TORCH_DTYPES)
            and all(type(axis) is int and 0 <= axis < _MAX_SHARDS for axis in field.shape)
        )
    except (TypeError, ValueError, KeyError) as err:
        raise _foreign(folder, f"a field is {document!r:.60}: {err}") from err
    if not is_right:
        raise _foreign(folder, f"a field is {document!r:.80}")
    return field


def _foreign(folder: Path, what: str) -> CacheCorruptError:
    return CacheCorruptError(
        f"{folder}: its metadata.json is none that forebay writes: {what}; run: forebay preprocess CONFIG --rebuild"
    )
