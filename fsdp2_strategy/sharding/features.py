"""Import a feature of `parallel` when a setting turns it on: models without it do not load it.

Input: the name of a module of `parallel`. Output: the module. This is the only import of `parallel` in this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def feature(name: str) -> Any:
    """Return a module of `parallel`, such as "tensor.plan"."""
    return import_module(f"fsdp2_strategy.parallel.{name}")
