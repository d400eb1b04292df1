"""A sampler for trainers that make their own DataLoader and count the consumed samples themselves.

Input: the length of a data set. Output: this rank's indices. All ranks draw the same number of indices; together they
draw each index once per epoch. If the length is not a multiple of the number of ranks, ``drop_last`` selects whether
the last samples are dropped or the first ones repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from fsdp2_strategy.data.orders import GlobalOrder
from fsdp2_strategy.errors import ConfigError

_CHUNK = 1024


class ResumableSampler(Sampler[int]):
    """Draw this rank's indices, and resume after the ``consumed_samples`` that all ranks have drawn in the epoch."""

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        consumed_samples: int = 0,
    ) -> None:
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Begin an epoch, or continue it after ``consumed_samples``, those of all ranks together."""
        if not 0 <= consumed_samples <= self._total() or consumed_samples % self.num_replicas:
            raise ConfigError(
                f"cannot resume the data: consumed_samples is {consumed_samples}, expected a multiple of the number of "
                f"ranks {self.num_replicas}, at most the {self._total()} samples of an epoch. Count the samples of the "
                "current epoch over all ranks."
            )
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __len__(self) -> int:
        return (self._total() - self.consumed_samples) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        length, total = len(self.dataset), self._total()
        if not total:
            return
        indices = GlobalOrder(length, self.seed, self.epoch).indices if self.shuffle else np.arange
        for begin in range(self.consumed_samples, total, _CHUNK * self.num_replicas):
            end = min(begin + _CHUNK * self.num_replicas, total)
            chunk = [indices(begin, min(end, length))] if begin < length else []
            if end > length:  # repeat samples from the start
                repeated = indices(0, min(length, end - length))
                chunk.append(repeated[np.arange(max(begin, length) - length, end - length) % length])
            yield from np.concatenate(chunk)[self.rank :: self.num_replicas].tolist()

    def _total(self) -> int:
        """Return the number of samples of an epoch over all ranks."""
        length = len(self.dataset)
        return (length if self.drop_last else length + self.num_replicas - 1) // self.num_replicas * self.num_replicas
