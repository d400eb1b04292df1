"""Check at run time that an epoch delivered each of its samples exactly once, in any order.

Input: numbers below n, as they are delivered. Output: an error at the end of the epoch if a number is missing or occurs
twice. The check compares the count of the numbers, and the sums of their first three powers modulo 2^64, with closed
forms.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fsdp2_strategy.data.permutation import Indices
from fsdp2_strategy.errors import DataError

Sums = tuple[int, int, int, int]

_MODULUS = 1 << 64


class Audit:
    """The sums of the numbers that epochs have delivered.

    Args:
        sums: the sums to continue with, as `state` returned them.
    """

    def __init__(self, sums: dict[str, list[int]] | None = None) -> None:
        self._sums: dict[int, Sums] = {int(e): tuple(s) for e, s in (sums or {}).items()}  # type: ignore[misc]

    def state(self) -> dict[str, list[int]]:
        """Return the sums as JSON content, by the epoch's number as a string."""
        return {str(epoch): list(sums) for epoch, sums in sorted(self._sums.items())}

    def add(self, epoch: int, numbers: Indices) -> None:
        """Add numbers that were delivered, or skipped on purpose."""
        self._sums[epoch] = _added(self._sums.get(epoch, (0, 0, 0, 0)), _sums_of(numbers))

    def begun(self) -> list[int]:
        """Return the epochs that have begun and have not been closed."""
        return sorted(self._sums)

    def close(self, epoch: int, n: int, left_out: Indices) -> None:
        """End an epoch, and check its sums.

        Raises:
            DataError: the numbers that it delivered, skipped or left out are not those below ``n``, each once.
        """
        found = _added(self._sums.pop(epoch, (0, 0, 0, 0)), _sums_of(left_out))
        if found != all_below(n):
            raise DataError(
                f"cannot end epoch {epoch}: it delivered {found[0]} samples whose sums are not those of {n} samples, "
                "expected each exactly once. Load a checkpoint, and report this: the data order is broken."
            )


def all_below(n: int) -> Sums:
    """Return the sums of the numbers below ``n``."""
    first = n * (n - 1) // 2
    second = (n - 1) * n * (2 * n - 1) // 6
    return n, first % _MODULUS, second % _MODULUS, first * first % _MODULUS


def _sums_of(numbers: Indices) -> Sums:
    words = numbers.astype(np.uint64)
    squares = words * words
    return len(words), _total(words), _total(squares), _total(squares * words)


def _total(words: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> int:
    return int(np.sum(words, dtype=np.uint64))


def _added(one: Iterable[int], other: Iterable[int]) -> Sums:
    count, *powers = (a + b for a, b in zip(one, other, strict=True))
    first, second, third = (power % _MODULUS for power in powers)
    return count, first, second, third
