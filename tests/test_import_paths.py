"""Public names: each has one import path, and an import loads only what it needs."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2_strategy
from fsdp2_strategy import errors

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "fsdp2_strategy": """
        FSDPV2Strategy StrategyConfig StepResult FSDP2StrategyError EMA FSDPadaptOptimizer is_mp_optimizer
        ModelOptimPair ModelOrModelOptimPair manual_transformer_cls_names_to_wrap explain find_blocks build_mesh
        shard_model init_on_meta load_weights build_optimizer build_scheduler backward optimizer_step clip_grad_norm
        unwrap_model save_checkpoint load_checkpoint list_checkpoints verify_checkpoint save_model stream_weights
        weight_checksums token_log_probs linear_log_probs ResumableLoader""",
    "fsdp2_strategy.data": "ResumableLoader GlobalOrder EpisodeOrder MixtureOrder",
    "fsdp2_strategy.model": "offload reload is_offloaded",
    "fsdp2_strategy.parallel": "shard_sequence record_routing replay_routing",
    "fsdp2_strategy.rollout": """
        stream_weights stream_adapter weight_checksums TensorDifference TransformersEngine VLLMEngine SGLangEngine
        RemoteEngine serve ENGINES check_engine_agreement importance_inputs sampled_log_probs""",
    "fsdp2_strategy.integrations.lightrft": "get_strategy LightRFTStrategy",
    "fsdp2_strategy.integrations.trl": "with_fsdp2 TrainerLayout",
    "fsdp2_strategy.integrations.lerobot": "LeRobotDataset LeRobotLayout save_policy register_policy",
    "fsdp2_strategy.integrations.vitra": """
        VLAFSDPStrategy VLAMetrics vla_parameter_groups split_modality_collator MultiGroupLRScheduler""",
    "fsdp2_strategy.cli": "main",
}
NEEDS_AN_EXTRA = {"LeRobotDataset": "pyarrow"}
IMPORT = re.compile(r"from (fsdp2_strategy[\w.]*) import (\([^)]*\)|[^\n]+)")


def lazy_packages():
    """Return the packages whose names are imported when they are first used."""
    for path in sorted((ROOT / "fsdp2_strategy").rglob("__init__.py")):
        if "lazy_imports(" in path.read_text():
            yield ".".join(path.parent.relative_to(ROOT).parts), path


def documented():
    """Return what the docs and examples import: (module, name)."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    found = set()
    for page in pages:
        for module, text in IMPORT.findall(page.read_text()):
            names = re.sub(r"#[^\n]*", "", text).strip("()`. ")
            found |= {(module, name.split(" as ")[0].strip("`. ")) for name in names.replace("\n", " ").split(",")}
    return sorted((module, name) for module, name in found if name.isidentifier())


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_has_its_public_names(package):
    module = importlib.import_module(package)
    for name in PUBLIC[package].split():
        if name in NEEDS_AN_EXTRA:
            pytest.importorskip(NEEDS_AN_EXTRA[name])
        assert not inspect.ismodule(getattr(module, name)), name


def test_the_root_has_few_names():
    assert len(fsdp2_strategy.__all__) <= 45
    assert sorted(fsdp2_strategy.__all__) == sorted([*PUBLIC["fsdp2_strategy"].split(), "TrainingStrategy"])


def test_every_error_is_in_one_module():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) > 10 and all(issubclass(each, Exception) for each in classes)


@pytest.mark.parametrize(("package", "path"), list(lazy_packages()), ids=lambda value: str(value).rpartition("/")[2])
def test_the_types_of_lazy_names_are_those_of_the_table(package, path):
    tree = ast.parse(path.read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.asname: node.module for node in block.body for alias in node.names}
    table = importlib.import_module(package)._MODULE_OF
    full = {name: at if at.startswith("fsdp2_strategy.") else f"{package}.{at}" for name, at in table.items()}
    assert typed == full and list(table) == sorted(table)


def test_what_docs_and_examples_import_is_importable():
    imports = documented()
    assert len(imports) > 25
    for module, name in imports:
        if name in NEEDS_AN_EXTRA:
            pytest.importorskip(NEEDS_AN_EXTRA[name])
        package = importlib.import_module(module)
        assert hasattr(package, name) or importlib.import_module(f"{module}.{name}"), f"{name} of {module}"


def test_a_star_import_gives_what_is_listed_and_nothing_else():
    names = {}
    exec("from fsdp2_strategy import *", names)
    del names["__builtins__"]
    assert sorted(names) == sorted(fsdp2_strategy.__all__)
    assert set(fsdp2_strategy.__all__) <= set(dir(fsdp2_strategy))
    with pytest.raises(AttributeError, match="has no attribute 'FSDPV3Strategy'"):
        _ = fsdp2_strategy.FSDPV3Strategy


@pytest.mark.full
def test_the_package_works_without_its_sources(tmp_path):
    """An installation may have compiled files only."""
    code = f"""
import compileall, pathlib, shutil
shutil.copytree({str(ROOT / "fsdp2_strategy")!r}, {str(tmp_path / "fsdp2_strategy")!r})
compileall.compile_dir({str(tmp_path)!r}, quiet=1, legacy=True)
for path in pathlib.Path({str(tmp_path)!r}).rglob("*.py"):
    path.unlink()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import fsdp2_strategy; print(fsdp2_strategy.__file__, fsdp2_strategy.FSDPV2Strategy.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "fsdp2_strategy" / "__init__.pyc"), "FSDPV2Strategy"]


@pytest.mark.parametrize("module", ["fsdp2_strategy", "fsdp2_strategy.cli", "fsdp2_strategy.integrations.lerobot"])
def test_a_light_import_loads_no_torch(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'pyarrow', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def imported_by(code):
    """Return the modules that a program of one line has imported at its end."""
    program = f"import sys; {code}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


TORCH = "import torch, torch.distributed.checkpoint; from torch.distributed.fsdp import fully_shard"
STRATEGY = "from fsdp2_strategy import FSDPV2Strategy"


@pytest.mark.full
def test_the_strategy_loads_neither_features_nor_engines_nor_other_systems():
    added = imported_by(STRATEGY) - imported_by(TORCH)
    assert "fsdp2_strategy.checkpoint.save" in added
    others = ("parallel", "rollout", "integrations", "cli")
    assert not [name for name in added if name.startswith(tuple(f"fsdp2_strategy.{other}" for other in others))]
    assert not {name.partition(".")[0] for name in added} & {"transformers", "peft", "accelerate", "datasets", "wandb"}
    assert not [name for name in added if name.startswith(("torch._dynamo", "torch._inductor"))]


@pytest.mark.full
def test_the_strategy_costs_little_more_to_import_than_what_it_uses_of_torch():
    """CPU time, of all threads; the least of some runs, because other tests use the machine."""

    def seconds(code):
        program = f"import time; {code}; print(time.process_time())"
        return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)

    torch = ours = math.inf
    for _ in range(12):
        torch, ours = min(torch, seconds(TORCH)), min(ours, seconds(STRATEGY))
        if ours <= 1.3 * torch:
            break
    assert ours <= 1.3 * torch, f"{ours:.2f} s, and {torch:.2f} s for torch alone"
