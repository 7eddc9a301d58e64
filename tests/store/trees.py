"""The contents of a folder, byte for byte, and damage done to them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def tree(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Returns content hash, mode and modification time of everything below a folder, by relative name."""
    found: dict[str, tuple[str, int, int]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[path.relative_to(folder).as_posix()] = (content, status.st_mode, status.st_mtime_ns)
    return found


def flip(path: Path, position: int, mask: int = 1) -> None:
    """Changes one byte of a file in a new inode, as repair must: hard links and mappings of it stay as they are."""
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.unlink()
    path.write_bytes(data)


def set_writable(folder: Path, *, is_writable: bool) -> None:
    """Gives or takes the right to write a folder and all below it."""
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        os.chmod(path, mode | 0o200 if is_writable else mode & ~0o222)
