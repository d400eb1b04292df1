"""Where the real code of other systems lies, for tests that run against it: a folder beside the repository, or named.

`FSDP2_PEERS` names the folder. Tests skip where it is missing; nothing of it is part of this repository.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

PEERS = Path(os.environ.get("FSDP2_PEERS", Path(__file__).parents[3] / "shared" / "peers"))


def peer(path: str) -> Path:
    """Return a path within the peers' folder; skip the test where it is missing."""
    if not (PEERS / path).exists():
        pytest.skip(f"{PEERS / path} is missing: set FSDP2_PEERS to the folder with the peers' source")
    return PEERS / path


def skip_without_lerobot() -> None:
    """Skip a module of tests where LeRobot is not installed; ``benchmarks/lerobot.py`` has its name."""
    spec = importlib.util.find_spec("lerobot")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("needs the environment of `make peers`", allow_module_level=True)
