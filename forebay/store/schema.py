"""Checks of a document's values, which name the place that is not as it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]
"""Raises ValueError where a value, which stands at this place, is of another kind."""
_MAX_NUMBER = 1e300
"""JSON holds integers that no float can."""


def _kind(what: str, is_right: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> None:
        if not is_right(value):
            raise ValueError(f"{where} is {value!r:.60}, wanted {what}")

    return check


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER


TEXT = _kind("a text", lambda value: isinstance(value, str))
COUNT = _kind("a count", lambda value: type(value) is int and 0 <= value < 1 << 63)
POSITIVE = _kind("a count of 1 or more", lambda value: type(value) is int and 0 < value < 1 << 63)
NUMBER = _kind("a number", _is_number)
OBJECT = _kind("an object", lambda value: isinstance(value, dict))
_LIST = _kind("a list", lambda value: isinstance(value, list))
_FULL_LIST = _kind("a list that is not empty", lambda value: isinstance(value, list) and bool(value))


def or_null(check: Check) -> Check:
    """Returns a check that lets None pass too."""
    return lambda value, where: None if value is None else check(value, where)


def all_of(*checks: Check) -> Check:
    """Returns a check for values that pass each of these."""

    def check(value: Any, where: str) -> None:
        for one in checks:
            one(value, where)

    return check


def list_of(part: Check, *, may_be_empty: bool = True) -> Check:
    """Returns a check for lists of one kind of values."""

    def check(value: Any, where: str) -> None:
        (_LIST if may_be_empty else _FULL_LIST)(value, where)
        for number, found in enumerate(value):
            part(found, f"{where}[{number}]")

    return check


def map_of(part: Check) -> Check:
    """Returns a check for objects of one kind of values."""

    def check(value: Any, where: str) -> None:
        OBJECT(value, where)
        for name, found in value.items():
            part(found, f"{where}.{name}")

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Returns a check for objects with these entries; what else they have is not looked at."""
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        OBJECT(value, where)
        if missing := sorted(required.keys() - value.keys()):
            raise ValueError(f"{where} has no {', '.join(missing)}")
        for name in known.keys() & value.keys():
            known[name](value[name], f"{where}.{name}")

    return check
