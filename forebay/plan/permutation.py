"""Keyed permutations of 0..n-1 that are computed, not stored: any element in O(1), for any n up to 2^62."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.store.layout import Ints

NUM_ROUNDS = 12
"""Eight shuffle any bucket of ten samples or more evenly; twelve also those of three to nine."""
MAX_SIZE = 2**62
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
UInts = np.ndarray[Any, np.dtype[np.uint64]]


class Permutations:
    """A family of keyed permutations: member `i` permutes 0..sizes[i]-1; elements of several members go in one call.

    A Feistel network over Z_a x Z_b with a = ceil(sqrt(n)), b = ceil(n / a): even rounds add a keyed hash of the right
    half to the left one modulo a, odd rounds the other way round modulo b. Results of n or more are sent through again
    (cycle walking); because a * b < n + a this is rare. Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", method 3. A good shuffle, not a cipher.
    """

    __slots__ = ("_left", "_right", "_round_keys", "_sizes")

    def __init__(self, sizes: Sequence[int] | Ints, key: int) -> None:
        """Makes the family of `sizes` (0 to 2^62 each) under a 64-bit `key`; member i's own key is drawn from both."""
        given = np.asarray(sizes)
        wrong = np.flatnonzero((given < 0) | (given > MAX_SIZE))
        if len(wrong):
            raise ValueError(f"a permutation has 0 to 2**62 elements, got {sizes[wrong[0]]}")
        self._sizes = np.array(sizes, dtype=np.uint64)
        filled = np.maximum(self._sizes, np.uint64(1))
        self._left = _ceil_sqrt(filled)
        self._right = (filled + self._left - np.uint64(1)) // self._left
        counters = np.arange(1, NUM_ROUNDS * len(sizes) + 1, dtype=np.uint64).reshape(len(sizes), NUM_ROUNDS).T
        self._round_keys = mix(np.uint64(key) + counters * _INCREMENT)

    def __call__(self, index: Ints, *, member: Ints | int = 0) -> Ints:
        """Returns where the elements stand: int64, the shape of `index`.

        index: int64, element j below the size of its permutation (not checked: callers make it so).
        member: which permutation of the family, one for all or one an element.
        """
        values = self._rounds(index.astype(np.uint64), member)
        sizes = self._sizes[member]
        while (outside := values >= sizes).any():
            inside = member[outside] if isinstance(member, np.ndarray) else member
            values[outside] = self._rounds(values[outside], inside)
        return values.astype(np.int64)

    def _rounds(self, index: UInts, member: Ints | int) -> UInts:
        moduli = self._left[member], self._right[member]
        halves = list(np.divmod(index, moduli[1]))
        for number, keys in enumerate(self._round_keys):
            side = number & 1
            modulus = moduli[side]
            added = halves[side] + _below(halves[1 - side] ^ keys[member], modulus)
            # Below the modulus the subtraction wraps around to a huge number: minimum() is the conditional subtraction.
            halves[side] = np.minimum(added, added - modulus)
        result: UInts = halves[0] * moduli[1] + halves[1]
        return result


def derive_key(*names: object) -> int:
    """Returns the 64-bit key of a purpose: a BLAKE2b hash of the names, the same on every machine and Python."""
    text = "\x1f".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def _ceil_sqrt(values: UInts) -> UInts:
    """Returns the smallest integers whose squares are not below `values` (1 to 2^62), exactly."""
    # A float square root is off by one at most below 2^63.
    root = np.sqrt(values.astype(np.float64)).astype(np.uint64)
    root += root * root < values
    lower = root - np.uint64(1)
    result: UInts = np.where(lower * lower >= values, lower, root)
    return result


def _below(values: UInts, limit: UInts | np.uint64) -> UInts:
    """Hashes values to 0..limit-1 by multiply and shift; exact for limits up to 2^32, which halves never exceed."""
    values = values * _MULTIPLIER_1
    values ^= values >> _HALF
    values *= _MULTIPLIER_2
    values >>= _HALF
    result: UInts = (values * limit) >> _HALF
    return result


def mix(values: UInts) -> UInts:
    """Returns the values hashed, one to one: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    result: UInts = values ^ (values >> np.uint64(31))
    return result
