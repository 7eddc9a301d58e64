from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.plan.permutation import MAX_SIZE, NUM_ROUNDS, Permutations, derive_key

MASK = 2**64 - 1


def mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def oracle(index: int, *, size: int, key: int, member: int = 0) -> int:
    """The same network with Python's integers, which cannot overflow."""
    left = math.isqrt(size - 1) + 1
    right = -(-size // left)
    while True:
        halves = [index // right, index % right]
        for number in range(NUM_ROUNDS):
            counter = member * NUM_ROUNDS + number + 1
            side, modulus = number % 2, (left, right)[number % 2]
            hashed = (halves[1 - side] ^ mixed(key + counter * 0x9E3779B97F4A7C15 & MASK)) * 0xBF58476D1CE4E5B9 & MASK
            hashed = (hashed ^ (hashed >> 32)) * 0x94D049BB133111EB & MASK
            halves[side] = (halves[side] + ((hashed >> 32) * modulus >> 32)) % modulus
        index = halves[0] * right + halves[1]
        if index < size:
            return index


def test_every_size_up_to_600_is_permuted() -> None:
    sizes = np.arange(1, 601)
    members = np.repeat(np.arange(600), sizes)
    indices = np.concatenate([np.arange(size) for size in sizes])
    images = Permutations(sizes.tolist(), key=7)(indices, member=members)
    for number, size in enumerate(sizes):
        assert np.array_equal(np.sort(images[members == number]), np.arange(size))


@pytest.mark.parametrize("size", [9_999, 10_000, 65_536, 65_537, 100_003, 1_000_000])
def test_large_sizes_are_permuted(size: int) -> None:
    images = Permutations([size], key=size)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


@given(st.integers(1, 10_000), st.integers(0, MASK))
def test_any_size_and_key_permute(size: int, key: int) -> None:
    assert np.array_equal(np.sort(Permutations([size], key)(np.arange(size))), np.arange(size))


@given(
    st.one_of(st.integers(1, 300), st.sampled_from([2**31 - 1, 2**31, 2**31 + 5, 2**32 + 1, 2**40 + 3, MAX_SIZE])),
    st.integers(0, MASK),
    st.data(),
)
def test_equals_unbounded_integer_arithmetic(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    images = Permutations([3, size], key)(np.array([*indices, size - 1]), member=1)
    assert images.dtype == np.int64
    assert images.tolist() == [oracle(i, size=size, key=key, member=1) for i in [*indices, size - 1]]


@pytest.mark.parametrize("size", [2**31 + 11, 2**45, MAX_SIZE])
def test_windows_of_huge_sizes_stay_inside_and_distinct(size: int) -> None:
    window = np.concatenate((np.arange(20_000), size - 1 - np.arange(20_000)))
    images = Permutations([size], key=3)(window)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(window)
    assert abs(images.astype(np.float64).mean() / size - 0.5) < 0.01


def test_members_do_not_depend_on_each_other() -> None:
    together = Permutations([10, 1000, 7], key=5)
    indices = np.array([3, 3, 999, 6, 0])
    members = np.array([0, 1, 1, 2, 2])
    alone = [int(together(indices[i : i + 1], member=int(members[i]))[0]) for i in range(5)]
    assert together(indices, member=members).tolist() == alone


@pytest.mark.parametrize("size", [2, 3, 5, 8, 30])
def test_every_place_is_equally_likely(size: int) -> None:
    """Chi-square over 20,000 keyed permutations, within five standard deviations of its mean."""
    count = 20_000
    members = np.repeat(np.arange(count), size)
    images = Permutations([size] * count, key=11)(np.tile(np.arange(size), count), member=members).reshape(count, size)
    expected = count / size
    seen = np.stack([np.bincount(images[:, place], minlength=size) for place in range(size)])
    freedom = (size - 1) ** 2
    assert ((seen - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_end_up_unrelated() -> None:
    images = Permutations([1_000_000], key=2)(np.arange(1_000_000)).astype(np.float64)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.005
    assert abs(np.corrcoef(images, np.arange(1_000_000))[0, 1]) < 0.005


def test_derived_keys_are_fixed_and_distinct() -> None:
    assert derive_key("forebay order", 1, 17, 0, "groups") == 13881169749025464483
    assert derive_key("a", 11) != derive_key("a", 1, 1)


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"2\\*\\*62 elements, got {size}"):
        Permutations([5, size], key=0)
