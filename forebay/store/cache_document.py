"""What the metadata of a cache must hold before anything is believed: its checksum proves no good will."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheMismatchError, ForebayError
from forebay.store.layout import GROUPS, FieldSpec, Group
from forebay.store.schema import COUNT, NUMBER, OBJECT, POSITIVE, TEXT, Check, map_of, or_null, record
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
_DESCRIPTION: Mapping[str, Check] = {
    "clipped": COUNT,
    "excluded": map_of(COUNT),
    "failed": map_of(COUNT),
    "format_version": COUNT,
    "languages": map_of(record({"samples": COUNT, "hours": NUMBER})),
    "made_with": map_of(TEXT),
    "name": TEXT,
    "probe": OBJECT,
    "recipe": map_of(or_null(OBJECT)),
    "rows_per_shard": COUNT,
    "size_bytes": COUNT,
    "split": TEXT,
}
"""What opening needs not, and a report shows."""
_OPTIONAL: Mapping[str, Check] = {"longer": COUNT, "unused_fields": map_of(COUNT)}
"""What caches of before have not."""
_AUDIO = record({"sample_rate_hz": POSITIVE})
_CLIPPED = record({}, {"audio": or_null(record({}, {"clip_s": or_null(NUMBER)}))})
_FOUND = record(
    {"key": TEXT, "recipe_key": TEXT, "files": OBJECT, "name": TEXT, "recipe": _DESCRIPTION["recipe"]},
    {name: _DESCRIPTION[name] for name in ("excluded", "failed")} | {"num_samples": COUNT, "codec": TEXT},
)
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


def check_found(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Returns where metadata holds what a cache is found and compared by. Raises CacheCorruptError."""
    _check(_FOUND, folder, metadata)


def check_description(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Returns where the metadata of an opened cache describes it wholly, as a report needs it. Raises CacheCorruptError."""
    _check(record(_DESCRIPTION, _OPTIONAL), folder, metadata)
    _check(_CLIPPED, folder, metadata["recipe"])
    constants, lengths = metadata["constants"], {"num_tokens"}
    _check(record({"features": TEXT}), folder, constants)
    if "media_rows" in metadata:
        _check(record({"codec": TEXT, "num_images": COUNT}), folder, metadata)
        lengths |= {"num_images", "num_patches"}
    elif constants["features"] != "none":
        _check(_AUDIO, folder, constants)
        lengths |= {"num_samples"}
    if ("media_rows" in metadata) != (constants["features"] == "patches"):
        raise _foreign(folder, f"features is {constants['features']!r:.60}, which its media rows are not")
    if missing := sorted(lengths - set(metadata["length_names"])):
        raise _foreign(folder, f"length_names has no {', '.join(missing)}")


@contextlib.contextmanager
def foreign_values(folder: Path) -> Iterator[None]:
    """Turns what comes of values in a cache that forebay never writes there, though signed, into CacheCorruptError."""
    try:
        yield
    except ForebayError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as err:
        raise _foreign(folder, f"reading by it ends in {err!r:.80}") from err


def _check(check: Check, folder: Path, document: Any) -> None:
    try:
        check(document, "it")
    except ValueError as err:
        raise _foreign(folder, str(err)) from err


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
            and field.role in ("tensor", "table")
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
