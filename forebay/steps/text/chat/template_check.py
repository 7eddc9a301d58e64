"""Whether a chat template writes tools, calls and reasoning of a conversation, and in which turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from forebay.errors import TextError
from forebay.steps.text.chat.conversation import Message, Render, TurnMarks, bad_conversation, shown


def check_shown(
    conversation: Sequence[Message], render: Render, marks: TurnMarks, *, folder: object, sample_id: str
) -> None:
    """Returns if the template writes tools, calls and reasoning of a conversation, and these where they belong.

    It is asked with other names and words in their places. Raises TextError `has_tools` and `has_reasoning`.
    """
    said: list[tuple[str, str]] = []
    marked = [_marked(message, said) for message in conversation]
    if not said:
        return
    try:
        text = render(marked)
    except ValueError as err:
        raise bad_conversation(sample_id, f"the chat template of {folder} refuses its tools: {err}") from err
    turns = [(0, 0), *marks.spans(text), (len(text), len(text))]
    inside = "\n".join(text[start:end] for start, end in turns)
    outside = "\n".join(text[end:start] for (_, end), (start, _) in itertools.pairwise(turns))
    for what, mark in said:
        is_thought = what == "reasoning"
        wanted, other = (inside, outside) if what in ("a call", "reasoning") else (outside, inside)
        # Templates leave out what the assistant thought before it was asked again.
        if mark in other or (not marks.shows_reasoning if is_thought else mark not in wanted):
            raise TextError(
                "has_reasoning" if is_thought else "has_tools",
                f"{sample_id}: the chat template of {folder} does not write {what} of the conversation where a model "
                "would learn or read it; leave the sample out, or use a template that knows it",
            )


def _marked(message: Message, said: list[tuple[str, str]]) -> Message:
    """Returns what a template is given of a message, with marks in it that are added to `said`, with what they are."""
    made = shown(message)

    def mark(what: str) -> str:
        said.append((what, f"forebay-mark-{len(said)}-"))
        return said[-1][1]

    if "tools" in made:
        made["tools"] = [_renamed(tool, mark("a tool")) for tool in made["tools"]]
    if "tool_calls" in made:
        made["tool_calls"] = [_renamed(call, mark("a call")) for call in made["tool_calls"]]
    if "reasoning_content" in made:
        made["reasoning_content"] = mark("reasoning")
    if made["role"] == "tool":
        content, text = made["content"], mark("what a tool says")
        rest = [part for part in content if part["type"] != "text"] if isinstance(content, list) else None
        made["content"] = text if rest is None else [*rest, {"type": "text", "text": text}]
    return made


def _renamed(value: Message, name: str) -> Message:
    """Returns a tool or a call under another name."""
    inner = value.get("function")
    return {**value, "function": {**inner, "name": name}} if isinstance(inner, dict) else {**value, "name": name}
