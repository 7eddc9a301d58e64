"""The language of a text depends on it alone: its script decides, else py3langid among the script's languages."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError, MissingExtraError
from forebay.steps.text import language_detector as model
from forebay.steps.text.language_detector import (
    MODEL_LANGUAGES,
    MOST_CHARACTERS,
    Detector,
    candidates,
    loaded,
    main_script,
    model_digest,
    model_file,
)
from forebay.steps.text.line import TextLine
from forebay.steps.text.normal.normal_step import NOWHERE
from forebay.steps.text.script import letters_of
from tests.processes import ROOT
from tests.strategies import transcripts


def detector(*languages: str, min_confidence: float = 0.0) -> Detector:
    return Detector.of(mode="detect", languages=languages, min_confidence=min_confidence)


def said(text: str, *languages: str, min_confidence: float = 0.0) -> tuple[str, float]:
    return detector(*languages, min_confidence=min_confidence).open()([text])[0]


@pytest.fixture(scope="module")
def sentences() -> list[tuple[str, str]]:
    """(language, sentence) of the demo texts."""
    lines = (ROOT / "demo" / "text" / "sentences.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["id"][:2], row["text"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *[("สวัสดีครับ", "th"), ("안녕하세요", "ko"), ("გამარჯობა", "ka"), ("Բարեւ ձեզ", "hy"), ("שלום", "he")],
        *[("வணக்கம்", "ta"), ("నమస్కారం", "te"), ("ನಮಸ್ಕಾರ", "kn"), ("നമസ്കാരം", "ml"), ("ආයුබෝවන්", "si")],
        *[("សួស្តី", "km"), ("ສະບາຍດີ", "lo"), ("નમસ્તે", "gu"), ("ନମସ୍କାର", "or"), ("ਸਤ ਸ੍ਰੀ", "pa")],
        *[("Καλημέρα", "el"), ("こんにちは", "ja"), ("東京は日本の首都です", "ja"), ("မင်္ဂလာပါ", "my"), ("ދިވެހި", "dv")],
    ],
)
def test_a_script_of_one_language_decides_at_once(text: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = detector().open()
    monkeypatch.setattr("forebay.steps.text.language_detector.loaded", None)  # calling it would raise
    assert opened([text]) == [(code, 1.0)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("मैं आज बाज़ार जा रहा हूँ और शाम को लौटूँगा।", "hi"),
        ("मी आज बाजारात जात आहे आणि संध्याकाळी परत येईन.", "mr"),
        ("म आज बजार जाँदैछु र साँझ फर्कनेछु।", "ne"),
        ("আমি আজ বাজারে যাচ্ছি এবং সন্ধ্যায় ফিরব।", "bn"),
        ("मी आज बाजारात জা", "mr"),
        ("今天天气很好，我们一起去公园散步吧。", "zh"),
        ("امروز هوا خیلی خوب است و ما به پارک می‌رویم.", "fa"),
        ("آج موسم بہت اچھا ہے اور ہم باغ میں جا رہے ہیں۔", "ur"),
        ("الطقس جميل اليوم وسوف نذهب إلى الحديقة.", "ar"),
        ("The weather is fine today and we will go to the park.", "en"),
    ],
)
def test_a_script_of_several_languages_is_judged_by_the_model(text: str, code: str) -> None:
    found, confidence = said(text)
    assert found == code
    assert 0.4 < confidence <= 1


@pytest.mark.parametrize("text", ["", " \n", "12 345", "👍🏽🙂", "?!", "a", "7 µ", "\u200f\u200c", "x 1"])
def test_nothing_is_said_of_a_text_without_two_letters(text: str) -> None:
    assert said(text) == ("", 0.0)


def test_nothing_is_said_of_scripts_that_nobody_can_judge() -> None:
    assert said("ሰላም እንዴት ነህ") == ("", 0.0)
    assert said("བཀྲ་ཤིས་བདེ་ལེགས") == ("", 0.0)
    assert said("ᚠᚢᚦᚨᚱᚲ") == ("", 0.0)


TABLE = [line.split("\t") for line in (Path(__file__).parent / "sentences.tsv").read_text("utf-8").splitlines()]
"""(language, sentence): 113 of 57 languages, written for this test."""


def test_a_single_candidate_has_the_models_confidence_over_all_languages() -> None:
    assert (len(TABLE), len({code for code, _ in TABLE})) == (113, 57)
    named = {code: detector(code).open() for code, _ in TABLE}
    anything = detector().open()([text for _, text in TABLE])
    surely = 0
    for (code, text), (likeliest, share) in zip(TABLE, anything, strict=True):
        ((found, confidence),) = named[code]([text])
        assert found == code
        assert confidence == share if likeliest == code else confidence < share or likeliest == ""
        surely += confidence >= 0.5
        script = main_script(letters_of(text))[0]
        for other in candidates(()).get(script, ())[:4]:
            assert other == code or said(text, other, min_confidence=0.5)[0] == ""
    assert surely == 111  # not of id beside ms, of sl beside hr


def test_of_detectors_that_say_what_they_said_the_key_stays() -> None:
    for languages, version in (((), 1), (("el", "he"), 1), (("en", "de"), 1), (("en",), 2), (("en", "de", "fa"), 2)):
        assert detector(*languages).version == version


def test_named_languages_are_the_only_candidates() -> None:
    assert said("ሰላም እንዴት ነህ", "am", "en") == ("am", 1.0)
    assert said("שלום", "yi", "en") == ("yi", 1.0)
    assert said("สวัสดีครับ", "en", "de") == ("", 0.0)
    for text, code, other in (("नमस्ते", "hi", "en"), ("東京", "ja", "en"), ("cinquante", "fr", "ru")):
        (found, confidence), among_all = said(text, code, other), said(text)
        assert found == code
        assert confidence < 1.0
        assert among_all[0] != code or confidence == among_all[1]
    assert said("你好吗,我今日好", "zh")[0] == "zh"


def test_the_script_of_most_letters_decides() -> None:
    assert said("Το Firefox ανοίγει")[0] == "el"
    assert said("GNOME 터미널을 여십시오")[0] == "ko"
    assert said("Type the word αβγ into the box to open the settings of the window")[0] == "en"
    assert main_script(letters_of("ab αβ")) == ("greek", 4 / 6)
    assert main_script(letters_of("漢字漢字の"))[0] == "kana"
    assert main_script(letters_of("漢字" * 10 + "の"))[0] == "han"
    assert main_script(Counter({"thai": 1, "lao": 1}))[0] == "thai"  # of equal shares the last name


def test_confidence_shrinks_with_foreign_letters_and_silences_below_the_limit() -> None:
    pure, mixed = said("안녕하세요")[1], said("안녕하세요 GNOME")[1]
    assert (pure, mixed) == (1.0, 0.75)
    assert said("안녕하세요 GNOME", min_confidence=0.8) == ("", 0.75)
    assert said("안녕하세요 GNOME", min_confidence=0.75) == ("ko", 0.75)


@given(texts=st.lists(transcripts(), max_size=6), seed=st.randoms(use_true_random=False))
def test_what_is_said_depends_on_the_text_alone(texts: list[str], seed: object) -> None:
    opened = detector().open()
    words = ["The window is open.", "Das Fenster ist offen.", "खिड़की खुली है।", "窗口打开了。", *texts]
    alone = {text: said(text) for text in words}
    order = list(alone)
    seed.shuffle(order)  # type: ignore[attr-defined]
    assert dict(zip(order, opened(order), strict=True)) == alone
    assert opened(order[:1] * 2) == [alone[order[0]]] * 2
    assert all(0 <= confidence <= 1 for _, confidence in alone.values())


@given(text=transcripts(), min_confidence=st.floats(0, 1))
def test_the_limit_changes_what_is_said_and_no_confidence(text: str, min_confidence: float) -> None:
    (code, confidence), limited = said(text), said(text, min_confidence=min_confidence)
    assert limited == (code if confidence >= min_confidence else "", confidence)


def test_by_default_a_language_must_be_likelier_than_all_others_together() -> None:
    line = TextLine.of({"language": "detect"}, NOWHERE)
    assert line.detector == detector(min_confidence=0.5)
    assert said("cinquante", min_confidence=0.5)[0] == ""
    assert said("cinquante")[0] != ""


def test_a_long_line_is_in_the_language_that_it_begins_in() -> None:
    german = "Das Fenster ist offen und die Tür ist zu. " * 200
    assert len(german) > MOST_CHARACTERS
    assert said(german + "The window is open and the door is shut. " * 100_000) == said(german[:MOST_CHARACTERS])


@pytest.mark.wide
def test_the_model_says_what_py3langid_says(sentences: Sequence[tuple[str, str]]) -> None:
    from py3langid.langid import LanguageIdentifier

    theirs = LanguageIdentifier.from_modelpath(model_file(), norm_probs=True)
    assert set(theirs.labels) - {"zxx"} == MODEL_LANGUAGES
    codes = candidates(())["latin"]
    theirs.set_languages(codes)
    judge = loaded(model_file(), model_digest()).among(codes)
    texts = [text for language, text in sentences[::7] if language in ("de", "en", "es", "fr", "pt")]
    for text, (ours, share) in zip(texts, judge(texts), strict=True):
        code, probability = theirs.classify(text)
        assert ours == code
        assert share == pytest.approx(probability, abs=2e-3)
    assert judge(["ŠKODA"]) == judge(["škoda"])
    assert judge(["1234"]) == [("", 0.0)]


def test_texts_side_by_side_are_judged_as_alone(sentences: Sequence[tuple[str, str]]) -> None:
    judge = loaded(model_file(), model_digest()).among(candidates(())["latin"])
    texts = [text for language, text in sentences if language in ("de", "en", "es", "fr", "pt")][::3]
    texts += ["a", "", "1234", "ab", texts[0] * 30, texts[1] * 200]  # in steps of a byte, and by themselves
    together = judge(texts)
    assert together == [judge([text])[0] for text in texts]
    assert judge(texts[::-1]) == together[::-1]
    assert judge([]) == []


def test_sentences_are_detected(sentences: Sequence[tuple[str, str]]) -> None:
    some = sentences[::5]
    named = detector(*sorted({language for language, _ in some})).open()
    found = [code for code, _ in named([text for _, text in some])]
    right = np.mean([code == language for code, (language, _) in zip(found, some, strict=True)])
    assert right >= 0.98
    free = [code for code, _ in detector().open()([text for _, text in some])]
    assert np.mean([code == language for code, (language, _) in zip(free, some, strict=True)]) >= 0.98


def test_demo_transcripts_of_a_sentence_are_detected() -> None:
    rows = pq.read_table(ROOT / "demo" / "speech" / "train.parquet").to_pylist()
    rows = [row for row in rows if len(row["transcript"].split()) >= 3]
    found = detector("en", "es", "fr", "it", "ru").open()([row["transcript"] for row in rows])
    assert len(rows) > 30
    assert np.mean([code == row["language"] for row, (code, _) in zip(rows, found, strict=True)]) >= 0.98


def test_identity_has_every_setting_and_the_model_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = detector("en", "de", min_confidence=0.5)
    assert one.identity() == {
        "step": "Detector",
        "mode": "detect",
        "languages": ("de", "en"),
        "min_confidence": 0.5,
        "model": model_digest(),
        "version": 1,
    }
    assert detector("de", "en", min_confidence=0.5) == one
    other = Detector.of(mode="detect_missing", languages=("de", "en"), min_confidence=0.5)
    assert other.identity() != one.identity()
    assert other.values_identity() == one.values_identity()
    changed = tmp_path / "model.npz.xz"
    changed.write_bytes(model_file().read_bytes() + b"\0")
    monkeypatch.setattr(model, "model_file", lambda: changed)
    assert model_digest() != one.model
    with pytest.raises(ConfigError, match=r"model\.npz\.xz changed: its sha256 is [0-9a-f]{16}\.\.\., the config was"):
        loaded(changed, one.model)


def test_a_model_of_another_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "model.npz.xz"
    bad.write_bytes(b"no model")
    monkeypatch.setattr(model, "model_file", lambda: bad)
    with pytest.raises(ConfigError, match=r"is no model of py3langid 0\.4 .*forebay\[text\]"):
        loaded(bad, model_digest())


def test_the_digest_imports_nothing_of_py3langid() -> None:
    before = set(sys.modules)
    model_digest()
    assert not [name for name in set(sys.modules) - before if name.startswith("py3langid")]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'text.language = "detect" needs py3langid; run: .*forebay\[text\]'):
        detector()


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (("deu",), r"'deu' is no language that can be detected; did you mean 'de'\?"),
        (("en-US",), "'en-US' is no language that can be detected; did you mean 'en'"),
        (("12",), "write its ISO 639 code"),
        (("de", "en", "de"), "'de' stands there twice"),
        (("am", "ti"), r"am and ti are written in the same script \(ethiopic\), and py3langid does not know ti"),
        (("he", "yi"), "does not know yi; keep one of them"),
    ],
)
def test_languages_that_cannot_be_told_are_refused(languages: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detector(*languages)
