from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import TextError
from forebay.rows.manifest import MediaPlace, file_place, meaning_named
from forebay.rows.meanings import canonical_chat
from forebay.rows.meanings.canonical_chat import item_names
from tests.strategies import transcripts

IMAGE = {"type": "image"}
identifier = meaning_named("conversations").identifier


def canonical(fields: dict[str, Any], images: list[Any], *, unknown: set[str] | None = None) -> tuple[str, list[Any]]:
    """Returns a conversation over images, and these."""
    found, used = canonical_chat.canonical(fields, {"image": images}, unknown=unknown)
    return found, used["image"]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def turns(*contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("fields", "images", "expected", "used"),
    [
        ({"question": "q", "answer": "a"}, ["x"], turns([IMAGE, text("q")], [text("a")]), "x"),
        ({"question": "q", "answer": "a"}, ["x", "y"], turns([IMAGE, IMAGE, text("q")], [text("a")]), "xy"),
        ({"question": "q", "answer": "<image>"}, [], turns([text("q")], [text("<image>")]), ""),
        ({"question": "a <image>\nb", "answer": ""}, ["x"], turns([text("a "), IMAGE, text("b")], []), "x"),
        ({"query": "q", "response": "a"}, ["x"], turns([IMAGE, text("q")], [text("a")]), "x"),
        ({"instruction": "i", "input": "n", "output": "a"}, [], turns([text("i\nn")], [text("a")]), ""),
        ({"instruction": "i", "input": "", "output": "a", "history": []}, [], turns([text("i")], [text("a")]), ""),
        ({"instruction": "", "input": "<image>n", "output": "a"}, "x", turns([IMAGE, text("n")], [text("a")]), "x"),
        (
            {"query": "q", "response": "a", "history": [["<image>h", "g"], ["e", "f"]]},
            ["x"],
            turns([IMAGE, text("h")], [text("g")], [text("e")], [text("f")], [text("q")], [text("a")]),
            "x",
        ),
        (
            {"instruction": "i", "output": "a", "history": '[["h", "<image>"]]'},
            ["x"],
            turns([IMAGE, text("h")], [text("<image>")], [text("i")], [text("a")]),
            "x",
        ),
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
        ({"query": "<image>", "response": "a"}, [], "1 image tags for 0 images"),
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
        ({"query": "q", "response": None}, "has no field response"),
        ({"instruction": "q", "answer": "a"}, "has no field output"),
        ({"instruction": "q", "input": 3, "output": "a"}, "field input is a number"),
        ({"query": "q", "response": "a", "history": [["q"]]}, r"field history has .*wanted \[question, answer\]"),
        ({"query": "q", "response": "a", "history": [["q", None]]}, "has no field history"),
        ({"query": "q", "response": "a", "history": {"q": "a"}}, "field history is .*wanted a list"),
        ({"query": "q", "response": "a", "history": "[["}, "is no JSON"),
        ({"question": 3, "answer": "a"}, "field question is a number"),
        ({"question": "\udc00", "answer": "a"}, "half of a surrogate pair"),
        ({"messages": []}, "wanted a list of messages"),
        ({"messages": {"role": "user"}}, "wanted a list of messages"),
        ({"messages": ["hello"]}, "message 1 is 'hello', wanted an object"),
        ({"messages": [{"content": "q"}]}, "message 1: role is 'None', wanted one of system"),
        ({"messages": [{"role": "critic", "content": "q"}]}, "message 1: role is 'critic'"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "message 1: role is "),
        ({"messages": [{"role": "user"}]}, "no field message 1 content"),
        ({"messages": [{"role": "user", "content": 3}]}, "field message 1 content is a number"),
        ({"messages": [{"role": "user", "content": ["q"]}]}, "part 'q', wanted one of type text or image"),
        ({"messages": [{"role": "user", "content": [{"type": "box"}]}]}, "wanted one of type text or image"),
        ({"question": "q", "answer": "a", "system": 3}, "field system content is a number"),
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
            st.sampled_from(
                ["role", "content", "type", "text", "image", "from", "value", "loss", "weight", "tool_calls"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)

_NAMES = [
    "messages",
    "query",
    "response",
    "history",
    "instruction",
    "output",
    "question",
    "answer",
    "id",
    "image",
    "images",
    "system",
    "tools",
    "videos",
    "objects",
    "split",
]

_REASONS = {
    *(
        "bad_tools",
        "bad_pair",
        "two_values",
        "bad_conversation",
        "image_count_mismatch",
        "two_conversations",
        "two_system_messages",
        "loss_weight",
    ),
    *("bad_box", "box_reversed", "box_image", "box_count_mismatch"),
    *("has_tools", "has_reasoning", "has_video", "has_audio", "preference_data", "image_pixel_limits"),
    *("bad_pixel_limits", "no_such_frame"),
}


@given(st.dictionaries(st.sampled_from(_NAMES), _json, max_size=4))
def test_any_object_is_a_conversation_or_a_counted_failure(fields: dict[str, Any]) -> None:
    reason = None
    try:
        identifier(fields)
        unknown: set[str] = set()
        document, used = canonical(fields, item_names(fields, "image"), unknown=unknown)
    except TextError as err:
        reason = err.reason
    if reason is None:
        assert ("split" in unknown) == (fields.get("split") is not None)
        parts = [part for message in json.loads(document) for part in message["content"]]
        assert len(used) == sum(part == IMAGE for part in parts)
    else:
        assert reason in _REASONS


def test_ids_may_be_numbers() -> None:
    assert [identifier({"id": 7}), identifier({"sample_id": "a", "id": "b"}), identifier({"id": None})] == [
        "7",
        "a",
        None,
    ]
    for wrong in ("", True, 1.5, [1], 10**40):
        with pytest.raises(TextError, match="field id is"):
            identifier({"id": wrong})


QUESTION: dict[str, Any] = {"question": "q", "answer": "a"}
TOOL: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALL: dict[str, Any] = {"name": "f", "arguments": {"x": 1}}


def said(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A row of messages; each is changed by a dictionary, the first is the user's."""
    roles = ("user", "assistant")
    made = [{"role": roles[n % 2], "content": roles[n % 2], **message} for n, message in enumerate(messages)]
    return {"messages": made, **fields}


def boxed(box: Any, *, image: str | None = "x", **objects: Any) -> dict[str, Any]:
    """A row with one box and its name."""
    asked = {"content": [{"type": "image", "image": image}] if image else "q"}
    objects = {"ref": ["cat"], "bbox": [box], **objects}
    return said(asked, {"content": "<ref-object> at <bbox>"}, objects=objects)


def pictured(**fields: Any) -> dict[str, Any]:
    return said({"content": [{"type": "image", **fields}]}, {})


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({**QUESTION, "tools": [TOOL], "functions": [TOOL]}, "two_values", "has both tools and functions"),
        ({**QUESTION, "functions": "f"}, "bad_tools", "field functions: is no JSON"),
        ({**QUESTION, "tools": TOOL}, "bad_tools", "field tools: .*wanted a list"),
        ({**QUESTION, "tools": [{"type": "function"}]}, "bad_tools", "wanted the JSON schema of a function"),
        ({**QUESTION, "tools": [{**TOOL, "name": 3}]}, "bad_tools", "wanted the JSON schema"),
        ({**QUESTION, "tools": [{**TOOL, "parameters": "x"}]}, "bad_tools", "wanted the JSON schema"),
        ({**QUESTION, "tools": [{**TOOL, "description": b"x"}]}, "bad_tools", "wanted the JSON schema"),
        ({**QUESTION, "tools": [{**TOOL, "description": "\udc00"}]}, "bad_tools", "wanted the JSON schema"),
        ({**QUESTION, "tools": '[{"name": "f", "name": "g"}]'}, "repeated_field", "stands there twice"),
        ({**QUESTION, "tool_calls": [{"name": "f"}]}, "has_tools", "field tool_calls is given"),
        (said({"tools": [TOOL]}, {}), "has_tools", "message 1: field tools"),
        (said({"tool_calls": [{"name": "f"}]}, {}), "has_tools", "message 1: field tool_calls"),
        (said({}, {"tool_call_id": "1"}), "has_tools", "message 2: field tool_call_id"),
        (said({}, {"tool_calls": [{"id": 1}]}), "bad_tools", "message 2: a call is .*wanted an object with name"),
        (said({}, {"tool_calls": [{"name": "f"}]}), "bad_tools", "wanted an object with name and arguments"),
        (said({}, {"function_call": {"name": "f", "arguments": "[1]"}}), "bad_tools", "of f has arguments .*wanted an"),
        (said({}, {"function_call": {"name": "f", "arguments": "{"}}), "bad_tools", "a call is no JSON"),
        (said({}, {"tool_calls": [CALL], "function_call": CALL}), "two_values", "message 2 has both tool_calls and"),
        (said({}, {"role": "tool_call", "content": "look!"}), "bad_tools", "message 2: a call is no JSON"),
        (said({}, {"role": "tool_call", "content": None}), "bad_tools", "message 2: a call is 'None'"),
        (said({"reasoning_content": "because"}, {}), "has_reasoning", "message 1: field reasoning_content"),
        (said({}, {"thinking": "a", "reasoning": "b"}), "two_values", "message 2: .*contradict each other"),
        ({**QUESTION, "thinking": "because"}, "has_reasoning", "field thinking is given"),
        ({**QUESTION, "videos": ["v.mp4"]}, "has_video", "field videos"),
        ({**QUESTION, "video": "v.mp4"}, "has_video", "field video"),
        ({**QUESTION, "question": "<video>What?"}, "has_video", "field question has the tag <video>"),
        (
            said({"content": "a <video> b"}, {}),
            "has_video",
            "message 1 has the tag <video>, and videos .* into a part of type text",
        ),
        (
            said({"content": [{"type": "video", "video": "v.mp4"}]}, {}),
            "has_video",
            "message 1: a part is of type video",
        ),
        ({**QUESTION, "audios": ["a.wav"]}, "has_audio", "field audios"),
        (
            said({"content": [{"type": "audio", "audio": "a.wav"}]}, {}),
            "has_audio",
            "message 1: a part is of type audio",
        ),
        (boxed([1, 2, 3]), "bad_box", r"a box is '\[1, 2, 3\]', wanted \[x1"),
        (boxed([1, 2, "3", 4]), "bad_box", "wanted .* or .x, y."),
        (boxed([1, True]), "bad_box", "wanted .* or .x, y."),
        (boxed([float("nan"), 2]), "bad_box", "wanted numbers of pixels"),
        (boxed([1, 10**400]), "bad_box", "wanted numbers of pixels"),
        (boxed(7), "bad_box", "a box is '7'"),
        (boxed([1, 2], bbox=[1, 2]), "bad_box", "a box is '1'"),
        (boxed([1, 2], bbox_type="norm1000"), "bad_box", "bbox_type is 'norm1000', wanted real or norm1"),
        ({**boxed([1, 2]), "objects": "[1]"}, "bad_box", "wanted an object of ref and bbox"),
        ({**boxed([1, 2]), "objects": "{"}, "bad_conversation", "is no JSON"),
        (boxed([3, 2, 1, 4]), "box_reversed", "first corner behind its second"),
        (boxed([1, 4, 3, 2]), "box_reversed", "first corner behind its second"),
        (boxed([1, 2], image_id=[1]), "box_image", "is of image 1, and the row has 1"),
        (boxed([1, 2], image_id=[-1]), "box_image", "is of image -1"),
        (boxed([1, 2], image_id=["a.jpg"]), "box_image", "is of image a.jpg"),
        (boxed([1, 2], image=None), "box_image", "is of image 0, and the row has 0"),
        (boxed([1, 2], image_id=[0, 0]), "box_count_mismatch", "has 2 image_id for 1 boxes"),
        (boxed([1, 2], bbox=[]), "box_count_mismatch", "has 1 <bbox> tags for 0 of objects"),
        (boxed([1, 2], bbox=[[1, 2]] * 2), "box_count_mismatch", "has 1 <bbox> tags for 2 of objects"),
        (boxed([1, 2], ref=[]), "box_count_mismatch", "has 1 <ref-object> tags for 0 of objects"),
        (said({}, {"content": "at <bbox>"}), "box_count_mismatch", "has 1 <bbox> tags .* into a part of type text"),
        (said({}, {}, rejected_messages=["no"]), "preference_data", "field rejected_messages"),
        ({**QUESTION, "rejected": "no"}, "bad_pair", "the pair has rejected, no chosen"),
        ({**QUESTION, "chosen": [{"role": "user"}]}, "bad_pair", "the pair has no rejected beside chosen"),
        (pictured(total_pixels=1), "image_pixel_limits", "message 1: part image: field total_pixels"),
        (pictured(max_pixels=0), "bad_pixel_limits", "message 1: part image: max_pixels is '0', wanted an integer"),
        (pictured(min_pixels="9"), "bad_pixel_limits", "part image: min_pixels is '9', wanted an integer of 1 or more"),
        (pictured(min_pixels=9.5), "bad_pixel_limits", "part image: min_pixels is '9.5', wanted an integer"),
        (pictured(max_pixels=True), "bad_pixel_limits", "part image: max_pixels is 'True', wanted an integer"),
        (pictured(resized_height=28), "bad_pixel_limits", "has resized_height, wanted resized_height and"),
        (pictured(resized_height=28, resized_width=28, max_pixels=9), "bad_pixel_limits", "wanted resized_height and"),
        (pictured(frame=-1), "no_such_frame", "part image: frame is '-1', wanted an integer of 0 or more"),
        ({**said({}, {}), "question": "q"}, "two_conversations", "has both messages and question"),
        ({**said({}, {}), "query": "q"}, "two_conversations", "has both messages and query"),
        ({"query": "q", "instruction": "i"}, "two_conversations", "has both query and instruction"),
        (
            {**said({}, {}), "conversations": [{"from": "gpt"}]},
            "two_conversations",
            "has both messages and conversations",
        ),
        ({"conversations": [{"from": "gpt"}], **QUESTION}, "two_conversations", "has both conversations and question"),
        (
            {"messages": [{"role": "user"}], "conversations": [], **QUESTION},
            "two_conversations",
            "has both messages and question",
        ),
        (said({"role": "system"}, {}, system="s"), "two_system_messages", "field system is given beside a message"),
        (said({}, {"weight": 0.5}), "loss_weight", "message 2: field weight is '0.5'"),
        (said({}, {"weight": "0"}), "loss_weight", "message 2: field weight is '0'"),
        (said({}, {"loss": "false"}), "loss_weight", "message 2: field loss is 'false'"),
        (said({}, {"weight": float("nan")}), "loss_weight", "message 2: field weight is 'nan'"),
        (said({}, {"loss": True, "weight": 0}), "loss_weight", "message 2: fields loss and weight contradict"),
        (said({"loss": True}, {}), "loss_weight", "message 1: loss would have a message of role user learnt"),
        (said({"role": "system", "weight": 1}, {}), "loss_weight", "weight would have a message of role system"),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_name(fields: dict[str, Any], reason: str, named: str) -> None:
    with pytest.raises(TextError, match=named) as caught:
        canonical(fields, [])
    assert caught.value.reason == reason


@pytest.mark.parametrize("empty", [None, "", [], {}, [None], {"ref": [], "bbox": None}])
def test_fields_that_hold_nothing_are_not_there(empty: Any) -> None:
    row = dict.fromkeys(("tools", "videos", "objects", "rejected_response", "system", "chosen"), empty)
    message = dict.fromkeys(("tool_calls", "reasoning_content", "function_call"), empty)
    part = {"type": "image", "max_pixels": empty, "resized_height": empty}
    unknown: set[str] = set()
    document, _ = canonical(said({"content": [part], **message}, message, **row), ["x"], unknown=unknown)
    assert document == canonical(said({"content": [IMAGE]}, {}), ["x"])[0]
    assert not unknown


def test_calls_of_every_form_are_one_form() -> None:
    wrapped = {"type": "function", "function": CALL}
    written = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    heard = {"role": "tool", "content": [text("1")], "tool_call_id": "7"}
    for call in (
        {"tool_calls": [wrapped], "content": None},
        {"tool_calls": [CALL], "content": ""},
        {"tool_calls": json.dumps([written]), "content": []},
        {"function_call": written, "content": None, "loss": True},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "function_call", "content": json.dumps([written])},
    ):
        for role in ("tool", "function", "observation", "tool_response"):
            row = said({}, call, {"role": role, "content": "1", "tool_call_id": "7"}, {})
            for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]):
                found = json.loads(canonical({**row, "tools": tools}, [])[0])
                assert found[0]["tools"] == [TOOL]
                assert found[1:3] == [{"role": "assistant", "content": [], "tool_calls": [wrapped]}, heard]
    several = said({}, {}, {"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool_call", "content": CALL})
    calls = json.loads(canonical(several, [])[0])[1]
    assert calls == {"role": "assistant", "content": [text("assistant")], "tool_calls": [wrapped, wrapped]}
    kept = {"id": "c1", **wrapped}
    assert json.loads(canonical(said({}, {"tool_calls": [kept]}), [])[0])[1]["tool_calls"] == [kept]
    assert json.loads(canonical({**QUESTION, "tools": "[]"}, [])[0]) == json.loads(canonical(QUESTION, [])[0])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name: str) -> None:
    assert json.loads(canonical(said({}, {name: "so"}), [])[0])[1]["reasoning_content"] == "so"


def test_a_row_s_system_message_comes_first() -> None:
    for fields in (said({}, {}), QUESTION):
        plain = json.loads(canonical(fields, [])[0])
        for system in ("Be kind.", [text("Be kind.")]):
            found = json.loads(canonical({**fields, "system": system}, [])[0])
            assert found == [{"role": "system", "content": [text("Be kind.")]}, *plain]
    document, used = canonical({**QUESTION, "question": "<image>q", "system": "<image>like this"}, ["x", "y"])
    assert [m["content"][0] for m in json.loads(document)[:2]] == [IMAGE, IMAGE]
    assert used == ["x", "y"]


@pytest.mark.parametrize(
    "no", [{"loss": False}, {"weight": 0}, {"weight": 0.0}, {"loss": 0, "weight": 0}, {"loss": None, "weight": 0}]
)
@pytest.mark.parametrize("yes", [{}, {"loss": True}, {"weight": 1}, {"weight": 1.0, "loss": True}, {"loss": None}])
def test_messages_say_whether_they_are_learnt(no: dict[str, Any], yes: dict[str, Any]) -> None:
    document, _ = canonical(said({"weight": 0}, no, {"loss": False}, yes), [])
    assert [message.get("loss") for message in json.loads(document)] == [None, False, None, None]
    again = canonical({"messages": json.loads(document)}, [])[0]
    assert again == document


def test_every_other_field_is_named_where_it_stands() -> None:
    part = {"type": "image", "detail": "high", "text": None}
    row = said(
        {"content": [part, {**text("q"), "cache": True}], "name": "Ann"}, {"name": "Bob"}, split="train", answer="a"
    )
    unknown: set[str] = set()
    canonical(
        {**row, "id": 1, "sample_id": "b", "images": ["x"], "image": "y", "nothing": None}, ["x"], unknown=unknown
    )
    assert unknown == {
        "split",
        "answer",
        "image",
        "messages.name",
        "messages.content.detail",
        "messages.content.cache",
    }
    canonical({"conversations": [{"from": "human", "value": "q", "model": "m"}], "id": "x"}, [], unknown=unknown)
    assert "conversations.model" in unknown


def test_a_tag_in_a_text_part_or_an_answer_is_text() -> None:
    document, _ = canonical(said({"content": [text("<video> is HTML")]}, {}), [])
    assert json.loads(document)[0]["content"] == [text("<video> is HTML")]
    assert json.loads(canonical({"question": "q", "answer": "<bbox>"}, [])[0])[1]["content"] == [text("<bbox>")]


def test_boxes_and_names_stand_where_their_tags_are() -> None:
    asked, said_ = "<image>\n<ref-object> or <ref-object>?", "<bbox>: not <bbox>"
    objects: dict[str, Any] = {
        "ref": ["a cat", ""],
        "bbox": [[1, 2.5, 3, 4], [0.5, 1]],
        "bbox_type": "real",
        "image_id": [0, 1],
    }
    first, second = ({"type": "box", "box": box, "image": n} for n, box in enumerate(objects["bbox"]))
    parts = turns(
        [IMAGE, {"type": "ref", "text": "a cat"}, text(" or "), {"type": "ref", "text": ""}, text("?")],
        [first, text(": not "), second],
    )
    unknown: set[str] = set()
    for row in (
        {"query": f"<image>{asked}", "response": said_, "objects": {**objects, "width": [9], "height": None}},
        {"query": f"<image>{asked}", "response": said_, "objects": json.dumps(objects)},
    ):
        found, used = canonical(row, ["x", "y"], unknown=unknown)
        assert json.loads(found) == [{**parts[0], "content": [IMAGE, *parts[0]["content"]]}, parts[1]]
    assert (used, unknown) == (["x", "y"], {"objects.width"})
    shares, _ = canonical(boxed([0, 0, 1, 1], bbox_type="norm1", image_id=[]), [])
    assert json.loads(shares)[1]["content"][-1] == {"type": "box", "box": [0, 0, 1, 1], "image": 0, "norm": True}
    words, _ = canonical({**QUESTION, "answer": "<bbox>", "objects": {"ref": [], "bbox": None}}, [])
    assert json.loads(words) == turns([text("q")], [text("<bbox>")])


@pytest.mark.parametrize("made", [str, MediaPlace])
def test_a_name_of_this_machine_is_its_path(made: type[str] | type[MediaPlace]) -> None:
    name = made("file:///data/a b%20.jpg")
    assert file_place(name) == MediaPlace(path="/data/a b%20.jpg")
    assert file_place(MediaPlace(None, frames=(MediaPlace("b"), file_place(name)))).frames == (
        MediaPlace("b"),
        MediaPlace("/data/a b%20.jpg"),
    )
