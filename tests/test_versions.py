"""Which versions of other packages the package accepts when it is imported."""

from __future__ import annotations

import tomllib
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fsdp2_strategy import versions

PROJECT = Path(__file__).parents[1]


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


def test_a_version_that_is_not_tested_is_a_warning(monkeypatch):
    monkeypatch.setattr(versions, "version", {"torch": "2.14.0", "transformers": "5.99.1"}.__getitem__)
    with pytest.warns(UserWarning, match="not tested with torch 2.14.0"):
        versions.check_versions()
    monkeypatch.setattr(versions, "version", {"torch": "2.13.0+cpu", "transformers": "5.5.4"}.__getitem__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_versions()


def test_the_bounds_are_those_of_the_project_file():
    dependencies = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = {name: ".".join(map(str, numbers)) for name, numbers in versions.LOWEST.items()}
    first = {name: ".".join(map(str, numbers)) for name, numbers in versions.NOT_TESTED.items()}
    assert f"torch>={lowest['torch']},<{first['torch']}" in dependencies
    assert f"transformers>={lowest['transformers']}" in dependencies
    pinned = (PROJECT / ".ci/lowest.txt").read_text().splitlines()
    assert f"transformers=={lowest['transformers']}" in pinned
