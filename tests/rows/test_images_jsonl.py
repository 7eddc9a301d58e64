from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ManifestError
from forebay.rows.readers import jsonl as conversation_jsonl
from tests.rows.helpers import ids, rejected
from tests.rows.pictures import asked, converse, images_of, picture, write_lines, write_picture


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
    assert manifest.rows["image_group"].to_pylist() == [0, 0, 0, 0, 1]
    assert manifest.images is not None
    assert manifest.images.select(["width", "height"]).to_pylist()[0] == {"width": 10, "height": 4}


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
    assert manifest.images is not None
    assert manifest.images.num_rows == 1
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


def test_an_empty_or_absent_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.jsonl: no rows"):
        converse("jsonl", write_lines(tmp_path / "m.jsonl", [""]), root=tmp_path)
    with pytest.raises(ManifestError, match=r"gone\.jsonl does not exist"):
        converse("jsonl", tmp_path / "gone.jsonl", root=tmp_path)
