"""The docs are true: their code runs, their links lead somewhere, their table of fields is the configuration's."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import socket
import subprocess
import sys
import textwrap
import tomllib
import types
from operator import itemgetter
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.versions import needs_split_layers

import fsdp2_strategy
from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.cli import parser
from fsdp2_strategy.optim.groups import build_optimizer
from fsdp2_strategy.optim.schedule import build_scheduler

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(fsdp2_strategy.__path__, "fsdp2_strategy.")]
if importlib.util.find_spec("verl") is None:
    MODULES.remove("fsdp2_strategy.integrations.verl")


RANKS = {
    "sequence_parallel.md": 2,  # ranks that share sequences
    "tensor_parallel.md": 2,  # ranks that share layers, and ranks that divide experts
}
"""Pages whose code needs several ranks. All other pages run on one."""

NEEDS = {"tensor_parallel.md": needs_split_layers}
"""Marks of pages whose code needs a newer package than the lowest supported one."""

ELSEWHERE = {
    "README.md": "test_the_readme_example_runs_and_resumes",
    "index.md": "test_the_home_page_has_the_program_picture_and_figures_of_the_readme",
    "coming_from_fsdp2.md": "test_both_programs_have_the_same_losses_and_weights_also_after_a_resume",
    "coming_from_vitra.md": "test_the_code_of_the_page_on_vitra_runs",  # VITRA cannot be installed
    "ray.md": "test_the_code_of_the_page_runs",  # of test_ray.py, which has started Ray
    "rollout.md": "test_the_first_program_of_the_page_on_rollouts_runs",  # several programs, and vLLM
}
"""Pages whose code another test runs, and which one."""

SHOWN = {
    "quickstart.md": 'logging.getLogger("fsdp2_strategy")',  # would change the level of the log in later tests
    "ray.md": "class Engine:",  # the outline of a class of ray_grpo.py, whose tests run it
}
"""Python that is not run, by page and first words."""


def python_of(page):
    """Return the Python blocks of a page, after as many empty lines as give an error the page's line number."""
    text = page.read_text()
    found = re.finditer(r"^( *)```python\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, each.start(2)) + textwrap.dedent(each[2]) for each in found]


def run_blocks(blocks, page, names):
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def name_of(page):
    """Return the name of a page from docs/, or from the repository."""
    docs = ROOT / "docs"
    return page.relative_to(docs if docs in page.parents else ROOT).as_posix()


def with_code():
    return [page for page in PAGES if python_of(page)]


def run_here():
    for page in with_code():
        name = name_of(page)
        if name not in ELSEWHERE and not name.startswith("tutorials/"):  # test_tutorials.py runs these
            marks = [pytest.mark.ranks(RANKS.get(name, 1)), *([NEEDS[name]] if name in NEEDS else [])]
            yield pytest.param(name, marks=marks)


def shared(folder):
    """Return the folder that rank 0 was given."""
    import torch.distributed as dist

    given = [str(folder)]
    dist.broadcast_object_list(given)
    return given[0]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", list(run_here()))
def test_the_code_of_a_page_runs(name, tmp_path):
    os.chdir(shared(tmp_path))
    run_blocks(python_of(ROOT / "docs" / name), name, {})


def test_each_page_with_code_is_run_by_a_test():
    names = [name_of(page) for page in with_code()]
    assert {*RANKS, *NEEDS, *ELSEWHERE} <= set(names)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    for page, test in ELSEWHERE.items():
        assert f"def {test}(" in tests, page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_a_page_is_in_blocks_that_are_run(page):
    text = re.sub(r"^( *)```python\n.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in shown_blocks(text):
        is_diff = re.search(r"^[+-]", block, flags=re.MULTILINE)
        if any(is_python(part) for part in (block, *([] if is_diff else re.split(r"\n\n+", block)))):
            assert name_of(page) in SHOWN and block.startswith(SHOWN[name_of(page)]), f"not run: {block}"


def shown_blocks(text):
    """Return the blocks of a page that are fenced or indented, without their indentation."""
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?<=\n\n)((?: {4}[^\n]*\n|\n)+)", text + "\n")
    return [textwrap.dedent(block).strip("\n") for block in (*fenced, *indented) if block.strip()]


def is_python(block):
    """Return whether a block is code of Python: it can be compiled, and calls, assigns or imports something."""
    try:
        tree = ast.parse(textwrap.dedent(block))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Assign | ast.Import | ast.ImportFrom) for node in ast.walk(tree))


# --- programs of several processes -----------------------------------------------------------------------------------


def programs_of_rollout():
    """Return the blocks of the first program of the page on rollouts, and its programs of one block by file name.

    A block begins a program if its first line is the command that starts it.
    """
    own, blocks = {}, python_of(ROOT / "docs" / "rollout.md")
    for block in blocks[1:]:
        if command := re.match(r"\s*# (?:torchrun|python) .*?(\w+\.py)$", block, flags=re.MULTILINE):
            own[command[1]] = block
    return [block for block in blocks if block not in own.values()], own


@pytest.fixture
def port_of_engine():
    """Start the engine's process of the page on rollouts, at a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = programs_of_rollout()[1]["engine.py"].replace("29600", str(port))
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        yield port
        process.kill()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_first_program_of_the_page_on_rollouts_runs(port_of_engine, tmp_path):
    import torch
    from helpers.engines import fakes
    from transformers import LlamaForCausalLM

    from fsdp2_strategy.rollout import ENGINES

    os.chdir(shared(tmp_path))
    first, *others = programs_of_rollout()[0]
    names = run_blocks([first], "rollout.md", {})
    update, agreement = names["update"], names["agreement"]
    assert agreement.agrees and not update.is_full and 0 < update.sent_bytes < update.full_bytes

    def model():
        return LlamaForCausalLM(names["config"]).to(torch.bfloat16)

    calls = []
    with patch.dict(sys.modules, fakes.vllm(model, calls).modules), patch.dict(ENGINES):
        run_blocks([block.replace("29600", str(port_of_engine)) for block in others], "rollout.md", names)
    assert [call[0] for call in calls] == ["build", "start", "reload", "convert", "finish", "reset encoder", "reset"]
    found, mask = names["agreement"], names["answer_mask"].bool()
    assert found.agrees and found.metrics().keys() < names["figures"].keys()
    expected = names["advantages"].expand_as(mask)[mask]
    torch.testing.assert_close(names["objective"][mask], expected, rtol=0.05, atol=0)


@pytest.mark.full
@pytest.mark.ranks(3)
def test_the_program_with_an_engine_on_another_rank_runs():
    import torch.distributed as dist

    with patch.object(dist, "init_process_group"):  # the ranks of the test are one already
        run_blocks([programs_of_rollout()[1]["apart.py"]], "rollout.md", {})


def test_the_programs_of_the_page_on_rollouts_are_known():
    assert sorted(programs_of_rollout()[1]) == ["apart.py", "engine.py"]


@pytest.mark.ranks(1)
def test_the_code_of_the_page_on_vitra_runs(tmp_path):
    """VITRA's builder is replaced; test_peers_vitra.py runs the same code with VITRA itself."""
    import torch
    from torch import nn

    os.chdir(tmp_path)
    builder = types.ModuleType("vitra.models.vla_builder")
    builder.build_vla = lambda config: nn.Linear(config["inputs"], 1)
    config = {"inputs": 4}
    with FSDPV2Strategy(bf16=False) as strategy:
        model = strategy.prepare_model(builder.build_vla(config), is_training=True)
        checkpoint = strategy.save_ckpt(model, "ckpts")
        expected = model.weight.full_tensor().detach().clone()
    packages = {name: types.ModuleType(name) for name in ("vitra", "vitra.models")}
    with patch.dict(sys.modules, {**packages, builder.__name__: builder}):
        blocks = python_of(ROOT / "docs" / "coming_from_vitra.md")
        run_blocks(blocks, "coming_from_vitra.md", {"config": config, "checkpoint": checkpoint})
    assert torch.equal(torch.load("weights.pt")["weight"], expected)


def shortened_readme():
    """Return the program of the README with a tenth of its data."""
    [code] = python_of(ROOT / "README.md")
    assert code.count("4800") == 2 and code.count("% 20 ") == 1
    return code.replace("4800", "480").replace("% 20 ", "% 4 ")


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_readme_example_runs_and_resumes(tmp_path):
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    os.chdir(shared(tmp_path))
    for resumed, steps in ((False, 40), (True, 80)):
        names = run_blocks([shortened_readme()], "README.md", {})
        assert bool(names["path"]) == resumed and names["result"].step == steps
        dist.barrier()
        assert Path("ckpts/latest").read_text() == f"global_step{steps}\n"
        assert AutoModelForCausalLM.from_pretrained("out").config.hidden_size == 64


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", ["README.md", "docs/checkpoints.md"])
def test_the_loops_of_the_pages_run_with_accumulation(page, tmp_path):
    os.chdir(shared(tmp_path))
    blocks = python_of(ROOT / page)
    if page == "README.md":
        code = shortened_readme().replace("max_norm=1.0", "max_norm=1.0, gradient_accumulation_steps=4")
        names = run_blocks([code], page, {})
        assert names["result"].step == 10 and Path("ckpts/latest").read_text() == "global_step8\n"
        return
    [code] = [block for block in blocks if "preempted" in block]
    code = code.replace("micro_train_batch_size=2", "micro_train_batch_size=2, gradient_accumulation_steps=2")
    run_blocks([blocks[0], code], page, {})  # the first block has the imports
    assert not Path("run/global_step0").exists()


def test_the_home_page_has_the_program_picture_and_figures_of_the_readme():
    readme, home = ROOT / "README.md", ROOT / "docs" / "index.md"
    assert python_of(readme)[0].strip() == python_of(home)[0].strip()
    lines = readme.read_text().replace("](docs/", "](").splitlines()
    table = [line for line in lines[: lines.index("## Install")] if line.startswith(("|", "!["))]
    assert len(table) == 6
    assert set(table) <= set(home.read_text().splitlines())


# --- width -----------------------------------------------------------------------------------------------------------


def characters_at_1280():
    """Return how many characters of a line of code fit between the sidebars, and into each of two columns without them.

    The theme sets 1 rem to 20 pixels. A character of the widest of its fonts is 0.602 of the font's size.
    """
    lengths = re.findall(r"--([\w-]+): ([\d.]+)rem", (ROOT / "docs" / "site.css").read_text())
    rem = {name: float(length) for name, length in lengths}
    column = 1280 / 20 - 2 * rem["page-margin"]
    widths = column - 2 * rem["sidebar-width"], (column - rem["column-gap"]) / 2
    return [int((width - 2 * rem["code-padding"]) / (0.602 * rem["code-size"])) for width in widths]


def line_length(file):
    return int(re.search(r"^line-length = (\d+)", (ROOT / file).read_text(), re.MULTILINE)[1])


def test_code_on_pages_fits_into_a_window_of_1280_pixels():
    wide, narrow = characters_at_1280()
    assert wide >= line_length("pyproject.toml"), "ruff formats the Python on pages"
    assert narrow >= line_length("docs/examples/comparison/ruff.toml")
    lines = [(name_of(p), line) for p in PAGES for block in shown_blocks(p.read_text()) for line in block.splitlines()]
    assert [(page, line) for page, line in lines if len(line) > wide] == []


# --- commands --------------------------------------------------------------------------------------------------------


PASS_ON = {"docs/examples/robot.py": "docs/examples/train_vla.py", "docs/examples/ray_grpo.py": "docs/examples/grpo.py"}
"""Scripts that pass the options that they do not know to another one."""


class Parsed(Exception):
    """A script has parsed its arguments, and would now begin; contains those that it does not know."""


def text_of(page):
    """Return a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def code_of(page):
    """Return the lines of commands on a page, and what is in the code spans of its text."""
    text = re.sub(r"^( *)```python\n.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in shown_blocks(text) for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    return lines, [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text_of(page))]


def commands():
    """Return each script with arguments that a page names."""
    found = {}
    for page in PAGES:
        for code in itertools.chain(*code_of(page)):
            command = code.replace("docs/examples/run.slurm ", "")  # its arguments are a command
            called = re.search(r"\b((?:benchmarks|docs/examples)/\w+\.(?:py|slurm))\b(.*)", command)
            if called and "…" not in code:
                arguments = tuple(shlex.split(called[2], comments=True))
                script = called[1].replace(".slurm", ".py") if arguments else called[1]
                found.setdefault((script, arguments), name_of(page))
    return [pytest.param(*called, id=f"{page}: {' '.join([called[0], *called[1]])}") for called, page in found.items()]


@pytest.mark.parametrize(("script", "arguments"), commands())
def test_a_script_takes_the_arguments_of_a_command(script, arguments, monkeypatch, tmp_path):
    assert (ROOT / script).exists()
    if not arguments:
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / Path(script).parent)
    rest = unknown(script, arguments)
    if rest and script in PASS_ON:
        rest = unknown(PASS_ON[script], rest)
    assert not rest


def unknown(script, arguments):
    """Run a script up to the end of its parser, and return the arguments that it does not know."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(self, *args, **kwargs):
        raise Parsed(parse(self, *args, **kwargs)[1])

    with (
        patch.object(argparse.ArgumentParser, "parse_known_args", parse_only),
        patch.object(sys, "argv", [script, *arguments]),
        pytest.raises(Parsed) as parsed,
    ):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return parsed.value.args[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_name_what_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    lines, spans = code_of(page)
    for code in (*lines, *spans):
        for target in re.findall(r"^make ([\w-]+)", code):
            assert target in targets, code
        for module in re.findall(r"-m ((?:fsdp2_strategy|helpers)[\w.]*)", code):
            assert importlib.util.find_spec(module), code
        for path in re.findall(r"(?<![\w/.])(?:benchmarks|docs/examples|tests)/[\w/]+\.\w+", code):
            assert (ROOT / path).exists(), code
    for line in lines:
        if line.startswith("fsdp2-strategy "):
            parser._parser().parse_args(shlex.split(line, comments=True)[1:])


# --- doctests, links, tables -----------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", MODULES)
def test_doctests_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def test_doctests_exist():
    finder = doctest.DocTestFinder()
    assert sum(bool(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name))) >= 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(page)):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("name", ["coming_from_torchtitan.md", "coming_from_accelerate.md"])
def test_the_lines_and_settings_that_idioms_become_exist(name):
    page = (ROOT / "docs" / name).read_text().partition("## Batch size")[0]
    methods = {each: getattr(FSDPV2Strategy, each) for each in dir(FSDPV2Strategy) if not each.startswith("_")}
    attributes = {*methods, "world_size", "accumulated_gradient", "config"}
    assert set(re.findall(r"\bstrategy\.(\w+)", page)) <= attributes
    calls = [*filter(callable, methods.values()), build_optimizer, build_scheduler]
    parameters = {parameter for call in calls for parameter in inspect.signature(call).parameters}
    known = {field.name for field in dataclasses.fields(StrategyConfig)} | attributes | parameters | {"from_pretrained"}
    here = "".join(re.findall(r"^\| [^|]+ \| ([^|]+) \|$", page.partition("## Keys")[2], re.MULTILINE))
    settings = set(re.findall(r"`(\w+)[`=(]", here))
    assert settings <= known
    assert len(settings) > 20 or "## Keys" not in page


def test_the_picture_of_the_architecture_has_the_layers_of_the_package():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(layer.split(" | ")) for layer in contracts[0]["layers"] if layer != "__main__"]
    picture = (ROOT / "docs" / "images" / "data_path.svg").read_text()
    boxes = re.findall(r'y="(\d+)" font-weight="bold">([^<]+)<', picture)
    rows = [[names for _, names in row] for _, row in itertools.groupby(boxes, key=itemgetter(0))]
    assert [set(re.findall(r"\w+(?=\.py|/)", " ".join(row))) for row in rows] == layers


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
