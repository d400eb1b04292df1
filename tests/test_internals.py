"""Private names of torch, transformers and peft: in two modules alone, and there on the versions that are installed."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2_strategy
from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh
from fsdp2_strategy.distributed import torch_internals
from fsdp2_strategy.errors import OffloadError
from fsdp2_strategy.hf import library_internals
from fsdp2_strategy.model import offload, offloading, placeholders, reload, unit_hooks
from fsdp2_strategy.model.fsdp_state import parameter_groups

PACKAGE = Path(fsdp2_strategy.__file__).parent
INTERFACES = {Path(torch_internals.__file__), Path(library_internals.__file__)}

OF_PYTHON = {"_exit", "_register_atexit", "_fields", "_typeshed"}
# Dictionaries in which every nn.Module keeps what it holds, and operations over lists of tensors.
EVERYWHERE = {"_parameters", "_buffers", "_modules", "_foreach_copy_", "_foreach_mul_", "_foreach_norm"}
# What FSDPState, FSDPParamGroup and FSDPParam call without an underscore what is private all the same.
OF_FSDP = {
    "fsdp_params", "sharded_param", "unsharded_accumulated_grad", "reset_sharded_param", "is_unsharded",
    "to_accumulated_grad_if_needed", "reduce_grads", "wait_for_unshard", "offload_to_cpu", "post_backward",
    "pre_forward", "post_forward", "mesh_info", "iter_forward_root", "orig_dtype",
}  # fmt: skip


def defined_in(trees):
    """Return the names that the package itself gives to something."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_touched(tree):
    """Return the names of attributes of others, and of modules, that a module reads or writes: (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fsdp2_strategy"):
            yield from ((node.lineno, part) for part in (node.module or "").split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, part) for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("getattr", "setattr", "hasattr", "delattr", "object"):  # patch.object
                yield node.lineno, str(node.args[1].value)


@pytest.mark.full
def test_private_names_of_other_libraries_are_touched_in_two_modules_alone():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = defined_in(tree for path, tree in trees.items() if path not in INTERFACES) | EVERYWHERE | OF_PYTHON
    own |= set(dir(builtins))
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        if path not in INTERFACES
        for line, name in names_touched(tree)
        if (is_private(name) and name not in own) or name in OF_FSDP
    ]
    assert not wrong, wrong


# Local variables of torch_internals: what a state shares with the other states of its root.
SUBJECTS = {"context", "messages"}
# Names of which each version of torch has one.
EITHER = [
    ("_fsdp_param_group", "_fsdp_param_groups"),  # until and from torch 2.12
    ("_orig_dtype", "_set_unsharded_grad_dtypes"),  # until and from torch 2.15, and so are the next ones
    ("to_accumulated_grad_if_needed", "_capture_grad_dtype_policy"),
]


def test_the_page_of_private_names_is_the_one_that_the_modules_give():
    spec = importlib.util.spec_from_file_location("private_names", PACKAGE.parent / ".ci/private_names.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run python .ci/private_names.py"
    shown = set(re.findall(r"`(\w+)`", script.page()))
    assert not OF_FSDP - shown - script.WITHOUT_UNDERSCORE
    assert {"_unsharded_param", "_orig_dtype", "_no_split_modules"} <= shown
    rows = [line.split(" | ") for line in script.page().splitlines() if line.startswith("| `")]
    without_purpose = [row[0] for row in rows if not row[-1].strip(" |") and not row[0].startswith("| `_")]
    assert not without_purpose, without_purpose


def attributes_by_argument(module):
    """Return for each name of an argument of an interface's functions the attributes that they read or write of it.

    The local variables of `SUBJECTS` count as arguments.
    """
    found = {}
    for function in ast.parse(Path(module.__file__).read_text()).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = {argument.arg for argument in function.args.args} | SUBJECTS
        arguments |= {"parameter"} if "parameters" in arguments else set()
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in arguments:
                found.setdefault(node.value.id, set()).add(node.attr)
    return found


def check_attributes(of, subjects, either=()):
    """Assert that the subjects have what the interface reads of arguments that are called so."""
    for argument, subject in subjects.items():
        for name in sorted(of.pop(argument)):
            known = [name, *(other for pair in either if name in pair for other in pair)]
            kind = type(subject)
            assert any(hasattr(subject, each) for each in known), f"{kind.__module__}.{kind.__name__} has no {name} now"


@pytest.mark.ranks(2)
def test_what_is_read_of_torchs_objects_is_there_in_this_version():
    """On a new torch this fails by the name of the attribute that has changed, and no test by a wrong gradient."""
    mesh = build_mesh()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    model(torch.randn(2, 4)).sum().backward()
    state = torch_internals.fsdp_state_of(model[0])
    (param_group,) = torch_internals.param_groups_of(state)
    parameter = torch_internals.parameters_of(param_group)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of = attributes_by_argument(torch_internals)
    for name in torch_internals.UNIT_CALLS.values():
        assert callable(getattr(type(param_group), name, None)), f"FSDPParamGroup has no method {name} any more"
    subjects = {
        "state": state,
        "param_group": param_group,
        "parameter": parameter,
        "context": state._state_ctx,
        "messages": state._comm_ctx,
        "module": model[0],
        "tensor": distribute_tensor(torch.zeros(4), mesh),
        "source": distribute_tensor(torch.zeros(4), mesh),
        "group": mesh.get_group(),
        "mesh": mesh,
        "optimizer": optimizer,
        "loader": torch.utils.data.DataLoader([1]),
    }
    check_attributes(of, subjects, either=EITHER)
    torch_internals.mark_idle(state)
    assert hasattr(dist.PrefixStore, "underlying_store") and {"host", "port"} <= set(dir(dist.TCPStore))
    assert set(of) <= {"state_or_param_group", "iterator", "operator", "function", "local", "store", "values"}, (
        f"nobody looks at these arguments: {of}"
    )


def test_what_is_taken_from_torchs_modules_is_there_in_this_version():
    assert hasattr(torch.ops.aten.add_.Tensor, "_schema") and torch_internals.schema_of(torch.ops.aten.add_.Tensor)
    one, same = torch.zeros(2), torch.zeros(2)
    assert torch_internals.storage_address(one) == torch_internals.storage_address(one[1:])
    assert torch_internals.storage_address(one) != torch_internals.storage_address(same)
    assert torch_internals.base_of(one[:1]) is one
    assert torch_internals.negated_view(torch.ones(1)).item() == -1 and not torch_internals.is_in_backward()
    for name in torch_internals.INIT_WITHOUT_OPERATIONS:
        assert callable(getattr(nn.init, name, None)), f"torch.nn.init has no {name} any more"
    with torch_internals.without_modes(), torch.device("meta"):
        assert torch.zeros(1).device.type in ("cpu", "meta")
    torch_internals.remember_device_constructors()
    torch_internals.forget_sharding_rules()
    assert isinstance(nn.BatchNorm1d(1), torch_internals.BATCH_NORMS)
    assert isinstance(nn.Conv2d(1, 1, 1), torch_internals.CONVOLUTIONS)
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    (leaf * 2).register_hook(lambda _: seen.append(torch_internals.is_in_backward()))
    product = leaf * 2
    product.register_hook(lambda _: seen.append(torch_internals.is_in_backward()))
    product.sum().backward()
    assert seen == [True]


def test_what_is_read_of_transformers_models_is_there_in_this_version():
    import transformers
    from transformers import modeling_utils

    model = build("llama")
    of = attributes_by_argument(library_internals)
    read = {*of.pop("model"), *of.pop("module", ())} - {"generate"}
    optional = {"_supports_mm_encoder_outputs"}  # of some models alone
    for name in sorted(read - optional - {"_weight_conversions"}):
        assert hasattr(model, name), f"{type(model).__name__} has no {name} in transformers {transformers.__version__}"
    for name in (library_internals.LOADING_STEP, library_internals.LAST_STEP):
        assert hasattr(modeling_utils.PreTrainedModel, name), f"PreTrainedModel has no {name} any more"
    assert set(library_internals.no_split_class_names(model)) == {"LlamaDecoderLayer"}


@pytest.mark.ranks(2)
def test_a_pass_leaves_transformers_registry_as_it_was():
    from transformers.utils import output_capturing

    model = build("llama")
    FSDPV2Strategy(config=StrategyConfig(bf16=False)).prepare_model(model)
    before = dict(output_capturing._CAN_RECORD_REGISTRY)
    hidden = model(input_ids=torch.arange(6)[None], output_hidden_states=True).hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    assert dict(output_capturing._CAN_RECORD_REGISTRY) == before


@pytest.mark.ranks(2)
def test_optimizers_of_the_process_are_watched_while_a_model_is_offloaded_and_no_longer(monkeypatch):
    from torch.optim import optimizer as torchs

    # Models of other tests may still be away in this process.
    monkeypatch.setattr(placeholders, "_offloaded", type(placeholders._offloaded)())
    monkeypatch.setattr(offloading, "_step_guard", [])
    model = build("llama")
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model, is_training=True)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(torchs._global_optimizer_pre_hooks)
    offload(model)
    with pytest.raises(OffloadError, match="the parameters of this SGD are in host memory"):
        plain.step()
    reload(model)
    plain.step()
    assert dict(torchs._global_optimizer_pre_hooks) == before


@pytest.mark.full
def test_importing_the_package_hooks_nothing_into_torch():
    import subprocess
    import sys

    code = (
        "from fsdp2_strategy import *; from torch.optim import optimizer as o; import torch.nn.modules.module as m;"
        "print(len(o._global_optimizer_pre_hooks), len(m._global_forward_hooks), len(m._global_forward_pre_hooks))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "0"]


@pytest.mark.full
def test_torchs_modules_that_are_used_by_name_are_imported_by_name():
    """In this process other libraries have imported them all."""
    import subprocess
    import sys

    names = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        chains = [ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        names |= {name for name in chains if re.fullmatch(r"torch(\.\w+)+", name) and not name.startswith("torch._C.")}
    assert "torch.float32" in names
    code = (
        "import torch; from fsdp2_strategy import init_on_meta\n"
        "import fsdp2_strategy.distributed.torch_internals\n"
        "with init_on_meta(): torch.nn.Linear(2, 2)\n"
        f"for name in {sorted(names)}:\n    eval(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- the hooks of units ---------------------------------------------------------------------------------------------


class ParamGroup:
    def __init__(self):
        self.did = []

    def unshard(self, async_op=False):
        self.did.append("gathered")

    def post_backward(self, *_):
        self.did.append("reduced")


def tell(name):
    def around(param_group, proceed, *arguments):
        param_group.did.append(name)
        proceed(*arguments)

    return around


def test_features_run_in_the_declared_order_whatever_the_order_in_which_they_came():
    param_group = ParamGroup()
    for feature in ("divergence", "units that never ran", "unequal gradients"):
        unit_hooks.register_hook(param_group, "reduce", feature, tell(feature))
    param_group.post_backward()
    assert param_group.did == ["unequal gradients", "units that never ran", "divergence", "reduced"]


def test_a_feature_that_is_taken_off_leaves_the_others():
    param_group = ParamGroup()
    unit_hooks.register_hook(param_group, "gather", "divergence", tell("divergence"))
    unit_hooks.register_hook(param_group, "gather", "offload", tell("offload"))
    unit_hooks.remove_hook(param_group, "gather", "offload")
    param_group.unshard()
    assert param_group.did == ["divergence", "gathered"]
    unit_hooks.remove_hook(param_group, "gather", "divergence")
    assert "unshard" not in vars(param_group)
    unit_hooks.remove_hook(param_group, "gather", "divergence")  # harmless


def test_a_feature_whose_place_is_not_declared_is_refused():
    with pytest.raises(KeyError, match="does not contain"):
        unit_hooks.register_hook(ParamGroup(), "gather", "something new", tell("something new"))


@pytest.mark.ranks(2)
def test_a_model_that_was_offloaded_is_watched_for_divergence_as_before(monkeypatch):
    from fsdp2_strategy.distributed import unit_log

    model = build("llama")
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model)
    entries = []
    log = unit_log.current_log()
    begin = log.begin
    monkeypatch.setattr(log, "begin", lambda entry, length=0: (entries.append(entry), begin(entry, length)))
    ids = torch.arange(6)[None]
    model(input_ids=ids)
    first = list(entries)
    offload(model)
    reload(model)
    entries.clear()
    model(input_ids=ids)
    assert entries == first and len(first) > 2


@pytest.mark.ranks(2)
def test_modules_within_blocks_have_no_hooks_once_a_pass_has_bypassed_none():
    model = build("llama")
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model, is_training=True)
    units = {torch_internals.module_of(param_group) for param_group in parameter_groups(model)}
    within = [m for m in model.modules() if m not in units and any(True for _ in m.parameters(recurse=False))]
    assert all(isinstance(p, DTensor) for p in model.parameters()) and len(within) > 8

    def hooked():
        return [m for m in within if m._forward_pre_hooks or m._forward_hooks]

    batch = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    model(**batch).loss.backward()
    left = hooked()
    owned_by_the_root = set(model.modules()).difference(*(unit.modules() for unit in units if unit is not model))
    assert set(left) <= owned_by_the_root
    model.eval()
    with torch.no_grad():
        model(**batch)  # another kind of pass: looked at, too
    assert hooked() == left
