"""Functions that test_isolated.py calls in processes of their own."""

from __future__ import annotations

import os

from forebay.errors import ConfigError
from forebay.measure.machine import peaks, resident_bytes


def double(number: int, *, plus: int = 0) -> int:
    return 2 * number + plus


def world_size() -> str | None:
    return os.environ.get("WORLD_SIZE")


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def refuse() -> None:
    raise ConfigError("a setting is wrong")


def fail() -> None:
    print(1 // 0)


def peak_of(size: int) -> int:
    before = resident_bytes()
    held = bytearray(b"x") * size
    return peaks()[0] - before + 0 * len(held)
