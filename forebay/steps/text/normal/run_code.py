"""Runs a function of the user: in a worker as a module's functions, and as a program of its own for the probe.

As a program it imports nothing of forebay, so that it starts at once: `python -P run_code.py < question > answer`, both
JSON. The function's own output goes to standard error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

Answer = tuple[Literal["text", "type", "raised"], str]
"""What a call gave: a text, the name of a wrong type, or an exception as one line."""

Function = Callable[[str, str], object]


class CodeError(Exception):
    """The code cannot be run at all: it is no Python, raises when it is imported, or has no such function."""


def loaded(source: bytes, path: str, function: str) -> Function:
    """Returns a function of a module that is made of these very bytes. path: for `__file__` and tracebacks.

    The module has a name of its own and no place on `sys.path`: what lies beside the file cannot be imported. Raises
    CodeError.
    """
    module = types.ModuleType(f"forebay_code_{hashlib.sha256(source).hexdigest()[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as err:
        raise CodeError(f"importing it raised {described(err)}") from err
    found: Any = getattr(module, function, None)
    if not callable(found):
        names = sorted(name for name, value in vars(module).items() if isinstance(value, types.FunctionType))
        raise CodeError(f"it has no function {function}; its functions: {', '.join(names) or 'none'}")
    called: Function = found
    return called


def answer(function: Function, text: str, language: str) -> Answer:
    """Returns what a function gives for one text and its language."""
    try:
        result = function(text, language)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as err:  # noqa: BLE001 - also SystemExit: whatever a text makes of it costs that text
        return "raised", described(err)
    # A str of a subclass has methods of its own.
    return ("text", str.__str__(result)) if isinstance(result, str) else ("type", type(result).__name__)


def described(err: BaseException) -> str:
    """Returns an exception as one line, with the line of the code that raised it."""
    trace, line = err.__traceback__, None
    while trace is not None:
        line, trace = trace.tb_lineno, trace.tb_next
    try:
        message = " ".join(str(err).split())[:200]
    except Exception:  # noqa: BLE001 - of the user's own exceptions
        message = ""
    where = "" if line is None else f" (line {line})"
    return f"{type(err).__name__}{': ' if message else ''}{message}{where}"


def probed(question: dict[str, Any]) -> dict[str, Any]:
    """Returns `runs`, the answers for all pairs in their order and then, in reverse, once more; or `error`."""
    try:
        function = loaded(base64.b64decode(question["source"]), question["path"], question["function"])
    except CodeError as err:
        return {"error": str(err)}
    pairs: Sequence[Sequence[str]] = question["pairs"]
    first = [answer(function, text, language) for text, language in pairs]
    again = [answer(function, text, language) for text, language in reversed(pairs)]
    return {"runs": [first, again[::-1]]}


def _main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        json.dump(probed(json.load(sys.stdin)), out)


if __name__ == "__main__":
    _main()
