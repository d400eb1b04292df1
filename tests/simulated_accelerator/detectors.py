"""What the detectors found, and what was counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from simulated_accelerator.loading import library


@dataclass
class Counters:
    """How often the host waited for the device within a `counted` block."""

    syncs: int = 0
    """Waits for a stream, an event or the device."""
    blocking_to_host: int = 0
    """Copies to the host that it waited for; ``.item()`` and sizes that depend on values are among them."""
    blocking_to_device: int = 0
    """Copies from pageable memory to the device."""


def reports() -> list[str]:
    """Return what was reported since the last call, each with the stack of the call that found it."""
    return library().take_reports()


def reset() -> None:
    """Wait for the device, and forget what was reported: a new test begins."""
    torch.accelerator.synchronize()
    reports()


def check() -> None:
    """Raise if anything was reported since the last call."""
    found = reports()
    if found:
        raise AssertionError("\n".join([f"the simulated accelerator has {len(found)} reports:", *found[:10]]))


@contextmanager
def watched() -> Iterator[None]:
    """Raise at the end of the block if anything was reported within it."""
    reset()
    yield
    check()


@contextmanager
def counted() -> Iterator[Counters]:
    """Count how often the host waits for the device within the block."""
    counters = Counters()
    before = library().counters()
    yield counters
    for name, count in library().counters().items():
        setattr(counters, name, count - before[name])


@contextmanager
def without_detectors() -> Iterator[None]:
    """Report no race within the block."""
    library().set_detecting(False)
    try:
        yield
    finally:
        library().set_detecting(True)
