"""Rows to the fields of their texts: what every prompt is given of a row, and what it gives.

A text shard is made without sound and pixels. What a prompt needs to know of an item that a row lists, the item's group
tells: the size of an image in pixels, or in patches.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from forebay.errors import SampleError, TextError
from forebay.spans import TOKENS, span
from forebay.store.layout import Array
from forebay.store.texts import TextStore

Spoken = Sequence[Sequence[int]]
"""Which part of a window's text is spoken when: of each segment its first and last step, and its first and last
character; of one that only begins in the window its first step. Nothing of a window without speech."""
STEP_S = 0.02
"""Seconds of a step, of Whisper's timestamps."""
Size = tuple[int, int]
"""(width, height) of an image as displayed, in pixels of its file."""


class ShownVideo(NamedTuple):
    """A video, as a processor that writes conversations is told: its grid in patches, the seconds of a step in time."""

    t: int
    h: int
    w: int
    second_per_grid: float


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Some rows, column by column.

    texts: a transcript, a conversation in canonical form (JSON), a caption or a label; None where nothing gives one.
    kept: of `source.keep_columns`. told: what the group tells of each item that the row lists, in their order.
    spoken: of windows, None of other rows; empty where no row is one.
    """

    ids: Sequence[str]
    texts: Sequence[str | None]
    languages: Sequence[str | None]
    prompts: Sequence[str | None]
    kept: Sequence[Mapping[str, Any]]
    told: Sequence[Sequence[Any]]
    spoken: Sequence[Spoken | None] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """The encoding of a row. values: its fields, and columns of the row table as they are to stand there.

    error: why the row cannot be used; then there are no fields.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    error: SampleError | None = None


class RowEncoder(Protocol):
    """The writer of the texts of rows. A worker keeps the one of its step."""

    @property
    def constants(self) -> dict[str, Any]:
        """Facts that a cache states of all samples."""

    def encode_rows(self, rows: EncodedRows, *, store: TextStore | None = None) -> Iterator[EncodedRow]:
        """Yields what becomes of each row, in their order; one does not depend on another. store: of kept texts."""

    def found(self, rows: EncodedRows) -> dict[str, Any]:  # noqa: ARG002
        """Returns what the step finds on this machine that no key names; empty for most steps."""
        return {}


class OneByOne(RowEncoder):
    """A `RowEncoder` that writes one row after the other. needs_items: how many a row must list; None: any number."""

    needs_items: int | None = None
    name: str = ""
    turn: ClassVar[AbstractContextManager[Any]] = nullcontext()
    """Taken while a row is written, by what is not made for threads."""

    @abstractmethod
    def encode(self, text: str, told: Sequence[Any], *, sample_id: str) -> dict[str, Array]:
        """Returns the fields of a row. Raises SampleError for a row of no use."""

    def encode_rows(self, rows: EncodedRows, *, store: TextStore | None = None) -> Iterator[EncodedRow]:  # noqa: ARG002
        for sample_id, text, told in zip(rows.ids, rows.texts, rows.told, strict=True):
            try:
                if self.needs_items not in (None, len(told)):
                    raise TextError(
                        "image_count_mismatch",
                        f'{sample_id}: the row has {len(told)} images, prompt = "{self.name}" wants '
                        f"{self.needs_items}; correct the manifest",
                    )
                with span(TOKENS), self.turn:
                    yield EncodedRow(self.encode(text or "", told, sample_id=sample_id))
            except SampleError as err:
                yield EncodedRow(error=err)


TURN = threading.Lock()
"""Processors of transformers are not made for threads: one text is written at a time."""
