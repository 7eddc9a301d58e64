"""`none`: nothing is stored of what stands beside images, for what learns from images alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forebay.steps.text.of_images import ImagesText, Size
from forebay.store.layout import Array, FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class NoText(ImagesText):
    """No field of text; a batch holds images alone. The text of a row stays in the row table."""

    name: ClassVar[str] = "none"

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns no field."""
        return ()

    def encoder(self) -> _Nothing:
        """Returns what writes no field."""
        return _Nothing()


class _Nothing:
    constants: ClassVar[dict[str, Any]] = {"prompt": NoText.name}

    def encode(self, text: str, sizes: Sequence[Size], *, sample_id: str) -> dict[str, Array]:  # noqa: ARG002
        return {}
