"""A cache folder is assembled aside, metadata last, and renamed: all or nothing. Whether one is still as sealed."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheError, CacheIncompleteError, CacheMismatchError
from forebay.store.cache import Cache, open_cache
from forebay.store.files import fsync_folder, link_or_copy, remove_aside, remove_tree, temporary_name
from forebay.store.held import AnyFile
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
from forebay.store.open_shards import SLOTS, slot_sums
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.carry.proof import check_bytes, check_sizes
from forebay.store.remote.node.node import WantedFile
from forebay.store.shard import ShardEntry, shard_fields, shard_name, to_table
from forebay.store.shared_disk import SILLY_MARK, move, seen
from forebay.terminal import Progress

logger = logging.getLogger(__name__)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The parts that a cache is sealed from.

    shards: file and entry of every shard by group, text among them. items: of the groups whose items samples list; of
    every other group a sample has the item that lies where the sample lies, so it has as many shards as text. arrays,
    files: what stands beside metadata.json, by name. document: the rest of it.
    """

    fields: tuple[FieldSpec, ...]
    shards: Mapping[Group, Sequence[tuple[Path, ShardEntry]]]
    items: Mapping[Group, ListedItems]
    arrays: Mapping[str, Array]
    files: Mapping[str, bytes | memoryview]
    document: Mapping[str, Any]

    @property
    def groups(self) -> dict[Group, GroupShape]:
        """The entry of each group in metadata.json."""
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
        remove_tree(assembled)


def assemble_folder(folder: Path, contents: Contents) -> None:
    """Makes a new folder hold all files of a cache, metadata.json last; it is read by nobody until `publish`."""
    folder.mkdir(parents=True, exist_ok=True)  # nobody else has its name: what is there is ours
    files: dict[str, Any] = {}
    for group, shards in contents.shards.items():
        if shards:  # an empty folder would be nobody's, and the cache never removed
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
    """Puts an assembled cache at `folder` in one step; whether it did, not another builder. replace: as of `seal`."""
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


def check_shard(path: Path, entry: ShardEntry | WantedFile) -> None:
    """Raises CacheCorruptError where a shard file is not, byte for byte, what its entry says."""
    check_file(path, {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}, verify=True)


def is_whole(path: Path, entry: ShardEntry | WantedFile) -> bool:
    """Returns whether a shard file is, byte for byte, what its entry says."""
    try:
        check_shard(path, entry)
    except CacheCorruptError:
        return False
    return True


@dataclass
class VerifyReport:
    """The result of verifying; `problems` name the file and both values."""

    checked_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    place: str | None = None
    """The URL of a cache in a store: it is the objects that were compared."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def check(self, path: AnyFile, entry: Mapping[str, Any], *, hashing: bool = True) -> None:
        """Adds a file's bytes, or the problem where it is not what its entry says; without `hashing` by its size."""
        try:
            check_file(path, entry, verify=hashing)
            self.checked_bytes += int(entry["size_bytes"])
        except CacheCorruptError as err:
            self.problems.append(str(err))
        except OSError as err:  # a disk that cannot read a file is what verifying is for
            self.problems.append(f"{path} cannot be read: {err.strerror}")

    def to_json(self) -> dict[str, Any]:
        """Returns the `verify` part of `forebay inspect --json`."""
        place = {} if self.place is None else {"place": self.place}
        return {"ok": self.ok, "checked_bytes": self.checked_bytes, "problems": self.problems, **place}


def quick_problems(folder: Path) -> list[str]:
    """Returns what a stat of every file shows to be wrong: missing files, other sizes, metadata that is not true.

    Of a mirror what a listing of the store shows; RemoteError where the store does not answer.
    """
    return _check_all(folder, hashing=False, progress=False).problems


def verify_folder(folder: Path, *, progress: bool = False) -> VerifyReport:
    """Returns what re-hashing every file of a cache finds; foreign files in its folder are problems too.

    Of a mirror the store's objects are read, and nothing of them is kept; RemoteError where the store does not answer.
    """
    report = _check_all(folder, hashing=True, progress=progress)
    if report.ok and report.place is None:
        report.problems += _foreign(open_cache(folder, verify="never"))
    return report


def _check_all(folder: Path, *, hashing: bool, progress: bool) -> VerifyReport:
    report = VerifyReport()
    try:
        # Hashed before they are parsed: numpy's header parser answers damage with any exception, or a warning.
        cache = open_cache(folder, verify="touch" if hashing else "never")
    except CacheError as err:
        report.problems.append(str(err))
        return report
    if cache.mirror is not None:
        report.place = cache.place
        _check_objects(cache.mirror.bucket, cache, report, hashing=hashing, progress=progress)
        return report
    files = list(cache.files())
    with _bar(cache, progress=progress) as bar:
        for file, entry in files:
            report.check(file, entry, hashing=hashing)
            bar.update(int(entry["size_bytes"]))
    return report


def _bar(cache: Cache, *, progress: bool) -> Progress:
    total = sum(int(entry["size_bytes"]) for _, entry in cache.files())
    return Progress(total, unit="B", desc="verify", is_shown=progress)


def _check_objects(bucket: Bucket, cache: Cache, report: VerifyReport, *, hashing: bool, progress: bool) -> None:
    files = {file.place: entry for file, entry in cache.files()}
    report.problems, foreign = check_sizes(bucket, files)
    if not hashing or report.problems:
        return
    with _bar(cache, progress=progress) as bar:
        for size_bytes, problem in check_bytes(bucket, files):
            report.checked_bytes += size_bytes
            report.problems += [] if problem is None else [problem]
            bar.update(size_bytes)
    report.problems += foreign


def _foreign(cache: Cache) -> list[str]:
    # From the cache's own folder: one that was named relatively has other paths than the files of its cache.
    known = {file.path for file, _ in cache.files()} | {cache.folder / "metadata.json"}
    return [
        f"{path} does not belong to this cache"
        for path in sorted(cache.folder.rglob("*"))
        if path not in known and not path.name.startswith(SILLY_MARK) and not path.is_dir()
    ]
