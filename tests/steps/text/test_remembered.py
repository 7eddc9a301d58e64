"""Values that a store of texts knows are not made again: across lines, processes and caches; failures are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.text.language_detector import Detect, Detector
from forebay.steps.text.line import _PROBE, OpenLine, PreparedTexts, TextLine, bad_text, text_of_bytes, text_to_bytes
from forebay.steps.text.normal import normal_step as table
from forebay.steps.text.normal.normal_forms import Nfkc, WhisperBasic
from forebay.steps.text.normal.normal_step import Code, NormalStep, Problem, Runner, Where
from forebay.store.cache import open_cache
from forebay.store.texts import TextStore
from forebay.train.uncached.uncached_source import UncachedSource
from tests.preprocess.here_pool import build_here
from tests.text_corpus import demo_texts, text_config

ASKED: list[str] = []
"""Texts that a step or a detector was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loud(NormalStep):
    """Writes a text in capital letters; fails for one with a §."""

    name: ClassVar[str] = "loud"
    sign: str = "!"

    @classmethod
    def of(cls, spec: str, where: Where) -> NormalStep:
        return cls()

    def open(self) -> Runner:
        def run(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
            assert len(texts) == len(languages)
            probe = {text for text, _ in _PROBE}
            ASKED.extend(text for text in texts if text not in probe)
            return [Problem("no_sign", "§") if "§" in text else text.upper() + self.sign for text in texts]

        return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged(Loud):
    """Writes a text with its language."""

    reads_language: ClassVar[bool] = True

    def open(self) -> Runner:
        def run(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
            ASKED.extend(texts)
            return [f"{text} {language}" for text, language in zip(texts, languages, strict=True)]

        return run


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLength(Detector):
    """Short texts are in `aa`, longer ones in `bb`; of an empty one nothing can be said."""

    def open(self) -> Detect:
        def run(texts: Sequence[str]) -> list[tuple[str, float]]:
            ASKED.extend(texts)
            return [(("aa" if len(text) < 3 else "bb") if text else "", len(text) / 7) for text in texts]

        return run


@pytest.fixture(autouse=True)
def asked() -> Iterator[None]:
    ASKED.clear()
    yield
    ASKED.clear()


def prepared(
    line: OpenLine, texts: Sequence[str], store: TextStore | None, language: str = ""
) -> list[PreparedTexts | Problem]:
    ASKED.clear()
    found = line.prepare(texts, [language] * len(texts), store=store)
    line.keep()
    return found


def test_another_process_makes_nothing_again_and_one_new_text_is_one_text_of_work(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    texts = [f"text {i % 50}" for i in range(100)]
    line = TextLine(steps=(Nfkc(), Loud()))
    first = prepared(line.open(), texts, store)
    assert sorted(ASKED) == sorted(set(texts))
    assert prepared(line.open(), texts, store) == first
    assert ASKED == []
    texts[17] = "edited"
    again = prepared(line.open(), texts, store)
    assert ASKED == ["edited"]
    assert again == prepared(line.open(), texts, None)
    assert len(set(ASKED)) == len(ASKED) == 51


def test_what_is_detected_does_not_hang_on_the_steps_or_on_the_mode(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    texts = ["", "a", "abc", "abc"]
    first = prepared(TextLine(detector=ByLength(mode="detect")).open(), texts, store)
    assert sorted(ASKED) == ["", "a", "abc"]
    line = TextLine(steps=(Nfkc(), Loud()), detector=ByLength(mode="detect_missing")).open()
    assert [result.detected for result in prepared(line, texts, store) if isinstance(result, PreparedTexts)] == [
        *("", "aa", "bb", "bb")
    ]
    assert sorted(ASKED) == ["", "a", "abc"]  # by the step alone, which is new
    assert first[2] == PreparedTexts("abc", "bb", "bb", 3 / 7)
    prepared(TextLine(detector=ByLength(mode="detect", languages=("aa",))).open(), texts, store)
    assert len(ASKED) == 3


def test_steps_that_read_the_language_are_asked_for_each_and_others_once(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    for step, expected in ((Loud(), ["a", "b"]), (Tagged(), ["a", "b"] * 2)):
        line = TextLine(steps=(step,))
        ASKED.clear()
        found = [line.open().prepare(["a", "b"], [name] * 2, store=None) for name in ("en", "hi")]
        ASKED.clear()
        opened = line.open()
        opened._normalizer(store)
        ASKED.clear()
        assert [opened.prepare(["a", "b"], [name] * 2, store=store) for name in ("en", "hi")] == found
        assert expected == ASKED


def test_what_fails_is_asked_for_again(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    for _ in range(2):
        found = prepared(TextLine(steps=(Loud(),)).open(), ["§", "bad\0", "good"], store)
        assert [result.reason for result in found if isinstance(result, Problem)] == ["no_sign", "bad_text"]
        assert "§" in ASKED
    assert ASKED == ["§"]


def test_steps_of_other_settings_and_of_another_library_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TextStore(tmp_path)
    prepared(TextLine(steps=(Loud(),)).open(), ["a"], store)
    assert prepared(TextLine(steps=(Loud(sign="?"),)).open(), ["a"], store) == [PreparedTexts("A?", "")]
    prepared(TextLine(steps=(Loud(version=2),)).open(), ["a"], store)
    assert ASKED == ["a"]

    def found(_: Loud) -> Mapping[str, Any]:
        return {"program": "2.0"}

    with monkeypatch.context() as patch:
        patch.setattr(Loud, "found", found)
        prepared(TextLine(steps=(Loud(),)).open(), ["a"], store)
        assert ASKED == ["a"]
    monkeypatch.setattr("forebay.steps.text.line._PROBE", (("another result", ""),))
    prepared(TextLine(steps=(Loud(),)).open(), ["a"], store)
    assert ASKED == ["another result", "a"]


def test_texts_are_kept_by_the_tables_of_unicode_and_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(step: NormalStep) -> str:
        return json.dumps(TextLine(steps=(Nfkc(), step)).open()._identity, sort_keys=True)

    before = {step: identity(step) for step in (Loud(), WhisperBasic())}
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: f"{name} of another day")
        assert [identity(step) == kept for step, kept in before.items()] == [True, False]
    monkeypatch.setattr("unicodedata.unidata_version", "99.0")
    assert [identity(step) == kept for step, kept in before.items()] == [False, False]


def test_a_function_that_raises_with_an_address_has_one_store(tmp_path: Path) -> None:
    source = "kept = []\ndef shout(text, language):\n    kept.append(object())\n    raise ValueError(kept[-1])\n"
    (tmp_path / "my.py").write_text(source)
    line = TextLine(steps=(Code.of("my.py:shout", Where(folder=tmp_path, tokenizer=tmp_path, allow_code=True)),)).open()
    first, second = line.prepare(["a"], [""]), line.prepare(["a"], [""])
    assert "object at 0x" in str(first)
    assert first != second
    assert line._identity == line._identity


def test_quick_steps_never_touch_the_store(tmp_path: Path) -> None:
    assert prepared(TextLine().open(), ["a", "b"], TextStore(tmp_path)) == [
        PreparedTexts("a", ""),
        PreparedTexts("b", ""),
    ]
    assert list(tmp_path.iterdir()) == []


@given(texts=st.lists(st.tuples(st.text(max_size=4), st.sampled_from(["", "en"])), max_size=8))
def test_with_a_store_everything_is_as_without(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]]
) -> None:
    store = TextStore(tmp_path_factory.getbasetemp())
    line = TextLine(steps=(Nfkc(), Tagged()), detector=ByLength(mode="detect_missing")).open()
    columns = [text for text, _ in texts], [language for _, language in texts]
    assert line.prepare(*columns, store=store) == line.prepare(*columns) == line.prepare(*columns, store=store)


@given(text=st.text(max_size=6).filter(lambda text: bad_text(text) is None), became=st.text(max_size=3))
def test_texts_are_kept_as_they_became_and_nothing_of_those_that_stayed(text: str, became: str) -> None:
    assert text_to_bytes(text, text) == b""
    if bad_text(became) is None:
        kept = text_to_bytes(text, became)
        assert kept is not None
        assert text_of_bytes(text, kept) == became


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.NORMAL, "loud", f"{__name__}:Loud")


@pytest.mark.usefixtures("loud")
def test_builds_share_what_was_made_and_an_edited_line_costs_a_shard_and_a_text(tmp_path: Path) -> None:
    rows = demo_texts()
    settings = ('text.normalize=["nfkc", "loud"]',)
    report = build_here(text_config(tmp_path, *settings, rows=rows))
    made = {row["text"] for row in rows} & set(ASKED)
    assert len(made) > 40
    ASKED.clear()
    other = build_here(text_config(tmp_path, *settings, "text.max_label_tokens=400", rows=rows))
    assert (other.key != report.key, other.shards_written) == (True, report.shards_written)
    assert not made & set(ASKED)  # the probe's alone
    ASKED.clear()
    rows[30]["text"] += " indeed"
    edited = build_here(text_config(tmp_path, *settings, rows=rows))
    assert edited.shards_written == 1
    assert [text for text in ASKED if text.endswith(" indeed")] == [rows[30]["text"]]
    assert not made & set(ASKED)
    ASKED.clear()
    source, cache = UncachedSource(text_config(tmp_path, *settings)), open_cache(edited.cache)
    assert source.read(30)["input_ids"].tolist() == cache.read(30)["input_ids"].tolist()
    assert not {*made, rows[30]["text"]} & set(ASKED)


@pytest.mark.usefixtures("loud")
def test_reading_without_a_cache_keeps_what_it_made(tmp_path: Path) -> None:
    rows = demo_texts()[:9]
    settings = ('text.normalize=["nfkc", "loud"]',)
    first = UncachedSource(text_config(tmp_path, *settings, rows=rows))
    made = {row["text"] for row in rows}
    assert made <= set(ASKED)
    ASKED.clear()
    again = UncachedSource(text_config(tmp_path, *settings, f'run.cache_root="{tmp_path / "caches"}"'))
    assert [again.read(i)["input_ids"].tolist() for i in range(9)] == [
        first.read(i)["input_ids"].tolist() for i in range(9)
    ]
    assert not made & set(ASKED)
