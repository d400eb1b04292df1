"""Allocate the pages of new host memory before a read fills it: one system call instead of a fault for each page.

Input: a CPU tensor that was allocated and not written yet. Output: the same tensor, with pages; existing values stay
as they are. The kernel allocates and clears a page when it is first written to. In a load from a RAM disk or the page
cache, these faults would take longer than the copy, because threads that fault in one process wait for each other.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from fsdp2_strategy import sizes

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def populate(tensor: torch.Tensor) -> None:
    """Allocate the pages of as many bytes as a CPU tensor has from its first element on; skip small tensors.

    Errors are ignored, for example of a kernel that lacks the call: the first write to a page then allocates it.
    """
    if _libc is None or tensor.device.type != "cpu" or tensor.nbytes < sizes.POPULATED_BYTES:
        return
    begin = tensor.data_ptr()
    before = begin % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin - before), ctypes.c_size_t(tensor.nbytes + before), _POPULATE_WRITE)
