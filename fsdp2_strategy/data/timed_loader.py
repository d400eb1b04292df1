"""Define a `DataLoader` that measures how long the training loop waits for its batches, for the step log.

Input: what torch's `DataLoader` takes. Output: the same batches; see [Note: time spent waiting] in `spent_time`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from fsdp2_strategy.distributed import spent_time


class TimedLoader(DataLoader[Any]):
    """torch's `DataLoader`, which also measures how long the training loop waits for its batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with spent_time.data:  # workers start
            batches = super().__iter__()
        return spent_time.data.timed(batches)
