"""A type of device without memory or operators, to test how ranks choose their devices.

It patches what `torch.accelerator` returns, in a process of its own. Its collective backend is gloo's.
"""

from __future__ import annotations

import types

import torch
import torch.distributed as dist

TYPE = "fake"
state = types.SimpleNamespace(devices=[], current=0, initialized=False)


def see(devices, *, current=None):
    """Let this process see devices with these identifiers; ``current`` is the index of the one that it has set."""
    state.devices, state.current, state.initialized = list(devices), current or 0, current is not None


def _set_device(index):
    index = index if isinstance(index, int) else torch.device(index).index
    if index >= len(state.devices):
        raise RuntimeError("invalid device ordinal")
    state.current, state.initialized = index, True


def install(*, with_backend=True):
    """Register the type of device, and patch torch.accelerator."""
    torch.utils.rename_privateuse1_backend(TYPE)
    generator = torch.Generator()
    module = types.SimpleNamespace(
        is_initialized=lambda: state.initialized,
        get_device_properties=lambda index: types.SimpleNamespace(uuid=state.devices[index]),
        get_rng_state=lambda *_: generator.get_state(),
        set_rng_state=lambda new, *_: generator.set_state(new),
        manual_seed=generator.manual_seed,
    )
    torch.accelerator.current_accelerator = lambda **_: torch.device(TYPE) if state.devices else None
    torch.accelerator.is_available = lambda: bool(state.devices)
    torch.accelerator.device_count = lambda: len(state.devices)
    torch.accelerator.current_device_index = lambda: state.current
    torch.accelerator.set_device_index = _set_device
    torch.get_device_module = lambda *_: module
    if with_backend:
        dist.Backend.register_backend("fakeccl", _create, devices=[TYPE])
    return module


def _create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
