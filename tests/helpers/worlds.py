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


def matrix(
    numbers: Iterable[int],
    names: Iterable[str],
    *,
    everywhere: Collection[str] = (),
    usual: Collection[str] | None = None,
) -> list[Any]:
    """Return the values of the parameters ``world`` and ``name``: names on the usual number, some on all.

    ``usual`` are the names that `make test` runs, by default all; the rest is for `make test-full`.
    """
    names = list(names)
    usual = names if usual is None else usual
    return [
        _case(n, (n, name), [f"{n}ranks", name], everywhere=(n == USUAL and name in usual) or name in everywhere)
        for n in numbers
        for name in names
    ]


def some(values: Iterable[Any], chosen: Collection[Any], full: Collection[Any] | None = None) -> list[Any]:
    """Return the values of a parameter; those that are not chosen are for `make test-full`.

    If ``full`` is given, only its values are, and the others are for `make sweep`.
    """
    return some_rows(((value,) for value in values), [(v,) for v in chosen], full and [(v,) for v in full])


def some_rows(
    rows: Iterable[tuple[Any, ...]],
    chosen: Collection[tuple[Any, ...]],
    full: Collection[tuple[Any, ...]] | None = None,
) -> list[Any]:
    """Return the values of several parameters, as `some` does of one."""
    rows = list(rows)
    full = rows if full is None else full
    marks = [() if row in chosen else [pytest.mark.full, *([] if row in full else [pytest.mark.sweep])] for row in rows]
    return [pytest.param(*row, marks=of_row) for row, of_row in zip(rows, marks, strict=True)]


def _case(ranks: int, values: Any, parts: list[str], *, everywhere: bool) -> Any:
    marks = [pytest.mark.ranks(ranks), *([] if everywhere else [pytest.mark.full])]
    return pytest.param(*(values if isinstance(values, tuple) else [values]), marks=marks, id="-".join(parts))


def names_and_worlds(
    names: Iterable[str], numbers: Iterable[int], *, everywhere: Collection[str], usual: Collection[str] | None = None
) -> list[Any]:
    """Return the values of ``name`` and ``world_sizes``, for tests that go through several numbers of ranks.

    ``everywhere`` and ``usual`` are as in `matrix`.
    """
    numbers, names, rows = tuple(numbers), list(names), []
    usual = names if usual is None else usual
    for name in names:
        if name in everywhere:
            rows.append(pytest.param(name, numbers, id=name))
            continue
        if name not in usual:
            rows.append(pytest.param(name, numbers, id=name, marks=pytest.mark.full))
            continue
        others = tuple(n for n in numbers if n != USUAL)
        rows += [
            pytest.param(name, (USUAL,), id=name),
            pytest.param(name, others, id=f"{name}-others", marks=pytest.mark.full),
        ]
    return rows
