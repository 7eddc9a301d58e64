"""System calls that fail when a test says so."""

from __future__ import annotations

import builtins
import errno
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

CALLS = ("open", "write", "fsync", "link", "mkdir", "rename", "replace")


class Killed(BaseException):
    """The end of a process: nothing handles it."""


def error_of(code: int, path: object) -> OSError:
    """Returns the error as a call gives it: with its path, where it was called with one and not with a descriptor."""
    names = (os.fspath(path),) if isinstance(path, (str, os.PathLike)) else ()
    return OSError(code, os.strerror(code), *names)


class Faults:
    """Counts the calls that make files; the `fail_at`-th of them raises `OSError(code)`, or `Killed` for code 0.

    stays: so do all behind it, as on a disk that is full; a failed `mkdir` of what is there counts for none.

    Writes and closes are those of files that were opened for writing, unbuffered. `seen` names every call in order.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, fail_at: int = -1, code: int = errno.ENOSPC, stays: bool = False
    ) -> None:
        self.seen: list[str] = []
        self._places = itertools.count()  # threads may call at once, and each place is one's own
        self._fail_at = fail_at
        self._code, self._stays = code, stays
        monkeypatch.setattr(builtins, "open", self._opener(builtins.open))
        for name in ("fsync", "link", "mkdir", "rename", "replace"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def hit(self, name: str, path: object = None) -> None:
        """Counts one call, and raises where its turn has come; path: that the call was given, if any."""
        self.seen.append(name)
        place = next(self._places)
        if place == self._fail_at or (self._stays and place > self._fail_at):
            raise error_of(self._code, path) if self._code else Killed("killed")

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.hit(name, *args[:1])
            return function(*args, **kwargs)

        return call

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return real(file, mode, *args, **kwargs)
            self.hit("open", file)
            return _FaultyFile(real(file, mode, *args, **kwargs), self)

        return opened


class _FaultyFile:
    def __init__(self, file: Any, faults: Faults) -> None:
        self._file = file
        self._faults = faults

    def __enter__(self) -> _FaultyFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def write(self, data: Any) -> int:
        """Writes half, then fails: a disk that becomes full takes a part first."""
        if len(self._faults.seen) == self._faults._fail_at:
            self._file.write(bytes(data)[: len(data) // 2])
        self._faults.hit("write")
        return int(self._file.write(data))
