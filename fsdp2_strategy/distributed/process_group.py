"""Start the process group or use an existing one; return its ranks, and the devices of tensors and messages.

Input: the variables that torchrun sets, a `Rendezvous`, or an existing process group. Output: the group that
collectives use.

[Note: group in use] Some ranks of the default group may not train: they may serve an inference engine, for example. So
no collective of this package uses the default group directly. A thread uses the group that `on_group` sets, else the
group of the open strategy (`TrainingRanks`), else the default group. `rank` and `world_size` refer to that group.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fsdp2_strategy.distributed.accelerator import accelerator_type, collective_backend
from fsdp2_strategy.distributed.local_ranks import LocalRank, find_local_rank, own_place
from fsdp2_strategy.distributed.process_end import call_at_end
from fsdp2_strategy.distributed.rendezvous import fresh_store
from fsdp2_strategy.distributed.tcp_rendezvous import Rendezvous, meet
from fsdp2_strategy.distributed.torch_internals import default_store, new_named_group, timeout_of
from fsdp2_strategy.errors import MeshError

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)
# One for each open strategy that trains on some ranks only; `close` removes it.
_partial_trainers: list[TrainingRanks] = []
# One for each open strategy, the last one first; `close` removes it.
_trainers: list[weakref.ref[TrainingRanks]] = []
# For each default group: how many groups `group_among` has made of the same ranks.
_group_counts: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
# The rendezvous at which a default group was started.
_joined: WeakKeyDictionary[Any, Rendezvous] = WeakKeyDictionary()
# For each default group: what this rank knows of its host, by the ranks that were asked.
_local_ranks: WeakKeyDictionary[Any, dict[tuple[int, ...], LocalRank]] = WeakKeyDictionary()
# For each default group: how often these ranks were asked.
_exchanges: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def start_process_group(timeout_minutes: float, at: Rendezvous | None = None) -> bool:
    """Start the default process group if there is none, and return whether this call did; collective if it starts one.

    Without a rendezvous, rank and world size are read from torchrun's environment variables; if they are not set, this
    process is the only rank. With an accelerator, the group has a backend for the CPU as well, such as
    ``cpu:gloo,cuda:nccl``.
    """
    if dist.is_initialized():
        if at is not None and _joined.get(dist.group.WORLD) != at:
            raise MeshError(
                f"cannot start the process group as rank {at.rank} of {at.world_size} at {at.address}: this process is "
                f"already rank {dist.get_rank()} of a group of {dist.get_world_size()} that was not started there, "
                "expected no group. Close the strategy or destroy the group first, or leave rendezvous out to use it."
            )
        return False
    _started.set()
    device_type = accelerator_type()
    backend = "gloo" if device_type is None else f"cpu:gloo,{device_type}:{collective_backend(device_type)}"
    timeout = timedelta(minutes=timeout_minutes)
    if at is not None:
        store, local = meet(at, timeout)
        rank, size = at.rank, at.world_size
    elif dist.is_torchelastic_launched() or "WORLD_SIZE" in os.environ:
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        if missing:
            raise MeshError(
                f"cannot start the process group: {', '.join(missing)} not set, expected the variables of torchrun. "
                "Start with torchrun, unset WORLD_SIZE to run one rank, or pass rendezvous."
            )
        try:
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store = fresh_store(store, rank, size, timeout)
        except dist.DistError as error:
            raise MeshError(
                f"cannot start the process group: rank {os.environ['RANK']} does not reach the store at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, or its process has ended, expected a store "
                f"that all ranks use ({str(error).splitlines()[0]}). Look for the first error of any rank."
            ) from error
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if at is None:
        local = find_local_rank(store, rank, own_place(size), range(size))
    _set_own_device(local)  # before the group starts: its backends would wait for those of ranks without a device
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    _local_ranks[dist.group.WORLD] = {tuple(range(size)): local}
    if at is not None:
        _joined[dist.group.WORLD] = at
    return True


def use_own_device(group: dist.ProcessGroup | None) -> None:
    """Make this rank's accelerator the current device of a process in a group that was not started here.

    If all ranks use devices of their own already, those stay. See [Note: devices of ranks] in `local_ranks`. Collective
    over the ranks of ``group`` (None: all ranks) if there are accelerators; otherwise, no rank waits for another.

    Raises:
        MeshError: two ranks would use the same device, or only some ranks have one; on all ranks.
    """
    known = _local_ranks.setdefault(dist.group.WORLD, {})
    ranks = tuple(ranks_of(group))
    if ranks in known or tuple(ranks_of(None)) in known:
        return
    device_type, config = accelerator_type(), dist.get_backend_config(group)
    if device_type is not None:
        collective_backend(device_type)  # raises if torch has none
    expects_accelerator = any(not pair.startswith("cpu:") for pair in config.split(",") if ":" in pair)
    if device_type is not None or expects_accelerator:
        # After an error, the ranks may be asked again, and must not read the answers of before.
        exchanges = _exchanges.setdefault(dist.group.WORLD, Counter())
        exchanges[ranks] += 1
        name = f"fsdp2_strategy/places/{'_'.join(map(str, ranks))}/{exchanges[ranks]}"
        store: Any = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]
        place = own_place(len(ranks), getattr(dist.group.WORLD, "bound_device_id", None))
        known[ranks] = find_local_rank(store, ranks.index(dist.get_rank()), place, ranks)
        _set_own_device(known[ranks])


def _set_own_device(local: LocalRank) -> None:
    if local.device is not None and local.device != torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(local.device)


_started = threading.Event()
"""Whether `start_process_group` has started a process group in this process."""
_EXIT_SECONDS = 5.0


def _destroy_at_exit() -> None:
    """Destroy a process group that was started here and not destroyed, if that takes at most `_EXIT_SECONDS`.

    Otherwise its threads would still run while the interpreter frees their memory, and the process could abort. If
    another rank was lost in a collective, destroying may take until the time-out.
    """
    if _started.is_set() and dist.is_initialized():
        destroy = threading.Thread(target=dist.destroy_process_group, name="destroy the process group", daemon=True)
        destroy.start()
        destroy.join(_EXIT_SECONDS)


# `background_save` registers later, so its function, which waits for a save, runs before this one.
call_at_end(_destroy_at_exit)


@contextmanager
def on_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run the collectives of this thread within the block on ``group``."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def group_in_use() -> dist.ProcessGroup | None:
    """Return the group that this thread's collectives use; None for the default one. See [Note: group in use]."""
    if (group := _group.get()) is not None:
        return group
    first = next(iter(_partial_trainers), None)
    return first.group if first is not None and first.default_group is dist.group.WORLD else None


class TrainingRanks:
    """The ranks that a strategy trains on; from `begin` to `close`, this process uses their group for collectives.

    ``sequence_size`` successive ranks share sequences, or ``tensor_size`` share layers; one of the two sizes is 1.
    """

    def __init__(self, group: dist.ProcessGroup | None, sequence_size: int = 1, tensor_size: int = 1) -> None:
        default = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise MeshError(
                f"cannot train: rank {dist.get_rank()} is not in process_group, expected a member of it. Construct the "
                "strategy on the ranks of that group only."
            )
        _partial_trainers[:] = [other for other in _partial_trainers if other.default_group is default]
        ranks = ranks_of(group)
        for other in _partial_trainers:
            if ranks_of(other.group) != ranks:
                raise MeshError(
                    f"cannot train on ranks {ranks}: another strategy of this process trains on ranks "
                    f"{ranks_of(other.group)}, expected the same ranks. Close that strategy first."
                )
        self.count = len(ranks)
        self.ranks_per_batch = sequence_size * tensor_size
        for name, size in (("sequence_parallel_size", sequence_size), ("tensor_parallel_size", tensor_size)):
            if self.count % size:
                divisors = [n for n in range(1, self.count + 1) if self.count % n == 0]
                raise MeshError(
                    f"cannot train: {name} is {size}, expected a divisor of the number of ranks {self.count}. Use one "
                    f"of {divisors}."
                )
        self.default_group: Any = default
        self.group: dist.ProcessGroup | None = group if self.count < dist.get_world_size() else None
        if self.group is not None and _trains_on_all():
            gc.collect()  # remove strategies that are unreachable but not freed yet
            if _trains_on_all():
                raise MeshError(
                    f"cannot train on ranks {ranks}: another strategy of this process trains on all ranks, expected "
                    "the same ranks. Close that strategy first."
                )

    def begin(self) -> None:
        """Make the group of these ranks the group in use; not collective."""
        _trainers.insert(0, weakref.ref(self))
        if self.group is not None:
            _partial_trainers.append(self)

    def close(self) -> None:
        """Stop using this group; not collective. Repeated calls have no effect."""
        _trainers[:] = [other for other in _trainers if other() not in (None, self)]
        if self in _partial_trainers:
            _partial_trainers.remove(self)


def _open_trainers() -> Iterator[TrainingRanks]:
    """Yield those that train in the current default group, the last one first."""
    for reference in _trainers:
        if (trainers := reference()) is not None and trainers.default_group is dist.group.WORLD:
            yield trainers


def _trains_on_all() -> bool:
    return any(trainers.group is None for trainers in _open_trainers())


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group (None: of the default group), as ranks of the default group."""
    return sorted(dist.get_process_group_ranks(group))


def rank() -> int:
    """Return this process's rank in the group in use; 0 if there is no process group."""
    return dist.get_rank(group_in_use()) if dist.is_initialized() else 0


def world_size() -> int:
    """Return the size of the group in use; 1 if there is no process group."""
    return dist.get_world_size(group_in_use()) if dist.is_initialized() else 1


def local_rank() -> int:
    """Return this process's number on its host: that of torchrun, else among the ranks that train; 0 without ranks."""
    local = _local()
    return int(os.environ.get("LOCAL_RANK", "0")) if local is None else local.rank


def local_world_size(default: int) -> int:
    """Return the number of ranks on this host, by torchrun or the ranks that train; ``default`` without them."""
    local = _local()
    if dist.is_initialized() and dist.group.WORLD in _joined and local is not None:
        return local.count
    return int(os.environ.get("LOCAL_WORLD_SIZE", default if local is None else local.count))


def _local() -> LocalRank | None:
    known = _local_ranks.get(dist.group.WORLD, {}) if dist.is_initialized() else {}
    return next(iter(known.values()), None)


def sequence_size() -> int:
    """Return how many successive ranks share sequences or layers, by the strategy constructed last; 1 without one."""
    return next((trainers.ranks_per_batch for trainers in _open_trainers()), 1)


def data_rank() -> int:
    """Return which part of the data this rank gets: its rank, or the number of its group that shares batches."""
    return rank() // sequence_size()


def data_size() -> int:
    """Return how many parts the data has: the number of ranks, or of groups that share batches."""
    return world_size() // sequence_size()


def group_among(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """Make a process group of ``ranks``; collective over ``ranks`` only.

    torch derives the name of such a group from the number of groups that a rank has made. If that number differs
    between the ranks, they wait for each other under different names. Here the name consists of the ranks and of the
    number of groups that were made of exactly these ranks before, which is equal on all of them.
    """
    counts = _group_counts.setdefault(dist.group.WORLD, Counter())
    name = f"fsdp2_strategy/{'_'.join(map(str, ranks))}/{counts[tuple(ranks)]}"
    counts[tuple(ranks)] += 1
    return new_named_group(ranks, name, **options)


def group_timeout() -> timedelta | None:
    """Return the time-out of the group in use; None if its backend does not report one."""
    group: Any = group_in_use() or dist.group.WORLD
    return timeout_of(group, control_device())


def current_device() -> torch.device:
    """Return the device that this rank computes on: its own accelerator, else the CPU."""
    device_type = accelerator_type()
    if device_type is None:
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def set_device(device: torch.device) -> None:
    """Make ``device`` the current device of this thread; a new thread starts with the first accelerator."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def control_device() -> torch.device:
    """Return the device for small messages: the CPU if the group in use has a CPU backend, else the accelerator."""
    return torch.device("cpu") if has_backend(group_in_use(), "cpu") else current_device()


def has_backend(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Return whether the collectives of a group (None: of the default group) take tensors of a type of device."""
    return f"{device_type}:" in dist.get_backend_config(group)


def is_rank_0() -> bool:
    """Return whether this process is rank 0 of the group in use, or the only rank."""
    return rank() == 0
