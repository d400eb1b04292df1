"""Compute which samples are in which global batch.

Input: the order of each epoch, the batch size, the samples to skip, and the anchor (the first batch that skips them).
Output: the samples of a batch, computed from the batch's index without replaying earlier batches.

[Note: positions and offsets] A *position* is an index in an epoch's order. A plan leaves out the positions before its
anchor and those of skipped samples. It numbers the remaining positions of each epoch from 0; this number is the
*offset*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fsdp2_strategy.data.orders import EpisodeOrder, MixtureOrder, Order
from fsdp2_strategy.data.permutation import Indices
from fsdp2_strategy.errors import DataError

Tail = Literal["carry", "pad", "drop"]
Key = tuple[int, int]
"""(epoch, index of the sample)."""


@dataclass(frozen=True)
class Anchor:
    """The first batch of a plan."""

    batch: int = 0
    """Index of the batch, counted over all epochs."""
    epoch: int = 0
    position: int = 0
    """Position in the order of ``epoch`` at which the batch begins."""


@dataclass(frozen=True)
class Span:
    """Consecutive offsets of one epoch; see [Note: positions and offsets]."""

    epoch: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The assignment of samples to global batches; raises if an epoch would have no batch.

    All orders have the same length; ``tail`` is that of `ResumableLoader`.
    """

    order_of: Callable[[int], Order]
    batch: int
    tail: Tail = "carry"
    skipped: Sequence[int] = ()
    anchor: Anchor = field(default_factory=Anchor)
    _skipped_positions: dict[int, Indices] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self._epoch_length(self.anchor.epoch + 1):
            raise DataError(
                f"cannot make batches: {self._remaining(self.anchor.epoch + 1)} samples of an epoch are not skipped, "
                f"expected at least {f'one batch of {self.batch}' if self.tail == 'drop' else 1}. Skip fewer samples"
                f"{', or choose a smaller batch' if self.tail == 'drop' else ''}."
            )

    def epoch_of(self, batch: int) -> int:
        """Return the epoch in which a batch begins."""
        return self._locate(batch)[0]

    def end_of(self, epoch: int) -> int:
        """Return the index of the first batch that begins after the end of an epoch."""
        length = self._length_through(epoch)
        return self.anchor.batch + (-(-length // self.batch) if self.tail == "carry" else length)

    def position_of(self, batch: int) -> tuple[int, int]:
        """Return the epoch and the position in its order at which a batch begins."""
        epoch, offset = self._locate(batch)
        return epoch, self._position(epoch, offset)

    def spans(self, batch: int) -> list[Span]:
        """Return the spans of offsets that make up a batch, without padding."""
        epoch, begin = self._locate(batch)
        found, missing = [], self.batch
        while True:
            end = min(begin + missing, self._remaining(epoch))
            found.append(Span(epoch, begin, end))
            missing -= end - begin
            if not missing or self.tail != "carry":
                return [span for span in found if len(span)]
            epoch, begin = epoch + 1, 0

    def samples(self, span: Span) -> Indices:
        """Return the samples of a span."""
        first, last = (self._position(span.epoch, offset) for offset in (span.begin, span.end - 1))
        found = self.order_of(span.epoch).indices(first, last + 1)
        skipped = self._skipped_in(span.epoch)
        inside = skipped[(skipped >= first) & (skipped <= last)] - first
        return np.delete(found, inside) if inside.size else found

    def keys(self, batch: int, low: int, high: int) -> list[Key]:
        """Return the keys of samples ``low`` to ``high`` of a batch; padding repeats the first sample of the batch."""
        spans = self._part_spans(batch, low, high)
        keys = [(span.epoch, sample) for span in spans for sample in self.samples(span).tolist()]
        padding = high - low - len(keys)
        return keys + self.keys(batch, 0, 1) * padding if padding else keys

    def episodes(self, batch: int, low: int, high: int) -> frozenset[int]:
        """Return the episodes of the blocks that contain samples ``low`` to ``high`` of a batch; see `EpisodeOrder`."""
        found: set[int] = set()
        spans = self._part_spans(batch, low, high)
        if sum(map(len, spans)) < high - low:  # padding repeats the first sample of the batch
            spans += self._part_spans(batch, 0, 1)
        for span in spans:
            order = self.order_of(span.epoch)
            if isinstance(order, EpisodeOrder):
                positions = self._positions(span.epoch, np.arange(span.begin, span.end))
                found.update(order.episodes_at(positions).tolist())
        return frozenset(found)

    def _part_spans(self, batch: int, low: int, high: int) -> list[Span]:
        """Return the spans of samples ``low`` to ``high`` of a batch, without padding."""
        found, start = [], 0
        for span in self.spans(batch):
            begin, end = (span.begin + min(max(edge - start, 0), len(span)) for edge in (low, high))
            if begin < end:
                found.append(Span(span.epoch, begin, end))
            start += len(span)
        return found

    def _skipped_in(self, epoch: int) -> Indices:
        """Return the positions of skipped samples in an epoch, from the anchor on, in ascending order."""
        if not self.skipped:
            return np.empty(0, dtype=np.int64)
        if epoch not in self._skipped_positions:
            if len(self._skipped_positions) > 8:
                del self._skipped_positions[next(iter(self._skipped_positions))]
            positions = self.order_of(epoch).positions(self.skipped)
            self._skipped_positions[epoch] = positions[positions >= self._begin(epoch)]
        return self._skipped_positions[epoch]

    def _positions(self, epoch: int, offsets: Indices) -> Indices:
        skipped, begin = self._skipped_in(epoch), self._begin(epoch)
        before = np.searchsorted(skipped - begin - np.arange(len(skipped)), offsets, side="right")
        return begin + offsets + before

    def _position(self, epoch: int, offset: int) -> int:
        return int(self._positions(epoch, np.asarray([offset]))[0])

    def _begin(self, epoch: int) -> int:
        return self.anchor.position if epoch == self.anchor.epoch else 0

    def _remaining(self, epoch: int) -> int:
        """Return the number of remaining positions of an epoch; see [Note: positions and offsets]."""
        return len(self.order_of(epoch)) - self._begin(epoch) - len(self._skipped_in(epoch))

    def _epoch_length(self, epoch: int) -> int:
        """Return the length of an epoch: in samples if batches may span two epochs (``"carry"``), else in batches."""
        samples = self._remaining(epoch)
        if self.tail == "carry":
            return samples
        return samples // self.batch if self.tail == "drop" else -(-samples // self.batch)

    def _length_through(self, epoch: int) -> int:
        """Return the length from the anchor to the end of an epoch, in the unit of `_epoch_length`."""
        first = self.anchor.epoch
        if self._is_periodic:
            return self._epoch_length(first) + (epoch - first) * self._epoch_length(first + 1)
        return sum(self._epoch_length(e) for e in range(first, epoch + 1))

    def _locate(self, batch: int) -> tuple[int, int]:
        """Return the epoch and the offset at which a batch begins."""
        distance = (batch - self.anchor.batch) * (self.batch if self.tail == "carry" else 1)
        epoch = self.anchor.epoch
        if distance >= self._epoch_length(epoch):
            distance -= self._epoch_length(epoch)
            epoch += 1
            if self._is_periodic:
                epochs, distance = divmod(distance, self._epoch_length(epoch))
                epoch += epochs
            while distance >= self._epoch_length(epoch):
                distance -= self._epoch_length(epoch)
                epoch += 1
        return epoch, distance * (1 if self.tail == "carry" else self.batch)

    @property
    def _is_periodic(self) -> bool:
        """Whether later epochs have equal lengths; a mixture may draw a skipped sample more often in some of them."""
        return not self.skipped or not isinstance(self.order_of(self.anchor.epoch), MixtureOrder)
