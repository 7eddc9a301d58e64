"""The usual forms of what a conversation has beside texts and items, to the one that chat templates take.

These are tools, calls of them and reasoning; boxes, points and names of objects as ms-swift writes them: a row's
`objects`, and tags in its messages (the documentation of ms-swift, "Custom dataset", "Grounding", says what the fields
mean); and an answer to prefer beside one to reject: as two rows of one conversation each, and as one conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from forebay.rows.meanings.chat_fields import (
    ANSWERS,
    CALLS,
    MESSAGES,
    NOUNS_OF_PARTS,
    OBJECTS,
    PAIRED,
    REASONED,
    TOOLS_OF_ROW,
    is_given,
    list_in,
)
from forebay.rows.readers.json_lines import JsonError, is_storable, parse_nested, string_of


def tools_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemas of a row's `tools` or `functions`, as they are given; none where it has none.

    Raises JsonError `bad_tools` for what is no list of schemas of functions, or no JSON of one.
    """
    name = _one_given(fields, TOOLS_OF_ROW, "the row")
    if name is None:
        return []
    try:
        tools = [_decoded(tool) for tool in list_in(fields, name)]
    except JsonError as err:
        raise JsonError(f"field {name}: {err}", reason=err.reason or "bad_tools") from err
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        is_schema = _is_named(function) and isinstance((function or {}).get("parameters") or {}, dict)
        if not is_schema or not _is_json(tool):
            raise JsonError(
                f"field {name} has {str(tool)[:60]!r}, wanted the JSON schema of a function", reason="bad_tools"
            )
    return tools


def beside_of(message: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """Returns what a message has beside its content.

    The assistant's may have `tool_calls`, `{"type": "function", "function": {"name", "arguments": an object}}` each,
    and `reasoning_content`; a tool's `name` and `tool_call_id`. Raises JsonError `bad_tools` for calls of other forms.
    """
    if role == "tool":
        given = [name for name in ("name", "tool_call_id") if is_given(message.get(name))]
        return {name: string_of(message, (name,)) for name in given}
    found: dict[str, Any] = {}
    if role == "assistant" and (name := _one_given(message, CALLS, where)):
        found["tool_calls"] = calls_in(message[name], where)
    if role == "assistant" and (
        thoughts := {string_of(message, (name,)) for name in REASONED if is_given(message.get(name))}
    ):
        if len(thoughts) > 1:
            raise JsonError(f"{where}: {' and '.join(REASONED)} contradict each other", reason="two_values")
        found["reasoning_content"] = thoughts.pop()
    return found


def calls_in(value: Any, where: str) -> list[dict[str, Any]]:
    """Returns the calls that a field or a content is: one or a list, or the JSON of that; see `beside_of`."""
    try:
        value = _decoded(value)
        return [_call(_decoded(each)) for each in (value if isinstance(value, list) else [value])]
    except JsonError as err:
        raise JsonError(f"{where}: a call {err}", reason=err.reason or "bad_tools") from err


def add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Adds a message; calls without words belong to the message of the assistant right before them."""
    last = messages[-1] if messages else {}
    is_more = message["role"] == last.get("role") == "assistant" and "tool_calls" in message and not message["content"]
    if is_more and message.get("loss") == last.get("loss") and "reasoning_content" not in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    else:
        messages.append(message)


def _call(value: Any) -> dict[str, Any]:
    call = value if isinstance(value, dict) and "function" in value else {"type": "function", "function": value}
    function = call["function"]
    if not _is_named(function) or "arguments" not in function:
        raise JsonError(f"is {str(value)[:60]!r}, wanted an object with name and arguments", reason="bad_tools")
    arguments = _decoded(function["arguments"] or {})
    if not isinstance(arguments, dict) or not _is_json(call):
        raise JsonError(
            f"of {function['name']} has arguments {str(arguments)[:60]!r}, wanted an object", reason="bad_tools"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _one_given(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> str | None:
    given = [name for name in names if is_given(fields.get(name))]
    if len(given) > 1:
        raise JsonError(f"{where} has both {' and '.join(given)}, wanted one of them", reason="two_values")
    return given[0] if given else None


def _decoded(value: Any) -> Any:
    return parse_nested(value) if isinstance(value, str) else value


def _is_named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _is_json(value: Any) -> bool:
    """Whether a value holds JSON alone: columns of tables may hold times or bytes too."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_storable(name) and _is_json(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, bool | int | float | None) or (isinstance(value, str) and is_storable(value))


TAGS: Mapping[str, str] = {"bbox": "box", "ref-object": "ref"}
"""The tags of a string, by the type of the parts that they become."""
_FIELDS = frozenset({"ref", "bbox", "bbox_type", "image_id"})
_POINT, _BOX = 2, 4
_MOST = 1e9


def fill_boxes(conversation: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> set[str]:
    """Gives every part of a tag what `objects` has for it, in their order; returns that field's unused names.

    A box becomes `{"type": "box", "box": [x1, y1, x2, y2] or [x, y], "image": its number}`, with `"norm": true` where
    numbers are shares of the image's sides; a name `{"type": "ref", "text"}`. Raises JsonError `box_count_mismatch`,
    `bad_box`, `box_reversed` and `box_image`.
    """
    objects = fields.get(OBJECTS) if is_given(fields.get(OBJECTS)) else {}
    objects = parse_nested(objects) if isinstance(objects, str) else objects
    if not isinstance(objects, dict):
        raise _bad_box(f"field {OBJECTS} is {str(objects)[:60]!r}, wanted an object of ref and bbox")
    parts = [part for message in conversation for part in message["content"]]
    num_images = sum(part["type"] == "image" for part in parts)
    given = {"box": [*_boxes(objects, num_images)], "ref": [{"text": name} for name in _names(objects)]}
    for tag, kind in TAGS.items():
        shown = [part for part in parts if part["type"] == kind]
        if len(shown) != len(given[kind]):
            raise JsonError(
                f"has {len(shown)} <{tag}> tags for {len(given[kind])} of {OBJECTS}; give as many, and a tag as a "
                "string of the content; words that only look like it go into a part of type text",
                reason="box_count_mismatch",
            )
        for part, value in zip(shown, given[kind], strict=True):
            part.update(value)
    return {f"{OBJECTS}.{name}" for name, value in objects.items() if name not in _FIELDS and is_given(value)}


def _names(objects: Mapping[str, Any]) -> Iterator[str]:
    for name in _list(objects, "ref"):
        yield string_of({"ref": name}, ("ref",), required=True) or ""


def _boxes(objects: Mapping[str, Any], num_images: int) -> Iterator[dict[str, Any]]:
    boxes, images, kind = _list(objects, "bbox"), _list(objects, "image_id"), objects.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise _bad_box(f"bbox_type is {str(kind)[:60]!r}, wanted real or norm1")
    if images and len(images) != len(boxes):
        raise JsonError(f"has {len(images)} image_id for {len(boxes)} boxes", reason="box_count_mismatch")
    for box, image in zip(boxes, images or [0] * len(boxes), strict=True):
        is_box = isinstance(box, list) and len(box) in (_POINT, _BOX)
        if not is_box or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in box):
            raise _bad_box(f"a box is {str(box)[:60]!r}, wanted [x1, y1, x2, y2] or [x, y]")
        if not all(-_MOST < x < _MOST for x in box):
            raise _bad_box(f"a box is {str(box)[:60]!r}, wanted numbers of pixels")
        if len(box) == _BOX and (box[0] > box[2] or box[1] > box[3]):
            raise JsonError(f"box {box} has its first corner behind its second; exchange them", reason="box_reversed")
        if not isinstance(image, int) or isinstance(image, bool) or not 0 <= image < num_images:
            raise JsonError(f"box {box} is of image {image}, and the row has {num_images}", reason="box_image")
        yield {"box": box, "image": image, **({"norm": True} if kind == "norm1" else {})}


def _list(objects: Mapping[str, Any], name: str) -> list[Any]:
    return list_in(objects, name) if is_given(objects.get(name)) else []


def _bad_box(found: str) -> JsonError:
    return JsonError(found, reason="bad_box")


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
        raise _bad_pair(
            f"has {' and '.join(rejected) or 'no rejected'}{' beside chosen' if has_chosen else ', no chosen'}"
        )
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
        raise _bad_pair("has a rejected_response, wanted a text beside messages or a question")
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
        raise _bad_pair(f"has {str(said)[:60]!r}, wanted an answer to a prompt or a question, or a list of messages")
    return {**row, listed or "messages": [*before, *after]}


def joined_pair(chosen: Sequence[Mapping[str, Any]], rejected: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the preferred conversation; the first message that the other has not has what that has as `rejected`.

    Raises JsonError `bad_pair` for equal ones, where one ends before they differ, or where items stand in what differs.
    """
    place = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    rest = [*chosen[place:], *rejected[place:]]
    if not place or place in (len(chosen), len(rejected)):
        raise _bad_pair("has conversations of which none, or all of one, is the other's too")
    if any(message["role"] not in ("assistant", "tool") for message in (chosen[place], rejected[place])):
        raise _bad_pair("has answers to different questions")
    if any(part["type"] in NOUNS_OF_PARTS for message in rest for part in message["content"]):
        raise _bad_pair("shows an item behind the place where its answers differ")
    first = {**chosen[place], "rejected": [*rejected[place:]]}
    return [*map(dict, chosen[:place]), first, *map(dict, chosen[place + 1 :])]


def _bad_pair(found: str) -> JsonError:
    return JsonError(f"the pair {found}", reason="bad_pair")
