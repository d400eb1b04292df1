"""Register the device with torch in this process, or in all processes of an environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from simulated_accelerator import build
from simulated_accelerator.build import missing

TYPE = "sim"
BACKEND = "simccl"
AUTOLOAD = Path(__file__).parent / "autoload"
"""Holds the metadata of an installed package with an entry point of the group in which torch looks for devices."""
DEVICES = "SIMULATED_DEVICES"
"""Environment variable with the number of devices of a process."""

_library: Any = None


def load(devices: int | None = None) -> None:
    """Register the device ``sim``, its module and its collective backend. Repeated calls set the number of devices."""
    global _library  # noqa: PLW0603  torch registers a device once in a process
    if _library is None:
        torch.utils.rename_privateuse1_backend(TYPE)
        _library = build.library()
        from simulated_accelerator import device_module

        torch._register_device_module(TYPE, device_module)
        sys.modules[f"torch.{TYPE}"] = device_module
        torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
        dist.Backend.register_backend(BACKEND, _backend, extended_api=True, devices=[TYPE])
        _allow_values_of_other_devices()
    _library.set_device_count(devices or int(os.environ.get(DEVICES, "2")))


def autoload() -> None:
    """Load the device when torch is imported: torch calls this by the entry point in `AUTOLOAD`."""
    if not missing():
        load()


def is_loaded() -> bool:
    return _library is not None


def library() -> Any:
    """Return the C++ part; the device must be loaded."""
    assert _library is not None, "the simulated accelerator is not loaded"
    return _library


def environment(devices: int = 2) -> dict[str, str]:
    """Return environment variables with which every Python process that imports torch loads the device."""
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(AUTOLOAD), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), DEVICES: str(devices)}


def _backend(options: Any, _: Any) -> Any:
    gloo_store, own_store = (dist.PrefixStore(name, options.store) for name in ("gloo", "devices"))
    gloo = dist.ProcessGroupGloo(gloo_store, options.group_rank, options.group_size, options.timeout)
    return library().Collectives(gloo, own_store, options.timeout.total_seconds())


def _allow_values_of_other_devices() -> None:
    """Let ``parameter.data = values`` change the device, which torch refuses for devices that it does not know.

    `nn.Module.to` then keeps the parameters' identity, as it does with CUDA.
    """
    data = torch._C.TensorBase.data
    is_compatible = torch._has_compatible_shallow_copy_type

    def crosses(tensor: torch.Tensor, values: torch.Tensor) -> bool:
        return type(values) in _PLAIN and {tensor.device.type, values.device.type} == {TYPE, "cpu"}

    def has_compatible_type(input: torch.Tensor, from_: torch.Tensor) -> bool:  # torch's names
        return crosses(input, from_) or is_compatible(input, from_)

    def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
        if crosses(tensor, values):
            library().set_data(tensor, values)
        else:
            data.__set__(tensor, values)

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[method-assign,assignment]
    torch._has_compatible_shallow_copy_type = has_compatible_type


_PLAIN = (torch.Tensor, torch.nn.Parameter)
