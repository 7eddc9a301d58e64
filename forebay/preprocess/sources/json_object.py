"""One JSON object from bytes that may hold anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.visible import printable

REPEATED = "repeated_field"


class JsonError(ValueError):
    """What is wrong with an object; the caller adds the file and the line. reason: of its own, where it has one."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


def parse_object(data: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises JsonError for anything else, deep nesting, NaN and infinities included.

    A field that stands twice in an object, at any depth, has the reason `repeated_field`: JSON does not say which one
    counts.
    """
    try:
        value = _flat.decode(data.decode("utf-8-sig"))
    except RecursionError as err:
        raise JsonError("is nested too deeply, wanted a flat object") from err
    except JsonError:
        raise
    except ValueError as err:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise JsonError(f"is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise JsonError(f"is {_named(value)}, wanted an object")
    return value


def parse_nested(text: str) -> Any:
    """Returns the value of JSON text inside a field. Raises JsonError for what is none, or has a field twice."""
    try:
        return _nested.decode(text)
    except JsonError:
        raise
    except (ValueError, RecursionError) as err:
        raise JsonError(f"is no JSON: {err}") from err


def string_of(fields: Mapping[str, Any], names: Sequence[str], *, required: bool = False) -> str | None:
    """Returns the first of several fields that is there and not null; None where none is.

    Raises JsonError where its value is no string that UTF-8 can hold, or where none is there and one is required.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise JsonError(f"field {name} is {_named(value)}, wanted a string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as err:
            raise JsonError(f"field {name} holds half of a surrogate pair, wanted text") from err
        return value
    if required:
        raise JsonError(f"has no field {names[0]}, wanted a string")
    return None


def seconds_of(fields: Mapping[str, Any], names: Sequence[str]) -> float:
    """Returns the first of several fields that is there and not null as float; NaN where none is.

    Raises JsonError where its value is no number. A number that no duration is (-1) is returned as it is.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise JsonError(f"field {name} is {_named(value)}, wanted seconds as a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return math.nan


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f'field "{printable(twice[:60])}" stands there twice, wanted it once', reason=REPEATED)
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


# `json.loads` would make a decoder a call, which costs as much as decoding a line.
_flat = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object_of_pairs)
_nested = json.JSONDecoder(object_pairs_hook=_object_of_pairs)


def _named(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return f"{kinds.get(type(value), 'a number')} ({text[:60]})"
