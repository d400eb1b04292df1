"""Read, set, seed and restore random generators: the only module of this package that does.

Input: the generators of Python, NumPy and torch in this process. Output: the same generators, with given states.

[Note: generators stay as they are] A call of this package must not change which random numbers a trainer draws next,
unless its documentation says so. What runs a model as a trial, or builds one with a seed of its own, does so in
`restored_generators`. torch has a generator for the CPU and one for each accelerator. Of the latter, a rank uses that
of its own device. ``torch.manual_seed`` seeds all of them, and ``torch.random.fork_rng(devices=[])`` restores none of
the accelerators', so neither is used here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fsdp2_strategy.distributed.accelerator import accelerator_type, device_module

HostStates = tuple[Any, Any, torch.Tensor]
"""The states of Python's, NumPy's and torch's generators on the CPU."""


@contextmanager
def restored_generators(seed: int | None = None) -> Iterator[None]:
    """Restore this process's generators after the block: Python's, NumPy's, and torch's on CPU and accelerator.

    Inside the block they start from ``seed``; without one, they go on from their states.
    """
    of_host, of_accelerator = host_states(), accelerator_state()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  user code draws from the legacy generator
        seed_torch(seed)
    try:
        yield
    finally:
        set_host_states(of_host)
        if of_accelerator is not None:
            set_accelerator_state(of_accelerator)


def host_states() -> HostStates:
    """Return the states of Python's, NumPy's and torch's generators on the CPU, in memory; fast."""
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()  # noqa: NPY002


def set_host_states(states: HostStates) -> None:
    """Restore the result of `host_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.default_generator.set_state(states[2])


def seed_host(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on the CPU; others, such as a worker's parent's, stay as is."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on all devices of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and of this rank's accelerator."""
    torch.default_generator.manual_seed(seed)
    if (device_type := accelerator_type()) is not None:
        device_module(device_type).manual_seed(seed)


def accelerator_state() -> torch.Tensor | None:
    """Return the state of the generator of this rank's accelerator; None if there is no accelerator."""
    device_type = accelerator_type()
    return None if device_type is None else device_module(device_type).get_rng_state()


def set_accelerator_state(state: torch.Tensor) -> None:
    """Restore the result of `accelerator_state`; without an accelerator, do nothing."""
    if (device_type := accelerator_type()) is not None:
        device_module(device_type).set_rng_state(state)


def torch_states(device: torch.device) -> list[torch.Tensor]:
    """Return the random state of the CPU and, if ``device`` is an accelerator, that of the device."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(device_module(device.type).get_rng_state(device))
    return states


def set_torch_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Restore the result of `torch_states`."""
    torch.default_generator.set_state(states[0])
    if device.type != "cpu":
        device_module(device.type).set_rng_state(states[1], device)


@contextmanager
def drawing_from(states: list[torch.Tensor] | None, device: torch.device) -> Iterator[None]:
    """Set these random states inside the block, and restore the previous ones after it; a no-op for None."""
    if states is None:
        yield
        return
    before = torch_states(device)
    set_torch_states(states, device)
    try:
        yield
    finally:
        set_torch_states(before, device)
