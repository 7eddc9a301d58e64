"""Parquet, read back by pyarrow, pandas and datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.inspect.export import ExportOptions, export
from forebay.store.cache import Cache, open_cache
from tests.golden.make_v4_patches import FOLDER as VISION
from tests.golden.make_v4_patches import name as vision_name
from tests.store_factory import make_cache


def exported(cache: Cache, out: Path, **options: Any) -> list[Path]:
    """The parquet files of a cache."""
    export(cache, ExportOptions(form="parquet", out=out, progress=False, **options))
    return sorted(out.glob("*.parquet"))


def read(cell: Any) -> Any:
    """A cell of pandas, lists of arrays in it, as an array."""
    is_nested = getattr(cell, "dtype", None) == np.dtype(object) and len(cell)
    return np.stack([read(each) for each in cell]) if is_nested else cell


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Nine samples in three shards, one row of which failed."""
    root = tmp_path_factory.mktemp("cache")
    return open_cache(make_cache(root, num_samples=9, failed_rows=[3], keep_waveform=True))


def test_every_column_and_tensor_comes_back_in_pyarrow(cache: Cache, tmp_path: Path) -> None:
    (path,) = exported(cache, tmp_path / "out")
    assert path.name == "prompts-train-000000.parquet"
    table = pq.read_table(path)
    assert table.select(cache.samples.column_names).equals(cache.samples)
    assert table.schema.field("input_features").type == pa.list_(pa.list_(pa.float16(), 80))
    assert table.schema.field("waveform").type == pa.list_(pa.int16())
    for index in range(len(cache)):
        for name, value in cache.read(index).items():
            found = table[name][index].values
            flat = found.flatten() if value.ndim == 2 else found
            assert flat.to_numpy(zero_copy_only=False).dtype == value.dtype
            assert np.array_equal(flat.to_numpy(zero_copy_only=False), value.reshape(-1))
            assert len(found) == len(value)


def test_a_row_group_is_a_shard_and_the_schema_says_how_the_samples_were_made(cache: Cache, tmp_path: Path) -> None:
    (path,) = exported(cache, tmp_path / "out")
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    assert [group.num_rows for group in groups] == [3, 4, 2]
    assert {group.column(i).compression for group in groups for i in range(group.num_columns)} == {"ZSTD"}
    about = json.loads(file.schema_arrow.metadata[b"forebay"])
    assert (about["key"], about["recipe"], about["num_samples"]) == (cache.key, cache.metadata["recipe"], 9)
    assert about["constants"] == cache.constants
    assert about["fields"]["input_features"] == {"dtype": "float16", "shape": ["n", 80]}
    assert list(about["fields"]) == list(cache.read(0))


def test_pandas_reads_the_same_values(cache: Cache, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (path,) = exported(cache, tmp_path / "out")
    frame = pandas.read_parquet(path.parent)
    assert frame["sample_id"].tolist() == cache.samples["sample_id"].to_pylist()
    for index in range(len(cache)):
        for name, value in cache.read(index).items():
            assert np.array_equal(read(frame[name][index]), value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_datasets_reads_the_same_values_from_the_folder(cache: Cache, tmp_path: Path) -> None:
    import datasets

    exported(cache, tmp_path / "out", shard_size_mb=1)
    datasets.disable_progress_bars()
    found = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "hf"))["train"]
    assert found["text"][:] == cache.samples["text"].to_pylist()
    for index in (0, 8):
        for name, value in cache.read(index).items():
            assert np.array_equal(np.array(found[index][name], value.dtype).reshape(value.shape), value)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_images_are_patches_and_their_grids(tmp_path: Path, codec: Any) -> None:
    cache = open_cache(VISION / vision_name(codec))
    (path,) = exported(cache, tmp_path / "out")
    table = pq.read_table(path)
    assert table.select(cache.samples.column_names).equals(cache.samples)
    assert table.schema.field("patches").type == pa.list_(pa.list_(pa.list_(pa.uint8(), 12)))
    for index in range(len(cache)):
        sample = cache.read(index)
        assert table["patches"][index].as_py() == [image.tolist() for image in sample["patches"]]
        assert table["image_grid_thw"][index].as_py() == sample["image_grid_thw"].tolist()
        assert table["input_ids"][index].as_py() == sample["input_ids"].tolist()
    assert not {"image_rows", "patches_zstd"} & set(table.column_names)


def test_texts_alone_are_their_table_and_tokens(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, features="none"))
    (path,) = exported(cache, tmp_path / "out")
    table = pq.read_table(path)
    assert table.select(cache.samples.column_names).equals(cache.samples)
    assert table["input_ids"].to_pylist() == [cache.read(i)["input_ids"].tolist() for i in range(len(cache))]


def test_what_is_in_memory_is_bounded_and_samples_are_never_divided(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.inspect.export._GROUP_BYTES", 1)
    (path,) = exported(cache, tmp_path / "out")
    assert pq.ParquetFile(path).num_row_groups == 9
    assert pq.read_table(path).select(cache.samples.column_names).equals(cache.samples)


def test_a_tensor_without_elements_comes_back(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, input_ids=[[], [5]]))
    (path,) = exported(cache, tmp_path / "out")
    assert pq.read_table(path)["input_ids"].to_pylist() == [[], [5]] * 3
