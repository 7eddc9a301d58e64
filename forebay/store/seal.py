"""Making a cache folder: everything aside, metadata last, then one rename. It is there whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheIncompleteError, CacheMismatchError
from forebay.store.chunked import SLOTS, slot_sums
from forebay.store.files import fsync_folder, link_or_copy
from forebay.store.layout import FORMAT_VERSION, Array, FieldSpec, Group, ListedItems
from forebay.store.metadata import (
    GroupShape,
    check_file,
    items_files,
    read_metadata,
    save_array,
    save_file,
    write_metadata,
)
from forebay.store.shard import ShardEntry, shard_fields, shard_name, to_table
from forebay.store.shared_disk import move, seen
from forebay.store.temporary import remove_aside, temporary_name

logger = logging.getLogger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a cache is sealed from.

    shards: file and entry of every shard by group, text among them. items: of the groups whose items samples list; of
    every other group a sample has the item that lies where the sample lies, so it has as many shards as text.
    arrays, files: what stands beside metadata.json, by name.
    document: the rest of metadata.json.
    """

    fields: tuple[FieldSpec, ...]
    shards: Mapping[Group, Sequence[tuple[Path, ShardEntry]]]
    items: Mapping[Group, ListedItems]
    arrays: Mapping[str, Array]
    files: Mapping[str, bytes]
    document: Mapping[str, Any]

    @property
    def groups(self) -> dict[Group, GroupShape]:
        """What metadata.json says of each group."""
        num_items = {group: len(items.slots) for group, items in self.items.items()}
        return {group: GroupShape(len(shards), num_items.get(group)) for group, shards in self.shards.items()}


def seal(folder: Path, contents: Contents, *, scratch: Path, replace: bool = False) -> bool:
    """Makes `folder` a sealed cache; says whether this call did, and not another builder before it.

    scratch: a folder on the same file system where it is assembled. replace: swap it with what stands at `folder`,
    which readers that have it open go on reading: it is removed when they are done, by a later run's sweep. What stands
    there unsealed or with damaged metadata is replaced anyway.
    Raises CacheMismatchError where a newer forebay sealed it.
    """
    assembled = scratch / temporary_name(Path(folder.name)).name
    try:
        assemble_folder(assembled, contents)
        return publish(assembled, folder, replace=replace)
    finally:
        shutil.rmtree(assembled, ignore_errors=True)


def assemble_folder(folder: Path, contents: Contents) -> None:
    """Makes a new folder hold all files of a cache, metadata.json last; it is read by nobody until `publish`."""
    folder.mkdir(parents=True, exist_ok=True)  # nobody else has its name: what is there is ours
    files: dict[str, Any] = {}
    for group, shards in contents.shards.items():
        (folder / group).mkdir(exist_ok=True)
        for index, (path, _) in enumerate(shards):
            link_or_copy(path, folder / shard_name(group, index))
        fsync_folder(folder / group)
        entries = [entry for _, entry in shards]
        table = to_table(entries, len(shard_fields(contents.fields, group)))
        files[f"{group}.npy"] = save_array(folder, f"{group}.npy", table)
    arrays = {name: array for name, array in contents.arrays.items() if name != SLOTS}
    files |= {name: save_array(folder, name, array) for name, array in arrays.items()}
    flat = {SLOTS: contents.arrays[SLOTS]}
    for group, items in contents.items.items():
        flat |= dict(zip(items_files(group), (items.offsets, items.slots), strict=True))
    files |= {name: {**save_array(folder, name, array), **slot_sums(array)} for name, array in flat.items()}
    files |= {name: save_file(folder, name, data) for name, data in contents.files.items()}
    document = {
        **contents.document,
        "format_version": FORMAT_VERSION,
        "fields": [field.to_json() for field in contents.fields],
        "files": files,
        "groups": {group: shape.to_json() for group, shape in contents.groups.items()},
    }
    write_metadata(folder, document)


def publish(assembled: Path, folder: Path, *, replace: bool) -> bool:
    """Puts an assembled cache at `folder`, in one step; says whether it did, and not another builder before it.

    replace: as of `seal`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        move(assembled, folder)
    except OSError as err:
        if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        seen(folder.is_dir, folder.parent, what=f"{folder.name} of another machine")
        if not replace and _is_sealed(folder):
            return False
        _replace(assembled, folder)
    fsync_folder(folder.parent)
    return True


def _replace(assembled: Path, folder: Path) -> None:
    """Puts a folder in the place of another, which stays beside it under a name that is swept, while it is read."""
    aside = temporary_name(folder)
    move(assembled, aside)
    try:
        _exchange(aside, folder)
    finally:
        if not remove_aside(aside):
            logger.info("%s may still be read: the run after its last reader, or after a day, removes it", aside)


def _is_sealed(folder: Path) -> bool:
    """Whether another builder was here; a folder with damaged metadata would otherwise stand in the way for ever."""
    try:
        document = read_metadata(folder)
        for name, entry in document["files"].items():
            check_file(folder / name, entry, verify=True)
    except (CacheCorruptError, CacheIncompleteError):
        return False
    except CacheMismatchError as err:
        if err.code != "FB407":  # of an older forebay: in the way as damage is
            raise
        return False
    return True


def _exchange(new: Path, old: Path) -> None:
    """Swaps two folders in one step (renameat2, Linux 3.15), by two renames where that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
        if libc.renameat2(*arguments) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    aside = temporary_name(old)
    move(old, aside)
    try:
        move(new, old)
    except OSError:
        move(aside, old)
        raise
    move(aside, new)


def check_shard(path: Path, entry: ShardEntry) -> None:
    """Raises CacheCorruptError where a shard file is not, byte for byte, what its entry says."""
    check_file(path, {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}, verify=True)


def is_whole(path: Path, entry: ShardEntry) -> bool:
    """Returns whether a shard file is, byte for byte, what its entry says."""
    try:
        check_shard(path, entry)
    except CacheCorruptError:
        return False
    return True
