"""`none`: nothing is made of the text of a row, for what learns from its items alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forebay.steps.step import TextStep
from forebay.steps.text.row_encoder import EncodedRow, TextRows
from forebay.store.layout import FieldSpec
from forebay.store.texts import TextStore


@dataclass(frozen=True, kw_only=True, slots=True)
class NoText(TextStep):
    """No field of text; a batch holds images alone. The text of a row stays in the row table."""

    name: ClassVar[str] = "none"

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns no field."""
        return ()

    def opened(self, folder: Path, *, merge_size: int | None) -> _Nothing:  # noqa: ARG002
        """Returns what writes no field."""
        return _Nothing()


class _Nothing:
    constants: ClassVar[dict[str, Any]] = {"prompt": NoText.name}

    def encode_rows(self, rows: TextRows, *, store: TextStore | None = None) -> Iterator[EncodedRow]:  # noqa: ARG002
        return (EncodedRow() for _ in rows.ids)

    def found(self, rows: TextRows) -> dict[str, Any]:  # noqa: ARG002
        return {}
