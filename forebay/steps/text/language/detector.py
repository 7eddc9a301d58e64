"""Detection: the language of a text by its letters' script, else by py3langid among the languages of that script."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from forebay.steps.text.language.candidates import beside, candidates, check_languages
from forebay.steps.text.language.model import Judge, loaded, model_digest, model_file
from forebay.steps.text.language.script import letters_of

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
