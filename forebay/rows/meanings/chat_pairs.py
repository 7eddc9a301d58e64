"""Rows with an answer to prefer and one to reject: as two rows of one conversation each, and as one conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from forebay.rows.meanings.chat_fields import ANSWERS, MESSAGES, NOUNS_OF_PARTS, PAIRED, is_given
from forebay.rows.readers.json_lines import JsonError


def two_rows(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the rows of the preferred and of the rejected conversation; None of a row that has one alone.

    `chosen` and `rejected` are answers, lists of the messages that follow `prompt`, `messages` or a question, or whole
    conversations. `rejected_response` is ms-swift's answer in the place of the row's last one.
    Raises JsonError `bad_pair` for one without the other.
    """
    rejected = [name for name in ("rejected", "rejected_response") if is_given(fields.get(name))]
    has_chosen = is_given(fields.get("chosen"))
    if not rejected and not has_chosen:
        return None
    if len(rejected) != 1 or has_chosen is (rejected[0] == "rejected_response"):
        raise _bad(f"has {' and '.join(rejected) or 'no rejected'}{' beside chosen' if has_chosen else ', no chosen'}")
    rest = {name: value for name, value in fields.items() if name not in PAIRED}
    asks = next((name for name in ANSWERS if is_given(rest.get(name))), None)
    listed = next((name for name in MESSAGES if is_given(rest.get(name))), None)
    if not has_chosen:
        return {**rest}, _answered(rest, fields["rejected_response"], asks, listed)
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and prompt:
        rest, asks = {**rest, "question": prompt}, "question"
    elif is_given(prompt):
        rest, asks, listed = {**rest, "messages": prompt}, None, "messages"
    one, other = (_completed(rest, fields[name], asks, listed) for name in ("chosen", "rejected"))
    return one, other


def _answered(row: Mapping[str, Any], answer: Any, asks: str | None, listed: str | None) -> dict[str, Any]:
    """The row with another last answer."""
    if asks is not None:
        return {**row, ANSWERS[asks]: answer}
    messages = row.get(listed or "")
    if not isinstance(messages, list) or not isinstance(answer, str) or not isinstance((messages or [0])[-1], dict):
        raise _bad("has a rejected_response, wanted a text beside messages or a question")
    last = {name: value for name, value in messages[-1].items() if name not in ("content", "value")}
    return {**row, str(listed): [*messages[:-1], {**last, "content": answer}]}


def _completed(row: Mapping[str, Any], said: Any, asks: str | None, listed: str | None) -> dict[str, Any]:
    """The row with what follows its question."""
    match said:
        case [{"role": "assistant", "content": str(text)}] if asks is not None:
            said = text
    if asks is not None and isinstance(said, str):
        return {**row, ANSWERS[asks]: said}
    before = row.get(listed, []) if listed is not None else []
    after = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    if asks is not None or not isinstance(before, list) or not isinstance(after, list) or not (before or after[1:]):
        raise _bad(f"has {str(said)[:60]!r}, wanted an answer to a prompt or a question, or a list of messages")
    return {**row, listed or "messages": [*before, *after]}


def joined_pair(chosen: Sequence[Mapping[str, Any]], rejected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the preferred conversation; the first message that the other has not has what that has as `rejected`.

    Raises JsonError `bad_pair` for equal ones, where one ends before they differ, or where items stand in what differs.
    """
    place = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    rest = [*chosen[place:], *rejected[place:]]
    if place == len(chosen) == len(rejected):
        raise _bad("has equal answers")
    if place in (len(chosen), len(rejected)):
        raise _bad("has a conversation that is the beginning of the other one")
    if not place:
        one, other = (json.dumps(dict(each[0]), ensure_ascii=False)[:120] for each in (chosen, rejected))
        raise _bad(f"has conversations that begin with other questions or items: {one} and {other}")
    if any(message["role"] not in ("assistant", "tool") for message in (chosen[place], rejected[place])):
        raise _bad("has answers to different questions")
    if any(part["type"] in NOUNS_OF_PARTS for message in rest for part in message["content"]):
        raise _bad("shows an item behind the place where its answers differ")
    first = {**chosen[place], "rejected": [*rejected[place:]]}
    return [*map(dict, chosen[:place]), first, *map(dict, chosen[place + 1 :])]


def _bad(found: str) -> JsonError:
    return JsonError(f"the pair {found}", reason="bad_pair")
