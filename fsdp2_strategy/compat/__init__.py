"""Run other systems' trainers: for each system, a strategy with the further names that its trainers read.

Until the next release, this path also has the names of ``config.aliases``, which was the module ``compat``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name of the module that had this path before, and warn."""
    if name in ("read_mapping", "resolve_aliases", "split_arguments"):
        message = f"{__name__}.{name} was moved to fsdp2_strategy.config.aliases; the next release removes the old path"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module("fsdp2_strategy.config.aliases"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
