"""Letters that a text's language is not written with, and words that mix scripts whose letters look alike."""

from __future__ import annotations

import re
from collections import Counter

from forebay.steps.text.language.script import script_of, scripts_of

_TOGETHER = (frozenset({"han", "kana"}), frozenset({"han", "hangul"}), frozenset({"han", "bopomofo"}))
"""Scripts that one text is written in."""

_ALIKE = frozenset({"latin", "cyrillic", "greek"})
_WORD = re.compile(r"\w+")


def foreign_share(letters: Counter[str], language: str) -> tuple[float, str]:
    """Returns the share of letters that a text's language is not written with, and the script of most of these.

    Of a language that is not known: the letters of the second script, where the two are not written together.
    """
    total = sum(letters.values())
    scripts = scripts_of(language) if language else None
    if scripts is None:
        first = max(letters, key=lambda name: (letters[name], name), default="")
        scripts = frozenset({first}).union(*(pair for pair in _TOGETHER if first in pair))
    others = Counter({name: count for name, count in letters.items() if name not in scripts})
    if not others:
        return 0.0, ""
    return sum(others.values()) / total, max(others, key=lambda name: (others[name], name))


def mixed_word(text: str, letters: Counter[str]) -> str | None:
    """Returns the first word that mixes scripts whose letters look alike, None where there is none.

    letters: those of the text, which most often say that there is none.
    """
    if sum(name in _ALIKE for name in letters) < 2:
        return None
    for word in _WORD.findall(text):
        if len({script_of(character) for character in word} & _ALIKE) > 1:
            return str(word)
    return None
