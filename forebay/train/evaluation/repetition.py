"""Texts in which a model repeats itself: what a decoder that has gone astray writes until it may write no more."""

from __future__ import annotations

import re

import numpy as np

from forebay.store.layout import Array

_TIMES = 3
"""In a row, from which on a repetition is one."""
_UNSPACED = re.compile(
    # Chinese and Japanese, Thai, Lao, Burmese, Khmer: one match a character, with its marks.
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"
    r"[\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd]*"
)


def repeats_itself(text: str) -> bool:
    """Returns whether some words stand in `text` three times or more in a row.

    Words are what stands between white space. Writing without spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer) is
    taken character by character, and a single character does not count: three of them in a row are often right.
    """
    words: list[str] = []
    is_single: list[bool] = []
    for chunk in text.split():
        characters = _UNSPACED.findall(chunk)
        words += characters or [chunk]
        is_single += [True] * len(characters) or [False]
    if len(words) < _TIMES:
        return False
    numbers = np.unique(words, return_inverse=True)[1]
    return any(_has_run(numbers, size, np.array(is_single)) for size in range(1, len(words) // _TIMES + 1))


def _has_run(numbers: Array, size: int, is_single: Array) -> bool:
    """Returns whether `size` words stand three times in a row."""
    equal = numbers[size:] == numbers[:-size]
    if size == 1:
        equal = equal & ~is_single[1:]
    wanted = (_TIMES - 1) * size
    ends = np.flatnonzero(np.append(~equal, True))
    return bool((np.diff(np.append(-1, ends)) - 1 >= wanted).any())
