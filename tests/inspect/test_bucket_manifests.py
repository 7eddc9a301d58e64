from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import cli
from forebay.errors import ConfigError
from forebay.inspect.bucket_manifests import BucketRows, write_bucket_manifests
from forebay.store.cache import Cache, open_cache
from forebay.tar.index import export_json, json_path
from forebay.tar.scan import scan_tar
from tests.preprocess.corpus import write_tar
from tests.store_factory import RATE_HZ, make_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(make_cache(tmp_path / "caches", num_samples=9, max_duration_s=8.0))


@pytest.fixture
def places(tmp_path: Path, cache: Cache) -> pa.Table:
    """Places of the samples of `cache`, and of another sample: two tars, of which one has an exported index."""
    folder = tmp_path / "raw"
    folder.mkdir()
    ids = ["another", *reversed(cache.samples["sample_id"].to_pylist())]
    tars = [str(folder / f"{i % 2}.tar") for i in range(len(ids))]
    for tar in tars[:2]:
        write_tar(Path(tar), {"x.flac": b""})
    export_json(scan_tar(tars[0]), json_path(tars[0]))
    names = [f"clips/{sample_id}.flac" for sample_id in ids]
    return pa.table({"sample_id": pa.array(ids, pa.large_string()), "tar_path": tars, "tar_member_name": names})


def halves(cache: Cache, *, edge_s: float = 3.0) -> list[BucketRows]:
    is_long = cache.lengths["num_audio_samples"] >= edge_s * RATE_HZ
    return [
        BucketRows(low_s=0.0, high_s=edge_s, samples=np.flatnonzero(~is_long)[::-1]),
        BucketRows(low_s=edge_s, high_s=8.5, samples=np.flatnonzero(is_long)),
        BucketRows(low_s=8.5, high_s=12.0, samples=np.array([], dtype=np.int64)),
    ]


def test_every_row_is_in_the_table_of_its_bucket(tmp_path: Path, cache: Cache, places: pa.Table) -> None:
    buckets = halves(cache)
    written = write_bucket_manifests(cache, tmp_path / "out" / "new", buckets, places=places, seed=7)
    assert [path.name for path in written] == [
        "b_0_3.parquet",
        "b_3_8.5.parquet",
        "b_8.5_12.parquet",
        "bucket_config.json",
    ]
    tables = [pq.read_table(path) for path in written[:3]]
    for bucket, path, table in zip(buckets, written, tables, strict=False):
        assert table.column_names == [
            *cache.samples.column_names,
            "transcript",
            "tar_path",
            "tar_member_name",
            "tar_index_path",
            "bucket_id",
            "bucket_max_duration",
        ]
        assert table.select(cache.samples.column_names).equals(cache.samples.take(bucket.samples))
        assert set(table["bucket_id"].to_pylist()) <= {path.stem}
        assert table["transcript"].equals(table["text"])
        assert set(table["bucket_max_duration"].to_pylist()) <= {bucket.high_s}
    rows = pa.concat_tables(tables).to_pylist()
    assert {row["tar_member_name"] for row in rows} == {f"clips/{row['sample_id']}.flac" for row in rows}
    tar, other = (str(tmp_path / "raw" / name) for name in ("0.tar", "1.tar"))
    assert {(row["tar_path"], row["tar_index_path"]) for row in rows} == {(tar, f"{tar}.index.json"), (other, None)}


def test_indices_are_left_out_where_none_is_exported_or_current(tmp_path: Path, cache: Cache, places: pa.Table) -> None:
    os.utime(f"{tmp_path}/raw/0.tar.index.json", ns=(0, 0))
    written = write_bucket_manifests(cache, tmp_path / "out", halves(cache), places=places, seed=7)
    assert "tar_index_path" not in pq.read_schema(written[0]).names


def test_a_sample_without_a_place_is_named(tmp_path: Path, cache: Cache, places: pa.Table) -> None:
    missing = cache.samples["sample_id"][8].as_py()
    with pytest.raises(ConfigError, match=f"the manifest lists no sample '{missing}' of "):
        write_bucket_manifests(cache, tmp_path / "out", halves(cache), places=places.slice(2), seed=7)
    assert not (tmp_path / "out" / "b_0_3.parquet").exists()


def test_bucket_config_counts_what_is_written(tmp_path: Path, cache: Cache, places: pa.Table) -> None:
    written = write_bucket_manifests(cache, tmp_path / "out", halves(cache), places=places, seed=7)
    document = json.loads(written[-1].read_text())
    durations_s = np.asarray(cache.lengths["num_audio_samples"]) / RATE_HZ
    assert (document["total_samples"], document["seed"]) == (9, 7)
    assert document["total_hours"] == pytest.approx(durations_s.sum() / 3600, abs=1e-6)
    first, second, empty = document["buckets"]
    assert [bucket["range"] for bucket in document["buckets"]] == ["0.0-3.0s", "3.0-8.5s", "8.5-12.0s"]
    ids = [set(pq.read_table(path)["bucket_id"].to_pylist()) for path in written[:2]]
    assert [{bucket["bucket_id"]} for bucket in document["buckets"][:2]] == ids
    assert [bucket["name"] for bucket in document["buckets"]] == [path.stem for path in written[:3]]
    own = durations_s[durations_s < 3]
    assert first["samples"] == len(own)
    assert first["mean_duration"] == pytest.approx(own.mean(), abs=1e-4)
    assert first["max_duration"] == pytest.approx(own.max(), abs=1e-4)
    assert first["pct_hours"] + second["pct_hours"] == pytest.approx(100, abs=1e-3)
    assert first["pct_samples"] + second["pct_samples"] == pytest.approx(100, abs=1e-3)
    assert (empty["samples"], empty["hours"], empty["mean_duration"], empty["max_duration"]) == (0, 0.0, 0.0, 0.0)


def test_rows_that_came_from_no_tar_have_none(tmp_path: Path, cache: Cache) -> None:
    written = write_bucket_manifests(cache, tmp_path / "out", halves(cache), places=None, seed=7)
    table = pq.read_table(written[0])
    assert set(table["tar_path"].to_pylist()) == set(table["tar_member_name"].to_pylist()) == {None}
    assert "tar_index_path" not in table.column_names


def test_writing_again_replaces_the_tables(tmp_path: Path, cache: Cache, places: pa.Table) -> None:
    first = write_bucket_manifests(cache, tmp_path / "out", halves(cache), places=places, seed=7)
    content = [path.read_bytes() for path in first]
    second = write_bucket_manifests(cache, tmp_path / "out", halves(cache), places=places, seed=7)
    assert [path.read_bytes() for path in second] == content
    with pytest.raises(
        ConfigError, match=r"out holds b_0_3\.parquet, which is none of the buckets .*name an empty folder"
    ):
        write_bucket_manifests(cache, tmp_path / "out", halves(cache, edge_s=4.0), places=places, seed=7)


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path, cache: Cache, places: pa.Table) -> None:
    with pytest.raises(ConfigError, match=r"lies inside the cache .* which is sealed"):
        write_bucket_manifests(cache, cache.folder / "buckets", halves(cache), places=places, seed=7)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; name a folder"):
        write_bucket_manifests(cache, tmp_path / "file", halves(cache), places=places, seed=7)


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
                'plan={kind = "window", batch_size = 4}',
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
