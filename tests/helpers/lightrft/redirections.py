"""Run code that is written for CUDA on the CPU: one row for each redirection in `REDIRECTIONS`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

REDIRECTIONS = {
    "devices": 'a device "cuda", "cuda:n" or n, given to a function or method of torch, becomes "cpu"; `.cuda()`, too',
    "current_device, set_device": "return 0; do nothing",
    "synchronize, empty_cache": "do nothing",
    "memory_allocated, mem_get_info, memory_summary": 'return 0; (1, 1); ""',
    "init_process_group": 'the backend "cpu:gloo,cuda:nccl" becomes "gloo"',
    "new_subgroups_by_enumeration": 'the backend "nccl" becomes "gloo"',
    "init_device_mesh": 'the device type "cuda" becomes "cpu"',
}
"""The redirected names of `torch`, `torch.cuda` and `torch.distributed`, and what is done instead."""


def _is_cuda(value):
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


class OnCpu(TorchFunctionMode):
    """Replace CUDA devices in the arguments of torch's functions and methods by the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if _is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cpu")
        if name == "to":
            args = tuple(torch.device("cpu") if _is_cuda(a) or type(a) is int else a for a in args)
        return function(*args, **kwargs)


def install():
    """Redirect the devices of this process, until it ends."""
    cuda = torch.cuda
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.memory_allocated = lambda *_: 0
    cuda.mem_get_info = lambda *_: (1, 1)
    cuda.memory_summary = lambda *_: ""

    init_process_group, by_enumeration = dist.init_process_group, dist.new_subgroups_by_enumeration
    init_device_mesh = dist.device_mesh.init_device_mesh

    def start(*args, backend=None, **kwargs):
        backend = "gloo" if backend == "cpu:gloo,cuda:nccl" else backend
        return init_process_group(*args, **({"backend": backend} if backend else {}), **kwargs)

    def subgroups(ranks, backend=None, **kwargs):
        return by_enumeration(ranks, backend="gloo" if backend == "nccl" else backend, **kwargs)

    def mesh(device_type, *args, **kwargs):
        return init_device_mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    dist.init_process_group, dist.new_subgroups_by_enumeration = start, subgroups
    dist.device_mesh.init_device_mesh = mesh
    to_of_module = torch.nn.Module.to

    def to(module, *args, **kwargs):
        args = tuple(torch.device("cpu") if _is_cuda(a) or type(a) is int else a for a in args)
        return to_of_module(module, *args, **kwargs)

    torch.nn.Module.to = to
    OnCpu().__enter__()
