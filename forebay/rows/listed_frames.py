"""Videos of a listing whose frames are images of their own: their facts are those of their frames, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.rows.manifest import flattened
from forebay.store.layout import Array

_PER_FRAME = ("file", "offset", "size")
"""The numbers of a frame in `frames` of ITEM_BOUNDS."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of some items. offsets: int64 [items + 1]. asked: of each item, [] where none has frames.

    references: int64, the frames of item i are those from `offsets[i]` up to below `offsets[i + 1]`.
    """

    offsets: Array
    references: Array
    asked: Sequence[str | None] = ()

    @classmethod
    def of(cls, places: pa.Table) -> Frames:
        """Returns those of PART_ITEMS."""
        if "frames" not in places.column_names:
            return cls.none(len(places))
        offsets, references = flattened(places["frames"])
        return cls(offsets, references, places["video"].to_pylist() if len(references) else ())

    @classmethod
    def none(cls, num_items: int) -> Frames:
        """Returns those of items without any."""
        return cls(np.zeros(num_items + 1, np.int64), np.zeros(0, np.int64))

    @staticmethod
    def shifted(places: pa.Table, base: int) -> pa.Table:
        """Returns PART_ITEMS of a part whose first item is number `base` of all."""
        if base == 0 or "frames" not in places.column_names:
            return places
        offsets, references = flattened(places["frames"])
        return with_frames(places, pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(references + base)))

    @property
    def is_any(self) -> Array:
        """Which items have frames of their own, bool [items]."""
        return np.diff(self.offsets) > 0

    def shown_in(self, references: Array) -> Array:
        """Returns the items that have some of the frames."""
        return np.unique(
            np.searchsorted(self.offsets, np.flatnonzero(np.isin(self.references, references)), "right") - 1
        )

    def facts(self, facts: pa.Table) -> tuple[list[tuple[Any, ...]], Array]:
        """Returns the facts of items that all have frames, and of each the place of a frame that is bad, else -1.

        A video of frames has no rate: `fps` is 0. facts: of the frames, with `reason` and `message` of bad ones.
        """
        names, found, bad = facts.column_names, [], np.full(len(self.asked), -1, np.int64)
        columns = {name: facts[name].to_pylist() for name in names}
        for item, asked in enumerate(self.asked):
            start, stop = self.offsets[item : item + 2].tolist()
            own = {name: values[start] for name, values in columns.items()}
            sizes = [*zip(columns["width"][start:stop], columns["height"][start:stop], strict=True)]
            wrong = next((i for i, reason in enumerate(columns["reason"][start:stop]) if reason is not None), None)
            if wrong is not None:
                bad[item] = start + wrong
                own |= {"hash": "", "reason": columns["reason"][bad[item]]}
                own["message"] = f"frame {wrong + 1} of a video: {columns['message'][bad[item]]}"
            elif (other := next((i for i, size in enumerate(sizes) if size != sizes[0]), None)) is not None:
                (width, height), (wide, high) = sizes[0], sizes[other]
                said = f"frame 1 of a video has {width}x{height} pixels, frame {other + 1} has {wide}x{high}"
                own |= {"hash": "", "reason": "frame_sizes", "message": f"{said}; write all frames in one size"}
            else:
                content = repr((columns["hash"][start:stop], asked)).encode()
                own |= {"hash": xxhash.xxh3_128_hexdigest(content), "num_frames": stop - start}
            found.append(tuple(own[name] for name in names))
        return found, bad

    def flat(self, files: Array, facts: pa.Table) -> pa.ListArray:
        """Returns `frames` of ITEM_SCHEMAS. files, facts: of the frames."""
        numbers = [files, facts["offset"].to_numpy(), facts["size"].to_numpy()]
        flat = np.stack(numbers, axis=1).astype(np.int64).reshape(-1)
        return pa.ListArray.from_arrays(pa.array(self.offsets * len(_PER_FRAME), pa.int32()), pa.array(flat))


def with_frames(table: pa.Table, frames: pa.ListArray) -> pa.Table:
    """Returns a table with other `frames`."""
    place = table.schema.get_field_index("frames")
    return table.set_column(place, table.schema.field(place), frames)


def frame_places(frames: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns file, offset and size of each frame of an item of ITEM_SCHEMAS."""
    step = len(_PER_FRAME)
    return [(frames[i], frames[i + 1], frames[i + 2]) for i in range(0, len(frames), step)]


def frame_files(rows: pa.Table) -> Array:
    """Returns the number of the file of each frame of some items, int64; none where they have no such."""
    if "frames" not in rows.column_names:
        return np.zeros(0, np.int64)
    return flattened(rows["frames"])[1][:: len(_PER_FRAME)]


def renumbered(rows: pa.Table, files: Array) -> pa.Table:
    """Returns items with other numbers of the files of their frames. files: int64, of each frame in order."""
    if not len(files):
        return rows
    offsets, numbers = flattened(rows["frames"])
    numbers = numbers.copy()
    numbers[:: len(_PER_FRAME)] = files
    return with_frames(rows, pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(numbers)))
