"""Ask pip which versions it would install of this package and of each engine or trainer of .ci/resolve.txt.

Input: the rows of .ci/resolve.txt, a wheel of the working tree, and the package index. Output: a Markdown table for
docs/versions.md, with the reason of each row that does not resolve, and runs/resolve.json. The exit status is 1 if a
row does not resolve. Nothing is installed: pip reads the metadata of packages, and downloads only those that have a
source distribution alone. Run by `make resolve`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-matrix/resolve"
RESULTS = ROOT / "runs/resolve.json"
PIP = "pip>=26"
"""Earlier versions of pip give up on the requirements of some engines, or download packages to read their metadata."""


@dataclass
class Result:
    """What pip chose for one row of .ci/resolve.txt."""

    name: str
    requirement: str
    python: str
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    versions: dict[str, str] = field(default_factory=dict)
    """Version by package, of all packages that pip would install."""
    conflict: str = ""
    """pip's explanation, by package, if no versions fit."""


def rows() -> dict[str, str]:
    """Return the requirement of each row, by the row's name."""
    lines = [line.partition("#")[0].split() for line in (ROOT / ".ci/resolve.txt").read_text().splitlines()]
    return {line[0]: line[1] for line in lines if line}


def pip_environment() -> dict[str, str]:
    """Return the variables for pip: constraints and local packages of this machine must not decide the versions."""
    kept = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": os.devnull}


def resolve(python: Path, wheel: Path, name: str, requirement: str) -> Result:
    """Let pip choose versions for this package and a requirement, in an empty environment."""
    version = "import platform; print(platform.python_version())"
    result = Result(name, requirement, run([python, "-c", version]).stdout.strip())
    command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    ran = run([*command, wheel, requirement])
    if ran.returncode == 0:
        chosen = [each["metadata"] for each in json.loads(ran.stdout)["install"]]
        result.versions = {canonical(each["name"]): each["version"] for each in chosen}
    else:
        result.conflict = explanation(ran.stderr)
    return result


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a command; return its status and output."""
    return subprocess.run(command, env=pip_environment(), capture_output=True, text=True, check=False)


def explanation(errors: str) -> str:
    """Return the part of pip's errors that names the packages whose requirements conflict, in one line."""
    errors = errors.partition("The conflict is caused by:")[2].partition("\n\n")[0] or errors
    found = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "; ".join(found)[-600:]


def canonical(name: str) -> str:
    """Return a package's name in the form in which indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_of(requirement: str) -> str:
    """Return the name of the package that a requirement is about."""
    return canonical(re.split(r"[^\w.-]", requirement)[0])


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    found = ["| With | Version | torch | transformers | Packages | Python | Date |", "|---" * 7 + "|"]
    for result in results:
        if result.conflict:
            cells = [f"`{result.requirement}`", f"does not resolve: {result.conflict}", "", ""]
        else:
            names = (project_of(result.requirement), "torch", "transformers")
            cells = [*(result.versions.get(name, "") for name in names), str(len(result.versions))]
        found.append(f"| {' | '.join([result.name, *cells, result.python, result.date])} |")
    return "\n".join(found)


def main() -> int:
    """Resolve the named rows, or all; return 1 if one does not resolve."""
    declared = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(declared)}; none for all")
    names = parser.parse_args().names or list(declared)
    if unknown := set(names) - set(declared):
        parser.error(f"no row is called {', '.join(sorted(unknown))}, expected some of {', '.join(declared)}")
    python = ENVIRONMENT / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PIP], check=True)
    with tempfile.TemporaryDirectory() as folder:
        build = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
        subprocess.run(build, env=pip_environment(), check=True)
        (wheel,) = Path(folder).iterdir()
        results = []
        for name in names:
            sys.stdout.write(f"=== {name}: {declared[name]}\n")
            sys.stdout.flush()
            results.append(resolve(python, wheel, name, declared[name]))
    kept = {each["name"]: each for each in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([*(kept | {each.name: asdict(each) for each in results}).values()], indent=2) + "\n")
    sys.stdout.write(f"\n{table(results)}\n")
    return int(any(result.conflict for result in results))


if __name__ == "__main__":
    sys.exit(main())
