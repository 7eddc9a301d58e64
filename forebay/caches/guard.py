"""Why something under a root stays, whatever a rule says: somebody uses it, may use it, or has put files into it.

Who uses what is to go: locks, processes of this machine, notes of other hosts, disks that others mount.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forebay.caches.root_items import File, Inode, Root, RootContents, RootItem, Survey, ago, contents_of, entered
from forebay.caches.survey import stored_strangers
from forebay.errors import CacheError
from forebay.preprocess.runner.parts import read_parts
from forebay.store.files import abandoned, is_temporary
from forebay.store.memo import KEPT_S, Use, this_host
from forebay.store.shared_disk import SILLY_MARK, alone_in, is_late
from forebay.terminal import first_of

_PROC = Path("/proc")
_MAP = re.compile(r"\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")
RECENT_S = 7 * 24 * 3600.0
"""What was used within it needs `--force`."""


class Processes:
    """The files that all processes of this machine have open now. Only root sees those of other users' processes."""

    def __init__(self, root: Path) -> None:
        """root: below which files are also known by their paths."""
        self._by_inode: dict[Inode, int] = {}
        self._below: list[tuple[str, int]] = []
        for entry in os.scandir(_PROC):
            for path, inode in _opened_by(int(entry.name)) if entry.name.isdigit() else ():
                self._by_inode.setdefault(inode, int(entry.name))
                if path.startswith(f"{root}{os.sep}"):
                    self._below.append((path, int(entry.name)))

    def with_any_of(self, folder: Path, files: Iterable[File]) -> str | None:
        """Returns a process that has a folder, or a file of it, open, mapped or as the folder that it is in.

        Files are known by their numbers, whatever the process calls them; by their path where another folder has a link
        to the same file.
        """
        own = [file.inode for file in files if file.num_links == 1 or file.kind == "folder"]
        with contextlib.suppress(OSError):
            status = os.stat(folder, follow_symlinks=False)
            own.append((status.st_dev, status.st_ino))
        found = next((self._by_inode[inode] for inode in own if inode in self._by_inode), None)
        if found is None:
            inside = f"{folder}{os.sep}"
            found = next((pid for path, pid in self._below if path == str(folder) or path.startswith(inside)), None)
        if found is None:
            return None
        try:
            name = (_PROC / str(found) / "comm").read_text(errors="replace").strip()
        except OSError:
            name = "gone"
        return f"process {found} ({name})"


def _opened_by(pid: int) -> Iterator[tuple[str, Inode]]:
    """Yields path and number of what a process has open; this process' own descriptors are left out."""
    place = _PROC / str(pid)
    with contextlib.suppress(OSError):
        links = [place / "cwd", place / "root", *(Path(entry.path) for entry in os.scandir(place / "fd"))]
        for link in links if pid != os.getpid() else ():
            with contextlib.suppress(OSError):
                status = os.stat(link)
                yield os.readlink(link), (status.st_dev, status.st_ino)
    with contextlib.suppress(OSError):
        for line in (place / "maps").read_text(errors="surrogateescape").splitlines():
            found = _MAP.match(line)
            if found is not None and found[4].startswith("/"):
                yield found[4], (os.makedev(int(found[1], 16), int(found[2], 16)), int(found[3]))


def is_mount_within(folder: Path) -> bool:
    """Whether something is mounted at a folder or below it."""
    with contextlib.suppress(OSError), open(_PROC / "self" / "mountinfo", errors="surrogateescape") as lines:
        for line in lines:
            place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4])
            if place == str(folder) or place.startswith(f"{folder}{os.sep}"):
                return True
    return False


def elsewhere(folder: Path, uses: Iterable[Use]) -> str | None:
    """Returns why a folder may be in use on another host, None where nothing says so."""
    if is_late(folder):
        return "it lies on a disk that other hosts may mount"
    hosts = [use for use in uses if use.host != this_host() and time.time() - use.used_ns / 1e9 < KEPT_S]
    return f"it was used on the host {hosts[0].host}" if hosts else None


def strangers(item: RootItem, contents: RootContents, descriptor: int, folder: Path) -> str | None:
    """Returns what in a folder is not forebay's, in words; None where there is nothing else.

    descriptor: of the opened folder, whose own document is read once more. What a build or a look left in a folder with
    a temporary name may be anything.
    """
    inside = item.kept.inside
    if inside is None or not item.is_folder:
        return None
    try:
        is_own = inside.check(descriptor, folder)
    except (CacheError, OSError, ValueError, RecursionError) as err:
        return str(err).partition("; run:")[0]
    if silly := [name for name in contents.names if Path(name).name.startswith(SILLY_MARK)]:
        return f"a process of some machine has a removed file of it open: {silly[0]}"
    odd = [file.name for file in contents.files if file.kind == "other"]
    odd += [name for name in contents.names if name not in odd and not is_own(name)]
    folders = [file.name for file in contents.files if file.kind == "folder"]
    odd += [name for name in folders if not inside.is_folder(name, contents)]
    if not odd:
        return None
    return f"it holds what forebay did not write: {first_of(odd, 3)}; move that elsewhere first"


@dataclass(kw_only=True)
class Guard:
    """Says why items of a root stay. force: also what was used lately, or may be in use on another host, goes."""

    survey: Survey
    force: bool = False

    @property
    def root(self) -> Root:
        """The root."""
        return self.survey.root

    def reason(self, item: RootItem) -> str | None:
        """Returns why an item stays, None where it may go; what is cheap is asked first, and nothing changes."""
        return self.caution(item) or self.use(item)

    def used_ns(self, item: RootItem) -> int:
        """Returns when an item was used last; a prepared build is used by its builds."""
        builds = self._builds_of(item) if item.kept.builders == "of its key" else []
        return max(each.used_ns for each in (item, *builds))

    def caution(self, item: RootItem) -> str | None:
        """Returns why an item stays without `--force`."""
        if item.remote is not None and not self.force:
            return "no lock of a store tells who reads it: --force"
        if self.force or _is_aside(item):
            return None
        age_s = time.time() - self.used_ns(item) / 1e9
        if age_s < RECENT_S:
            verb = "used" if item.is_used else "made" if item.kind == "cache" else "written"
            return f"{verb} {ago(age_s)}, which is within 7 days: --force"
        if (why := elsewhere(self.root.folder / item.name, item.uses)) is not None:
            return f"{why}: --force"
        if any(file.name.endswith(".submitted.json") for file in item.beside):
            return "jobs of a cluster were submitted for it: --force"
        return None

    def use(self, item: RootItem) -> str | None:
        """Returns who uses an item, or what else is in it; `--force` does not change that."""
        if item.remote is not None:
            return stored_strangers(item)
        with contextlib.suppress(FileNotFoundError), opened(self.root, item) as (descriptor, _):
            if descriptor is None:
                if _is_aside(item) and item.name not in self._abandoned:
                    return "a process writes it"
                return in_use(self.root.folder / item.name, RootContents(files=[item.file]), self._processes)
            contents = contents_of(descriptor, device=self.root.device)
            folder = self.root.folder / item.name
            if (why := strangers(item, contents, descriptor, folder)) is not None:
                return why
            if is_mount_within(folder):
                return "another disk is mounted in it"
            if (why := self._builders(item)) is not None:
                return why
            with locked(self.root, item, descriptor, force=self.force) as problem:
                return in_use(folder, contents, self._processes) or problem  # a name says more than a lock
        return "it is gone, or replaced"

    def _builders(self, item: RootItem) -> str | None:
        """Returns which builders work with a folder of a build, by what their runs say of themselves."""
        if _is_aside(item):
            return None if item.name in self._abandoned else "a process writes it"
        for build in self._builds_of(item):
            if item.kept.builders == "of its key" and (why := self.use(build)) is not None:
                return f"of its build {build.name}: {why}"
            for part in read_parts(self.root.folder / build.name, now=time.time()):
                if part.state == "running":
                    return f"process {part.pid} on {part.host} builds"
        return None

    def _builds_of(self, item: RootItem) -> list[RootItem]:
        """Returns the unfinished builds that work with an item: with samples of an iterator any may."""
        if item.kept.builders in (None, "itself"):
            return [item] if item.kept.builders else []
        key = "" if item.kept.builders == "any" else str(item.document.get("key"))[:16]
        return [build for build in self.survey.of("build") if Path(build.name).name.startswith(key)]

    @cached_property
    def _processes(self) -> Processes:
        """The files that were open at the first call; whoever removes something looks anew."""
        return Processes(self.root.folder)

    @cached_property
    def _abandoned(self) -> set[str]:
        """The names of leftovers whose writers are gone."""
        leftovers = [item.name for item in self.survey.of("leftover")]
        found: set[str] = set()
        for parent in {os.path.dirname(name) for name in leftovers}:
            with contextlib.suppress(OSError):
                found |= {os.path.join(parent, path.name) for path in abandoned(self.root.folder / parent)}
        return found


def _is_aside(item: RootItem) -> bool:
    """Whether an item was being written, or put aside, by the process that its name tells."""
    return item.kind == "leftover" and is_temporary(item.name)


def in_use(folder: Path, contents: RootContents, processes: Processes) -> str | None:
    """Returns which process of this machine has a folder or file open, None where none is seen."""
    found = processes.with_any_of(folder, contents.files)
    return f"{found} has it open" if found else None


@contextlib.contextmanager
def opened(root: Root, item: RootItem) -> Iterator[tuple[int | None, int]]:
    """Yields the descriptors of an item, None for a file, and of the folder that it is in.

    Raises FileNotFoundError where the item is gone, or another one has its name.
    """
    holder, name = os.path.split(item.name)
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(entered(holder, within=root.descriptor))
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if (status.st_dev, status.st_ino) != item.file.inode:
            raise FileNotFoundError(item.name)
        descriptor = None
        if item.is_folder:
            try:
                descriptor = stack.enter_context(entered(name, within=parent))
            except OSError as err:
                raise FileNotFoundError(item.name) from err
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != item.file.inode:
                raise FileNotFoundError(item.name)
        yield descriptor, parent


@contextlib.contextmanager
def locked(root: Root, item: RootItem, descriptor: int, *, force: bool) -> Iterator[str | None]:
    """Holds the lock that readers or builders of a folder share; yields why it could not be had, None where it was.

    While it is held no reader can begin: it waits, and finds the folder gone.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    beside = next((file.name for file in item.beside if file.name.endswith(".lock")), None)
    file = -1
    try:
        if beside is not None:
            file = os.open(beside, flags, dir_fd=root.descriptor)
        elif item.kept.lock is not None:
            file = os.open(item.kept.lock, flags, dir_fd=descriptor)
    except FileNotFoundError:
        pass
    except OSError as err:
        yield f"it is not yours to remove: {err.strerror}"
        return
    try:
        state = "had" if file < 0 else alone_in(file, root.folder)
        who = "a builder is in it" if item.kept.builders in ("itself", "of its key") else "a process has it open"
        unknown = None if force else "no lock of this disk tells who uses it: --force"
        yield {"had": None, "taken": who, "unknown": unknown}[state]
    finally:
        if file >= 0:
            os.close(file)
