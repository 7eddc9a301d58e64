"""What a document must be like, as values: checks that name the place where it is not.

Who may write where writing was refused: what a permission error leaves out.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forebay.errors import BuildError

Check = Callable[[Any, str], None]
"""Raises ValueError where a value, which stands at this place, is of another kind."""


_MAX_NUMBER = 1e300
"""JSON holds integers that no float can."""


def _kind(what: str, is_right: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> None:
        if not is_right(value):
            raise ValueError(f"{where} is {value!r:.60}, wanted {what}")

    return check


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER


TEXT = _kind("a text", lambda value: isinstance(value, str))


COUNT = _kind("a count", lambda value: type(value) is int and 0 <= value < 1 << 63)


POSITIVE = _kind("a count of 1 or more", lambda value: type(value) is int and 0 < value < 1 << 63)


NUMBER = _kind("a number", _is_number)


OBJECT = _kind("an object", lambda value: isinstance(value, dict))


_LIST = _kind("a list", lambda value: isinstance(value, list))


_FULL_LIST = _kind("a list that is not empty", lambda value: isinstance(value, list) and bool(value))


def or_null(check: Check) -> Check:
    """Returns a check that lets None pass too."""
    return lambda value, where: None if value is None else check(value, where)


def all_of(*checks: Check) -> Check:
    """Returns a check for values that pass each of these."""

    def check(value: Any, where: str) -> None:
        for one in checks:
            one(value, where)

    return check


def list_of(part: Check, *, may_be_empty: bool = True) -> Check:
    """Returns a check for lists of one kind of values."""

    def check(value: Any, where: str) -> None:
        (_LIST if may_be_empty else _FULL_LIST)(value, where)
        for number, found in enumerate(value):
            part(found, f"{where}[{number}]")

    return check


def map_of(part: Check) -> Check:
    """Returns a check for objects of one kind of values."""

    def check(value: Any, where: str) -> None:
        OBJECT(value, where)
        for name, found in value.items():
            part(found, f"{where}.{name}")

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Returns a check for objects with these entries; what else they have is not looked at."""
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        OBJECT(value, where)
        if missing := sorted(required.keys() - value.keys()):
            raise ValueError(f"{where} has no {', '.join(missing)}")
        for name in known.keys() & value.keys():
            known[name](value[name], f"{where}.{name}")

    return check


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
