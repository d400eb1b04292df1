"""Divide reads among ranks: ranks with the same shards divide the tensors, and broadcast the values that they read.

Input: tensors of a model, and the regions that fill them. Output: this rank's read requests, and the broadcasts that
follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.torch_internals import broadcast_coalesced
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.verified_read import ReadRequest
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import shard_ranges


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Tensors that one rank of a group broadcasts to the others."""

    group: dist.ProcessGroup
    source: int
    """The sending rank, numbered within the group."""
    tensors: list[torch.Tensor]
    """The tensors, viewed as bytes."""

    def run(self) -> None:
        """Broadcast the tensors; collective over the group."""
        broadcast_coalesced(self.group, self.tensors, sizes.BROADCAST_BYTES, self.source)


def divide_reads(wanted: Iterable[tuple[str, Region, torch.Tensor]]) -> tuple[list[ReadRequest], list[Broadcast]]:
    """Return the read requests of this rank, and the broadcasts that it must run afterwards.

    Ranks that hold replicas of the same shards each read about the same number of bytes, and broadcast these tensors.
    """
    requests: list[ReadRequest] = []
    replicated: dict[dist.ProcessGroup, list[ReadRequest]] = {}
    for name, region, tensor in wanted:
        request = read_request_for(name, region, tensor)
        group = _replicas(tensor)
        if group is None:
            requests.append(request)
        else:
            replicated.setdefault(group, []).append(request)
    broadcasts = []
    for group, shared in replicated.items():
        replicas = dist.get_world_size(group)
        total = sum(request.tensor.nbytes for request in shared)
        before = 0
        by_reader: dict[int, list[ReadRequest]] = {}
        for request in shared:
            reader = min(replicas - 1, before * replicas // max(1, total))
            by_reader.setdefault(reader, []).append(request)
            before += request.tensor.nbytes
        for reader, theirs in by_reader.items():
            if reader == dist.get_rank(group):
                requests += theirs
            tensors = [r.tensor.reshape(-1).view(torch.uint8) for r in theirs if r.tensor.numel()]
            if tensors:
                broadcasts.append(Broadcast(group, reader, tensors))
    return requests, broadcasts


def read_request_for(name: str, region: Region, tensor: torch.Tensor) -> ReadRequest:
    """Return the read request for this rank's shard of a tensor."""
    return ReadRequest(name, region, shard_ranges(tensor), values_of(tensor))


def _replicas(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold the same shard of a tensor; None if there are no replicas."""
    if not isinstance(tensor, DTensor):
        return None
    copies = [
        axis for axis, p in enumerate(tensor.placements) if p.is_replicate() and tensor.device_mesh.size(axis) > 1
    ]
    return tensor.device_mesh.get_group(copies[0]) if copies else None
