"""How an optional dependency is installed: the one line that every message about a missing extra ends with."""

from __future__ import annotations


def install_line(extra: str) -> str:
    """Returns the command that installs an extra from an index, and the one in a clone."""
    return f"pip install 'forebay[{extra}]' (from a clone: pip install -e '.[{extra}]')"
