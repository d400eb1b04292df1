"""What the package logs in a block, on any rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded(level: int = logging.INFO) -> Iterator[list[str]]:
    """Record the messages of the package's logger in a block."""
    logger, lines = logging.getLogger("fsdp2_strategy"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
