"""Run the device work of a worker thread in the order of the thread that started it.

Input: the current device and stream of a thread. Output: the same device and stream in a worker thread.

[Note: streams of threads] The current device and the current stream of an accelerator belong to a thread. A new thread
begins with the first device and its default stream. If the trainer launches kernels on another stream, as an engine in
its process may make it do, copies on the default stream run before these kernels have written their results. So every
thread of this package that may touch a tensor of the device enters the `DeviceOrder` of the thread that started it. Its
copies then run after all work that the caller has launched, and before the work that the caller launches afterwards.
They use the caller's memory on the caller's stream, so no ``record_stream`` is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp2_strategy.distributed.process_group import current_device, set_device


@dataclass(frozen=True)
class DeviceOrder:
    """The device and the stream on which a thread's work is ordered; see [Note: streams of threads]."""

    device: torch.device
    stream: torch.Stream | None
    """None on a CPU, which has no streams."""

    @classmethod
    def of_this_thread(cls) -> DeviceOrder:
        """Return the current device and stream of this thread; not collective."""
        device = current_device()
        return cls(device, None if device.type == "cpu" else torch.accelerator.current_stream(device))

    def enter(self) -> None:
        """Use the device and the stream in this thread, until it ends; pass it to a thread pool as ``initializer``."""
        set_device(self.device)
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)
