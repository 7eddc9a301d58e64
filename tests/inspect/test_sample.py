from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import CacheCorruptError, CacheError
from forebay.inspect.inspect_lines import sample_lines
from forebay.inspect.sample import Sample, read_sample
from forebay.store.cache import open_cache
from tests.store.trees import flip
from tests.store_factory import TEXTS, make_cache


def test_every_sample_has_the_row_of_the_row_table_and_the_tensors_of_the_cache(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=9, failed_rows=[0, 6]))
    rows = cache.samples.to_pylist()
    for index, row in enumerate(rows):
        sample = read_sample(cache, index, config=None)
        extra = {name: sample.row[name] for name in ("shard", "shard_row")}
        wanted = {name: row[name] for name in row if name not in {"index", "num_frames", "num_tokens"}}
        assert sample.row == {**wanted, **extra}
        assert int(cache.slots[index]) == extra["shard"] << 32 | extra["shard_row"]
        for name, value in cache.read(index).items():
            assert np.array_equal(sample.tensors[name], value)


def test_the_document_has_dtype_shape_and_range_of_every_tensor(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, keep_waveform=True))
    document = read_sample(cache, 2, config=None).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    for name, value in cache.read(2).items():
        about = document["fields"][name]
        assert (about["dtype"], about["shape"]) == (value.dtype.name, list(value.shape))
        assert (about["min"], about["max"]) == (value.min(), value.max())
        assert about["mean"] == pytest.approx(value.astype(np.float64).mean())


def test_what_is_no_number_is_null_in_json_and_named_in_a_terminal() -> None:
    tensors = {
        "a": np.array([1.0, np.nan], np.float32),
        "b": np.array([-np.inf, 0.0]),
        "c": np.zeros((0, 80), np.float16),
    }
    sample = Sample(index=0, row={"sample_id": "x"}, tensors=tensors, labels=None)
    fields = sample.to_json()["fields"]
    assert [fields[name]["min"] for name in "abc"] == [None, None, None]
    assert (fields["b"]["max"], fields["c"]["shape"]) == (0.0, [0, 80])
    lines = list(sample_lines(sample))
    assert [line.split()[-3:] for line in lines[-3:]] == [["nan"] * 3, ["-inf", "0", "-inf"], ["-"] * 3]


def test_the_mean_of_a_long_float16_clip_does_not_overflow() -> None:
    sample = Sample(index=0, row={}, tensors={"a": np.full((3000, 80), 60_000, np.float16)}, labels=None)
    assert sample.to_json()["fields"]["a"]["mean"] == np.float16(60_000)


@pytest.mark.parametrize("index", [-1, 6, 10**12])
def test_an_index_outside_the_cache_is_named_with_those_that_are_there(tmp_path: Path, index: int) -> None:
    cache = open_cache(make_cache(tmp_path))
    with pytest.raises(CacheError, match=rf"--sample {index}: .* has 6 samples \(0 to 5\); name one of them"):
        read_sample(cache, index, config=None)


def test_an_empty_cache_has_no_sample(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=0))
    with pytest.raises(CacheError, match=r"has 0 samples \(none\)"):
        read_sample(cache, 0, config=None)


def test_a_damaged_sample_is_not_shown(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    cache = open_cache(folder)
    sample = cache.read(0)["input_features"]
    flip(folder / "audio/00000.tdz", (folder / "audio/00000.tdz").read_bytes().index(sample.tobytes()[:64]))
    with pytest.raises(CacheCorruptError, match=r"audio/00000\.tdz row 0 .* stored xxh3-64"):
        read_sample(open_cache(folder), 0, config=None)


def test_a_terminal_shows_row_fields_and_ids(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, sample_ids=[f"{os.fsdecode(bytes([0xE9]))}{i}" for i in range(6)]))
    lines = list(sample_lines(read_sample(cache, 1, config=None)))
    assert lines[0] == "sample 1"
    assert lines[1] == "  sample_id          \\udce91"
    assert f"  text               {TEXTS[1]}" in lines
    assert "labels: 5 tokens, the first 1 are the prefix (not trained on)" in lines
    assert "  ids      1, 3, 4, 5, 2" in lines
    assert "a cache does not hold its tokenizer; run: forebay inspect CONFIG --sample I" in " ".join(lines)
    assert all(line.isprintable() and len(line) <= 100 for line in lines)


def test_a_sample_without_text_has_no_labels(tmp_path: Path) -> None:
    sample = read_sample(open_cache(make_cache(tmp_path, tokenizer=None)), 0, config=None)
    assert sample.labels is None
    assert not [line for line in sample_lines(sample) if line.startswith("labels")]


def test_long_texts_and_many_ids_are_wrapped(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, texts=["word " * 200], input_ids=[list(range(1, 300))])
    lines = list(sample_lines(read_sample(open_cache(folder), 0, config=None)))
    assert max(map(len, lines)) <= 100
    assert " ".join(lines).count("word") == 200
    assert any(line.endswith("64, ...") for line in lines)
