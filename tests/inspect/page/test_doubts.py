"""Duplicates and transcripts that do not fit are found by columns and stored hashes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from forebay.inspect.checks.judge import _speed
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.measured import Measured
from forebay.inspect.page.page_samples import PageColumns, content_codes, doubts_of
from forebay.store.cache import open_cache
from tests.inspect.conftest import Built
from tests.store_factory import RATE_HZ, make_cache


def columns_of(folder: Path) -> PageColumns:
    return PageColumns(open_cache(folder))


def test_equal_values_are_found_whatever_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(make_cache(tmp_path, num_samples=9, failed_rows=(2,)))
    codes = content_codes(columns.cache)
    stored = [
        columns.cache.shard("audio", int(slot) >> 32).hashes[int(slot) & 0xFFFFFFFF] for slot in columns.cache.slots
    ]
    assert codes.tolist() == [int(found) for found in stored]
    assert doubts_of(columns).exact.num_groups == 0
    hashes = codes.copy()
    hashes[[1, 4, 7]] = hashes[1]
    hashes[[3, 5]] = hashes[3]
    monkeypatch.setattr("forebay.inspect.page.page_samples.content_codes", lambda cache: hashes)
    found = doubts_of(columns).exact
    assert (found.num_groups, found.num_samples) == (2, 5)
    assert found.shown == ((1, 4, 7), (3, 5))


def test_conversations_are_equal_by_their_images_and_tokens(photos: Built) -> None:
    cache = open_cache(photos.folder)
    codes = content_codes(cache)
    assert len(set(codes.tolist())) == len(cache)
    names = cache.table(["images", "text"])
    alike = {(row["images"], row["text"]) for row in names.to_pylist()}
    assert len(alike) == len(cache)


def test_one_text_of_about_one_length_is_a_near_duplicate(tmp_path: Path) -> None:
    texts = ("A text of some length.", "a text of some length. ", "Another text of its own.", "yes", "yes")
    columns = columns_of(make_cache(tmp_path, num_samples=5, texts=texts))
    seconds = np.array([4.0, 4.05, 4.0, 4.0, 4.0])
    columns.__dict__["seconds"] = seconds
    assert doubts_of(columns).near.shown == ((0, 1),)
    columns.__dict__["seconds"] = np.array([4.0, 4.2, 4.0, 4.0, 4.0])
    assert doubts_of(columns).near.num_groups == 0


def test_equal_samples_are_not_called_near_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(make_cache(tmp_path, num_samples=4, texts=("A text of some length.",)))
    columns.__dict__["seconds"] = np.full(4, 4.0)
    monkeypatch.setattr("forebay.inspect.page.page_samples.content_codes", lambda cache: np.array([1, 1, 1, 1]))
    found = doubts_of(columns)
    assert found.exact.shown == ((0, 1, 2, 3),)
    assert found.near.num_groups == 0
    monkeypatch.setattr("forebay.inspect.page.page_samples.content_codes", lambda cache: np.array([1, 1, 2, 3]))
    assert doubts_of(columns).near.shown == ((0, 2, 3),)


def test_the_page_and_lint_judge_transcripts_by_the_same_limits(tmp_path: Path) -> None:
    """Every transcript that lint finds, and no other: fast, slow, far from its language, in a small one, filtered."""
    columns = columns_of(make_cache(tmp_path, num_samples=90))
    rng = np.random.default_rng(0)
    codes = np.repeat([0, 1, 2], [40, 40, 10]).astype(np.int32)
    texts = ["so many\u00a0words "] * 90  # 11 characters with a sound, 14 in all
    seconds = np.where(codes == 0, 1.4, 1.1) * np.exp(rng.normal(size=90) * 0.1)
    seconds[5], seconds[50], seconds[85], seconds[3], seconds[60], seconds[70] = 0.2, 15.0, 0.2, 30.0, 15.0, 5.0
    texts[45], texts[3] = "", " a\u2003b\x1c"
    texts[70] = "so many words" * 9
    chunked = pa.chunked_array([pa.array(texts, pa.large_string())])
    languages = ["en", "ja", "de"]
    columns.__dict__.update(texts=chunked, seconds=seconds, languages=(languages, codes))
    for kept in (None, np.arange(90) != 60):
        facts = {
            "seconds": seconds,
            "chars": np.array([len("".join(text.split())) for text in texts]),
        }
        measured = Measured(
            name="",
            is_raw=False,
            rate_hz=RATE_HZ,
            ids=pa.chunked_array([pa.array(map(str, range(90)))]),
            places=np.arange(90),
            files=[""],
            file_of=np.zeros(90, np.int64),
            languages=languages,
            language_of=codes.astype(np.int64),
            facts=facts,
            dropped=None if kept is None else ~kept,
        )
        # Of the checks those that compare characters with seconds: the others need facts that are not given here.
        expected = {each.row: each.check for each in _speed(measured, Limits()) if kept is None or kept[each.row]}
        found = doubts_of(columns, kept=kept)
        assert dict(found.checks) == expected
        assert sorted(found.misfits.tolist()) == sorted(expected)
        assert set(expected.values()) == {"too_many_chars", "too_few_chars", "chars_outlier"}
        assert (expected[5], expected[85], expected[3], expected[50]) == (
            *("too_many_chars", "too_many_chars"),
            *("too_few_chars", "chars_outlier"),
        )
        assert (60 in expected) == (kept is None)


def test_nothing_is_measured_of_texts_alone(tmp_path: Path) -> None:
    columns = columns_of(make_cache(tmp_path, features="none"))
    found = doubts_of(columns)
    assert found.z is None
    assert found.misfits.tolist() == []
