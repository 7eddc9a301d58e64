"""`chat`: conversations to tokens: the folder's chat template, image tokens by grid, and which tokens are targets."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.errors import ConfigError, TextError
from forebay.steps.step import TextStep
from forebay.steps.text.normalize import is_unseen
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import FieldSpec

VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_QUESTION, _ANSWER = "forebay-question", "forebay-answer"


# A model counts all of these, whoever wrote them. Some are in no template.
_VISION_TOKENS = (VISION_START, IMAGE_PAD, VISION_END, "<|vision_pad|>", "<|video_pad|>")

_LINE_ENDS = ("\n", "\r")

Message = dict[str, Any]
"""`{"role": ..., "content": [{"type": "text", "text": ...} | {"type": "image"}, ...]}`; of an assistant's that is not
to be learnt also `"loss": False`."""

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(TextStep):
    """`input_ids` int32 [tokens] and `label_mask` uint8 [tokens] of a conversation under the tokenizer's chat template.

    Image tokens are expanded; the mask is 1 where a token is a target: in what the assistant says, and in what ends its
    turn. Batches of conversations are packs.
    """

    name: ClassVar[str] = "chat"
    axes: ClassVar[dict[str, str | int]] = {"input_ids": "tokens", "label_mask": "tokens", "image_rows": "images"}
    of_images: ClassVar[bool] = True

    learn_through: Literal["end_of_turn", "newline"] = "end_of_turn"
    """Where what is learnt of a turn ends: with the token that ends it, or with the newline behind that."""
    version: int = 2

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the text group: `input_ids` and `label_mask`, [num_tokens] both."""
        return (
            FieldSpec(name="input_ids", dtype="int32", group="text"),
            FieldSpec(name="label_mask", dtype="uint8", group="text"),
        )

    def encoder(self, folder: Path, *, merge_size: int) -> ChatEncoder:
        """Returns what writes conversations with the tokenizer of a local folder, see `ChatEncoder`."""
        return ChatEncoder(self, folder, merge_size=merge_size)


class ChatEncoder:
    """Writes conversations as the chat template of a local folder does, with `<|image_pad|>` repeated by grid.

    The ids are those of the tokenizer for the rendered and expanded string. A target is what the assistant says and the
    control token that closes its turn; with `step.learn_through = "newline"` also the token of line ends behind that,
    where one stands. A token that reaches out of the turn (the header's line end together with line ends that an answer
    begins with) is none. Turns whose message has `"loss": false` have no target.
    """

    def __init__(self, step: Chat, folder: Path, *, merge_size: int) -> None:
        """Loads the tokenizer (and with it transformers).

        merge_size: of the image processor; `merge_size`^2 patches become one token. Raises ConfigError where the
        folder's files are not those of `step.tokenizer`, lack what images need, or where the template's turns cannot be
        found or have no newline behind them that `step.learn_through` could mean.
        """
        self._vocabulary = Vocabulary(folder, digest=step.tokenizer)
        self._ids = {token: self._vocabulary.require(token, prompt="chat") for token in _VISION_TOKENS[:3]}
        self._marks = find_turn_marks(self._vocabulary)
        self._learns_newline = step.learn_through == "newline"
        if self._learns_newline and not self._marks.behind.startswith(_LINE_ENDS):
            raise ConfigError(
                f'text.learn_through = "newline": the chat template of {folder} writes {self._marks.behind[:40]!r} '
                f'behind {self._marks.closing}, no newline; set text.learn_through = "end_of_turn"',
                code="FB106",
            )
        self._reserved = _reserved(self._vocabulary, self._marks.template_ids)
        self._merge_size = merge_size
        self._backend = self._vocabulary.tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def constants(self) -> dict[str, Any]:
        """What a collator must know: `prompt`, ids of the image's tokens, `pad_token_id`."""
        pad = self._vocabulary.pad_token_id
        if pad is None:
            raise ConfigError(
                f"text.tokenizer: the tokenizer in {self._vocabulary.folder} names no pad_token and no eos_token; "
                "use the model's own tokenizer",
                code="FB106",
            )
        return {
            "prompt": "chat",
            "image_token_id": self._ids[IMAGE_PAD],
            "vision_start_token_id": self._ids[VISION_START],
            "vision_end_token_id": self._ids[VISION_END],
            "pad_token_id": pad,
        }

    def encode(self, messages: str, grids: Sequence[tuple[int, int, int]], *, sample_id: str) -> dict[str, np.ndarray]:
        """Returns `input_ids` int32 [tokens] and `label_mask` uint8 [tokens], 1 where a token is a target.

        messages: a conversation in canonical form, JSON. grids: (t, h, w) in patches of its images, in order.
        Raises TextError: `bad_conversation`, `no_assistant_turn`, `nothing_to_learn`, `empty_text`,
        `special_token_in_text`, `image_count_mismatch`, `bad_text`.
        """
        conversation = parse_conversation(messages, sample_id=sample_id)
        turns, num_images = self._check(conversation, sample_id=sample_id)
        if num_images != len(grids):
            raise TextError(
                "image_count_mismatch",
                f"{sample_id}: the conversation shows {num_images} images, the sample has {len(grids)}; "
                "correct the manifest",
            )
        rendered = self._render(conversation, sample_id=sample_id)
        spans = self._marks.spans(rendered)
        shown = rendered.count(IMAGE_PAD)
        if (len(spans), shown) != (len(turns), num_images):
            raise bad_conversation(
                sample_id,
                f"the chat template shows {len(spans)} assistant turns and {shown} images, "
                f"the conversation has {len(turns)} and {num_images}",
            )
        return self._tokenize(rendered, [span for span, turn in zip(spans, turns, strict=True) if turn], grids)

    def decode(self, input_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text in the ids of a sample, roles with it; control and image tokens are left out."""
        return self._vocabulary.decode([int(i) for i in input_ids])

    def _check(self, conversation: list[Message], *, sample_id: str) -> tuple[list[bool], int]:
        """Returns whether each assistant turn is learnt, and the number of images.

        Raises TextError where a turn cannot be used.
        """
        turns: list[bool] = []
        num_images = 0
        for place, message in enumerate(conversation):
            parts = message["content"]
            # Joined, because a template writes parts without anything between them.
            text = "".join(part.get("text", "\n") for part in parts)
            reserved = self._reserved.search(text)
            if reserved:
                raise TextError(
                    "special_token_in_text",
                    f"{sample_id}: message {place} has {reserved[0]} in its text, which the model takes for a control "
                    "token; clean the text",
                )
            images = sum(part["type"] == "image" for part in parts)
            num_images += images
            if message["role"] != "assistant":
                continue
            turns.append(message.get("loss", True))
            if images:
                raise bad_conversation(
                    sample_id, f"message {place} is the assistant's and has {images} images, wanted 0"
                )
            if is_unseen(text):
                raise TextError("empty_text", f"{sample_id}: message {place}, the assistant's, has no text")
        if not turns:
            raise TextError(
                "no_assistant_turn",
                f"{sample_id}: none of {len(conversation)} messages is the assistant's, wanted 1 or more",
            )
        if not any(turns):
            raise TextError(
                "nothing_to_learn",
                f"{sample_id}: all {len(turns)} messages of the assistant say loss: false or weight: 0; "
                "leave the sample out",
            )
        return turns, num_images

    def _render(self, conversation: list[Message], *, sample_id: str) -> str:
        try:
            rendered = render_chat(self._vocabulary, [_shown(message) for message in conversation])
        except ValueError as err:
            folder = self._vocabulary.folder
            raise bad_conversation(sample_id, f"the chat template of {folder} refuses it: {err}") from err
        try:
            rendered.encode("utf-8")
        except UnicodeEncodeError as err:
            found = f"U+{ord(rendered[err.start]):04X}"
            raise TextError("bad_text", f"{sample_id}: text has a lone surrogate {found}; clean the manifest") from err
        if "\0" in rendered:
            raise TextError("bad_text", f"{sample_id}: text has a NUL; clean the manifest")
        return rendered

    def _tokenize(
        self, rendered: str, spans: list[tuple[int, int]], grids: Sequence[tuple[int, int, int]]
    ) -> dict[str, np.ndarray]:
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).T
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in spans:
            stop = int(np.searchsorted(ends, end, side="right"))
            if self._learns_newline and stop < len(ids):
                stop += _is_line_ends(rendered[starts[stop] : ends[stop]])
            mask[np.searchsorted(starts, start) : stop] = 1
        # Ids are repeated, not the string: the tokenizer would take 4 times as long and give the same.
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[ids == self._ids[IMAGE_PAD]] = [t * h * w // self._merge_size**2 for t, h, w in grids]
        return {"input_ids": np.repeat(ids, repeats), "label_mask": np.repeat(mask, repeats)}


def _shown(message: Message) -> Message:
    """What a template is given: it would see any other key."""
    return {name: message[name] for name in ("role", "content")}


def _is_line_ends(text: str) -> bool:
    return bool(text) and not text.strip("".join(_LINE_ENDS))


def _reserved(vocabulary: Vocabulary, template_ids: frozenset[int]) -> re.Pattern[str]:
    """Returns a pattern of the control tokens that no message may write; others, such as `<think>`, it may."""
    tokenizer = vocabulary.tokenizer
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    tokens = {*tokenizer.convert_ids_to_tokens(sorted(template_ids)), *_VISION_TOKENS, *filter(None, named)}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarks:
    """The header before what the assistant says and the control token after it; `template_ids`: all it writes.

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
    `<|vision_start|><|image_pad|><|vision_end|>`, or where an assistant's turn does not begin and end with a control
    token.
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
        "use the model's own template",
        code="FB106",
    )


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
