from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import SourceColumns
from forebay.errors import DecodeError, ManifestError, MissingExtraError
from forebay.rows.manifest import Manifest
from forebay.rows.media_reader import MediaReader
from tests.rows.helpers import audio, ids, read, rejected

LENGTHS = (160, 320, 480, 640, 800)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Keeps progress bars of the library out of the output."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def table_of(*, bytes_in_rows: bool = True, named: bool = True, **columns: Any) -> pa.Table:
    """Five clips as the library stores them."""
    features = datasets.Features(
        {
            "audio": datasets.Audio(decode=False),
            "text": datasets.Value("string"),
            "language": datasets.ClassLabel(names=["en", "fr"]),
        }
    )
    clips = [
        {"bytes": audio(n) if bytes_in_rows else None, "path": f"clips/{n}.flac" if named else None} for n in LENGTHS
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"audio": pa.array(clips, kind), "text": list("abcde"), "language": [0, 1, 0, -1, 1]})
    table = table.cast(features.arrow_schema)
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def save(table: pa.Table, folder: Path, *, num_shards: int = 2) -> Path:
    dataset = datasets.Dataset(datasets.table.InMemoryTable(table))
    dataset.save_to_disk(str(folder), num_shards=num_shards)
    return folder


def bytes_of(manifest: Manifest, **settings: Any) -> list[bytes]:
    rows = manifest.rows.select(["file", "offset", "size"]).to_pylist()
    with MediaReader(manifest.files, max_open=2, **{"column": "audio", **settings}) as reader:
        return [reader(row["file"], row["offset"], row["size"]) for row in rows]


def test_a_saved_folder_reads_as_the_library_reads_it(tmp_path: Path, quiet: None) -> None:
    folder = save(table_of(), tmp_path / "data")
    manifest = read("hf", folder, root=tmp_path)
    expected = list(datasets.load_from_disk(str(folder)))
    assert bytes_of(manifest) == [row["audio"]["bytes"] for row in expected]
    assert manifest.rows["text"].to_pylist() == [row["text"] for row in expected]
    assert ids(manifest) == [row["audio"]["path"].removesuffix(".flac") for row in expected]
    assert manifest.rows["language"].to_pylist() == ["en", "fr", "en", None, "fr"]
    assert manifest.rows["duration_s"].to_pylist() == [n / 16_000 for n in LENGTHS]
    assert manifest.rows["offset"].to_pylist() == [0, 1, 2, 0, 1]
    assert {manifest.files[n].path.suffix for n in manifest.rows["group"].to_pylist()} == {".arrow"}


@pytest.mark.parametrize("row_group_size", [2, 100])
def test_parquet_reads_as_the_library_reads_it(tmp_path: Path, quiet: None, row_group_size: int) -> None:
    path = tmp_path / "train-00000.parquet"
    pq.write_table(table_of(named=False), path, row_group_size=row_group_size)
    manifest = read("hf", path, root=tmp_path)
    expected = list(datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "library")))
    assert bytes_of(manifest) == [row["audio"]["bytes"] for row in expected]
    assert ids(manifest) == [f"train-00000/{n}" for n in range(5)]
    assert manifest.rows["language"].to_pylist() == ["en", "fr", "en", None, "fr"]


def test_rows_that_hold_only_a_path_are_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    for n in LENGTHS[1:]:
        (tmp_path / "clips" / f"{n}.flac").write_bytes(audio(n))
    pq.write_table(table_of(bytes_in_rows=False), tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path)
    assert bytes_of(manifest) == [audio(n) for n in LENGTHS[1:]]
    assert rejected(manifest) == [("clips/160", "failed", "missing_file")]
    assert [file.listed for file in manifest.files] == [True, False, False, False, False, False]
    assert manifest.absent == (1,)
    assert set(manifest.rows["group"].to_pylist()) == {0}


def test_bytes_paths_and_neither_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "own.flac").write_bytes(audio(320))
    clips = [
        {"bytes": audio(160), "path": None},
        {"bytes": None, "path": "own.flac"},
        {"bytes": None, "path": None},
        None,
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"audio": pa.array(clips, kind), "text": list("abcd")}), tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path)
    assert bytes_of(manifest) == [audio(160), audio(320)]
    assert ids(manifest) == ["m/0", "own"]
    assert rejected(manifest) == [("m/2", "failed", "missing_file"), ("m/3", "failed", "missing_file")]
    assert "row 3: column audio has neither bytes nor a path" in manifest.rejected["message"][0].as_py()


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([audio(160), audio(320)], pa.large_binary()), [audio(160), audio(320)]),
        (pa.array(["a.flac", "b.flac"]), [audio(100), audio(200)]),
    ],
)
def test_plain_binary_and_string_columns_are_audio_too(tmp_path: Path, column: pa.Array, expected: list[bytes]) -> None:
    (tmp_path / "a.flac").write_bytes(audio(100))
    (tmp_path / "b.flac").write_bytes(audio(200))
    pq.write_table(pa.table({"sound": column, "words": ["x", "y"], "id": [7, 8]}), tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path, columns=SourceColumns(audio="sound", text="words"))
    assert bytes_of(manifest, column="sound") == expected
    assert manifest.rows["text"].to_pylist() == ["x", "y"]
    assert ids(manifest) == ["7", "8"]
    assert manifest.rows["explicit_id"].to_pylist() == [True, True]


def test_a_stated_duration_is_taken_and_others_come_from_headers(tmp_path: Path) -> None:
    pq.write_table(table_of(duration=pa.array([9.0, None, 9.0, None, 9.0])), tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path)
    assert manifest.rows["duration_s"].to_pylist() == [9.0, 0.02, 9.0, 0.04, 9.0]


def test_files_that_the_state_does_not_list_hold_no_rows(tmp_path: Path, quiet: None) -> None:
    folder = save(table_of(), tmp_path / "data")
    (folder / "cache-0123.arrow").write_bytes(b"left by map()")
    assert len(read("hf", folder, root=tmp_path).rows) == 5
    (folder / "state.json").write_text(json.dumps({"files": []}))
    with pytest.raises(ManifestError, match=r"state\.json is not the state of a save_to_disk folder"):
        read("hf", folder, root=tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"audio": "sound"}, r"no column sound \(source\.columns\.audio\); it has audio, text, language"),
        ({"text": "words"}, r"no column words \(source\.columns\.text\)"),
        ({"language": "tongue"}, r"no column tongue \(source\.columns\.language\)"),
        ({"id": "name"}, r"no column name \(source\.columns\.id\)"),
        ({"audio": "language"}, "column language is int64, wanted audio as bytes or path"),
        ({"text": "language"}, "column language is int64, wanted string"),
    ],
)
def test_a_wrong_column_is_named(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    pq.write_table(table_of(), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match=rf"m\.parquet: {message}"):
        read("hf", tmp_path / "m.parquet", root=tmp_path, columns=SourceColumns(**columns))


def test_an_integer_language_without_names_is_refused(tmp_path: Path) -> None:
    table = table_of().replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="column language is int64, wanted string or a ClassLabel"):
        read("hf", tmp_path / "m.parquet", root=tmp_path)


def test_broken_files_are_refused_and_a_bad_clip_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "m.parquet").symlink_to("gone")
    with pytest.raises(ManifestError, match=r"m\.parquet is not there, or links to what is not"):
        read("hf", tmp_path, root=tmp_path)
    (tmp_path / "m.parquet").unlink()
    (tmp_path / "m.parquet").write_bytes(b"PAR1")
    with pytest.raises(ManifestError, match=r"m\.parquet is neither parquet nor an arrow stream"):
        read("hf", tmp_path / "m.parquet", root=tmp_path)
    (tmp_path / "m.arrow").write_bytes(b"\xff" * 50)
    with pytest.raises(ManifestError, match=r"m\.arrow is neither parquet nor an arrow stream"):
        read("hf", tmp_path / "m.arrow", root=tmp_path)
    pq.write_table(pa.table({"audio": [b"noise", audio(160), b""]}), tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path)
    assert ids(manifest) == ["m/1"]
    assert manifest.counts()["failed"] == {"unknown_duration": 1, "empty_file": 1}


def test_a_row_larger_than_allowed_fails(tmp_path: Path) -> None:
    pq.write_table(table_of(), tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path)
    with (
        MediaReader(manifest.files, max_open=2, max_bytes=10, column="audio") as reader,
        pytest.raises(DecodeError, match="allowed are 10"),
    ):
        reader(0, 0, -1)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table_of(), tmp_path / "m.parquet")
    monkeypatch.delitem(sys.modules, "datasets")
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    monkeypatch.setattr("forebay.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forebay\[hf\]'"):
        read("hf", tmp_path / "m.parquet", root=tmp_path)


def test_the_column_of_ids_can_be_named(tmp_path: Path) -> None:
    table = table_of(sample_id=pa.array([*"vwxyz"]), name=pa.array([*"abcde"]))
    pq.write_table(table, tmp_path / "m.parquet")
    manifest = read("hf", tmp_path / "m.parquet", root=tmp_path, columns=SourceColumns(id="name"))
    assert ids(manifest) == [*"abcde"]
    assert manifest.unused == {"sample_id": 5}
