"""Number the ranks of each host, and choose the accelerator of each rank.

Input: what each rank knows of its host, through a store. Output: the number of a rank on its host, and its device.

[Note: devices of ranks] Some launchers tell each process its number on its host, and every process sees all devices of
the host (torchrun). Others let each process see one device only (SLURM with a GPU for each task, Ray), or tell it a
number in a variable of their own (mpirun). So each rank writes its host, the identifiers of the devices that it sees,
and two candidates: the device that is current already, and torchrun's LOCAL_RANK. The first of these that gives each
rank a device of its own is used:

1. The current device, if all ranks have used or set one: a trainer's own choice.
2. The device with the index LOCAL_RANK.
3. The device whose index is the rank's number among the ranks of its host that see the same devices.

The choice follows from what all ranks wrote, so that all of them raise the same error if none is possible. No variable
of another launcher is read.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.accelerator import accelerator_type, device_module
from fsdp2_strategy.errors import MeshError, some

_READ_SECONDS = 10.0
"""For so long a rank waits until the others have read an error."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """What a rank knows of its host; see [Note: devices of ranks]."""

    rank: int
    """Number of this rank among the ranks of its host, from 0."""
    count: int
    """Number of ranks on this host."""
    device: int | None
    """Index of the rank's accelerator among those that this process sees; None if it sees none."""


@dataclass(frozen=True, slots=True)
class Place:
    """What each rank writes to the store."""

    world_size: int
    host: str
    devices: list[str]
    """Identifiers of the accelerators that the process sees, in their order."""
    current: int | None = None
    """Index of the device that this process has used or set."""
    launched_as: int | None = None
    """The LOCAL_RANK of torchrun."""


def own_place(world_size: int, bound: torch.device | None = None) -> Place:
    """Return the place of this process; ``bound`` is the device that its process group is bound to."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    current: int | None = None
    if bound is not None and bound.type != "cpu":
        current = bound.index
    elif (device_type := accelerator_type()) is not None and device_module(device_type).is_initialized():
        current = torch.accelerator.current_device_index()
    launched_as = int(local_rank) if local_rank.isdecimal() else None
    return Place(world_size, host_id(), visible_devices(), current, launched_as)


def host_id() -> str:
    """Return a text that is equal for the processes of one host; containers with names of their own are hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def visible_devices() -> list[str]:
    """Return an identifier of each accelerator that this process can use, by their indices; "" for an unknown one."""
    if (device_type := accelerator_type()) is None:
        return []
    properties = device_module(device_type).get_device_properties
    return [str(getattr(properties(index), "uuid", "")) for index in range(torch.accelerator.device_count())]


def find_local_rank(store: Any, index: int, place: Place, ranks: Sequence[int]) -> LocalRank:
    """Return what this rank knows of its host; collective over ``ranks``, of which this is number ``index``.

    The first rank chooses for all of them, so that each rank reads one key of the store. If it chooses an error, the
    ranks wait until all have read it, because the store may end with one of their processes.
    """
    store.set(f"place/{index}", json.dumps(asdict(place)))
    try:
        if index == 0:
            places = [Place(**json.loads(each)) for each in store.multi_get([f"place/{i}" for i in range(len(ranks))])]
            try:
                chosen = [asdict(local) for local in local_ranks(places, ranks)]
            except MeshError as error:
                chosen = [{"error": str(error)}] * len(ranks)
            for other, answer in enumerate(chosen):
                store.set(f"local/{other}", json.dumps(answer))
        answer = json.loads(store.get(f"local/{index}"))
    except dist.DistError as error:
        raise MeshError(
            f"cannot choose the devices of ranks: a rank of {list(ranks)} has not joined in time, or the process of "
            f"the store has ended, expected all ranks ({str(error).splitlines()[0]}). Construct the strategy on every "
            "rank of its group, and look for the first error of any rank."
        ) from error
    if "error" in answer:
        with suppress(dist.DistError):  # a rank that is lost meanwhile
            store.set(f"read/{index}", "")
            store.wait([f"read/{other}" for other in range(len(ranks))], timedelta(seconds=_READ_SECONDS))
        raise MeshError(answer["error"])
    return LocalRank(**answer)


def local_ranks(places: Sequence[Place], ranks: Sequence[int] | None = None) -> list[LocalRank]:
    """Return what each rank knows of its host; not collective; see [Note: devices of ranks]."""
    ranks = range(len(places)) if ranks is None else ranks
    blind = [rank for rank, place in zip(ranks, places, strict=True) if not place.devices]
    if blind and len(blind) < len(places):
        raise MeshError(
            f"cannot start the process group: {some(list(map(str, blind)), 'rank')} of {len(places)} see no "
            "accelerator, and the other ranks do, expected accelerators on all ranks or on none. Request the same "
            "resources for all of them (num_gpus=1 of a Ray actor, --gpus-per-task=1 of srun)."
        )
    devices = [None] * len(places) if blind else _choose(places, ranks)
    by_launcher = all(place.launched_as is not None for place in places)
    found: list[LocalRank] = []
    for i, (place, device) in enumerate(zip(places, devices, strict=True)):
        number = sum(other.host == place.host for other in places[:i])
        count = sum(other.host == place.host for other in places)
        found.append(LocalRank((place.launched_as or 0) if by_launcher else number, count, device))
    return found


def _choose(places: Sequence[Place], ranks: Sequence[int]) -> Sequence[int | None]:
    """Return the index of each rank's device among those that it sees."""
    for indices in ([place.current for place in places], [place.launched_as for place in places]):
        is_possible = all(i is not None and i < len(p.devices) for i, p in zip(indices, places, strict=True))
        if is_possible and _first_shared(places, indices) is None:
            return indices
    by_number = [
        sum((other.host, other.devices) == (place.host, place.devices) for other in places[:i])
        for i, place in enumerate(places)
    ]
    within = [min(number, len(place.devices) - 1) for number, place in zip(by_number, places, strict=True)]
    if (shared := _first_shared(places, within)) is not None:
        first, second = shared
        device = places[second].devices[within[second]] or f"{within[second]}"
        raise MeshError(
            f"cannot start the process group: ranks {ranks[first]} and {ranks[second]} would use the same accelerator "
            f"{device} of {places[second].host.split()[0]}, expected one for each rank. Start as many ranks on a host "
            "as it has accelerators (num_gpus=1 of a Ray actor, --gpus-per-task=1 of srun)."
        )
    return within


def _first_shared(places: Sequence[Place], indices: Sequence[int | None]) -> tuple[int, int] | None:
    """Return the numbers of two ranks that would use the same device; None if there are none.

    A device without an identifier is told apart by its index, among processes of a host that see as many devices; a
    process that sees one such device may have been given another one than its neighbours.
    """
    used_by: dict[tuple[object, ...], int] = {}
    for i, (place, index) in enumerate(zip(places, indices, strict=True)):
        identifier: object = place.devices[index or 0]
        if not identifier:
            if len(place.devices) == 1:
                continue
            identifier = (len(place.devices), index)
        if (first := used_by.setdefault((place.host, identifier), i)) != i:
            return first, i
    return None
