"""The faces of packages: public names, each loaded from the module that defines it when somebody first uses it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def face(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, `__dir__` and `__all__` of a package whose names are loaded at their first use.

    A package that loaded them when it is imported would load torch, which takes a second. A type checker does not see
    these names: the package imports each of them for it, `as` itself, under TYPE_CHECKING.
    names: by module of the package its public names, separated by spaces; by "" the modules that are public themselves.
    """
    homes = {name: module for module, public in names.items() for name in public.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def listed() -> list[str]:
        # Loaded or not: completion and `dir` know nothing of `__getattr__`.
        return sorted({*homes, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return load, listed, sorted(homes)


_own: list[bool] = []
"""Not empty in a process of forebay's own: what is imported there is never garbage. Elsewhere garbage is not ours."""


def own_process() -> None:
    """Says that this process runs one command, and passes over what it has loaded by now when it looks for garbage."""
    _own.append(True)
    gc.freeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Looks for no garbage until the block ends: imports make none, and looking takes a fifth of a small command."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _own:
            gc.freeze()
        if is_collecting:
            gc.enable()
