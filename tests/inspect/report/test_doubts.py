"""Duplicates and transcripts that do not fit are found by columns and stored hashes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.inspect.report.columns import Columns
from forebay.inspect.report.doubts import content_codes, doubts_of, fit_scores
from forebay.store.cache import open_cache
from tests.inspect.conftest import Built
from tests.store_factory import make_cache


def columns_of(folder: Path) -> Columns:
    return Columns(open_cache(folder))


def test_equal_values_are_found_whatever_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(make_cache(tmp_path, num_samples=9, failed_rows=(2,)))
    codes = content_codes(columns.cache)
    stored = [
        columns.cache.shard("media", int(slot) >> 32).hashes[int(slot) & 0xFFFFFFFF] for slot in columns.cache.slots
    ]
    assert codes.tolist() == [int(found) for found in stored]
    assert doubts_of(columns).exact.num_groups == 0
    hashes = codes.copy()
    hashes[[1, 4, 7]] = hashes[1]
    hashes[[3, 5]] = hashes[3]
    monkeypatch.setattr("forebay.inspect.report.doubts.content_codes", lambda cache: hashes)
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
    monkeypatch.setattr("forebay.inspect.report.doubts.content_codes", lambda cache: np.array([1, 1, 1, 1]))
    found = doubts_of(columns)
    assert found.exact.shown == ((0, 1, 2, 3),)
    assert found.near.num_groups == 0
    monkeypatch.setattr("forebay.inspect.report.doubts.content_codes", lambda cache: np.array([1, 1, 2, 3]))
    assert doubts_of(columns).near.shown == ((0, 2, 3),)


def test_a_transcript_is_out_of_range_in_its_own_language(tmp_path: Path) -> None:
    columns = columns_of(make_cache(tmp_path, num_samples=90))
    rng = np.random.default_rng(0)
    codes = np.repeat([0, 1, 2], [40, 40, 10]).astype(np.int32)
    rate = np.where(codes == 0, 12.0, 30.0) * np.exp(rng.normal(size=90) * 0.1)
    rate[5], rate[50], rate[85] = 30.0, 12.0, np.nan
    columns.__dict__.update(rate=rate, languages=(["", "en", "ja"], codes))
    z = fit_scores(columns)
    assert z is not None
    assert np.flatnonzero(np.abs(np.nan_to_num(z)) > 3.5).tolist() == [5, 50]
    assert z[5] > 0 > z[50]
    assert np.isnan(z[85])


def test_nothing_is_measured_of_texts_alone(tmp_path: Path) -> None:
    columns = columns_of(make_cache(tmp_path, features="none"))
    found = doubts_of(columns)
    assert found.z is None
    assert found.misfits.tolist() == []
