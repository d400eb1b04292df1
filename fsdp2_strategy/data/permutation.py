"""Permute the numbers below n by a key, and compute the value at any single position.

Input: n, a key, and positions or values. Output: values or positions. Only integer arithmetic is used, so that the
results are equal on every machine.

For n up to 2^16, the permutation is a table: the numbers, sorted by a keyed hash. For larger n it is a Feistel network
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A number is split into a pair (left, right), with
left below a and right below b, where a x b is n or slightly more. Each of eight rounds adds a keyed hash of one half to
the other half, modulo a or b. A result of n or above is permuted again until it is below n.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_TABLE_SIZE = 1 << 16
_ROUNDS = 8
_CHUNK = 1 << 14  # numbers; small enough that the arrays of a round stay in the processor's cache
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))


class Bijection:
    """A permutation of the numbers below ``n`` (1 to 2^62), determined by the ``repr`` of a key."""

    def __init__(self, n: int, *key: object) -> None:
        self.n = n
        self._keys = np.frombuffer(hashlib.blake2b(repr(key).encode()).digest(), dtype="<u8").astype(np.uint64)
        a = math.isqrt(n - 1) + 1
        self._sizes = a, -(-n // a)

    def values(self, positions: Indices) -> Indices:
        """Return the values at positions."""
        return self._table[positions] if self.n <= _TABLE_SIZE else _apply_in_chunks(positions, self._forward, self.n)

    def positions(self, values: Indices) -> Indices:
        """Return the positions of values; the inverse of `values`."""
        if self.n <= _TABLE_SIZE:
            return np.argsort(self._table)[values]
        return _apply_in_chunks(values, self._backward, self.n)

    @cached_property
    def _table(self) -> Indices:
        return np.argsort(_hash(np.arange(self.n, dtype=np.uint64), self._keys[0]), kind="stable")

    def _forward(self, numbers: _Words) -> _Words:
        halves = self._split(numbers)
        for i in range(_ROUNDS):
            half, size = halves[i % 2], self._sizes[i % 2]
            half += _below(_hash(halves[1 - i % 2], self._keys[i]), size)
            half -= np.uint64(size) * (half >= size)
        return self._join(halves)

    def _backward(self, numbers: _Words) -> _Words:
        halves = self._split(numbers)
        for i in reversed(range(_ROUNDS)):
            half, size = halves[i % 2], self._sizes[i % 2]
            half += np.uint64(size) - _below(_hash(halves[1 - i % 2], self._keys[i]), size)
            half -= np.uint64(size) * (half >= size)
        return self._join(halves)

    def _split(self, numbers: _Words) -> tuple[_Words, _Words]:
        left, right = np.divmod(numbers, np.uint64(self._sizes[1]))
        return left, right

    def _join(self, halves: tuple[_Words, _Words]) -> _Words:
        return halves[0] * np.uint64(self._sizes[1]) + halves[1]


def _apply_in_chunks(numbers: Indices, step: Callable[[_Words], _Words], n: int) -> Indices:
    """Apply ``step`` to numbers, in chunks; apply it again to results of ``n`` or above, until all are below ``n``."""
    result = np.empty(len(numbers), dtype=np.int64)
    for begin in range(0, len(numbers), _CHUNK):
        chunk = step(numbers[begin : begin + _CHUNK].astype(np.uint64))
        outside = np.flatnonzero(chunk >= n)
        while outside.size:
            again = chunk[outside] = step(chunk[outside])
            outside = outside[again >= n]
        result[begin : begin + _CHUNK] = chunk
    return result


def _hash(numbers: _Words, key: np.uint64) -> _Words:
    """Return a keyed 64-bit hash of each number; only its high bits are well mixed."""
    mixed = (numbers + key) * _MIX[0]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX[1]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX[0]
    return mixed


def _below(words: _Words, size: int) -> _Words:
    """Scale hashes to numbers below ``size``; use as many of their high bits as the 64-bit product can hold."""
    bits = np.uint64(size.bit_length())
    words >>= bits
    words *= np.uint64(size)
    words >>= np.uint64(64) - bits
    return words
