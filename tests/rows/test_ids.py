from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from forebay.rows.eligible import unique_ids
from forebay.rows.manifest import Manifest, row_table
from forebay.store.source_files import SourceFile
from tests.rows.helpers import audio, ids, read, rejected, write_manifest, write_tar

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
