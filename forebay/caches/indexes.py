"""Whether the file of a kept index is still the one that was indexed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forebay.errors import ManifestError, TarError
from forebay.rows.readers.line_index import indexed_text
from forebay.tar.index import indexed_tar


def is_of_gone_tar(path: Path) -> tuple[bool, str]:
    """Returns whether the index of a tar is of no use any more, and why, or why it stays."""
    return _is_of_gone(path, indexed_tar, "tar")


def is_of_gone_text(path: Path) -> tuple[bool, str]:
    """Returns whether the index of a text's lines is of no use any more, and why, or why it stays.

    A text that has grown is another one: its index would be gone on with, but nothing says that it will be.
    """
    return _is_of_gone(path, indexed_text, "text")


def _is_of_gone(path: Path, indexed: Callable[[Path], tuple[str | None, bool]], what: str) -> tuple[bool, str]:
    try:
        file, is_current = indexed(path)
    except (TarError, ManifestError) as err:
        return True, str(err)
    if file is None:
        return False, f"which {what} it is of is not known from here"
    return (False, f"of {file}") if is_current else (True, f"{file} is gone, or another one by now")
