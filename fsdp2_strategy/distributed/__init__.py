"""Process groups, meshes, decisions that all ranks share, lost ranks and preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.distributed.agreement import all_or_none as all_or_none
    from fsdp2_strategy.distributed.collectives import all_gather as all_gather
    from fsdp2_strategy.distributed.collectives import all_reduce as all_reduce
    from fsdp2_strategy.distributed.memory import report_memory as report_memory
    from fsdp2_strategy.distributed.mesh import auto_shard_size as auto_shard_size
    from fsdp2_strategy.distributed.mesh import build_mesh as build_mesh
    from fsdp2_strategy.distributed.preemption import Preemption as Preemption
    from fsdp2_strategy.distributed.tcp_rendezvous import Rendezvous as Rendezvous
    from fsdp2_strategy.distributed.tcp_rendezvous import RendezvousServer as RendezvousServer

_MODULE_OF = {
    "Preemption": "preemption",
    "Rendezvous": "tcp_rendezvous",
    "RendezvousServer": "tcp_rendezvous",
    "all_gather": "collectives",
    "all_or_none": "agreement",
    "all_reduce": "collectives",
    "auto_shard_size": "mesh",
    "build_mesh": "mesh",
    "report_memory": "memory",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
