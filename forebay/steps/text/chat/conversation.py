"""A conversation as it is stored, which rows cannot be learnt from, and how long images and turns agree with a row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.errors import TextError
from forebay.steps.text.normalize import is_unseen

Message = dict[str, Any]
"""`{"role": ..., "content": [{"type": "text", "text": ...} | {"type": "image"}, ...]}`; of an assistant's that is not
to be learnt also `"loss": False`."""

Render = Callable[..., str]
"""`render(messages, add_generation_prompt=False)`: what a chat template writes; ValueError where it refuses."""

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """The demands of a conversation on its rendering. learnt: says of each assistant turn whether it has targets."""

    learnt: tuple[bool, ...]
    num_images: int


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


def check_conversation(
    conversation: Sequence[Message], reserved: re.Pattern[str], *, num_images: int, sample_id: str
) -> ChatTurns:
    """Returns the turns of a conversation of which every text can be used.

    reserved: control tokens that no text may hold. num_images: of the row.
    Raises TextError: `special_token_in_text`, `bad_conversation`, `empty_text`, `no_assistant_turn`,
    `nothing_to_learn`, `image_count_mismatch`.
    """
    learnt: list[bool] = []
    shown = 0
    for place, message in enumerate(conversation):
        shown += _checked_message(message, place, reserved, sample_id=sample_id)
        if message["role"] == "assistant":
            learnt.append(message.get("loss", True))
    if not learnt:
        raise TextError(
            "no_assistant_turn",
            f"{sample_id}: none of {len(conversation)} messages is the assistant's, wanted 1 or more",
        )
    if not any(learnt):
        raise TextError(
            "nothing_to_learn",
            f"{sample_id}: all {len(learnt)} messages of the assistant say loss: false or weight: 0; "
            "leave the sample out",
        )
    if shown != num_images:
        raise TextError(
            "image_count_mismatch",
            f"{sample_id}: the conversation shows {shown} images, the sample has {num_images}; correct the manifest",
        )
    return ChatTurns(tuple(learnt), shown)


def _checked_message(message: Message, place: int, reserved: re.Pattern[str], *, sample_id: str) -> int:
    """Returns how many images a message shows."""
    parts = message["content"]
    # Joined, because a template writes parts without anything between them.
    text = "".join(part.get("text", "\n") for part in parts)
    found = reserved.search(text)
    if found:
        raise TextError(
            "special_token_in_text",
            f"{sample_id}: message {place} has {found[0]} in its text, which the model takes for a control "
            "token; clean the text",
        )
    images = len([part for part in parts if part["type"] == "image"])
    if message["role"] != "assistant":
        return images
    if images:
        raise bad_conversation(sample_id, f"message {place} is the assistant's and has {images} images, wanted 0")
    if is_unseen(text):
        raise TextError("empty_text", f"{sample_id}: message {place}, the assistant's, has no text")
    return 0


def rendered_text(render: Render, conversation: Sequence[Message], folder: object, *, sample_id: str) -> str:
    """Returns what the chat template of a folder writes of a conversation, which a tokenizer can take.

    Raises TextError: `bad_conversation` where the template refuses it, `bad_text` for lone surrogates and NUL.
    """
    try:
        rendered = render([shown(message) for message in conversation])
    except ValueError as err:
        raise bad_conversation(sample_id, f"the chat template of {folder} refuses it: {err}") from err
    try:
        rendered.encode("utf-8")
    except UnicodeEncodeError as err:
        found = f"U+{ord(rendered[err.start]):04X}"
        raise TextError("bad_text", f"{sample_id}: text has a lone surrogate {found}; clean the manifest") from err
    if "\0" in rendered:
        raise TextError("bad_text", f"{sample_id}: text has a NUL; clean the manifest")
    return rendered


def learnt_spans(
    spans: Sequence[tuple[int, int]], turns: ChatTurns, *, num_shown: int, sample_id: str
) -> list[tuple[int, int]]:
    """Returns the spans of the turns that have targets. spans: of all turns. num_shown: images in the rendered text.

    Raises TextError `bad_conversation` where the template wrote other turns or images than the conversation has.
    """
    if (len(spans), num_shown) != (len(turns.learnt), turns.num_images):
        raise bad_conversation(
            sample_id,
            f"the chat template shows {len(spans)} assistant turns and {num_shown} images, "
            f"the conversation has {len(turns.learnt)} and {turns.num_images}",
        )
    return [span for span, is_learnt in zip(spans, turns.learnt, strict=True) if is_learnt]


def shown(message: Message) -> Message:
    """Returns what a template is given: it would see any other key."""
    return {name: message[name] for name in ("role", "content")}


def with_images(conversation: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Returns the messages with an image of PIL in each part that shows one, in their order."""
    remaining = iter(images)
    made = []
    for message in conversation:
        parts = [
            {**part, "image": next(remaining)} if part["type"] == "image" else dict(part) for part in message["content"]
        ]
        made.append({**shown(message), "content": parts})
    return made


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
