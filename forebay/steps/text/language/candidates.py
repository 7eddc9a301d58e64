"""The languages that a text may be in by its script, and which of the scripts decide at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from forebay.errors import ConfigError
from forebay.steps.text.language.script import SCRIPTS, code_of, languages_of

_KNOWN = """
    af am ar as az be bg bn br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig is
    it ja jv ka kk km kn ko ku ky la lg ln lo lt lv mg mk ml mn mr ms my ne nl no om or pa pl ps pt qu ro ru sa si sk sl
    so sq sr sv sw ta te th tl tr ug uk ur uz vi xh yo zh zu ace bcl dz ext gcf gom grc gug hbo kik nso pcm rw se sn st
    an ary crh fo fuv gcr guw kab lb lij ltg uzs wa sdh arz ba mt nn oc tg tk tt vec vo wuu yue
"""

MODEL_LANGUAGES = frozenset(_KNOWN.split())
"""What py3langid 0.4 knows. `zxx`, by which py3langid means no language, is left out."""

ALONE = {
    "greek": "el",
    "armenian": "hy",
    "georgian": "ka",
    "hebrew": "he",
    "gurmukhi": "pa",
    "gujarati": "gu",
    "oriya": "or",
    "tamil": "ta",
    "telugu": "te",
    "kannada": "kn",
    "malayalam": "ml",
    "sinhala": "si",
    "thai": "th",
    "lao": "lo",
    "myanmar": "my",
    "khmer": "km",
    "mongolian": "mn",
    "thaana": "dv",
    "cherokee": "chr",
    "hangul": "ko",
    "kana": "ja",
    "bopomofo": "zh",
}
"""Scripts that one language uses, as good as alone: the others that `script.py` lists must be named to be meant.

Devanagari (hi, mr, ne), Bengali (bn, as), Arabic and Han (zh, ja) are no such scripts. Ethiopic (am, ti) and Tibetan
(bo, dz) are none either, and the model knows only one language of each: they say nothing until one language is named.
"""


def candidates(named: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the languages that a text of each script may be in; a script of none is left out, and says nothing.

    named: the codes of `text.languages`. Without any: the language of `ALONE`, else what the model knows and has a
    code of two letters, if these are several. Languages of three letters, most of them dialects or older forms of
    those of two (`wuu`, `arz`, `hbo`), are meant only where they are named.
    """
    if named:
        found = {script: tuple(code for code in named if code in languages_of(script)) for script in SCRIPTS}
        return {script: codes for script, codes in found.items() if codes}
    known = {
        script: tuple(code for code in languages_of(script) if code in MODEL_LANGUAGES and len(code) == 2)
        for script in SCRIPTS
    }
    several = {script: codes for script, codes in known.items() if len(codes) > 1}
    return several | {script: (code,) for script, code in ALONE.items()}


def beside(named: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the other languages that a text may be in, of every script with one candidate that does not decide.

    Such a candidate is said with its probability among all: a text of its script may be in no language that was named.
    """
    everything = candidates(())
    return {
        script: tuple(other for other in everything.get(script, ()) if other != code)
        for script, (code, *more) in candidates(named).items()
        if not more and code in MODEL_LANGUAGES and set(everything.get(script, ())) - {code}
    }


def check_languages(named: Sequence[str]) -> None:
    """Returns where every code of `text.languages` can be told from the others.

    Raises ConfigError for an unknown code, for a code given twice, and for a language that the model does not know
    beside another one of the same script.
    """
    everything = sorted({code for script in SCRIPTS for code in languages_of(script)})
    for code in named:
        if code not in everything:
            near = [known for known in (code_of(code),) if known in everything]
            near = near or difflib.get_close_matches(code, everything, n=1)
            raise ConfigError(
                f"text.languages: {code!r:.40} is no language that can be detected"
                f"{f'; did you mean {near[0]!r}?' if near else '; write its ISO 639 code, for example de'}",
                code="FB102",
            )
        if list(named).count(code) > 1:
            raise ConfigError(f"text.languages: {code!r} stands there twice; leave one out", code="FB102")
    for script, codes in candidates(named).items():
        unknown = [code for code in codes if code not in MODEL_LANGUAGES]
        if unknown and len(codes) > 1:
            raise ConfigError(
                f"text.languages: {' and '.join(codes)} are written in the same script ({script}), and py3langid does "
                f"not know {', '.join(unknown)}; keep one of them",
                code="FB102",
            )
