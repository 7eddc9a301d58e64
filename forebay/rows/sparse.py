"""Which tars of a store are read member by member, and not downloaded as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from forebay.store.memo import SIZE
from forebay.store.remote.raw.sources import is_here
from forebay.store.source_files import SourceFile

SPARSE_MEMBER_BYTES, SPARSE_SHARE = 8 * 1024 * 1024, 4
"""A tar of a store is read member by member where those needed have this mean size and less than this part of it."""


def sparse_files(rows: pa.Table, files: Sequence[SourceFile]) -> frozenset[int]:
    """Returns the numbers of the tars of a store of which few, large members are needed, and that are not here.

    Each member is a request of its own then. A tar of which more is needed is downloaded as a whole: one request, and
    no part of it twice. rows: all that are needed, with `file` and `size`.
    """
    if all(file.stat is None or file.stat[0] >= 0 for file in files):
        return frozenset()
    sizes = rows["size"].to_numpy()
    number = rows["file"].to_numpy()[sizes >= 0]
    needed = np.bincount(number, sizes[sizes >= 0], len(files))
    counts = np.bincount(number, minlength=len(files))
    large = np.flatnonzero(needed >= np.maximum(counts, 1) * SPARSE_MEMBER_BYTES)
    return frozenset(
        index
        for index in large.tolist()
        if (stat := files[index].stat) is not None
        and stat[0] < 0
        and needed[index] * SPARSE_SHARE < stat[SIZE]
        and not is_here(files[index].path)
    )
