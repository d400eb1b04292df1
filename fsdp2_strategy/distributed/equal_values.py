"""Check whether a value is equal on all ranks, as a part of an all-reduce that is made anyway.

Input: a value of each rank. Output: a few numbers for an all-reduce (a sum in float64), and from their sums whether the
value is equal on all ranks.

The value is hashed to two integers x of 20 bits, and each of them is sent as x and x². By the Cauchy-Schwarz
inequality, (number of ranks) x sum(x²) = sum(x)² only if x is equal on all ranks. The sums are exact in float64 for up
to 8,192 ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LENGTH = 4
"""How many numbers `digest_numbers` returns."""


def digest_numbers(value: object) -> list[float]:
    """Return the numbers whose sums over the ranks `is_equal` takes; values are compared by their ``repr``."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=5).digest()
    hashed = int.from_bytes(digest, "big")
    return [float(number) for x in (hashed >> 20, hashed & 0xFFFFF) for number in (x, x * x)]


def is_equal(sums: Sequence[float], ranks: int) -> bool:
    """Return whether the value was equal on all ``ranks`` ranks, from the sums of `digest_numbers` over them."""
    first, first_squared, second, second_squared = map(int, sums)
    return ranks * first_squared == first**2 and ranks * second_squared == second**2
