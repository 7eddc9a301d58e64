"""metadata.json of a cache or plan folder: a document with its own checksum and the checksums of the arrays beside it.

A checksum only shows damage: somebody else may have signed a document that forebay never writes. What the metadata of a
cache says is therefore compared with what forebay writes before anything is read by it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import xxhash

from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheIncompleteError,
    CacheMismatchError,
    CacheNotFoundError,
    ForebayError,
    FormError,
)
from forebay.store.cold.arrays import ROOT as COLD_ROOT
from forebay.store.cold.arrays import pull_hint
from forebay.store.files import hash_file, write_bytes
from forebay.store.held import AnyFile, AnyFolder
from forebay.store.image.codec import FIELDS
from forebay.store.key import (
    COUNT,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    Check,
    canonical_json,
    list_of,
    map_of,
    or_null,
    record,
)
from forebay.store.layout import FORMAT_VERSION, METADATA, Array, FieldSpec, Group, is_group_name
from forebay.store.layout import TEXT as TEXT_GROUP
from forebay.store.shared_disk import is_gone
from forebay.store.tdz import TORCH_DTYPES

FILE_NAME = METADATA
_MAX_BYTES = 64 * 1024 * 1024


def checksum(document: Mapping[str, Any], *, is_parsed: bool = False) -> str:
    """Returns the xxh3-128 of a document's canonical JSON without its `checksum` entry; is_parsed: as there."""
    unsigned = {name: value for name, value in document.items() if name != "checksum"}
    return xxhash.xxh3_128_hexdigest(canonical_json(unsigned, is_parsed=is_parsed))


def write_metadata(folder: Path, document: dict[str, Any]) -> None:
    """Writes metadata.json with its checksum; the last act of making a folder."""
    write_bytes(folder / FILE_NAME, _text({**document, "checksum": checksum(document)}))


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"


def read_metadata(
    folder: AnyFolder, *, format_version: int = FORMAT_VERSION, oldest: int | None = None, is_exact: bool = True
) -> dict[str, Any]:
    """Returns the document of a folder. oldest: the first form that is read; None: `format_version` alone.

    is_exact: its spelling is compared too, which takes longer than all else.

    Raises CacheNotFoundError for no folder, CacheIncompleteError for one that is not sealed, CacheCorruptError where
    the file is not as it was written, CacheMismatchError where a newer or an older forebay wrote it.
    """
    data = _read(folder / FILE_NAME)
    return parse_metadata(folder, data, format_version=format_version, oldest=oldest, is_exact=is_exact)


def parse_metadata(
    folder: AnyFolder,
    data: bytes,
    *,
    format_version: int = FORMAT_VERSION,
    oldest: int | None = None,
    is_exact: bool = True,
) -> dict[str, Any]:
    """Returns the document of a folder whose metadata.json has these bytes; raises as `read_metadata` does of these."""
    path = folder / FILE_NAME
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as err:
        raise CacheCorruptError(f"{path} is not JSON ({err}); run: forebay preprocess CONFIG --rebuild") from err
    if not isinstance(document, dict):
        raise CacheCorruptError(f"{path} holds {type(document).__name__}, wanted an object")
    version = document.get("format_version")
    if isinstance(version, int) and version > format_version:
        raise CacheMismatchError(
            f"{folder}: format_version is {version}, this forebay reads up to {format_version}; upgrade forebay",
            code="FB406",
        )
    is_cache = "recipe_key" in document  # and no plan, which has forms of its own
    if is_cache and isinstance(version, int) and version < (format_version if oldest is None else oldest):
        raise CacheMismatchError(
            f"{folder}: format_version is {version}, this forebay reads {format_version}; make it anew: forebay "
            f"preprocess CONFIG, and remove the old one: forebay cache rm {folder}",
            code="FB407",
        )
    _check(path, document, data if is_exact else None)
    return document


def _read(path: AnyFile) -> bytes:
    try:
        return read_regular(path)
    except OSError as err:
        if not (is_gone(err) or isinstance(err, NotADirectoryError)):
            raise CacheError(f"cannot read {path}: {err.strerror}") from err
        if not os.path.isdir(path.parent):  # `Path.is_dir` raises where it is stale
            raise CacheNotFoundError(f"{path.parent} is not a folder; run: forebay preprocess CONFIG") from err
        raise CacheIncompleteError(
            _cold_hint(path.parent)
            or root_hint(path.parent)
            or f"{path.parent} has no {FILE_NAME}: it is not sealed; run: forebay preprocess CONFIG (of raw data: "
            "forebay init DIR)"
        ) from err


def _cold_hint(folder: Path) -> str | None:
    """Advice if a folder is the zarr form of a cache."""
    try:
        return pull_hint(read_regular(folder / COLD_ROOT), folder)
    except (OSError, CacheError):
        return None


def root_hint(folder: Path) -> str | None:
    """Advice if a folder is no cache but holds some."""
    try:
        caches = sorted(entry.name for entry in os.scandir(folder) if os.path.isfile(os.path.join(entry, FILE_NAME)))
    except (OSError, TypeError):  # a folder that is held by its descriptor has no path
        return None
    if not caches:
        return None
    return (
        f"{folder} is no cache but holds {len(caches)}, the first is {caches[0]}; name one of them: forebay cache ls "
        f"--cache-root {folder}"
    )


def _check(path: AnyFile, document: dict[str, Any], data: bytes | None) -> None:
    try:
        computed = checksum(document, is_parsed=True)
    except (ValueError, TypeError, RecursionError) as err:
        raise CacheCorruptError(f"{path} holds values that a cache never has: {err}") from err
    if document.get("checksum") != computed:
        raise CacheCorruptError(
            f"{path}: stored checksum {document.get('checksum')}, computed {computed}; "
            "run: forebay preprocess CONFIG --rebuild"
        )
    if (
        data is not None and _text(document) != data
    ):  # the same values in another spelling: white space, the case of an exponent
        raise CacheCorruptError(f"{path} is not as it was written; run: forebay preprocess CONFIG --rebuild")


def save_array(folder: Path, name: str, array: Array) -> dict[str, Any]:
    """Writes one .npy file and returns its entry for the document: size and xxh3-128."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return save_file(folder, name, buffer.getbuffer())


def save_file(folder: Path, name: str, data: bytes | memoryview) -> dict[str, Any]:
    """Writes one file and returns its entry for the document."""
    write_bytes(folder / name, data)
    return {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def load_array(folder: AnyFolder, name: str, entry: Mapping[str, Any], *, verify: bool) -> Array:
    """Returns a .npy file as a read-only memory map after checking its size, and with `verify` its content."""
    check_file(folder / name, entry, verify=verify)
    try:
        with (folder / name).open("rb", buffering=0) as file:
            return _mapped(file)
    except OSError as err:  # no handle or memory left: says nothing about the file
        raise CacheError(f"{folder / name} cannot be mapped: {err.strerror}", code="FB422") from err
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, TokenError) as err:
        raise CacheCorruptError(f"{folder / name} is not a .npy file: {err}") from err


def _mapped(file: io.FileIO) -> Array:
    """Returns the same as `np.load(mmap_mode="r")`, which takes a path and no file."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"its version is {version}")
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def check_file(path: AnyFile, entry: Mapping[str, Any], *, verify: bool) -> None:
    """Raises CacheCorruptError where a file is missing or not of its entry's size, with `verify` of its bytes.

    What is no regular file is refused: a link leads out of the cache, a named pipe or a device has no end.
    """
    try:
        size, computed = regular_size(path), None
        if verify and size == entry["size_bytes"]:
            computed = hash_file(path)
    except OSError as err:
        if not (is_gone(err) or isinstance(err, NotADirectoryError)):
            raise
        raise CacheCorruptError(f"{path} is missing; run: forebay preprocess CONFIG") from err
    if size != entry["size_bytes"]:
        raise CacheCorruptError(
            f"{path} has {size} bytes, its metadata says {entry['size_bytes']}; run: forebay preprocess CONFIG"
        )
    if verify and computed != entry["xxh3_128"]:
        raise CacheCorruptError(
            f"{path}: stored xxh3-128 {entry['xxh3_128']}, computed {computed}; run: forebay preprocess CONFIG --verify"
        )


def read_regular(path: AnyFile) -> bytes:
    """Returns the bytes of a document in a folder of ours; OSError where it cannot be read.

    Raises CacheCorruptError for no regular file (a pipe or a device has no end), or one larger than is ever written.
    """
    size = regular_size(path)
    if size > _MAX_BYTES:
        raise CacheCorruptError(f"{path} has {size} bytes, at most {_MAX_BYTES} are expected")
    return path.read_bytes()


def regular_size(path: AnyFile) -> int:
    """Returns the bytes of a file that is one itself, no link. Raises CacheCorruptError where it is not, OSError."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CacheCorruptError(
            f"{path} is {stat.filemode(status.st_mode)}, no regular file, which forebay never writes; "
            "put a copy in its place"
        )
    return status.st_size


_TYPES: Mapping[str, type] = {
    "constants": dict,
    "fields": list,
    "files": dict,
    "key": str,
    "length_names": list,
    "groups": dict,
    "num_samples": int,
    "recipe_key": str,
}

_DESCRIPTION: Mapping[str, Check] = {
    "clipped": COUNT,
    "excluded": map_of(COUNT),
    "failed": map_of(COUNT),
    "format_version": COUNT,
    "languages": map_of(record({"samples": COUNT, "hours": NUMBER})),
    "longer": COUNT,
    "made_with": map_of(TEXT),
    "name": TEXT,
    "probe": OBJECT,
    "recipe": map_of(or_null(OBJECT)),
    "rows_per_shard": COUNT,
    "size_bytes": COUNT,
    "split": TEXT,
    "unused_fields": map_of(COUNT),
}
"""What a report shows, and opening does not need."""

_MADE_OF = list_of(record({"key": TEXT, "name": TEXT, "num_samples": COUNT, "taken": COUNT}))
_AUDIO = record({"sample_rate_hz": POSITIVE})
_CLIPPED = record({}, {"audio": or_null(record({}, {"clip_s": or_null(NUMBER)}))})
_FOUND = record(
    {"key": TEXT, "recipe_key": TEXT, "files": OBJECT, "name": TEXT, "recipe": _DESCRIPTION["recipe"]},
    {name: _DESCRIPTION[name] for name in ("excluded", "failed")} | {"num_samples": COUNT, "codec": TEXT},
)
_ARRAYS = ("slots.npy", "lengths.npy")
_LENGTHS = {"text": ("num_tokens",), "audio": ("num_audio_samples",), "image": ("num_images",)}
"""What every cache with a group has the lengths of."""
_CUT = frozenset(FIELDS.values())
"""Fields of images that are cut into patches, which are counted too."""
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
    if not 0 <= metadata["num_samples"] < _MAX_SHARDS:
        raise _foreign(folder, f"num_samples is {metadata['num_samples']}, wanted 0 to {_MAX_SHARDS - 1}")
    if not all(isinstance(name, str) for name in metadata["length_names"]):
        raise _foreign(folder, "length_names holds what is no name")
    groups, found = groups_of(folder, metadata), metadata["length_names"]
    fields = [_field(folder, document, groups) for document in metadata["fields"]]
    wanted_lengths = [name for group in groups for name in _LENGTHS.get(group, ())]
    wanted_lengths += ["num_patches"] if any(field.group == "image" and field.name in _CUT for field in fields) else []
    if missing := [name for name in wanted_lengths if name not in found]:
        raise _foreign(folder, f"length_names has no {', '.join(missing)}, it has {', '.join(found)}")
    constants = metadata["constants"]
    if constants.keys() != groups.keys() or not all(isinstance(values, dict) for values in constants.values()):
        raise _foreign(folder, f"constants are those of {', '.join(constants)}, its groups {', '.join(groups)}")
    _check_files(folder, metadata["files"], groups)
    return fields


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The facts about a group in metadata.json. num_items: how many the samples list in all; None: each has its own."""

    num_shards: int
    num_items: int | None = None

    @property
    def is_listed(self) -> bool:
        """Whether samples list their items; else the item of a sample lies where its row lies in every such group."""
        return self.num_items is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of a group in metadata.json."""
        return {"num_shards": self.num_shards, "num_items": self.num_items}


_SHAPE = record({"num_shards": COUNT, "num_items": or_null(COUNT)})


def groups_of(folder: Path, metadata: Mapping[str, Any]) -> dict[Group, GroupShape]:
    """Returns the groups of a cache, text last. Raises CacheCorruptError for what forebay never writes."""
    found: dict[Group, GroupShape] = {}
    for name, document in sorted(metadata["groups"].items(), key=lambda item: (item[0] == TEXT_GROUP, item[0])):
        if not is_group_name(name):
            raise _foreign(folder, f"a group is called {name!r:.60}")
        _require_form(_SHAPE, folder, document)
        found[name] = GroupShape(document["num_shards"], document["num_items"])
        if found[name].num_shards >= _MAX_SHARDS:
            raise _foreign(folder, f"the group {name} has {found[name].num_shards} shards")
    if TEXT_GROUP not in found or found[TEXT_GROUP].is_listed:
        raise _foreign(folder, "it has no group text, whose rows are the samples")
    for name, shape in found.items():
        if not shape.is_listed and shape.num_shards != found[TEXT_GROUP].num_shards:
            raise _foreign(folder, f"{name} has {shape.num_shards} shards, text {found[TEXT_GROUP].num_shards}")
    return found


def check_found(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Raises CacheCorruptError where metadata lacks what a cache is found and compared by."""
    _require_form(_FOUND, folder, metadata)


def check_description(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Raises CacheCorruptError where a cache's metadata does not describe it wholly, as a report needs it."""
    _require_form(record(_DESCRIPTION), folder, metadata)
    _require_form(_CLIPPED, folder, metadata["recipe"])
    _require_form(_MADE_OF, folder, metadata.get("made_of", []))
    constants = metadata["constants"]
    for group in constants.keys() - {TEXT_GROUP} or {TEXT_GROUP}:
        _require_form(record({"features": TEXT}), folder, constants[group])
    if "image" in constants:
        _require_form(record({"codec": TEXT, "num_images": COUNT}), folder, metadata)
    if "audio" in constants:
        _require_form(_AUDIO, folder, constants["audio"])


@contextlib.contextmanager
def foreign_values(folder: Path) -> Iterator[None]:
    """Turns what comes of values in a cache that forebay never writes there, though signed, into CacheCorruptError."""
    try:
        yield
    except FormError as err:
        raise _foreign(folder, str(err)) from err
    except ForebayError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as err:
        raise _foreign(folder, f"reading by it ends in {err!r:.80}") from err


def _require_form(check: Check, folder: Path, document: Any) -> None:
    try:
        check(document, "it")
    except ValueError as err:
        raise _foreign(folder, str(err)) from err


def items_files(group: Group) -> tuple[str, str]:
    """Returns the files that say which items of a group each sample lists: where its list begins, and their slots."""
    return f"{group}_offsets.npy", f"{group}_slots.npy"


def _check_files(folder: Path, files: Mapping[str, Any], groups: Mapping[Group, GroupShape]) -> None:
    for name, entry in files.items():
        if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise _foreign(folder, f"it names a file {name!r}, which is not in the cache")
        types = {"size_bytes": int, "xxh3_128": str}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), wanted) for k, wanted in types.items()):
            raise _foreign(folder, f"the entry of {name} is {entry!r:.60}, wanted size_bytes and xxh3_128")
    wanted = [*_ARRAYS, *(f"{group}.npy" for group in groups)]
    wanted += [name for group, shape in groups.items() if shape.is_listed for name in items_files(group)]
    if missing := [name for name in wanted if name not in files]:
        raise _foreign(folder, f"it names no {', '.join(missing)}")
    for group in groups:
        if (folder / group).is_symlink():
            raise CacheCorruptError(f"{folder / group} is a link and leads out of its cache; put a copy in its place")


def _field(folder: Path, document: Any, groups: Collection[Group]) -> FieldSpec:
    try:
        field = FieldSpec.from_json(document)
        is_right = (
            isinstance(field.name, str)
            and field.group in groups
            and field.role in ("tensor", "table")
            and type(field.nullable) is bool
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
