from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.rows.readers.json_lines import JsonError, parse_nested, parse_object, seconds_of, string_of


@given(data=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_give_an_object_or_a_json_error(data: bytes) -> None:
    try:
        fields = parse_object(data)
    except JsonError:
        return
    assert fields == json.loads(data.decode("utf-8-sig"))


@given(fields=st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text() | st.lists(st.booleans())))
def test_an_object_comes_back_as_it_was(fields: dict[str, Any]) -> None:
    assert parse_object(json.dumps(fields).encode()) == fields


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ('{"a": 1, "b": 2, "a": 1}', '"a"'),
        ('{"a": [{"b": {"c": 1, "c": null}}]}', '"c"'),
        ('{"a\\u001b[31m": 1, "a\\u001b[31m": 2}', r'"a\\x1b\[31m"'),
        ('{"": 1, "": 2}', '""'),
    ],
)
def test_a_field_that_stands_twice_is_told_from_others(data: str, name: str) -> None:
    for parse in (lambda: parse_object(data.encode()), lambda: parse_nested(f"[{data}]")):
        with pytest.raises(JsonError, match=f"field {name} stands there twice, wanted it once") as caught:
            parse()
        assert caught.value.reason == "repeated_field"
    assert parse_object(b'{"a": {"b": 1}, "b": {"a": 1, "b": 1}}') == {"a": {"b": 1}, "b": {"a": 1, "b": 1}}


def test_nested_json_is_any_value() -> None:
    assert parse_nested('[1, {"a": null}]') == [1, {"a": None}]
    for wrong in ("[", "", "[" * 10**5, "\ufeff[]"):
        with pytest.raises(JsonError, match="is no JSON") as caught:
            parse_nested(wrong)
        assert caught.value.reason is None


@pytest.mark.parametrize("data", [b"[" * 10**5, b'{"a":' * 10**5, b'{"a":' + b"[" * 10**5])
def test_deep_nesting_is_told(data: bytes) -> None:
    with pytest.raises(JsonError, match="nested too deeply"):
        parse_object(data)


def test_the_first_field_that_is_there_counts() -> None:
    assert string_of({"a": None, "b": "x", "c": "y"}, ("a", "b", "c")) == "x"
    assert string_of({}, ("a",)) is None
    with pytest.raises(JsonError, match="has no field a, wanted a string"):
        string_of({}, ("a", "b"), required=True)
    with pytest.raises(JsonError, match=r"field b is an object \(\{\}\), wanted a string"):
        string_of({"b": {}}, ("a", "b"))


def test_seconds_are_any_number() -> None:
    assert seconds_of({"a": 3}, ("a",)) == 3.0
    assert seconds_of({"a": 10**400}, ("a",)) == math.inf
    assert seconds_of({"a": -1.5}, ("a",)) == -1.5
    assert math.isnan(seconds_of({"a": None}, ("a", "b")))
    with pytest.raises(JsonError, match="field a is a boolean"):
        seconds_of({"a": False}, ("a",))
