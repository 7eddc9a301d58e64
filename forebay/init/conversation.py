"""Conversations about images in a row of any form: the words that they take, and the images that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forebay.rows.meanings.conversation import IMAGES, MESSAGES

USED = frozenset((*IMAGES, *MESSAGES, "question", "answer", "system", "sample_id", "id"))
"""Fields that a conversation may have."""


def texts_of_row(
    fields: Mapping[str, Any], *, question: str = "question", answer: str = "answer", messages: str | None = None
) -> str | None:
    """Returns all words of a row's conversation, None where it holds none. messages: the column; None: a usual one."""
    for name in (messages,) if messages else MESSAGES:
        if (found := _of_messages(fields.get(name))) is not None:
            return found
    asked, answered = fields.get(question), fields.get(answer)
    return f"{asked}\n{answered}" if isinstance(asked, str) and isinstance(answered, str) else None


def _of_messages(value: Any) -> str | None:
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        return None
    if not any(each.get("role") or each.get("from") for each in value):
        return None
    return "\n".join(_words(each.get("content") or each.get("value")) for each in value)


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def as_list(value: Any) -> list[Any]:
    """Returns the values of a list, of its JSON, or a value alone."""
    if isinstance(value, str) and value[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
    return value if isinstance(value, list) else [value]


def images_of_row(fields: Mapping[str, Any], column: str | None = None) -> list[str]:
    """Returns the names of images that a row has, in its fields and in the parts of its messages."""
    found: list[str] = []
    for name in (column,) if column else IMAGES:
        found += [each for each in as_list(fields.get(name)) if isinstance(each, str) and each]
    for name in MESSAGES:
        messages = fields.get(name)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            found += [p["image"] for p in parts if isinstance(p, dict) and isinstance(p.get("image"), str)]
    return found
