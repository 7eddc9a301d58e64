"""SECURITY.md stays true: every promise names tests that are there; and the promises that no other test holds."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shutil
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageFile
import pytest

from forebay import cli
from forebay.errors import DecodeError
from forebay.store.image.formats import open_image
from tests.preprocess.corpus import speech_corpus
from tests.store.trees import tree

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_TEST = re.compile(r"`(tests/[\w./-]+\.py)::(\w+)`")


_TAG = re.compile(r"\[(\d+\.\d+)\]")


def _section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


PROMISES = [" ".join(bullet.split()) for bullet in re.split(r"\n- ", _section("What is promised"))[1:]]
ROWS = re.findall(r"^\| (\d+\.\d+) \| (.*) \|$", _section("Which tests hold it"), re.MULTILINE)
"""Each tag of the table, and the cell of its tests."""


def _sentences(promise: str) -> list[str]:
    """The sentences of a promise behind its head."""
    body = promise.partition(".** ")[2]
    hidden = re.sub(r"`[^`]*`|\[[\d.]+\]", lambda part: part[0].replace(".", "\0"), body)  # such a dot ends no sentence
    return [part.replace("\0", ".") for part in re.split(r"(?<=[.)])\.? (?=[A-Z`]|forebay )", hidden)]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda text: text.partition(".**")[0][2:40])
def test_every_sentence_of_a_promise_has_a_tag(promise: str) -> None:
    sentences = _sentences(promise)
    assert sentences != [""]
    assert [sentence for sentence in sentences if not _TAG.search(sentence)] == []


def test_every_tag_is_a_row_of_the_table_that_names_tests() -> None:
    assert [tag for promise in PROMISES for tag in _TAG.findall(promise)] == [tag for tag, _ in ROWS]
    assert [tag for tag, cell in ROWS if not re.fullmatch(rf"{_TEST.pattern}(, {_TEST.pattern})*", cell)] == []


def test_every_test_that_the_page_names_is_there() -> None:
    named = _TEST.findall(PAGE)
    assert len(named) > 100
    assert [f"{path}::{name}" for path, name in named if name not in _tests_of(ROOT / path)] == []


def test_no_promise_is_made_without_a_head() -> None:
    assert [int(number) for number in re.findall(r"^- \*\*(\d+)\. .", PAGE, re.MULTILINE)] == [*range(1, 21)]
    assert all(re.match(r"\*\*\d+\. .+?\.\*\* ", promise) for promise in PROMISES)


def _tests_of(path: Path) -> set[str]:
    tree_of_file = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
    return {node.name for node in tree_of_file.body if isinstance(node, ast.FunctionDef)}


def test_only_an_export_is_written_beside_the_tars(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    corpus = speech_corpus(tmp_path / "raw")
    arguments = [
        str(corpus.folder / "train.parquet"),
        "--cache-root",
        str(tmp_path / "caches"),
        "--no-progress",
        "--workers",
        "1",
    ]
    before = tree(corpus.folder)
    assert cli.main(["index", *arguments]) == cli.DONE
    assert tree(corpus.folder) == before
    shutil.rmtree(tmp_path / "caches")
    assert cli.main(["index", *arguments, "--export-json"]) == cli.DONE
    written = {path.name for path in corpus.folder.iterdir()} - {Path(name).name for name in before}
    assert written == {"a.tar.index.json", "b.tar.index.json"}


def test_seven_of_pillows_readers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every format that Pillow can write: which of its readers begins to read them."""
    PIL.Image.init()
    asked: set[str] = set()
    begin = PIL.ImageFile.ImageFile.__init__

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        asked.add(type(self).__name__)
        begin(self, *arguments, **options)

    files = {}
    for kind in sorted(PIL.Image.SAVE):
        buffer = io.BytesIO()
        with contextlib.suppress(Exception):
            PIL.Image.new("RGB", (16, 16), "red").save(buffer, kind)
        files[kind] = buffer.getvalue()
    assert len([data for data in files.values() if data]) > 12
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "__init__", noted)
    for kind, data in files.items():
        with contextlib.suppress(DecodeError):
            open_image(io.BytesIO(data), max_pixels=1000, sample_id=kind)
    readers = ("Bmp", "Gif", "Jpeg", "Png", "Ppm", "Tiff", "WebP")
    assert asked == {f"{reader}ImageFile" for reader in readers}
