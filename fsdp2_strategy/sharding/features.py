"""Import code of the layers above: features of `parallel` that a setting turns on, and what integrations register.

Input: the name of a module of `parallel`. Output: the module. These are the only imports of `parallel` and
`integrations` in this package; a model without a feature does not load it, and no integration is known by name.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any


def feature(name: str) -> Any:
    """Return a module of `parallel`, such as "tensor.plan"."""
    return import_module(f"fsdp2_strategy.parallel.{name}")


@cache
def load_policies() -> None:
    """Import the module ``policies`` of each integration that has one: it registers the policies of its system."""
    package = import_module("fsdp2_strategy.integrations")
    for integration in pkgutil.iter_modules(package.__path__):
        # The integration itself is imported only if it has this module: it may import its system.
        modules = pkgutil.iter_modules([f"{package.__path__[0]}/{integration.name}"])
        if "policies" in {module.name for module in modules}:
            import_module(f"{package.__name__}.{integration.name}.policies")
