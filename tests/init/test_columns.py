"""Which column holds what: by names, and by what stands in the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.init.questions import Chooser, speech_columns
from forebay.init.table_head import TableHead, is_language, likely_columns, path_columns

SENTENCES = ["the first of them", "another one", "and a third", "the last one"]


def table(**columns: Sequence[Any]) -> TableHead:
    rows = tuple(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return TableHead(path=Path("x.csv"), form="csv", names=tuple(columns), rows=rows, num_rows=len(rows))


def names(found: Sequence[Any]) -> list[str]:
    return [each.name for each in found]


def test_the_column_of_recordings_is_the_one_whose_files_are_there(tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    for number in range(4):
        (tmp_path / "wavs" / f"{number}.wav").write_bytes(b"")
    here = [f"wavs/{number}.wav" for number in range(4)]
    gone = [f"old/{number}.wav" for number in range(4)]
    found = path_columns(table(original=gone, file=here, text=SENTENCES), [".wav"], folders=[tmp_path])
    assert [(each.name, each.folder) for each in found] == [("file", tmp_path)]
    bare = [f"{number}.wav" for number in range(4)]
    (one,) = path_columns(table(file=bare), [".wav"], folders=[tmp_path, tmp_path / "wavs"])
    assert one.folder == tmp_path / "wavs"


@pytest.mark.parametrize("name", ["text", "sentence", "Transcription", "transcript", "normalized_text"])
def test_texts_are_found_by_their_usual_names(name: str) -> None:
    assert names(likely_columns(table(**{"speaker": list("abab"), name: ["yes"] * 4}), "text")) == [name]


def test_texts_are_found_by_what_stands_in_them() -> None:
    urls = [f"see https://x/{number} there" for number in range(4)]
    thai = ["สวัสดีครับ", "ขอบคุณครับ", "ลาก่อนครับ", "ยินดีครับ"]
    found = table(gender=["f"] * 4, said=SENTENCES, url=urls, thai=thai, n=[1, 2, 3, 4])
    assert names(likely_columns(found, "text")) == ["said", "thai"]
    assert names(likely_columns(found, "text", taken=("said",))) == ["thai"]


def test_languages_are_codes_that_repeat_or_have_a_usual_name() -> None:
    found = table(tag=["hi", "ta", "hi", "hi"], word=["to", "the", "cat", "sat"], locale=["x1", "x2", "x1", "x1"])
    assert names(likely_columns(found, "language")) == ["locale", "tag"]


@pytest.mark.parametrize(("text", "wanted"), [("hi", True), ("en-US", True), ("pt_br", True), ("zz", False)])
def test_codes_of_languages(text: str, wanted: bool) -> None:  # noqa: FBT001
    assert is_language(text) is wanted


def test_ids_have_a_usual_name_and_differ() -> None:
    found = table(id=["a", "b", "a", "b"], clip_id=["a", "b", "c", "d"], uid=["a", "b", None, "d"])
    assert names(likely_columns(found, "id")) == ["clip_id"]


def test_two_columns_of_text_are_a_question() -> None:
    found = table(path=list("abcd"), text=SENTENCES, translation=SENTENCES[::-1])
    with pytest.raises(ConfigError, match=r"column of x\.csv is text\? Give one.*\n.*--column text=text "):
        speech_columns(found, "path", Chooser())
    chooser = Chooser(given={"column text": "translation"})
    assert speech_columns(found, "path", chooser)["text"] == "translation"
    chosen = speech_columns(found, "path", Chooser(takes_first=True))
    assert chosen["text"] == "text"


def test_a_column_that_is_not_there_is_named_beside_those_that_are() -> None:
    found = table(path=list("abcd"), text=SENTENCES)
    with pytest.raises(ConfigError, match=r"--column text=txt: x\.csv has no such column; it has path, text"):
        speech_columns(found, "path", Chooser(given={"column text": "txt"}))
