"""Name the command that installs an optional package, where an import of it fails.

Input: what the import is for. Output: a `MissingPackageError` in place of Python's `ModuleNotFoundError`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2_strategy.errors import MissingPackageError

EXTRAS = {
    "accelerate": "trl",
    "aiohttp": "lerobot",
    "av": "lerobot",
    "fsspec": "lerobot",
    "peft": "peft",
    "pyarrow": "lerobot",
    "tensorboard": "tracking",
    "trl": "trl",
    "wandb": "tracking",
}
"""For each optional module, the extra of this package that installs it."""

PACKAGES = {
    "lerobot": "lerobot>=0.6.1,<0.7",
    "sglang": "sglang",
    "verl": "verl>=0.9.1,<0.10",
    "vllm": "vllm",
}
"""Packages in which this one runs, or which it runs, and which no extra installs."""


@contextmanager
def needed_to(action: str) -> Iterator[None]:
    """Raise MissingPackageError if an import in this block lacks an optional package.

    Args:
        action: what the import is for, as in "read LeRobot's data sets".

    Raises:
        MissingPackageError: the package is not installed; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS and name not in PACKAGES:
            raise
        raise missing_package(name, action) from error


def check_installed(name: str, action: str) -> None:
    """Raise MissingPackageError unless an optional package can be imported, without importing it."""
    if importlib.util.find_spec(name) is None:
        raise missing_package(name, action)


def missing_package(name: str, action: str) -> MissingPackageError:
    """Return the error for a package that is not installed."""
    extra = EXTRAS.get(name)
    wanted = f"the extra {extra!r}" if extra else "it"
    return MissingPackageError(
        f"cannot {action}: the package {name} is not installed, expected {wanted}. {install_command(name)}."
    )


def install_command(name: str) -> str:
    """Return a sentence without its period: how to install an optional package."""
    what = f"fsdp2_strategy[{EXTRAS[name]}]" if name in EXTRAS else PACKAGES[name]
    return f"Run pip install '{what}'"
