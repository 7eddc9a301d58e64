"""Tokenizer folders that a warm start takes, and those that it refuses by name before anything is computed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from forebay.errors import ConfigError
from forebay.train.warm_start import check_loaded, read_tokenizer
from tests.train.warm_start.folders import DEMO, document_of, new_tokenizer

Change = Callable[[dict[str, Any]], None]


def with_model(folder: Path, change: Change, *, tokenizer_class: str | None = None) -> Path:
    """Makes `folder` the demo's Whisper tokenizer with a changed model."""
    shutil.copytree(DEMO["whisper"], folder, ignore=shutil.ignore_patterns("config.json", "generation*"))
    document = document_of(folder)
    change(document["model"])
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    if tokenizer_class is not None:
        config = document_of(folder, "tokenizer_config.json") | {"tokenizer_class": tokenizer_class}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def as_texts(model: dict[str, Any]) -> None:
    model["merges"] = [" ".join(pair) for pair in model["merges"]]


def mixed(model: dict[str, Any]) -> None:
    model["merges"][1] = " ".join(model["merges"][1])


def of_three(model: dict[str, Any]) -> None:
    model["merges"][3].append("x")


def texts_of_three(model: dict[str, Any]) -> None:
    as_texts(model)
    model["merges"][3] += " x"


def of_ids(model: dict[str, Any]) -> None:
    model["merges"] = [[model["vocab"][part] for part in pair] for pair in model["merges"]]


def of_objects(model: dict[str, Any]) -> None:
    model["merges"] = [{"pair": pair} for pair in model["merges"]]


def with_a_version(model: dict[str, Any]) -> None:
    as_texts(model)
    model["merges"].insert(0, "#version: 0.2")


def two_of_one_id(model: dict[str, Any]) -> None:
    first, second = list(model["vocab"])[5:7]
    model["vocab"][first] = model["vocab"][second]


def untyped(model: dict[str, Any]) -> None:
    del model["type"]


CHANGES: list[tuple[Change, str]] = [
    (mixed, r'merge 1 is ".* .*", wanted two tokens, as a list for all merges'),
    (of_three, r'merge 3 is \[.*"x"\], wanted two tokens'),
    (texts_of_three, r'merge 3 is ".* x", wanted two tokens'),
    (of_ids, r"merge 0 is \[\d+, \d+\], wanted two tokens"),
    (of_objects, r'merge 0 is \{"pair": .*, wanted two tokens'),
    (with_a_version, r'merge 0 is "#version: 0.2", and "#version:" is not in the vocabulary of 700 tokens'),
    (lambda model: model.update(merges=None), r"merges of type NoneType and a vocabulary of type dict, wanted a list"),
    (lambda model: model.pop("merges"), r"merges of type NoneType"),
    (lambda model: model.update(merges={"a b": 0}), r"merges of type dict"),
    (lambda model: model["merges"].append(["z", "q"]), r'merge 444 is \["z", "q"\], and "zq" is not in the vocabulary'),
    (lambda model: model["merges"].append(["qqq", "z"]), r'merge 444 is .* and "qqq" is not in the vocabulary'),
    (lambda model: model.update(type="BpeX"), r"a model of type 'BpeX', wanted BPE, Unigram, WordPiece, WordLevel"),
    (
        lambda model: model["vocab"].update(zzz=5000),
        r"has gaps: 809 ids and a largest id of 5000; the first .* is 808; ",
    ),
    (lambda model: model["vocab"].update(zzz=-1), r"`tokenizers` cannot load .*: invalid value: integer `-1`"),
    (lambda model: model["vocab"].update(zzz="5"), r'`tokenizers` cannot load .*: invalid type: string "5"'),
    (two_of_one_id, r'the tokens ".+" and ".+" both have id 6; give each token its own id'),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_another_form_is_refused_by_name(tmp_path: Path, change: Change, message: str) -> None:
    folder = with_model(tmp_path / "changed", change)
    with pytest.raises(ConfigError, match=message) as caught:
        read_tokenizer(folder)
    assert str(caught.value).startswith("--tokenizer: ")
    assert str(folder / "tokenizer.json") in str(caught.value)


def test_an_added_token_that_is_empty_is_refused(tmp_path: Path) -> None:
    """`tokenizers` leaves it out without a word."""
    folder = with_model(tmp_path / "changed", lambda model: None)
    document = document_of(folder)
    document["added_tokens"][-1]["content"] = ""
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r'gives "" the id \d+, and `tokenizers` none; '):
        read_tokenizer(folder)


def test_ids_of_added_tokens_with_a_gap_are_refused(tmp_path: Path) -> None:
    """`tokenizers` numbers them anew without a word: data that was made with the file's ids would be misread."""
    folder = with_model(tmp_path / "changed", lambda model: None)
    document = document_of(folder)
    for entry in document["added_tokens"][50:]:
        entry["id"] += 100
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has gaps: 808 ids and a largest id of 907; the first .* is 750"):
        read_tokenizer(folder)


@pytest.mark.parametrize("change", [of_three, texts_of_three, of_ids])
def test_without_the_check_users_would_meet_a_type_error(tmp_path: Path, change: Change) -> None:
    """Why forms are looked at here: transformers says nothing of the file, and not before the run has begun."""
    folder = with_model(tmp_path / "changed", change)
    with pytest.raises(TypeError, match="failed to extract enum PyMerges"):
        AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("tokenizer_class", ["WhisperTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("change", [as_texts, untyped, lambda model: None])
def test_the_older_forms_that_load_are_taken(tmp_path: Path, change: Change, tokenizer_class: str) -> None:
    folder = with_model(tmp_path / "old", change, tokenizer_class=tokenizer_class)
    new = read_tokenizer(folder)
    assert new.ids == AutoTokenizer.from_pretrained(DEMO["whisper"]).get_vocab()
    assert (len(new.added), new.byte_level) == (108, True)
    check_loaded(new, folder)


def test_models_without_merges_are_taken(tmp_path: Path) -> None:
    made = {
        "Unigram": models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0),
        "WordLevel": models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"),
        "WordPiece": models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"),
    }
    for name, model in made.items():
        (tmp_path / name).mkdir()
        Tokenizer(model).save(str(tmp_path / name / "tokenizer.json"))
        new = read_tokenizer(tmp_path / name)
        assert (sorted(new.ids.values()), new.byte_level) == ([0, 1, 2], False)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer: cannot read .*tokenizer.json \(No such file or directory\)"):
        read_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "has no `model`"),
        ('{"model": []}', "has no `model`"),
        ("[" * 100_000, "is not JSON"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "has no tokens"),
        ('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": 3}', "cannot load"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_tokenizer(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_a_strangers_file_gives_a_tokenizer_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "stranger"
    folder.mkdir(exist_ok=True)
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    token = {"id": 3, "content": "<s>", "special": True, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    document: Any = {"version": "1.0", "added_tokens": [token], "model": model, "decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    assert read_tokenizer(folder).ids == {"a": 0, "b": 1, "ab": 2, "<s>": 3}
    node = document
    while isinstance(node, (dict, list)) and node:
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(_JSON)
            break
        node = node[key]
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        assert sorted(read_tokenizer(folder).ids.values()) == list(range(len(read_tokenizer(folder).ids)))


def test_a_class_that_reads_other_tokens_is_refused(tmp_path: Path) -> None:
    """WhisperTokenizer adds its end token where the file has none: a row that no file names."""
    folder = new_tokenizer(tmp_path / "new", "whisper", without=("<|endoftext|>",))
    with pytest.raises(ConfigError, match=r'None as id of "<\|endoftext\|>", and transformers\' WhisperTokenizer has'):
        check_loaded(read_tokenizer(folder), folder)
    other = tmp_path / "other"  # beside the model it is read as the model's class, which has no such normaliser
    other.mkdir()
    document = document_of(DEMO["whisper"])
    document["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    new = read_tokenizer(other)
    check_loaded(new, other)
    with pytest.raises(ConfigError, match=r"WhisperTokenizer splits text in other tokens than its TokenizersBackend, "):
        check_loaded(new, DEMO["whisper"])
