"""`kind = "text"`: rows of texts, ids, and what is refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.readers import line_blocks as lines
from forebay.rows.readers.text_files import JsonLines
from tests.rows.helpers import read_rows


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path, **changes: Any) -> Any:
    return read_rows(SourceConfig(kind="text", manifest=str(path), **changes), cache_root="caches")


def test_rows_are_the_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "texts.jsonl",
        {"id": "a", "text": "one", "language": "en", "prompt": "say"},
        "",
        {"text": "zwei", "language": "de", "audio": "not/read.flac"},
        {"sample_id": "c", "text": None},
    )
    manifest = read(path)
    assert [file.name for file in manifest.files] == ["texts.jsonl"]
    rows = manifest.rows.select(["sample_id", "explicit_id", "text", "language", "prompt", "duration_s"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("a", True, "one", "en", "say", 0.0),
        ("texts/3", False, "zwei", "de", None, 0.0),
        ("c", True, None, None, None, 0.0),
    ]
    assert manifest.absent == ()


def test_filters_and_folders(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(
            tmp_path / f"{name}.jsonl", *({"text": f"{name}{i}", "language": "en" if i % 2 else "fr"} for i in range(4))
        )
    rows = read(tmp_path, languages=("en",), exclude=("a/2",), max_samples=2).rows
    assert rows["sample_id"].to_pylist() == ["a/4", "b/2"]
    assert rows["group"].to_pylist() == rows["file"].to_pylist() == [0, 1]


def test_an_id_twice_fails_and_growth_renames_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "x"}, {"id": "y", "text": "y"}, {"id": "y", "text": "z"})
    manifest = read(path)
    assert [(i, reason) for i, reason, _ in manifest.failed()] == [("y", "duplicate_id")]
    ids = manifest.rows["sample_id"].to_pylist()
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"text": "more"}\n')
    assert read(path).rows["sample_id"].to_pylist() == [*ids, "t/4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a"}', r"line 2: has no field text, wanted a string or null; correct the manifest"),
        ('{"id": "", "text": "a"}', r"line 2: field sample_id is empty, wanted an id"),
        ('{"text": 3}', r"line 2: field text is a number \(3\), wanted a string"),
        ("[]", r"line 2: is a list \(\[\]\), wanted an object"),
        ('{"text"', r"line 2: is not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "texts.jsonl", {"text": "good"}, line)
    with pytest.raises(ManifestError, match=message):
        read(path)


def test_no_rows_at_all(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"texts.jsonl: no rows"):
        read(write(tmp_path / "texts.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match=r"holds no manifest of kind text"):
        read(tmp_path / "empty")


def plain(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def texts(manifest: Any) -> list[tuple[str, str]]:
    return list(zip(manifest.rows["sample_id"].to_pylist(), manifest.rows["text"].to_pylist(), strict=True))


def test_plain_text_is_a_text_a_line(tmp_path: Path) -> None:
    path = plain(tmp_path / "p.txt", "\ufeffone\r\n\n \t\nzwei, {\u2028} \r\n  three\rfour".encode())
    manifest = read(path)
    assert texts(manifest) == [("p/1", "one"), ("p/4", "zwei, {\u2028} "), ("p/5", "  three\rfour")]
    assert manifest.rows["row"].to_pylist() == [0, 1, 2]
    assert manifest.rows["language"].to_pylist() == manifest.rows["prompt"].to_pylist() == [None] * 3
    assert not any(manifest.rows["explicit_id"].to_pylist())


def test_a_plain_line_that_cannot_be_a_text_costs_that_sample(tmp_path: Path) -> None:
    path = plain(tmp_path / "p.txt", b"good\n\xff\xfe bad\n" + b"x" * 41 + b"\n" + b"y" * 40 + b"\r\nlast\n")
    manifest = read(path, max_sample_bytes=40)
    assert texts(manifest) == [("p/1", "good"), ("p/4", "y" * 40), ("p/5", "last")]
    assert manifest.rows["row"].to_pylist() == [0, 3, 4]
    (_, bad_text, named), (_, too_large, limit) = manifest.failed()
    assert (bad_text, too_large) == ("bad_text", "too_large")
    assert "p.txt, line 2: is not UTF-8" in named
    assert limit.endswith("line 3: has more than 40 bytes, which is source.max_sample_bytes; correct the manifest")
    assert manifest.counts()["failed"] == {"bad_text": 1, "too_large": 1}


def test_a_file_without_line_ends_fills_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with open(path, "wb") as file:
        file.truncate(256 << 20)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    tracemalloc.start()
    try:
        manifest = read(path, max_sample_bytes=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert texts(manifest) == [("p/2", "last")]
    assert manifest.counts()["failed"] == {"too_large": 1}
    assert peak < 8 << 20


def test_folders_lists_and_globs_of_plain_text(tmp_path: Path) -> None:
    for name in ("b", "a"):
        plain(tmp_path / f"{name}.txt", f"{name}1\n{name}2\n".encode())
    everything = [("a/1", "a1"), ("a/2", "a2"), ("b/1", "b1"), ("b/2", "b2")]
    assert texts(read(tmp_path)) == texts(read(tmp_path / "*.txt")) == everything
    write(tmp_path / "c.jsonl", {"text": "c1"})
    assert texts(read(tmp_path)) == [("c/1", "c1")]  # a licence beside JSON lines is no text
    both = read_rows(
        SourceConfig(kind="text", manifest=(str(tmp_path / "c.jsonl"), str(tmp_path / "a.txt"))), cache_root="caches"
    )
    assert texts(both) == [("c/1", "c1"), *everything[:2]]
    assert [file.name for file in both.files] == ["c.jsonl", "a.txt"]


def test_json_lines_are_what_they_are_by_any_name(tmp_path: Path) -> None:
    path = write(tmp_path / "texts.txt", "", {"text": "one", "id": "x"})
    assert texts(read(path)) == [("x", "one")]
    assert texts(read(plain(tmp_path / "p.txt", b'{"no": "text"}\n{"text": "x"}\n')))[0] == ("p/1", '{"no": "text"}')


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1f\x8b\x08 and so on", r"p\.txt is compressed \(gzip\), wanted plain text in UTF-8.*unpack it: gzip -dk"),
        ("text".encode("utf-16"), r"p\.txt is text in UTF-16, wanted plain text in UTF-8.*save it as UTF-8"),
        (b"\n \n", r"p\.txt: no rows"),
    ],
)
def test_what_is_no_plain_text_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read(plain(tmp_path / "p.txt", data))


def test_plain_text_has_no_language(tmp_path: Path) -> None:
    path = plain(tmp_path / "p.txt", b"one\n")
    with pytest.raises(ManifestError, match=r"whose lines have no language, and source.languages is \['en'\]"):
        read(path, languages=("en",))


class _Reads:
    """Counts the bytes of files that a listing reads, and the JSON objects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = self.num_objects = 0
        blocks, made = lines._blocks, JsonLines._made
        monkeypatch.setattr(lines, "_blocks", lambda file, *args, **named: blocks(_Counted(file, self), *args, **named))

        def counted(of: Any, *line: Any) -> Any:
            self.num_objects += 1
            return made(of, *line)

        monkeypatch.setattr(JsonLines, "_made", counted)


class _Counted:
    def __init__(self, file: Any, reads: _Reads) -> None:
        self._file, self._reads = file, reads

    def read(self, size: int) -> bytes:
        data = bytes(self._file.read(size))
        self._reads.num_bytes += len(data)
        return data


def test_nothing_is_read_behind_the_last_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "a.txt", b"".join(b"%d\n" % i for i in range(10)))
    plain(tmp_path / "b.txt", b"".join(b"%070d\n" % i for i in range(10_000)))
    plain(tmp_path / "c.txt", b"never\n")
    reads = _Reads(monkeypatch)
    manifest = read(tmp_path, max_samples=14, exclude=("a/3", "b/2"))
    wanted = [f"a/{n}" for n in range(1, 11) if n != 3] + ["b/1", "b/3", "b/4", "b/5", "b/6"]
    assert manifest.rows["sample_id"].to_pylist() == wanted
    # The first block of a file is looked at for its form, and read for its lines.
    assert reads.num_bytes <= 2 * 20 + 2 * lines._FIRST_BYTES
    assert len(manifest.files) == 3  # all of them are in the key


def test_the_same_of_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.jsonl", *({"text": str(i)} for i in range(50)), "[")
    reads = _Reads(monkeypatch)
    assert read(path, max_samples=5).rows["text"].to_pylist() == [*"01234"]
    assert reads.num_objects == 5
    with pytest.raises(ManifestError, match=r"line 51: is not JSON"):
        read(path, max_samples=5, languages=("en",))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.sampled_from([None, "a", "b", "t/2", "u/t/1", "t/t/1"]), min_size=1, max_size=8),
    max_samples=st.integers(1, 8),
    exclude=st.sets(st.sampled_from(["a", "t/1", "u/t/1"])),
)
def test_stopping_early_leaves_the_samples_of_reading_all(
    tmp_path: Path, ids: list[str | None], max_samples: int, exclude: set[str]
) -> None:
    for name in ("s", "u"):
        (tmp_path / name).mkdir(exist_ok=True)
        write(tmp_path / name / "t.jsonl", *({"text": str(i), "id": given} for i, given in enumerate(ids)))
    # Two files whose derived ids are the same: names are relative to each entry's folder.
    entries = tuple(str(tmp_path / name / "t.jsonl") for name in ("s", "u"))
    source = SourceConfig(kind="text", manifest=entries, exclude=tuple(exclude))
    everything = read_rows(source, cache_root="caches")
    first = read_rows(replace(source, max_samples=max_samples), cache_root="caches")
    assert texts(first) == texts(everything)[:max_samples]
