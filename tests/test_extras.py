"""An optional package that is missing: the error has the command that installs it, wherever the package is imported."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.worlds import some_rows

import fsdp2_strategy
from fsdp2_strategy.errors import ConfigError, MissingPackageError
from fsdp2_strategy.extras import EXTRAS, PACKAGES, check_installed, needed_to

ROOT = Path(__file__).parents[1]
PACKAGE = Path(fsdp2_strategy.__file__).parent
LEROBOT, TRL = "fsdp2_strategy.integrations.lerobot", "fsdp2_strategy.integrations.trl"
IMPORTS = [
    ("aiohttp", f"{LEROBOT}.remote_requests", "read LeRobot's data sets"),
    ("fsspec", f"{LEROBOT}.remote_requests", "read LeRobot's data sets"),
    ("pyarrow", f"{LEROBOT}.metadata", "read LeRobot's data sets"),
    ("pyarrow", f"{LEROBOT}.rows", "read LeRobot's data sets"),
    ("av", f"{LEROBOT}.video", "decode videos"),
    ("aiohttp", f"{LEROBOT}.dataset", "read LeRobot's data sets"),
    ("accelerate", f"{TRL}.sample_order", "run a Trainer"),
    ("accelerate", f"{TRL}.settings", "run a Trainer"),
    ("accelerate", f"{TRL}.accelerator", "run a Trainer"),
    ("accelerate", TRL, "run a Trainer"),
    ("verl", "fsdp2_strategy.integrations.verl", "run verl's workers"),
]
"""An optional package, a module that needs it, and what for."""

_LOADED_BY_USER = {"peft"}
"""Packages that are imported for objects of their own only, so they are installed."""


@pytest.mark.parametrize(("package", "module", "action"), some_rows(IMPORTS, [IMPORTS[0], IMPORTS[4], IMPORTS[-2]]))
def test_a_missing_package_names_the_command_that_installs_it(package, module, action):
    what = f"fsdp2_strategy[{EXTRAS[package]}]" if package in EXTRAS else PACKAGES[package]
    with hidden(package), pytest.raises(MissingPackageError) as caught:
        importlib.import_module(module)
    text = str(caught.value)
    assert text.startswith(f"cannot {action}: the package {package} is not installed, expected ")
    assert text.endswith(f". Run pip install '{what}'.")
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ImportError)


def test_lerobots_script_without_lerobot_says_what_to_install():
    with hidden("lerobot"), pytest.raises(MissingPackageError, match=r"Run pip install 'lerobot>=0\.6\.1,<0\.7'"):
        runpy.run_module(f"{LEROBOT}.train", run_name="__main__")


def hidden(package):
    """Hide a package from imports, and forget the modules of ours that may have imported it."""
    forgotten = {
        name: module for name, module in sys.modules.items() if not name.startswith("fsdp2_strategy.integrations")
    }
    within = {name: None for name in sys.modules if name.partition(".")[0] == package}
    return patch.dict(sys.modules, {**forgotten, **within, package: None}, clear=True)


def test_another_missing_module_is_python_own_error():
    with pytest.raises(ModuleNotFoundError) as caught, needed_to("do this"):
        importlib.import_module("fsdp2_strategy.no_such_module")
    assert not isinstance(caught.value, MissingPackageError)
    with pytest.raises(MissingPackageError, match="cannot do this: the package verl is not installed, expected it"):
        with patch("importlib.util.find_spec", lambda _: None):
            check_installed("verl", "do this")


def test_the_extras_install_the_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        # fsspec[http] brings aiohttp
        names = {"aiohttp": "fsspec"}
        assert any(each.startswith(names.get(package, package)) for each in extras[extra]), package
    assert PACKAGES["verl"] in extras["verl"]


_CHECKED = {
    "accelerate": ("trl", "accelerator.py"),
    "lerobot": ("script.py",),
    "verl": ("verl",),
    "wandb": ("trackers.py",),
}
"""Where packages are imported after a check: of the integration's package, the module `train`, or the tracker."""


def test_every_import_of_an_optional_package_is_guarded():
    required = {"torch", "transformers", "safetensors", "xxhash", "tqdm", "numpy", "yaml", "fsdp2_strategy"}
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in unguarded(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                if (
                    top not in required | set(sys.stdlib_module_names) | _LOADED_BY_USER
                    and getattr(node, "level", 0) == 0
                ):
                    found.setdefault(top, []).append(path)
    found.pop("huggingface_hub")  # transformers requires it
    assert found.keys() == _CHECKED.keys(), found
    for name, paths in found.items():
        assert all(path.name in _CHECKED[name] or path.parent.name in _CHECKED[name] for path in paths), (name, paths)


def unguarded(tree):
    """Yield the imports of a module that are not in a block of `needed_to`, nor for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        text = ast.unparse(node.items[0]) if isinstance(node, ast.With) else ""
        if text.startswith("needed_to") or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from unguarded(node)
