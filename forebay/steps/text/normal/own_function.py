"""`file.py:function`: a function of the user as a step of `text.normalize`.

    def function(text: str, language: str) -> str: ...

It gets one text and its language, as the manifest or the detector writes it, "" where none is known; and it returns a
text that depends on these two alone. Nothing but `Code.open` and `Code.check` runs the file: what makes keys reads its
bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from forebay.config.code import Asker, ask, not_allowed, same_source, source_of, spec_problem
from forebay.errors import ConfigError
from forebay.steps import run_code
from forebay.steps.run_code import Answer, CodeError
from forebay.steps.text.normal.normal_step import NormalStep, Problem, Runner, Where, one_by_one

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
