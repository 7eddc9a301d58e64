"""Text of strangers on a terminal: seen, never obeyed."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from forebay import cli
from forebay.errors import ConfigError
from forebay.visible import (
    VisibleStream,
    an,
    json_text,
    named,
    one_message,
    printable,
    printable_lines,
    visible_output,
)
from tests.strategies import wicked_texts

ANY_TEXT = st.text(st.characters(exclude_categories=()))


def is_harmless(shown: str) -> bool:
    """Whether a text has no control characters but line ends, nothing that turns writing round, no lone surrogate."""
    forbidden = [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c != "\n"]
    return not forbidden and not any(unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF") for c in shown)


@pytest.mark.parametrize(
    "text",
    [
        "Привет नमस्ते 你好，世界",
        "क्\u200dष",  # a Hindi conjunct that a joiner keeps apart
        "می\u200cخواهم",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
        "e\u0301 n\u0303",
        "全角\u3000空白",
        "C:\\path and 'quotes'",
    ],
)
def test_ordinary_text_of_any_script_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\x1b[2Jgone\n", "\\x1b[2Jgone\\n"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\tc\x7f\b", "a\\rb\\tc\\x7f\\x08"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066a\u2069", "\\u2066a\\u2069"),
        ("a\u2028b\u2029c\x85", "a\\u2028b\\u2029c\\x85"),
        ("ad\u200dmin", "ad\\u200dmin"),
        ("\u4f60\u200b\u597d", "\u4f60\\u200b\u597d"),
        ("\U000e0041", "\\U000e0041"),
        (os.fsdecode(b"caf\xe9"), "caf\\udce9"),
    ],
)
def test_what_is_not_seen_is_escaped(text: str, wanted: str) -> None:
    assert printable(text) == wanted


@given(ANY_TEXT)
def test_what_is_printable_can_be_printed_on_one_line(text: str) -> None:
    shown = printable(text)
    assert is_harmless(shown)
    assert "\n" not in shown
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert printable(shown) == shown


@given(st.lists(wicked_texts(), max_size=4))
def test_lines_stay_lines(texts: list[str]) -> None:
    assert printable_lines("\n".join(texts)).split("\n") == [
        printable(line) for text in texts or [""] for line in text.split("\n")
    ]


@given(ANY_TEXT)
def test_no_line_of_a_message_but_its_first_begins_like_one(text: str) -> None:
    first, *more = one_message(f"forebay: {text}").split("\n")
    assert first.startswith("forebay: ")
    assert all(line.startswith(" ") for line in more)


@given(st.dictionaries(ANY_TEXT, st.one_of(ANY_TEXT, st.floats(), st.integers())))
def test_json_is_printable_ascii_and_says_the_same(document: dict[str, Any]) -> None:
    text = json_text(document)
    assert text.isascii()
    assert is_harmless(text)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    finite = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in document.items()}
    assert json.loads(text, parse_constant=refuse) == finite


@given(st.lists(ANY_TEXT, max_size=5))
def test_a_stream_takes_any_text_in_any_encoding(texts: list[str]) -> None:
    for encoding in ("utf-8", "ascii", "latin-1"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
        VisibleStream(stream).writelines([f"- {text}\n" for text in texts])
        stream.flush()
        assert is_harmless(raw.getvalue().decode(encoding))


def test_bars_still_draw_over_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    with visible_output(), tqdm(total=2, desc="verify", file=sys.stderr) as bar:
        bar.set_postfix_str("\x1b[31mred", refresh=False)
        bar.update(2)
    drawn = capsys.readouterr().err
    assert "\rverify: " in drawn
    assert is_harmless(drawn.replace("\r", ""))


@given(st.data())
def test_nothing_that_a_command_says_obeys_a_stranger(data: st.DataObject) -> None:
    """Error messages, notes, log records and prints, as `forebay` hands them to the terminal."""
    texts = data.draw(st.lists(wicked_texts(), min_size=4, max_size=4))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))

    def command(_: Any) -> int:
        print(f"cache: {texts[0]}")
        logging.getLogger("forebay.test").warning("left out %s", texts[1])
        error = ConfigError(f"no such thing: {texts[2]}")
        error.add_note(f"note: {texts[3]}")
        raise error

    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "handlers", [])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr("forebay.cli.build_and_look.KeyCommand.run", command)
        assert cli.main(["key", "config.toml"]) == cli.BAD_CONFIG
    written = [stream.detach().getvalue().decode("utf-8") for stream in (out, err)]
    assert all(map(is_harmless, written))
    heads = [line for line in written[1].split("\n")[:-1] if not line.startswith(" ")]
    assert [head.partition(":")[0] for head in heads] == ["WARNING forebay.test", "forebay", "note"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain text", "plain text"),
        ("می\u200cخواهم", "می<ZERO WIDTH NON-JOINER>خواهم"),
        ("\u200fשלום", "<RIGHT-TO-LEFT MARK>שלום"),
        ("a\0b\tc\x85", "a<NUL>b<TAB>c<U+0085>"),
        ("\ud83d!", "<LONE SURROGATE U+D83D>!"),
        ("e\u0301 \u0301", "e<COMBINING ACUTE ACCENT> <COMBINING ACUTE ACCENT>"),
        ("हिन्दी पढ़", "हिन्दी पढ़"),
        ("1\u00a02\u30003", "1<NO-BREAK SPACE>2<IDEOGRAPHIC SPACE>3"),
        ("\u2764\ufe0f", "\u2764<VARIATION SELECTOR-16>"),
        ("\ue000", "<U+E000>"),
    ],
)
def test_what_is_not_seen_has_a_name(text: str, wanted: str) -> None:
    assert named(text) == wanted


@given(ANY_TEXT)
def test_what_has_names_is_printable(text: str) -> None:
    assert printable(named(text)) == named(text)


def test_only_the_program_itself_gives_a_terminal_colours() -> None:
    stream = io.StringIO()
    VisibleStream(stream).write_styled("\x1b[2Jé", "31")
    assert stream.getvalue() == "\x1b[31m\\x1b[2Jé\x1b[0m"


@pytest.mark.parametrize(
    "said", ["an extractor", "a processor", "an int", "a UnivNetModel", "an ASTFeatureExtractor", "a list", "an object"]
)
def test_a_noun_has_its_article(said: str) -> None:
    assert an(said.partition(" ")[2]) == said
