"""Tools, calls and reasoning against the chat template as transformers renders it, and what is learnt of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.zoo.conversations import TURNS
from forebay.config.pretrained_folder import processor_digest, tokenizer_digest
from forebay.errors import TextError
from forebay.pretrained import from_folder
from forebay.rows.meanings.canonical_chat import canonical
from forebay.steps.text.chat.chat_steps import Chat, ChatEncoder, ProcessorChat
from tests.vlm_families import FAMILIES, write_family

DEMO = Path(__file__).resolve().parents[3] / "demo" / "vision"
GRID, PAD = (1, 4, 6), "<|image_pad|>"
TEMPLATE = r"""
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' -%}{{ show(messages[0].content) + '\n\n' }}{%- endif -%}
{{ '# Tools\n\nYou may call one or more functions, whose signatures stand within <tools></tools>:\n<tools>' }}
{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
{{ '\n</tools>\n\nReturn a JSON object within <tool_call></tool_call> for each call.<|im_end|>\n' }}
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'system' and tools -%}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}[G]
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\n' + m.reasoning_content.strip() + '\n</think>\n\n' }}
{%- endif -%}
{{ show(m.content) }}
{%- for call in m.tool_calls or [] -%}
{{ ('\n' if m.content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}{{ '<|im_end|>' }}[/G]{{ '\n' }}
{%- elif m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + show(m.content) + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + show(m.content) + '<|im_end|>\n' }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
PLAIN = TEMPLATE.replace("[G]", "").replace("[/G]", "")
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Zooms <b>in</b> & out é",
        "parameters": {"type": "object", "properties": {"box": {"type": "array", "default": None}}, "required": []},
    },
}
ASKED = {"role": "user", "content": "<image>How many?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"name": "zoom", "arguments": '{"box": [1, 2.50]}'}],
}
WORDY, TWICE = {**CALLED, "content": "So:"}, {**CALLED, "tool_calls": 2 * CALLED["tool_calls"]}
HEARD = {"role": "tool", "content": 'two "dogs"\n', "tool_call_id": "c1"}
SAID = {"role": "assistant", "content": "Two."}


def model_of(folder: Path, template: str, *, processor: str | None = None) -> Path:
    if processor is None:
        shutil.copytree(DEMO / "model", folder)
    else:
        write_family(FAMILIES[processor], folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(tmp_path_factory.mktemp("tools") / "model", PLAIN)


def encoder_of(folder: Path, **chosen: Any) -> ChatEncoder:
    return ChatEncoder(Chat(tokenizer=tokenizer_digest(folder), **chosen), folder, merge_size=2)


@pytest.fixture(scope="module")
def coder(model: Path) -> ChatEncoder:
    return encoder_of(model)


def encoded(coder: Any, row: dict[str, Any], told: list[Any]) -> dict[str, np.ndarray]:
    text, _ = canonical(row, {"image": [*told]})
    return dict(coder.encode(text, told, sample_id="row-7"))


def for_transformers(row: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `apply_chat_template` as a person writes them for a row."""
    talk = []
    for message in row["messages"]:
        made = {name: value for name, value in message.items() if name != "loss"}
        if "<image>" in message["content"]:
            made["content"] = [{"type": "image"}, {"type": "text", "text": message["content"].replace("<image>", "")}]
        if calls := message.get("tool_calls"):
            read = [{**call, "arguments": json.loads(call["arguments"])} for call in calls]
            made["tool_calls"] = [{"type": "function", "function": call} for call in read]
        talk.append(made)
    return {"conversation": talk, "tools": row.get("tools")}


WORDS = st.text('ab\n <é"{', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of an agent: questions, calls with their answers, reasoning, what is not learnt."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 2))):
        talk.append({"role": "user", "content": ("" if turn else "<image>") + draw(WORDS).lstrip()})
        for last in (*([False] * draw(st.integers(0, 2))), True):
            said: dict[str, Any] = {"role": "assistant", "content": "x" + draw(WORDS) if last else draw(WORDS)}
            if draw(st.booleans()):
                said["reasoning_content"] = draw(WORDS.filter(str.strip))
            if draw(st.booleans()):
                said["loss"] = True
            if not last:
                arguments = st.dictionaries(WORDS, VALUES, max_size=2).map(json.dumps)
                calls = st.lists(st.fixed_dictionaries({"name": st.just("zoom"), "arguments": arguments}), min_size=1)
                said["tool_calls"] = draw(calls)
                heard = st.fixed_dictionaries({"role": st.just("tool"), "content": WORDS})
                talk += [said, *draw(st.lists(heard, min_size=1, max_size=2))]
            else:
                talk.append(said)
    return {"messages": talk, **({"tools": [TOOL, TOOL["function"]]} if draw(st.booleans()) else {})}


@given(rows())
def test_agents_are_as_transformers_writes_them(coder: ChatEncoder, row: dict[str, Any]) -> None:
    tokenizer = from_folder(AutoTokenizer, coder._vocabulary.folder)
    tokenizer.chat_template = TEMPLATE.replace("[G]", "{%- generation -%}").replace("[/G]", "{%- endgeneration -%}")
    made = tokenizer.apply_chat_template(**for_transformers(row), return_dict=True, return_assistant_tokens_mask=True)
    repeats = np.where(np.array(made["input_ids"]) == tokenizer.convert_tokens_to_ids(PAD), 6, 1)
    found = encoded(coder, row, [GRID])
    np.testing.assert_array_equal(found["input_ids"], np.repeat(made["input_ids"], repeats))
    wanted = np.repeat(made["assistant_masks"], repeats)
    # A token that reaches out of a turn is none of it: the newline of a header with one that the answer begins with.
    assert (found["label_mask"] <= wanted).all()
    if not any(message["content"].startswith("\n") for message in row["messages"]):
        np.testing.assert_array_equal(found["label_mask"], wanted)


def learnt_words(coder: ChatEncoder, row: dict[str, Any], **chosen: Any) -> str:
    other = encoder_of(coder._vocabulary.folder, **chosen) if chosen else coder
    found = encoded(other, row, [GRID] * sum("<image>" in m["content"] for m in row.get("messages", [ASKED])))
    tokenizer = from_folder(AutoTokenizer, coder._vocabulary.folder)
    return str(tokenizer.decode(found["input_ids"][found["label_mask"] == 1]))


def test_what_is_learnt_of_an_agent(coder: ChatEncoder) -> None:
    row = {"messages": [ASKED, CALLED, HEARD, SAID], "tools": [TOOL]}
    call = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2.5]}}\n</tool_call><|im_end|>'
    assert learnt_words(coder, row) == f"{call}Two.<|im_end|>"
    assert learnt_words(coder, {**row, "messages": [ASKED, {**CALLED, "loss": False}, HEARD, SAID]}) == "Two.<|im_end|>"
    assert learnt_words(coder, row, train_on="last") == "Two.<|im_end|>"
    everything = learnt_words(coder, row, train_on="all")
    assert everything.startswith("<|im_start|>system\n# Tools")
    assert everything.endswith("Two.<|im_end|>\n")
    assert PAD not in everything
    assert "<|vision_start|><|vision_end|>How many?" in everything
    unlearnt = learnt_words(coder, {**row, "messages": [ASKED, {**CALLED, "loss": False}, HEARD, SAID]}, train_on="all")
    assert unlearnt == everything.replace(call, "")
    for chosen, messages in (
        ("last", [ASKED, SAID, ASKED, {**SAID, "loss": 0}]),
        ("all", [ASKED, {**SAID, "loss": 0}]),
    ):
        with pytest.raises(TextError) as caught:
            learnt_words(coder, {"messages": messages}, train_on=chosen)
        assert caught.value.reason == "nothing_to_learn"


def test_rows_without_an_answer_are_learnt_where_all_is(coder: ChatEncoder) -> None:
    for row in ({"messages": [ASKED]}, {"text": "<image>How many?"}, {"text": "How many?"}):
        words = "<|im_start|>user\n<|vision_start|><|vision_end|>How many?<|im_end|>\n"
        assert learnt_words(coder, row, train_on="all") == words
        for chosen in ("assistant", "last"):
            with pytest.raises(TextError, match='train_on = "all"') as caught:
                learnt_words(coder, row, train_on=chosen)
            assert caught.value.reason == "no_assistant_turn"


@pytest.mark.parametrize(
    ("change", "row", "reason"),
    [
        (None, {"messages": [ASKED, SAID], "tools": [TOOL]}, "has_tools"),
        (None, {"messages": [ASKED, {**CALLED, "content": "So:"}, HEARD, SAID]}, "has_tools"),
        (None, {"messages": [ASKED, {**SAID, "reasoning_content": "so"}]}, "has_reasoning"),
        # Calls beside words are forgotten.
        (("m.tool_calls or []", "(not m.content and m.tool_calls or [])"), [WORDY], "has_tools"),
        (("m.tool_calls or []", "(m.tool_calls or [])[:1]"), [TWICE], "has_tools"),
        # What the tool says lies in a turn of the assistant.
        (("{{ '<|im_end|>' }}[/G]", "{{ '' if m.tool_calls else '<|im_end|>' }}"), [CALLED], "has_tools"),
        (("show(m.content) + '\\n</tool_response>'", "'\\n</tool_response>'"), [CALLED], "has_tools"),
        (("{%- if m.reasoning_content", "{%- if m.thoughts"), [{**CALLED, "reasoning_content": "so"}], "has_reasoning"),
        (("{%- for call in", "{%- if m.tool_calls -%}{{ m.no.no }}{%- endif -%}{%- for call in"), [CALLED],
         "bad_conversation"),
        (("", ""), [{**CALLED, "tool_calls": [{"name": "<|im_end|>", "arguments": {}}]}], "special_token_in_text"),
        (("", ""), {"messages": [ASKED, SAID], "tools": [{"name": "f", "x": "<|im_start|>"}]}, "special_token_in_text"),
        (("", ""), {"messages": [ASKED, CALLED, {**HEARD, "content": "a<|im_end|>"}, SAID]}, "special_token_in_text"),
        (("", ""), [{**CALLED, "tool_calls": [], "reasoning_content": "so"}], "empty_text"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_write_is_refused(
    tmp_path: Path, change: tuple[str, str] | None, row: Any, reason: str
) -> None:
    template = TURNS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    if change is not None:
        assert change[0] in TEMPLATE
        template = TEMPLATE.replace(*change).replace("[G]", "").replace("[/G]", "")
    row = row if isinstance(row, dict) else {"messages": [ASKED, *row, HEARD, SAID], "tools": [TOOL]}
    with pytest.raises(TextError, match="row-7") as caught:
        encoded(encoder_of(model_of(tmp_path / "model", template)), row, [GRID])
    assert caught.value.reason == reason


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.few("last")
def test_a_processor_writes_agents_as_its_own_template_does(tmp_path: Path, train_on: str) -> None:
    folder = model_of(tmp_path / "model", PLAIN, processor="qwen2_5_vl")
    step = ProcessorChat(
        tokenizer=tokenizer_digest(folder),
        processor=processor_digest(folder),
        tokenizer_folder=str(folder),
        processor_folder=str(folder),
        train_on=train_on,  # type: ignore[arg-type]
    )
    coder = step.opened(folder, merge_size=None)
    seen = {**HEARD, "content": "<image>closer"}
    row = {"messages": [ASKED, CALLED, seen, HEARD, {**SAID, "reasoning_content": "so"}], "tools": [TOOL]}
    found = encoded(coder, row, [(64, 48), (48, 90)])
    native = encoded(
        encoder_of(folder, train_on=train_on), row, [tuple(g) for g in _grids(coder, [(64, 48), (48, 90)])]
    )
    for name in ("input_ids", "label_mask"):
        np.testing.assert_array_equal(found[name], native[name])
    rendered = coder.writer.processor.apply_chat_template(**for_transformers(row))
    text = re.sub(r"<\|image_pad\|>", lambda m: m[0], rendered)
    assert text.count("<tool_response>") == 2
    assert "<think>\nso\n</think>" in text
    with pytest.raises(TextError) as caught:
        encoded(coder, {"messages": [ASKED, {**CALLED, "tool_calls": [{"name": PAD, "arguments": {}}]}]}, [(64, 48)])
    assert caught.value.reason == "special_token_in_text"


def _grids(coder: Any, sizes: list[tuple[int, int]]) -> list[list[int]]:
    from forebay.steps.text.chat.processor_ids import blank_image

    return [coder.writer.parts["image"]([blank_image(size)])["image_grid_thw"][0].tolist() for size in sizes]
