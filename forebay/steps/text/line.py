"""The text line: what happens to a text before it is tokenised. First its language is found, then it is normalised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forebay.steps.text.language.detector import Detector
from forebay.steps.text.normal.code import Code
from forebay.steps.text.normal.step import NOWHERE, NormalStep, Problem, Runner, Where
from forebay.steps.text.normal.table import SIMPLE, made_steps


@dataclass(frozen=True, slots=True)
class Prepared:
    """A text as it is tokenised. language: the one that prompts use, "" for none. detected: "" where nothing was."""

    text: str
    language: str
    detected: str = ""
    confidence: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLine:
    """The steps of `text.normalize`, and what detects languages; None where the manifest's are taken."""

    steps: tuple[NormalStep, ...] = field(default_factory=lambda: made_steps("nfkc", NOWHERE))
    detector: Detector | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: Where) -> TextLine:
        """Returns the line of the settings of `[text]`: reads the files that they name, runs nothing.

        Raises ConfigError where a step cannot be made.
        """
        mode: Literal["manifest", "detect", "detect_missing"] = settings.get("language", "manifest")
        detector = None
        if mode != "manifest":
            detector = Detector.of(
                mode=mode,
                languages=settings.get("languages", ()),
                min_confidence=float(settings.get("min_confidence", 0.0)),
            )
        return cls(steps=made_steps(settings.get("normalize", "nfkc"), where), detector=detector)

    @property
    def detects(self) -> bool:
        """Whether languages are detected, and rows say which."""
        return self.detector is not None

    def document(self) -> dict[str, Any]:
        """Returns what keys say of the line: `normalize`, and `language` where languages are detected."""
        names = tuple(step.name for step in self.steps)
        word = next((word for word, stands_for in SIMPLE.items() if stands_for == names), None)
        document: dict[str, Any] = {"normalize": word or [step.identity() for step in self.steps]}
        return document if self.detector is None else {**document, "language": self.detector.identity()}

    def without_code(self) -> TextLine:
        """Returns the line without the functions of the user."""
        return replace(self, steps=tuple(step for step in self.steps if not isinstance(step, Code)))

    def check(self) -> None:
        """Returns if every step can be trusted; see `NormalStep.check`."""
        for step in self.steps:
            step.check()

    def open(self) -> OpenLine:
        """Returns what does the work, in the process that does it. Raises ConfigError as `NormalStep.open` does."""
        return OpenLine(self)


class OpenLine:
    """The line with all that it needs loaded. What a text becomes depends on that text and its language alone."""

    def __init__(self, line: TextLine) -> None:
        self.line = line
        self._runners: list[tuple[NormalStep, Runner]] = [(step, step.open()) for step in line.steps]
        self._of_prompts = [(step, run) for step, run in self._runners if step.of_prompts]
        self._detect = None if line.detector is None else line.detector.open()

    def prepare(self, texts: Sequence[str], languages: Sequence[str]) -> list[Prepared | Problem]:
        """Returns every text as it is tokenised, in their order.

        languages: as the manifest has them, "" for none. Problems: `bad_text`, and those of the steps.
        """
        results: list[Prepared | Problem | None] = [bad_text(text) for text in texts]
        usable = [i for i, result in enumerate(results) if result is None]
        found = self._languages([texts[i] for i in usable], [languages[i] for i in usable])
        made = _each_once([texts[i] for i in usable], [language for language, _, _ in found], self._normalize)
        for i, (language, detected, confidence), text in zip(usable, found, made, strict=True):
            results[i] = text if isinstance(text, Problem) else Prepared(text, language, detected, confidence)
        return [result for result in results if result is not None]

    def prompts(self, texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
        """Returns hot words and earlier texts, normalised by the steps that are for them."""
        return [
            bad_text(text) or _through(self._of_prompts, [text], [language])[0]
            for text, language in zip(texts, languages, strict=True)
        ]

    def stages(self, text: str, language: str) -> list[tuple[str, str | Problem]]:
        """Returns (name of the step, what the text is behind it) of every step, up to one that fails."""
        stages: list[tuple[str, str | Problem]] = []
        for step, run in self._runners:
            result = run([text], [language])[0]
            stages.append((step.name, result))
            if isinstance(result, Problem):
                break
            text = result
        return stages

    def _languages(self, texts: Sequence[str], languages: Sequence[str]) -> list[tuple[str, str, float]]:
        """Returns (language for prompts, detected language, confidence) of every text."""
        detector, detect = self.line.detector, self._detect
        if detector is None or detect is None:
            return [(language, "", 0.0) for language in languages]
        asked = [i for i, language in enumerate(languages) if detector.mode == "detect" or not language]
        results: list[tuple[str, str, float]] = [(language, "", 0.0) for language in languages]
        different = list(dict.fromkeys(texts[i] for i in asked))
        found = dict(zip(different, detect(different), strict=True))
        for i in asked:
            code, confidence = found[texts[i]]
            results[i] = (code or languages[i], code, confidence)
        return results

    def _normalize(self, texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
        return _through(self._runners, texts, languages)


def bad_text(text: str) -> Problem | None:
    """Returns why a text cannot be stored: a NUL, or a lone surrogate, which UTF-8 cannot hold. None where it can."""
    if "\0" in text:
        return Problem("bad_text", f"text has a NUL at character {text.index(chr(0))}; clean the manifest")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        found = f"U+{ord(text[err.start]):04X} at character {err.start}"
        return Problem("bad_text", f"text has a lone surrogate {found}; clean the manifest")
    return None


def _each_once(
    texts: Sequence[str],
    languages: Sequence[str],
    make: Callable[[Sequence[str], Sequence[str]], list[str | Problem]],
) -> list[str | Problem]:
    """Returns what `make` gives for every pair, which it is asked for once."""
    pairs = list(zip(texts, languages, strict=True))
    different = list(dict.fromkeys(pairs))
    made = dict(zip(different, make([text for text, _ in different], [name for _, name in different]), strict=True))
    return [made[pair] for pair in pairs]


def _through(
    runners: Sequence[tuple[NormalStep, Runner]], texts: Sequence[str], languages: Sequence[str]
) -> list[str | Problem]:
    """Returns what the steps make of texts, one after the other; what fails goes no further."""
    results: list[str | Problem] = list(texts)
    for step, run in runners:
        alive = [i for i, result in enumerate(results) if isinstance(result, str)]
        if not alive:
            break
        made = run([str(results[i]) for i in alive], [languages[i] for i in alive])
        for i, result in zip(alive, made, strict=True):
            results[i] = result if step.is_quick or isinstance(result, Problem) else bad_text(result) or result
    return results
