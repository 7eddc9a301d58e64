"""Who may write where writing was refused: what a permission error leaves out."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

from forebay.errors import BuildError

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
    """Makes a folder and its parents, before work is spent on what is to be written there.

    setting: what names the folder. Raises BuildError where it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as err:
        raise BuildError(
            f"cannot write to {setting} {folder} ({err.strerror}); {_standing(folder)}; name another folder: "
            f"--cache-root DIR, or {setting}"
        ) from err


def _standing(path: Path) -> str:
    """Who owns the nearest thing that is there, what its mode allows, and who runs."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    runs = f"this runs as {_user(os.geteuid())}"
    try:
        status = path.stat()
    except OSError as err:
        return f"{path}: {err.strerror}; {runs}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder"
    read_only = ", on a file system that is mounted read-only" if _is_read_only(path) else ""
    return (
        f"{path} is {stat.filemode(status.st_mode)} of user {_user(status.st_uid)} and group "
        f"{_group(status.st_gid)}{read_only}; {runs}"
    )


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:  # of another machine, or of a container
        return str(number)


def _group(number: int) -> str:
    try:
        return f"{grp.getgrgid(number).gr_name} ({number})"
    except KeyError:
        return str(number)
