"""Counters of all processes of a rank: what its workers gave, decoded and left out.

Input: names and numbers, in any process that has the data set. Output: their sums, in any of them.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

NAMES = ("samples", "samples_skipped", "frames_decoded", "frames_converted")


class Counts:
    """Add up in a file a process, mapped into memory.

    Args:
        folder: for the files; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = 0
        self._own = np.zeros(len(NAMES), dtype=np.int64)

    def add(self, **numbers: int) -> None:
        """Count."""
        if self._process != os.getpid():
            self._open()
        for name, number in numbers.items():
            self._own[NAMES.index(name)] += number

    def total(self) -> dict[str, int]:
        """Return the sums over all processes."""
        total = np.zeros(len(NAMES), dtype=np.int64)
        for path in self._folder.glob("counts-*"):
            found = np.fromfile(path, dtype=np.int64, count=len(NAMES))
            total[: len(found)] += found  # one that is just being made is empty
        return dict(zip(NAMES, total.tolist(), strict=True))

    def _open(self) -> None:
        with (self._folder / f"counts-{os.getpid()}").open("a+b") as file:
            file.write(bytes(len(NAMES) * 8))  # no hole: a full disk would kill whoever counts first
            file.flush()
            self._own = np.frombuffer(mmap.mmap(file.fileno(), len(NAMES) * 8), dtype=np.int64)
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        return {"_folder": self._folder, "_process": 0, "_own": None}
