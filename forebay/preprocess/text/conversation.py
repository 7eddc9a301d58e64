"""The canonical form of a conversation: JSON in, checked messages out."""

from __future__ import annotations

import json
from typing import Any

from forebay.errors import TextError

Message = dict[str, Any]
"""`{"role": ..., "content": [{"type": "text", "text": ...} | {"type": "image"}, ...]}`; of an assistant's that is not
to be learnt also `"loss": False`."""

_ROLES = ("system", "user", "assistant")


def parse_conversation(messages: str, *, sample_id: str) -> list[Message]:
    """Returns the messages; every role and part is of the canonical form, a system message comes first or not at all.

    Raises TextError `bad_conversation` otherwise.
    """
    try:
        found = json.loads(messages)
    except (ValueError, RecursionError) as err:
        raise bad_conversation(sample_id, f"the conversation is not JSON: {err}") from err
    if not isinstance(found, list):
        raise bad_conversation(sample_id, f"the conversation is {type(found).__name__}, wanted a list of messages")
    return [_message(message, place, sample_id=sample_id) for place, message in enumerate(found)]


def bad_conversation(sample_id: str, why: str) -> TextError:
    """Returns the error for a conversation that cannot be written as a chat."""
    return TextError("bad_conversation", f"{sample_id}: {why}; correct the manifest")


def _message(message: Any, place: int, *, sample_id: str) -> Message:
    if not isinstance(message, dict):
        raise bad_conversation(sample_id, f"message {place} is {type(message).__name__}, wanted an object")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise bad_conversation(sample_id, f"message {place} has role {role!r}, wanted one of {', '.join(_ROLES)}")
    if role == "system" and place:
        raise bad_conversation(sample_id, f"message {place} is the system's, wanted message 0 or none")
    if not isinstance(content, list):
        raise bad_conversation(sample_id, f"the content of message {place} is {type(content).__name__}, wanted a list")
    if message.get("loss", True) not in (True, False):
        raise bad_conversation(sample_id, f"message {place} has loss {message['loss']!r}, wanted true or false")
    # Made anew: a template would see any other key of a part.
    made = {"role": role, "content": [_part(part, place, sample_id=sample_id) for part in content]}
    return made if message.get("loss", True) else {**made, "loss": False}


def _part(part: Any, place: int, *, sample_id: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image":
        return {"type": "image"}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise bad_conversation(
        sample_id, f"message {place} has a part of type {kind!r}, wanted an image, or a text with its text"
    )
