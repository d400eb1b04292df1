"""Fetch samples in a loader's workers, each sample under its own seed, and collate them.

Input: the keys of this rank's part of each batch. Output: batches with their keys, or an error to raise in the trainer.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from fsdp2_strategy.data.batches import Key
from fsdp2_strategy.distributed.generators import restored_generators, seed_host
from fsdp2_strategy.errors import CorruptDataError, DataError


class SampleFetcher(Dataset[Any]):
    """Fetch the samples of this rank's part of a batch, each under its own seed, and collate them.

    The seed for collating is derived from the part's first key. A worker returns a `DataError` instead of raising it,
    because torch would add the worker's traceback to the message of a raised error.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __getitems__(self, keys: list[Key]) -> tuple[list[Key], Any]:
        try:
            return keys, self._batch(keys)
        except DataError as error:
            if get_worker_info() is None:
                raise
            if isinstance(error, CorruptDataError):
                return keys, CorruptDataError(str(error), error.location)
            return keys, DataError(str(error))  # subclasses may not be picklable

    def _batch(self, keys: list[Key]) -> Any:
        in_worker = get_worker_info() is not None  # its generators are nobody else's, and a fork has no accelerator
        with nullcontext() if in_worker else restored_generators():
            samples = []
            for epoch, sample in keys:
                self._seed(epoch, sample)
                samples.append(self.dataset[sample])
            self._seed(*keys[0], "collate")
            return self.collate(samples)

    def _seed(self, *facts: object) -> None:
        text = "/".join(map(str, (self.seed, *facts)))
        word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        seed_host(word)


def identity(fetched: Any) -> Any:
    """Return ``fetched`` unchanged: the ``collate_fn`` of a DataLoader whose batches are collated already."""
    return fetched


def ignore_foreign_sigterm(_worker: int) -> None:
    """Ignore SIGTERM in a worker, unless its parent sent it.

    torchrun and schedulers send SIGTERM to every process. If a worker exited, its DataLoader would raise an error in
    the trainer, which is about to save a checkpoint.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, name="ignore SIGTERM", daemon=True).start()
