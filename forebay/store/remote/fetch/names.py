"""Which names of objects may become files of a folder. All of this is decided before a byte is written."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Iterable

from forebay.store.temporary import is_temporary

_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_SHOWN = 5


def problem_of(name: str, *, longest_part: int = 255, longest: int = 4095) -> str:
    """Returns why a name may be no file below a folder; empty where it may.

    longest_part, longest: bytes that the file system takes as a name and as a whole path below the folder.
    """
    if not name or name.startswith("/"):
        return "is absolute" if name else "is empty"
    if "\\" in name or _DRIVE.match(name):
        return "holds a backslash" if "\\" in name else "begins with a drive letter"
    if not name.isprintable() and any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name):
        return "holds a control character"
    parts = name.split("/")
    if any(part in (".", "..") for part in parts):
        return "leads out of the folder"
    if "" in parts:
        return "has an empty part"
    if max(len(part.encode()) for part in parts) > longest_part or len(name.encode()) > longest:
        return f"is longer than the file system takes ({longest_part} bytes a part, {longest} in all)"
    if any(is_temporary(part) for part in parts):
        return "is a name of what forebay is writing"
    return ""


def problems(names: Collection[str], *, longest_part: int = 255, longest: int = 4095) -> list[str]:
    """Returns a line for each name that may be no file, and for each that is a folder of another one too."""
    bounds = {"longest_part": longest_part, "longest": longest}
    found = [f"{name!r} {problem}" for name in names if (problem := problem_of(name, **bounds))]
    return found + [f"{name!r} is a file, and a folder of others" for name in sorted(folders_of(names) & {*names})]


def folders_of(names: Iterable[str]) -> set[str]:
    """Returns every folder on the way to the names."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in found:
            found.add(name)
    return found


def alike(names: Collection[str]) -> list[tuple[str, str]]:
    """Returns pairs of names, or of folders of them, that differ by case or by Unicode form alone."""
    first: dict[str, str] = {}
    pairs = []
    for name in sorted({*names, *folders_of(names)}):
        other = first.setdefault(_folded(name), name)
        if other != name:
            pairs.append((other, name))
    return pairs


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def some(lines: Collection[str]) -> str:
    """Returns a few lines as one text, which says how many more there are."""
    shown = list(lines)[:_MAX_SHOWN]
    return "; ".join(shown) + (f"; and {len(lines) - len(shown)} more" if len(lines) > len(shown) else "")


def limits(folder: str) -> tuple[int, int]:
    """Returns the bytes that a part of a name, and a whole name below a folder that is there, may have."""
    longest_part, longest = os.pathconf(folder, "PC_NAME_MAX"), os.pathconf(folder, "PC_PATH_MAX")
    return longest_part, longest - len(os.fsencode(os.path.abspath(folder))) - 2
