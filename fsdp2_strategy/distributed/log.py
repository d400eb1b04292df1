"""The log of the package: one logger, and records that rank 0 writes for all ranks.

Input: messages. Output: records of the logger ``fsdp2_strategy``.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import is_rank_0

logger = logging.getLogger("fsdp2_strategy")


def show_log() -> None:
    """Let our log appear on standard error where the program has not set up logging itself."""
    if not logging.root.handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def log(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log once for all ranks, on rank 0, also before there is a process group."""
    if is_rank_0() and (dist.is_initialized() or os.environ.get("RANK", "0") == "0"):
        logger.log(level, message, *args)
