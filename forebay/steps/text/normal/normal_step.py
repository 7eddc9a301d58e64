"""The protocol of a step of `text.normalize`, the steps by their names, and a function of the user as one of them.

    def function(text: str, language: str) -> str: ...

It is named `file.py:function`. Nothing but `Code.open` and `Code.check` runs the file: what makes keys reads its bytes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from forebay.config.code import Asker, ask, not_allowed, same_source, source_of, spec_problem
from forebay.errors import ConfigError
from forebay.steps import run_code
from forebay.steps.run_code import Answer, CodeError
from forebay.steps.text.normal.written_phones import problems as phones_problems


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason why a text could not be made; it costs the samples of that text. message: without the sample's id."""

    reason: str
    message: str


Runner = Callable[[Sequence[str], Sequence[str]], "list[str | Problem]"]
"""(texts, languages) -> what each text becomes, in their order. A language is a code or a name as manifests write them
(`en`, `en-US`, `English`), "" where it is unknown. What a text becomes depends on that text and its language alone."""


def one_by_one(write: Callable[[str, str], str | Problem]) -> Runner:
    """Returns what asks a function for each text with its language."""

    def run(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
        return [write(text, language) for text, language in zip(texts, languages, strict=True)]

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where a config's own files stand. folder: of the config. tokenizer: its folder. phones: `text.phones`."""

    folder: Path
    tokenizer: Path
    allow_code: bool = False
    phones: Mapping[str, Any] | None = field(default=None, hash=False)


NOWHERE = Where(folder=Path(), tokenizer=Path())
"""For steps that read no file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalStep:
    """One step of `text.normalize`. A new one has `open`; `of`, where it reads files.

    Its fields are its identity, except those with `compare=False`: paths of files, beside whose digests they stand.
    is_quick: it costs less than a look into the store of texts. reads_language: results depend on the language.
    of_prompts: hot words and earlier text go through it too.
    """

    name: ClassVar[str] = ""
    is_quick: ClassVar[bool] = False
    reads_language: ClassVar[bool] = False
    of_prompts: ClassVar[bool] = True

    version: int = 1

    @classmethod
    def of(cls, spec: str, where: Where) -> NormalStep:  # noqa: ARG003
        """Returns the step that an entry of `text.normalize` says. Reads files, runs nothing, imports no code.

        Raises ConfigError where a file is not there or not what it should be.
        """
        return cls()

    @property
    def label(self) -> str:
        """The name of the step beside its results."""
        return self.name

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description of the step: its class name and every field that is compared."""
        return {"step": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields(self) if f.compare}}

    def open(self) -> Runner:
        """Returns what does the work, in the process that does it; loads what it needs.

        Raises ConfigError where that is not there.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Returns if a build may trust the step: same texts for same texts. Only code of the user is in doubt.

        Asked once, before anything is built. Raises ConfigError for a step that cannot be trusted.
        """

    def found(self) -> Mapping[str, Any]:
        """Returns what was found when the step was opened that its results depend on; see the store of texts.

        For example what a program of the machine makes of a probe: no key names the program's version.
        """
        return {}


NORMAL = {
    "nfkc": "forebay.steps.text.normal.normal_forms:Nfkc",
    "lower": "forebay.steps.text.normal.normal_forms:Lower",
    "numbers": "forebay.steps.text.normal.numbers:Numbers",
    "whisper_basic": "forebay.steps.text.normal.normal_forms:WhisperBasic",
    "whisper_english": "forebay.steps.text.normal.normal_forms:WhisperEnglish",
    "persian": "forebay.steps.text.normal.normal_forms:Persian",
    "indic": "forebay.steps.text.normal.normal_forms:Indic",
    "phones": "forebay.steps.text.normal.phones:Phones",
}
"""Name -> module and class. The module is imported when the name is asked for."""

CODE = "forebay.steps.text.normal.normal_step:Code"
"""The step of an entry `file.py:function`."""
SIMPLE = {"nfkc": ("nfkc",), "none": ()}
"""What `text.normalize` as one word stands for."""


def entries(normalize: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the entries of `text.normalize`, also where it is one word. Raises KeyError for a word of no meaning."""
    return SIMPLE[normalize] if isinstance(normalize, str) else tuple(normalize)


def normal_step(entry: str) -> type[NormalStep]:
    """Returns the class of an entry. Raises KeyError for a name that is not in the table."""
    module, _, name = (CODE if is_code(entry) else NORMAL[entry]).partition(":")
    found: type[NormalStep] = getattr(importlib.import_module(module), name)
    return found


def is_code(entry: str) -> bool:
    """Whether an entry names a function of the user."""
    return ":" in entry


def code_in(settings: Mapping[str, Any]) -> list[str]:
    """Returns the entries of `text.normalize` that name functions of the user."""
    normalize = settings.get("normalize", "nfkc")
    return [] if isinstance(normalize, str) else [entry for entry in normalize if is_code(entry)]


def made_steps(normalize: str | Sequence[str], where: Where) -> tuple[NormalStep, ...]:
    """Returns the steps of `text.normalize`. Raises ConfigError as their `of` do."""
    return tuple(normal_step(entry).of(entry, where) for entry in entries(normalize))


def problems_of(settings: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with `text.normalize` and `text.phones`, without reading a file."""
    normalize, phones = settings.get("normalize", "nfkc"), settings.get("phones")
    if not isinstance(normalize, (list, tuple)) or not all(isinstance(entry, str) for entry in normalize):
        normalize = ()
    found = [_unknown(entry) for entry in normalize if not is_code(entry) and entry not in NORMAL]
    found += [
        f"text.normalize: {problem}" for entry in normalize if is_code(entry) and (problem := spec_problem(entry))
    ]
    twice = {entry for entry in normalize if list(normalize).count(entry) > 1}
    found += [f'text.normalize: "{entry}" stands twice; name it once' for entry in sorted(twice)]
    if {"nfkc", "indic"} <= {*normalize} and list(normalize).index("indic") < list(normalize).index("nfkc"):
        found.append('text.normalize: "nfkc" behind "indic" joins letters with their nukta again; put "nfkc" first')
    if ("phones" in normalize) != (phones is not None):
        given = "text.phones is given" if phones is not None else 'text.normalize has "phones"'
        found.append(f'{given}; both are needed: normalize = [..., "phones"] and phones = {{backend = "espeak"}}')
    return [*found, *(phones_problems(phones) if isinstance(phones, Mapping) else [])]


def _unknown(entry: str) -> str:
    import difflib
    import json

    near = difflib.get_close_matches(entry, NORMAL, n=1)
    hint = f"did you mean {json.dumps(near[0])}? " if near else ""
    return (
        f"text.normalize: unknown step {json.dumps(entry)}; {hint}wanted names of {', '.join(NORMAL)}, or "
        '"file.py:function"'
    )


_OTHERS = {
    "ar": "ara arabic", "az": "aze azerbaijani", "be": "bel belarusian", "bn": "ben bengali bangla",
    "ca": "cat catalan", "ce": "che chechen", "cs": "ces cze czech", "cy": "cym wel welsh", "da": "dan danish",
    "de": "deu ger german", "en": "eng english", "eo": "epo esperanto", "es": "spa spanish castilian",
    "fa": "fas per pes prs persian farsi dari", "fi": "fin finnish", "fr": "fra fre french", "he": "heb iw hebrew",
    "hi": "hin hindi", "hu": "hun hungarian", "id": "ind in indonesian", "is": "isl ice icelandic",
    "it": "ita italian", "ja": "jpn japanese", "kk": "kaz kazakh", "kn": "kan kannada", "ko": "kor korean",
    "lt": "lit lithuanian", "lv": "lav latvian", "nl": "nld dut dutch flemish", "no": "nor nb nob norwegian",
    "pl": "pol polish", "pt": "por portuguese", "ro": "ron rum mo romanian", "ru": "rus russian",
    "sk": "slk slo slovak", "sl": "slv slovenian", "sr": "srp serbian", "sv": "swe swedish", "te": "tel telugu",
    "tet": "tetum", "tg": "tgk tajik", "th": "tha thai", "tr": "tur turkish", "uk": "ukr ukrainian",
    "vi": "vie vietnamese",
}  # fmt: skip
"""Codes and English names that stand for a code. Source: ISO 639-1, 639-2 and 639-3."""

_CODES = {other: code for code, others in _OTHERS.items() for other in others.split()}


@functools.lru_cache(maxsize=1024)
def tongue(language: str) -> tuple[str, str]:
    """Returns the code and the region of a language, both in small letters; "" for what is not there.

    `en-US`, `en_us` and `English` are known, and codes of two and three letters alike: `eng` is `en`. What is not known
    is its own code.
    """
    first, *subtags = language.strip().lower().replace("_", "-").split("-")
    region = next((tag for tag in subtags if (len(tag), tag.isalpha()) in ((2, True), (3, False))), "")
    return _CODES.get(first, first), region


_ASKER = Asker("text.normalize", "FB120")
_PROBE_S = 120
"""Seconds after which a function that does not end is refused."""

_PROBE = (
    ("Hello, world! It's 12.5 % of 1,234.", "en"),
    ("The quick brown fox jumps over the lazy dog", "en-US"),
    ("¿Dónde está el niño? A las 10:30.", "es"),
    ("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich", "German"),
    ("Пожалуйста, подождите 5 минут", "ru"),
    ("नमस्ते दुनिया, १२ क़लम", "hi"),
    ("كتاب‌ها را می‌خوانم، ۱۲", "fa"),
    ("今日は晴れです。3月", "ja"),
    ("ﬁne  ½ ① ａｂ\u00a0c", ""),
    ("a", "en"),
    ("A B C d e f " * 20, ""),
    ("👩‍👩‍👧 \u200f<|endoftext|> [noise]", ""),
)
"""Texts of eight scripts, with and without a language."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code(NormalStep):
    """A function of a Python file at or below the config's folder, `function(text: str, language: str) -> str`.

    It gets one text and its language ("" where none is known), and returns a text that depends on these two alone:
    before a build a few texts go through it twice, in two processes, and a function whose answers differ is refused.
    It runs only with `allow_code = true` under `[run]` in the config file itself. The content of the file is in the
    key; the file can import packages, and no file beside it. Where it raises, or returns no text, the sample fails as
    `step_failed`.
    """

    name: ClassVar[str] = "code"
    reads_language: ClassVar[bool] = True

    function: str
    digest: str
    """sha256 of the file."""
    path: Path = field(compare=False)

    @property
    def label(self) -> str:
        return f"{self.path.name}:{self.function}"

    @classmethod
    def of(cls, spec: str, where: Where) -> Code:
        """Returns the step of an entry `file.py:function`; reads the file and runs nothing.

        Raises ConfigError without `[run] allow_code = true`, and for what is no regular file at or below the config's
        folder, links followed nowhere.
        """
        name, _, function = spec.rpartition(":")
        if problem := spec_problem(spec):
            raise ConfigError(f"text.normalize: {problem}", code="FB102")
        if not where.allow_code:
            raise ConfigError(not_allowed(_ASKER.setting, spec), code="FB120")
        path = where.folder / name
        content = source_of(path, where.folder, _ASKER)
        return cls(function=function, digest=hashlib.sha256(content).hexdigest(), path=path)

    def open(self) -> Runner:
        """Returns what calls the function, loaded from the very bytes that are in the key.

        Raises ConfigError where the file is not that one any more, or where it cannot be run.
        """
        try:
            function = run_code.loaded(self._bytes(), str(self.path), self.function)
        except CodeError as err:
            raise ConfigError(f"{self._called()}: {err}; correct the file", code="FB120") from err
        return one_by_one(lambda text, language: self._result(run_code.answer(function, text, language)))

    def check(self) -> None:
        """Returns if the function gives the same texts for the same texts: twice, in two processes of their own.

        The processes have other seeds of `hash`, so that an order of a set shows. Raises ConfigError where results
        differ, where no probe text gives one, and where the file cannot be run.
        """
        source = self._bytes()
        runs = [run for seed in ("1", "2") for run in self._probed(source, seed)["runs"]]
        for (text, language), *answers in zip(_PROBE, *runs, strict=True):
            self._compare(text, language, [tuple(answer) for answer in answers])
        if all(kind == "raised" for kind, _ in runs[0]):
            raise ConfigError(
                f"{self._called()} raised for each of {len(_PROBE)} probe texts, for the first {runs[0][0][1]}; "
                "it is called with a text and its language, and returns a text",
                code="FB120",
            )

    def _compare(self, text: str, language: str, answers: Sequence[tuple[str, ...]]) -> None:
        asked = f"for {text[:40]!r}, language {language!r}"
        kind, value = answers[0]
        if kind == "type":
            raise ConfigError(f"{self._called()} returned {value} {asked}; return a str", code="FB120")
        # Messages of exceptions may hold addresses.
        other = next((o for o in answers if o[0] != kind or (kind == "text" and o[1] != value)), None)
        if other is not None:
            raise ConfigError(
                f"{self._called()} is not deterministic: {asked} it gave {value[:80]!r} and then {other[1][:80]!r}; "
                "what it returns may depend on nothing but the text and its language (no chance, no clock, no order of "
                "a set, no memory of other texts)",
                code="FB120",
            )

    def _probed(self, source: bytes, seed: str) -> dict[str, Any]:
        question = {
            "source": base64.b64encode(source).decode("ascii"),
            "path": str(self.path),
            "function": self.function,
            "pairs": _PROBE,
        }
        found = ask(
            [run_code.__file__],
            question,
            seed=seed,
            timeout_s=_PROBE_S,
            called=self._called(),
            asker=_ASKER,
            work=f"{len(_PROBE)} probe texts",
        )
        if error := found.get("error"):
            raise ConfigError(f"{self._called()}: {error}; correct the file", code="FB120")
        return found

    def _result(self, answer: Answer) -> str | Problem:
        kind, value = answer
        if kind == "text":
            return value
        what = f"returned {value}, wanted a str" if kind == "type" else f"raised {value}"
        return Problem("step_failed", f"{self._called()} {what}")

    def _bytes(self) -> bytes:
        """Returns the bytes of the key. Raises ConfigError where the file holds others."""
        return same_source(self.path, self.digest, _ASKER)

    def _called(self) -> str:
        return f"text.normalize: {self.label}"
