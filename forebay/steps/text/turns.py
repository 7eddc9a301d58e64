"""Where the assistant speaks in a rendered chat: two marks of the template, learnt from one small conversation.

The canonical form of a conversation: JSON in, checked messages out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError, TextError
from forebay.steps.text.vocabulary import Vocabulary

VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


_QUESTION, _ANSWER = "forebay-question", "forebay-answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarks:
    """The header before what the assistant says and the control token after it; `template_ids` is all that the template writes.

    behind: what stands behind the closing token of a turn that another follows. Both marks hold a control token.
    Control tokens cannot come from a message, so neither can the marks.
    """

    header: str
    closing: str
    behind: str
    template_ids: frozenset[int]

    def spans(self, rendered: str) -> list[tuple[int, int]]:
        """Returns (start, end) in characters of every assistant turn: after its header, with its closing token."""
        found = []
        at = rendered.find(self.header)
        while at >= 0:
            start = at + len(self.header)
            end = rendered.find(self.closing, start)
            if end < 0:
                break
            found.append((start, end + len(self.closing)))
            at = rendered.find(self.header, found[-1][1])
        return found


def render_chat(vocabulary: Vocabulary, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    """Returns the conversation as the folder's chat template writes it; ValueError where the template refuses it."""
    from jinja2 import TemplateError  # comes with transformers

    try:
        chat = vocabulary.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TypeError, TemplateError) as err:  # TypeError: a template for texts alone adds strings to the list of parts
        raise ValueError(str(err)) from err
    return str(chat)


def find_turn_marks(vocabulary: Vocabulary) -> TurnMarks:
    """Returns the marks of the folder's chat template.

    Raises ConfigError, naming the folder, where there is no template, where it does not show an image as
    `<|vision_start|><|image_pad|><|vision_end|>`, or where an assistant's turn does not begin and end with a control token.
    """
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _QUESTION}]}
    assistant = {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]}
    try:
        asked = render_chat(vocabulary, [user])
        prompted = render_chat(vocabulary, [user], add_generation_prompt=True)
        chat = render_chat(vocabulary, [user, assistant, user, assistant])
    except ValueError as err:
        raise _unusable(vocabulary, f"is missing, or refuses texts and images ({err})") from err
    images = chat.count(f"{VISION_START}{IMAGE_PAD}{VISION_END}")
    if images != 2 or chat.count(IMAGE_PAD) != 2:
        raise _unusable(vocabulary, f"shows {images} of 2 images as {VISION_START}{IMAGE_PAD}{VISION_END}")
    if not chat.startswith(asked) or chat.count(_ANSWER) != 2:
        raise _unusable(vocabulary, "does not show a conversation turn by turn as it was given")
    # The header comes from a turn in the middle: thinking models begin the last one with more, which is to be learnt.
    header = chat[len(asked) : chat.index(_ANSWER)]
    if not prompted.startswith(asked + header) or not _control_ids(vocabulary, header):
        raise _unusable(vocabulary, f"begins an assistant's turn with {header!r}, wanted a control token and a role")
    _, after, last = chat.split(_ANSWER)
    closing = next((vocabulary.tokenizer.convert_ids_to_tokens(i) for i in _control_ids(vocabulary, after)), None)
    if closing is None or closing not in last:
        raise _unusable(vocabulary, f"ends an assistant's turn with {last!r}, wanted the same control token as before")
    marks = TurnMarks(
        header=header,
        closing=closing,
        behind=after.partition(closing)[2],
        template_ids=frozenset(_control_ids(vocabulary, chat)),
    )
    if [chat[start:end].count(_ANSWER) for start, end in marks.spans(chat)] != [1, 1]:
        raise _unusable(vocabulary, f"writes {header!r} outside of an assistant's turn too")
    return marks


def _control_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    return [part for part in vocabulary.split(text) if isinstance(part, int)]


def _unusable(vocabulary: Vocabulary, why: str) -> ConfigError:
    return ConfigError(
        f"text.tokenizer: the chat template of {vocabulary.folder} {why}, so the assistant's turns cannot be found; "
        "use the model's own template"
    )


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
