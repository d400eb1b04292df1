"""Find the published code of other systems, for tests that run against it; nothing of it is part of this repository.

LeRobot is the package of the registry, which `make peers` installs; a checkout in `FSDP2_PEERS` takes its place, for
tests of what the newest package lacks. LightRFT and VITRA have no package, and those of TRL and transformers lack their
tests: `FSDP2_PEERS` names a folder with a checkout of each. Without it, the tests of these systems are skipped.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

CHECKOUTS = {
    "lightrft": "opendilab/LightRFT",
    "vitra": "microsoft/VITRA",
    "trl": "huggingface/trl",
    "transformers": "huggingface/transformers",
}
"""Folder within FSDP2_PEERS, and the repository that it is a checkout of."""


def missing(system: str) -> str:
    """Return why there is no checkout of a system; "" if there is one."""
    named = os.environ.get("FSDP2_PEERS")
    if named and (Path(named) / system).is_dir():
        return ""
    problem = f"{named} has no folder {system}" if named else "FSDP2_PEERS is not set"
    return f"{CHECKOUTS[system]} is not run: {problem}. Set it to a folder with a checkout in {system}/"


def peer(path: str) -> Path:
    """Return a path within the checkout of a system, whose name it begins with; skip the test if there is none."""
    if reason := missing(path.partition("/")[0]):
        pytest.skip(reason)
    return Path(os.environ["FSDP2_PEERS"]) / path


def lerobot_package() -> Path:
    """Return the folder of the installed LeRobot; skip the test if it is not installed."""
    spec = importlib.util.find_spec("lerobot")
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        pytest.skip("LeRobot is not installed: needs the environment of `make peers`")
    return Path(next(iter(locations)))


def skip_without_lerobot() -> None:
    """Skip a module of tests where LeRobot is not installed; ``benchmarks/lerobot.py`` has its name."""
    spec = importlib.util.find_spec("lerobot")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("LeRobot is not installed: needs the environment of `make peers`", allow_module_level=True)


LACKS_ACCELERATOR = (
    "the installed LeRobot has no lerobot.distributed: needs version 0.6.2, or FSDP2_PEERS with a checkout of "
    "huggingface/lerobot in lerobot/"
)


def has_accelerator() -> bool:
    """Return whether the installed LeRobot is version 0.6.2 or newer, which declares units and shards policies."""
    return importlib.util.find_spec("lerobot.distributed") is not None
