"""The benchmarks run, and what they build and time is what they say. `make bench-tiny` runs the rest of them."""

from __future__ import annotations

import importlib
import io
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile as sf

from benchmarks import data, report, source_kinds, stages
from forebay import load_config
from forebay.rows.list_rows import list_rows
from forebay.rows.meanings.own import meaning_of


@pytest.fixture
def bench_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `bench-data` folder of the test's own."""
    for name in ("data", "formats", "opening", "stages", "writer"):
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "BENCH_DATA", tmp_path)
    return tmp_path


def test_corpus_is_what_its_manifest_says(bench_data: Path) -> None:
    corpus = data.corpus(hours=0.02, num_tars=2)
    assert 72 <= corpus.audio_s < 72 + 30
    assert {row["tar_path"] for row in corpus.rows} == {"train-00000.tar", "train-00001.tar"}
    for row in corpus.rows:
        with tarfile.open(corpus.folder / row["tar_path"]) as tar:
            file = tar.extractfile(row["tar_member_name"])
            assert file is not None
            info = sf.info(io.BytesIO(file.read()))
        assert (info.samplerate, info.channels, info.subtype) == (16_000, 1, "PCM_16")
        assert info.frames == round(row["duration_s"] * 16_000)
        assert row["transcript"]


def test_corpus_is_built_once_and_is_the_same_bytes_again(
    bench_data: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.corpus(hours=0.01, num_tars=1).folder
    assert data.corpus(hours=0.01, num_tars=1).folder == first
    assert [path.name for path in bench_data.iterdir()] == [first.name]
    monkeypatch.setattr(data, "BENCH_DATA", tmp_path_factory.mktemp("again"))
    second = data.corpus(hours=0.01, num_tars=1).folder
    assert second != first
    for name in ("train-00000.tar", "train.parquet"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_durations_of_five_hours_follow_the_histogram() -> None:
    seconds = data._lengths(5) / 16_000
    assert 5 * 3600 <= seconds.sum() < 5 * 3600 + 30
    found = np.histogram(seconds, [1, 3, 5, 7, 10, 15, 20, 30])[0] / len(seconds)
    assert np.abs(found - [0.126, 0.248, 0.137, 0.353, 0.131, 0.005, 0.0001]).max() < 0.03


@pytest.mark.parametrize("name", ["stages", "writer"])
def test_a_tiny_run_reports_every_row(
    name: str, bench_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.main(["--tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["cores"] >= 1
    rows: list[dict[str, Any]] = document["stages" if name == "stages" else "writers"]
    if name == "stages":
        assert [row["stage"] for row in rows] == [*stages.STAGES, "total", "without a clock"]
        assert sum(row["share_percent"] for row in rows[: len(stages.STAGES)]) == pytest.approx(100)
    else:
        assert rows[0]["writer"] == "forebay, write_shard"
        assert rows[0]["cpu_times_ours"] == rows[0]["wall_times_ours"] == 1
        assert len(rows) == 4
    assert not [path for path in bench_data.iterdir() if not path.name.startswith("speech-")]


def test_writer_says_that_its_peer_is_missing(
    bench_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = importlib.import_module("benchmarks.writer")
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.setattr(writer.importlib.util, "find_spec", lambda name: None)
    assert writer.main(["--tiny", "--json"]) == 0
    printed = capsys.readouterr()
    assert "webdataset is not installed" in printed.err
    assert [row["writer"] for row in json.loads(printed.out)["writers"]][1] == "tarfile, npy"


def test_a_stage_inside_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("benchmarks.stages.time.process_time", lambda: next(now))
    clock = stages.Clock()
    inner = clock.around("resample", lambda: None)
    clock.around("decode", inner)()
    assert clock.cpu_s["decode"] == 1.0 + 4.0
    assert clock.cpu_s["resample"] == 2.0


def test_tables_align_numbers_to_the_right_and_names_to_the_left() -> None:
    rows = [{"what": "ours", "ms": 1.23456, "n": 7}, {"what": "theirs", "ms": 1234.5, "n": None}]
    assert report.table(rows) == "what      ms  n\nours    1.23  7\ntheirs  1234"


def test_a_ratio_is_the_median_within_rounds() -> None:
    assert report.ratio([2.0, 40.0, 3.0], [1.0, 10.0, 3.0]) == 2.0


@pytest.fixture
def one_peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The formats' benchmark with the one peer that needs nothing but pyarrow, one that fails, one that is absent."""
    formats = importlib.import_module("benchmarks.formats")
    absent = SimpleNamespace(NAME="Nobody's format", REQUIRES=("nobodys_format",))
    monkeypatch.setitem(sys.modules, "benchmarks.peers.nobody", absent)
    broken = SimpleNamespace(NAME="A broken format", REQUIRES=(), write=lambda *_: 1 / 0)
    monkeypatch.setitem(sys.modules, "benchmarks.peers.broken", broken)
    monkeypatch.setattr(formats, "PEERS", ("forebay_cache", "broken", "arrow_by_hand", "nobody"))
    return formats


@pytest.mark.wide
def test_formats_are_checked_measured_and_named(
    one_peer: Any, bench_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_peer.main(["--tiny", "--json", "--plot", str(tmp_path / "plots" / "formats.png")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["peers"] == [
        {"format": "Nobody's format", "not installed": "nobodys_format"},
        {"format": "A broken format", "failed": "ZeroDivisionError: division by zero"},
    ]
    writers = {one_peer.SHARDS, one_peer.SHARDS_AT_ONCE, one_peer.OURS, one_peer.ARROW}
    assert {row["format"] for row in document["writing"]} == writers
    assert {row["target"] for row in document["targets"]} >= {">= 2.5", "<= 2", ">= 0.85", ">= 6", "<= 1.005"}
    assert {row["reached"] for row in document["targets"]} <= {"yes", "no"}
    assert (tmp_path / "plots" / "formats.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.wide
def test_a_format_that_gives_other_values_does_not_count(
    one_peer: Any, bench_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrow = importlib.import_module("benchmarks.peers.arrow_by_hand")
    read = arrow._Reader.read

    def wrong(self: Any, index: int) -> Any:
        sample = read(self, index)
        return {**sample, "ids": sample["ids"] + (index == 5)}

    monkeypatch.setattr(arrow._Reader, "read", wrong)
    assert one_peer.main(["--tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (failed,) = [row for row in document["peers"] if "failed" in row and row["format"] == one_peer.ARROW]
    assert "zero-copy by hand, workload A: ids of sample 5 is not what was written" in failed["failed"]
    assert one_peer.ARROW not in {row["format"] for row in document["writing"]}
    assert one_peer.main(["--tiny"]) == 0  # as a table, too


@pytest.mark.wide
def test_opening_reports_its_three_parts(bench_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opening = importlib.import_module("benchmarks.opening")
    assert opening.main(["--tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["samples"] for row in document["a large cache"]] == [1000, 3000, 30000, "slope, a million"]
    assert document["a random sample"][0]["p50 x"] == 1


@pytest.mark.wide
def test_the_list_of_many_caches_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_ls = importlib.import_module("benchmarks.cache_ls")
    monkeypatch.setattr(cache_ls, "BENCH_DATA", tmp_path)
    assert cache_ls.main(["--tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["caches"] for row in document["own work"]} == {20}
    assert [row["note"] for row in document["notes"]] == ["first", "again"]


def test_the_tars_of_scale_are_what_tarfile_reads(tmp_path: Path) -> None:
    scale = importlib.import_module("benchmarks.scale")
    config = scale.write_source(tmp_path / "source", num_rows=2 * scale.CLIPS_PER_TAR)
    assert config.read_text().startswith('name = "scale"')
    manifest = pq.read_table(config.parent / "train.parquet")
    assert manifest["tar_path"].unique().to_pylist() == ["train-00000.tar", "train-00001.tar"]
    with tarfile.open(config.parent / "train-00001.tar") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == manifest["tar_member_name"].to_pylist()[: scale.CLIPS_PER_TAR]
    assert {member.size for member in members} == {8}


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_loop_and_the_bare_loop_take_turns_on_the_same_losses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_loop = importlib.import_module("benchmarks.train_loop")
    assert train_loop.main(["--tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["loop"] for row in document["steps"]] == ["forebay train", "bare torch"]
    assert all(row["cpu_ms_a_step"] > 0 for row in document["steps"])
    steps = train_loop.Bare.steps
    monkeypatch.setattr(train_loop.Bare, "steps", lambda bare, batches: steps(bare, batches[:1]))
    with pytest.raises(SystemExit, match=r"step 2: the loop has loss .*, the bare loop has"):
        train_loop.main(["--tiny"])


def test_calibrate_counts_the_trials_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate = importlib.import_module("benchmarks.calibrate")
    assert calibrate.main(["--tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["trials"]
    assert len(rows) == len(calibrate.DEVICES)
    assert {row["reached"] for row in rows} == {"yes"}
    assert max(row["trials, most"] for row in rows) <= 6


@pytest.mark.parametrize("kind", [kind for kind in source_kinds.KINDS if kind not in ("python", "conversations")])
def test_every_kind_of_source_has_the_same_rows(tmp_path: Path, kind: str) -> None:
    """A build alone runs code, and conversations have other texts."""
    config = load_config(source_kinds.write_kind(kind, tmp_path / "source", num_rows=3))
    found = list_rows(config.source, meaning_of(config), cache_root=tmp_path / "caches")
    assert found.rows["text"].to_pylist() == [source_kinds.said(number) for number in range(3)]
    assert not len(found.rejected)
    durations = [0.0] * 3 if kind == "text" else [0.002] * 3
    assert found.rows["duration_s"].to_pylist() == durations
