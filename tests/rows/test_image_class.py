"""Rows of one image with a class, a text or nothing: what is taken, what is refused and how it is counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.data import MEANINGS
from forebay.errors import ManifestError, TextError
from forebay.rows.manifest import MediaPlace, Record, meaning_named
from forebay.rows.meanings.image_class import EXCLUDED, OneImage, Untyped, labels_of, with_labels, written_label
from forebay.rows.row_pieces import RowSink
from forebay.steps.text.label import Label, Labels

ONE_IMAGE = ("labels", "captions", "images")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def said(meaning: str, fields: dict[str, Any], *, count: int = 1, unknown: set[str] | None = None) -> str:
    """Returns the text of a row of so many images."""
    record = Record(fields, {"image": [MediaPlace(path="a.jpg")] * count})
    found = meaning_named(meaning).row(record, unknown=set() if unknown is None else unknown, home=Path())
    assert found.items == record.media
    assert found.text is not None
    return found.text


def label_text(value: Any) -> str:
    return said("labels", {"label": value})


def listed(*labels: Any, declared: tuple[str, ...] | None = None) -> tuple[list[str], Labels]:
    """Returns the texts of rows, and what their column is."""
    rows = pa.table({"text": pa.chunked_array([pa.array(list(map(label_text, labels)), pa.large_string())])})
    made = with_labels(rows, [declared])
    found = labels_of(made)
    assert found is not None
    return made["text"].to_pylist(), found


def numbers(*labels: Any, classes: tuple[str, ...] | None = None, declared: tuple[str, ...] | None = None) -> list[Any]:
    """Returns the stored values of rows; the reason of one that has none."""
    texts, found = listed(*labels, declared=declared)
    encoder = replace(Label(classes=classes), found=found).opened(Path(), merge_size=None)
    made: list[Any] = []
    for text in texts:
        try:
            values = encoder.encode(text, [(1, 1)], sample_id="x")["labels"].tolist()
            made.append(values if found.is_multi else values[0])
        except TextError as err:
            made.append(err.reason)
    return made


def test_every_prompt_of_one_image_is_read_so() -> None:
    alone = {name for name, facts in MEANINGS.items() if facts.prompt in ("label", "plain", "none")}
    assert alone == {*ONE_IMAGE}
    assert all(isinstance(meaning_named(name), OneImage) for name in alone)


@given(JSON, st.sampled_from(ONE_IMAGE))
def test_any_value_is_a_row_or_has_a_reason(value: Any, meaning: str) -> None:
    rows = RowSink(meaning_named(meaning))
    for fields in ({"label": value, "text": value}, {"label": [value, value]}):
        rows.take(Record(fields, {"image": [MediaPlace(path="a.jpg")]}), where="a")
    part = rows.part(0)
    table = part.rows.append_column("text", part.texts.column())
    assert {*table["reason"].to_pylist()} <= {None, "no_label", "bad_label", "no_text", "bad_text"}
    assert len(table) == 2
    for kind, reason in zip(table["kind"].to_pylist(), table["reason"].to_pylist(), strict=True):
        assert kind == (None if reason is None else "excluded" if reason in EXCLUDED else "failed")
    good = table.filter(pa.compute.is_valid(table["text"]))
    if meaning == "labels" and len(good):
        texts = with_labels(good, [None])["text"].to_pylist()
        assert all(text.encode() for text in texts)


@given(st.lists(st.sampled_from(["a", "b", "10", "9", "é", "[x]"]), min_size=1, max_size=12))
def test_classes_are_the_different_names_sorted(names: list[str]) -> None:
    wanted = sorted(set(names))
    assert listed(*names)[1] == Labels(names=tuple(wanted), count=len(wanted))
    assert numbers(*names) == [wanted.index(name) for name in names]


def test_integers_keep_their_numbers_and_texts_are_names() -> None:
    assert listed(3, 0, 7) == (["3", "0", "7"], Labels(names=None, count=8))
    assert numbers(3, 0, 7) == [3, 0, 7]
    assert numbers(*[True, 2.0, np.float64(3).item()]) == [1, 2, 3]
    # A string is a name, whatever it looks like; beside a name, an integer is one too.
    assert numbers("10", "9", "1") == [1, 2, 0]
    assert listed(3, "cat")[1].names == ("3", "cat")


def test_texts_without_a_type_are_integers_where_all_are() -> None:
    assert numbers(Untyped("3"), Untyped("10")) == [3, 10]
    assert numbers(Untyped("3"), 10) == [3, 10]
    assert listed(Untyped("007"), Untyped("8"))[1].names == ("007", "8")
    assert numbers(Untyped(" cat "), Untyped("8")) == [1, 0]
    assert [written_label(text) for text in ('["a", "b"]', "[a", "[1]", "x")] == [["a", "b"], "[a", [1], "x"]


def test_lists_are_several_classes() -> None:
    texts, found = listed(["cat", "dog"], [], "bird")
    assert texts == ['["cat", "dog"]', "[]", '["bird"]']
    assert found == Labels(names=("bird", "cat", "dog"), count=3, is_multi=True)
    assert numbers(["cat", "dog"], [], "bird") == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert numbers([0, 2], 1) == [[1, 0, 1], [0, 1, 0]]
    assert numbers(["cat"], ["mouse"], classes=("dog", "cat")) == [[0, 1], "unknown_label"]


def test_declared_classes_are_in_their_order_and_those_of_a_config_go_before() -> None:
    assert numbers("dog", "cat", declared=("dog", "mouse", "cat")) == [0, 2]
    assert numbers("dog", 9, declared=("dog", "cat")) == [0, "unknown_label"]
    assert numbers("dog", "cat", classes=("cat", "dog"), declared=("dog", "cat")) == [1, 0]
    # An integer is a number in `classes`, unless these are integers.
    assert numbers(1, 0, 2, classes=("cat", "dog")) == [1, 0, "unknown_label"]
    assert numbers(7, 3, 5, classes=("3", "7")) == [1, 0, "unknown_label"]
    with pytest.raises(ManifestError, match=r"declare different classes \((a, b; c|c; a, b)\)"):
        with_labels(pa.table({"text": pa.array([], pa.large_string())}), [("a", "b"), ("c",)])


def test_texts_that_were_given_for_classes_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    listed(*(f"a photo of {number}" for number in range(1_001)))
    assert "each of 1001 rows has a class of its own, the first is 'a photo of 0'" in caplog.text
    caplog.clear()
    listed(*range(1_001))
    assert caplog.text == ""


def test_an_unknown_class_is_named_with_the_nearest() -> None:
    encoder = replace(Label(classes=("cat", "dog")), found=Labels(names=("cta",), count=1)).opened(
        Path(), merge_size=None
    )
    with pytest.raises(TextError, match=r"x: label 'cta' is none of the 2 of text.classes; did you mean 'cat'"):
        encoder.encode("cta", [], sample_id="x")


@pytest.mark.parametrize("value", [None, "", -1, math.nan])
def test_a_row_without_a_class_is_excluded(value: Any) -> None:
    with pytest.raises(TextError, match="no label") as caught:
        label_text(value)
    assert caught.value.reason == "no_label"
    assert caught.value.reason in EXCLUDED


@pytest.mark.parametrize("value", [0.5, {"a": 1}, [["a"]], [None], [-1], 1 << 31, 10**40, "\ud800", math.inf])
def test_what_is_no_class_is_bad(value: Any) -> None:
    with pytest.raises(TextError, match=r"its label is .* wanted a name, an integer from 0") as caught:
        label_text(value)
    assert caught.value.reason == "bad_label"


@pytest.mark.parametrize(
    ("value", "reason"), [(None, "no_text"), (" \n", "no_text"), (["a", "b"], "bad_text"), (3, "bad_text")]
)
def test_a_row_without_a_text_is_excluded_and_what_is_none_is_bad(value: Any, reason: str) -> None:
    with pytest.raises(TextError, match="text") as caught:
        said("captions", {"text": value})
    assert caught.value.reason == reason


@pytest.mark.parametrize("meaning", ONE_IMAGE)
@pytest.mark.parametrize("count", [0, 2])
def test_a_row_has_one_image(meaning: str, count: int) -> None:
    with pytest.raises(
        TextError, match=f"has {count} images, and a row of {meaning.replace('captions', 'texts')} has one"
    ):
        said(meaning, {"label": 1, "text": "a"}, count=count)


def test_other_fields_are_named() -> None:
    unknown: set[str] = set()
    assert not said("images", {"id": 1, "image": "x", "label": "a", "mood": None}, unknown=unknown)
    assert unknown == {"label"}


def test_the_keys_of_shards_know_what_numbers_depend_on() -> None:
    def identity(found: Labels, classes: tuple[str, ...] | None = None) -> str:
        return json.dumps(replace(Label(classes=classes), found=found).identity())

    two = Labels(names=("a", "b"), count=2)
    different = [
        identity(two),
        identity(Labels(names=("a", "b", "c"), count=3)),
        identity(Labels(names=("b", "a"), count=2)),
        identity(Labels(names=None, count=2)),
        identity(Labels(names=("a", "b"), count=2, is_multi=True)),
        identity(two, ("a", "b")),
        identity(two, ("b", "a")),
    ]
    assert len({*different}) == len(different)
    # A name that is not in the config has no number, so it moves none.
    assert identity(two, ("a",)) == identity(Labels(names=("a", "z"), count=2), ("a",))
    # Integers are as they are, however many there are.
    assert identity(Labels(names=None, count=2)) == identity(Labels(names=None, count=9))
    assert Label().compared() == {"classes": None, "version": 1}
