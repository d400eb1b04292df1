"""Call functions when a rank ends, before Python shuts down thread pools and joins threads: `atexit` is too late.

`threading` calls what it has registered in forked processes, too. The end of a data loader's worker must not report
that its rank ends, nor destroy the rank's process group. But a process that is forked before it joins a process group
may become a rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch.distributed as dist

_is_forked_from_rank = False


def call_at_end(function: Callable[[], object]) -> None:
    """Call a function when this process ends, unless it was forked from a rank; the function registered last first."""

    def call() -> None:
        if not _is_forked_from_rank:
            function()

    threading._register_atexit(call)  # type: ignore[attr-defined]


def _after_fork() -> None:
    global _is_forked_from_rank  # noqa: PLW0603
    _is_forked_from_rank = _is_forked_from_rank or dist.is_initialized()


os.register_at_fork(after_in_child=_after_fork)
