"""Import paths: what is public is importable from the root, and old paths lead to the new modules."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import fsdp2_strategy
from fsdp2_strategy import checkpoint, config, data, errors, rollout, tracking, vla
from fsdp2_strategy.import_paths import MOVED

ROOT = Path(__file__).parent.parent
NEEDS_AN_EXTRA = {"fsdp2_strategy.lerobot", "fsdp2_strategy.lerobot.generate"}
OF_ANOTHER_SYSTEM = {  # the names are those of that system
    "fsdp2_strategy.compat.lightrft",
    "fsdp2_strategy.compat.transformers",
}
IMPORT = re.compile(r"from (fsdp2_strategy[\w.]*) import (\([^)]*\)|[^\n]+)")


def documented():
    """Return what the docs and examples import: (module, name)."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    found = set()
    for page in pages:
        for module, text in IMPORT.findall(page.read_text()):
            names = re.sub(r"#[^\n]*", "", text).strip("()`. ")
            found |= {(module, name.split(" as ")[0].strip("`. ")) for name in names.replace("\n", " ").split(",")}
    return sorted((module, name) for module, name in found if name.isidentifier())


def test_every_error_is_importable_from_the_root_and_listed():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) > 10
    for each in classes:
        assert getattr(fsdp2_strategy, each.__name__) is each and each.__name__ in fsdp2_strategy.__all__


@pytest.mark.parametrize("package", [checkpoint, config, data, rollout, tracking, vla], ids=lambda p: p.__name__)
def test_what_a_package_offers_the_root_offers(package):
    for name in package.__all__:
        assert getattr(fsdp2_strategy, name) is getattr(package, name) and name in fsdp2_strategy.__all__


def test_what_docs_and_examples_import_is_importable_from_the_root():
    imports = documented()
    assert len(imports) > 25
    for module, name in imports:
        package = importlib.import_module(module)
        value = getattr(package, name) if hasattr(package, name) else importlib.import_module(f"{module}.{name}")
        if module not in NEEDS_AN_EXTRA | OF_ANOTHER_SYSTEM and not inspect.ismodule(value):
            assert getattr(fsdp2_strategy, name, None) is value, f"{name} of {module}"


def test_a_star_import_gives_what_is_listed_and_nothing_else():
    names = {}
    exec("from fsdp2_strategy import *", names)
    del names["__builtins__"]
    assert sorted(names) == fsdp2_strategy.__all__ == sorted(fsdp2_strategy.__all__)
    assert set(fsdp2_strategy.__all__) <= set(dir(fsdp2_strategy))
    with pytest.raises(AttributeError, match="has no attribute 'FSDPV3Strategy'"):
        _ = fsdp2_strategy.FSDPV3Strategy


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_module_of_the_new_path(old):
    path = f"fsdp2_strategy.{old}"
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module(path.rpartition(".")[0])  # which may have moved, too
    sys.modules.pop(path, None)
    with pytest.warns(DeprecationWarning, match=f"{path} was renamed to fsdp2_strategy.{MOVED[old]}; "):
        module = importlib.import_module(path)
    assert module is sys.modules[f"fsdp2_strategy.{MOVED[old]}"]
    assert module.__spec__.name == module.__name__ == f"fsdp2_strategy.{MOVED[old]}"


def test_a_path_that_is_a_package_now_has_the_names_of_the_module_that_it_was():
    from fsdp2_strategy import compat
    from fsdp2_strategy.config import aliases

    for name in ("read_mapping", "resolve_aliases", "split_arguments"):
        with pytest.warns(DeprecationWarning, match=f"compat.{name} was moved to fsdp2_strategy.config.aliases"):
            assert getattr(compat, name) is getattr(aliases, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = compat.nothing


@pytest.mark.filterwarnings("ignore:fsdp2_strategy:DeprecationWarning")
def test_a_path_below_an_old_one_moves_with_it():
    from fsdp2_strategy.vla.lerobot import generate as old
    from fsdp2_strategy.vla.lerobot.generate import DatasetWriter

    from fsdp2_strategy.lerobot import generate as new

    assert old is new and DatasetWriter is new.DatasetWriter


def test_no_module_has_a_moved_path():
    modules = {name for _, name, _ in pkgutil.walk_packages(fsdp2_strategy.__path__, "fsdp2_strategy.")}
    assert not modules & {f"fsdp2_strategy.{old}" for old in MOVED}
    assert {f"fsdp2_strategy.{new}" for new in MOVED.values()} <= modules


@pytest.mark.parametrize("module", ["fsdp2_strategy", "fsdp2_strategy.cli", "fsdp2_strategy.lerobot"])
def test_a_light_import_loads_no_torch(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'pyarrow', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_functions_that_share_a_name_with_an_old_module_stay_functions():
    import fsdp2_strategy.model.offload
    import fsdp2_strategy.sharding.explain

    assert inspect.isfunction(fsdp2_strategy.offload) and inspect.isfunction(fsdp2_strategy.explain)
