"""The table of samples: its columns, its order, and what is found in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from forebay.inspect.facts import bucket_range
from forebay.inspect.page.overview import PageRows, _rank
from forebay.inspect.page.page_samples import Doubts, PageColumns, doubts_of
from forebay.inspect.page.serve import PageSearch, Query
from forebay.inspect.page.words import number_text, recipe_lines, rejected_ids, shortened, time_text
from forebay.store.cache import open_cache
from tests.inspect.conftest import Built
from tests.store_factory import TEXTS, make_cache


def rows_of(folder: Path) -> PageRows:
    columns = PageColumns(open_cache(folder))
    return PageRows(columns=columns, doubts=doubts_of(columns))


def test_rows_of_speech_have_what_is_known_of_it(tmp_path: Path) -> None:
    rows = rows_of(make_cache(tmp_path))
    assert [column.name for column in rows.shown] == [
        "#",
        "id",
        "language",
        "seconds",
        "tokens",
        "characters/s",
        "fit",
        "text",
    ]
    first, last = rows.of([0, 5])
    assert (first[0], first[1], first[2], first[-1]) == (0, "clip-0000", "en", TEXTS[0])
    assert (last[0], last[2]) == (5, "")


def test_rows_of_photos_say_the_conversation(photos: Built) -> None:
    rows = rows_of(photos.folder)
    assert [column.name for column in rows.shown] == ["#", "id", "tokens", "patches", "images", "text"]
    texts = [row[-1] for row in rows.of(range(len(rows.columns)))]
    assert any(text.startswith("[image 0] ") and " / Number 0." in text for text in texts)


def test_kept_columns_are_columns_of_the_table(tmp_path: Path) -> None:
    columns = PageColumns(open_cache(make_cache(tmp_path, num_samples=3)))
    snr = pa.array([1.5, None, float("inf")])
    table = pa.table({"speaker": ["b", None, "a"], "snr": snr, "take": pa.array([2**60, 1, 2])})
    columns.__dict__.update(kept=["speaker", "snr", "take"], kept_table=table)
    rows = PageRows(columns=columns, doubts=doubts_of(columns))
    names = [column.name for column in rows.shown]
    place = names.index("speaker")
    assert names[place : place + 3] == ["speaker", "snr", "take"]
    assert [row[place : place + 3] for row in rows.of([0, 1, 2])] == [
        ["b", 1.5, str(2**60)],
        [None, None, 1],
        ["a", "inf", 2],
    ]
    search = PageSearch(rows=rows)
    assert [row[0] for row in search.answer(Query(by=place))["rows"]] == [2, 0, 1]
    assert [row[0] for row in search.answer(Query(by=place, is_falling=True))["rows"]] == [0, 2, 1]
    assert [row[0] for row in search.answer(Query(by=place + 2))["rows"]] == [1, 2, 0]


@pytest.mark.parametrize("column", range(8))
def test_every_column_sorts_both_ways(tmp_path: Path, column: int) -> None:
    rows = rows_of(make_cache(tmp_path, num_samples=20))
    search = PageSearch(rows=rows)

    def cells(*, is_falling: bool) -> list[object]:
        found = search.answer(Query(by=column, is_falling=is_falling))
        assert found["total"] == 20
        return [row[column] for row in found["rows"] if row[column] is not None]

    rising, falling = cells(is_falling=False), cells(is_falling=True)
    assert rising == sorted(rising)  # type: ignore[type-var]
    assert falling == sorted(rising, reverse=True)  # type: ignore[type-var]


def test_numbers_of_axes_and_buckets_have_two_decimals() -> None:
    assert [number_text(value) for value in (0, 3, 1234.5678, 12.3456, 0.1049, 0.0012)] == [
        *("0", "3", "1,234.57", "12.35", "0.1", "0.0012")
    ]
    assert bucket_range({"range": "0.7346-12.3456s"}) == "0.73-12.35s"
    assert bucket_range({"range": "3.0-5.5s"}) == "3.0-5.5s"


def test_ranks_follow_text_and_numbers_and_leave_null_last() -> None:
    ranks = _rank(pa.chunked_array([pa.array(["b", None]), pa.array(["a", "b"])]))
    assert ranks[[0, 2, 3]].tolist() == [1, 0, 1]
    assert np.isnan(ranks[1])
    numbers = _rank(pa.chunked_array([pa.array([3, None, 1])]))
    assert np.argsort(numbers, kind="stable").tolist() == [2, 0, 1]


def test_a_file_lists_what_is_doubtful_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.inspect.page.overview.MAX_ROWS", 20)
    columns = PageColumns(open_cache(make_cache(tmp_path, num_samples=60)))
    found = doubts_of(columns)
    doubts = Doubts(exact=found.exact, near=found.near, z=found.z, misfits=np.array([41, 17]))
    listed = PageRows(columns=columns, doubts=doubts).chosen([3, 59])
    assert {3, 17, 41, 59} <= set(listed.tolist())
    assert len(listed) <= 20


def test_the_list_of_what_was_left_out_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"
    good = '{"sample_id": "a%d", "kind": "failed", "reason": "corrupt_audio"}\n'
    lines = ["no json\n", "[1]\n", '{"kind": 1}\n', *(good % i for i in range(9)), "\xff\n"]
    path.write_bytes("".join(lines).encode("latin-1"))
    assert rejected_ids(path, wanted=2) == {("failed", "corrupt_audio"): [f"a{i}" for i in range(6)]}
    assert rejected_ids(path, wanted=0) == {}
    assert rejected_ids(tmp_path / "nothing", wanted=1) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (89, "89.0 s"), (600, "10.0 min"), (7200, "2.0 h"), (7.2e6, "2,000 h")]
)
def test_time_is_said_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_texts_are_cut_with_a_word() -> None:
    assert shortened("abc", 3) == "abc"
    assert shortened("abcdef", 3) == "ab… (6 characters)"


def test_a_recipe_is_said_in_words_whatever_it_holds() -> None:
    recipe = {"source": {"kind": 3, "languages": ["de", 4]}, "audio": None, "text": {}, "own": {"a": [1], "b": None}}
    said = dict(recipe_lines(recipe))
    assert said["source"] == "rows of kind 3, split unknown; languages de, 4"
    assert said["own"] == "a [1]"
    assert "audio" not in said
