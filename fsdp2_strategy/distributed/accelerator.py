"""Ask torch which accelerator this process can use, and what belongs to its type of device.

Input: `torch.accelerator`. Output: the device type, its module, and the backend of its collectives. Other modules ask
here or `torch.accelerator`, so that they name no device type: a device that registers itself with torch works too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp2_strategy.errors import MeshError


def accelerator_type() -> str | None:
    """Return the type of the accelerator that this process can use, such as "cuda" or "xpu"; None if it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in the memory of an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def visible_devices() -> list[str]:
    """Return an identifier of each accelerator that this process can use, by their indices."""
    if (device_type := accelerator_type()) is None:
        return []
    properties = device_module(device_type).get_device_properties
    return [str(properties(index).uuid) for index in range(torch.accelerator.device_count())]


def device_module(device_type: str) -> Any:
    """Return torch's module of a type of accelerator, such as ``torch.cuda``.

    It has functions that `torch.accelerator` lacks (random states), or has only for devices with torch's own allocator
    (memory).
    """
    return torch.get_device_module(device_type)


def collective_backend(device_type: str) -> str:
    """Return the backend of collectives for a type of accelerator, such as "nccl".

    Raises:
        MeshError: torch knows no backend that takes tensors of this device.
    """
    backend = dist.Backend.default_device_backend_map.get(device_type)
    if backend is None or device_type not in dist.Backend.backend_capability.get(backend, []):
        known = sorted(device for device in dist.Backend.default_device_backend_map if device != "cpu")
        raise MeshError(
            f"cannot train on the accelerator of this process: torch has no collective backend for {device_type!r}, "
            f"expected one of {known}, or a device that registers a backend. Import the package that registers it "
            "(torch.distributed.Backend.register_backend) first, or make the device invisible to train on the CPU."
        )
    return str(backend)
