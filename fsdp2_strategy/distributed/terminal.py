"""Tell whether standard error is a terminal, and write text above the progress bars that are on it.

Input: a stream. Output: the bars of tqdm are cleared while a block writes, and drawn again below its text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_terminal() -> bool:
    """Return whether standard error is a terminal with columns, on which a progress bar can be drawn."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return True


@contextmanager
def above_bars(stream: Any) -> Iterator[None]:
    """Write to a stream in this block without mixing its text with bars that tqdm has drawn."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)  # without tqdm, there is no bar
    if tqdm is None:
        yield
        return
    with tqdm.external_write_mode(file=stream):
        yield
