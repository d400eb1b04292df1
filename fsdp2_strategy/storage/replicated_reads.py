"""Divide reads among ranks: ranks with the same shards divide the tensors, and broadcast the values that they read.

Input: tensors of a model, and the regions that fill them. Output: this rank's read requests, and the broadcasts that
follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device, has_backend
from fsdp2_strategy.distributed.torch_internals import broadcast_coalesced
from fsdp2_strategy.model.boxes import box_of, is_split
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import local_shard
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.verified_read import ReadRequest


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Tensors that one rank of a group broadcasts to the others."""

    group: dist.ProcessGroup
    source: int
    """The sending rank, numbered within the group."""
    tensors: list[torch.Tensor]
    """The tensors, viewed as bytes."""

    def run(self) -> None:
        """Broadcast the tensors; collective over the group.

        A group of an accelerator, without a backend for the CPU, sends shards in host memory through the device.
        """
        if self.tensors[0].device.type != "cpu" or has_backend(self.group, "cpu"):
            broadcast_coalesced(self.group, self.tensors, sizes.BROADCAST_BYTES, self.source)
            return
        is_source = dist.get_rank(self.group) == self.source
        for parts in _in_buckets(self.tensors, sizes.BROADCAST_BYTES):
            joined = torch.cat(parts) if is_source else torch.empty(sum(map(len, parts)), dtype=torch.uint8)
            on_device = joined.to(current_device())
            dist.broadcast(on_device, group_src=self.source, group=self.group)
            if not is_source:
                joined.copy_(on_device)
                for part, received in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
                    part.copy_(received)


def _in_buckets(tensors: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Split tensors of bytes, and group the parts into buckets of at most ``bucket_bytes``."""
    bucket: list[torch.Tensor] = []
    for part in (part for tensor in tensors for part in torch.split(tensor, bucket_bytes)):
        if bucket and sum(map(len, bucket)) + len(part) > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(part)
    if bucket:
        yield bucket


def divide_reads(wanted: Iterable[tuple[str, Region, torch.Tensor]]) -> tuple[list[ReadRequest], list[Broadcast]]:
    """Return the read requests of this rank, and the broadcasts that it must run afterwards.

    Ranks that hold replicas of the same shards each read about the same number of bytes, and broadcast these tensors.
    """
    requests: list[ReadRequest] = []
    replicated: dict[dist.ProcessGroup, list[tuple[torch.Tensor, list[ReadRequest]]]] = {}
    for name, region, tensor in wanted:
        local = values_of(tensor)
        of_tensor = _requests_for(name, region, tensor, local)
        group = _replicas(tensor)
        if group is None:
            requests += of_tensor
        else:
            replicated.setdefault(group, []).append((local, of_tensor))
    broadcasts = []
    for group, shared in replicated.items():
        replicas = dist.get_world_size(group)
        total = sum(local.nbytes for local, _ in shared)
        before = 0
        by_reader: dict[int, list[torch.Tensor]] = {}
        for local, of_tensor in shared:
            reader = min(replicas - 1, before * replicas // max(1, total))
            by_reader.setdefault(reader, []).append(local)
            before += local.nbytes
            if reader == dist.get_rank(group):
                requests += of_tensor
        for reader, theirs in by_reader.items():
            tensors = [local.reshape(-1).view(torch.uint8) for local in theirs if local.numel()]
            if tensors:
                broadcasts.append(Broadcast(group, reader, tensors))
    return requests, broadcasts


def read_requests_for(name: str, region: Region, tensor: torch.Tensor) -> list[ReadRequest]:
    """Return the read requests for this rank's shard of a tensor: one for each of its boxes."""
    return _requests_for(name, region, tensor, values_of(tensor))


def _requests_for(name: str, region: Region, tensor: torch.Tensor, local: torch.Tensor) -> list[ReadRequest]:
    return [ReadRequest(name, region, box.full, box_of(local, box.local)) for box in local_shard(tensor).boxes]


def _replicas(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold the same shard of a tensor; None if there are no replicas."""
    if not isinstance(tensor, DTensor):
        return None
    copies = [axis for axis, p in enumerate(tensor.placements) if not is_split(p) and tensor.device_mesh.size(axis) > 1]
    return tensor.device_mesh.get_group(copies[0]) if copies else None
