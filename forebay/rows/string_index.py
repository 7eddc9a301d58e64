"""Which strings are the same, by 64 bits of each: a dictionary of all ids or paths of a large listing would be much.

Strings whose bits are the same are compared, so what is found is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from forebay.rows.columns_aside import BLOCK_ROWS
from forebay.store.layout import Array


def hashes_of(strings: Any) -> Array:
    """Returns the xxh3-64 of each string, uint64 [strings]. strings: arrow's, none null, in one chunk or several."""
    found = np.empty(len(strings), np.uint64)
    for start in range(0, len(strings), BLOCK_ROWS):
        block = strings.slice(start, BLOCK_ROWS).cast(pa.large_binary()).to_pylist()
        found[start : start + len(block)] = np.fromiter(map(xxhash.xxh3_64_intdigest, block), np.uint64, len(block))
    return found


def first_rows(strings: Any) -> Array:
    """Returns the position of the first row with the same string, for every row. strings: see `hashes_of`."""
    hashes = hashes_of(strings)
    hashes_sorted = np.sort(hashes)
    if not (hashes_sorted[1:] == hashes_sorted[:-1]).any():
        return np.arange(len(strings))
    del hashes_sorted
    order = np.argsort(hashes, kind="stable")
    is_new = np.append([True], np.diff(hashes[order]) != 0)
    first = np.empty(len(order), np.int64)
    first[order] = order[is_new][np.cumsum(is_new) - 1]
    again = np.flatnonzero(first != np.arange(len(first)))
    if pc.all(pc.equal(strings.take(pa.array(again)), strings.take(pa.array(first[again])))).as_py():
        return first
    encoded = pa.chunked_array(strings).combine_chunks().dictionary_encode()  # two strings have the same bits
    _, places, inverse = np.unique(encoded.indices.to_numpy(), return_index=True, return_inverse=True)
    return np.asarray(places[inverse])


class StringIndex:
    """The numbers of strings that are given one after the other: sorted runs of hashes, each larger than the next."""

    def __init__(self) -> None:
        self._runs: list[tuple[Array, Array]] = []

    def add(self, hashes: Array, start: int) -> None:
        """Takes in strings that follow each other, numbered from `start`. hashes: uint64, none of them known."""
        order = np.argsort(hashes)
        self._runs.append((hashes[order], (start + order).astype(np.int32)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            larger, smaller = self._runs[-2], self._runs.pop()
            hashes, numbers = (np.concatenate(pair) for pair in zip(larger, smaller, strict=True))
            order = np.argsort(hashes, kind="stable")
            self._runs[-1] = hashes[order], numbers[order]

    def find(self, strings: Any, hashes: Array, known: Callable[[Array], Any], all_known: Callable[[], Any]) -> Array:
        """Returns the number of each string, int32 [strings], -1 for one that is not known.

        known: (numbers) -> those strings. all_known: all of them, which are looked at where two have the same bits.
        """
        found = np.full(len(hashes), -1, np.int32)
        for run, numbers in self._runs:
            at = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            is_it = (run[at] == hashes) if len(run) else np.zeros(len(hashes), bool)
            found[is_it] = numbers[at[is_it]]
        chosen = np.flatnonzero(found >= 0)
        is_same = pc.equal(known(found[chosen]), strings.take(pa.array(chosen)))
        if not pc.all(is_same, min_count=0).as_py():
            return np.asarray(pc.fill_null(pc.index_in(strings, value_set=all_known()), -1)).astype(np.int32)
        return found
