"""The lines that the package logs in a block of a test, on this rank."""

from __future__ import annotations

import logging


class Lines(logging.Handler):
    """The package's log while the block runs."""

    def __init__(self):
        super().__init__()
        self.lines, self.warnings = [], []

    def emit(self, record):
        (self.warnings if record.levelno >= logging.WARNING else self.lines).append(record.getMessage())

    def of_steps(self):
        return [line for line in self.lines if "step " in line and "loss " in line]

    def of_slow_ranks(self):
        return [line for line in self.warnings if "is slower than the others" in line]

    def __enter__(self):
        logger = logging.getLogger("fsdp2_strategy")
        self.level_before = logger.level  # `level` is the handler's own
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_):
        logger = logging.getLogger("fsdp2_strategy")
        logger.removeHandler(self)
        logger.setLevel(self.level_before)
