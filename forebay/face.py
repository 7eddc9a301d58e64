"""The faces of packages: public names, each loaded from the module that defines it when somebody first uses it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def face(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package whose names are loaded at their first use.

    A package that loaded them when it is imported would load torch, which takes a second.
    homes: each name's module; a subpackage of that name is its own home.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    def names() -> list[str]:
        # Loaded or not: completion and `dir` know nothing of `__getattr__`.
        return sorted({*homes, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return load, names
