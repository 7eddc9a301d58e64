"""Values of a form: tables of codes, operations, shapes, and what reads values of JSON or raises FormError."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from forebay.errors import FormError
from forebay.store.layout import Array

if TYPE_CHECKING:
    import torch


from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    pass


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


Count = TypeVar("Count", int, "torch.Tensor")
Side = Literal["right", "left"]
"""Where an array lies in its room, away from the padding."""
MAX_AXIS, MAX_RANK = 1 << 31, 8
_MAX_TEXT, _MAX_CHANNELS = 4096, 1024


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """The values of codes: `values[channel, code]`, float32 [channels, n].

    axis: of the array, along which channels lie: place i is of channel `i // inner % channels`. One channel is all.
    copies: a batch has the `inner` values of a channel so many times, one behind the other.
    """

    axis: int
    values: npt.NDArray[np.float32]
    inner: int = 1
    copies: int = 1

    def to_json(self) -> dict[str, Any]:
        """Returns the table as JSON values; a float32 comes back bit for bit."""
        more = {} if self.copies == 1 else {"copies": self.copies}
        return {"axis": self.axis, "inner": self.inner, "values": self.values.tolist(), **more}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Returns the table that `to_json` wrote; ValueError for anything else."""
        names = {"axis", "inner", "values"}
        require(isinstance(document, dict) and names <= set(document) <= {*names, "copies"}, "a table", document)
        rows = document["values"]
        is_whole = isinstance(rows, list) and 0 < len(rows) <= _MAX_CHANNELS
        require(is_whole and all(isinstance(row, list) and row for row in rows), "the values of a table", rows)
        require(len({len(row) for row in rows}) == 1, "rows of one length in a table", [len(row) for row in rows])
        require(all(is_number(value) for row in rows for value in row), "numbers in a table", rows)
        return cls(
            axis=integer(document["axis"], "the axis of a table", most=MAX_RANK),
            values=np.array(rows, np.float32),
            inner=integer(document["inner"], "the places of a channel in a table", least=1),
            copies=integer(document.get("copies", 1), "the copies of a channel in a table", least=1),
        )


FINISHES = {
    "w2v_bert": "forebay.steps.audio.w2v_bert:NormalisedPairs",
    "w2v_bert_crop": "forebay.steps.audio.w2v_bert:NormalisedCrops",
}
"""Operations that make the values of a batch of rows on disk, where more than padding and casts is to be done.

Name -> module and class, each where its step is. A form names them (`FieldForm.finish`), so this table is all that a
cache can ask for. The module is imported when the name is asked for."""


class Finish(Protocol):
    """An operation on the rows of an array, in the calling thread."""

    def shape(self, rows: int, inner: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the values that are made of so many rows of this shape."""

    def made(self, rows: Count) -> Count:
        """Returns how many values along the first axis are made of so many rows, an int or elementwise."""

    def marked(self, rows: Count) -> Count:
        """Returns how many of the values a mask marks, an int or elementwise."""

    def batch(self, lines: torch.Tensor, lengths: torch.Tensor, room: int) -> torch.Tensor:
        """Returns the batch of arrays that lie one behind the other, zeros in the padding, on their device.

        lines: float32 [rows of all, ...]. lengths: int64 [batch]. room: rows that an array has room for.
        """

    def write(self, values: Array, out: Array) -> None:
        """Makes `out`, C-contiguous float32 of that shape, the values of float32 rows."""


@cache
def finish_named(name: str) -> Finish:
    """Returns an operation of the table."""
    module, _, cls = FINISHES[name].partition(":")
    found: Finish = getattr(importlib.import_module(module), cls)()
    return found


def places_of(firsts: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the place of every row of arrays one behind the other, int64 [count]; nothing waits for a device.

    firsts: int64 [arrays], the place of the first row of each. lengths: their rows, `count` together.
    """
    import torch

    behind = lengths.cumsum(0) - lengths
    spread = torch.repeat_interleave(firsts - behind, lengths, output_size=count)
    return spread + torch.arange(count, device=lengths.device)


def require(is_right: Any, wanted: str, found: Any) -> None:
    """Raises FormError where something is not right."""
    if not is_right:
        raise FormError(f"wanted {wanted}, got {found!r:.80}")


def integer(value: Any, what: str, *, least: int = 0, most: int = MAX_AXIS) -> int:
    """Returns a whole number from `least` up to below `most`."""
    require(type(value) is int and least <= value < most, what, value)
    return int(value)


def text(value: Any, what: str, *, least: int = 1) -> str:
    """Returns a text that is not too long."""
    require(isinstance(value, str) and least <= len(value) <= _MAX_TEXT, what, value)
    return str(value)


def identifier(value: Any, what: str) -> str:
    """Returns the name of a field."""
    require(isinstance(value, str) and len(value) <= _MAX_TEXT and value.isidentifier(), what, value)
    return str(value)


def number(value: Any, what: str) -> float:
    """Returns a number that float32 holds."""
    require(is_number(value), what, value)
    return float(value)


def one_of(value: Any, choices: Sequence[str], what: str) -> Any:
    """Returns one of some choices."""
    require(isinstance(value, str) and value in choices, f"{what}, one of {', '.join(choices)}", value)
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a number that float32 holds."""
    return type(value) in (int, float) and abs(value) < 3.5e38


def raw(tensor: torch.Tensor) -> Array:
    """Returns the tensor's memory as an array; bfloat16, which numpy does not have, as its bits in int16."""
    import torch  # not at import: forms are read where nothing else needs it

    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def place_in(shape: Sequence[int], rooms: Sequence[int], side: Side) -> tuple[slice, ...]:
    """Returns where an array of a shape stands in a block of these lengths."""
    if side == "right":
        return tuple(slice(0, length) for length in shape)
    return tuple(slice(room - length, room) for length, room in zip(shape, rooms, strict=True))


def shown_shape(shape: Sequence[int | None]) -> str:
    """Returns the shape of an array as messages have it, n for an axis that grows."""
    return f"[{', '.join('n' if length is None else str(length) for length in shape)}]"


def holds_values(values: Array, array: Array) -> bool:
    """Returns whether a cast array holds the values of the one that was cast, rounded if they are floats."""
    if values.dtype.kind == "f":
        return bool(np.isfinite(values).all())
    if array.dtype.kind not in "iu" or not array.size:
        return np.array_equal(values, array)
    held = np.iinfo(values.dtype)  # two passes without a cast are faster than a comparison with one
    return bool(held.min <= array.min() and array.max() <= held.max)
