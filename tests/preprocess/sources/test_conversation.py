from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import TextError
from forebay.preprocess.sources.conversation import canonical, identifier, image_names
from tests.strategies import transcripts

IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def turns(*contents: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("fields", "images", "expected", "used"),
    [
        ({"question": "q", "answer": "a"}, ["x"], turns([IMAGE, text("q")], [text("a")]), "x"),
        ({"question": "q", "answer": "a"}, ["x", "y"], turns([IMAGE, IMAGE, text("q")], [text("a")]), "xy"),
        ({"question": "q", "answer": "<image>"}, [], turns([text("q")], [text("<image>")]), ""),
        ({"question": "a <image>\nb", "answer": ""}, ["x"], turns([text("a "), IMAGE, text("b")], []), "x"),
        (
            {"conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a\n\nb"}]},
            ["x"],
            turns([IMAGE, text("q")], [text("a\n\nb")]),
            "x",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><image> both"}, {"role": "assistant", "content": "a"}]},
            ["x", "y"],
            turns([IMAGE, IMAGE, text(" both")], [text("a")]),
            "xy",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "text": None, "image": None}, text("<image>")]},
                    {"role": "assistant", "content": [{"type": "image", "image": "named"}]},
                    {"role": "user", "content": [IMAGE]},
                ]
            },
            ["x", "y"],
            turns([IMAGE, text("<image>")], [IMAGE], [IMAGE]),
            ["x", "named", "y"],
        ),
    ],
)
def test_every_form_has_one_canonical_form(
    fields: dict[str, Any], images: list[str], expected: list[Any], used: str | list[str]
) -> None:
    document, found = canonical(fields, images)
    assert document == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    assert found == list(used)


@given(
    st.lists(st.tuples(transcripts().filter(lambda t: "<image>" not in t), st.integers(0, 3)), min_size=1, max_size=4)
)
def test_the_canonical_form_of_the_canonical_form_is_itself(messages: list[tuple[str, int]]) -> None:
    parts = turns(*([*[IMAGE] * count, *([text(words)] if words else [])] for words, count in messages))
    images = [*range(sum(count for _, count in messages))]
    once, used = canonical({"messages": parts}, images)
    assert used == images
    assert json.loads(once) == parts
    assert canonical({"messages": json.loads(once)}, images) == (once, images)


@pytest.mark.parametrize(
    ("fields", "images", "numbers"),
    [
        ({"question": "<image> <image>", "answer": "a"}, ["x"], "2 image tags for 1 images"),
        ({"question": "<image>", "answer": "a"}, ["x", "y"], "1 image tags for 2 images"),
        ({"messages": [{"role": "user", "content": "no tag"}]}, ["x"], "0 image tags for 1 images"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}, ["a"], "0 image tags for 1"),
    ],
)
def test_tags_and_images_must_be_equally_many(fields: dict[str, Any], images: list[str], numbers: str) -> None:
    with pytest.raises(TextError, match=numbers) as caught:
        canonical(fields, images)
    assert caught.value.reason == "image_count_mismatch"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither messages nor a question"),
        ({"question": "q"}, "has no field answer"),
        ({"question": 3, "answer": "a"}, "field question is a number"),
        ({"question": "\udc00", "answer": "a"}, "half of a surrogate pair"),
        ({"messages": []}, "wanted a list of messages"),
        ({"messages": {"role": "user"}}, "wanted a list of messages"),
        ({"messages": ["hello"]}, "message 1 is 'hello', wanted an object"),
        ({"messages": [{"content": "q"}]}, "message 1: role is 'None', wanted one of system"),
        ({"messages": [{"role": "tool", "content": "q"}]}, "message 1: role is 'tool'"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "message 1: role is "),
        ({"messages": [{"role": "user"}]}, "no field message 1 content"),
        ({"messages": [{"role": "user", "content": 3}]}, "field message 1 content is a number"),
        ({"messages": [{"role": "user", "content": ["q"]}]}, "part 'q', wanted one of type text or image"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "wanted one of type text or image"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "wanted one of type text or image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no field text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 1}]}]}, "field image is a number"),
    ],
)
def test_what_is_no_conversation_says_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=message) as caught:
        canonical(fields, [])
    assert caught.value.reason == "bad_conversation"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("<image>"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image", "from", "value"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["messages", "question", "answer", "id", "image", "images"]), _json, max_size=4))
def test_any_object_is_a_conversation_or_a_counted_failure(fields: dict[str, Any]) -> None:
    reason = None
    try:
        identifier(fields)
        document, used = canonical(fields, image_names(fields))
    except TextError as err:
        reason = err.reason
    if reason is None:
        parts = [part for message in json.loads(document) for part in message["content"]]
        assert len(used) == sum(part == IMAGE for part in parts)
    else:
        assert reason in {"bad_conversation", "image_count_mismatch"}


def test_ids_may_be_numbers() -> None:
    assert [identifier({"id": 7}), identifier({"sample_id": "a", "id": "b"}), identifier({"id": None})] == [
        "7",
        "a",
        None,
    ]
    for wrong in ("", True, 1.5, [1], 10**40):
        with pytest.raises(TextError, match="field id is"):
            identifier({"id": wrong})
