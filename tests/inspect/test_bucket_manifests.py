from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from forebay import cli
from forebay.config import Config, SourceConfig
from forebay.errors import ConfigError
from forebay.inspect.bucket_manifests import BucketRows, write_bucket_manifests
from forebay.store.cache import Cache, open_cache
from forebay.store.sources import StoredSource, dump_sources
from forebay.store.tar_index import index_path
from tests.store_factory import RATE_HZ, make_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    folder = make_cache(tmp_path / "caches", num_samples=9, max_duration_s=8.0)
    stored = StoredSource(name="train-00000.tar", entry=0, listed=False, xxh3_128="0" * 32, size_bytes=1)
    (folder / "sources.parquet").write_bytes(dump_sources([stored]))
    return open_cache(folder)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    source = SourceConfig(kind="tar", manifest=str(tmp_path / "raw" / "train.parquet"))
    return Config(name="prompts", source=source)


def halves(cache: Cache, *, edge_s: float = 3.0) -> list[BucketRows]:
    is_long = cache.lengths["num_samples"] >= edge_s * RATE_HZ
    return [
        BucketRows(low_s=0.0, high_s=edge_s, samples=np.flatnonzero(~is_long)[::-1]),
        BucketRows(low_s=edge_s, high_s=8.5, samples=np.flatnonzero(is_long)),
        BucketRows(low_s=8.5, high_s=12.0, samples=np.array([], dtype=np.int64)),
    ]


def test_every_row_is_in_the_table_of_its_bucket(tmp_path: Path, cache: Cache, config: Config) -> None:
    buckets = halves(cache)
    written = write_bucket_manifests(cache, tmp_path / "out" / "new", buckets, config=config, seed=7)
    assert [path.name for path in written] == [
        "b_0_3.parquet",
        "b_3_8.5.parquet",
        "b_8.5_12.parquet",
        "bucket_config.json",
    ]
    tables = [pq.read_table(path) for path in written[:3]]
    for number, (bucket, table) in enumerate(zip(buckets, tables, strict=True)):
        assert table.column_names == [
            *cache.samples.column_names,
            "tar_path",
            "tar_index_path",
            "bucket_id",
            "bucket_max_duration",
        ]
        assert table.select(cache.samples.column_names).equals(cache.samples.take(bucket.samples))
        assert set(table["bucket_id"].to_pylist()) <= {number}
        assert set(table["bucket_max_duration"].to_pylist()) <= {bucket.high_s}
    tar = tmp_path / "raw" / "train-00000.tar"
    assert set(tables[0]["tar_path"].to_pylist()) == {str(tar)}
    assert set(tables[0]["tar_index_path"].to_pylist()) == {str(index_path(tar, cache_root=config.cache_root))}


def test_bucket_config_counts_what_is_written(tmp_path: Path, cache: Cache, config: Config) -> None:
    written = write_bucket_manifests(cache, tmp_path / "out", halves(cache), config=config, seed=7)
    document = json.loads(written[-1].read_text())
    durations_s = np.asarray(cache.lengths["num_samples"]) / RATE_HZ
    assert (document["total_samples"], document["seed"]) == (9, 7)
    assert document["total_hours"] == pytest.approx(durations_s.sum() / 3600, abs=1e-6)
    first, second, empty = document["buckets"]
    assert [bucket["range"] for bucket in document["buckets"]] == ["0.0-3.0s", "3.0-8.5s", "8.5-12.0s"]
    assert [bucket["bucket_id"] for bucket in document["buckets"]] == [0, 1, 2]
    own = durations_s[durations_s < 3]
    assert first["samples"] == len(own)
    assert first["mean_duration"] == pytest.approx(own.mean(), abs=1e-4)
    assert first["max_duration"] == pytest.approx(own.max(), abs=1e-4)
    assert first["pct_hours"] + second["pct_hours"] == pytest.approx(100, abs=1e-3)
    assert first["pct_samples"] + second["pct_samples"] == pytest.approx(100, abs=1e-3)
    assert (empty["samples"], empty["hours"], empty["mean_duration"], empty["max_duration"]) == (0, 0.0, 0.0, 0.0)


def test_rows_that_came_from_no_tar_have_none(tmp_path: Path, cache: Cache, config: Config) -> None:
    stored = StoredSource(name="train.jsonl", entry=0, listed=True, xxh3_128="0" * 32, size_bytes=1)
    (cache.folder / "sources.parquet").write_bytes(dump_sources([stored]))
    written = write_bucket_manifests(cache, tmp_path / "out", halves(cache), config=config, seed=7)
    assert set(pq.read_table(written[0])["tar_index_path"].to_pylist()) == {None}


def test_writing_again_replaces_the_tables(tmp_path: Path, cache: Cache, config: Config) -> None:
    first = write_bucket_manifests(cache, tmp_path / "out", halves(cache), config=config, seed=7)
    content = [path.read_bytes() for path in first]
    second = write_bucket_manifests(cache, tmp_path / "out", halves(cache), config=config, seed=7)
    assert [path.read_bytes() for path in second] == content
    with pytest.raises(
        ConfigError, match=r"out holds b_0_3\.parquet, which is none of the buckets .*name an empty folder"
    ):
        write_bucket_manifests(cache, tmp_path / "out", halves(cache, edge_s=4.0), config=config, seed=7)


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path, cache: Cache, config: Config) -> None:
    with pytest.raises(ConfigError, match=r"lies inside the cache .* which is sealed"):
        write_bucket_manifests(cache, cache.folder / "buckets", halves(cache), config=config, seed=7)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; name a folder"):
        write_bucket_manifests(cache, tmp_path / "file", halves(cache), config=config, seed=7)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The demo's config, and the root under which its cache is sealed."""
    arguments = [str(ROOT / "configs" / "demo_waveform.toml"), "--cache-root", str(tmp_path_factory.mktemp("caches"))]
    assert cli.main(["preprocess", *arguments, "--no-progress", "--workers", "1"]) == 0
    return arguments


def test_the_command_writes_real_recordings_shuffled(
    demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(name: str, *options: str) -> tuple[dict[str, Any], list[list[str]]]:
        capsys.readouterr()
        assert cli.main(["inspect", *demo, "--bucket-manifests", str(tmp_path / name), "--json", *options]) == 0
        document = json.loads(capsys.readouterr().out)
        tables = [pq.read_table(path) for path in document["written"] if path.endswith(".parquet")]
        assert all(Path(tar).is_file() for table in tables for tar in table["tar_path"].to_pylist())
        return document["bucket_config.json"], [table["sample_id"].to_pylist() for table in tables]

    config, first = written("a")
    assert (config["seed"], config["total_samples"]) == (42, sum(map(len, first)))
    assert [bucket["samples"] for bucket in config["buckets"]] == list(map(len, first))
    assert written("b") == (config, first)
    other_config, other = written("c", "--seed", "43")
    assert other_config == {**config, "seed": 43}
    assert other != first
    assert [sorted(ids) for ids in other] == [sorted(ids) for ids in first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "3"], "--seed goes with --bucket-manifests"),
        (
            [
                "--bucket-manifests",
                "x",
                "--set",
                'plan.kind="window"',
                "--set",
                "plan.edges_s=[3, 5, 7, 10, 15, 20, 30]",
            ],
            'plan.kind = "window" has no buckets',
        ),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    demo: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["inspect", *demo, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_cache_folder_has_no_plan(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(cache.folder), "--bucket-manifests", "x"]) == 2
    assert "needs a config with a [plan] section" in capsys.readouterr().err
