"""A conversation as it is stored, which rows cannot be learnt from, and where the assistant speaks in its rendering.

Turns are found once, by rendering, and then by the template's control tokens. These cannot come from a message, so no
message can write such a mark.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forebay.errors import ConfigError, TextError
from forebay.steps.text.line import is_unseen
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Array, Group

Message = dict[str, Any]
"""`{"role": ..., "content": [{"type": "text", "text": ...} | {"type": "image"} | {"type": "audio"}, ...]}`, in rows
with parts of type `box` and `ref` too, see `with_boxes`; of an assistant's that is not to be learnt also `"loss":
False`. BESIDE may stand beside them."""

Render = Callable[..., str]
"""`render(messages, add_generation_prompt=False)`: what a chat template writes; ValueError where it refuses."""
_ROLES = ("system", "user", "assistant", "tool")
BESIDE = ("tools", "tool_calls", "reasoning_content", "name", "tool_call_id")
"""What else a message may have: the first one the tools of the conversation, the assistant's calls and reasoning."""
TrainOn = Literal["assistant", "last", "all"]
"""What is learnt of a conversation: all that the assistant says, its last turn, or all but items."""
NOUNS: Mapping[Group, str] = {"audio": "clip", "image": "image", "video": "video"}
"""What messages call an item of a group, or a video, which is one of `image`. A part's type is that name."""
COUNTED = {"audio": "audio_count_mismatch", "image": "image_count_mismatch", "video": "video_count_mismatch"}
"""The reason of a conversation that shows another number of them than it has."""


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """The demands of a conversation on its rendering. learnt: says of each assistant turn whether it has targets.

    counts: of the items that it shows, by group. learns_all: what is not the assistant's has targets too.
    """

    learnt: tuple[bool, ...]
    counts: Mapping[Group, int]
    learns_all: bool = False


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


def both_of(conversation: Sequence[Message], *, sample_id: str) -> tuple[list[Message], list[Message]]:
    """Returns the preferred and the rejected conversation of a pair; what they share is not learnt.

    Raises TextError `bad_pair` for a conversation with one answer.
    """
    place = next((number for number, message in enumerate(conversation) if "rejected" in message), None)
    if place is None:
        raise TextError("bad_pair", f"{sample_id}: the row has no rejected answer, and text.pairs is true; remove it")
    asked = [{**each, "loss": False} if each["role"] == "assistant" else each for each in conversation[:place]]
    first = {name: value for name, value in conversation[place].items() if name != "rejected"}
    return [*asked, first, *conversation[place + 1 :]], [*asked, *conversation[place]["rejected"]]


def check_conversation(
    conversation: Sequence[Message],
    reserved: re.Pattern[str],
    *,
    counts: Mapping[Group, int],
    sample_id: str,
    train_on: TrainOn = "assistant",
) -> ChatTurns:
    """Returns the turns of a conversation of which every text can be used.

    reserved: control tokens that no text may hold. counts: the items of the row, of each group that it may have.
    Raises TextError: `special_token_in_text`, `bad_conversation`, `empty_text`, `no_assistant_turn`,
    `nothing_to_learn`, `preference_data`, COUNTED.
    """
    if any("rejected" in message for message in conversation):
        raise TextError(
            "preference_data",
            f'{sample_id}: the row has an answer to reject; set text.pairs = true, with images = "processor" for a '
            "model of packs, or remove the row",
        )
    learnt: list[bool] = []
    shown: Counter[Group] = Counter()
    for place, message in enumerate(conversation):
        shown += _checked_message(message, place, reserved, sample_id=sample_id)
        if message["role"] == "assistant":
            learnt.append(message.get("loss", True))
    if not learnt and train_on != "all":
        raise TextError(
            "no_assistant_turn",
            f"{sample_id}: none of {len(conversation)} messages is the assistant's, wanted 1 or more; or set "
            'text.train_on = "all"',
        )
    if train_on == "last":
        learnt = [*([False] * (len(learnt) - 1)), learnt[-1]]
    if learnt and not any(learnt):
        raise TextError(
            "nothing_to_learn",
            f"{sample_id}: {'the last' if train_on == 'last' else f'all {len(learnt)}'} messages of the assistant say "
            "loss: false or weight: 0; leave the sample out",
        )
    _check_shown(shown, counts, sample_id=sample_id)
    return ChatTurns(tuple(learnt), counts, learns_all=train_on == "all")


def _check_shown(shown: Counter[Group], counts: Mapping[Group, int], *, sample_id: str) -> None:
    for group in (*counts, *(shown.keys() - counts)):
        if shown[group] != counts.get(group, 0):
            raise TextError(
                COUNTED[group],
                f"{sample_id}: the conversation shows {shown[group]} {NOUNS[group]}s, the sample has "
                f"{counts.get(group, 0)}; correct the manifest",
            )


def _checked_message(message: Message, place: int, reserved: re.Pattern[str], *, sample_id: str) -> Counter[Group]:
    """Returns how many items of each group a message shows."""
    parts = message["content"]
    # Joined, because a template writes parts without anything between them.
    text = "".join(part.get("text", "\n") for part in parts)
    beside = [json.dumps(message[name], ensure_ascii=False) for name in BESIDE if name in message]
    found = reserved.search("\n".join([text, *beside]))
    if found:
        raise TextError(
            "special_token_in_text",
            f"{sample_id}: message {place} has {found[0]} in its text, which the model takes for a control "
            "token; clean the text",
        )
    items = Counter(part["type"] for part in parts if part["type"] != "text")
    if message["role"] != "assistant":
        return items
    for group, count in items.items():
        said = f"message {place} is the assistant's and has {count} {NOUNS[group]}s, wanted 0"
        raise bad_conversation(sample_id, said)
    if is_unseen(text) and not message.get("tool_calls"):
        raise TextError("empty_text", f"{sample_id}: message {place}, the assistant's, has no text")
    return items


def stripped(conversation: Sequence[Message]) -> list[Message]:
    """Returns the messages with no white space around the texts of the user, as qwen-vl-finetune writes them."""
    return [
        {**message, "content": [part for part in map(_stripped, message["content"]) if part.get("text") != ""]}
        if message["role"] == "user"
        else message
        for message in conversation
    ]


def _stripped(part: dict[str, str]) -> dict[str, str]:
    return {**part, "text": part["text"].strip()} if part["type"] == "text" else part


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
    spans: Sequence[tuple[int, int]], turns: ChatTurns, *, shown: Mapping[Group, int], sample_id: str
) -> list[tuple[int, int]]:
    """Returns the spans of the turns that have targets, or that have none where all else is learnt.

    spans: of all turns. shown: items in the rendered text.
    Raises TextError `bad_conversation` where the template wrote other turns or items than the conversation has.
    """
    found, wanted = ([shown[group] for group in shown], [turns.counts.get(group, 0) for group in shown])
    if (len(spans), found) != (len(turns.learnt), wanted):
        told = " and ".join(f"{count} {NOUNS[group]}s" for group, count in shown.items())
        raise bad_conversation(
            sample_id,
            f"the chat template shows {len(spans)} assistant turns and {told}, "
            f"the conversation has {len(turns.learnt)} and {' and '.join(map(str, wanted))}",
        )
    return [span for span, is_learnt in zip(spans, turns.learnt, strict=True) if is_learnt is not turns.learns_all]


def shown(message: Message) -> Message:
    """Returns what a template is given of a message. What a tool says is a string, which all templates take."""
    made, parts = {name: value for name, value in message.items() if name != "loss"}, message["content"]
    if message["role"] == "tool" and [part["type"] for part in parts] in ([], ["text"]):
        made["content"] = "".join(part["text"] for part in parts)
    return made


def with_items(conversation: Sequence[Message], items: Mapping[Group, Sequence[Any]]) -> list[Message]:
    """Returns the messages with an item in each part that shows one, in their order.

    items: by group, images of PIL and clips float32 [num_samples].
    """
    remaining = {group: iter(each) for group, each in items.items()}
    made = []
    for message in conversation:
        given = shown(message)
        if isinstance(given["content"], list):
            given["content"] = [
                {**part, part["type"]: next(remaining[part["type"]])} if part["type"] in remaining else dict(part)
                for part in message["content"]
            ]
        made.append(given)
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
    made |= {name: message[name] for name in BESIDE if name in message}
    if "rejected" in message:
        made["rejected"] = [_message(each, place, sample_id=sample_id) for each in message["rejected"]]
    return made if message.get("loss", True) else {**made, "loss": False}


def _part(part: Any, place: int, *, sample_id: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in NOUNS:
        return {"type": str(kind)}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "ref" and isinstance(part.get("text"), str):
        return {"type": "ref", "text": part["text"]}
    if kind == "box" and _is_box(part):
        return {name: part[name] for name in ("type", "box", "image", "norm") if name in part}
    raise bad_conversation(
        sample_id, f"message {place} has a part of type {kind!r}, wanted an image, a clip, or a text with its text"
    )


def _is_box(part: dict[str, Any]) -> bool:
    box, image = part.get("box"), part.get("image")
    numbers = box if isinstance(box, list) and len(box) in (2, 4) else [""]
    return isinstance(image, int) and image >= 0 and all(isinstance(x, int | float) for x in numbers)


_QUESTION, _ANSWER, _THOUGHT = "forebay-question", "forebay-answer", "forebay-thought"
LINE_ENDS = ("\n", "\r")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarks:
    """The header before what the assistant says and the control tokens after it; `template_ids`: all it writes.

    Both marks hold a control token. learns_newline: the newline behind a turn is a target too. shows_reasoning: the
    template writes `reasoning_content` of a last message.
    """

    header: str
    closing: str
    template_ids: frozenset[int]
    learns_newline: bool = False
    shows_reasoning: bool = False

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


def all_but(mask: Array, rendered: str, ids: Array, vocabulary: Vocabulary, placeholders: Iterable[str]) -> Array:
    """Returns uint8 [tokens], 1 where `mask` is 0 and no item stands.

    Items are the control tokens that the template did not write itself. rendered: what it wrote, with placeholders for
    items. ids: integer [tokens], items expanded.
    """
    items = {found for token in placeholders if (found := vocabulary.find(token)) is not None}
    own = set(control_ids(vocabulary, rendered)) - items
    return np.where(np.isin(ids, [*(vocabulary.control_ids | items) - own]), 0, 1 - mask).astype(np.uint8)


def find_turn_marks(
    vocabulary: Vocabulary,
    render: Render,
    *,
    shown: Mapping[Group, tuple[str, str]],
    learn_through: str = "end_of_turn",
) -> TurnMarks:
    """Returns the marks of a chat template.

    shown: by group, as which the template shows an item, and the part of that which stands nowhere else. learn_through:
    the setting. Raises ConfigError, naming the folder, where there is no template, where it does not show items so,
    where an assistant's turn does not begin and end with a control token, or where a newline is to be learnt and none
    stands behind closed turns.
    """
    asked, prompted, chat = _probes(vocabulary, render, dict.fromkeys(shown, 1))
    for group, (item, placeholder) in shown.items():
        if chat.count(item) != 2 or chat.count(placeholder) != 2:
            raise _unusable(vocabulary, f"shows {chat.count(item)} of 2 {NOUNS[group]}s as {item}")
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
        shows_reasoning=_shows_reasoning(render, shown),
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


def _shows_reasoning(render: Render, items: Mapping[Group, Any]) -> bool:
    user, assistant = probe_turns(dict.fromkeys(items, 1))
    try:
        return _THOUGHT in render([user, {**assistant, "reasoning_content": _THOUGHT}])
    except (ValueError, TypeError, LookupError, AttributeError):
        return False


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


def probe_turns(items: Mapping[Group, int]) -> tuple[Message, Message]:
    """Returns a question with items and its answer, of which the probes of a template are made."""
    shown = [{"type": group} for group, count in items.items() for _ in range(count)]
    parts = [*shown, {"type": "text", "text": _QUESTION}]
    return {"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]}


def _probes(vocabulary: Vocabulary, render: Render, items: Mapping[Group, int]) -> tuple[str, str, str]:
    user, assistant = probe_turns(items)
    try:
        asked = render([user])
        prompted = render([user], add_generation_prompt=True)
        chat = render([user, assistant, user, assistant])
    except (ValueError, TypeError, LookupError, AttributeError) as err:
        what = " and ".join(f"{NOUNS[group]}s" for group in items)
        raise _unusable(vocabulary, f"is missing, or refuses texts and {what} ({err})") from err
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
