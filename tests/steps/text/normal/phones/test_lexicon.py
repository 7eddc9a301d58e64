"""Lexicons: what a file may say, and words of texts in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.steps.text.normal.normal_step import Problem
from forebay.steps.text.normal.phones import Lexicon, LexiconPhones, Readings, lexicon_digest, read_lexicon

CMU = b";;; CMU\nHELLO\tHH AH0 L OW1\r\nWORLD\tW ER1 L D\nREAD\tR EH1 D\n\nDON'T\tD OW1 N T\nWELL-OFF\tW EH1 L AO2 F\n"
MISSING = 'the lexicon has no \'Zaphod\'; add it, or set fallback = "keep" or "espeak" in text.phones'


def _read(folder: Path, content: bytes, *, readings: Readings = "refuse") -> Lexicon:
    path = folder / "cmu.tsv"
    path.write_bytes(content)
    return read_lexicon(path, digest=lexicon_digest(path), readings=readings)


def _step(folder: Path, content: bytes = CMU, **settings: object) -> LexiconPhones:
    (folder / "cmu.tsv").write_bytes(content)
    return LexiconPhones.of_settings({"lexicon": "cmu.tsv", **settings}, folder)


def test_words_are_found_in_any_case_without_the_marks_around_them(tmp_path: Path) -> None:
    lexicon = _read(tmp_path, CMU)
    assert lexicon.parts('"Hello," don\'t: well-off hello-world!') == ["Hello", "don't", "well-off", "hello", "world"]
    assert lexicon.phones("hello") == ("HH", "AH0", "L", "OW1")
    assert lexicon.phones("nobody") is None


def test_a_word_as_it_is_written_comes_before_its_lower_case(tmp_path: Path) -> None:
    lexicon = _read(tmp_path, b"polish\tp o l\nPolish\tp ow l\n")
    assert [lexicon.phones(word) for word in ("Polish", "polish", "POLISH")] == [
        ("p", "ow", "l"), ("p", "o", "l"), ("p", "o", "l"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"read\tr eh d\nread(2)\tr iy d\n", r"two readings of 'read': line 1 says 'r eh d', line 2 'r iy d'; remove"),
        (b"read\tr eh d\nx\ty\nread\tr iy d\n", r"line 1 says 'r eh d', line 3"),
        (b"hello  HH AH0\n", r"line 1 is 'hello  HH AH0', wanted a word, a tab, and phones"),
        (b"hello\t \n", r"line 1 is"),
        (b"\tHH\n", r"line 1 is"),
        (b"a\tb\tc\n", r"line 1 is"),
        (b"a\tb\nh\xffllo\tc\n", r"line 2: byte 2 is not UTF-8"),
        (b"a\0\tb\n", r"line 1 is"),
        (b"\n;;; nothing\n", r"has no words"),
    ],
)
def test_a_lexicon_that_says_nothing_or_two_things_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _read(tmp_path, content)
    assert caught.value.code == "FB118"


def test_the_first_reading_is_taken_where_the_config_says_so(tmp_path: Path) -> None:
    lexicon = _read(tmp_path, b"read\tr eh d\nread(2)\tr iy d\nread(3)\tr eh d\n", readings="first")
    assert lexicon.phones("read") == ("r", "eh", "d")
    assert _read(tmp_path, b"read\tr  eh d\nread(2)\tr eh d \n").phones("read") == ("r", "eh", "d")


def test_a_lexicon_that_changed_or_is_not_there_is_refused(tmp_path: Path) -> None:
    step = _step(tmp_path)
    (tmp_path / "cmu.tsv").write_bytes(CMU + b"new\tn\n")
    with pytest.raises(ConfigError, match=r"the file changed in between: run the command again"):
        step.open()
    with pytest.raises(ConfigError, match=r"cannot read .*none\.tsv: No such file"):
        LexiconPhones.of_settings({"lexicon": "none.tsv"}, tmp_path)


def test_the_key_knows_the_lexicon_by_its_content(tmp_path: Path) -> None:
    step = _step(tmp_path)
    (tmp_path / "other").mkdir()
    assert _step(tmp_path / "other").identity() == step.identity()
    assert str(tmp_path) not in str(step.identity())
    assert _step(tmp_path, CMU + b"a\tb\n").identity() != step.identity()


def test_texts_become_phones_of_their_words(tmp_path: Path) -> None:
    run = _step(tmp_path, punctuation="keep").open()
    assert run(["Hello, world!", "Don't - read"], ["", "xx"]) == [
        "HH AH0 L OW1 , | W ER1 L D !",
        "D OW1 N T | R EH1 D",
    ]


@pytest.mark.parametrize(
    ("fallback", "result"),
    [
        ("keep", "HH AH L OW | Zaphod | W ER L D"),
        ("fail", Problem("unknown_word", MISSING)),
    ],
)
def test_words_that_are_missing(tmp_path: Path, fallback: str, result: str | Problem) -> None:
    run = _step(tmp_path, fallback=fallback, stress=False).open()
    assert run(["hello Zaphod world", "hello", "?!"], ["en", "en", "en"]) == [
        result,
        "HH AH L OW",
        Problem("no_phones", "nothing of '?!' is spoken"),
    ]


@given(content=st.binary(max_size=60))
def test_whatever_a_file_holds_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    lexicon = Lexicon({}, {})
    with contextlib.suppress(ConfigError):
        lexicon = _read(folder, content)
    assert all(word and phones and "\t" not in word for word, phones in lexicon.words.items())
    assert len(lexicon.lower) <= len(lexicon.words)
