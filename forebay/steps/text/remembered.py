"""Work on texts that is done once for each different text: in a call, and where there is a store, in all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from forebay.steps.text.normal.step import Problem
from forebay.store.texts import TextValues, digests_of

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


def language_to_bytes(_: str, result: tuple[str, float]) -> bytes:
    """Returns a language's code and its confidence as they are kept."""
    return _CONFIDENCE.pack(result[1]) + result[0].encode("utf-8")


def language_of_bytes(_: str, data: bytes) -> tuple[str, float]:
    """Returns the code and the confidence that were kept."""
    return data[_CONFIDENCE.size :].decode("utf-8"), _CONFIDENCE.unpack_from(data)[0]
