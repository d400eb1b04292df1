"""Which samples are in which global batch: orders of epochs, cut one after the other, without what is to be skipped.

Input: the order of each epoch, the size of a batch, samples to skip, and where that began to hold. Output: for the
number of a batch its samples. A formula: nothing is replayed, and nothing but the numbers of batches is counted.

[Note: places] An epoch's *positions* are those of its order. Its *places* are the positions that are left: from where
the plan holds, without those of skipped samples, numbered through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fsdp2_strategy.data.order import EpisodeOrder, MixtureOrder, Order
from fsdp2_strategy.data.permutation import Indices
from fsdp2_strategy.errors import DataError

Tail = Literal["carry", "pad", "drop"]


@dataclass(frozen=True)
class Anchor:
    """From where on a plan holds."""

    batch: int = 0
    """Number of its first batch."""
    epoch: int = 0
    position: int = 0
    """Where in the epoch's order that batch begins."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive places of one epoch."""

    epoch: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Say which samples are in which batch.

    Args:
        order_of: gives the order of an epoch; all are of one length.
        batch: samples of a global batch.
        tail: what becomes of an epoch's last samples that fill no batch: ``"carry"`` fills it with the next epoch's
            first, ``"pad"`` with samples that do not count, ``"drop"`` leaves them out.
        skipped: samples that are left out.
        anchor: from where on.

    Raises:
        DataError: an epoch would have no batch.
    """

    order_of: Callable[[int], Order]
    batch: int
    tail: Tail = "carry"
    skipped: Sequence[int] = ()
    anchor: Anchor = field(default_factory=Anchor)
    _gaps: dict[int, Indices] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self._units(self.anchor.epoch + 1):
            raise DataError(
                f"cannot make batches: {self._places(self.anchor.epoch + 1)} samples are left of an epoch, expected "
                f"{f'at least one batch of {self.batch}' if self.tail == 'drop' else 'at least one'}. Skip fewer, or "
                "choose a smaller batch."
            )

    def moved(self, skipped: Sequence[int], anchor: Anchor) -> BatchPlan:
        """Return the plan that holds from an anchor on, with other samples skipped."""
        return BatchPlan(self.order_of, self.batch, self.tail, tuple(skipped), anchor)

    def gaps(self, epoch: int) -> Indices:
        """Return the positions of skipped samples in an epoch, as far as the plan holds there."""
        if not self.skipped:
            return np.empty(0, dtype=np.int64)
        if epoch not in self._gaps:
            while len(self._gaps) > 8:
                self._gaps.pop(next(iter(self._gaps)))
            positions = self.order_of(epoch).positions(self.skipped)
            self._gaps[epoch] = positions[positions >= self._begin(epoch)]
        return self._gaps[epoch]

    def epoch_of(self, batch: int) -> int:
        """Return the epoch in which a batch begins."""
        return self._locate(batch)[0]

    def end_of(self, epoch: int) -> int:
        """Return the number of the first batch that begins after an epoch."""
        units = self._units_through(epoch)
        return self.anchor.batch + (-(-units // self.batch) if self.tail == "carry" else units)

    def stretches(self, batch: int) -> list[Stretch]:
        """Return what a batch is made of: less than its size where it is padded."""
        epoch, begin = self._locate(batch)
        found, missing = [], self.batch
        while True:
            end = min(begin + missing, self._places(epoch))
            found.append(Stretch(epoch, begin, end))
            missing -= end - begin
            if not missing or self.tail != "carry":
                return [stretch for stretch in found if len(stretch)]
            epoch, begin = epoch + 1, 0

    def position_of(self, batch: int) -> tuple[int, int]:
        """Return the epoch and the position in its order at which a batch begins."""
        epoch, place = self._locate(batch)
        return epoch, self._position(epoch, place)

    def part(self, batch: int, low: int, high: int) -> tuple[list[tuple[int, Indices]], int]:
        """Return the samples at ``low`` to ``high`` of a batch, by epoch, and how many places there are padding."""
        found = [(own.epoch, self.samples(own)) for own in self._cut(batch, low, high)]
        return found, high - low - sum(len(samples) for _, samples in found)

    def episodes(self, batch: int, low: int, high: int) -> frozenset[int]:
        """Return the episodes that are mixed where ``low`` to ``high`` of a batch are drawn; of an `EpisodeOrder`."""
        found: set[int] = set()
        cut = self._cut(batch, low, high)
        if sum(map(len, cut)) < high - low:  # its first sample stands for those that it lacks
            cut += self._cut(batch, 0, 1)
        for own in cut:
            order = self.order_of(own.epoch)
            if isinstance(order, EpisodeOrder):
                positions = self._positions(own.epoch, np.arange(own.begin, own.end))
                found.update(order.episodes_at(positions).tolist())
        return frozenset(found)

    def _cut(self, batch: int, low: int, high: int) -> list[Stretch]:
        found, begin = [], 0
        for stretch in self.stretches(batch):
            own = Stretch(
                stretch.epoch,
                stretch.begin + min(max(low - begin, 0), len(stretch)),
                stretch.begin + min(max(high - begin, 0), len(stretch)),
            )
            if len(own):
                found.append(own)
            begin += len(stretch)
        return found

    def samples(self, stretch: Stretch) -> Indices:
        """Return the samples of a stretch."""
        if not len(stretch):
            return np.empty(0, dtype=np.int64)
        first, last = (self._position(stretch.epoch, place) for place in (stretch.begin, stretch.end - 1))
        found = self.order_of(stretch.epoch).indices(first, last + 1)
        gaps = self.gaps(stretch.epoch)
        inside = gaps[(gaps >= first) & (gaps <= last)] - first
        return np.delete(found, inside) if inside.size else found

    def slots(self, stretch: Stretch) -> Indices:
        """Return the slots of a stretch; see [Note: orders]."""
        places = np.arange(stretch.begin, stretch.end)
        return self.order_of(stretch.epoch).slots_at(self._positions(stretch.epoch, places))

    def left_out(self, epoch: int) -> Indices:
        """Return the slots of an epoch that no batch gives: of skipped samples, and of a tail that is dropped."""
        slots = self.order_of(epoch).slots_at(self.gaps(epoch))
        places = self._places(epoch)
        if self.tail == "drop" and (rest := places % self.batch):
            slots = np.concatenate([slots, self.slots(Stretch(epoch, places - rest, places))])
        return slots

    def _positions(self, epoch: int, places: Indices) -> Indices:
        gaps, begin = self.gaps(epoch), self._begin(epoch)
        before = np.searchsorted(gaps - begin - np.arange(len(gaps)), places, side="right")
        return begin + places + before

    def _position(self, epoch: int, place: int) -> int:
        return int(self._positions(epoch, np.asarray([place]))[0])

    def _begin(self, epoch: int) -> int:
        return self.anchor.position if epoch == self.anchor.epoch else 0

    def _places(self, epoch: int) -> int:
        """Return how many places an epoch has."""
        return len(self.order_of(epoch)) - self._begin(epoch) - len(self.gaps(epoch))

    def _units(self, epoch: int) -> int:
        """Return what epochs are counted in: places where batches may span two of them, else batches."""
        places = self._places(epoch)
        if self.tail == "carry":
            return places
        return places // self.batch if self.tail == "drop" else -(-places // self.batch)

    def _units_through(self, epoch: int) -> int:
        """Return the units from the anchor to the end of an epoch."""
        first = self.anchor.epoch
        if self._is_periodic:
            return self._units(first) + (epoch - first) * self._units(first + 1)
        return sum(self._units(e) for e in range(first, epoch + 1))

    def _locate(self, batch: int) -> tuple[int, int]:
        """Return the epoch in which a batch begins, and at which of its places."""
        unit = (batch - self.anchor.batch) * (self.batch if self.tail == "carry" else 1)
        epoch = self.anchor.epoch
        if unit >= self._units(epoch):
            unit -= self._units(epoch)
            epoch += 1
            if self._is_periodic:
                turns, unit = divmod(unit, self._units(epoch))
                epoch += turns
            while unit >= self._units(epoch):
                unit -= self._units(epoch)
                epoch += 1
        return epoch, unit * (1 if self.tail == "carry" else self.batch)

    @property
    def _is_periodic(self) -> bool:
        """Whether all epochs after the first are of one size: a mixture may draw what is skipped more or less often."""
        return not self.skipped or not isinstance(self.order_of(self.anchor.epoch), MixtureOrder)
