"""Names for stretches of work, for whoever listens: a profiler. While nobody does, a name costs a tenth of a
microsecond."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_Make = Callable[[str], AbstractContextManager[object]]

_NOTHING = contextlib.nullcontext()
_listener: _Make | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Returns a context that tells the listener, if there is one, when the work `name` begins and ends in a thread."""
    return _NOTHING if _listener is None else _listener(name)


@contextlib.contextmanager
def listening(make: _Make) -> Iterator[None]:
    """Makes every `span` of this process, in all its threads, the context that `make` gives for its name."""
    global _listener  # threads of the loader, which know no caller, are to be heard too
    before, _listener = _listener, make
    try:
        yield
    finally:
        _listener = before
