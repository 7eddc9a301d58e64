"""Names for stretches of work, for whoever listens: a profiler. While nobody does, a name costs less than 1 us."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

# The names that a profile knows more of than how long they took.
DATA_WAIT = "idle: waiting for data"
COPY = "copy to device"
FORWARD = "forward"
"""The whole pass. Parts of the model have `forward: encoder`, their submodules `forward: encoder.layers`."""
BACKWARD = "backward"
ALL_REDUCE = "all-reduce"
EVALUATION = "evaluation"

# Those of a sample on its way from raw data into a batch; a profile and `forebay doctor` have rows of these names.
RAW_READ = "raw read"
DECODE = "decode"
RESAMPLE = "resample"
RESIZE = "resize"
PATCHES = "patches"
FEATURES = "features"
TOKENS = "tokens"
READ = "read"
"""A whole sample, out of a cache or made on the fly; the others lie inside of it then."""
COLLATE = "collate"
_Make = Callable[[str], AbstractContextManager[object]]
_NOTHING = contextlib.nullcontext()
_listener: _Make | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Returns a context that tells the listener, if there is one, when work begins and ends in this thread."""
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
