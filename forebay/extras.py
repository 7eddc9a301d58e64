"""Optional dependencies: whether one is installed, and the line that every message about a missing one ends with."""

from __future__ import annotations

from importlib.util import find_spec

from forebay.errors import MissingExtraError


def install_line(extra: str) -> str:
    """Returns the command that installs an extra from an index, and the one in a clone."""
    return f"pip install 'forebay[{extra}]' (from a clone: pip install -e '.[{extra}]')"


def require_module(module: str, extra: str, *, what: str) -> None:
    """Returns where a module is installed. Raises MissingExtraError: `what` needs it, and how it is installed.

    It looks for the module and does not load it, so it is asked before any data is.
    """
    if find_spec(module) is None:
        raise MissingExtraError(f"{what} needs {module}; run: {install_line(extra)}")
