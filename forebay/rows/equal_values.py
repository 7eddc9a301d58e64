"""Which strings of a listing are the same, and which rows of one file share items.

Strings are told apart by 64 bits of each: a dictionary of all ids or paths of a large listing would be much. Strings
whose bits are the same are compared, so what is found is exact.
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
    blocks = (again[start : start + BLOCK_ROWS] for start in range(0, len(again), BLOCK_ROWS))
    if all(pc.all(pc.equal(strings.take(block), strings.take(first[block]))).as_py() for block in blocks):
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


def share_groups(files: Array, offsets: Array, items: Array) -> Array:
    """Returns int64 [rows]: rows of one file that share an item, also by way of others, have one number.

    Numbers are those of the first row of a group. A row without items is a group of its own. Rows of other files join
    nothing: what a file's rows are must not depend on the files beside it.

    files: int [rows], rising. offsets, items: the items of row i are `items[offsets[i] : offsets[i + 1]]`.
    """
    rows = np.repeat(np.arange(len(files), dtype=np.int64), np.diff(offsets))
    groups = np.arange(len(files), dtype=np.int64)
    if not len(items):
        return groups
    keys = files[rows].astype(np.int64) * (int(items.max()) + 1) + items
    _, nodes = np.unique(keys, return_inverse=True)
    first = np.full(nodes.max() + 1, len(files), np.int64)
    np.minimum.at(first, nodes, rows)
    same_row = np.flatnonzero(rows[1:] == rows[:-1])
    labels = _components(len(first), nodes[same_row], nodes[same_row + 1])
    lowest = np.full(len(first), len(files), np.int64)
    np.minimum.at(lowest, labels, first)
    groups[rows] = lowest[labels[nodes]]
    return groups


def first_uses(values: Array) -> tuple[Array, Array]:
    """Returns (the different values in order of first appearance, for every value its place among them), int64."""
    unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    places = np.empty(len(unique), np.int64)
    places[order] = np.arange(len(unique))
    return unique[order], places[inverse.reshape(-1)]


def _components(count: int, left: Array, right: Array) -> Array:
    """The lowest node that each of `count` nodes is connected with, by edges (left, right).

    Every round hooks each component's root under its lowest neighbour and shortens all paths; as a component is joined
    to another in any two rounds, there are at most 2 log2(count).
    """
    labels = np.arange(count, dtype=np.int64)
    while True:
        low = np.minimum(labels[left], labels[right])
        hooked = labels.copy()
        np.minimum.at(hooked, labels[left], low)
        np.minimum.at(hooked, labels[right], low)
        while np.any((jumped := hooked[hooked]) != hooked):
            hooked = jumped
        if np.array_equal(hooked, labels):
            return labels
        labels = hooked
