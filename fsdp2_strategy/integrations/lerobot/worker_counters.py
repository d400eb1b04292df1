"""Count samples and decoded frames over all processes of a rank.

Input: increments by name, from each process that uses the data set. Output: the sums, in any of these processes.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

NAMES = ("samples", "samples_skipped", "frames_decoded", "frames_converted")


class Counts:
    """Counters in memory-mapped files, one file per process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = 0
        self._own = np.zeros(len(NAMES), dtype=np.int64)

    def add(self, **numbers: int) -> None:
        """Add numbers to this process's counters; the names are those in `NAMES`."""
        if self._process != os.getpid():
            self._open()
        for name, number in numbers.items():
            self._own[NAMES.index(name)] += number

    def total(self) -> dict[str, int]:
        """Return the sums over all processes."""
        total = np.zeros(len(NAMES), dtype=np.int64)
        for path in self._folder.glob("counts-*"):
            found = np.fromfile(path, dtype=np.int64, count=len(NAMES))
            total[: len(found)] += found  # a file that another process is just creating may be empty
        return dict(zip(NAMES, total.tolist(), strict=True))

    def _open(self) -> None:
        with (self._folder / f"counts-{os.getpid()}").open("a+b") as file:
            file.write(bytes(len(NAMES) * 8))  # allocates: on a full disk, a write to a mapped hole raises SIGBUS
            file.flush()
            self._own = np.frombuffer(mmap.mmap(file.fileno(), len(NAMES) * 8), dtype=np.int64)
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        return {"_folder": self._folder, "_process": 0, "_own": None}
