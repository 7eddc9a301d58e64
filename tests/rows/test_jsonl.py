from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.meanings.recordings import list_records
from forebay.rows.media_reader import MediaReader
from forebay.rows.readers.jsonl import read_lines
from tests.rows.helpers import audio, ids, read, rejected


def write_jsonl(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def write_clip(path: Path, num_samples: int = 1600, *, kind: str = "FLAC") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(audio(num_samples, kind=kind))
    return path


def test_rows_files_and_bytes(tmp_path: Path) -> None:
    write_clip(tmp_path / "data" / "clips" / "x.flac", 800)
    write_clip(tmp_path / "elsewhere" / "y.wav", 400, kind="WAV")
    write_clip(tmp_path / "data" / "z.ogg", kind="OGG")
    path = write_jsonl(
        tmp_path / "data" / "m.jsonl",
        {"audio": "clips/x.flac", "text": "language English<asr_text>hello  world", "language": "en", "prompt": "p"},
        {"audio": "../elsewhere/y.wav", "text": None, "id": "why", "speaker": {"age": [3]}},
        "",
        {"audio": str(tmp_path / "data" / "z.ogg"), "text": "z", "duration": 2, "language": ""},
    )
    manifest = read("jsonl", path, root=tmp_path)
    names = ["sample_id", "text", "language", "prompt", "duration_s", "offset", "size", "group", "file"]
    assert [tuple(row.values()) for row in manifest.rows.select(names).to_pylist()] == [
        ("clips/x", "language English<asr_text>hello  world", "en", "p", 0.05, 0, -1, 0, 1),
        ("why", None, None, None, 0.025, 0, -1, 0, 2),
        (str(tmp_path / "data" / "z"), "z", None, None, 2.0, 0, -1, 0, 3),
    ]
    assert [file.name for file in manifest.files] == ["m.jsonl", "clips/x.flac", "../elsewhere/y.wav", "z.ogg"]
    reader = MediaReader(manifest.files, max_open=2)
    assert [reader(n, 0, -1) for n in (1, 2)] == [audio(800), audio(400, kind="WAV")]


def test_one_file_named_twice_is_one_source_file(tmp_path: Path) -> None:
    write_clip(tmp_path / "x.flac")
    rows = [{"audio": "x.flac", "text": t, "sample_id": t} for t in "ab"]
    manifest = read("jsonl", write_jsonl(tmp_path / "m.jsonl", *rows), root=tmp_path)
    assert [file.name for file in manifest.files] == ["m.jsonl", "x.flac"]
    assert ids(manifest) == ["a", "b"]


def test_a_missing_or_unreadable_file_fails_its_rows(tmp_path: Path) -> None:
    write_clip(tmp_path / "x.flac")
    (tmp_path / "folder.flac").mkdir()
    os.mkfifo(tmp_path / "pipe.flac")
    (tmp_path / "text.flac").write_text("not audio")
    names = ["gone", "x", "folder", "pipe", "text"]
    rows = [{"audio": f"{name}.flac", "text": "t", "duration": 1} for name in names[:-1]]
    path = write_jsonl(tmp_path / "m.jsonl", *rows, {"audio": "text.flac", "text": "t"})
    manifest = read("jsonl", path, root=tmp_path)
    assert ids(manifest) == ["x"]
    assert rejected(manifest) == [
        ("gone", "failed", "missing_file"),
        ("folder", "failed", "missing_file"),
        ("pipe", "failed", "missing_file"),
        ("text", "failed", "unknown_duration"),
    ]
    assert [manifest.files[n].name for n in manifest.absent] == ["gone.flac", "folder.flac", "pipe.flac"]


def test_an_error_of_the_disk_is_no_property_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clip(tmp_path / "x.flac")
    path = write_jsonl(tmp_path / "m.jsonl", {"audio": "x.flac", "text": "t"})

    def broken_disk(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken_disk)
    with pytest.raises(OSError, match="Input/output error"):
        read("jsonl", path, root=tmp_path)


def test_manifests_of_two_folders_keep_their_own_clips(tmp_path: Path) -> None:
    for folder in "ab":
        write_clip(tmp_path / folder / "x.flac", 160 if folder == "a" else 320)
        write_jsonl(tmp_path / folder / "m.jsonl", {"audio": "x.flac", "text": folder})
    manifest = read("jsonl", tmp_path / "*" / "m.jsonl", root=tmp_path)
    assert ids(manifest) == ["x", "b/m/x"]
    assert manifest.rows["duration_s"].to_pylist() == [0.01, 0.02]
    assert [file.name for file in manifest.files] == ["a/m.jsonl", "b/m.jsonl", "a/x.flac", "b/x.flac"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[]", r"line 2: is a list \(\[\]\), wanted an object"),
        ("null", r"line 2: is null \(None\), wanted an object"),
        ('{"text": "t"}', "line 2: has no field audio, wanted a string"),
        ('{"audio": 3, "text": "t"}', r"line 2: field audio is a number \(3\), wanted a string"),
        ('{"audio": "", "text": "t"}', "line 2: field audio is empty"),
        ('{"audio": "a\\u0000b", "text": "t"}', "line 2: field audio holds a NUL character"),
        ('{"audio": "x.flac"}', "line 2: has no field text"),
        ('{"audio": "x.flac", "text": ["t"]}', "line 2: field text is a list"),
        ('{"audio": "x.flac", "text": "\\udc00"}', "line 2: field text holds half of a surrogate pair"),
        ('{"audio": "x.flac", "text": "t", "id": 7}', "line 2: field id is a number"),
        ('{"audio": "x.flac", "text": "t", "id": ""}', "line 2: field sample_id is empty"),
        ('{"audio": "x.flac", "text": "t", "duration": "1"}', "line 2: field duration is a string"),
        ('{"audio": "x.flac", "text": "t", "duration": true}', "line 2: field duration is a boolean"),
        ('{"audio": "x.flac", "text": "t", "duration": NaN}', "line 2: is not JSON: NaN is no JSON number"),
        ('{"audio": "x.flac", "text": "t", "n": ' + "9" * 5000 + "}", "line 2: is not JSON"),
        ("[" * 200_000, "line 2: is nested too deeply"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", {"audio": "x.flac", "text": "t"}, line)
    with pytest.raises(ManifestError, match=rf"m\.jsonl, {message}"):
        read("jsonl", path, root=tmp_path)


def test_an_empty_or_absent_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.jsonl: no rows"):
        read("jsonl", write_jsonl(tmp_path / "m.jsonl", ""), root=tmp_path)
    with pytest.raises(ManifestError, match=r"gone\.jsonl does not exist"):
        read("jsonl", tmp_path / "gone.jsonl", root=tmp_path)


def test_a_byte_order_mark_and_other_line_ends_are_taken(tmp_path: Path) -> None:
    write_clip(tmp_path / "x.flac")
    line = '{"audio": "x.flac", "text": "a\u2028b"}'
    (tmp_path / "m.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n")
    assert read("jsonl", tmp_path / "m.jsonl", root=tmp_path).rows["text"].to_pylist() == ["a\u2028b"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)

_fields = st.sampled_from(["audio", "text", "language", "prompt", "id", "sample_id", "duration", "duration_s", "more"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.one_of(st.dictionaries(_fields, _json | st.text(max_size=5)), _json), max_size=3))
def test_any_json_gives_its_rows_or_a_manifest_error(tmp_path: Path, rows: list[Any]) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", *(json.dumps(row) for row in rows))
    try:
        table = list_records(SourceConfig(kind="jsonl", manifest=str(path)), read_lines).rows
    except ManifestError:
        return
    assert len(table) == len(rows)
    for found, row in zip(table.to_pylist(), rows, strict=True):
        given_id = row.get("sample_id") if row.get("sample_id") is not None else row.get("id")
        assert found["explicit_id"] is (given_id is not None)
        assert found["text"] == row["text"]
        assert (found["language"], found["prompt"]) == (row.get("language") or None, row.get("prompt"))
        stated = row["duration_s"] if row.get("duration_s") is not None else row.get("duration")
        assert math.isnan(found["duration_s"]) if stated is None else found["duration_s"] == float(stated)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60))
def test_any_bytes_give_rows_or_a_manifest_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    try:
        manifest = list_records(SourceConfig(kind="jsonl", manifest=str(path)), read_lines)
    except ManifestError:
        return
    assert len(manifest.rows) <= content.count(b"\n") + 1
