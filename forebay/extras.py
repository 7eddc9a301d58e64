"""Optional dependencies: whether one is installed, and the line that every message about a missing one ends with."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
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


def require_major(package: str, major: int, extra: str, *, what: str) -> None:
    """Returns if a package is of a major version or later, or is not installed at all: what loads it says that.

    Raises MissingExtraError with the version that is there. Nothing is imported.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    if int(found.partition(".")[0]) < major:
        raise MissingExtraError(
            f"{what} needs {package} {major} or later, and {found} is installed, which reads caches and trains from "
            f"them; build in an environment of its own: {install_line(extra)}"
        )


class _NoPandas:
    """Makes pandas missing."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not for pyarrow's first conversion", name=fullname)


def arrow_without_pandas() -> None:
    """Converts a first value of Python to arrow: with that pyarrow imports pandas if it is installed: 0.25 s of CPU.

    pyarrow wants to know pandas' own missing values, which it takes for unknown ones from here on. All else of pandas
    works in whatever imports it later. For processes of forebay's own, which run no code that may have such values.
    """
    import numpy as np
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array(np.array([None]))  # it imports numpy.ma too, which each worker would
    finally:
        sys.meta_path.remove(finder)
