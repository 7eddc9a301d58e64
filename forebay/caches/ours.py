"""Which files of an item are forebay's: a folder that holds anything else is never removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from forebay.caches.root_files import RootContents
from forebay.caches.survey import RootItem, Kind, read_document
from forebay.errors import CacheCorruptError, CacheError
from forebay.plan.disk import STATISTICS
from forebay.store.inputs import SAMPLES
from forebay.store.layout import FORMAT_VERSION, TEXT, is_group_name
from forebay.store.metadata import FILE_NAME, check_found, checked_fields, groups_of, parse_metadata
from forebay.store.shard import shard_name
from forebay.store.shared_disk import SILLY_MARK
from forebay.store.files import is_temporary
from forebay.store.texts import IDENTITY, LOCK, OLD, SEGMENT


_HEX = "[0-9a-f]{8,128}"
_GROUP = "[a-z][a-z0-9_]{0,31}"
_OF_BUILD = re.compile(rf"lock|origin|driver\.(lock|json)|{_GROUP}/{_HEX}\.(tdz|json|lock)|parts/[^/]+\.run")
_OF_INPUTS = re.compile(r"[0-9]{5,}\.media|images/([0-9a-f]{2})/\1[0-9a-f]{30}\.image")
_SHOWN = 3

Check = Callable[[str], bool]
"""Whether a path in a folder is of forebay."""


def strangers(item: RootItem, contents: RootContents, descriptor: int, folder: Path) -> str | None:
    """Returns what in a folder is not forebay's, in words; None where there is nothing else.

    descriptor: of the opened folder, whose own document is read once more. What a build or a look left in a folder with
    a temporary name may be anything.
    """
    if item.kind == "leftover" or not item.is_folder:
        return None
    try:
        is_own = _checks[item.kind](descriptor, folder)
    except (CacheError, OSError, ValueError, RecursionError) as err:
        return str(err).partition("; run:")[0]
    if silly := [name for name in contents.names if Path(name).name.startswith(SILLY_MARK)]:
        return f"a process of some machine has a removed file of it open: {silly[0]}"
    odd = [file.name for file in contents.files if file.kind == "other"]
    odd += [name for name in contents.names if name not in odd and not is_own(name)]
    odd += [name for name in _folders(contents) if not _is_folder_of(item.kind, name, contents)]
    if not odd:
        return None
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    return f"it holds what forebay did not write: {', '.join(odd[:_SHOWN])}{more}; move that elsewhere first"


def _within(name: str, contents: RootContents) -> Iterator[bool]:
    return (True for other in contents.names if other.startswith(f"{name}/"))


def _folders(contents: RootContents) -> list[str]:
    return [file.name for file in contents.files if file.kind == "folder"]


def _is_folder_of(kind: Kind, name: str, contents: RootContents) -> bool:
    """Whether an item of this kind may have a folder; what lies in it is looked at by itself.

    A sealed group has a shard, so an empty folder in a cache is not a group's. A build makes the folder first.
    """
    if is_group_name(name) and (kind == "build" or kind == "cache" and any(_within(name, contents))):
        return True
    return name in _FOLDERS[kind] or (kind == "build" and is_temporary(name.partition("/")[0]))


_FOLDERS: Mapping[Kind, tuple[str, ...]] = {
    "cache": (),
    "build": ("parts",),
    "plan": (),
    "listing": (),
    "prepared": (),
    "texts": (),
    "inputs": ("images", *(f"images/{number:02x}" for number in range(256))),
}


def _of_cache(descriptor: int, folder: Path) -> Check:
    document, _ = read_document(descriptor, FILE_NAME)
    # Once more, and strictly: a look compares a checksum, this all that opening a cache compares.
    metadata = parse_metadata(folder, _bytes_of(descriptor), oldest=_FIRST_FORMAT)
    if metadata != document:
        raise CacheCorruptError("its metadata.json is being replaced")
    return names_of_cache(folder, metadata).__contains__


def names_of_cache(folder: Path, metadata: Mapping[str, Any]) -> set[str]:
    """Returns the names of all files of a cache. Raises CacheError for metadata that describe none."""
    check_found(folder, metadata)
    if metadata.get("format_version", 0) < FORMAT_VERSION:
        counts = dict.fromkeys(_OLD_GROUPS, _old_count(folder, metadata))
    else:
        checked_fields(folder, metadata)
        counts = {group: shape.num_shards for group, shape in groups_of(folder, metadata).items()}
    shards = {shard_name(group, number) for group, count in counts.items() for number in range(count)}
    return {FILE_NAME, *metadata["files"], *shards}


_FIRST_FORMAT = 1
_OLD_GROUPS = ("media", TEXT)
"""The groups of caches of forms 1 to 3, which are removed and not read."""


def _old_count(folder: Path, metadata: Mapping[str, Any]) -> int:
    count = metadata.get("num_shards")
    if type(count) is not int or not 0 <= count < _MOST_SHARDS:
        raise CacheCorruptError(f"{folder}: num_shards is {count!r:.60}")
    return count


_MOST_SHARDS = 1 << 24


def _bytes_of(descriptor: int) -> bytes:
    import os

    file = os.open(FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
    with open(file, "rb", buffering=0) as opened:
        return opened.readall()


def _of_plan(descriptor: int, _: Path) -> Check:
    arrays: Any = read_document(descriptor, FILE_NAME)[0].get("arrays")
    if not isinstance(arrays, dict) or any("/" in name for name in arrays):
        raise CacheCorruptError("its metadata.json names no arrays")
    names = {FILE_NAME, STATISTICS, *(f"{name}.npy" for name in arrays)}
    return lambda name: name in names


def _of_listing(descriptor: int, _: Path) -> Check:
    sums: Any = read_document(descriptor, "listing.json")[0].get("sums")
    names = {"listing.json", *(sums if isinstance(sums, dict) else ())}
    return lambda name: name in names


def _of_prepared(descriptor: int, _: Path) -> Check:
    files: Any = read_document(descriptor, "prepared.json")[0].get("files")
    names = {"prepared.json", *(files if isinstance(files, dict) else ())}
    return lambda name: name in names


def _of_texts(_: int, __: Path) -> Check:
    patterns = (SEGMENT, OLD)
    return lambda name: (
        name in (IDENTITY, LOCK) or any(pattern.fullmatch(name) for pattern in patterns) or is_temporary(name)
    )


def _of_inputs(_: int, __: Path) -> Check:
    return lambda name: name == SAMPLES or _OF_INPUTS.fullmatch(name) is not None


def _of_build(_: int, __: Path) -> Check:
    return lambda name: _OF_BUILD.fullmatch(name) is not None or any(map(is_temporary, name.split("/")))


_checks: Mapping[Kind, Callable[[int, Path], Check]] = {
    "cache": _of_cache,
    "plan": _of_plan,
    "listing": _of_listing,
    "prepared": _of_prepared,
    "build": _of_build,
    "texts": _of_texts,
    "inputs": _of_inputs,
}
