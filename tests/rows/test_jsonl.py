"""`kind = "jsonl"`: lines and arrays of recordings, and of conversations over images."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.media_reader import MediaReader
from forebay.rows.readers import table_records as conversation_jsonl
from tests.rows.helpers import audio, ids, read, read_manifest, rejected
from tests.rows.pictures import asked, converse, images_of, picture, write_lines, write_picture


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


def test_a_name_of_no_file_here_costs_its_row(tmp_path: Path) -> None:
    write_clip(tmp_path / "x.flac")
    problems = {
        "https://example.org/x.flac": "is 'https://example.org/x.flac', and nothing is fetched from elsewhere",
        "s3://bucket/x.flac": "is 's3://bucket/x.flac', and nothing is fetched from elsewhere",
        "data:audio/flac;base64,ZkxhQw": "is a data: URI",
        "": "is empty",
        "a\0b": "holds a NUL character",
    }
    rows = [{"audio": name, "text": "t"} for name in [*problems, "x.flac"]]
    manifest = read("jsonl", write_jsonl(tmp_path / "m.jsonl", *rows), root=tmp_path)
    assert ids(manifest) == ["x"]
    assert rejected(manifest) == [(f"m/{n}", "failed", "missing_file") for n in range(1, 6)]
    for number, (problem, said) in enumerate(
        zip(problems.values(), manifest.rejected["message"].to_pylist(), strict=True), 1
    ):
        assert f"m.jsonl, line {number}: field audio {problem}" in said
    assert [file.name for file in manifest.files] == ["m.jsonl", "x.flac"]


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.one_of(st.dictionaries(_fields, _json | st.text(max_size=5)), _json), max_size=3))
def test_any_json_gives_its_rows_or_a_manifest_error(tmp_path: Path, rows: list[Any]) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", *(json.dumps(row) for row in rows))
    try:
        manifest = read_manifest(SourceConfig(kind="jsonl", manifest=str(path)))
    except ManifestError:
        return
    assert len(manifest.rows) + len(manifest.rejected) == len(rows)
    for found in manifest.rows.to_pylist():
        row = rows[found["row"]]
        given_id = row.get("sample_id") if row.get("sample_id") is not None else row.get("id")
        assert found["explicit_id"] is (given_id is not None)
        assert found["text"] == row["text"]
        assert (found["language"], found["prompt"]) == (row.get("language") or None, row.get("prompt"))
        stated = row["duration_s"] if row.get("duration_s") is not None else row.get("duration")
        assert math.isnan(found["duration_s"]) if stated is None else found["duration_s"] == float(stated)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60))
def test_any_bytes_give_rows_or_a_manifest_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    try:
        manifest = read_manifest(SourceConfig(kind="jsonl", manifest=str(path)))
    except ManifestError:
        return
    assert len(manifest.rows) <= content.count(b"\n") + 1


def test_rows_files_and_places(tmp_path: Path) -> None:
    write_picture(tmp_path / "data" / "p" / "x.jpg", 1, width=10, height=4)
    write_picture(tmp_path / "other" / "y.png", 2)
    turns = [{"role": "user", "content": [{"type": "image", "image": "../other/y.png"}, {"type": "text", "text": "?"}]}]
    rows: list[Any] = [
        asked("p/x.jpg", id=7),
        "",
        asked([], question="no image"),
        {"messages": turns, "speaker": {"age": [3]}},
        {"conversations": [{"from": "human", "value": "<image> and <image>"}], "image": ["p/x.jpg", "../other/y.png"]},
        asked(str(tmp_path / "data" / "p" / "x.jpg"), sample_id="absolute"),
    ]
    manifest = converse("jsonl", write_lines(tmp_path / "data" / "m.jsonl", rows), root=tmp_path)
    assert [file.name for file in manifest.files] == ["m.jsonl", "p/x.jpg", "../other/y.png"]
    assert images_of(manifest) == {
        "7": ["p/x.jpg"],
        "m/2": ["../other/y.png"],
        "m/3": ["p/x.jpg", "../other/y.png"],
        "absolute": ["p/x.jpg"],
        "m/1": [],
    }
    assert manifest.rows["row"].to_pylist() == [0, 2, 3, 4, 1]
    assert manifest.rows["explicit_id"].to_pylist() == [True, False, False, True, False]
    assert manifest.rows["item_group"].to_pylist() == [0, 0, 0, 0, 1]
    assert manifest.items["image"].select(["width", "height"]).to_pylist()[0] == {"width": 10, "height": 4}


def test_five_questions_an_image_come_together(tmp_path: Path) -> None:
    for number in range(6):
        write_picture(tmp_path / f"{number}.png", number)
    order = [(i * 7) % 30 for i in range(30)]
    rows = [asked(f"{n % 6}.png", id=str(n)) for n in order]
    manifest = converse("jsonl", write_lines(tmp_path / "m.jsonl", rows), root=tmp_path)
    first_seen = list(dict.fromkeys(n % 6 for n in order))
    assert ids(manifest) == [str(n) for image in first_seen for n in order if n % 6 == image]
    assert manifest.rows["images"].to_pylist() == [[i // 5] for i in range(30)]


def test_one_image_under_two_names_is_one_entry(tmp_path: Path) -> None:
    for name in ("a.png", "sub/b.png"):
        write_picture(tmp_path / name, 3)
    rows = [asked("a.png"), asked(None), asked("./sub/b.png"), asked(["sub/../a.png", "sub/b.png"])]
    manifest = converse("jsonl", write_lines(tmp_path / "m.jsonl", rows), root=tmp_path)
    assert manifest.rows["images"].to_pylist() == [[0], [0], [0, 0], []]
    assert manifest.items["image"].num_rows == 1
    assert [file.name for file in manifest.files][1:3] == ["a.png", "sub/b.png"]


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [head, b"IDAT" + zlib.compress(bytes(10)), b"IEND"]
    packed = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def test_an_image_that_cannot_be_used_fails_its_rows_by_name(tmp_path: Path) -> None:
    write_picture(tmp_path / "good.png", 1)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "empty.png").touch()
    os.symlink("loop.png", tmp_path / "loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "text.png").write_text("not an image at all, but long enough")
    (tmp_path / "cut.png").write_bytes(picture(2)[:20])
    (tmp_path / "bomb.png").write_bytes(bomb(60_000, 60_000))
    (tmp_path / "large.png").write_bytes(bytes(5000))
    reasons = {
        "gone.png": "missing_file",
        "folder.png": "missing_file",
        "empty.png": "empty_file",
        "loop.png": "missing_file",
        "pipe.png": "missing_file",
        "good.png/below.png": "missing_file",
        "n" * 300: "missing_file",
        "m.jsonl": "unreadable_image",
        "text.png": "unreadable_image",
        "cut.png": "unreadable_image",
        "bomb.png": "too_many_pixels",
        "large.png": "too_large",
    }
    rows = [asked(["good.png", name, "gone.png"], id=name) for name in reasons] + [asked("good.png", id="fine")]
    path = write_lines(tmp_path / "m.jsonl", rows)
    manifest = converse("jsonl", path, root=tmp_path, max_sample_bytes=4000)
    assert ids(manifest) == ["fine"]
    assert rejected(manifest) == [(name, "failed", reason) for name, reason in reasons.items()]
    for name, message in zip(reasons, manifest.rejected["message"].to_pylist(), strict=True):
        assert name in message
    absent = [name for name, reason in reasons.items() if reason == "missing_file"]
    assert sorted(manifest.files[number].name for number in manifest.absent) == sorted(absent)


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (asked("a\0b"), "missing_file", "m.jsonl, line 2: the name of an image holds a NUL character"),
        (asked(""), "missing_file", "m.jsonl, line 2: the name of an image is empty"),
        (asked(["x.png", 3]), "bad_conversation", "m.jsonl, line 2: field images is a number"),
        ({**asked("x.png"), "question": ["q"]}, "bad_conversation", "m.jsonl, line 2: field question is a list"),
        ({"image": "x.png"}, "bad_conversation", "m.jsonl, line 2: has neither messages nor a question"),
        ({"image": "x.png", "question": "q"}, "bad_conversation", "m.jsonl, line 2: has no field answer"),
        (asked("x.png", id=[1]), "bad_conversation", "m.jsonl, line 2: field id is a list"),
        (asked("x.png", question="<image><image>"), "image_count_mismatch", "2 image tags for 1 images"),
        ('{"image": "\\udc00", "question": "q", "answer": "a"}', "bad_conversation", "half of a surrogate pair"),
    ],
)
def test_a_row_that_is_no_conversation_fails(tmp_path: Path, row: Any, reason: str, message: str) -> None:
    write_picture(tmp_path / "x.png")
    path = write_lines(tmp_path / "m.jsonl", [asked("x.png", id="good"), row])
    manifest = converse("jsonl", path, root=tmp_path)
    assert ids(manifest) == ["good"]
    assert rejected(manifest) == [("m/1", "failed", reason)]
    assert message in manifest.rejected["message"][0].as_py()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[]", r"is a list \(\[\]\), wanted an object"),
        ('{"n": NaN}', "NaN is no JSON number"),
        ("[" * 200_000, "is nested too deeply"),
        (b'{"question": "\xff", "answer": "a"}', "is not JSON"),
        (b"\0", "is not JSON"),
    ],
)
@pytest.mark.parametrize("block_bytes", [20, 8 * 1024 * 1024])
def test_a_broken_line_is_named(
    tmp_path: Path, line: Any, message: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_jsonl, "BLOCK_BYTES", block_bytes)
    path = write_lines(tmp_path / "m.jsonl", [asked(), "", asked(), line, asked()])
    with pytest.raises(ManifestError, match=rf"m\.jsonl, line 4: .*{message}"):
        converse("jsonl", path, root=tmp_path)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
@pytest.mark.parametrize("block_bytes", [1, 7, 50, 1000])
@pytest.mark.few
def test_blocks_of_lines_lose_no_line(
    tmp_path: Path, end: bytes, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [asked(id=str(n), question="q\u2028" * n) for n in range(12)]
    data = write_lines(tmp_path / "m.jsonl", rows).read_bytes().rstrip(b"\n")
    (tmp_path / "m.jsonl").write_bytes(b"\xef\xbb\xbf" + data + end)
    whole = converse("jsonl", tmp_path / "m.jsonl", root=tmp_path)
    monkeypatch.setattr(conversation_jsonl, "BLOCK_BYTES", block_bytes)
    cut = converse("jsonl", tmp_path / "m.jsonl", root=tmp_path)
    assert ids(cut) == [str(n) for n in range(12)]
    assert cut.rows.equals(whole.rows)


def test_a_line_without_end_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_jsonl, "BLOCK_BYTES", 100)
    monkeypatch.setattr(conversation_jsonl, "MAX_LINE_BYTES", 150)
    path = write_lines(tmp_path / "m.jsonl", [asked(), "x" * 5000])
    with pytest.raises(ManifestError, match=r"m\.jsonl, line 2: more than 150 bytes"):
        converse("jsonl", path, root=tmp_path)


def test_an_error_of_the_disk_is_no_property_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_picture(tmp_path / "x.png")
    path = write_lines(tmp_path / "m.jsonl", [asked("x.png")])

    def broken_disk(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken_disk)
    with pytest.raises(OSError, match="Input/output error"):
        converse("jsonl", path, root=tmp_path)


def test_an_empty_or_absent_manifest_of_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.jsonl: no rows"):
        converse("jsonl", write_lines(tmp_path / "m.jsonl", [""]), root=tmp_path)
    with pytest.raises(ManifestError, match=r"gone\.jsonl does not exist"):
        converse("jsonl", tmp_path / "gone.jsonl", root=tmp_path)
