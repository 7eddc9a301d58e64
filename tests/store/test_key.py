from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.key import COUNT, NUMBER, POSITIVE, TEXT, Check, canonical_json, digest
from tests.strategies import json_documents


def typed(document: Any) -> Any:
    """A form in which 1, 1.0 and True, and 0.0 and -0.0, are not equal, as Python would have them."""
    if isinstance(document, dict):
        return {"object": {name: typed(value) for name, value in document.items()}}
    if isinstance(document, list):
        return ["list", *map(typed, document)]
    return [type(document).__name__, repr(document)]


def reversed_objects(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: reversed_objects(document[name]) for name in reversed(document)}
    return [reversed_objects(value) for value in document] if isinstance(document, list) else document


@given(json_documents())
def test_it_is_ascii_json_of_the_same_values_and_types(document: Any) -> None:
    assert typed(json.loads(canonical_json(document).decode("ascii"))) == typed(document)


@given(json_documents())
def test_the_order_of_an_object_is_not_in_it(document: Any) -> None:
    assert canonical_json(reversed_objects(document)) == canonical_json(document)


@given(json_documents(), json_documents())
def test_digests_are_equal_exactly_where_documents_are(left: Any, right: Any) -> None:
    assert (digest(left) == digest(right)) == (typed(left) == typed(right))


def test_values_that_python_calls_equal_differ() -> None:
    assert len({digest([value]) for value in (1, 1.0, True, "1", 0, 0.0, -0.0, False, "", None)}) == 10


def test_a_tuple_is_a_list() -> None:
    assert canonical_json({"b": (1, 2), "a": "é"}) == b'{"a":"\\u00e9","b":[1,2]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": [value]})


@pytest.mark.parametrize("key", [1, 1.0, True, None, b"a"])
def test_a_key_that_is_not_text_is_refused_at_any_depth(key: Any) -> None:
    with pytest.raises(TypeError, match=r"of a canonical document is .*, wanted str"):
        canonical_json({"a": [({"b": {key: 1}},)]})


@given(st.sampled_from([b"x", {1}, object(), 1j]))
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        canonical_json([value])


@pytest.mark.parametrize(
    ("check", "what", "good", "bad"),
    [
        (NUMBER, "a number", (0, -1.5, 1e300, -(10**300)), ("1", True, None, 10**400, math.nan, math.inf, -math.inf)),
        (COUNT, "a count", (0, (1 << 63) - 1), (-1, 1 << 63, True, 1.0, "1")),
        (POSITIVE, "a count of 1 or more", (1, (1 << 63) - 1), (0, 1 << 63, True)),
        (TEXT, "a text", ("", "a"), (1, None, b"a")),
    ],
)
def test_values_of_a_document_are_of_their_kind(
    check: Check, what: str, good: Sequence[Any], bad: Sequence[Any]
) -> None:
    for value in good:
        check(value, "here")
    for value in bad:
        with pytest.raises(ValueError, match=f"^here is .*, wanted {what}$"):
            check(value, "here")
