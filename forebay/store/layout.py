"""What a sample is made of: field specifications, shared by the shard writer, the reader and all that collates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

FORMAT_VERSION = 3
"""The newest form of the bytes on disk. A change is breaking: it brings a new golden cache under tests/golden."""

Group = Literal["media", "text"]
GROUPS: tuple[Group, ...] = ("media", "text")


NULL_TEXT = b"\xff"
"""How a nullable text field holds a null: no UTF-8 text has this byte."""


def format_of(groups: Collection[Group], fields: Collection[FieldSpec] = ()) -> int:
    """Returns the form of a cache with these groups and fields, the oldest that can hold it, so older readers read it.

    1: media and text. 2: no media. 3: a text field may hold nulls.
    """
    if any(field.nullable for field in fields):
        return 3
    return 1 if "media" in groups else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One named tensor of a sample: an array [n, *shape] of `dtype`, where n differs from sample to sample.

    role: `tensor` fields are handed out with a sample; `table` fields form the row table (UTF-8 bytes where dtype is
    `str`, one element a row otherwise). nullable: of a table field of texts, which then tells a null, NULL_TEXT, from
    an empty text; of numbers a row without an element is null anyway.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    group: Group = "media"
    role: Literal["tensor", "table"] = "tensor"
    nullable: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the stored values; strings are stored as UTF-8 bytes."""
        return np.dtype("uint8" if self.dtype == "str" else self.dtype).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        """Returns the description kept in metadata.json."""
        document = {**asdict(self), "shape": list(self.shape)}
        if not self.nullable:  # caches of before have no such entry
            del document["nullable"]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FieldSpec:
        """Returns the spec of a description read from metadata.json."""
        return cls(**{**document, "shape": tuple(document["shape"])})


Array = np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

ROW_BITS = 32
"""A slot is `shard << ROW_BITS | row`."""

ROW_MASK = (1 << ROW_BITS) - 1
