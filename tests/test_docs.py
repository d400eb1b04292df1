"""The docs are true: their code runs, their links lead somewhere, their table of fields is the configuration's."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
from pathlib import Path

import pytest
from helpers.versions import needs_split_layers

import fsdp2_strategy
from fsdp2_strategy import StrategyConfig
from fsdp2_strategy.data import ResumableLoader

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(fsdp2_strategy.__path__, "fsdp2_strategy.")]
if importlib.util.find_spec("verl") is None:
    MODULES.remove("fsdp2_strategy.compat.verl")


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "page",
    [
        "quickstart.md",
        "weights.md",
        "metrics.md",
        "data.md",
        "vla.md",
        "lerobot.md",
        "multi_node.md",
        "coming_from_lerobot.md",
        "coming_from_accelerate.md",
        "coming_from_lightrft.md",
        "coming_from_trl.md",
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path):
    os.chdir(tmp_path)
    names, found = {}, snippets(ROOT / "docs" / page)
    assert found, "a page that is listed here has code"
    for snippet in found:
        exec(compile(snippet, page, "exec"), names)


@pytest.mark.ranks(2)
def test_the_first_program_of_the_page_on_rollouts_runs():
    names = {}
    exec(compile(snippets(ROOT / "docs" / "rollout.md")[0], "rollout.md", "exec"), names)
    update, agreement = names["update"], names["agreement"]
    assert agreement.agrees and not update.is_full and 0 < update.sent_bytes < update.full_bytes


@pytest.mark.ranks(2)
@needs_split_layers
def test_the_code_of_the_page_on_split_layers_runs():
    names = {}
    for snippet in snippets(ROOT / "docs" / "tensor_parallel.md"):
        exec(compile(snippet, "tensor_parallel.md", "exec"), names)
    assert names["result"].stepped
    assert names["policy"].blocks[0].down.weight.to_local().shape == (8, 16)


@pytest.mark.ranks(2)
def test_the_readme_example_runs(tmp_path):
    import torch
    import torch.distributed as dist
    from helpers.models import build, tokens

    directory = [str(tmp_path)]
    dist.broadcast_object_list(directory)
    os.chdir(directory[0])
    ids = [tokens(torch.Generator().manual_seed(i), batch=1)[0] for i in range(100)]
    loader = ResumableLoader([{"input_ids": i, "labels": i} for i in ids], 2)
    names = {"model": build("llama"), "loader": loader}
    (snippet,) = snippets(ROOT / "README.md")
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["result"].step == 50
    dist.barrier()
    assert Path("ckpts/latest").read_text() == "global_step50\n"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", MODULES)
def test_doctests_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def test_doctests_exist():
    finder = doctest.DocTestFinder()
    assert sum(bool(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name))) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_that_a_page_names_exist(page):
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").glob("*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in tests, name


def test_the_table_of_fields_is_the_configurations():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, flags=re.MULTILINE)
    shown = {True: "true", False: "false", None: "none"}
    expected = [
        (f.name, shown.get(f.default, str(f.default).replace("'", '"')) if not isinstance(f.default, int | float)
         or isinstance(f.default, bool) else str(f.default))
        for f in dataclasses.fields(StrategyConfig)
        if f.name != "extra"
    ]  # fmt: skip
    assert [(name, default.strip()) for name, default in rows] == expected


def test_the_public_names_are_real():
    assert all(hasattr(fsdp2_strategy, name) for name in fsdp2_strategy.__all__)
    assert fsdp2_strategy.__all__ == sorted(fsdp2_strategy.__all__)


def test_examples_and_benchmarks_write_under_runs_by_default():
    for script in [*(ROOT / "docs" / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        text = script.read_text()
        defaults = re.findall(r'add_argument\("--[\w-]+",[^\n]*default=([^\n]*)', text)
        inside = [default for default in defaults if re.search(r'"images"|"results"|\.parent\b', default)]
        assert not inside, f"{script.name} writes into the working tree: {inside}"
        assert not re.search(r"(draw|savefig|write_text|merge)\([^\n]*(__file__|EXAMPLES)", text), script.name
    assert 'OUT = Path("runs/benchmarks")' in (ROOT / "benchmarks" / "harness.py").read_text()
