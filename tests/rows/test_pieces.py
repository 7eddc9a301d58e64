"""Rows that are of a piece of their recording are refused; several rows of a whole one are counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ManifestError
from forebay.rows.eligible import unique_ids
from forebay.rows.manifest import Manifest, row_table
from forebay.store.source_files import SourceFile
from tests.rows.helpers import audio, ids, read, rejected, write_manifest, write_tar
from tests.rows.tables import FORMS, write_table

Row = Mapping[str, Any]
SECOND = 16_000
KINDS = [("table", form) for form in FORMS] + [("jsonl", "lines.jsonl"), ("hf", "rows.parquet")]


def listed(folder: Path, kind: str, form: str, *rows: Row, **settings: Any) -> Manifest:
    """Rows of recordings of 4 s each, `a.wav` where a row names no other."""
    for name in "abc":
        (folder / f"{name}.wav").write_bytes(audio(4 * SECOND, kind="WAV"))
    table = write_table(folder / form, [{"audio": "a.wav", "text": "hello", **row} for row in rows])
    return read(kind, table, root=folder, **settings)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_rows_of_several_pieces_of_one_recording_are_refused(tmp_path: Path, kind: str, form: str) -> None:
    rows = {"id": "1", "start": 0.0, "end": 2.0}, {"id": "2", "text": "world", "start": 2.0, "end": 4.0}
    with pytest.raises(ManifestError, match=r"a\.wav: .* column (start|end): .* \(sample 1\), .* \(sample 2\)") as err:
        listed(tmp_path, kind, form, *rows)
    assert err.value.code == "FB131"


@pytest.mark.parametrize(("kind", "form"), KINDS)
@pytest.mark.parametrize(
    "row",
    [
        {"start": 1.0},
        {"onset": "0:01.5"},
        {"end_time": 3.0},
        {"offset": 0.0, "duration": 2.0},
        {"begin": 0.0, "end": 2_000.0},
        {"Start": 0.0, "End": 2},
    ],
)
@pytest.mark.few
def test_one_row_that_does_not_cover_its_recording_is_refused(tmp_path: Path, kind: str, form: str, row: Row) -> None:
    whole = dict.fromkeys(row)
    with pytest.raises(ManifestError, match=r"sample b is from .* recording has 4\.00 s") as err:
        listed(tmp_path, kind, form, whole, {**row, "audio": "b.wav"})
    assert err.value.code == "FB131"


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_times_of_a_whole_recording_or_of_a_piece_that_is_cut_out_are_taken(
    tmp_path: Path, kind: str, form: str
) -> None:
    rows = {"start": 0.0, "end": 3.9}, {"audio": "b.wav", "start": 30.0, "end": 34.0}, {"audio": "c.wav"}
    assert ids(listed(tmp_path, kind, form, *[{"start": None, "end": None, **row} for row in rows])) == ["a", "b", "c"]


def test_how_far_times_may_be_off_is_the_duration_tolerance(tmp_path: Path) -> None:
    row = {"offset": 0.3}
    assert len(listed(tmp_path, "table", "commas.csv", row).rows) == 1
    with pytest.raises(ManifestError, match=r"sample a is from 0\.30 s by column offset"):
        listed(tmp_path, "table", "commas.csv", row, duration_tolerance=0.2)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_several_texts_of_one_whole_recording_are_one_warning(
    tmp_path: Path, kind: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": str(n), "text": f"question {n}", "duration": 4.0} for n in range(3)]
    assert ids(listed(tmp_path, kind, form, *rows, {"audio": "b.wav", "id": "3", "duration": 2.0})) == [*"0123"]
    (record,) = caplog.records
    assert record.message.startswith("1 recordings have several rows with different texts, 3 rows")


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_several_texts_of_one_recording_with_shorter_durations_are_refused(
    tmp_path: Path, kind: str, form: str
) -> None:
    rows = {"id": "1", "duration": 1.0}, {"id": "2", "text": "world", "duration": 3.0}
    with pytest.raises(ManifestError, match=r"sample 1 is from 0\.00 s to 1\.00 s by column duration") as err:
        listed(tmp_path, kind, form, *rows)
    assert err.value.code == "FB132"


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"start": 0, "end": 2}, {"start": 2, "end": 4}], "FB131"),
        ([{"start": 0, "end": 2}], "FB131"),
        ([{"duration": 1}, {"duration": 3, "text": "world"}], "FB132"),
    ],
)
def test_a_table_of_texts_beside_a_folder_is_held_to_the_same(tmp_path: Path, rows: list[Row], code: str) -> None:
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs" / "a.wav").write_bytes(audio(4 * SECOND, kind="WAV"))
    table = write_table(tmp_path / "commas.csv", [{"audio": "a", "text": "hello", **row} for row in rows])
    with pytest.raises(ManifestError, match="a recording is read whole") as err:
        read("folder", tmp_path / "wavs", root=tmp_path, texts=str(table))
    assert err.value.code == code


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"start": 0.0, "duration_s": 2.0}, {"start": 2.0, "duration_s": 2.0}], "FB131"),
        ([{"start": 1.0}], "FB131"),
        ([{"duration_s": 1.0}, {"duration_s": 3.0, "transcript": "world"}], "FB132"),
    ],
)
def test_a_manifest_over_tars_is_held_to_the_same(tmp_path: Path, rows: list[Row], code: str) -> None:
    write_tar(tmp_path / "a.tar", {"x.wav": audio(4 * SECOND, kind="WAV")})
    named = [{"tar_member_name": "x.wav", "sample_id": str(n), **row} for n, row in enumerate(rows)]
    with pytest.raises(ManifestError, match=r"a\.tar, x\.wav: .* a recording is read whole") as err:
        read("tar", write_manifest(tmp_path / "m.parquet", named), root=tmp_path)
    assert err.value.code == code


_NAMES = ("en/0.tar", "fr/0.tar", "../out/1.tar")


def manifest_of(rows: list[tuple[str, bool, int]]) -> Manifest:
    names, explicit, groups = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {
        "member": pa.array([f"{n}.flac" for n in names], pa.large_string()),
        "size": pa.array([1] * len(rows), pa.int64()),
        "sample_id": pa.array(names, pa.large_string()),
        "explicit_id": pa.array(explicit, pa.bool_()),
        "group": pa.array(groups, pa.int32()),
        "file": pa.array(groups, pa.int32()),
    }
    files = tuple(SourceFile(name, Path(name)) for name in _NAMES)
    return Manifest(files=files, rows=row_table(columns, num_rows=len(rows)))


def test_a_derived_id_gets_its_group_in_front_and_a_given_one_fails() -> None:
    rows = [("x", False, 0), ("x", True, 0), ("x", False, 1), ("x", False, 1), ("x", False, 2), ("y", True, 2)]
    manifest = unique_ids(manifest_of(rows))
    assert ids(manifest) == ["x", "fr/0/x", "out/1/x", "y"]
    assert [(sample_id, reason) for sample_id, reason, _ in manifest.failed()] == [
        ("x", "duplicate_id"),
        ("fr/0/x", "duplicate_id"),
    ]


def test_an_id_that_looks_like_a_renamed_one_is_not_overwritten() -> None:
    manifest = unique_ids(manifest_of([("x", False, 0), ("fr/0/x", True, 0), ("x", False, 1)]))
    assert ids(manifest) == ["x", "fr/0/x"]
    assert manifest.counts()["failed"] == {"duplicate_id": 1}


def test_another_clip_of_one_group_gets_its_name_in_full(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(), "x.wav": audio(kind="WAV")})
    rows = [{"tar_member_name": name} for name in ("x.flac", "x.wav", "x.flac", "x.wav")]
    manifest = read("tar", write_manifest(tmp_path / "m.parquet", rows), root=tmp_path)
    assert ids(manifest) == ["x", "x.wav"]
    assert rejected(manifest) == [("x", "failed", "duplicate_id"), ("x.wav", "failed", "duplicate_id")]


def test_another_file_of_one_manifest_gets_its_name_in_full(tmp_path: Path) -> None:
    for name in ("x.flac", "x.ogg"):
        (tmp_path / name).write_bytes(audio(kind=name[2:].upper()))
    rows = [{"audio": name, "text": name, "duration": 1} for name in ("x.flac", "x.ogg", "x.flac")]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = read("jsonl", tmp_path / "m.jsonl", root=tmp_path)
    assert ids(manifest) == ["x", "x.ogg"]
    assert rejected(manifest) == [("x", "failed", "duplicate_id")]


def test_another_row_of_one_hf_file_gets_its_number(tmp_path: Path) -> None:
    clips = [{"bytes": audio(n), "path": "audio.flac"} for n in (160, 320, 480)]
    pq.write_table(pa.table({"audio": clips}), tmp_path / "m.parquet")
    assert ids(read("hf", tmp_path / "m.parquet", root=tmp_path)) == ["audio", "m/1", "m/2"]


_rows = st.lists(
    st.tuples(st.sampled_from(["a", "b", "en/0/a", "fr/0/a"]), st.booleans(), st.integers(0, 2)), max_size=14
)


@given(rows=_rows)
def test_ids_are_unique_nothing_is_lost_and_growth_renames_nothing(rows: list[tuple[str, bool, int]]) -> None:
    rows.sort(key=lambda row: row[2])
    manifest = unique_ids(manifest_of(rows))
    assert len(set(ids(manifest))) == len(manifest.rows)
    assert len(manifest.rows) + len(manifest.rejected) == len(rows)
    assert set(ids(manifest)) >= {row[0] for row in rows}
    for length in range(len(rows)):
        shorter = unique_ids(manifest_of(rows[:length]))
        assert ids(shorter) == ids(manifest)[: len(shorter.rows)]
