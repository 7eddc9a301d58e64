"""Files of other forms given for JSON lines: each is named, and what the message tells to run makes JSON lines."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.readers.json_lines import not_lines
from tests.rows.helpers import read_manifest
from tests.rows.pictures import read_conversations

ROWS = [{"audio": "a.flac", "text": "hello, world"}, {"audio": "b.flac", "text": "bye"}]
FORMS = {
    "t.csv": ('audio,text\na.flac,"hello, world"\nb.flac,bye\n', "a CSV,"),
    "t.jsonl": ('\ufeffaudio,text\r\na.flac,"hello, world"\r\nb.flac,bye\r\n', "a CSV,"),
    "t.tsv": ("audio\ttext\na.flac\thello, world\nb.flac\tbye\n", "a TSV,"),
    "semicolons.txt": ("audio;text\na.flac;hello, world\nb.flac;bye\n", 'a CSV with ";",'),
    "bars": ("audio|text\na.flac|hello, world\nb.flac|bye\n", 'a table with "|",'),
    "pretty $a.json": (json.dumps(ROWS[0], indent=2), "one JSON object over several lines,"),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_a_table_is_named_and_its_line_makes_json_lines(tmp_path: Path, name: str) -> None:
    content, form = FORMS[name]
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="")
    with pytest.raises(ManifestError) as caught:
        read_manifest(SourceConfig(kind="jsonl", manifest=str(path)))
    message = str(caught.value)
    assert message.startswith(f"{path} is {form} wanted JSON lines")
    command = message.partition("write its rows as lines: ")[2].partition(" (")[0].replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", f"PYTHONUTF8=1 {command}"], check=True)
    (made,) = [other for other in tmp_path.iterdir() if other != path]
    rows = [json.loads(line) for line in made.read_text().splitlines()]
    assert [{name.lstrip("\ufeff"): value for name, value in row.items()} for row in rows] == ROWS[: len(rows)]


def test_files_of_bytes_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"audio": [b"x"]}), tmp_path / "p.jsonl")
    with pa.OSFile(str(tmp_path / "s.jsonl"), "wb") as sink, pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])):
        pass
    with zipfile.ZipFile(tmp_path / "z.jsonl", "w") as archive:
        archive.writestr("a", "b")
    (tmp_path / "g.jsonl").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "u.jsonl").write_text("{}", encoding="utf-16")
    wanted = {
        "p": 'a parquet file, wanted JSON lines, one object a line; set source.kind = "hf"',
        "s": 'an arrow stream, .* set source.kind = "hf"',
        "z": "a zip file, .* unpack it",
        "g": rf"compressed \(gzip\), .* unpack it: gzip -dk {tmp_path}/g\.jsonl",
        "u": "text in UTF-16, .* save it as UTF-8",
    }
    for name, message in wanted.items():
        for kind in ("jsonl", "text"):
            with pytest.raises(ManifestError, match=rf"{name}\.jsonl is {message}"):
                read_manifest(SourceConfig(kind=kind, manifest=str(tmp_path / f"{name}.jsonl")))


def test_conversations_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,question,answer\na.jpg,What?,That.\n")
    with pytest.raises(ManifestError, match=r"t\.csv is a CSV, wanted JSON lines"):
        read_conversations(SourceConfig(kind="jsonl", manifest=str(tmp_path / "t.csv")), cache_root=tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "Hello, world\nBye\n",
        "[1, 2]\n[3, 4]\n",
        '"a, b"\n"c, d"\n',
        '{"a": 1, "b": 2}\n{"a": 1,\n',
        "\0,\0\n\0,\0\n",
        "{",
    ],
)
def test_what_cannot_be_told_is_a_line_that_is_wrong(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.jsonl").write_text(content)
    error = not_lines(tmp_path / "m.jsonl", 7, "is not JSON")
    assert str(error) == f"{tmp_path / 'm.jsonl'}, line 7: is not JSON; correct the manifest"
    assert "line 7" in str(not_lines(tmp_path / "gone", 7, "is not JSON"))


ROWS_OF_IMAGES = [
    {"image": "a.png", "question": 'What, [or "who"]?', "answer": "Ü{"},
    {"messages": [{"role": "user", "content": "No image"}, {"role": "assistant", "content": "None."}]},
]
ARRAYS = {
    "plain": lambda rows: json.dumps(rows).encode(),
    "pretty": lambda rows: b"\xef\xbb\xbf \n" + json.dumps(rows, indent=2, ensure_ascii=False).encode() + b"\n\n",
    "lines": lambda rows: b"".join(json.dumps(row).encode() + b"\n" for row in rows),
}


@pytest.mark.parametrize("block_bytes", [90, 1 << 20])
@pytest.mark.parametrize("form", ARRAYS)
@pytest.mark.few
def test_an_array_of_objects_is_read_as_its_lines_would_be(
    tmp_path: Path, form: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.rows.readers.table_records.BLOCK_BYTES", block_bytes)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "s.json").write_bytes(ARRAYS[form]([*ROWS, {"audio": "c.flac", "text": "né"}]))
    (tmp_path / "v.json").write_bytes(ARRAYS[form](ROWS_OF_IMAGES * 3))
    for kind in ("jsonl", "table"):
        found = read_manifest(SourceConfig(kind=kind, manifest=str(tmp_path / "s.json")))
        assert found.rows["text"].to_pylist() == ["hello, world", "bye", "né"]
        config = SourceConfig(kind=kind, manifest=str(tmp_path / "v.json"))
        images = read_conversations(config, cache_root=tmp_path)
        assert [len(names) for names in images.rows["images"].to_pylist()] == [1, 1, 1, 0, 0, 0]
        assert "Ü{" in images.rows["text"][0].as_py()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'[{"audio": "a", "text": "b"}', "its array is not closed: a ] is missing"),
        (b'[{"audio": "a", "text": "b"}, {"audio"', "its array is not closed: a ] is missing"),
        (b'[{"audio": "a", "text": "b"}, {"audio"]', "object 2: is no JSON"),
        (b'[{"audio": "a", "text": "b"}] [{}]', "object 2: is no JSON"),
        (b'[{"audio": "a"}]', "object 1: has no field text"),
        (b"[]", "no rows"),
    ],
)
def test_a_damaged_array_is_refused_with_the_object(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(ManifestError, match=problem):
        read_manifest(SourceConfig(kind="jsonl", manifest=str(tmp_path / "m.json")))


def test_an_array_of_texts_alone_is_named_and_its_line_makes_json_lines(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(ROWS))
    with pytest.raises(ManifestError, match=r"m\.json is a JSON array, wanted JSON lines"):
        read_manifest(SourceConfig(kind="text", manifest=str(tmp_path / "m.json")))
