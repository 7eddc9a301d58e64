from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.rows.equal_values import first_uses, share_groups


def by_hand(files: list[int], rows: list[list[int]]) -> list[int]:
    """The first row that each row is connected with, by flooding."""
    groups = list(range(len(rows)))
    changed = True
    while changed:
        changed = False
        for i in range(len(rows)):
            for j in range(i):
                if files[i] == files[j] and set(rows[i]) & set(rows[j]) and groups[i] != groups[j]:
                    groups[i] = groups[j] = min(groups[i], groups[j])
                    changed = True
    return groups


def grouped(files: list[int], rows: list[list[int]]) -> list[int]:
    offsets = np.cumsum([0, *map(len, rows)])
    images = np.array([image for row in rows for image in row], np.int64)
    return [int(group) for group in share_groups(np.array(files, np.int32), offsets, images)]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=3)), max_size=14))
def test_groups_are_those_of_flooding(rows: list[tuple[int, list[int]]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    files, images = [file for file, _ in rows], [images for _, images in rows]
    assert grouped(files, images) == by_hand(files, images)


def test_a_long_chain_is_one_group() -> None:
    order = np.random.default_rng(0).permutation(20_000)
    rows = [[int(order[i]), int(order[i + 1])] for i in range(len(order) - 1)]
    assert set(grouped([0] * len(rows), rows)) == {0}


def test_files_join_nothing_of_each_other() -> None:
    assert grouped([0, 0, 1, 1], [[1], [2], [1, 2], [2]]) == [0, 1, 2, 2]


@given(st.lists(st.integers(-3, 3), max_size=20))
def test_first_uses_are_in_order_of_appearance(values: list[int]) -> None:
    different, places = first_uses(np.array(values, np.int64))
    assert different.tolist() == list(dict.fromkeys(values))
    assert different[places].tolist() == values
