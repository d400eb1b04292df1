"""On how many ranks tests run: on three, which splits unevenly; on other numbers for a few, and in `make test-full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

USUAL = 3
"""The number of ranks on which each case runs in `make test`."""


def worlds(*numbers: int, usual: Collection[int] = (USUAL,)) -> list[Any]:
    """Return the values of a parameter ``world``; other numbers than the usual ones are for `make test-full`."""
    return [_case(n, n, [f"{n}ranks"], everywhere=n in usual) for n in numbers]


def matrix(numbers: Iterable[int], names: Iterable[str], *, everywhere: Collection[str] = ()) -> list[Any]:
    """Return the values of the parameters ``world`` and ``name``: each name on the usual number, some on all."""
    names = list(names)
    return [
        _case(n, (n, name), [f"{n}ranks", name], everywhere=n == USUAL or name in everywhere)
        for n in numbers
        for name in names
    ]


def _case(ranks: int, values: Any, parts: list[str], *, everywhere: bool) -> Any:
    marks = [pytest.mark.ranks(ranks), *([] if everywhere else [pytest.mark.full])]
    return pytest.param(*(values if isinstance(values, tuple) else [values]), marks=marks, id="-".join(parts))


def names_and_worlds(names: Iterable[str], numbers: Iterable[int], *, everywhere: Collection[str]) -> list[Any]:
    """Return the values of ``name`` and ``world_sizes``, for tests that go through several numbers of ranks."""
    numbers, rows = tuple(numbers), []
    for name in names:
        if name in everywhere:
            rows.append(pytest.param(name, numbers, id=name))
            continue
        others = tuple(n for n in numbers if n != USUAL)
        rows += [
            pytest.param(name, (USUAL,), id=name),
            pytest.param(name, others, id=f"{name}-others", marks=pytest.mark.full),
        ]
    return rows
