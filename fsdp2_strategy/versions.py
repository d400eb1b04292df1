"""Check the versions of torch and transformers when the package is imported.

Input: the metadata of the installed packages. Output: an error, or a warning on rank 0 for a version that is not tested
yet. pyproject.toml has the same lower bounds; a package that was installed without its dependencies would otherwise
fail later, with an error about a name that torch or transformers lacks. There are no upper bounds: pip would refuse to
install this package next to an engine that requires a newer torch.
"""

from __future__ import annotations

import os
import re
import warnings
from importlib.metadata import PackageNotFoundError, version

LOWEST = {"torch": (2, 11), "transformers": (5, 5, 4)}
"""Lowest supported versions; `make lowest` runs the tests with the lowest transformers."""
NEWEST_TESTED = {"torch": (2, 15), "transformers": (5, 24)}
"""Newest minor versions that the matrix of docs/versions.md tests; their patch releases count as tested."""


def check_versions() -> None:
    """Raise an error if torch or transformers is too old; warn on rank 0 if it is newer than the tested versions.

    Raises:
        ImportError: a package is missing or older than in `LOWEST`.
    """
    for package, lowest in LOWEST.items():
        wanted = ".".join(map(str, lowest))
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(
                f"cannot import fsdp2_strategy: {package} is not installed, expected version {wanted} or newer. "
                f"Install it: pip install '{package}>={wanted}'."
            ) from None
        installed = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
        if installed < lowest:
            raise ImportError(
                f"cannot import fsdp2_strategy: {package} is {found}, expected {wanted} or newer. Install a newer "
                f"version: pip install '{package}>={wanted}'."
            )
        newest = NEWEST_TESTED[package]
        if installed[: len(newest)] > newest and os.environ.get("RANK", "0") == "0":
            tested = ".".join(map(str, newest))
            warnings.warn(
                f"fsdp2_strategy is not tested with {package} {found}, only with versions up to {tested}. If a call "
                f"fails on a missing name of {package}, install one of those.",
                stacklevel=2,
            )
