"""Signs that an annotation tool wrote a text, with its times: for the checks of `forebay lint` and for `init`."""

from __future__ import annotations

import re

MAX_DIGIT_SHARE = 0.5
"""Share of digits among the characters of a text above which it is no speech but times."""
_SIGNS = ("\t", "-->", "ooTextFile")
_TIMES = re.compile(r"\d+([.:,]\d+)*\s+\d+([.:,]\d+)*\s")


def is_annotation(text: str) -> bool:
    """Returns whether a text is an export of ELAN, Praat, Audacity, HTK or TIMIT, or of subtitles."""
    return _TIMES.match(text) is not None or any(sign in text for sign in _SIGNS) or digit_share(text) > MAX_DIGIT_SHARE


def digit_share(text: str) -> float:
    """Returns the share of digits among the characters of a text, white space left out."""
    chars = "".join(text.split())
    return sum(map(str.isdigit, chars)) / len(chars) if chars else 0.0
