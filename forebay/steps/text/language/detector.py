"""Which language a text is in, by its script and its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Detect = Callable[[Sequence[str]], "list[tuple[str, float]]"]
"""Texts -> (language's code, confidence from 0 to 1) of each; ("", confidence) where nothing can be said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """What `text.language`, `text.languages` and `text.min_confidence` say. model: digest of the model's file."""

    mode: Literal["detect", "detect_missing"]
    languages: tuple[str, ...] = ()
    min_confidence: float = 0.0
    model: str = ""
    version: int = 1

    @classmethod
    def of(
        cls, *, mode: Literal["detect", "detect_missing"], languages: Sequence[str], min_confidence: float
    ) -> Detector:
        """Returns the detector of settings, with the digest of the model that is installed. Imports nothing of it.

        Raises ConfigError where there is none, or for a language that it does not know.
        """
        return cls(mode=mode, languages=tuple(sorted(languages)), min_confidence=min_confidence)

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description."""
        return {"step": "Detector", **asdict(self)}

    def open(self) -> Detect:
        """Returns what detects; loads the model. Raises ConfigError where it is not the one of `model`."""
        raise NotImplementedError
