"""Find the ways to divide a model's parameters among the groups of an optimizer, each group in the model's order.

Input: the shapes of each group's parameters in its order, and the parameters of the model. Output: up to two ways, so
that a caller sees whether there is only one. Not collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

_MOST_STEPS = 200_000
"""Steps of a search, a second or less; a search that needs more counts as one that finds several ways."""


@dataclass(frozen=True)
class Ways:
    """The ways that a search found; each is the group of every parameter, None for one without a group."""

    found: tuple[tuple[int | None, ...], ...]
    """At most two."""
    is_complete: bool = True
    """Whether there is no further way."""

    @property
    def is_one(self) -> bool:
        """Whether there is exactly one way."""
        return self.is_complete and len(self.found) == 1


def ways_in_order(groups: Sequence[Sequence[Shape | None]], shapes: Sequence[Shape]) -> Ways:
    """Search the ways to give each parameter of a model to a group, or to none, so that all groups are complete.

    Args:
        groups: the shape of each parameter of each group; None if it is unknown, and any shape fits.
        shapes: the shape of each parameter of the model. If there are more than in all groups, some have no group.
    """
    search = _Search(groups, shapes)
    found: list[tuple[int | None, ...]] = []
    pending = [(search.options(), 0)]
    for _ in range(_MOST_STEPS):
        if not pending or len(found) > 1:
            return Ways(tuple(found), is_complete=not pending)
        options, found_before = pending[-1]
        option = next(options, _NO_OPTION)
        if option == _NO_OPTION:
            pending.pop()
            search.undo(is_impossible=len(found) == found_before)
            continue
        search.choose(option)
        pending.append((search.options(), len(found)))
        if len(search.chosen) == len(shapes):
            found.append(tuple(search.chosen))
    return Ways(tuple(found), is_complete=False)


_NO_OPTION = -1


class _Search:
    """A way that is being built, parameter by parameter."""

    def __init__(self, groups: Sequence[Sequence[Shape | None]], shapes: Sequence[Shape]) -> None:
        self.groups, self.shapes = groups, shapes
        self.chosen: list[int | None] = []
        self.positions = [0] * len(groups)
        self.unused = len(shapes) - sum(map(len, groups))
        self.impossible: set[tuple[int, ...]] = set()

    def options(self) -> Iterator[int | None]:
        """Yield the groups that the next parameter can have."""
        at = len(self.chosen)
        if at == len(self.shapes) or (at, *self.positions) in self.impossible:
            return
        for number, group in enumerate(self.groups):
            position = self.positions[number]
            if position < len(group) and group[position] in (None, self.shapes[at]):
                yield number
        if at - sum(self.positions) < self.unused:
            yield None

    def choose(self, number: int | None) -> None:
        self.chosen.append(number)
        if number is not None:
            self.positions[number] += 1

    def undo(self, *, is_impossible: bool) -> None:
        """Take back the last choice, after which all options have been tried."""
        if is_impossible:
            self.impossible.add((len(self.chosen), *self.positions))
        last = self.chosen.pop() if self.chosen else None
        if last is not None:
            self.positions[last] -= 1
