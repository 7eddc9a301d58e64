"""Errors sample by sample against jiwer's own sums."""

from __future__ import annotations

import builtins
from typing import Any

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MissingExtraError
from forebay.train.evaluation.rates import Errors, WrittenTexts, by_language, count_errors, summed, worst, worst_lines

TEXT = st.lists(st.sampled_from(["a", "bb", "c c", "ä", "नमस्ते"]), max_size=6).map(" ".join)


def written(reference: str, hypothesis: str, *, index: int = 0, language: str = "") -> WrittenTexts:
    return WrittenTexts(
        index=index,
        sample_id=f"clip-{index}",
        language=language,
        reference=reference,
        hypothesis=hypothesis,
        is_astray=False,
    )


@given(st.lists(st.tuples(TEXT.filter(bool), TEXT), min_size=1, max_size=8))
def test_sums_are_jiwers(pairs: list[tuple[str, str]]) -> None:
    errors = count_errors([written(*pair) for pair in pairs])
    total = summed(errors)
    references, hypotheses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert total.wer == pytest.approx(jiwer.process_words(references, hypotheses).wer, abs=1e-12)
    assert total.cer == pytest.approx(jiwer.process_characters(references, hypotheses).cer, abs=1e-12)


def test_words_without_a_reference_count_as_insertions() -> None:
    errors = count_errors([written("a b", "a b"), written("", "x y z"), written("", "")])
    assert [(each.word_errors, each.words) for each in errors] == [(0, 2), (3, 0), (0, 0)]
    assert summed(errors).wer == 1.5
    assert errors[1].wer is None
    assert count_errors([]) == []
    assert Errors().wer is None
    assert Errors().cer is None


def test_languages_have_rates_of_their_own() -> None:
    rows = [written("a b", "a", language="en"), written("c", "c", language="fr"), written("d", "e f")]
    found = by_language(rows, count_errors(rows))
    assert found["en"] == {"wer": 0.5, "cer": pytest.approx(2 / 3), "samples": 1}
    assert found["fr"] == {"wer": 0.0, "cer": 0.0, "samples": 1}
    assert found["unknown"]["wer"] == 2.0
    assert by_language(rows[2:], count_errors(rows[2:])) == {}
    silent = [written("", "x", language="en")]
    assert by_language(silent, count_errors(silent)) == {"en": {"samples": 1}}


def test_the_worst_come_first_and_are_shown_aligned() -> None:
    rows = [
        written("one two three", "one two three", index=0),
        written("one two", "one too", index=1),
        written("one", "won \x1b[31m too", index=2, language="en"),
        written("a b c d", "a b x y", index=3),
    ]
    pairs = worst(rows, count_errors(rows))
    assert [each.index for each, _ in pairs] == [2, 3, 1]
    assert [each.index for each, _ in worst(rows, count_errors(rows), count=1)] == [2]
    lines = list(worst_lines(pairs))
    assert lines[0] == "1. clip-2 (en): WER 300.00 %, 3 errors in 1 words"
    assert lines[1].split() == ["REF:", "***", "********", "one"] or "one" in lines[1]
    assert r"\x1b[31m" in lines[2]
    assert not any("\x1b" in line for line in lines)
    assert set(lines[3].split()) <= {"S", "I", "D"}
    [line] = [line for line in lines if line.startswith("3.")]
    assert line == "3. clip-1: WER 50.00 %, 1 errors in 2 words"


def test_jiwer_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_jiwer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jiwer":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_jiwer)
    monkeypatch.setattr("forebay.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"WER needs jiwer; run: pip install 'forebay\[train\]'"):
        count_errors([written("a", "b")])
