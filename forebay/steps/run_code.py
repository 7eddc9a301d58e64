"""Runs code of the user: in a worker as what a module holds, and as a program of its own for the probe of a function.

As a program it imports nothing of forebay, so that it starts at once: `python -P run_code.py < question > answer`, both
JSON. What the user's code prints goes to standard error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

Answer = tuple[Literal["text", "type", "raised"], str]
"""What a call gave: a text, the name of a wrong type, or an exception as one line."""
Function = Callable[[str, str], object]
_MODULE = "forebay_code_"
"""How names of modules of users begin."""


class CodeError(Exception):
    """The code cannot be run at all: it is no Python, raises when it is imported, or has no such function."""


def loaded(source: bytes, path: str, name: str, *, what: Literal["function", "class"] = "function") -> Any:
    """Returns a function or class of a module that is made of these very bytes. path: for `__file__` and tracebacks.

    The module has its own name and no place on `sys.path`: what lies beside it cannot be imported. Raises CodeError.
    """
    module = types.ModuleType(f"{_MODULE}{hashlib.sha256(source).hexdigest()[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    with refusing(lambda said: CodeError(f"importing it raised {said}")):
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    found: Any = getattr(module, name, None)
    if not callable(found) or (what == "class" and not isinstance(found, type)):
        kind, kinds = (type, "classes") if what == "class" else (types.FunctionType, "functions")
        own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        names = sorted(key for key, value in own.items() if isinstance(value, kind))
        raise CodeError(f"it has no {what} {name}; its {kinds}: {', '.join(names) or 'none'}")
    return found


@contextlib.contextmanager
def refusing(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raises an error, made of one line, in the place of whatever code of the user raises in this block."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as err:
        raise error(described(err)) from err


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
    """Returns an exception as one line, with the last line of the user's file that led to it."""
    lines: dict[bool, int] = {}
    trace = err.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module != __name__:
            lines[module.startswith(_MODULE)] = trace.tb_lineno
        trace = trace.tb_next
    line = lines.get(True, lines.get(False))  # of an installed package: the last line of all
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


def serve(answered: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Writes the answer to the question of standard input, as JSON; whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        json.dump(answered(json.load(sys.stdin)), out)


if __name__ == "__main__":
    serve(probed)
