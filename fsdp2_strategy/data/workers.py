"""The code that runs in a loader's workers: fetch samples, each under its own seed, and collate them.

Input: the keys of this rank's part of each batch. Output: batches with their keys, or an error to raise in the trainer.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from fsdp2_strategy.data.batches import BatchPlan
from fsdp2_strategy.errors import CorruptDataError, DataError

Key = tuple[int, int]
"""(epoch, index of the sample)."""


def part_of(batch: int, rank: int, size: int) -> tuple[int, int]:
    """Return the start and end of a rank's part of a batch of ``batch`` samples."""
    return rank * batch // size, (rank + 1) * batch // size


def keys_of(plan: BatchPlan, batch: int, low: int, high: int) -> list[Key]:
    """Return the samples at offsets ``low`` to ``high`` of a batch; padding repeats the batch's first sample."""
    pieces, missing = plan.part(batch, low, high)
    keys = [(epoch, sample) for epoch, samples in pieces for sample in samples.tolist()]
    if missing:
        [(epoch, first)], _ = plan.part(batch, 0, 1)
        keys += [(epoch, int(first[0]))] * missing
    return keys


class Parts:
    """A batch sampler that yields the keys of a rank's part of each batch from ``first`` on, without end."""

    def __init__(self, plan: BatchPlan, first: int, rank: int, size: int) -> None:
        self.plan, self.first = plan, first
        self.low, self.high = part_of(plan.batch, rank, size)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in itertools.count(self.first):
            yield keys_of(self.plan, batch, self.low, self.high)


@dataclass(frozen=True)
class Refusal:
    """A `DataError` of a worker, returned as a value because torch would add the worker's traceback to its message."""

    error: type[DataError]
    text: str


class Samples(Dataset[Any]):
    """Fetch the samples of a part, each under its own seed, and collate them under a seed of the first key."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __getitems__(self, keys: list[Key]) -> tuple[list[Key], Any]:
        try:
            return keys, self._batch(keys)
        except DataError as error:
            if get_worker_info() is None:
                raise
            return keys, Refusal(CorruptDataError if isinstance(error, CorruptDataError) else DataError, str(error))

    def _batch(self, keys: list[Key]) -> Any:
        with _own_generators():
            samples = []
            for epoch, sample in keys:
                self._seed(epoch, sample)
                samples.append(self.dataset[sample])
            self._seed(*keys[0], "collate")
            return self.collate(samples)

    def _seed(self, *facts: object) -> None:
        text = "/".join(map(str, (self.seed, *facts)))
        word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(word)
        np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002  the generator that data sets draw from
        random.seed(word)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Restore the generators of the trainer's process after the block; do nothing in a worker, which has its own."""
    if get_worker_info() is not None:
        yield
        return
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def as_it_is(fetched: Any) -> Any:
    """Return ``fetched``, which is collated already."""
    return fetched


def outlive_sigterm(_worker: int) -> None:
    """Ignore SIGTERM in a worker, unless its parent sent it.

    torchrun and schedulers send SIGTERM to every process. If a worker ended then, its DataLoader would raise an error
    in the trainer, which is about to save.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, name="outlive SIGTERM", daemon=True).start()
