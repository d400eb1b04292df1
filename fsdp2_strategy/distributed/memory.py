"""How much memory the ranks hold, on the device and on the host.

Input: nothing. Output: one line for all ranks.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import group_in_use, world_size


def report_memory(prefix: str = "") -> str:
    """Log the memory of all ranks on one line, in GB (10^9 bytes), and return it; collective.

    On the device that is what tensors take, what the allocator holds for them, and the peak of the former; on the host
    what the process has in memory, and its peak.
    """
    own = {"host": _resident(), "host peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        device = {
            "device": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "device peak": torch.cuda.max_memory_allocated(),
        }
        own = device | own
    of_ranks: list[dict[str, int]] = [{}] * world_size()
    dist.all_gather_object(of_ranks, own, group=group_in_use())
    parts = [f"{key} {' '.join(f'{rank[key] / 1e9:.2f}' for rank in of_ranks)}" for key in own]
    line = f"memory in GB{f', {prefix}' if prefix else ''}: {'; '.join(parts)}"
    log("%s", line)
    return line


def clear_cache() -> None:
    """Give memory that no tensor uses back to the device, once its queue is empty; not collective."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _resident() -> int:
    """Return the bytes that this process has in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux: the peak is the nearest there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
