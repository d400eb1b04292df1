"""Kills at random moments of saves, commits, rotations, loads and exports, in all layouts, lose nothing.

`make soak` goes on with the same rounds until its file of counts has a thousand kills.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.full
@pytest.mark.timeout(900)
def test_random_kills_lose_nothing_and_the_counts_accumulate(tmp_path):
    counts = tmp_path / "kills.json"
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    for kills in (3, 20):
        command = [sys.executable, "-m", "helpers.soak", "--kills", str(kills), "--counts", str(counts)]
        env = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=env, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        results = json.loads(counts.read_text())
        assert results["kills"] == kills and not results["lost"]
    assert [run["kills"] for run in results["runs"]] == [3, 17] and len(results["hit"]) == 6
