"""The module ``torch.sim``: the names of a device's module that torch, transformers and this package call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from simulated_accelerator.loading import TYPE, library

Given = torch.device | int | str | None


def _device(given: Given) -> torch.device:
    device = torch.device(TYPE, given) if isinstance(given, int) else torch.device(TYPE if given is None else given)
    return device if device.index is not None else torch.device(TYPE, library().current_device())


# --- the device -------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


_initialized = True
"""torch's activation checkpointing keeps the random state of a device whose module has this name."""


def is_initialized() -> bool:
    return _initialized


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return library().device_count()


def current_device() -> int:
    return library().current_device()


def set_device(device: Given) -> None:
    library().set_device(_device(device).index)


class device(ContextDecorator):
    """Make a device the current one within a block."""

    def __init__(self, device: Given) -> None:
        self.index = -1 if device is None or device == -1 else _device(device).index

    def __enter__(self) -> None:
        self.previous = current_device()
        if self.index >= 0:
            library().set_device(self.index)

    def __exit__(self, *_: object) -> None:
        library().set_device(self.previous)


@dataclass
class Properties:
    """What `get_device_properties` returns."""

    name: str
    uuid: str
    total_memory: int
    major: int = 9
    minor: int = 0


def get_device_properties(device: Given = None) -> Properties:
    index = _device(device).index
    return Properties("simulated", f"simulated-{index}", library().memory_info(index)[1])


def get_device_name(device: Given = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Given = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# --- random numbers ---------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    library().default_generator(-1).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        library().default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return library().default_generator(-1).initial_seed()


def get_rng_state(device: Given = None) -> torch.Tensor:
    return library().default_generator(_device(device).index).get_state()


def set_rng_state(state: torch.Tensor, device: Given = None) -> None:
    library().default_generator(_device(device).index).set_state(state)


# --- streams and events -----------------------------------------------------------------------------------------------


def Stream(device: Given = None, priority: int = 0, **_: Any) -> torch.Stream:
    return torch.Stream(_device(device), priority=priority)


def Event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event(TYPE, enable_timing=enable_timing)


def current_stream(device: Given = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Given = None) -> torch.Stream:
    found = _device(device)
    private_use = torch.Stream(found).device_type
    return torch.Stream(stream_id=0, device_index=found.index, device_type=private_use)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    previous = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)


def synchronize(device: Given = None) -> None:
    torch.accelerator.synchronize(_device(device))


# --- memory -----------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    torch.accelerator.memory.empty_cache()


def memory_allocated(device: Given = None) -> int:
    return torch.accelerator.memory.memory_allocated(_device(device))


def memory_reserved(device: Given = None) -> int:
    return torch.accelerator.memory.memory_reserved(_device(device))


def max_memory_allocated(device: Given = None) -> int:
    return torch.accelerator.memory.max_memory_allocated(_device(device))


def max_memory_reserved(device: Given = None) -> int:
    return torch.accelerator.memory.max_memory_reserved(_device(device))


def reset_peak_memory_stats(device: Given = None) -> None:
    torch.accelerator.memory.reset_peak_memory_stats(_device(device))


def mem_get_info(device: Given = None) -> tuple[int, int]:
    return library().memory_info(_device(device).index)
