"""Whether the tar of a kept index is still the one that was indexed."""

from __future__ import annotations

from pathlib import Path

from forebay.errors import TarError
from forebay.tar.index import indexed_tar


def is_of_gone_tar(path: Path) -> tuple[bool, str]:
    """Returns whether an index is of no use any more, and why, or why it stays."""
    try:
        tar, is_current = indexed_tar(path)
    except TarError as err:
        return True, str(err)
    if tar is None:
        return False, "which tar it is of is not known from here"
    return (False, f"of {tar}") if is_current else (True, f"{tar} is gone, or another one by now")
