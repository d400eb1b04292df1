"""Run code that is written for CUDA on the CPU: one row for each redirection in `REDIRECTIONS`."""

from __future__ import annotations

import os
import time
import types

import torch
from accelerate import PartialState

REDIRECTIONS = {
    "torch.cuda.set_device": "does nothing",
    "torch.cuda.current_device": "returns the CPU, on which VITRA's own strategy then shards",
    "torch.cpu.device_count": "the number of ranks, because VITRA's own strategy shards over the devices of a node",
    "torch.autocast": 'the device type "cuda" becomes "cpu"',
    "accelerate.PartialState": "made with `cpu=True`, which starts gloo; VITRA asks it for rank and number of ranks",
    "FullStateDictConfig, FullOptimStateDictConfig": "`offload_to_cpu=True` becomes False in VITRA's own strategy, "
    "because FSDP1 frees tensors that it offloads from the CPU to the CPU",
    "time.sleep": "returns at once in VITRA's metrics, which sleep 210 seconds on each rank at the end",
}
"""The redirected names, and what is done instead. Everything else that the script calls works without CUDA."""


class OnCpu(torch.autocast):
    """Autocast on the CPU."""

    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def install():
    """Redirect the devices of this process, until it ends."""
    torch.cuda.set_device = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.autocast = OnCpu
    PartialState(cpu=True)
    torch.cpu.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])


def install_in_vitra(fsdp, metrics):
    """Redirect names of VITRA's modules of its strategy and of its metrics."""
    for name in ("FullStateDictConfig", "FullOptimStateDictConfig"):
        setattr(fsdp, name, _without_offload(getattr(fsdp, name)))
    metrics.time = types.SimpleNamespace(time=time.time, sleep=lambda _: None)


def _without_offload(config):
    return lambda **options: config(**{**options, "offload_to_cpu": False})
