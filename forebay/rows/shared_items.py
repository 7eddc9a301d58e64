"""Rows of one file that share items, and the different items of a list."""

from __future__ import annotations

import numpy as np

from forebay.store.layout import Array


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
