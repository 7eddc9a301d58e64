"""The members of one tar as flat arrays: 16 bytes a member, read by row; names are decoded when asked."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CURRENT_DIRECTORY = b"./"


class Refused(NamedTuple):
    """A member that cannot be read by offset and size, or a block that is no header.

    reason: `bad_checksum`, `bad_size`, `truncated`, `sparse`, `hard_link`, `symlink`, `special_file`, `unknown_type`,
    `bad_extended_header`, `extended_header_too_large` or `no_name`. offset: of its header, in bytes.
    """

    name: str
    reason: str
    offset: int


class FileStamp(NamedTuple):
    """What tells one state of a file from another without reading it. The device is left out: mounts renumber it."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStamp:
        """Returns the stamp of a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    @classmethod
    def of_source(cls, stat: tuple[int, int, int, int, int]) -> FileStamp:
        """Returns the stamp of a source's stat: of an object of a store, that of its version."""
        _, inode, size_bytes, mtime_ns, ctime_ns = stat
        return cls(size_bytes, mtime_ns, ctime_ns, inode)


@dataclass(frozen=True, kw_only=True, eq=False)
class TarIndex:
    """Where each regular member of one tar lies, in archive order; of names only a leading `./` is removed.

    name_bytes: uint8, the names one after another, UTF-8 as stored in the tar.
    name_bounds: int64 [num_members + 1], where each name begins in `name_bytes`.
    offsets: int64 [num_members], of the data in the tar file. sizes: int64 [num_members], in bytes.
    refused: members that are there and cannot be read, each with its reason. Directories are in neither list.
    """

    path: str
    stamp: FileStamp
    name_bytes: npt.NDArray[np.uint8]
    name_bounds: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    refused: tuple[Refused, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def names(self) -> list[str]:
        """The member names; bytes that are not UTF-8 become surrogates, as `os.fsdecode` does it."""
        flat, bounds = self.name_bytes.tobytes(), self.name_bounds.tolist()
        return [flat[a:b].decode("utf-8", "surrogateescape") for a, b in itertools.pairwise(bounds)]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Name to row, for many lookups. Of members with one name the last counts, as when tar extracts them."""
        return {name: row for row, name in enumerate(self.names)}

    def find(self, name: str) -> int | None:
        """Returns the row of a member, or None, by its name in the tar or in `names`."""
        row = self.rows.get(name.removeprefix("./"))
        return self.rows.get(name) if row is None else row

    def find_refused(self, name: str) -> Refused | None:
        """Returns why the member of this name is not in the index, or None where the tar has no trace of it."""
        name = name.removeprefix("./")
        return next((refused for refused in reversed(self.refused) if refused.name == name), None)


def flat_names(names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Returns (name_bytes, name_bounds) of a list of names."""
    bounds = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, names), np.int64, len(names)), out=bounds[1:])
    return np.frombuffer(b"".join(names), np.uint8), bounds
