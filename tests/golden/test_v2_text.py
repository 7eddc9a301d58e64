"""The golden cache of format version 2, texts without media, opens for ever, and is made in the same bytes today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.errors import CacheMismatchError
from forebay.preprocess.groups import GROUPS
from forebay.store.cache import open_cache
from forebay.store.layout import FORMAT_VERSION, format_of
from forebay.store.metadata import read_metadata
from forebay.store.verify import verify_folder
from tests.golden.make_v2_text import FOLDER, NAME, contents, main, write_shards

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


def test_it_is_whole_without_media() -> None:
    assert verify_folder(CACHE).problems == []
    assert not (CACHE / "media").exists()
    assert not (CACHE / "media.npy").exists()


def test_a_reader_of_the_older_form_says_that_it_is_newer() -> None:
    with pytest.raises(CacheMismatchError, match="format_version is 2, this forebay reads up to 1; upgrade forebay"):
        read_metadata(CACHE, format_version=1)


def test_it_would_be_made_in_the_same_bytes_today(tmp_path: Path) -> None:
    assert (FORMAT_VERSION, format_of({"text"}), format_of(GROUPS)) == (3, 2, 1)
    for (path, entry), (golden_path, golden) in zip(
        write_shards(tmp_path), open_cache(CACHE).shard_entries("text"), strict=True
    ):
        assert path.read_bytes() == golden_path.read_bytes()
        assert entry == golden
    from forebay.store.seal import seal

    made = contents(tmp_path / "scratch")
    files = {name: (CACHE / name).read_bytes() for name in made.files}  # parquet's bytes are pyarrow's
    again = type(made)(fields=made.fields, shards=made.shards, arrays=made.arrays, files=files, document=made.document)
    seal(tmp_path / NAME, again, scratch=tmp_path / "scratch")
    assert (tmp_path / NAME / "metadata.json").read_bytes() == (CACHE / "metadata.json").read_bytes()


def test_it_is_never_made_again() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 30_000
    with pytest.raises(FileExistsError, match="v2_text"):
        main()
