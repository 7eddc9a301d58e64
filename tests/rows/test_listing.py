from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.config import SourceConfig
from forebay.errors import SampleError, TarError
from forebay.preprocess.pool import Pool
from forebay.rows.eligible import FIRST_WAVE
from forebay.rows.manifest import ROW_SCHEMA
from forebay.rows.media_reader import MediaReader
from forebay.rows.reader import LocateTask
from tests.rows.helpers import SPEECH, audio, ids, read, read_manifest, read_rows, write_manifest, write_tar

DEMO = [("tar", "train.parquet"), ("filelist", "train.tsv"), ("webdataset", "train-*.tar")]


@pytest.mark.parametrize(("kind", "name"), DEMO)
def test_processes_and_the_built_in_map_give_the_same_rows(tmp_path: Path, kind: Any, name: str) -> None:
    source = SourceConfig(kind=kind, manifest=str(SPEECH / name))
    alone = read_rows(source, cache_root=tmp_path / "a")
    with Pool(2) as pool:
        together = read_rows(source, cache_root=tmp_path / "b", map_=pool.map)
    assert together.rows.equals(alone.rows)
    assert together.rejected.equals(alone.rejected)
    assert alone.rows.schema == ROW_SCHEMA


def test_the_three_kinds_over_the_demo_tars_agree(tmp_path: Path) -> None:
    columns = ["sample_id", "member", "offset", "size", "duration_s", "language", "text"]
    tables = [read(kind, SPEECH / name, root=tmp_path).rows.select(columns) for kind, name in DEMO]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


class CountingMap:
    """Counts the tasks that were asked for."""

    def __init__(self) -> None:
        self.tasks: list[LocateTask] = []

    def __call__(self, function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterable[Any]:
        self.tasks += tasks
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(function, tasks))


def many_tars(folder: Path, count: int) -> Path:
    for i in range(count):
        write_tar(folder / f"{i:02d}.tar", {f"{i}-{j}.flac": audio(160 * (1 + j)) for j in range(3)})
    rows = [
        {"tar_path": f"{i:02d}.tar", "tar_member_name": f"{i}-{j}.flac", "duration_s": 0.01 * (1 + j)}
        for i in range(count)
        for j in range(3)
    ]
    return write_manifest(folder / "m.parquet", rows)


@pytest.mark.parametrize("max_samples", [1, 3, 4, 24, 25, 36, 100])
@pytest.mark.parametrize("kind", ["tar", "webdataset"])
@pytest.mark.few
def test_max_samples_gives_the_first_rows_and_opens_no_more_than_it_needs(
    tmp_path: Path, kind: Any, max_samples: int
) -> None:
    path = many_tars(tmp_path / "d", 12)
    entry = path if kind == "tar" else path.parent
    everything = read(kind, entry, root=tmp_path, min_duration_s=0.015)
    counting = CountingMap()
    source = SourceConfig(kind=kind, manifest=str(entry), min_duration_s=0.015, max_samples=max_samples)
    some = read_rows(source, cache_root=tmp_path, map_=counting)
    assert some.rows.equals(everything.rows.slice(0, max_samples))
    assert len(counting.tasks) == (FIRST_WAVE if max_samples <= 2 * FIRST_WAVE else 12)
    last = some.rows["row"][-1].as_py()
    expected = [row for row in everything.rejected["row"].to_pylist() if max_samples >= 24 or row < last]
    assert some.rejected["row"].to_pylist() == expected
    assert len(some.files) >= 1 + some.rows["file"][-1].as_py()
    if kind == "tar":
        assert len(some.files) == 1 + some.rows["file"][-1].as_py()


def test_filtered_rows_cost_no_look_into_their_tar(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio()})
    rows = [
        {"tar_path": "a.tar", "tar_member_name": "x.flac", "language": "en"},
        {"tar_path": "gone.tar", "tar_member_name": "y.flac", "language": "fr"},
    ]
    counting = CountingMap()
    manifest = str(write_manifest(tmp_path / "m.parquet", rows))
    source = SourceConfig(kind="tar", manifest=manifest, languages=("en",))
    result = read_rows(source, cache_root=tmp_path, map_=counting)
    assert [task.name for task in counting.tasks] == ["a.tar"]
    assert result.counts() == {"excluded": {"language": 1}, "failed": {}}
    assert not result.absent


def test_durations_from_headers_are_filtered_too(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(160), "y.flac": audio(1600), "z.flac": audio(16_000)})
    manifest = read(
        "webdataset", tmp_path / "a.tar", root=tmp_path, min_duration_s=0.05, max_duration_s=0.5, overlong="drop"
    )
    assert ids(manifest) == ["y"]
    assert manifest.counts()["excluded"] == {"too_long": 1, "too_short": 1}


def test_the_first_stage_opens_no_tar(tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "m.parquet", [{"tar_path": "gone.tar", "tar_member_name": "x.flac"}])
    manifest = read_manifest(SourceConfig(kind="tar", manifest=str(path)))
    assert ids(manifest) == ["x"]
    assert manifest.rows["size"].to_pylist() == [-2]


def test_a_reader_tells_a_bad_sample_from_a_bad_tar(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(), "y.flac": audio()})
    manifest = read("webdataset", tmp_path / "a.tar", root=tmp_path)
    row = manifest.rows.to_pylist()[1]
    with (
        MediaReader(manifest.files, max_open=1, max_bytes=10) as reader,
        pytest.raises(SampleError, match="allowed are 10"),
    ):
        reader(row["file"], row["offset"], row["size"])
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[: row["offset"] + 5])
    with MediaReader(manifest.files, max_open=1) as reader, pytest.raises(TarError, match=r"a\.tar: wanted \d+ bytes"):
        reader(row["file"], row["offset"], row["size"])
