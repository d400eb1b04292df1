"""Compute which samples are in which global batch.

Input: the order of each epoch, the batch size, samples to skip, and the anchor from which they are skipped. Output: the
samples of a batch, given its number. They are computed directly; no earlier batches are replayed.

[Note: positions and offsets] A *position* is an index in an epoch's order. A *place* is an index among the positions
that the plan covers: those from its anchor on, without the positions of skipped samples.
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
    """The batch from which a plan is valid."""

    batch: int = 0
    """Number of the plan's first batch."""
    epoch: int = 0
    position: int = 0
    """Position in the epoch's order at which that batch begins."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive places of one epoch; see [Note: positions and offsets]."""

    epoch: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The assignment of samples to global batches.

    Args:
        order_of: function that returns the order of an epoch; all orders have the same length.
        batch: samples of a global batch.
        tail: how to treat the samples at the end of an epoch that do not fill a batch: ``"carry"`` fills the batch with
            the first samples of the next epoch, ``"pad"`` fills it with padding, ``"drop"`` leaves these samples out.
        skipped: samples that are left out.
        anchor: the first batch of the plan.

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
        """Return a copy of the plan with another anchor and other skipped samples."""
        return BatchPlan(self.order_of, self.batch, self.tail, tuple(skipped), anchor)

    def gaps(self, epoch: int) -> Indices:
        """Return the positions of skipped samples in an epoch, from the anchor on, in ascending order."""
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
        """Return the spans of places that make up a batch; a padded batch has fewer places than its size."""
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
        """Return the samples at offsets ``low`` to ``high`` of a batch, by epoch, and the number of padding samples."""
        found = [(own.epoch, self.samples(own)) for own in self._cut(batch, low, high)]
        return found, high - low - sum(len(samples) for _, samples in found)

    def episodes(self, batch: int, low: int, high: int) -> frozenset[int]:
        """Return the episodes of the blocks that contain offsets ``low`` to ``high`` of a batch; see `EpisodeOrder`."""
        found: set[int] = set()
        cut = self._cut(batch, low, high)
        if sum(map(len, cut)) < high - low:  # padding repeats the first sample of the batch
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
        """Return the samples of a span."""
        if not len(stretch):
            return np.empty(0, dtype=np.int64)
        first, last = (self._position(stretch.epoch, place) for place in (stretch.begin, stretch.end - 1))
        found = self.order_of(stretch.epoch).indices(first, last + 1)
        gaps = self.gaps(stretch.epoch)
        inside = gaps[(gaps >= first) & (gaps <= last)] - first
        return np.delete(found, inside) if inside.size else found

    def slots(self, stretch: Stretch) -> Indices:
        """Return the slots of a span; see [Note: orders] in `order`."""
        places = np.arange(stretch.begin, stretch.end)
        return self.order_of(stretch.epoch).slots_at(self._positions(stretch.epoch, places))

    def left_out(self, epoch: int) -> Indices:
        """Return the slots of an epoch that are in no batch: those of skipped samples and of a dropped tail."""
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
        """Return the number of places of an epoch."""
        return len(self.order_of(epoch)) - self._begin(epoch) - len(self.gaps(epoch))

    def _units(self, epoch: int) -> int:
        """Return the length of an epoch: in places if batches may span two epochs (``"carry"``), else in batches."""
        places = self._places(epoch)
        if self.tail == "carry":
            return places
        return places // self.batch if self.tail == "drop" else -(-places // self.batch)

    def _units_through(self, epoch: int) -> int:
        """Return the length from the anchor to the end of an epoch, in the unit of `_units`."""
        first = self.anchor.epoch
        if self._is_periodic:
            return self._units(first) + (epoch - first) * self._units(first + 1)
        return sum(self._units(e) for e in range(first, epoch + 1))

    def _locate(self, batch: int) -> tuple[int, int]:
        """Return the epoch and the place at which a batch begins."""
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
        """Whether all epochs after the first have the same length; the number of skipped draws of a mixture varies."""
        return not self.skipped or not isinstance(self.order_of(self.anchor.epoch), MixtureOrder)
