"""The files below one folder, by descriptors: no link is followed and no other mount is entered.

A cache root, held open: by its resolved path, and never a folder that a person keeps other things in.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from forebay.config.remote import RemoteConfig
from forebay.config.url import is_url, parse_url
from forebay.errors import CacheNotFoundError, ConfigError
from forebay.store.remote.root import RemoteRoot

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Root:
    """An opened cache root. folder: its resolved path; descriptor: of that very folder, whatever its path becomes.

    remote: the URL that the folder stands for on this node, where it does.
    """

    folder: Path
    descriptor: int
    device: int
    remote: RemoteRoot | None = None

    @property
    def place(self) -> str:
        """The folder or URL that names it."""
        return str(self.remote.url if self.remote else self.folder)


@contextmanager
def opened_root(place: str | Path, settings: RemoteConfig | None = None) -> Iterator[Root]:
    """Yields a cache root; of a URL what stands for that URL on this node.

    Raises CacheNotFoundError where it is no folder, ConfigError for `/`, a home folder, or a folder that holds one.
    """
    remote = RemoteRoot.at(parse_url(str(place)), settings or RemoteConfig()) if is_url(str(place)) else None
    if remote is not None:
        remote.prepare()
    resolved = Path(os.path.realpath(remote.folder if remote else place))
    require_a_root(resolved)
    try:
        descriptor = os.open(resolved, FOLDER)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(
            f"{place} is no folder, so no cache is there; name a cache root, as run.cache_root of a config does: "
            "forebay cache ls DIR"
        ) from err
    try:
        yield Root(folder=resolved, descriptor=descriptor, device=os.fstat(descriptor).st_dev, remote=remote)
    finally:
        os.close(descriptor)


def require_a_root(folder: Path) -> None:
    """Raises ConfigError for a resolved folder in which nothing may be cleaned up."""
    home = Path(os.path.realpath(Path.home()))
    if folder == home or folder in home.parents:
        what = "the root of the file system" if folder == Path("/") else "a home folder, or holds it"
        raise ConfigError(f"{folder} is {what}, and no cache root; name the folder of the caches: forebay cache ls DIR")


@contextmanager
def entered(name: str | Path, *, within: int | None = None) -> Iterator[int]:
    """Yields the descriptor of a folder, by its path or in an opened one; no link is followed. Raises OSError."""
    descriptor = os.open(name or ".", FOLDER, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


Inode = tuple[int, int]
_DEEPEST = 16
"""Folders within folders; forebay writes three."""


class File(NamedTuple):
    """A file. name: its path in the folder. kind: `file`, `folder`, or `other`: a link, a pipe, another mount."""

    name: str
    kind: str
    inode: Inode
    size_bytes: int
    num_links: int
    changed_ns: int
    read_ns: int


@dataclass(kw_only=True)
class RootContents:
    """The contents of a folder."""

    files: list[File] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The paths of all that is no folder."""
        return [file.name for file in self.files if file.kind != "folder"]

    @property
    def changed_ns(self) -> int:
        """When a file was written last; 0 where there is none."""
        return max((file.changed_ns for file in self.files if file.kind == "file"), default=0)


def contents_of(descriptor: int, *, device: int) -> RootContents:
    """Returns all that lies below an opened folder. device: the disk of the root; another one is not entered."""
    return RootContents(files=list(_walk(descriptor, "", device, 0)))


def file_of(name: str, status: os.stat_result, *, device: int) -> File:
    """Returns what a stat, of no target of a link, says of a file."""
    kind = "other"
    if status.st_dev == device:
        kind = "file" if stat.S_ISREG(status.st_mode) else "folder" if stat.S_ISDIR(status.st_mode) else "other"
    return File(
        name=name,
        kind=kind,
        inode=(status.st_dev, status.st_ino),
        size_bytes=status.st_size if kind == "file" else 0,
        num_links=status.st_nlink,
        changed_ns=status.st_mtime_ns,
        read_ns=status.st_atime_ns,
    )


def _walk(descriptor: int, prefix: str, device: int, depth: int) -> Iterator[File]:
    with os.scandir(descriptor) as entries:
        found = [
            (entry.name, file_of(prefix + entry.name, entry.stat(follow_symlinks=False), device=device))
            for entry in entries
        ]
    for name, file in found:
        yield file
        if file.kind == "folder" and depth < _DEEPEST:
            with entered(name, within=descriptor) as below:
                yield from _walk(below, f"{file.name}/", device, depth + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The bytes of files. exclusive_bytes: of files whose links are all among them; shared_bytes: of the others."""

    exclusive_bytes: int
    shared_bytes: int

    @property
    def size_bytes(self) -> int:
        """All of them, a file of several links once."""
        return self.exclusive_bytes + self.shared_bytes


def sizes_of(files: Iterable[File]) -> Sizes:
    """Returns what files take together; the exclusive bytes are what removing all of them frees."""
    exclusive = shared = 0
    links: dict[Inode, list[int]] = {}
    for file in files:
        if file.kind != "file":
            continue
        if file.num_links == 1:
            exclusive += file.size_bytes
        else:
            links.setdefault(file.inode, [0, file.num_links, file.size_bytes])[0] += 1
    for here, all_links, size_bytes in links.values():
        if here >= all_links:
            exclusive += size_bytes
        else:
            shared += size_bytes
    return Sizes(exclusive_bytes=exclusive, shared_bytes=shared)
