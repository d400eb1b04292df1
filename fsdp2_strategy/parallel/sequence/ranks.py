"""The ranks that share the sequences of a batch: their number, this rank's place, and three collectives.

Input: a process group, or a number of threads that stand for ranks. Output: objects with the same methods. Threads
compute a tiny model in one process, split as it will be over real ranks; see `split_plan`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.device_order import DeviceOrder
from fsdp2_strategy.distributed.torch_internals import all_gather_single, reduce_scatter_single

T = TypeVar("T")


class SequenceRanks(ABC):
    """Ranks that each compute a part of the same sequences; ``rank`` is this one's part, from 0."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    @abstractmethod
    def all_to_all(self, sent: torch.Tensor) -> torch.Tensor:
        """Send ``sent[i]`` to rank i, and return a tensor whose row i came from rank i; collective."""

    @abstractmethod
    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated along the first dimension; collective."""

    @abstractmethod
    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Sum tensors over the ranks, and return this rank's part of the first dimension; collective."""


class ProcessRanks(SequenceRanks):
    """The ranks of a process group, in its order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    def all_to_all(self, sent: torch.Tensor) -> torch.Tensor:  # noqa: D102  as in the base class
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:  # noqa: D102
        full = part.new_empty((part.shape[0] * self.count, *part.shape[1:]))
        all_gather_single(full, part, group=self.group)
        return full

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:  # noqa: D102
        part = full.new_empty((full.shape[0] // self.count, *full.shape[1:]))
        reduce_scatter_single(part, full, group=self.group)
        return part


class ThreadRanks(SequenceRanks):
    """Threads of this process; `run_in_threads` makes them."""

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(given))
        self._given, self._barrier = given, barrier

    def all_to_all(self, sent: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self._exchange(sent, lambda given: torch.stack([tensor[self.rank] for tensor in given]))

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self._exchange(part, torch.cat)

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self._exchange(full, lambda given: sum(t.chunk(self.count)[self.rank] for t in given))

    def _exchange(self, own: torch.Tensor, combine: Callable[[Any], Any]) -> torch.Tensor:
        self._given[self.rank] = own
        self._barrier.wait()
        result: torch.Tensor = combine(self._given)
        self._barrier.wait()  # nobody replaces its tensor before all have read it
        return result


def run_in_threads(count: int, work: Callable[[SequenceRanks], T]) -> list[T]:
    """Run ``work`` in a thread for each rank; return the results by rank, or raise the first rank's error."""
    barrier = threading.Barrier(count)
    given: list[Any] = [None] * count

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, given, barrier))
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count, initializer=DeviceOrder.of_this_thread().enter) as threads:
        runs = [threads.submit(run, rank) for rank in range(count)]
    raised = [failure for failure in (each.exception() for each in runs) if failure is not None]
    for failure in sorted(raised, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
        raise failure
    return [each.result() for each in runs]
