"""The claim of a folder under a root, and which of its files are forebay's: a folder with others is never removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forebay.caches.root_items import Check, Inside, Read
from forebay.errors import CacheCorruptError
from forebay.store.cold.arrays import ROOT as COLD
from forebay.store.files import is_temporary
from forebay.store.held import ORIGIN
from forebay.store.inputs import SAMPLES
from forebay.store.layout import FORMAT_VERSION, TEXT, is_group_name
from forebay.store.metadata import FILE_NAME, check_found, checked_fields, checksum, groups_of, parse_metadata
from forebay.store.shard import shard_name
from forebay.store.texts import IDENTITY, LOCK, OLD, SEGMENT, count_of

_HEX = "[0-9a-f]{8,128}"
_GROUP = "[a-z][a-z0-9_]{0,31}"
_OF_BUILD = rf"lock|origin|numerics\.json|driver\.(lock|json)|{_GROUP}/{_HEX}\.(tdz|json|lock)|parts/[^/]+\.run"
_OF_INPUTS = rf"{re.escape(SAMPLES)}|[0-9]{{5,}}\.media|images/([0-9a-f]{{2}})/\1[0-9a-f]{{30}}\.image"
_OF_TEXTS = f"{re.escape(IDENTITY)}|{re.escape(LOCK)}|{SEGMENT.pattern}|{OLD.pattern}"
_MOST_BYTES = 64 * 1024 * 1024
_OLD_GROUPS = ("media", TEXT)
"""The groups of caches of forms 1 to 3, which are removed and not read."""
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_document(descriptor: int, name: str) -> tuple[dict[str, Any], int]:
    """Returns the JSON object of a file in an opened folder, and when it was written. Raises CacheError, OSError."""
    try:
        file = os.open(name, _READ_ONLY, dir_fd=descriptor)
    except FileNotFoundError as err:
        raise CacheCorruptError(f"it has no {name}") from err
    with open(file, "rb", buffering=0) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise CacheCorruptError(f"its {name} is no regular file, or too large")
        document = json.loads(opened.readall())
    if not isinstance(document, dict):
        raise CacheCorruptError(f"its {name} holds no object")
    return document, status.st_mtime_ns


def _reads(name: str, **types: type) -> Read:
    """Returns what reads a folder's document of this name. types: of fields without which it is not forebay's."""

    def read(_: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
        document, made_ns = read_document(descriptor, name)
        if not all(isinstance(document.get(field), kind) for field, kind in types.items()):
            raise CacheCorruptError(f"its {name} is none that forebay writes")
        return document, made_ns

    return read


def _names_files(name: str, field: str) -> Check:
    """Returns the check of a folder whose document of this name names its files in a field."""

    def check(descriptor: int, _: Path) -> Callable[[str], bool]:
        files = read_document(descriptor, name)[0].get(field)
        return {name, *(files if isinstance(files, dict) else ())}.__contains__

    return check


def _fits(pattern: str, *, is_written: bool = True) -> Check:
    """Returns the check of a folder by the names of its files. is_written: they may be written aside in it."""

    def is_own(name: str) -> bool:
        return bool(re.fullmatch(pattern, name)) or (is_written and any(map(is_temporary, name.split("/"))))

    return lambda *_: is_own


def _read_cache(folder: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    """Returns the metadata of a cache as a look needs them: their checksum is compared, not how they are spelled."""
    if (what := _other_form(descriptor)) is not None:
        raise CacheCorruptError(what)
    document, made_ns = read_document(descriptor, FILE_NAME)
    if "plan_key" in document:
        raise CacheCorruptError("a plan, which belongs into the folder plans")
    version = document.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CacheCorruptError(f"format_version is {version}, this forebay reads up to {FORMAT_VERSION}")
    if "recipe" not in document or document.get("checksum") != checksum(document, is_parsed=True):
        raise CacheCorruptError(f"its {FILE_NAME} is damaged, or none that forebay writes")
    check_found(folder, document)
    if type(document.get("num_samples")) is not int:
        raise CacheCorruptError(f"its {FILE_NAME} does not say how many samples there are")
    return document, made_ns


def _other_form(descriptor: int) -> str | None:
    """Returns what a folder is that holds a cache in another form, None where it does not."""
    forms = {
        COLD: "the cold form of a cache (zarr), which forebay does not remove",
        ORIGIN: "what this node keeps of a store, which remote.cache_size_gb bounds",
    }
    for name, what in forms.items():
        with contextlib.suppress(OSError):
            os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            return what
    return None


def _check_cache(descriptor: int, folder: Path) -> Callable[[str], bool]:
    """Returns the check of a cache, whose metadata are read once more, and strictly, as opening it does."""
    document, _ = read_document(descriptor, FILE_NAME)
    with open(os.open(FILE_NAME, _READ_ONLY, dir_fd=descriptor), "rb", buffering=0) as opened:
        metadata = parse_metadata(folder, opened.readall(), oldest=1)
    if metadata != document:
        raise CacheCorruptError("its metadata.json is being replaced")
    return names_of_cache(folder, metadata).__contains__


def names_of_cache(folder: Path, metadata: Mapping[str, Any]) -> set[str]:
    """Returns the names of all files of a cache. Raises CacheError for metadata that describe none."""
    check_found(folder, metadata)
    if metadata.get("format_version", 0) < FORMAT_VERSION:
        count = metadata.get("num_shards")
        if type(count) is not int or not 0 <= count < (1 << 24):
            raise CacheCorruptError(f"{folder}: num_shards is {count!r:.60}")
        counts = dict.fromkeys(_OLD_GROUPS, count)
    else:
        checked_fields(folder, metadata)
        counts = {group: shape.num_shards for group, shape in groups_of(folder, metadata).items()}
    shards = {shard_name(group, number) for group, count in counts.items() for number in range(count)}
    return {FILE_NAME, *metadata["files"], *shards}


def _read_plan(folder: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    document, made_ns = read_document(descriptor, FILE_NAME)
    if "plan_key" not in document or document.get("checksum") != checksum(document, is_parsed=True):
        raise CacheCorruptError(f"{folder.name} is damaged, or no plan")
    return document, made_ns


def _check_plan(descriptor: int, _: Path) -> Callable[[str], bool]:
    arrays: Any = read_document(descriptor, FILE_NAME)[0].get("arrays")
    if not isinstance(arrays, dict) or any("/" in name for name in arrays):
        raise CacheCorruptError("its metadata.json names no arrays")
    from forebay.plan.disk import STATISTICS

    return {FILE_NAME, STATISTICS, *(f"{name}.npy" for name in arrays)}.__contains__


def _read_texts(folder: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    """Returns the identity of kept texts, and how many texts there are."""
    try:
        document, made_ns = _reads(IDENTITY, identity=dict)(folder, descriptor)
    except CacheCorruptError:  # it is the first thing that is written there
        if IDENTITY in os.listdir(descriptor):
            raise
        document, made_ns = {"identity": {}}, 0
    names = [name for name in os.listdir(descriptor) if SEGMENT.fullmatch(name)]
    return {**document, "num_texts": sum(_num_texts(name, descriptor) for name in names)}, made_ns


def _num_texts(name: str, folder: int) -> int:
    """Returns how many texts a segment says that it has; those of another segment too are among them."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(name, _READ_ONLY, dir_fd=folder)
        try:
            return count_of(file)
        finally:
            os.close(file)
    return 0


def _read_inputs(_: Path, descriptor: int) -> tuple[Mapping[str, Any], int]:
    """Returns nothing of samples of an iterator, but when they were all listed."""
    try:
        status = os.stat(SAMPLES, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError as err:
        raise CacheCorruptError(f"it has no {SAMPLES}") from err
    if not stat.S_ISREG(status.st_mode):
        raise CacheCorruptError(f"its {SAMPLES} is no regular file")
    return {}, status.st_mtime_ns


CACHE = Inside(
    _read_cache,
    _check_cache,
    # A sealed group has a shard, so an empty folder is nobody's.
    lambda name, contents: is_group_name(name) and any(other.startswith(f"{name}/") for other in contents.names),
)
PLAN = Inside(_read_plan, _check_plan)
LISTING = Inside(_reads("listing.json", files=dict), _names_files("listing.json", "sums"))
PREPARED = Inside(_reads("prepared.json", key=str, files=dict), _names_files("prepared.json", "files"))
KEPT_TEXTS = Inside(_read_texts, _fits(_OF_TEXTS))
INPUTS = Inside(
    _read_inputs,
    _fits(_OF_INPUTS, is_written=False),
    lambda name, _: re.fullmatch(r"images(/[0-9a-f]{2})?", name) is not None,
)
BUILD = Inside(
    None,
    _fits(_OF_BUILD),
    lambda name, _: is_group_name(name) or name == "parts" or is_temporary(name.partition("/")[0]),
)
