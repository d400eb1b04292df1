"""Run the command line ``fsdp2-strategy``: read, export and convert checkpoints in one process.

`parser` defines the arguments. Each command has a module of its own, which is imported when the command runs, so that
``ls`` does not import torch. `output` writes text or JSON; `found` finds the checkpoints that a path means,
and `foreign` those of other systems.
"""

from fsdp2_strategy.cli.parser import main

__all__ = ["main"]
