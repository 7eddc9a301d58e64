"""The golden cache of format version 3, with kept columns, opens for ever, and is made in the same bytes today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from forebay.errors import CacheMismatchError
from forebay.store.cache import open_cache
from forebay.store.layout import FieldSpec, format_of
from forebay.store.metadata import read_metadata
from forebay.store.seal import seal
from forebay.store.verify import verify_folder
from tests.golden.make_v3_kept import COLUMNS, FIELDS, FOLDER, NAME, contents, main, write_shards

CACHE = FOLDER / NAME


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "expected.json").read_bytes())
    return document


def test_every_sample_and_the_row_table_are_what_was_written(expected: dict[str, Any]) -> None:
    cache = open_cache(CACHE, verify="open")
    assert (cache.key, cache.metadata["format_version"]) == (expected["key"], 3)
    for index, wanted in enumerate(expected["samples"]):
        sample = cache.read(index)
        assert list(sample) == list(wanted)
        for name, numbers in wanted.items():
            np.testing.assert_array_equal(sample[name], np.array(numbers, np.int32), strict=True)
    table: Any = cache.samples
    assert {name: table[name].to_pylist() for name in expected["table"]} == expected["table"]
    kinds = {"snr": pa.float64(), "speaker": pa.large_string(), "takes": pa.int64()}
    assert {name: table.schema.field(name).type for name in COLUMNS} == kinds
    assert verify_folder(CACHE).problems == []


def test_values_of_kept_columns_are_categories() -> None:
    cache = open_cache(CACHE)
    found = cache.categories("speaker")
    assert found is not None
    assert [found[0][code] for code in found[1].tolist()] == ["anna", "", "", "दीपा"]
    found = cache.categories("takes")
    assert found is not None
    assert [found[0][code] for code in found[1].tolist()] == ["1", "2", str(-(2**62)), ""]


def test_a_reader_of_the_older_form_says_that_it_is_newer() -> None:
    with pytest.raises(CacheMismatchError, match=r"format_version is 3, this forebay reads up to 2; upgrade forebay"):
        read_metadata(CACHE, format_version=2)


def test_only_fields_that_hold_nulls_need_the_newer_form() -> None:
    assert format_of({"text"}, FIELDS) == 3
    assert format_of({"text"}, [field for field in FIELDS if not field.nullable]) == 2
    plain = FieldSpec(name="x", dtype="str")
    assert "nullable" not in plain.to_json()
    for field in (plain, *FIELDS):
        assert FieldSpec.from_json(field.to_json()) == field


def test_it_would_be_made_in_the_same_bytes_today(tmp_path: Path) -> None:
    for (path, entry), (golden_path, golden) in zip(
        write_shards(tmp_path), open_cache(CACHE).shard_entries("text"), strict=True
    ):
        assert path.read_bytes() == golden_path.read_bytes()
        assert entry == golden
    made = contents(tmp_path / "scratch")
    files = {name: (CACHE / name).read_bytes() for name in made.files}  # parquet's bytes are pyarrow's
    again = type(made)(fields=made.fields, shards=made.shards, arrays=made.arrays, files=files, document=made.document)
    seal(tmp_path / NAME, again, scratch=tmp_path / "scratch")
    assert (tmp_path / NAME / "metadata.json").read_bytes() == (CACHE / "metadata.json").read_bytes()


def test_it_is_never_made_again() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 40_000
    with pytest.raises(FileExistsError, match="v3_kept"):
        main()
