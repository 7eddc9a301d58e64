"""Detection: the language of a text by its letters' script, else by py3langid among the languages of that script.

The languages that a text may be in by its script, and which of the scripts decide at once.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from forebay.errors import ConfigError
from forebay.steps.text.language.language_model import Judge, loaded, model_digest, model_file
from forebay.steps.text.language.script import SCRIPTS, code_of, languages_of, letters_of

_KNOWN = """
    af am ar as az be bg bn br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig is
    it ja jv ka kk km kn ko ku ky la lg ln lo lt lv mg mk ml mn mr ms my ne nl no om or pa pl ps pt qu ro ru sa si sk sl
    so sq sr sv sw ta te th tl tr ug uk ur uz vi xh yo zh zu ace bcl dz ext gcf gom grc gug hbo kik nso pcm rw se sn st
    an ary crh fo fuv gcr guw kab lb lij ltg uzs wa sdh arz ba mt nn oc tg tk tt vec vo wuu yue
"""

MODEL_LANGUAGES = frozenset(_KNOWN.split())
"""What py3langid 0.4 knows. `zxx`, by which py3langid means no language, is left out."""

_ALONE = """
    greek armenian georgian hebrew gurmukhi gujarati oriya tamil telugu kannada malayalam sinhala thai lao myanmar
    khmer mongolian thaana cherokee hangul kana bopomofo
"""

ALONE = {script: languages_of(script)[0] for script in _ALONE.split()}
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


Detect = Callable[[Sequence[str]], list[tuple[str, float]]]
"""Texts to (code, confidence) of each, in order; ("", confidence) where nothing can be said."""

MOST_CHARACTERS = 4096
"""What is read of a text. A line of 10 MB is in the language that it begins in."""

LIKELIER = 0.5
"""The confidence from which a language is likelier than all others together: below it nothing is said, by default."""

_FEWEST_LETTERS = 2

_BYTES = {"latin": 1, "greek": 2, "cyrillic": 2, "armenian": 2, "hebrew": 2, "arabic": 2, "thaana": 2}
"""Bytes of a letter by script, 3 of the others. So words in Latin letters (names, brands, commands), which stand in
texts of all scripts, outweigh no sentence around them; and a Chinese character is more than a letter."""

_KANA_SHARE = 0.1
"""Chinese texts have a stray kana, and hardly any Japanese sentence has nine ideographs for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """Says which language a text is in. What is said of a text depends on that text alone.

    mode: `detect` for all rows, `detect_missing` for rows without a language. languages: the codes that a text may be
    in; empty for all. min_confidence: below it nothing is said. model: digest of py3langid's model file.
    """

    mode: Literal["detect", "detect_missing"] = "detect"
    languages: tuple[str, ...] = ()
    min_confidence: float = LIKELIER
    model: str = ""
    version: int = 1

    @classmethod
    def of(
        cls, *, mode: Literal["detect", "detect_missing"], languages: Sequence[str], min_confidence: float
    ) -> Detector:
        """Returns the detector of settings, with the digest of the model that is installed. Imports nothing of it.

        The order of `languages` changes nothing. Raises MissingExtraError where py3langid is not installed, ConfigError
        for languages that cannot be told from each other.
        """
        check_languages(languages)
        return cls(
            mode=mode,
            languages=tuple(sorted(languages)),
            min_confidence=min_confidence,
            model=model_digest(),
            version=2 if beside(languages) else 1,  # others say what they said
        )

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description, for keys."""
        return {"step": "Detector", **asdict(self)}

    def found(self) -> Mapping[str, Any]:
        """Returns what the store of texts must know beside the identity: versions of libraries that no key names."""
        return {"py3langid": metadata.version("py3langid"), "unicode": unicodedata.unidata_version}

    def values_identity(self) -> dict[str, Any]:
        """Returns what is said of a text depends on: all but `mode`, which says of which rows it is asked."""
        return {name: value for name, value in self.identity().items() if name != "mode"}

    def open(self) -> Detect:
        """Returns what detects. The model is loaded for the first text that its script does not decide.

        A confidence is the probability of the language among the candidates of the script, of a single candidate that
        among all languages of the script; times the share of letters of that script, in steps of 0.0001. ("", 0.0) is
        said of fewer than two letters, and of a script that no candidate has.
        """
        return _Detection(self)


class _Detection:
    def __init__(self, detector: Detector) -> None:
        self._by_script, self._beside = candidates(detector.languages), beside(detector.languages)
        self._min_confidence, self._digest = detector.min_confidence, detector.model
        self._judges: dict[str, Judge] = {}

    def __call__(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        found = [self._by_its_script(text[:MOST_CHARACTERS]) for text in texts]
        results = [("", 0.0)] * len(texts)
        open_: dict[str, list[int]] = defaultdict(list)
        for place, (script, _) in enumerate(found):
            codes = self._by_script.get(script, ())
            if len(codes) == 1 and script not in self._beside:
                results[place] = codes[0], 1.0
            elif codes:
                open_[script].append(place)
        for script, places in open_.items():
            judged = self._judge(script)([texts[place][:MOST_CHARACTERS] for place in places])
            for place, said in zip(places, judged, strict=True):
                results[place] = said
        shares = (share for _, share in found)
        sure = [(code, round(likely * share, 4)) for (code, likely), share in zip(results, shares, strict=True)]
        return [(code if confidence >= self._min_confidence else "", confidence) for code, confidence in sure]

    @staticmethod
    def _by_its_script(text: str) -> tuple[str, float]:
        """Returns the script of a text and its share; of a text with too few letters "", 0."""
        letters = letters_of(text)
        return main_script(letters) if letters.total() >= _FEWEST_LETTERS else ("", 0.0)

    def _judge(self, script: str) -> Judge:
        if script not in self._judges:
            model = loaded(model_file(), self._digest)
            self._judges[script] = model.among(self._by_script[script], beside=self._beside.get(script, ()))
        return self._judges[script]


def main_script(letters: Mapping[str, int]) -> tuple[str, float]:
    """Returns the script that most of a text is in, and its share of the letters. letters: by script, one or more.

    A letter counts as many times as it has bytes in UTF-8, see `_BYTES`. The ideographs of a text with kana are letters
    of Japanese.
    """
    found = Counter({script: count * _BYTES.get(script, 3) for script, count in letters.items()})
    together = found["kana"] + found["han"]
    if found["kana"] >= _KANA_SHARE * together > 0:
        found["kana"], found["han"] = together, 0
    script = max(found, key=lambda name: (found[name], name))
    return script, found[script] / found.total()
