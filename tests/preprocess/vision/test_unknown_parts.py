"""Builds of conversations with parts beside the words: stored with their meaning, refused by reason, or named once."""

from __future__ import annotations

import base64
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from forebay.config import SourceConfig
from forebay.preprocess.pool import Pool
from forebay.store.cache import Cache, open_cache
from forebay.train.select import select
from tests.preprocess.corpus import json_lines, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo
from tests.rows.pictures import read_conversations
from tests.steps.text.test_tools import ASKED, CALLED, HEARD, PLAIN, SAID, TOOL

QUESTION: dict[str, Any] = {"image": "p0.jpg", "question": "What?", "answer": "A wave."}
TURNS = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A wave."}]


def conversation(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**turn, **change} for turn, change in zip(TURNS, changes, strict=True)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({**QUESTION, "tool_calls": [{"name": "look", "arguments": {}}]}, "has_tools"),
    "calls": ({"image": "p0.jpg", "messages": conversation({}, {"tool_calls": [{"id": 1}]})}, "bad_tools"),
    "schema": ({**QUESTION, "tools": ["look"]}, "bad_tools"),
    "called": (
        {"image": "p0.jpg", "messages": conversation({"function_call": {"name": "f", "arguments": "{}"}}, {})},
        "has_tools",
    ),
    "thought": ({"image": "p0.jpg", "messages": conversation({}, {"reasoning_content": "h"})}, "has_reasoning"),
    "reasons": ({"image": "p0.jpg", "messages": conversation({}, {"reasoning": "h"})}, "has_reasoning"),
    "thinks": ({**QUESTION, "thinking": "h"}, "has_reasoning"),
    "video": ({**QUESTION, "videos": ["v.mp4"]}, "has_video"),
    "tag": ({**QUESTION, "question": "<image><video>What?"}, "has_video"),
    "boxes": ({**QUESTION, "objects": {"ref": ["x"], "bbox": [[0, 0, 1, 1]]}}, "box_count_mismatch"),
    "rejected": ({**QUESTION, "rejected_response": "A cat."}, "preference_data"),
    "alone": ({"text": "<image>A wave.", "image": "p0.jpg"}, "no_assistant_turn"),
    "forms": ({**QUESTION, "query": "What?", "response": "A wave."}, "two_conversations"),
    "both": ({**QUESTION, "messages": TURNS}, "two_conversations"),
    "weight": ({"image": "p0.jpg", "messages": conversation({}, {"weight": 0.3})}, "loss_weight"),
    "masked": ({"image": "p0.jpg", "messages": conversation({}, {"mask": 1, "train": True})}, "loss_weight"),
    "scale": ({"image": "p0.jpg", "messages": conversation({}, {"loss_scale": 0.5})}, "loss_weight"),
    "part": ({"image": "p0.jpg", "messages": conversation({}, {"train_detail": [{"train": False}]})}, "loss_weight"),
    "roles": ({"image": "p0.jpg", "messages": conversation({"from": "gpt"}, {})}, "two_values"),
    "values": ({"image": "p0.jpg", "messages": conversation({}, {"value": "A cat."})}, "two_values"),
    "data": ({**QUESTION, "image": "data:image/png;base64,iVBORw0KGgo"}, "bad_inline_data"),
    "url": ({**QUESTION, "image": "https://example.org/p0.jpg"}, "missing_file"),
    "img": ({"question": "<img>http://example.org/p0.jpg</img>What?", "answer": "A cat."}, "missing_file"),
    "limits": (
        {"messages": conversation({"content": [{"type": "image", "image": "p0.jpg", "total_pixels": 784}]}, {})},
        "image_pixel_limits",
    ),
    "row-scale": ({**QUESTION, "loss_scale": 0.3}, "loss_weight"),
    "row-masks": ({"image": "p0.jpg", "messages": TURNS, "mask": [1, 0]}, "loss_weight"),
    "row-name": ({"image": "p0.jpg", "messages": TURNS, "mask": "masks/p0.png"}, "loss_weight"),
    "row-two": ({**QUESTION, "mask": 1, "train": True}, "loss_weight"),
    "row-train": ({"image": "p0.jpg", "messages": TURNS, "train": False}, "nothing_to_learn"),
    "row-mask": ({**QUESTION, "mask": 1}, "nothing_to_learn"),
    "unlearnt": ({"image": "p0.jpg", "messages": conversation({}, {"loss": False})}, "nothing_to_learn"),
}


@pytest.fixture
def corpus(tmp_path: Path) -> PhotoCorpus:
    corpus = PhotoCorpus(tmp_path)
    corpus.add_photo("p0.jpg")
    corpus.add_photo("p1.jpg", seed=1)
    return corpus


def add(corpus: PhotoCorpus, sample_id: str, row: dict[str, Any]) -> None:
    corpus.rows.append({"id": sample_id, **row})
    corpus.write_manifest()


def words(cache: Cache, sample_id: str, *, targets: bool) -> str:
    """The words of a sample, or those that are learnt."""
    sample = cache.read(cache.samples["sample_id"].to_pylist().index(sample_id))
    ids = sample["input_ids"][sample["label_mask"] == 1] if targets else sample["input_ids"]
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO / "model"), local_files_only=True)
    return str(tokenizer.decode(ids[ids != cache.constants["image_token_id"]]))


def test_what_cannot_be_stored_is_counted_by_reason_and_named(corpus: PhotoCorpus) -> None:
    add(corpus, "fine", QUESTION)
    for sample_id, (row, _) in REFUSED.items():
        add(corpus, sample_id, row)
    with open(corpus.folder / "train.jsonl", "a") as file:
        file.write('{"id": "twice", "image": "p0.jpg", "question": "a", "answer": "b", "answer": "c"}\n')
    report = build_here(corpus.config())
    assert report.num_samples == 1
    rejected = {row["sample_id"]: row["reason"] for row in json_lines(Path(report.cache) / "rejected.jsonl")}
    assert rejected == {
        **{name: reason for name, (_, reason) in REFUSED.items()},
        f"train/{len(REFUSED) + 1}": "repeated_field",
    }
    assert sum(report.failed.values()) == len(REFUSED) + 1
    online = select(corpus.config('loader.cache="off"'))
    assert [online.sample_id(index) for index in range(len(online))] == ["fine"]


def test_images_are_found_where_the_row_has_them(corpus: PhotoCorpus) -> None:
    for name, row in {
        "fine": QUESTION,
        "img": {"question": "Picture 1: <img>p0.jpg</img>\nWhat?", "answer": "A wave."},
        "both": {**QUESTION, "images": []},
        "learnt": {**QUESTION, "train": True, "mask": 0, "loss_scale": 1.0},
        "other": {"image": "", "images": ["p0.jpg"], "messages": TURNS},
        "same": {"image": "p0.jpg", "messages": conversation({"from": "human"}, {"from": "gpt", "value": "A wave."})},
    }.items():
        add(corpus, name, row)
    report = build_here(corpus.config())
    assert (report.num_samples, report.unused_fields) == (6, {})
    assert (
        words(open_cache(report.cache), "img", targets=False).count("Picture 1: <|vision_start|><|vision_end|>\nWh")
        == 1
    )


@pytest.mark.parametrize("codec", ["raw", "source"])
def test_images_that_stand_in_the_manifest_are_those_of_files(corpus: PhotoCorpus, codec: str) -> None:
    uri = f"data:image/jpeg;base64,{base64.b64encode((corpus.folder / 'p1.jpg').read_bytes()).decode()}"
    turns: list[dict[str, Any]] = [{"role": "user", "content": []}, TURNS[1]]

    def shown(**part: Any) -> dict[str, Any]:
        return {"messages": [{**turns[0], "content": [part, {"type": "text", "text": "What?"}]}, turns[1]]}

    openai: dict[str, Any] = {"type": "image_url", "image_url": {"url": uri, "detail": "high"}}
    rows: dict[str, dict[str, Any]] = {
        "file": shown(type="image", image="p1.jpg"),
        "row": {**QUESTION, "image": uri},
        "list": {"images": ["p1.jpg", uri], "question": "<image>What?<image>", "answer": "A wave."},
        "part": shown(type="image", image=uri),
        "openai": shown(**openai),
        "named": shown(type="image_url", image_url={"url": "p1.jpg"}),
        "url": shown(type="image", url="p1.jpg"),
    }
    bad = {
        "bad_inline_data": {**QUESTION, "image": "data:image/png;base64,!!!"},
        "unreadable_image": {**QUESTION, "image": "data:image/png;base64,aGVsbG8gd29ybGQ="},
        "missing_file": {**QUESTION, "image": "data:image/png,raw"},
        "empty": {**QUESTION, "image": "data:image/png;base64,"},
        "other": {**QUESTION, "image": "data:text/plain;base64,aGVsbG8="},
        "http": shown(type="image_url", image_url={"url": "https://example.org/p.png"}),
    }
    for sample_id, row in {**rows, **bad}.items():
        add(corpus, sample_id, row)
    report = build_here(corpus.config(f'vision.codec="{codec}"'))
    cache = open_cache(report.cache)
    failed = json_lines(Path(report.cache) / "rejected.jsonl")
    reasons = {row["sample_id"]: row["reason"] for row in failed}
    assert reasons == {name: name if name.startswith(("bad_", "un", "mi")) else "missing_file" for name in bad}
    ids = cache.samples["sample_id"].to_pylist()
    wanted = cache.read(ids.index("file"))
    online = select(corpus.config('loader.cache="off"', f'vision.codec="{codec}"'))
    places = {online.sample_id(index): index for index in range(len(online))}
    for name in rows:
        for found in (cache.read(ids.index(name)), online.read(places[name])):
            if name != "list":
                np.testing.assert_array_equal(found["input_ids"], wanted["input_ids"])
            for field in ("patches", "image_grid_thw") if codec == "raw" else ("image_grid_thw",):
                twice = np.concatenate([wanted[field]] * (1 + (name == "list")))
                np.testing.assert_array_equal(found[field], twice)
    assert report.unused_fields == {"messages.content.detail": 1}


def test_a_system_message_and_unlearnt_turns_reach_the_sample(corpus: PhotoCorpus) -> None:
    add(corpus, "plain", QUESTION)
    add(corpus, "system", {**QUESTION, "system": "Be brief."})
    turns = [*conversation({"weight": 0}, {"loss": False}), {"role": "user", "content": "Sure?"}]
    for name, value in {"loss_scale": 0, "train": False, "mask": 1}.items():
        turns += conversation({"content": "Sure?", name: value}, {name: value})
    turns += conversation({"content": "Sure?"}, {"content": "Yes.", "weight": 1, "mask": 0})[1:]
    add(corpus, "turns", {"image": "p1.jpg", "messages": turns})
    cache = open_cache(build_here(corpus.config()).cache)
    assert words(cache, "system", targets=False).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    )
    assert "system" not in words(cache, "plain", targets=False)
    assert words(cache, "turns", targets=True) == "Yes.<|im_end|>"
    assert "A wave.<|im_end|>" in words(cache, "turns", targets=False)
    through = open_cache(
        build_here(
            corpus.config('text={tokenizer="%s",prompt="chat",learn_through="newline"}' % (DEMO / "model"))
        ).cache
    )
    assert words(through, "turns", targets=True) == "Yes.<|im_end|>\n"
    assert through.key != cache.key
    online = select(corpus.config('loader.cache="off"'))
    for index in range(len(cache)):
        for name in ("input_ids", "label_mask"):
            np.testing.assert_array_equal(online.read(index)[name], cache.read(index)[name])


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.few("last")
def test_agents_and_texts_alone_are_the_same_without_a_cache(corpus: PhotoCorpus, train_on: str) -> None:
    shutil.copytree(DEMO / "model", corpus.folder / "model")
    (corpus.folder / "model" / "chat_template.jinja").write_text(PLAIN)
    agent = {"image": "p0.jpg", "tools": json.dumps([TOOL]), "messages": [ASKED, CALLED, HEARD, SAID]}
    add(corpus, "agent", agent)
    add(corpus, "thinks", {"image": "p1.jpg", "messages": conversation({}, {"thinking": "It moves."})})
    add(corpus, "alone", {"text": "A wave.", "image": "p1.jpg"})
    config = corpus.config(f'text={{tokenizer="model",prompt="chat",train_on="{train_on}"}}', "plan.seq_len=900")
    report = build_here(config)
    cache = open_cache(report.cache)
    assert report.failed == ({} if train_on == "all" else {"no_assistant_turn": 1})
    online = select(replace(config, loader=replace(config.loader, cache="off")))
    assert [online.sample_id(index) for index in range(len(online))] == cache.samples["sample_id"].to_pylist()
    for index in range(len(cache)):
        for name in ("input_ids", "label_mask"):
            np.testing.assert_array_equal(online.read(index)[name], cache.read(index)[name])
    assert ("<tool_call>" in words(cache, "agent", targets=True)) == (train_on != "last")
    assert "It moves." in words(cache, "thinks", targets=True)


def test_other_fields_are_named_once_a_build(corpus: PhotoCorpus, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        add(corpus, str(number), {**QUESTION, "split": "train", **({"model\x1b[2J": "m"} if number else {})})
    add(corpus, "5", {"image": "p1.jpg", "messages": conversation({}, {"name": "Bob"})})
    expected = {"split": 5, "model\x1b[2J": 4, "messages.name": 1}
    line = 'samples: 3 fields are not used: "split" (5 rows), "model\\x1b[2J" (4 rows), "messages.name" (1 row)'
    report = build_here(corpus.config())
    assert (report.num_samples, report.unused_fields) == (6, expected)
    assert [r.getMessage() for r in caplog.records if "not used" in r.getMessage()] == [line]
    assert json.loads((Path(report.cache) / "metadata.json").read_bytes())["unused_fields"] == expected
    caplog.clear()
    again = build_here(corpus.config())
    assert (again.already_sealed, again.unused_fields) == (True, expected)
    select(corpus.config('loader.cache="off"', 'run.cache_root="none"'))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING].count(line) == 1


def test_worker_processes_count_what_one_process_counts(tmp_path: Path) -> None:
    (tmp_path / "p0.jpg").write_bytes(photo(0))
    for number in range(4):
        rows = [{**QUESTION, f"only{number}": 1, "all": 1}, {**QUESTION, "video": "f"}] * 3
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(kind="jsonl", manifest=str(tmp_path / "*.jsonl"))
    here = read_conversations(source, cache_root=tmp_path)
    with Pool(2) as pool:
        there = read_conversations(source, cache_root=tmp_path, map_=pool.map)
    assert here.unused == {"all": 12, **{f"only{n}": 3 for n in range(4)}}
    assert list(here.unused.items()) == list(there.unused.items())
    assert here.rejected.equals(there.rejected)
    assert here.counts()["failed"] == {"has_video": 12}


def test_columns_of_speech_are_named_once_a_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.rows = [{**row, "speaker": "x"} for row in corpus.rows]
    corpus.write_manifest()
    report = build_here(corpus.config())
    assert report.unused_fields == {"speaker": 17}
    lines = [r.getMessage() for r in caplog.records if "not used" in r.getMessage()]
    assert lines == ['samples: 1 field is not used: "speaker" (17 rows)']
    caplog.clear()
    select(corpus.config('loader.cache="off"', 'run.cache_root="none"'))
    assert lines[0] in [r.getMessage() for r in caplog.records]
