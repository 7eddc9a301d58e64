"""`kind = "text"`: rows of texts, ids, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.preprocess.sources.speech.listing import read_rows


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
