"""What a row holds beside its images, by what is read of it: a conversation, a class, a text, or nothing.

A class stands in a part's rows as JSON, so that nothing of it is lost before all rows are known: a name `"cat"`, an
integer `3`, a list of them, and `{"": "3"}` for a text of which nobody has said what it stands for (of a CSV, or a
member `.cls` of a tar). `labels.py` says what the column is then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from forebay.config.data import Reads
from forebay.errors import TextError
from forebay.rows.meanings.conversation import IDS, IMAGES, canonical
from forebay.rows.readers.json_lines import JsonError, parse_nested

Image = TypeVar("Image")

EXCLUDED = frozenset(("no_label", "no_text"))
"""Reasons of rows that lack what the config asks for: they are left out, and no failure."""

MAX_NUMBER = 1 << 31
"""Integers of classes are below it."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

Taken = Callable[[Mapping[str, Any]], str]


class Untyped(str):
    """A text that may stand for an integer."""

    __slots__ = ()


def written_label(text: str) -> Any:
    """Returns the label that a text of a table stands for: a JSON list of labels, else one that has no type."""
    if text.lstrip().startswith("["):
        try:
            found = parse_nested(text)
        except JsonError:
            return Untyped(text)
        return found if isinstance(found, list) else Untyped(text)
    return Untyped(text)


def read_row(
    reads: Reads, fields: Mapping[str, Any], images: Sequence[Image], *, unknown: set[str]
) -> tuple[str, list[Image | str]]:
    """Returns the text of a row, and its images in their order. unknown: the names of fields not taken are added.

    Raises TextError as `canonical` for a conversation; else `no_label`, `bad_label`, `no_text`, `bad_text`, and
    `image_count_mismatch` for a row of no image or of several.
    """
    if reads not in _TAKES:
        return canonical(fields, images, unknown=unknown)
    name, take = _TAKES[reads]
    taken = {*IDS, *IMAGES, name}
    unknown.update(field for field in fields.keys() - taken if fields[field] is not None)
    text = take(fields)
    if len(images) != 1:
        raise TextError(
            "image_count_mismatch", f"has {len(images)} images, and a row of {reads} has one; give a row an image"
        )
    return text, [*images]


def _label(fields: Mapping[str, Any]) -> str:
    value = _plain(fields.get("label"))
    if value is None:
        raise TextError("no_label", "has no label; give it one, or leave the row out")
    return _encode(value)


def _plain(value: Any, *, is_inner: bool = False) -> Any:
    """Returns a label as JSON has it, None where it is none. Raises TextError for what is no class."""
    if isinstance(value, list | tuple) and not is_inner:
        return [_required(each) for each in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            return None
        # An integer beside missing values, as pandas writes a column of them.
        value = int(value) if value.is_integer() else _refuse(value)
    if isinstance(value, int):
        return _number(value)
    if isinstance(value, str):
        return _name(value)
    return None if value is None else _refuse(value)


def _required(value: Any) -> Any:
    found = _plain(value, is_inner=True)
    return _refuse(value) if found is None else found


def _number(value: int) -> int | None:
    if value >= MAX_NUMBER:
        _refuse(value)
    return value if value >= 0 else None  # `datasets` writes -1 where nobody knows the class


def _name(value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(value)
    if isinstance(value, Untyped):
        return {"": str(value).strip()} if value.strip() else None
    return value or None


def _refuse(value: Any) -> Any:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    raise TextError(
        "bad_label",
        f"its label is {shown[:60]}, wanted a name, an integer from 0 to {MAX_NUMBER - 1}, or a list of either; "
        "correct the row",
    )


def _text(fields: Mapping[str, Any]) -> str:
    value = fields.get("text")
    if value is None or (isinstance(value, str) and not value.strip()):
        raise TextError("no_text", "has no text; give it one, or leave the row out")
    if not isinstance(value, str):
        several = "; for several texts of an image give a row each" if isinstance(value, list) else ""
        raise TextError("bad_text", f"its text is {str(value)[:60]!r}, wanted a string{several}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        raise TextError("bad_text", "its text holds half of a surrogate pair; correct the row") from err
    return value


def _nothing(fields: Mapping[str, Any]) -> str:  # noqa: ARG001
    return ""


_TAKES: Mapping[str, tuple[str, Taken]] = {
    "labels": ("label", _label),
    "texts": ("text", _text),
    "images": ("image", _nothing),
}
"""By what is read: the field that is taken beside the image, and the row's text of it."""
