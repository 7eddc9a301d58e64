"""The text line: every text once, in order, alone; what fails costs that text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.steps.recipe import load_config
from forebay.steps.text.language_detector import Detect, Detector
from forebay.steps.text.line import PreparedTexts, TextLine
from forebay.steps.text.normal.normal_forms import Lower, Nfkc
from forebay.steps.text.normal.normal_step import NORMAL, NormalStep, Problem, Runner, normal_step
from tests.strategies import transcripts

CALLS: list[tuple[str, str]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Shout(NormalStep):
    """Writes a text with its language; fails for a text with an x."""

    name: ClassVar[str] = "shout"
    reads_language: ClassVar[bool] = True
    of_prompts: ClassVar[bool] = False

    def open(self) -> Runner:
        return _shout


def _shout(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
    CALLS.extend(zip(texts, languages, strict=True))
    return [
        Problem("no_x", f"{text!r} has an x") if "x" in text else f"{text}!{language}"
        for text, language in zip(texts, languages, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class ByLength(Detector):
    """Short texts are in `aa`, longer ones in `bb`; of an empty one nothing can be said."""

    def open(self) -> Detect:
        return lambda texts: [(("aa" if len(text) < 3 else "bb") if text else "", 0.5) for text in texts]


def test_normalisation_composes_and_collapses() -> None:
    (found,) = TextLine().open().prepare([" e\u0301\u00a0\t\ufb01n\n\u2460 "], [""])
    assert found == PreparedTexts("\u00e9 fin 1", "")


@given(text=transcripts())
@pytest.mark.parametrize("step", [Nfkc(), Lower()])
def test_quick_steps_done_twice_change_nothing_more(step: NormalStep, text: str) -> None:
    run = step.open()
    once = run([text], [""])
    assert run([str(once[0])], [""]) == once


@given(texts=st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["", "en", "hi"])), max_size=8))
def test_what_a_text_becomes_depends_on_it_alone(texts: list[tuple[str, str]]) -> None:
    line = TextLine(steps=(Nfkc(), Shout()), detector=ByLength(mode="detect_missing")).open()
    CALLS.clear()
    together = line.prepare([text for text, _ in texts], [language for _, language in texts])
    assert len(CALLS) <= len(set(texts))  # each different text once
    assert together == [line.prepare([text], [language])[0] for text, language in texts]
    for (text, language), found in zip(texts, together, strict=True):
        if "\0" in text:
            assert isinstance(found, Problem)
            assert found.reason == "bad_text"
        elif isinstance(found, PreparedTexts):
            assert found.text.endswith(f"!{found.language}")
            assert found.language == (language or found.detected)
            assert (found.detected == "") == (bool(language) or text == "")
        else:
            assert found.reason == "no_x"


def test_steps_say_what_the_text_is_behind_them() -> None:
    line = TextLine(steps=(Nfkc(), Shout(), Lower())).open()
    found, failed, bad = line.stages([" \ufb01N", "x", "\0"], ["EN", "", ""])
    assert found.steps == (("nfkc", "fiN"), ("shout", "fiN!EN"), ("lower", "fin!en"))
    assert failed.steps == (("nfkc", "x"), ("shout", Problem("no_x", "'x' has an x")))
    assert (bad.steps, bad.prepared) == ((), Problem("bad_text", "text has a NUL at character 0; clean the manifest"))
    assert line.prompts(["a\u00a0A", "\0"], ["", ""])[0] == "a a"  # not for hot words: Shout
    assert isinstance(line.prompts(["\0"], [""])[0], Problem)


@given(texts=st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["", "en", "hi"])), max_size=8))
def test_stages_end_where_the_line_does(texts: list[tuple[str, str]]) -> None:
    line = TextLine(steps=(Nfkc(), Shout(), Lower()), detector=ByLength(mode="detect_missing")).open()
    bodies, languages = [text for text, _ in texts], [language for _, language in texts]
    for staged, prepared in zip(line.stages(bodies, languages), line.prepare(bodies, languages), strict=True):
        assert staged.prepared == prepared
        if isinstance(prepared, PreparedTexts):
            assert [name for name, _ in staged.steps] == ["nfkc", "shout", "lower"]
            assert staged.steps[-1][1] == prepared.text
            assert (staged.language, staged.detected) == (prepared.language, prepared.detected)


def test_keys_know_the_steps_and_not_how_they_are_written() -> None:
    assert TextLine().document() == {"normalize": "nfkc"}
    assert TextLine(steps=()).document() == {"normalize": "none"}
    document = TextLine(steps=(Nfkc(), Lower())).document()
    assert document == {"normalize": [{"step": "Nfkc", "version": 1}, {"step": "Lower", "version": 1}]}
    assert set(TextLine(detector=ByLength(mode="detect")).document()) == {"normalize", "language"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalize": ["nfkc", "lowr"]}, r'unknown step "lowr"; did you mean "lower"\?'),
        ({"normalize": ["nfkc", "nfkc"]}, r'"nfkc" stands twice'),
        ({"normalize": ["indic", "nfkc"]}, r'"nfkc" behind "indic" joins .*put "nfkc" first'),
        ({"normalize": ["numbrs"]}, r'did you mean "numbers"\?'),
        ({"normalize": ["my.txt:f"]}, r'"my\.txt:f" is no "file\.py:function"'),
        ({"normalize": ["my.py:f"]}, r"which is code, and run\.allow_code is false"),
        ({"normalize": [1]}, r"text\.normalize"),
        ({"normalize": "lower"}, r'wants "nfkc" or "none" or a list of strings'),
        ({"normalize": ["phones"]}, r"both are needed"),
        ({"phones": {"backend": "espeak"}}, r"both are needed"),
        ({"languages": ["en"]}, r"languages and min_confidence are of language"),
        ({"min_confidence": 0.5}, r"languages and min_confidence are of language"),
        ({"language": "detect", "min_confidence": 2.0}, r"min_confidence is 2.0, wanted 0 to 1"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    document = {
        "name": "texts",
        "source": {"kind": "text", "manifest": "texts.txt"},
        "audio": {"features": "none"},
        "text": {"tokenizer": "tokenizer", **settings},
    }
    with pytest.raises(ConfigError, match=message):
        load_config(document)


def test_every_step_has_its_name() -> None:
    assert {name: normal_step(name).name for name in NORMAL} == {name: name for name in NORMAL}
