"""Tools of a conversation, calls of them, and reasoning: the usual forms to the one that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.rows.meanings.chat_fields import CALLS, REASONED, TOOLS_OF_ROW, is_given, list_in
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
