from __future__ import annotations

import csv
import json
import math
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.readers.tar_lists import list_filelist
from tests.rows.helpers import SPEECH, audio, described, ids, read, rejected, write_tar


def write_tsv(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def test_demo_rows_are_those_of_a_plain_loop_over_tarfile(tmp_path: Path) -> None:
    rows = read("filelist", SPEECH / "train.tsv", root=tmp_path).rows.to_pylist()
    with open(SPEECH / "train.tsv", encoding="utf-8", newline="") as file:
        expected = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) == len(expected) > 40
    for row, (shard, sample_id, language, duration) in zip(rows, expected, strict=True):
        with tarfile.open(SPEECH / shard) as tar:
            clip, document = tar.getmember(f"{sample_id}.flac"), tar.extractfile(f"{sample_id}.json")
            assert document is not None
            assert row["text"] == json.loads(document.read())["transcription"]
        assert (row["offset"], row["size"]) == (clip.offset_data, clip.size)
        assert (row["sample_id"], row["language"], row["duration_s"]) == (sample_id, language, float(duration))
        assert row["member"] == f"{sample_id}.flac"


def test_only_what_is_listed_is_eligible(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {f"{n}.wav": audio(kind="WAV") for n in "xyz"})
    assert ids(read("filelist", write_tsv(tmp_path / "m.tsv", "a.tar\ty\ten\t1.0"), root=tmp_path)) == ["y"]


def test_what_the_line_leaves_out_comes_from_the_tar(tmp_path: Path) -> None:
    members = {
        "x.FLAC": audio(8000),
        "x.json": described(text="from json", language="fr", duration=99, prompt="names: Ann"),
        "y.wav": audio(400, kind="WAV"),
        "y.txt": "plain text ü".encode(),
        "z.ogg": b"no header here",
        "z.json": described(transcript="z", duration=2.5),
        "n.flac": audio(),
    }
    write_tar(tmp_path / "a.tar", members)
    path = write_tsv(tmp_path / "m.tsv", *(f"a.tar\t{n}\t\t" for n in "xyzn"))
    manifest = read("filelist", path, root=tmp_path)
    columns = manifest.rows.select(["sample_id", "text", "language", "prompt", "duration_s"]).to_pylist()
    assert [tuple(row.values()) for row in columns] == [
        ("x", "from json", "fr", "names: Ann", 0.5),
        ("y", "plain text ü", None, None, 0.025),
        ("z", "z", None, None, 2.5),
        ("n", None, None, None, 0.1),
    ]


def test_an_id_without_folders_finds_the_only_member_of_that_name(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"en/x.flac": audio(), "en/y.flac": audio(), "fr/y.flac": audio()})
    path = write_tsv(tmp_path / "m.tsv", *(f"a.tar\t{n}\ten\t1" for n in ("x", "y", "fr/y", "./en/y")))
    manifest = read("filelist", path, root=tmp_path)
    assert manifest.rows["member"].to_pylist() == ["en/x.flac", "fr/y.flac", "en/y.flac"]
    assert rejected(manifest) == [("y", "failed", "missing_member")]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"{broken", "x.json is not JSON"),
        (b"[1]", r"x.json is a list \(\[1\]\), wanted an object"),
        (b'{"text": 5}', "field text is a number"),
        (b"\xff\xfe", "x.json is not JSON"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (b"", "x.json is not JSON"),
    ],
)
def test_broken_json_fails_its_sample_alone(tmp_path: Path, document: bytes, problem: str) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(), "x.json": document, "y.flac": audio()})
    path = write_tsv(tmp_path / "m.tsv", "a.tar\tx\ten\t1", "a.tar\ty\ten\t1")
    manifest = read("filelist", path, root=tmp_path)
    assert ids(manifest) == ["y"]
    ((sample_id, reason, message),) = manifest.failed()
    assert (sample_id, reason) == ("x", "bad_metadata")
    with pytest.raises(ValueError, match=problem):
        raise ValueError(message)


def test_missing_tars_members_and_durations_fail_their_rows(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": b"", "y.flac": audio()})
    path = write_tsv(tmp_path / "m.tsv", "gone.tar\tx\ten\t1", "a.tar\tx\ten\t", "a.tar\tno\ten\t1", "a.tar\ty\ten\t1")
    manifest = read("filelist", path, root=tmp_path)
    assert ids(manifest) == ["y"]
    assert rejected(manifest) == [
        ("x", "failed", "unreadable_tar"),
        ("a/x", "failed", "empty_file"),
        ("no", "failed", "missing_member"),
    ]


def test_an_id_that_was_renamed_still_finds_its_member(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", {"x.flac": audio(), "x.txt": name.encode()})
    manifest = read("filelist", write_tsv(tmp_path / "m.tsv", "a.tar\tx\ten\t1", "b.tar\tx\ten\t1"), root=tmp_path)
    assert ids(manifest) == ["x", "b/x"]
    assert manifest.rows["text"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a.tar\tx\ten\t1", "a.tar\ty\ten"], r"m\.tsv, line 2: 3 columns, wanted 4: shard path, sample id"),
        (["a.tar\tx\ten\t1\tmore"], "line 1: 5 columns, wanted 4"),
        (
            ["shard\tid\tlanguage\tduration"],
            r"line 1: column duration in seconds is 'duration', wanted a number \(the file has",
        ),
        (["a.tar\tx\ten\t1", "", "a.tar\tx\ten\tlong"], "line 3: column duration in seconds is 'long'"),
        (["\tx\ten\t1"], "line 1: column shard path is empty"),
        (["a.tar\t\ten\t1"], "line 1: column sample id is empty"),
        ([], r"m\.tsv"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read("filelist", write_tsv(tmp_path / "m.tsv", *lines), root=tmp_path)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.tsv").write_bytes(b"a.tar\tx\ten\t1\na.tar\t\xff\ten\t1\n")
    with pytest.raises(ManifestError, match=r"m\.tsv, line 2: is not UTF-8"):
        read("filelist", tmp_path / "m.tsv", root=tmp_path)


_cell = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0\t"), max_size=6)

_seconds = st.one_of(
    st.sampled_from(["", "x", "1,5", " 1", "1 ", "0x1"]),
    st.floats(allow_nan=False).map(repr),
    st.integers(-5, 10**6).map(str),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(_cell, _cell, _cell, _seconds), max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    extra=st.sampled_from(["", "\t", "a", '"']),
)
def test_parsing_equals_splitting_lines(
    tmp_path: Path, rows: list[tuple[str, str, str, str]], end: str, extra: str
) -> None:
    content = end.join("\t".join(row) for row in rows) + extra
    path = tmp_path / "m.tsv"
    path.write_bytes(content.encode())
    expected = [line.split("\t") for line in content.removeprefix("\ufeff").split(end) if line]
    try:
        table = list_filelist(SourceConfig(kind="filelist", manifest=str(path))).rows
    except ManifestError:
        assert not expected or not all(map(_acceptable, expected))
        return
    assert all(map(_acceptable, expected))
    tars = list(dict.fromkeys(fields[0] for fields in expected))
    expected.sort(key=lambda fields: tars.index(fields[0]))
    found = zip(*(table[name].to_pylist() for name in ("sample_id", "language", "duration_s")), strict=True)
    for (sample_id, language, duration_s), fields in zip(found, expected, strict=True):
        assert (sample_id, language or "") == (fields[1], fields[2])
        assert duration_s == float(fields[3]) if fields[3] else math.isnan(duration_s)


def _acceptable(fields: list[str]) -> bool:
    """Four columns, the first two not empty, the last a plain number or nothing."""
    if len(fields) != 4 or not fields[0] or not fields[1]:
        return False
    return not fields[3] or re.fullmatch(r"[+-]?(inf|\d+(\.\d*)?(e[+-]?\d+)?)", fields[3], re.ASCII) is not None
