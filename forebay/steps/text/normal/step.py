"""What a step of `text.normalize` is: its identity, and what makes texts of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Problem:
    """What a text could not be made into; it costs the samples of that text. message: without the sample's id."""

    reason: str
    message: str


Runner = Callable[[Sequence[str], Sequence[str]], "list[str | Problem]"]
"""(texts, languages) -> what each text becomes, in their order. A language is a code or a name as manifests write them
(`en`, `en-US`, `English`), "" where it is unknown. What a text becomes depends on that text and its language alone."""


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
    is_quick: it costs less than a look into the store of texts. is_idempotent: done twice it gives what it gave once.
    reads_language: results depend on the language. of_prompts: hot words and earlier text go through it too.
    """

    name: ClassVar[str] = ""
    is_quick: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    reads_language: ClassVar[bool] = False
    of_prompts: ClassVar[bool] = True

    version: int = 1

    @classmethod
    def of(cls, spec: str, where: Where) -> NormalStep:  # noqa: ARG003
        """Returns the step that an entry of `text.normalize` says. Reads files, runs nothing, imports no code.

        Raises ConfigError where a file is not there or not what it should be.
        """
        return cls()

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
