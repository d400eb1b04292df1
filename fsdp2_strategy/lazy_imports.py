"""Import the public names of a package when they are first used (PEP 562).

Input: the module of each name. Output: ``__getattr__`` and ``__dir__`` of the package. With them, importing a package
imports neither torch nor what only some users need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_imports(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], Iterable[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: ``__name__`` of the package.
        module_of: the module of each public name, relative to the package or with its full path.
    """

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = module_of[name]
        value = getattr(import_module(path if path.startswith("fsdp2_strategy.") else f"{package}.{path}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *module_of})
