"""Writing that is complete or absent, whole-file hashes, and who may write where writing was refused.

Names of what is being written, and the removal of what a killed process left behind under such a name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import io
import os
import pwd
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from forebay.errors import BuildError
from forebay.store.held import AnyFile, readers_of
from forebay.store.layout import METADATA
from forebay.store.shared_disk import move, seen

TEMPORARY_MARK = ".tmp-"
"""Part of the name of every file and folder that is being written; none of them is ever read."""
_OURS = re.compile(re.escape(TEMPORARY_MARK) + r"(?P<place>[0-9a-f]{8})-(?P<pid>[0-9a-f]+)-[0-9a-f]{8}\Z")
_OLD_S = 24 * 3600.0
"""A file that nobody wrote to for this long is not being written. Only for those of other machines, whose processes are
not seen from here."""


def temporary_name(path: Path) -> Path:
    """Returns a name beside `path` that no other writer uses and that tells which process writes it."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{this_place()}-{os.getpid():x}-{uuid.uuid4().hex[:8]}")


def is_temporary(name: str) -> bool:
    """Whether a name is one that `temporary_name` gives."""
    return _OURS.search(name) is not None


def abandoned(folder: Path) -> Iterator[Path]:
    """Yields what writers that were killed left unfinished directly in a folder. See `sweep`."""
    for entry in os.scandir(folder):
        match = _OURS.search(entry.name)
        if match is None:
            continue
        is_here, path = match["place"] == this_place(), Path(entry.path)
        if not is_running(int(match["pid"], 16)) if is_here else _is_old(path):
            yield path


def sweep(folder: Path) -> list[Path]:
    """Removes what writers that were killed left unfinished directly in a folder; returns what it removed.

    What a process of this machine writes is left alone as long as a process of that number runs; what another machine,
    or another container, writes, until it has not changed for a day by the clock of the file system. A cache that was
    replaced and that somebody still reads is left to a later run; where no lock tells who reads, a folder stays for a
    day. Foreign names, and a folder that cannot be written, are left as they are.
    """
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in abandoned(folder):
            if path.is_symlink() or not path.is_dir() or not _may_be_read(path):
                _remove(path)
                removed.append(path)
    return removed


def remove_aside(folder: Path) -> bool:
    """Removes a folder that was put aside if nobody reads it; says whether it did. If not, a later `sweep` does."""
    if readers_of(folder) != "none":
        with contextlib.suppress(OSError):
            os.utime(folder)  # its day begins
        return False
    remove_tree(folder)
    return True


def put_away(folder: Path) -> None:
    """Removes a folder whose name may be used again at once."""
    gone = temporary_name(folder)
    move(folder, gone)
    remove_aside(gone)


def put_in_place(aside: Path, folder: Path, *, may_stay: Callable[[], bool]) -> bool:
    """Gives a whole folder its name; whether it did. One that stands there and may stay does, any other makes room.

    An equal one of another process stays: others may have it mapped, and for a moment none would be there.
    """
    while True:
        try:
            move(aside, folder)
            return True
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        seen(folder.is_dir, folder.parent, what=f"{folder.name} of another machine")
        if may_stay():
            return False
        with contextlib.suppress(FileNotFoundError):  # another process has put it away
            put_away(folder)


def remove_tree(folder: Path) -> None:
    """Removes a folder, first the document that says that it is whole: killed on the way, it leaves none that opens."""
    with contextlib.suppress(OSError):
        for document in (folder / METADATA, *folder.glob(f"*/{METADATA}")):  # a build has its cache in its folder
            document.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _may_be_read(folder: Path) -> bool:
    readers = readers_of(folder)
    return readers == "some" or (readers == "unknown" and not _is_old(folder))


def _is_old(path: Path) -> bool:
    # Not our clock: it may be a day off from that of the machine that keeps the files.
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.lstat().st_mtime > _OLD_S


def is_running(pid: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; a number that no process has is left to age
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


@functools.cache
def this_place() -> str:
    """Names what process numbers are unique in: this boot of this machine, and the container's own numbering."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        numbering = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, numbering = os.uname().nodename, 0
    return xxhash.xxh3_64_hexdigest(f"{boot.strip()}-{numbering}".encode())[:8]


_BLOCK, _SMALL = 4 * 1024 * 1024, 32 * 1024
_SYNC_FILE_RANGE_WRITE = 2


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` when the block ends without an error: fsynced, renamed, folder fsynced.

    On an error nothing is left behind and an older `path` stays as it was; only where the last step, the folder's
    fsync, fails, is the new file there, whole. Buffering is off: each `write` is one call, so that a full disk is
    reported by it and not by a later signal.
    """
    temporary = temporary_name(path)
    try:
        with naming(path), open(temporary, "xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        move(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


@contextlib.contextmanager
def folder_aside(target: Path, *, clear: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields a folder that becomes `target`, durably and in one step, if the block ends without an error; else it goes.

    clear: called when all of the folder is durable, to make the name of `target` free.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = temporary_name(target)
    aside.mkdir(exist_ok=True)  # nobody else has its name: what is there is ours
    try:
        yield aside
        _fsync_tree(aside)
        if clear is not None:
            clear()
        move(aside, target)
    except BaseException:
        remove_tree(aside)
        raise
    fsync_folder(target.parent)


def _fsync_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _fsync_tree(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    fsync_folder(folder)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that names none: those of write and fsync do not. Errors of forebay name theirs."""
    try:
        yield
    except OSError as err:
        if err.filename is None and err.errno is not None:
            err.filename = str(path)
        raise


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes every byte, also where one `write` call takes only part of them (it does above 2 GiB)."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def start_writeback(file: BinaryIO) -> None:
    """Makes the kernel begin to write what `file` has so far, without waiting: the fsync at the end then waits less.

    sync_file_range of Linux, which Python does not have. Only a hint: where it fails, fsync does all of it.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):
        all_of_it = ctypes.c_longlong(0)
        libc.sync_file_range(file.fileno(), all_of_it, all_of_it, _SYNC_FILE_RANGE_WRITE)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Makes `path` hold exactly `data`, or leaves it as it was."""
    with write_aside(path) as file:
        write_all(file, data)


def append(path: Path, data: bytes, *, kept: bytes | int | None, is_synced: bool = True) -> None:
    """Adds to a file. kept: what it begins with anew; or how many bytes of it stay; None: all of it."""
    if isinstance(kept, bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, kept + data)
        return
    if kept is not None:
        os.truncate(path, kept)
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Makes the names inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: AnyFile) -> str:
    """Returns the xxh3-128 of a whole file, as 32 hex digits."""
    with path.open("rb", buffering=0) as file:
        return hash_opened(file)


def hash_opened(file: io.FileIO) -> str:
    """Returns the xxh3-128 of an opened file from where it stands to its end, as 32 hex digits."""
    state = xxhash.xxh3_128()
    head = file.read(_SMALL)
    state.update(head)
    buffer = bytearray(_BLOCK if len(head) == _SMALL else _SMALL)  # a large one costs more than a small file
    view = memoryview(buffer)
    while head and (count := file.readinto(buffer)):
        state.update(view[:count])
    return state.hexdigest()


def link_or_copy(source: Path, target: Path) -> bool:
    """Makes `target`, also if it is there, the bytes of `source`, by hard link if it can; says whether it linked."""
    temporary = temporary_name(target)
    try:
        try:
            os.link(source, temporary)
            linked = True
        except FileExistsError:  # nobody else has this name: the answer to our own link was lost
            linked = True
        except OSError:
            _copy(source, temporary)
            linked = False
        move(temporary, target)
    finally:
        # rename() of two links to one inode does nothing and leaves both names.
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return linked


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb", buffering=0) as reader, naming(target), open(target, "xb", buffering=0) as writer:
        while block := reader.read(_BLOCK):
            write_all(writer, block)
        os.fsync(writer.fileno())


_REFUSALS = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))


def is_refusal(err: OSError) -> bool:
    """Whether an error says that this user may not do it, or nobody on this file system; its path is named."""
    return err.errno in _REFUSALS and isinstance(err.filename, (str, bytes))


def refusal(err: OSError) -> str:
    """Returns the message for an error of `is_refusal`: the path, its owner, group and mode, and the user that runs."""
    path = Path(os.fsdecode(err.filename))
    where = path if path.is_dir() else path.parent
    return f"{err.strerror}: {path}; {_standing(where)}; name another place, or have its owner allow it"


def require_writable(folder: Path, *, setting: str) -> None:
    """Makes the folder that `setting` names before work is spent; BuildError where it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as err:
        raise BuildError(
            f"cannot write to {setting} {folder} ({err.strerror}); {_standing(folder)}; name another folder: "
            f"--cache-root DIR, or {setting}",
            code="FB306",
        ) from err


def _standing(path: Path) -> str:
    """Who owns the nearest thing that is there, what its mode allows, and who runs."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    runs = f"this runs as {_named(pwd.getpwuid, os.geteuid())}"
    try:
        status = path.stat()
    except OSError as err:
        return f"{path}: {err.strerror}; {runs}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder"
    read_only = ", on a file system that is mounted read-only" if os.statvfs(path).f_flag & os.ST_RDONLY else ""
    return (
        f"{path} is {stat.filemode(status.st_mode)} of user {_named(pwd.getpwuid, status.st_uid)} and group "
        f"{_named(grp.getgrgid, status.st_gid)}{read_only}; {runs}"
    )


def _named(find: Callable[[int], Sequence[Any]], number: int) -> str:
    """Returns a user or a group by its name and number. find: gives the entry of a number."""
    try:
        return f"{find(number)[0]} ({number})"
    except KeyError:  # of another machine, or of a container
        return str(number)
