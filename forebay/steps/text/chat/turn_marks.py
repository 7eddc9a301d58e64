"""Where the assistant speaks in what a chat template writes: found once, by rendering, and then by its control tokens.

Control tokens cannot come from a message, so no message can write such a mark.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ConfigError
from forebay.steps.text.chat.conversation import Message, Render
from forebay.steps.text.vocabulary import Vocabulary

_QUESTION, _ANSWER = "forebay-question", "forebay-answer"

LINE_ENDS = ("\n", "\r")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarks:
    """The header before what the assistant says and the control tokens after it; `template_ids`: all it writes.

    Both marks hold a control token. learns_newline: the newline behind a turn is a target too.
    """

    header: str
    closing: str
    template_ids: frozenset[int]
    learns_newline: bool = False

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
            # A header may begin with the token that closed the turn before.
            at = rendered.find(self.header, end)
        return found

    def targets(self, rendered: str, spans: list[tuple[int, int]], offsets: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns uint8 [tokens]: 1 for tokens that lie wholly in a span, (start, end) in characters.

        With `learns_newline` also for the token of line ends right behind a span. offsets: of the tokens, [tokens, 2].
        """
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=np.uint8)
        for start, end in spans:
            inside = np.flatnonzero((starts >= start) & (ends <= end))
            if not len(inside):
                continue
            mask[inside] = 1
            following = inside[-1] + 1
            if self.learns_newline and following < len(mask):
                text = rendered[starts[following] : ends[following]]
                mask[following] |= bool(text) and not text.strip("".join(LINE_ENDS))
        return mask


def find_turn_marks(
    vocabulary: Vocabulary, render: Render, *, image: str, placeholder: str, learn_through: str = "end_of_turn"
) -> TurnMarks:
    """Returns the marks of a chat template.

    image: as which the template shows an image. placeholder: the part of that which stands nowhere else. learn_through:
    the setting. Raises ConfigError, naming the folder, where there is no template, where it does not show images so,
    where an assistant's turn does not begin and end with a control token, or where a newline is to be learnt and none
    stands behind closed turns.
    """
    asked, prompted, chat = _probes(vocabulary, render)
    images = chat.count(image)
    if images != 2 or chat.count(placeholder) != 2:
        raise _unusable(vocabulary, f"shows {images} of 2 images as {image}")
    if not chat.startswith(asked) or chat.count(_ANSWER) != 2:
        raise _unusable(vocabulary, "does not show a conversation turn by turn as it was given")
    header = _header(vocabulary, asked=asked, prompted=prompted, chat=chat)
    _, after, last = chat.split(_ANSWER)
    closing = _closing(vocabulary, after, last)
    if not closing:
        raise _unusable(vocabulary, f"ends an assistant's turn with {last!r}, wanted the same control token as before")
    marks = TurnMarks(
        header=header,
        closing=closing,
        template_ids=frozenset(control_ids(vocabulary, chat)),
        learns_newline=learn_through == "newline",
    )
    if [chat[start:end].count(_ANSWER) for start, end in marks.spans(chat)] != [1, 1]:
        raise _unusable(vocabulary, f"writes {header!r} outside of an assistant's turn too")
    behind = after.partition(closing)[2]
    if marks.learns_newline and not behind.startswith(LINE_ENDS):
        raise ConfigError(
            f'text.learn_through = "newline": the chat template of {vocabulary.folder} writes {behind[:40]!r} behind '
            f'{closing}, no newline; set text.learn_through = "end_of_turn"',
            code="FB106",
        )
    return marks


def _closing(vocabulary: Vocabulary, after: str, last: str) -> str:
    """Returns the control tokens that end a turn in the middle and the last one; empty where none does.

    Several count if nothing stands between them (`<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`).
    """
    behind = list(itertools.dropwhile(lambda part: isinstance(part, str), vocabulary.split(after)))
    at_last = list(itertools.dropwhile(lambda part: part != behind[0], vocabulary.split(last))) if behind else []
    both = itertools.takewhile(
        lambda pair: isinstance(pair[0], int) and pair[0] == pair[1], zip(behind, at_last, strict=False)
    )
    return "".join(vocabulary.tokenizer.convert_ids_to_tokens(part) for part, _ in both)


def control_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    """Returns the ids of the control tokens in a rendered text, in their order."""
    return [part for part in vocabulary.split(text) if isinstance(part, int)]


def named_tokens(vocabulary: Vocabulary, marks: TurnMarks) -> set[str]:
    """Returns the control tokens that the template writes and those that the tokenizer has a name for."""
    tokenizer = vocabulary.tokenizer
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    return {*tokenizer.convert_ids_to_tokens(sorted(marks.template_ids)), *filter(None, named)}


def probe_turns(*, images: int = 1) -> tuple[Message, Message]:
    """Returns a question with images and its answer, of which the probes of a template are made."""
    parts = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": _QUESTION}]
    return {"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]}


def _probes(vocabulary: Vocabulary, render: Render) -> tuple[str, str, str]:
    user, assistant = probe_turns()
    try:
        asked = render([user])
        prompted = render([user], add_generation_prompt=True)
        chat = render([user, assistant, user, assistant])
    except ValueError as err:
        raise _unusable(vocabulary, f"is missing, or refuses texts and images ({err})") from err
    return asked, prompted, chat


def _header(vocabulary: Vocabulary, *, asked: str, prompted: str, chat: str) -> str:
    """Returns what stands before what the assistant says, with a control token in it.

    The header comes from a turn in the middle: thinking models begin the last one with more, which is to be learnt.
    White space that the generation prompt does not have is the model's to write (`Assistant:`, then ` A cat.`). A
    header of words alone is taken with the control token before it, if nothing of a message stands between them.
    """
    written = header = chat[len(asked) : chat.index(_ANSWER)]
    if not prompted.startswith(asked):
        raise _unusable_header(vocabulary, written)
    prompt = prompted[len(asked) :]
    if not prompt.startswith(header):
        if header.startswith(prompt) and not header[len(prompt) :].strip():
            header = prompt
        elif header.rstrip() != prompt.rstrip():
            raise _unusable_header(vocabulary, written)
    if control_ids(vocabulary, header):
        return header
    before = control_ids(vocabulary, asked)
    tail = asked[asked.rindex(vocabulary.tokenizer.convert_ids_to_tokens(before[-1])) :] if before else ""
    if not before or _QUESTION in tail:
        raise _unusable_header(vocabulary, written)
    return tail + header


def _unusable_header(vocabulary: Vocabulary, written: str) -> ConfigError:
    return _unusable(vocabulary, f"begins an assistant's turn with {written!r}, wanted a control token and a role")


def _unusable(vocabulary: Vocabulary, why: str) -> ConfigError:
    return ConfigError(
        f"text.tokenizer: the chat template of {vocabulary.folder} {why}, so the assistant's turns cannot be found; "
        "use the model's own template",
        code="FB106",
    )
