"""Run a core subset of the tests with the lowest and highest versions of Python, torch and other packages.

Input: the cells of .ci/matrix.txt, the tests of .ci/matrix_tests.txt, and the interpreters of ``MATRIX_PYTHONS``, by
default those of python3.11, python3.12 and python3.13 that run. Output: a virtual environment of each cell in
.venv-matrix, a Markdown table, and runs/matrix.json. A cell without an interpreter is not run. The exit status is 1 if
a cell fails, if a cell that was named on the command line cannot run, or if no cell can. Run by
`make test-matrix` and `make lowest`.

The first installation of a torch with CUDA takes gigabytes; PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can name CPU builds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-matrix"
RESULTS = ROOT / "runs/matrix.json"
PACKAGES = ("transformers", "peft", "accelerate", "av", "numpy")
"""Packages whose versions the results contain, in addition to those of Python and torch."""


@dataclass(frozen=True)
class Cell:
    """One combination of versions, as .ci/matrix.txt declares it."""

    python: str
    torch: str
    packages: str
    """Versions of all other packages: ``lowest`` or ``newest``."""

    def __post_init__(self) -> None:
        if self.packages not in ("lowest", "newest"):
            raise SystemExit(f"cannot read .ci/matrix.txt: packages are {self.packages!r}, expected lowest or newest")

    @property
    def name(self) -> str:
        """Its name on the command line and in .venv-matrix."""
        return f"{self.python}-{self.torch}-{self.packages}"


@dataclass
class Result:
    """The outcome of a cell, with the versions that were installed."""

    cell: str
    status: str
    """``passed``, ``failed`` or ``not run``."""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    """Of the tests, without the installation."""
    reason: str = ""
    """Why it did not run, or the names of the tests that failed."""


def lines(name: str) -> list[list[str]]:
    """Return the words of each line of a file of this folder, without comments."""
    rows = [line.partition("#")[0].split() for line in (ROOT / ".ci" / name).read_text().splitlines()]
    return [row for row in rows if row]


def cells() -> list[Cell]:
    """Return the cells of the matrix."""
    return [Cell(*row) for row in lines("matrix.txt")]


def interpreters() -> dict[str, str]:
    """Return the first interpreter of each version of Python that runs: command by version."""
    found: dict[str, str] = {}
    for command in os.environ.get("MATRIX_PYTHONS", "python3.11 python3.12 python3.13").split():
        if shutil.which(command) is None:
            continue
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        ran = subprocess.run([command, "-c", code], capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            found.setdefault(ran.stdout.strip(), command)
    return found


def commit() -> str:
    """Return the commit, followed by ``+`` if tracked files differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode == 0
    return head.stdout.strip() + "+" * (not clean)


def install(cell: Cell, interpreter: str) -> Path:
    """Create the cell's environment, or bring it up to date; return its interpreter."""
    python = ENVIRONMENTS / cell.name / "bin/python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", ENVIRONMENTS / cell.name], check=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}  # the cell decides, not a constraint of this machine
    # torch first: what the next command installs must not replace it by a newer one that takes gigabytes.
    subprocess.run([*pip, f"torch=={cell.torch}"], cwd=ROOT, env=environment, check=True)
    bounds = ["--constraint", ".ci/lowest.txt"] if cell.packages == "lowest" else ["--upgrade", "transformers"]
    command = [*pip, f"torch=={cell.torch}", *bounds, "--editable", ".[dev]"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions of Python, torch and the `PACKAGES` in an environment."""
    code = (
        "import json, platform, sys; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))"
    )
    ran = subprocess.run([python, "-c", code, "torch", *PACKAGES], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def run(cell: Cell, command: str) -> Result:
    """Run the tests in one cell."""
    try:
        python = install(cell, command)
    except subprocess.CalledProcessError as error:
        return Result(cell.name, "failed", commit=commit(), reason=f"not installed: {error}")
    result = Result(cell.name, "failed", commit=commit(), versions=versions(python))
    report = ENVIRONMENTS / cell.name / "report.xml"
    report.unlink(missing_ok=True)
    tests = [row[0] for row in lines("matrix_tests.txt")]
    started = time.monotonic()
    options = ["-n", "2", "--dist", "loadgroup", "--junitxml", report]
    ran = subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT, check=False)
    result.minutes = round((time.monotonic() - started) / 60, 1)
    count(report, result)
    if ran.returncode == 0:
        result.status = "passed"
    elif not result.reason:
        result.reason = f"pytest ended with status {ran.returncode}"
    return result


def count(report: Path, result: Result) -> None:
    """Add the numbers and the failed tests of pytest's report to a result."""
    for test in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        outcomes = {child.tag for child in test}
        if outcomes & {"failure", "error"}:
            result.failed += 1
            result.reason += f"{', ' if result.reason else ''}{test.get('classname')}::{test.get('name')}"
        elif "skipped" in outcomes:
            result.skipped += 1
        else:
            result.passed += 1


def save(results: list[Result]) -> None:
    """Write the results to `RESULTS`, and keep those of cells that did not run now."""
    kept = {entry["cell"]: entry for entry in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    kept |= {result.cell: asdict(result) for result in results if result.status != "not run"}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(list(kept.values()), indent=2) + "\n")


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    rows = ["| Cell | Versions | Status | Passed | Failed | Skipped | Minutes | Date | Commit |", "|---" * 9 + "|"]
    for result in results:
        found = ", ".join(f"{name} {number}" for name, number in result.versions.items())
        status = f"{result.status}: {result.reason}" if result.reason else result.status
        numbers = f"{result.passed} | {result.failed} | {result.skipped} | {result.minutes}"
        rows.append(f"| {result.cell} | {found} | {status} | {numbers} | {result.date} | {result.commit} |")
    return "\n".join(rows)


def main() -> int:
    """Run the named cells, or all; return 1 if one failed."""
    declared = {cell.name: cell for cell in cells()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="cell", help=f"one of {', '.join(declared)}; none for all")
    parser.add_argument("--remove", action="store_true", help="delete each environment once its tests have run")
    arguments = parser.parse_args()
    if unknown := set(arguments.cells) - set(declared):
        parser.error(f"no cell is called {', '.join(sorted(unknown))}, expected some of {', '.join(declared)}")
    found, results = interpreters(), []
    for name in arguments.cells or declared:
        cell = declared[name]
        if cell.python not in found:
            reason = f"no interpreter of Python {cell.python} in MATRIX_PYTHONS"
            results.append(Result(name, "not run", commit=commit(), reason=reason))
            continue
        sys.stdout.write(f"\n=== {name}\n")
        sys.stdout.flush()
        results.append(run(cell, found[cell.python]))
        save(results)
        if arguments.remove:
            shutil.rmtree(ENVIRONMENTS / name, ignore_errors=True)
    sys.stdout.write(f"\n{table(results)}\n")
    ran = [result for result in results if result.status != "not run"]
    complete = len(ran) == len(results) if arguments.cells else bool(ran)
    return int(not complete or any(result.status == "failed" for result in ran))


if __name__ == "__main__":
    sys.exit(main())
