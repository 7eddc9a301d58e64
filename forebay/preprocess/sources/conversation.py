"""One conversation in any of the usual forms to the canonical one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from forebay.errors import TextError
from forebay.preprocess.sources.json_object import JsonError, string_of

Image = TypeVar("Image")

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_TAG = re.compile(r"\n?<image>\n?")
MESSAGES = ("messages", "conversations")
IMAGES = ("images", "image")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def canonical(fields: Mapping[str, Any], images: Sequence[Image]) -> tuple[str, list[Image | str]]:
    """Returns a conversation as canonical JSON, and its images in the order of their parts.

    fields: `messages` (or `conversations`) of `role` and `content` (or `from`: human, gpt; and `value`), or `question` and
    `answer`. A content is a string, in which `<image>` (with a newline before and after it) stands for an image, or parts
    `{"type": "text", "text"}`, `{"type": "image"}`, `{"type": "image", "image": name}`. images: what tags and parts
    without a name stand for, in order; anything, a named part gives its name. A question without a tag has them before it.

    The canonical form is a list of `{"role": "system"|"user"|"assistant", "content": [parts]}`, parts without names.
    Raises TextError `image_count_mismatch` where there are more or fewer tags than images, `bad_conversation` for what
    is none of these forms.
    """
    try:
        conversation = _conversation(fields, num_images=len(images))
    except JsonError as err:
        raise TextError("bad_conversation", str(err)) from err
    parts = [part for message in conversation for part in message["content"] if part["type"] == "image"]
    tags = sum("image" not in part for part in parts)
    if tags != len(images):
        raise TextError(
            "image_count_mismatch",
            f"has {tags} image tags for {len(images)} images; give a tag, or an image part, for every image",
        )
    rest = iter(images)
    used = [part.pop("image") if "image" in part else next(rest) for part in parts]
    return _encode(conversation), used


def image_names(fields: Mapping[str, Any]) -> list[str]:
    """Returns the names that `images` or `image` gives, none where both are missing or null; for one, a string will do.

    Raises TextError `bad_conversation` for other types.
    """
    name = next((name for name in IMAGES if fields.get(name) is not None), None)
    if name is None:
        return []
    values = fields[name] if isinstance(fields[name], list) else [fields[name]]
    try:
        return [string_of({name: value}, (name,), required=True) or "" for value in values]
    except JsonError as err:
        raise TextError("bad_conversation", str(err)) from err


def identifier(fields: Mapping[str, Any]) -> str | None:
    """Returns `sample_id` or `id`, a number as its digits; None where neither is there.

    Raises TextError `bad_conversation` for an empty one and other types.
    """
    value = next((fields[name] for name in ("sample_id", "id") if fields.get(name) is not None), None)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30:
        return str(value)
    try:
        given = string_of({"id": value}, ("id",))
    except JsonError as err:
        raise TextError("bad_conversation", str(err)) from err
    if given == "":
        raise TextError("bad_conversation", "field id is empty, wanted an id")
    return given


def _conversation(fields: Mapping[str, Any], *, num_images: int) -> list[dict[str, Any]]:
    name = next((name for name in MESSAGES if fields.get(name) is not None), None)
    if name is not None:
        return list(_messages(fields[name], name))
    if fields.get("question") is None:
        raise JsonError("has neither messages nor a question; give messages, or question and answer")
    question = list(_split(string_of(fields, ("question",), required=True) or ""))
    if not any(part["type"] == "image" for part in question):
        question = [*({"type": "image"} for _ in range(num_images)), *question]
    answer = _text(string_of(fields, ("answer",), required=True) or "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": list(answer)}]


def _messages(messages: Any, name: str) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise JsonError(f"field {name} is {str(messages)[:60]!r}, wanted a list of messages")
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise JsonError(f"{where} is {str(message)[:60]!r}, wanted an object")
        role = message.get("role") if message.get("role") is not None else message.get("from")
        if not isinstance(role, str) or role not in _ROLES:
            raise JsonError(f"{where}: role is {str(role)[:60]!r}, wanted one of {', '.join(_ROLES)}")
        content = message.get("content") if message.get("content") is not None else message.get("value")
        yield {"role": _ROLES[role], "content": list(_parts(content, where))}


def _parts(content: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(content, list):
        text = string_of({f"{where} content": content}, (f"{where} content",), required=True)
        yield from _split(text or "")
        return
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            yield from _text(string_of(part, ("text",), required=True) or "")
        elif kind == "image":
            name = string_of(part, ("image",))
            yield {"type": "image"} if name is None else {"type": "image", "image": name}
        else:
            raise JsonError(f"{where}: part {str(part)[:60]!r}, wanted one of type text or image")


def _split(text: str) -> Iterator[dict[str, Any]]:
    """The parts of a string with tags."""
    for number, piece in enumerate(_TAG.split(text)):
        if number:
            yield {"type": "image"}
        yield from _text(piece)


def _text(text: str) -> Iterator[dict[str, Any]]:
    if text:
        yield {"type": "text", "text": text}
