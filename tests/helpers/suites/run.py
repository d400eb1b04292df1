"""Run the suites of TRL and transformers with their own trainers and with ours, and report the differences.

    make suites                       # all suites of which FSDP2_PEERS has a checkout
    make suites SUITES=trl SUITES_FLAGS='-k dpo'

A difference is a test that passes with their trainer and does not with ours. It is expected if a rule of expected.json
matches it; other differences make the command fail. Tests that fail with their own trainers, such as those that need a
network or a GPU, say nothing. Check out the tag of the installed version. All runs are on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from helpers.peers import missing

FILES = {
    "trl": ("tests/test_*_trainer.py", ("kto", "rloo")),
    "transformers": ("tests/trainer/test_trainer*.py", ("distributed", "deepspeed", "fsdp", "tpu", "parallel")),
}
"""Test files of each suite: a pattern, and parts of the names of those that are left out."""
EXPECTED = Path(__file__).with_name("expected.json")
ROOT = Path(__file__).parents[3]

Outcomes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Rule:
    """A difference that is documented."""

    suite: str
    failure: str
    """Regular expression that is searched in the last line of the error."""
    reason: str
    tests: str = "*"
    """Pattern of the names of the tests."""

    def matches(self, suite: str, test: str, failure: str) -> bool:
        """Return whether a test that failed is an example of this difference."""
        return suite in self.suite.split() and fnmatch(test, self.tests) and bool(re.search(self.failure, failure))


def rules() -> list[Rule]:
    """Return the rules of expected.json."""
    return [Rule(**row) for row in json.loads(EXPECTED.read_text())]


def differences(suite: str, theirs: Outcomes, ours: Outcomes) -> dict[str, tuple[str, str | None]]:
    """Return for each test that only their trainer passes: how ours fails, and the reason if this is expected."""
    found: dict[str, tuple[str, str | None]] = {}
    for test, (outcome, _) in theirs.items():
        own, failure = ours.get(test, ("missing", "the test did not run"))
        if outcome == "passed" and own != "passed":
            reasons = (rule.reason for rule in rules() if rule.matches(suite, test, failure))
            found[test] = failure, next(reasons, None)
    return found


def outcomes(suite: str, checkout: Path, trainers: str, flags: Sequence[str]) -> Outcomes:
    """Run the files of a suite, and return the outcome and the error of each test."""
    pattern, left_out = FILES[suite]
    files = [str(path) for path in sorted(checkout.glob(pattern)) if not any(part in path.name for part in left_out)]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "outcomes.json"
        # -P: the installed package is tested, and not the one in the checkout.
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "helpers.suites.plugin", "--no-header", "--tb=no"]
        command += ["--suite", suite, "--trainers", trainers, "--outcomes", str(written), *flags, *files]
        subprocess.run(command, cwd=checkout, env={**os.environ, **variables, "PYTHONPATH": path}, check=False)
        if not written.exists():
            raise SystemExit(f"{suite} with {trainers} trainers wrote no outcomes: see above")
        found: Outcomes = json.loads(written.read_text())
        return found


def report(suite: str, theirs: Outcomes, ours: Outcomes) -> bool:
    """Print the differences of a suite; return whether all are expected."""
    passed = sum(outcome == "passed" for outcome, _ in theirs.values())
    found = differences(suite, theirs, ours)
    print(
        f"{suite} {version(suite)}: {passed - len(found)} of the {passed} tests that pass with its trainers "
        "pass with ours"
    )
    for test, (failure, reason) in sorted(found.items(), key=lambda row: (row[1][1] is None, row)):
        print(f"  {'expected' if reason else 'UNEXPECTED'}: {test}\n    {reason or failure.splitlines()[0][:300]}")
    return all(reason for _, reason in found.values())


def main() -> None:
    """Run the suites that are named, or all; exit with 1 if a difference is not expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(FILES)}; all by default")
    arguments, flags = parser.parse_known_args()
    is_expected = True
    for suite in arguments.suites or FILES:
        if reason := missing(suite):
            print(f"skipped: {reason} (tag v{version(suite)})")
            continue
        checkout = Path(os.environ["FSDP2_PEERS"]) / suite
        theirs, ours = (outcomes(suite, checkout, trainers, flags) for trainers in ("published", "ours"))
        is_expected &= report(suite, theirs, ours)
    raise SystemExit(0 if is_expected else 1)


if __name__ == "__main__":
    main()
