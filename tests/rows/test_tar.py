"""`kind = "tar"`: parquet manifests over tars of clips, and of images."""

from __future__ import annotations

import errno
import math
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile as sf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay import load_config
from forebay.config import SourceConfig
from forebay.errors import ManifestError, TarError
from forebay.rows import reader as members_module
from forebay.rows.list_rows import RowListing, locate_tasks
from forebay.rows.media_reader import MediaReader
from forebay.rows.readers.tar_lists import locate_tar
from forebay.store.cache import open_cache
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo
from tests.rows.helpers import SPEECH, audio, heard, ids, read, read_manifest, rejected, write_manifest, write_tar
from tests.rows.pictures import converse, images_of, picture, read_conversations, source_of


def test_demo_rows_are_those_of_a_plain_loop_over_tarfile(tmp_path: Path) -> None:
    manifest = read("tar", SPEECH / "train.parquet", root=tmp_path)
    rows = manifest.rows.to_pylist()
    expected = pq.read_table(SPEECH / "train.parquet").to_pylist()
    assert len(rows) == len(expected) > 40
    assert not len(manifest.rejected)
    by_id = {row["sample_id"]: row for row in rows}
    reader = MediaReader(manifest.files, max_open=2)
    for entry in expected:
        row = by_id[entry["sample_id"]]
        with tarfile.open(SPEECH / entry["tar_path"]) as tar:
            member = tar.getmember(entry["tar_member_name"])
            data = tar.extractfile(member)
            assert data is not None
            assert (row["offset"], row["size"]) == (member.offset_data, member.size)
            assert reader(row["file"], row["offset"], row["size"]) == data.read()
        assert manifest.files[row["file"]].name == entry["tar_path"]
        assert (row["text"], row["language"], row["duration_s"]) == (
            entry["transcript"], entry["language"], entry["duration_s"],
        )  # fmt: skip
    assert manifest.files[0].name == "train.parquet"
    assert [file.listed for file in manifest.files] == [True, False, False, False]


def test_missing_durations_come_from_headers_exactly(tmp_path: Path) -> None:
    lengths = [1, 799, 16_000, 12_345]
    write_tar(
        tmp_path / "a.tar",
        {f"{n}.{kind.lower()}": audio(n, kind=kind) for kind in ("FLAC", "WAV") for n in lengths},
    )
    names = [f"{n}.{kind}" for kind in ("flac", "wav") for n in lengths]
    rows = [{"tar_member_name": name, "duration_s": None, "sample_id": name} for name in names]
    path = write_manifest(tmp_path / "m.parquet", rows, duration_s=pa.float64())
    manifest = read("tar", path, root=tmp_path)
    reader = MediaReader(manifest.files, max_open=2)
    for row in manifest.rows.to_pylist():
        (tmp_path / "clip").write_bytes(reader(row["file"], row["offset"], row["size"]))
        info = sf.info(str(tmp_path / "clip"))
        assert row["duration_s"] == info.frames / info.samplerate


def test_a_stated_duration_is_taken_as_it_is(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(1600), "y.flac": audio(1600)})
    path = write_manifest(
        tmp_path / "m.parquet",
        [{"tar_member_name": "x.flac", "duration_s": 7}, {"tar_member_name": "y.flac", "duration_s": None}],
    )
    assert read("tar", path, root=tmp_path).rows["duration_s"].to_pylist() == [7.0, 0.1]


def test_rows_of_a_tar_stand_together_in_order_of_first_appearance(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_tar(tmp_path / f"{name}.tar", {f"{name}{i}.flac": audio() for i in range(3)})
    order = ["b0", "a0", "b1", "a2", "a1", "b2"]
    rows = [{"tar_path": f"{name[0]}.tar", "tar_member_name": f"{name}.flac"} for name in order]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert ids(manifest) == ["b0", "b1", "b2", "a0", "a2", "a1"]
    assert [file.name for file in manifest.files] == ["m.parquet", "b.tar", "a.tar"]
    assert manifest.rows["group"].to_pylist() == [1, 1, 1, 2, 2, 2]
    assert manifest.rows["row"].to_pylist() == list(range(6))


def test_ids_keep_folders_and_lose_the_extension_only(tmp_path: Path) -> None:
    names = ["en/x.flac", "fr/x.flac", "./y.1.flac", "z", ".hidden"]
    write_tar(tmp_path / "a.tar", {name: audio() for name in names})
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": name} for name in names])
    assert ids(read("tar", path, root=tmp_path)) == ["en/x", "fr/x", "y.1", "z", ".hidden"]


def test_a_leading_dot_slash_does_not_matter_on_either_side(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"./x.flac": audio(), "y.flac": audio(800)})
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": "x.flac"}, {"tar_member_name": "./y.flac"}])
    sizes = read("tar", path, root=tmp_path).rows["size"].to_pylist()
    assert sizes == [len(audio()), len(audio(800))]


def test_equal_default_ids_of_two_tars_lose_nothing(tmp_path: Path) -> None:
    for folder in ("en", "fr"):
        write_tar(tmp_path / folder / "000.tar", {"x.flac": audio(), "y.flac": audio()})
    rows = [{"tar_path": f"{f}/000.tar", "tar_member_name": f"{n}.flac"} for f in ("en", "fr") for n in "xy"]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert ids(manifest) == ["x", "y", "fr/000/x", "fr/000/y"]
    assert not len(manifest.rejected)


def test_equal_given_ids_and_equal_members_fail_as_duplicates(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {f"{n}.flac": audio() for n in "xyz"})
    rows = [
        {"tar_member_name": f"{n}.flac", "sample_id": i} for n, i in [("x", "s"), ("y", "s"), ("z", None), ("z", None)]
    ]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert ids(manifest) == ["s", "z"]
    assert rejected(manifest) == [("s", "failed", "duplicate_id"), ("z", "failed", "duplicate_id")]
    assert "sample id s occurs before, at position 0" in manifest.rejected["message"][0].as_py()


def test_a_missing_member_fails_its_row_alone(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio()})
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": "x.flac"}, {"tar_member_name": "no.flac"}])
    manifest = read("tar", path, root=tmp_path)
    assert ids(manifest) == ["x"]
    assert list(manifest.failed()) == [
        ("no", "missing_member", "a.tar has no member no.flac; correct the manifest or the tar")
    ]


def test_a_refused_member_fails_by_the_reason_of_the_index(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("x.flac")
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere.flac"
        tar.addfile(link)
    write_tar(tmp_path / "b.tar", {"y.flac": audio(), "z.flac": audio(16_000)})
    os.truncate(tmp_path / "b.tar", 4096)
    rows = [{"tar_path": f"{t}.tar", "tar_member_name": f"{n}.flac"} for t, n in ("ax", "by", "bz")]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert rejected(manifest)[0] == ("x", "failed", "symlink")
    assert rejected(manifest)[-1] == ("z", "failed", "truncated")


def test_an_absent_or_broken_tar_fails_its_rows_and_no_others(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio()})
    (tmp_path / "broken.tar").write_bytes(b"no tar" * 1000)
    (tmp_path / "empty.tar").write_bytes(b"")
    tars = ["gone.tar", "a.tar", "broken.tar", "empty.tar", "a.tar/x"]
    rows = [{"tar_path": tar, "tar_member_name": "x.flac", "sample_id": tar} for tar in tars]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert ids(manifest) == ["a.tar"]
    assert manifest.counts() == {"excluded": {}, "failed": {"unreadable_tar": 3, "empty_file": 1}}
    assert [manifest.files[n].name for n in manifest.absent] == ["gone.tar", "a.tar/x"]
    assert str(tmp_path / "gone.tar") in manifest.rejected["message"][0].as_py()


def test_an_error_of_the_disk_is_no_property_of_a_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_disk(path: str, *, cache_root: str) -> Any:
        raise TarError(f"cannot read tar {path}") from OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(members_module, "load_index", broken_disk)
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": "x.flac"}])
    with pytest.raises(TarError, match=r"cannot read tar .*a\.tar"):
        read("tar", path, root=tmp_path)


def test_a_clip_without_any_duration_fails(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": b"not audio"})
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": "x.flac", "duration_s": math.nan}])
    manifest = read("tar", path, root=tmp_path)
    assert rejected(manifest) == [("x", "failed", "unknown_duration")]


@pytest.mark.parametrize("seconds", [-1.0, math.inf, -math.inf])
def test_an_impossible_duration_fails_its_row(tmp_path: Path, seconds: float) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(), "y.flac": audio()})
    rows: list[dict[str, Any]] = [{"tar_member_name": "x.flac", "duration_s": seconds}, {"tar_member_name": "y.flac"}]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert ids(manifest) == ["y"]
    assert rejected(manifest) == [("x", "failed", "bad_metadata")]


@pytest.mark.parametrize(
    ("types", "names"),
    [
        ({"tar_path": pa.dictionary(pa.int8(), pa.string()), "transcript": pa.large_string()}, ["x", "y"]),
        ({"tar_member_name": pa.string_view(), "duration_s": pa.int32()}, ["x", "y"]),
        ({"language": pa.dictionary(pa.int32(), pa.large_string()), "duration_s": pa.decimal128(9, 3)}, ["x", "y"]),
        ({"duration_s": pa.float32(), "language": pa.string()}, ["x", "y"]),
    ],
)
def test_equivalent_types_are_taken(tmp_path: Path, types: dict[str, pa.DataType], names: list[str]) -> None:
    write_tar(tmp_path / "a.tar", {f"{name}.flac": audio() for name in names})
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": f"{name}.flac"} for name in names], **types)
    manifest = read("tar", path, root=tmp_path)
    assert ids(manifest) == names
    assert manifest.rows.select(["language", "duration_s", "text"]).to_pylist() == [
        {"language": "en", "duration_s": 1.0, "text": "hello"}
    ] * len(names)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"transcript": None}, "m.parquet: no column transcript; it has tar_path, "),
        ({"duration_s": ["1.5"]}, "m.parquet: column duration_s is string, wanted seconds as a number"),
        ({"duration_s": [True]}, "column duration_s is bool, wanted seconds"),
        ({"tar_member_name": [3]}, "column tar_member_name is int64, wanted string"),
        ({"transcript": [b"x"]}, "column transcript is binary, wanted string"),
        ({"tar_member_name": pa.array([None], pa.string())}, "row 1: column tar_member_name is null, wanted a string"),
        ({"tar_path": [""]}, "row 1: column tar_path is empty, wanted a file name"),
        ({"tar_path": ["a\0.tar"]}, "row 1: column tar_path holds a NUL character"),
        ({"sample_id": [""]}, "row 1: column sample_id is empty, wanted an id or null"),
    ],
)
def test_a_wrong_manifest_names_file_row_and_column(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    good = {
        "tar_path": ["a.tar"],
        "tar_member_name": ["x"],
        "transcript": ["t"],
        "language": ["en"],
        "duration_s": [1.0],
    }
    table = {name: value for name, value in {**good, **columns}.items() if value is not None}
    pq.write_table(pa.table(table), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match=message):
        read("tar", tmp_path / "m.parquet", root=tmp_path)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    text = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    good = {"tar_path": ["a.tar"], "tar_member_name": ["x"], "language": ["en"], "duration_s": [1.0]}
    pq.write_table(pa.table({**good, "transcript": text}), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="column transcript is not UTF-8 text"):
        read("tar", tmp_path / "m.parquet", root=tmp_path)


def test_a_manifest_without_rows_or_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "m.parquet", [{"tar_member_name": "x"}])
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ManifestError, match=r"m\.parquet: no rows"):
        read("tar", path, root=tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ManifestError, match=r"m\.parquet cannot be read as parquet"):
        read("tar", path, root=tmp_path)


def test_a_task_carries_its_own_rows_through_pickle(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", {f"{i}.flac": audio() for i in range(50)})
    rows = [{"tar_path": f"{name}.tar", "tar_member_name": f"{i}.flac"} for name in "ab" for i in range(50)]
    source = SourceConfig(kind="tar", manifest=str(write_manifest(tmp_path / "m.parquet", rows * 40)))
    tasks = list(
        locate_tasks(read_manifest(source), RowListing(source=source, meaning=heard(source), cache_root=str(tmp_path)))
    )
    assert [len(task.rows) for task in tasks] == [50, 50]
    copy = pickle.loads(pickle.dumps(tasks[1]))  # noqa: S301  as a process pool does it
    assert len(pickle.dumps(tasks[1])) < 12_000
    assert copy == tasks[1]
    assert locate_tar(copy).rows.equals(locate_tar(tasks[1]).rows)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_manifest_gives_rows_or_a_manifest_error(tmp_path: Path, data: st.DataObject) -> None:
    good = (SPEECH / "train.parquet").read_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    changed = good[:position] + data.draw(st.binary(max_size=4)) + good[position + data.draw(st.integers(0, 8)) :]
    path = tmp_path / "m.parquet"
    path.write_bytes(changed)
    try:
        rows = read_manifest(SourceConfig(kind="tar", manifest=str(path))).rows
    except ManifestError:
        return
    assert np.all(np.diff(rows["group"].to_numpy()) >= 0)


ROW = {"question": "q", "answer": "a"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_name_members_of_any_tar(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.png": picture(1), "deep/y.png": picture(2)})
    write_tar(tmp_path / "b.tar", {"./z.png": picture(3), "again.png": picture(1)})
    rows = [
        {"id": 1, "tar_path": "b.tar", "tar_member_name": ["z.png"], **ROW, "mood": 3},
        {"id": 2, "tar_path": "a.tar", "tar_member_name": ["deep/y.png", "./x.png"], **ROW, "mood": 3},
        {"id": 3, "tar_path": "b.tar", "tar_member_name": ["again.png", "z.png"], **ROW, "mood": 3},
    ]
    manifest = converse("tar", write(tmp_path / "m.parquet", rows), root=tmp_path, keep_columns=("mood",))
    # The third row's first image is the second row's second, in another tar.
    assert images_of(manifest) == {"1": ["z.png"], "2": ["deep/y.png", "x.png"], "3": ["x.png", "z.png"]}
    assert [file.name for file in manifest.files] == ["m.parquet", "b.tar", "a.tar"]
    assert manifest.rows["kept:mood"].to_pylist() == [3, 3, 3]
    assert not manifest.rejected.num_rows


def test_an_image_that_is_not_there_costs_its_row(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.png": picture(1), "bad.png": b"no image"})
    (tmp_path / "broken.tar").write_bytes(b"x" * 700)
    places: list[tuple[str | None, str | None]] = [
        ("a.tar", "x.png"),
        ("a.tar", "y.png"),
        ("gone.tar", "x.png"),
        ("broken.tar", "x.png"),
    ]
    places += [("a.tar", "bad.png"), (None, "x.png"), ("a.tar", None), ("", "x.png")]
    rows = [{"id": n, "tar_path": tar, "tar_member_name": name, **ROW} for n, (tar, name) in enumerate(places)]
    manifest = converse("tar", write(tmp_path / "m.parquet", rows), root=tmp_path)
    assert list(images_of(manifest)) == ["0"]
    assert [(sample, reason) for sample, _, reason in rejected(manifest)] == [
        ("1", "missing_member"),
        ("2", "missing_file"),
        ("3", "unreadable_tar"),
        ("4", "unreadable_image"),
        *((str(number), "missing_file") for number in (5, 6, 7)),
    ]
    assert [manifest.files[number].name for number in manifest.absent] == ["gone.tar"]


def test_a_row_may_have_a_class(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.png": picture(1), "y.png": picture(2)})
    rows = [{"tar_path": "a.tar", "tar_member_name": f"{name}.png", "label": name} for name in "yx"]
    source = source_of("tar", write(tmp_path / "m.parquet", rows))
    manifest = read_conversations(source, cache_root=tmp_path / "root", meaning="labels")
    assert manifest.rows["sample_id"].to_pylist() == ["m/0", "m/1"]
    assert manifest.rows["text"].to_pylist() == ["y", "x"]


def test_it_is_built_and_read_without_a_cache_alike(tmp_path: Path) -> None:
    write_tar(tmp_path / "lists" / "a.tar", {f"{n}.jpg": photo(n) for n in range(3)})
    rows = [
        {"id": str(n), "tar_path": "a.tar", "tar_member_name": [f"{n}.jpg", "0.jpg"][: 1 + n % 2], **ROW}
        for n in range(3)
    ]
    write(tmp_path / "lists" / "m.parquet", rows)
    text = f'name = "t"\n[source]\nkind = "tar"\nmanifest = "lists"\n[vision]\nprocessor = "{DEMO / "model"}"\n'
    (tmp_path / "c.toml").write_text(f'{text}[run]\ncache_root = "caches"\nnum_workers = 1\n')
    report = build_here(load_config(tmp_path / "c.toml"))
    assert (report.num_samples, report.failed) == (3, {})
    cache = open_cache(report.cache)
    online = select(load_config(tmp_path / "c.toml", overrides=['loader.cache="off"']))
    for index in range(3):
        cached, made = cache.read(index), online.read(index)
        assert {name: [part.tobytes() for part in values] for name, values in cached.items()} == {
            name: [part.tobytes() for part in values] for name, values in made.items()
        }
