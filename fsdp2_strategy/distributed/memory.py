"""Report the device and host memory of all ranks.

Input: the counters of the accelerator's allocator and of the process. Output: one line for all ranks.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.accelerator import accelerator_type, device_module
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import group_in_use, world_size


@collective
def report_memory(prefix: str = "") -> str:
    """Log the memory of all ranks on one line, in GB (10^9 bytes), and return the line; collective.

    For the device, the line has the memory that tensors occupy, the memory that the allocator reserves, and the peak of
    the former. For the host, it has the resident set size of the process, and its peak.
    """
    own = {"host": _resident(), "host peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if (device_type := accelerator_type()) is not None:
        of_torch = device_module(device_type)
        device = {
            "device": of_torch.memory_allocated(),
            "reserved": of_torch.memory_reserved(),
            "device peak": of_torch.max_memory_allocated(),
        }
        own = device | own
    of_ranks: list[dict[str, int]] = [{}] * world_size()
    dist.all_gather_object(of_ranks, own, group=group_in_use())
    parts = [f"{key} {' '.join(f'{rank[key] / 1e9:.2f}' for rank in of_ranks)}" for key in own]
    line = f"memory in GB{f', {prefix}' if prefix else ''}: {'; '.join(parts)}"
    log("%s", line)
    return line


def memory_of_rank() -> tuple[int, int]:
    """Return the peak memory of tensors, and the memory that the allocator reserves, in bytes; not collective.

    Without an accelerator: the resident set size of the process, and 0.
    """
    if (device_type := accelerator_type()) is None:
        return _resident(), 0
    of_torch = device_module(device_type)
    return of_torch.max_memory_allocated(), of_torch.memory_reserved()


def clear_cache() -> None:
    """Synchronise the device and release the allocator's unused memory; not collective."""
    if (device_type := accelerator_type()) is not None:
        torch.accelerator.synchronize()
        device_module(device_type).empty_cache()


def _resident() -> int:
    """Return the resident set size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
