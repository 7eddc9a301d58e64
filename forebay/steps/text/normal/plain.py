"""`nfkc` and `lower`: what Python's own tables of Unicode do."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forebay.steps.text.normal.step import NormalStep, Problem, Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class Nfkc(NormalStep):
    """Unicode NFKC (UAX 15); runs of white space become one space, the ends are stripped.

    White space is what `str.split` takes for it, line ends included.
    """

    name: ClassVar[str] = "nfkc"
    is_quick: ClassVar[bool] = True

    def open(self) -> Runner:
        """Returns what normalises texts."""
        return _nfkc


@dataclass(frozen=True, kw_only=True, slots=True)
class Lower(NormalStep):
    """Lower case by Unicode's full mapping (`str.lower`), without regard to the language."""

    name: ClassVar[str] = "lower"
    is_quick: ClassVar[bool] = True

    def open(self) -> Runner:
        """Returns what writes texts in lower case."""
        return _lower


def _nfkc(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:  # noqa: ARG001
    return [" ".join(unicodedata.normalize("NFKC", text).split()) for text in texts]


def _lower(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:  # noqa: ARG001
    return [text.lower() for text in texts]
