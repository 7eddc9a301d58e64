"""The text line: what happens to a text before it is tokenised. First its language is found, then it is normalised.

That is done once for each different text: in a call, and where there is a store, in all. Beside it stand texts that say
nothing, or are annotations (what a tool wrote, with its times: for `forebay lint` and `init`), and languages as
manifests write them (en, EN, en-US, English).
"""

from __future__ import annotations

import re
import struct
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import xxhash

from forebay.steps.text.language_detector import LIKELIER, Detect, Detector
from forebay.steps.text.normal.normal_step import NOWHERE, SIMPLE, Code, NormalStep, Problem, Runner, Where, made_steps
from forebay.store.texts import TextStore, TextValues, digests_of

_UNSEEN = re.compile(
    r"[\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*"
)
"""White space, and what Unicode calls default ignorable: zero-width spaces and joiners, byte order marks, fillers."""


def is_unseen(text: str) -> bool:
    """Says whether a text holds nothing that is seen or heard: empty, white space, zero-width characters.

    Inside of words joiners carry meaning (Hindi, Persian), so no step takes them out.
    """
    return _UNSEEN.fullmatch(text) is not None


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


_REGION = re.compile(r"([a-z]{2,3})[-_][a-z0-9_-]+")

_QWEN3_ASR_NAMES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay",
    "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish",
    "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
"""The 30 languages of the Qwen3-ASR model card; a test compares them with transformers' list."""


_WHISPER_NAMES = """
af afrikaans; am amharic; ar arabic; as assamese; az azerbaijani; ba bashkir; be belarusian; bg bulgarian; bn
bengali; bo tibetan; br breton; bs bosnian; ca catalan valencian; cs czech; cy welsh; da danish; de german; el
greek; en english; es castilian spanish; et estonian; eu basque; fa persian; fi finnish; fo faroese; fr
french; gl galician; gu gujarati; ha hausa; haw hawaiian; he hebrew; hi hindi; hr croatian; ht haitian
haitian_creole; hu hungarian; hy armenian; id indonesian; is icelandic; it italian; ja japanese; jw javanese;
ka georgian; kk kazakh; km khmer; kn kannada; ko korean; la latin; lb letzeburgesch luxembourgish; ln lingala;
lo lao; lt lithuanian; lv latvian; mg malagasy; mi maori; mk macedonian; ml malayalam; mn mongolian; mr
marathi; ms malay; mt maltese; my burmese myanmar; ne nepali; nl dutch flemish; nn nynorsk; no norwegian; oc
occitan; pa panjabi punjabi; pl polish; ps pashto pushto; pt portuguese; ro moldavian moldovan romanian; ru
russian; sa sanskrit; sd sindhi; si sinhala sinhalese; sk slovak; sl slovenian; sn shona; so somali; sq
albanian; sr serbian; su sundanese; sv swedish; sw swahili; ta tamil; te telugu; tg tajik; th thai; tk
turkmen; tl tagalog; tr turkish; tt tatar; uk ukrainian; ur urdu; uz uzbek; vi vietnamese; yi yiddish; yo
yoruba; yue cantonese; zh chinese mandarin
"""
"""Whisper's codes, each with its names in English; a test compares them with transformers' list."""
_WHISPER_CODES = {
    word.replace("_", " "): code
    for code, *names in map(str.split, _WHISPER_NAMES.split(";"))
    for word in (code, *names)
}


def whisper_code(language: str) -> str | None:
    """Returns Whisper's code (`en`) of a code or English name, in any case; None for languages that Whisper has not."""
    return _WHISPER_CODES.get(_without_region(language))


def qwen3_asr_name(language: str) -> str | None:
    """Returns the name that Qwen3-ASR was trained with (`English`) of a code or name, in any case; None for others."""
    wanted = _without_region(language)
    if wanted in _QWEN3_ASR_NAMES:
        return _QWEN3_ASR_NAMES[wanted]
    return next((name for name in _QWEN3_ASR_NAMES.values() if name.lower() == wanted), None)


def _without_region(language: str) -> str:
    wanted = language.strip().lower()
    match = _REGION.fullmatch(wanted)
    return match[1] if match else wanted


T = TypeVar("T")
_CONFIDENCE = struct.Struct("<d")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remembered(Generic[T]):
    """Gives what `make` does, and asks it only for texts that it was not asked for before.

    make: (texts, languages) -> a result each, in their order. values: where results are looked up and kept, None for
    nowhere. to_bytes: (text, result) -> the result as it is kept, None for one that is not: a failure. of_bytes: (text,
    what was kept) -> the result. reads_language: results depend on the language; else `make` gets none.
    """

    make: Callable[[Sequence[str], Sequence[str]], Sequence[T]]
    values: TextValues | None
    to_bytes: Callable[[str, T], bytes | None]
    of_bytes: Callable[[str, bytes], T]
    reads_language: bool

    def __call__(self, texts: Sequence[str], languages: Sequence[str]) -> list[T]:
        """Returns the result of every text, in their order."""
        pairs = list(zip(texts, languages if self.reads_language else [""] * len(texts), strict=True))
        different = list(dict.fromkeys(pairs))
        made = self._of_each([text for text, _ in different], [language for _, language in different])
        results = dict(zip(different, made, strict=True))
        return [results[pair] for pair in pairs]

    def keep(self) -> None:
        """Writes what was made and is not written yet."""
        if self.values is not None:
            self.values.flush()

    def _of_each(self, texts: Sequence[str], languages: Sequence[str]) -> Sequence[T]:
        if self.values is None:
            return self.make(texts, languages)
        digests = digests_of(texts, languages if self.reads_language else None)
        known = self.values.find(digests)
        missing = [i for i, value in enumerate(known) if value is None]
        made = self.make([texts[i] for i in missing], [languages[i] for i in missing]) if missing else []
        data = [self.to_bytes(texts[i], result) for i, result in zip(missing, made, strict=True)]
        kept = [(i, value) for i, value in zip(missing, data, strict=True) if value is not None]
        self.values.add(digests[[i for i, _ in kept]], [value for _, value in kept])
        new = iter(made)
        return [
            next(new) if value is None else self.of_bytes(text, value) for text, value in zip(texts, known, strict=True)
        ]


_CHANGED = b"="
"""Before a text that the steps changed; most steps leave most texts as they are, and nothing is kept of those."""


def text_to_bytes(text: str, result: str | Problem) -> bytes | None:
    """Returns what became of a text as it is kept; None for a problem, which may be gone the next time."""
    if isinstance(result, Problem):
        return None
    return b"" if result == text else _CHANGED + result.encode("utf-8")


def text_of_bytes(text: str, data: bytes) -> str | Problem:
    """Returns what became of a text."""
    return data[len(_CHANGED) :].decode("utf-8") if data else text


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """A text as it is tokenised. language: the one that prompts use, "" for none. detected: "" where nothing was."""

    text: str
    language: str
    detected: str = ""
    confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Staged:
    """A text on its way to `prepared`. steps: (name, what the text is behind the step), up to one that fails."""

    steps: tuple[tuple[str, str | Problem], ...]
    prepared: PreparedTexts | Problem
    language: str = ""
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
                min_confidence=float(settings.get("min_confidence", LIKELIER)),
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


_PROBE = (
    ("Dr. Smith paid £1,250.50 on the 3rd of May 1984, i.e. 7 days late.", "en"),
    ("Am 21. Juni kostet's 3,5 % mehr: Straße Nr. 17", "de"),
    ("१५ अगस्त १९४७ को क़रीब 2.5 करोड़ ज़्यादा", "hi"),
    ("سال ۱۴۰۳ كتاب‌هاي 12 نفر", "fa"),
)
"""What the steps make of it is a part of what kept values belong to: another version of a library may do otherwise."""


class OpenLine:
    """The line with all that it needs loaded. What a text becomes depends on that text and its language alone."""

    def __init__(self, line: TextLine) -> None:
        self.line = line
        self._runners: list[tuple[NormalStep, Runner]] = [(step, step.open()) for step in line.steps]
        self._of_prompts = [(step, run) for step, run in self._runners if step.of_prompts]
        self._detectors: dict[TextStore | None, Remembered[tuple[str, float]]] = {}
        self._normalizers: dict[TextStore | None, Remembered[str | Problem]] = {}

    def prepare(
        self, texts: Sequence[str], languages: Sequence[str], *, store: TextStore | None = None
    ) -> list[PreparedTexts | Problem]:
        """Returns every text as it is tokenised, in their order.

        languages: as the manifest has them, "" for none. store: where results are looked up and kept; None: everything
        is made. Problems: `bad_text`, and those of the steps.
        """
        results: list[PreparedTexts | Problem | None] = [bad_text(text) for text in texts]
        usable = [i for i, result in enumerate(results) if result is None]
        found = self._languages([texts[i] for i in usable], [languages[i] for i in usable], store)
        made = self._normalizer(store)([texts[i] for i in usable], [language for language, _, _ in found])
        for i, (language, detected, confidence), text in zip(usable, found, made, strict=True):
            results[i] = text if isinstance(text, Problem) else PreparedTexts(text, language, detected, confidence)
        return [result for result in results if result is not None]

    def parts(
        self, texts: Sequence[str], languages: Sequence[str], *, store: TextStore | None = None
    ) -> list[str | Problem]:
        """Returns parts of texts as they are tokenised, each for itself. languages: of the texts, as `prepare` says."""
        return self._normalizer(store)(texts, languages)

    def keep(self) -> None:
        """Writes what was made and is not written yet into the stores that it was made for."""
        for detector in self._detectors.values():
            detector.keep()
        for normalizer in self._normalizers.values():
            normalizer.keep()

    def prompts(self, texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
        """Returns hot words and earlier texts, normalised by the steps that are for them."""
        return [
            bad_text(text) or _through(self._of_prompts, [text], [language])[0]
            for text, language in zip(texts, languages, strict=True)
        ]

    def stages(self, texts: Sequence[str], languages: Sequence[str]) -> list[Staged]:
        """Returns what `prepare` does with every text, a step at a time, in their order. Nothing is taken from a store.

        languages: as the manifest has them, "" for none.
        """
        bad = [bad_text(text) for text in texts]
        usable = [i for i, problem in enumerate(bad) if problem is None]
        detected = self._languages([texts[i] for i in usable], [languages[i] for i in usable], None)
        found = dict(zip(usable, detected, strict=True))
        used = [found[i][0] if i in found else "" for i in range(len(texts))]
        steps: list[list[tuple[str, str | Problem]]] = [[] for _ in texts]
        given = [problem or text for problem, text in zip(bad, texts, strict=True)]
        results = _through(self._runners, given, used, steps=steps)
        staged = []
        for i, result in enumerate(results):
            way = found.get(i, ("", "", 0.0))
            staged.append(
                Staged(tuple(steps[i]), PreparedTexts(result, *way) if isinstance(result, str) else result, *way)
            )
        return staged

    def _languages(
        self, texts: Sequence[str], languages: Sequence[str], store: TextStore | None
    ) -> list[tuple[str, str, float]]:
        """Returns (language for prompts, detected language, confidence) of every text."""
        results: list[tuple[str, str, float]] = [(language, "", 0.0) for language in languages]
        if (detector := self.line.detector) is None:
            return results
        asked = [i for i, language in enumerate(languages) if detector.mode == "detect" or not language]
        found = self._detector(detector, store)([texts[i] for i in asked], [""] * len(asked))
        for i, (code, confidence) in zip(asked, found, strict=True):
            results[i] = (code or languages[i], code, confidence)
        return results

    def _detector(self, detector: Detector, store: TextStore | None) -> Remembered[tuple[str, float]]:
        if store not in self._detectors:
            identity = {**detector.values_identity(), **detector.found()}
            self._detectors[store] = Remembered(
                make=lambda texts, _: self._detect(texts),
                values=None if store is None else store.of({"language": identity}),
                to_bytes=lambda _, said: _CONFIDENCE.pack(said[1]) + said[0].encode("utf-8"),
                of_bytes=lambda _, data: (data[_CONFIDENCE.size :].decode("utf-8"), _CONFIDENCE.unpack_from(data)[0]),
                reads_language=False,
            )
        return self._detectors[store]

    @cached_property
    def _detect(self) -> Detect:
        # Loaded for the first text that no store knows.
        assert self.line.detector is not None
        return self.line.detector.open()

    def _normalizer(self, store: TextStore | None) -> Remembered[str | Problem]:
        if store not in self._normalizers:
            is_quick = all(step.is_quick for step, _ in self._runners)
            self._normalizers[store] = Remembered(
                make=self._normalize,
                values=None if store is None or is_quick else store.of(self._identity),
                to_bytes=text_to_bytes,
                of_bytes=text_of_bytes,
                reads_language=any(step.reads_language for step, _ in self._runners),
            )
        return self._normalizers[store]

    @property
    def _identity(self) -> dict[str, Any]:
        """All that decides what the steps make of a text and a language."""
        texts, languages = zip(*_PROBE, strict=True)
        # Not a problem's message: it may hold the address of an object.
        made = [each.reason if isinstance(each, Problem) else each for each in self._normalize(texts, languages)]
        return {
            "unicode": unicodedata.unidata_version,
            "normalize": [{**step.identity(), **step.found()} for step, _ in self._runners],
            "probe": xxhash.xxh3_128_hexdigest("\0".join(made).encode("utf-8", "surrogatepass")),
        }

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


def _through(
    runners: Sequence[tuple[NormalStep, Runner]],
    texts: Sequence[str | Problem],
    languages: Sequence[str],
    *,
    steps: Sequence[list[tuple[str, str | Problem]]] | None = None,
) -> list[str | Problem]:
    """Returns what the steps make of texts, one after the other; what fails goes no further.

    steps: of each text, to which what every step makes is added, by the step's label.
    """
    results = list(texts)
    for step, run in runners:
        alive = [i for i, result in enumerate(results) if isinstance(result, str)]
        if not alive:
            break
        made = run([str(results[i]) for i in alive], [languages[i] for i in alive])
        for i, result in zip(alive, made, strict=True):
            results[i] = result if step.is_quick or isinstance(result, Problem) else bad_text(result) or result
            if steps is not None:
                steps[i].append((step.label, results[i]))
    return results
