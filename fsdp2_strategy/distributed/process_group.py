"""The process group: started, or found; who its ranks are, and on which devices they compute and talk.

Input: the variables that torchrun sets, or a process group that exists. Output: a running group.

[Note: group in use] Ranks of the default group may do other things than train: serve, say. So nothing here speaks to
all of them without asking. A thread talks on the group that `on_group` sets, else on that of the process's trainer
(`Trainers`), else on the default one; ranks are numbered, and counted, within it.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fsdp2_strategy.distributed.rendezvous import fresh_store
from fsdp2_strategy.distributed.torch_internals import new_named_group, timeout_of
from fsdp2_strategy.errors import MeshError

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)
# For each open strategy that does not train on all ranks: the default group at the time, and its own.
_trainers: list[tuple[Any, Any]] = []
# Strategies that train on all ranks.
_of_all: WeakSet[Trainers] = WeakSet()
# How often groups of some ranks were made, for each default group.
_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def start_process_group(timeout_minutes: float) -> bool:
    """Start the default process group where there is none; collective when it does.

    Under torchrun the ranks come from its variables, else this process is a group of one. The group has a CPU backend
    beside the accelerator's (``cpu:gloo,cuda:nccl``).

    Returns:
        Whether a group was started here, and so is ours to end.
    """
    if dist.is_initialized():
        return False
    cuda = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=timeout_minutes)
    if dist.is_torchelastic_launched() or "WORLD_SIZE" in os.environ:
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        if missing:
            raise MeshError(
                f"cannot start the process group: {', '.join(missing)} not set, expected the variables of torchrun. "
                "Start with torchrun, or unset WORLD_SIZE for one rank."
            )
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store = fresh_store(store, rank, world_size, timeout)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    return True


@contextmanager
def on_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let what this thread says to other ranks go over a group of its own inside."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def group_in_use() -> dist.ProcessGroup | None:
    """Return the group that this thread talks on; None for the default one. See [Note: group in use]."""
    if (group := _group.get()) is not None:
        return group
    return _trainers[0][1] if _trainers and _trainers[0][0] is dist.group.WORLD else None


class Trainers:
    """The ranks that a strategy trains on: from `begin` to `close` this process's threads talk on a group of them.

    Args:
        group: where other ranks of the default group do something else; None for all ranks.

    Raises:
        MeshError: this rank is not in the group, or a strategy of this process that is open trains on other ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        world = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise MeshError(
                f"cannot train: rank {dist.get_rank()} is not in process_group, expected a rank of it. Construct the "
                "strategy on those ranks alone."
            )
        _trainers[:] = [own for own in _trainers if own[0] is world]
        wanted = ranks_of(group)
        for _, other in _trainers:
            if ranks_of(other) != wanted:
                raise MeshError(
                    f"cannot train on ranks {wanted}: another strategy of this process trains on ranks "
                    f"{ranks_of(other)}, expected the same. Close that one first."
                )
        self.count = len(wanted)
        self._world = world
        self._own = (world, group) if group is not None and self.count < dist.get_world_size() else None
        if self._own and any(other._world is world for other in _of_all):
            gc.collect()  # some may be nobody's any more
            if any(other._world is world for other in _of_all):
                raise MeshError(
                    f"cannot train on ranks {wanted}: another strategy of this process trains on all ranks, expected "
                    "the same. Close that one first."
                )

    def begin(self) -> None:
        """Talk on the group from now on; not collective."""
        if self._own is not None:
            _trainers.append(self._own)
        else:
            _of_all.add(self)

    def close(self) -> None:
        """Let go of the group; not collective, and harmless when called again."""
        if self._own in _trainers:
            _trainers.remove(self._own)
        _of_all.discard(self)
        self._own = None


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group by their numbers in the default one; None for the default one."""
    return sorted(dist.get_process_group_ranks(group))


def rank() -> int:
    """Return the number of this rank in the group in use; 0 where there is none."""
    return dist.get_rank(group_in_use()) if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many ranks there are in the group in use; 1 where there is none."""
    return dist.get_world_size(group_in_use()) if dist.is_initialized() else 1


def group_among(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """Make a group of some ranks of the default group, which no other rank hears of; collective over them.

    torch names such a group by how many groups a rank knows, and ranks that have others beside would wait for each
    other under two names. So the name here follows from what all of them know: who they are, and how often they did it.

    Args:
        ranks: by their numbers in the default group.
        **options: of `torch.distributed.new_group`.
    """
    made = _made.setdefault(dist.group.WORLD, Counter())
    name = f"fsdp2_strategy/{'_'.join(map(str, ranks))}/{made[tuple(ranks)]}"
    made[tuple(ranks)] += 1
    return new_named_group(ranks, name, **options)


def group_timeout() -> timedelta | None:
    """Return the time-out of the collectives of the group in use; None where it is not told."""
    group: Any = group_in_use() or dist.group.WORLD
    return timeout_of(group, control_device())


def current_device() -> torch.device:
    """Return the device that this rank computes on: its own accelerator, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def adopt_device(device: torch.device) -> None:
    """Let this thread compute on the rank's own accelerator: a new thread stands on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def control_device() -> torch.device:
    """Return the device whose backend carries small messages: the CPU wherever the group in use has a CPU backend."""
    if "cpu:" in dist.get_backend_config(group_in_use()):
        return torch.device("cpu")
    return current_device()


def is_rank_0() -> bool:
    """Say whether this process is rank 0 of the group in use, or the only one."""
    return rank() == 0
