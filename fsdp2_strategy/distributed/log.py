"""The package's logger; records that concern all ranks are written by rank 0.

Input: messages. Output: records of the logger ``fsdp2_strategy``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.distributed.terminal import above_bars
from fsdp2_strategy.errors import ConfigError

logger = logging.getLogger("fsdp2_strategy")


class _Handler(logging.StreamHandler[Any]):
    """Write records to standard error, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with above_bars(self.stream):
            super().emit(record)


def show_log(level: int | str | None = None) -> None:
    """Write the package's log to standard error, unless the program has configured logging.

    By default, a level that the program has set is kept; otherwise it is INFO if the handler is added.
    """
    if level is not None:
        try:
            logger.setLevel(level)
        except (ValueError, TypeError):
            raise ConfigError(
                f"cannot set the log level: it is {level!r}, expected a level of logging. Use 'INFO' or 'WARNING'."
            ) from None
    if not logging.root.handlers and not logger.handlers:
        handler = _Handler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        # A program that configures logging later writes the records itself.
        handler.addFilter(lambda _: not logging.root.handlers)
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def log(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log on rank 0 only, before the process group exists by torchrun's ``RANK``; not collective."""
    if is_rank_0() and (dist.is_initialized() or os.environ.get("RANK", "0") == "0"):
        logger.log(level, message, *args)
