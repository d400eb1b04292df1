"""Show the progress of a long operation: a bar on a terminal; elsewhere, a line in the log every half a minute.

Input: the amount of work, and what is done of it. Output: standard error.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Self

from tqdm import tqdm

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.terminal import drawn, is_terminal

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """The progress of one operation, such as "loading"; use it in a ``with`` block. All methods are thread-safe.

    ``total`` is None if unknown. ``done`` is work that was done before, and does not count for the speed.
    """

    def __init__(self, what: str, total: int | None, *, unit: str = "B", done: int = 0, is_shown: bool = True) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = self._done_before = done
        self._logs = is_shown and not is_terminal()
        self._begin = self._last_line = time.monotonic()
        self._lock = threading.Lock()
        self._bar: tqdm[Any] = drawn(
            tqdm(
                total=total,
                desc=what,
                unit=unit,
                unit_scale=unit == "B",
                initial=done,
                leave=False,
                disable=not is_shown or self._logs,
            )
        )

    def update(self, done: int = 1) -> None:
        """Add work that was done."""
        with self._lock:
            self._done += done
            self._bar.update(done)
            now = time.monotonic()
            if self._logs and now - self._last_line >= SECONDS_BETWEEN_LINES:
                self._last_line = now
                logger.info("%s", self._line(now - self._begin))

    def describe(self, what: str) -> None:
        """Change the text of the operation; it is shown at the next update."""
        with self._lock:
            self._what = what
            self._bar.set_description(what, refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, seconds: float) -> str:
        speed = (self._done - self._done_before) / seconds
        if self._unit == "B":
            done, per_second = f"{self._done / 1e9:.1f} GB", f"{speed / 1e9:.2f} GB/s"
        else:
            done, per_second = f"{self._done:,} {self._unit}s", f"{speed:.2f} {self._unit}s/s"
        part = f" ({self._done / self._total:.0%})" if self._total else ""
        return f"{self._what}: {done}{part}, {per_second}"
