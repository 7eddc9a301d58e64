"""Which texts repeat themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.evaluation.evaluate import trap
from forebay.train.evaluation.rates import repeats_itself


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", False),
        ("no no", False),
        ("no no no", True),
        ("oh no no way no", False),
        ("thank you thank you thank you", True),
        ("thank you thank you thank", False),
        ("and so we go and so we go and so we go", True),
        ("a b a b a c a b", False),
        ("哈哈哈", False),  # laughter
        ("对对对，我知道了", False),
        ("谢谢观看谢谢观看谢谢观看", True),
        ("今天天气很好", False),
        ("ขอบคุณขอบคุณขอบคุณ", True),
        ("ขอบคุณมาก", False),
        ("はいはいはい", True),
        ("धन्यवाद धन्यवाद धन्यवाद", True),
        ("धन्यवाद और धन्यवाद", False),
    ],
)
def test_three_times_in_a_row(text: str, *, wanted: bool) -> None:
    assert repeats_itself(text) is wanted


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_against_a_plain_search(words: list[str]) -> None:
    count = len(words)
    found = any(
        words[start : start + size]
        == words[start + size : start + 2 * size]
        == words[start + 2 * size : start + 3 * size]
        for size in range(1, count // 3 + 1)
        for start in range(count - 3 * size + 1)
    )
    assert repeats_itself(" ".join(words)) is found


def test_a_trap_says_why_and_what_to_do() -> None:
    assert trap(0.5, 0.2, limit=0.2) is None
    assert trap(None, 0.0, limit=0.2) is None
    reason = trap(0.5, 0.25, limit=0.2)
    assert reason is not None
    assert "25.0 % of the texts repeat themselves" in reason
    assert "train.repetition_limit = 0.2" in reason
    assert "lower train.learning_rate" in reason
    both = trap(1.01, 0.25, limit=0.2)
    assert both is not None
    assert "WER is 101.00 %, above 100 %" in both
    assert trap(1.0, 0.0, limit=0.2) is None
