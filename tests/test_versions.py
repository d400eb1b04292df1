"""The versions of other packages that the package accepts, and the matrix of versions that the tests run with."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fsdp2_strategy import versions

PROJECT = Path(__file__).parents[1]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    """The script that runs the matrix, with other files for its results."""
    spec = importlib.util.spec_from_file_location("matrix", PROJECT / ".ci/matrix.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "runs/matrix.json")
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path)
    return module


def project():
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def pythons_of_the_classifiers():
    return [c.rpartition(" ")[2] for c in project()["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]


def rows(heading):
    """Return the cells of a table's rows in docs/versions.md."""
    section = (PROJECT / "docs/versions.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(
    ("package", "installed", "message"),
    [
        ("torch", "2.10.1+cpu", "torch is 2.10.1.cpu, expected 2.11 or newer.*pip install 'torch>=2.11'"),
        ("transformers", "5.5.3", "transformers is 5.5.3, expected 5.5.4 or newer.*pip install 'transformers>=5.5.4'"),
        ("transformers", None, "transformers is not installed, expected version 5.5.4 or newer"),
    ],
)
def test_a_version_that_is_too_old_is_an_error_that_names_the_one_to_install(package, installed, message, monkeypatch):
    real = versions.version

    def version(name):
        if name != package:
            return real(name)
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError, match=message):
        versions.check_versions()


@pytest.mark.parametrize(("package", "installed"), [("torch", "2.99.0+cpu"), ("transformers", "5.99.1")])
def test_a_version_that_is_not_tested_is_one_warning_on_rank_0(package, installed, monkeypatch):
    newest = {name: ".".join(map(str, numbers)) for name, numbers in versions.NEWEST_TESTED.items()}
    monkeypatch.setattr(versions, "version", (newest | {package: installed}).__getitem__)
    message = f"not tested with {package} {re.escape(installed)}, only with versions up to {re.escape(newest[package])}"
    for rank in (None, "0"):
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        with pytest.warns(UserWarning, match=message) as shown:
            versions.check_versions()
        assert len(shown) == 1
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_versions()


def test_patches_of_a_tested_version_count_as_tested(monkeypatch):
    tested = {name: ".".join(map(str, (*numbers, 7))) for name, numbers in versions.NEWEST_TESTED.items()}
    for found in (tested, {"torch": "2.13.0+cpu", "transformers": "5.5.4"}):
        monkeypatch.setattr(versions, "version", found.__getitem__)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            versions.check_versions()


def test_the_bounds_are_those_of_the_project_file():
    dependencies = project()["dependencies"]
    lowest = {name: ".".join(map(str, numbers)) for name, numbers in versions.LOWEST.items()}
    for name, number in lowest.items():
        assert f"{name}>={number}" in dependencies, "an upper bound would be a conflict next to newer engines"
    pinned = (PROJECT / ".ci/lowest.txt").read_text().splitlines()
    assert f"transformers=={lowest['transformers']}" in pinned


def test_the_page_has_the_ranges_of_the_project_file():
    declared = {re.match(r"[\w-]+", d)[0]: d for d in project()["dependencies"]}
    declared["Python"] = f"Python{project()['requires-python']}"
    shown = {row[0]: f"{row[0]}{row[1].strip('`')}" for row in rows("Supported versions")}
    assert shown == {name: declared[name] for name in ("Python", "torch", "transformers")}
    highest = {row[0]: row[3] for row in rows("Supported versions")}
    for name, numbers in versions.NEWEST_TESTED.items():
        assert highest[name].startswith(".".join(map(str, numbers))), f"{name}: the page says {highest[name]}"


def test_the_matrix_covers_each_python_and_both_ends_of_torch_with_both_ends_of_other_packages(matrix):
    ends = {"{}.{}.0".format(*versions.LOWEST["torch"]), "{}.{}.0".format(*versions.NEWEST_TESTED["torch"])}
    cells = matrix.cells()
    pythons = {cell.python for cell in cells}
    assert pythons >= set(pythons_of_the_classifiers())
    assert f">={min(pythons, key=lambda p: int(p.split('.')[1]))}" == project()["requires-python"]
    for python in pythons:
        assert {cell.packages for cell in cells if cell.python == python} == {"lowest", "newest"}, python
    assert {(cell.torch, cell.packages) for cell in cells} >= {(t, p) for t in ends for p in ("lowest", "newest")}
    minors = {int(cell.torch.split(".")[1]) for cell in cells}
    assert minors >= {11, 13, 14, 15}, "the versions that engines pin are among them"


def test_the_page_has_a_row_for_each_cell_of_the_matrix_and_classifiers_are_pythons_that_passed(matrix):
    results = {row[0]: row for row in rows("Results")}
    assert list(results) == [cell.name for cell in matrix.cells()]
    passed = {name.split("-")[0] for name, row in results.items() if row[2].startswith("passed")}
    assert set(pythons_of_the_classifiers()) == passed


def test_the_tests_of_the_matrix_exist(matrix):
    tests = [row[0] for row in matrix.lines("matrix_tests.txt")]
    assert "tests/test_internals.py" in tests and len(tests) == len(set(tests))
    assert [name for name in tests if not (PROJECT / name).is_file()] == []


def test_a_cell_without_an_interpreter_is_not_run_and_an_error_if_it_was_asked_for(matrix, monkeypatch, capsys):
    monkeypatch.setenv("MATRIX_PYTHONS", "no-such-python")
    ran = []
    monkeypatch.setattr(matrix, "run", lambda cell, command: ran.append(cell) or matrix.Result(cell.name, "passed"))

    def status(*arguments):
        monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
        return matrix.main()

    name = next(cell.name for cell in matrix.cells() if cell.python == PYTHON)
    assert status() == 1 and status(name) == 1 and not ran
    assert f"| {name} |  | not run: no interpreter of Python {PYTHON}" in capsys.readouterr().out
    assert not matrix.RESULTS.exists()
    monkeypatch.setenv("MATRIX_PYTHONS", f"no-such-python {sys.executable}")
    assert status(name) == 0 and status() == 0
    assert {cell.python for cell in ran} == {PYTHON}


@pytest.mark.full
def test_the_matrix_goes_on_after_a_cell_that_fails_and_says_which_tests_did(matrix, tmp_path, monkeypatch, capsys):
    tests = tmp_path / "test_outcomes.py"
    tests.write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert 0\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    broken, failing = [cell for cell in matrix.cells() if cell.python == PYTHON][:2]
    monkeypatch.setattr(matrix, "cells", lambda: [broken, failing])

    def install(cell, command):
        if cell == broken:
            raise subprocess.CalledProcessError(1, "pip")
        (tmp_path / cell.name).mkdir()
        return Path(sys.executable)

    monkeypatch.setattr(matrix, "install", install)
    monkeypatch.setattr(
        matrix, "lines", lambda name, real=matrix.lines: real(name) if "tests" not in name else [[tests]]
    )
    monkeypatch.setenv("MATRIX_PYTHONS", sys.executable)
    monkeypatch.setattr(sys, "argv", ["matrix.py"])
    assert matrix.main() == 1
    first, second = json.loads(matrix.RESULTS.read_text())
    assert first["status"] == "failed" and first["reason"].startswith("not installed: ")
    assert (second["status"], second["passed"], second["failed"], second["skipped"]) == ("failed", 1, 1, 1)
    assert second["reason"].endswith("test_outcomes::test_wrong") and second["versions"]["python"].startswith(PYTHON)
    assert f"| {failing.name} | python {PYTHON}" in capsys.readouterr().out

    tests.write_text("def test_right(): pass\n")
    monkeypatch.setattr(sys, "argv", ["matrix.py", failing.name])
    monkeypatch.setattr(matrix, "install", lambda cell, command: Path(sys.executable))
    assert matrix.main() == 0
    first, second = json.loads(matrix.RESULTS.read_text())
    assert first["status"] == "failed" and second["status"] == "passed" and not second["reason"]


# --- next to engines and trainers -----------------------------------------------------------------------------------


@pytest.fixture
def resolver(monkeypatch):
    """The script that asks pip for versions of this package and of an engine."""
    spec = importlib.util.spec_from_file_location("resolve", PROJECT / ".ci/resolve.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "resolve", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_that_pip_finds_versions_next_to_each_engine_and_trainer(resolver):
    shown = {row[0]: row for row in rows("Next to engines and trainers")}
    assert list(shown) == list(resolver.rows())
    for name, (_, version, torch, transformers, *_) in shown.items():
        chosen = {"torch": torch, "transformers": transformers}
        assert version and all(chosen.values()), f"{name} does not resolve"
        for package, found in chosen.items():
            numbers = tuple(map(int, found.split(".")))
            newest = versions.NEWEST_TESTED[package]
            is_tested = versions.LOWEST[package] <= numbers and numbers[: len(newest)] <= newest
            assert is_tested, f"{name}: {package} {found}"


def test_an_engine_that_does_not_resolve_is_shown_with_the_requirements_that_conflict(resolver, monkeypatch, tmp_path):
    pip = tmp_path / "python"
    pip.write_text(
        "#!/bin/sh\nif [ $1 = -c ]; then echo 3.12.1; exit; fi\n"
        "echo 'ERROR: Cannot install a and b\n\nThe conflict is caused by:\n    a 1 depends on torch<2\n"
        "    b 2 depends on torch>=3\n\nTo fix this' >&2; exit 1\n"
    )
    pip.chmod(0o755)
    result = resolver.resolve(pip, tmp_path / "this.whl", "engine", "engine==1")
    assert result.conflict == "a 1 depends on torch<2; b 2 depends on torch>=3" and not result.versions
    assert "| engine | `engine==1` | does not resolve: a 1 depends on torch<2; b 2" in resolver.table([result])


def test_versions_that_pip_chooses_are_read_from_its_report(resolver, tmp_path):
    pip = tmp_path / "python"
    report = {"install": [{"metadata": {"name": n, "version": v}} for n, v in [("En_gine", "1"), ("torch", "2.15.0")]]}
    pip.write_text(f"#!/bin/sh\nif [ $1 = -c ]; then echo 3.12.1; exit; fi\necho '{json.dumps(report)}'\n")
    pip.chmod(0o755)
    result = resolver.resolve(pip, tmp_path / "this.whl", "Engine", "En_gine[all]>=1")
    assert result.versions == {"en-gine": "1", "torch": "2.15.0"} and not result.conflict
    assert "| Engine | 1 | 2.15.0 |  | 2 | 3.12.1 |" in resolver.table([result])


def test_constraints_of_this_machine_do_not_decide_what_pip_chooses(resolver, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", "/some/constraints.txt")
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels")
    chosen = resolver.pip_environment()
    assert "PIP_FIND_LINKS" not in chosen and {chosen["PIP_CONSTRAINT"], chosen["PIP_CONFIG_FILE"]} == {os.devnull}
