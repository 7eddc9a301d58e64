"""The golden cache of texts alone of format 4 opens for ever, and is made in the same bytes today."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.store.cache import open_cache
from forebay.store.seal import seal, verify_folder
from tests.golden.make_v4_text import FOLDER, NAME, contents, main, write_shards

CACHE = FOLDER / NAME


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "expected.json").read_bytes())
    return document


def test_every_sample_and_the_row_table_are_what_was_written(expected: dict[str, Any]) -> None:
    cache = open_cache(CACHE, verify="open")
    assert (cache.key, cache.groups, cache.num_shards) == (expected["key"], ("text",), 2)
    for index, wanted in enumerate(expected["samples"]):
        sample = cache.read(index)
        assert list(sample) == list(wanted)
        for name, numbers in wanted.items():
            np.testing.assert_array_equal(sample[name], np.array(numbers, np.int32), strict=True)
        assert cache.sample_id(index) == expected["table"]["sample_id"][index]
    assert {name: cache.samples[name].to_pylist() for name in expected["table"]} == expected["table"]
    cache.will_need(range(len(cache)))


def test_it_is_whole_without_items() -> None:
    assert verify_folder(CACHE).problems == []
    assert {path.stem for path in CACHE.iterdir()} == {"lengths", "metadata", "rejected", "slots", "sources", "text"}


def test_it_would_be_made_in_the_same_bytes_today(tmp_path: Path) -> None:
    for (path, entry), (golden_path, golden) in zip(
        write_shards(tmp_path), open_cache(CACHE).shard_entries("text"), strict=True
    ):
        assert path.read_bytes() == golden_path.read_bytes()
        assert entry == golden
    made = contents(tmp_path / "scratch")
    files = {name: (CACHE / name).read_bytes() for name in made.files}  # parquet's bytes are pyarrow's
    seal(tmp_path / NAME, replace(made, files=files), scratch=tmp_path / "scratch")
    assert (tmp_path / NAME / "metadata.json").read_bytes() == (CACHE / "metadata.json").read_bytes()


def test_it_is_never_made_again() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 30_000
    with pytest.raises(FileExistsError, match="v4_text"):
        main()
