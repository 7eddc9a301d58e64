"""Conversations to tokens: the folder's chat template, image tokens by grid, and which tokens are targets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.steps import Chat
from forebay.errors import ConfigError, TextError
from forebay.steps.text.normalize import is_unseen
from forebay.steps.text.turns import (
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    Message,
    bad_conversation,
    find_turn_marks,
    parse_conversation,
    render_chat,
)
from forebay.steps.text.vocabulary import Vocabulary

# A model counts all of these, whoever wrote them. Some are in no template.
_VISION_TOKENS = (VISION_START, IMAGE_PAD, VISION_END, "<|vision_pad|>", "<|video_pad|>")


_LINE_ENDS = ("\n", "\r")


class ChatEncoder:
    """Writes conversations as the chat template of a local folder does, with `<|image_pad|>` repeated by grid.

    The ids are those of the tokenizer for the rendered and expanded string. A target is what the assistant says and the
    control token that closes its turn; with `step.learn_through = "newline"` also the token of line ends behind that,
    where one stands. A token that reaches out of the turn (the header's line end together with line ends that an answer
    begins with) is none. Turns whose message has `"loss": false` have no target.
    """

    def __init__(self, step: Chat, folder: Path, *, merge_size: int) -> None:
        """Loads the tokenizer (and with it transformers).

        merge_size: of the image processor; `merge_size`^2 patches become one token. Raises ConfigError where the folder's
        files are not those of `step.tokenizer`, lack what images need, or where the template's turns cannot be found or
        have no newline behind them that `step.learn_through` could mean.
        """
        self._vocabulary = Vocabulary(folder, digest=step.tokenizer)
        self._ids = {token: self._vocabulary.require(token, prompt="chat") for token in _VISION_TOKENS[:3]}
        self._marks = find_turn_marks(self._vocabulary)
        self._learns_newline = step.learn_through == "newline"
        if self._learns_newline and not self._marks.behind.startswith(_LINE_ENDS):
            raise ConfigError(
                f'text.learn_through = "newline": the chat template of {folder} writes {self._marks.behind[:40]!r} '
                f'behind {self._marks.closing}, no newline; set text.learn_through = "end_of_turn"'
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
                "use the model's own tokenizer"
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
                f"{sample_id}: the conversation shows {num_images} images, the sample has {len(grids)}; correct the manifest",
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
