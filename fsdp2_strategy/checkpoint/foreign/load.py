"""Load the checkpoint of another system into a sharded model, its optimizer and its schedule; collective.

Input: a `Foreign`, and the objects to restore. Output: a `LoadedCheckpoint`. Weights and optimizer state are matched by
parameter name, and each rank reads the elements that it holds, so the checkpoint may come from any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint.foreign.contents import Contents, read_contents
from fsdp2_strategy.checkpoint.foreign.flat_parameters import without_flat_parameters
from fsdp2_strategy.checkpoint.foreign.parameter_ids import OwnGroup, Parameter, name_parameters
from fsdp2_strategy.checkpoint.foreign.schedule import restore_foreign_schedule
from fsdp2_strategy.checkpoint.foreign.sources import Foreign
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredOptimizer, plain
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, read_into
from fsdp2_strategy.checkpoint.load_options import NO_OPTIMIZER, NO_SCHEDULER, NOT_STRICT
from fsdp2_strategy.checkpoint.storage import check_shapes
from fsdp2_strategy.checkpoint.training_state import (
    LoadedCheckpoint,
    allocate_optimizer_state,
    check_restored,
    log_differences,
    restore_optimizer,
    settings_by_group,
    unwrap_and_reshard,
)
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.conversions import renames
from fsdp2_strategy.hf.load import load_weights
from fsdp2_strategy.hf.transformers_models import outermost_models
from fsdp2_strategy.model.failed_loads import unusable_unless_done
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.model.master_weights import refresh_masters_of
from fsdp2_strategy.model.names import clean, named_parameters, saved_tensors, tied_names
from fsdp2_strategy.model.offloading import check_resident
from fsdp2_strategy.model.weight_versions import count_change

_OPTIMIZER_KINDS = ("betas", "momentum")
"""Hyper-parameters that tell the families of optimizers apart."""


def load_foreign(
    model: nn.Module,
    foreign: Foreign,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    *,
    load_model: bool,
    strict: bool,
    must_restore: Collection[str] = (),
    load_learning_rates: bool = True,
) -> LoadedCheckpoint:
    """Load a foreign checkpoint: weights, optimizer, schedule, step and the trainer's values; collective.

    A schedule whose saved state is not that of the given class is advanced to the saved step.
    """
    path = foreign.path
    check_resident(model, f"load {path}")
    if optimizer is not None:
        check_resident(optimizer, f"load {path}")
    with all_or_none(f"load {path}", CheckpointError):
        root = unwrap_and_reshard(model)
        own = saved_tensors(root)
        contents, old_names = _read(root, foreign, own)
        check_restored(must_restore, {"optimizer": optimizer, "scheduler": scheduler}, contents.training_state, path)
        # The loader of Hugging Face folders converts the names and the layout of files.
        is_folder = contents.has_safetensors and not own.keys() <= contents.weights.keys()
        tensors, report = _match_model(root, contents, strict=strict) if load_model and not is_folder else ({}, {})
        restored = None
        if optimizer is not None:
            stored = _require(contents.optimizer, contents, "optimizer", NO_OPTIMIZER)
            restored = _match_optimizer(root, contents, stored.renamed(old_names), optimizer, strict=strict)
        if scheduler is not None and not contents.has_position:
            _require(None, contents, "schedule", NO_SCHEDULER)
    touched: list[nn.Module | Optimizer] = [*([root] if load_model else []), *([optimizer] if optimizer else [])]
    with unusable_unless_done(touched):
        if load_model and is_folder:
            report = _load_folder(model, contents, own, strict=strict)
        with all_or_none(f"load {path}", CheckpointError), torch.no_grad():
            clear_gradients(root)
            if load_model:
                count_change(root)
            pairs = [(contents.weights[name], tensor) for name, tensor in tensors.items()]
            read_into([*pairs, *(restored.pairs if restored else ())])
            if optimizer is not None and restored is not None:
                restore_optimizer(
                    model,
                    optimizer,
                    restored.state,
                    restored.settings,
                    restored.values,
                    load_learning_rates=load_learning_rates,
                )
            if load_model:
                refresh_masters_of(root)  # foreign checkpoints hold no master weights
            if scheduler is not None:
                has_new_rates = any("lr" in saved for saved in restored.settings) if restored else False
                restore_foreign_schedule(scheduler, contents.schedule, contents.position, has_new_rates=has_new_rates)
    if contents.others:
        log("%s also has %s, which are not loaded", path, some(contents.others, "value"))
    log("loaded %s, %s: %s", path.absolute(), foreign.kind, contents.describe())
    return LoadedCheckpoint(path=path, step=contents.step, client_state=contents.client_state, **report)


def _read(root: nn.Module, foreign: Foreign, own: Mapping[str, torch.Tensor]) -> tuple[Contents, dict[str, str]]:
    """Return the contents under the names of the installed transformers, and the new names by stored name."""
    aliases = tied_names(root)
    contents = read_contents(foreign, {*own, *aliases})
    names: dict[str, str] = {}
    if not contents.has_safetensors:
        for name, model in outermost_models(root).items() if own.keys() - contents.weights.keys() else ():
            prefix = f"{clean(name)}." if name else ""
            described = {
                n.removeprefix(prefix): (t.shape, t.dtype) for n, t in contents.weights.items() if n.startswith(prefix)
            }
            names |= {prefix + old: prefix + new for old, new in renames(model, described).items() if old != new}
    names = {old: new for old, new in names.items() if old not in own}
    # The optimizer of a tied parameter may have any of its names.
    tied = {alias: name for alias, group in aliases.items() for name in group if alias not in own and name in own}
    return contents.renamed(names), {**names, **tied}


def _require(content: StoredOptimizer | None, contents: Contents, what: str, option: str) -> StoredOptimizer:
    if content is None:
        raise CheckpointError(
            f"cannot load the {what} from {contents.foreign.path}: it is {contents.foreign.kind} with "
            f"{contents.describe()}{_further(contents)}, expected one that also has the {what}. Pass {option} to load "
            "the rest."
        )
    return content


def _further(contents: Contents) -> str:
    """Return the values that are in no part, for a message."""
    return f" and {some(contents.others, 'further value')}" if contents.others else ""


def _match_model(
    root: nn.Module, contents: Contents, *, strict: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors whose names are stored, and fields of the `LoadedCheckpoint`."""
    tensors = saved_tensors(root)
    if flat := [name for name in contents.weights if name.endswith("_flat_param")]:
        raise CheckpointError(
            f"cannot load {contents.foreign.path}: it has FSDP1's flattened parameters ({some(flat)}), which only the "
            "same model on the same number of ranks can read, expected parameters. Load it in the old program, and "
            "save with StateDictType.SHARDED_STATE_DICT."
        )
    known = {clean(name) for name in root.state_dict()}
    missing = tuple(name for name in tensors if name not in contents.weights)
    unexpected = tuple(name for name in contents.weights if name not in known)
    if (strict and (missing or unexpected)) or (tensors and len(missing) == len(tensors)):
        raise CheckpointError(_names_differ(contents, tensors, missing, unexpected))
    shared = {name: tensor for name, tensor in tensors.items() if name in contents.weights}
    check_shapes("model", shared, {name: (t.shape, t.dtype) for name, t in contents.weights.items()})
    cast = tuple(name for name, tensor in shared.items() if contents.weights[name].dtype != tensor.dtype)
    log_differences(missing, unexpected, cast)
    return shared, {"missing": missing, "unexpected": unexpected, "cast": cast}


def _load_folder(model: nn.Module, contents: Contents, own: Collection[str], *, strict: bool) -> dict[str, Any]:
    """Load the weights of a Hugging Face folder; return fields of the `LoadedCheckpoint`; collective."""
    loaded = load_weights(model, contents.folder, strict=strict)
    if not loaded.loaded:
        raise CheckpointError(_names_differ(contents, own, own, ()))
    report = {"missing": loaded.missing, "unexpected": loaded.unexpected, "cast": loaded.cast}
    fields = {name: tuple(names) for name, names in report.items()}
    log_differences(**fields)
    return fields


def _names_differ(contents: Contents, own: Collection[str], missing: Collection[str], further: Collection[str]) -> str:
    start = f"cannot load {contents.foreign.path}, {contents.foreign.kind} with {contents.describe()}:"
    if len(missing) == len(own):
        held = f"its weights are {some(tuple(contents.weights))}" if contents.weights else "it has no weights"
        return (
            f"{start} {held}{_further(contents)}, expected {some(tuple(own))}. Build the model that was saved, or pass "
            "the path of its checkpoint."
        )
    differences = [f"its weights lack {some(tuple(missing))}"] if missing else []
    differences += [f"it has {some(tuple(further))} that the model does not have"] if further else []
    return f"{start} {' and '.join(differences)}, expected the same names. Build the same model, or pass {NOT_STRICT}."


@dataclass(frozen=True)
class _RestoredOptimizer:
    """The tensors and values to restore an optimizer from."""

    state: dict[str, dict[str, torch.Tensor]]
    """By parameter name and key; allocated, not read."""
    pairs: list[tuple[StoredTensor, torch.Tensor]]
    settings: list[dict[str, Any]]
    """The hyper-parameters of each group."""
    values: dict[str, dict[str, Any]]
    """State that is not a tensor, by parameter name and key."""


def _match_optimizer(
    root: nn.Module, contents: Contents, stored: StoredOptimizer, optimizer: Optimizer, *, strict: bool
) -> _RestoredOptimizer:
    """Match an optimizer's parameters with the stored state, and allocate tensors to load the state into."""
    path = contents.foreign.path
    names = {id(parameter): name for name, parameter in named_parameters(root).items()}
    own_groups = [
        OwnGroup(tuple(names.get(id(p), "") for p in group["params"]), group) for group in optimizer.param_groups
    ]
    parameters = [Parameter(n, tuple(p.shape), p.requires_grad) for n, p in named_parameters(root).items()]
    units = [clean(name) for name, module in root.named_modules() if name and isinstance(module, FSDPModule)]
    stored = without_flat_parameters(stored, parameters, units, path, own_groups)
    stored = name_parameters(stored, parameters, path, own_groups)
    tensors = {
        f"state.{name}.{key}": value
        for name, state in stored.state.items()
        for key, value in state.items()
        if isinstance(value, StoredTensor)
    }
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    _check_flat(stored, {p.name: p.shape for p in parameters}, path)
    state, flat = allocate_optimizer_state(root, optimizer, described, strict=strict)
    if skipped := [name for name in map(str, stored.state) if name not in state]:
        log("not in the optimizer: %s", some(skipped))
    values = {
        str(name): own
        for name, of_name in stored.state.items()
        if (own := {k: v for k, v in of_name.items() if not isinstance(v, StoredTensor)})
    }
    for name, own_values in values.items():
        if isinstance(own_values.get("step"), int | float) and name in state:  # as torch 1.11 and earlier saved it
            state[name]["step"] = torch.tensor(float(own_values.pop("step")))
    in_groups = {str(param) for group in stored.groups for param in group.params}
    lacking = [name for name, own in state.items() if not own and name not in in_groups]
    if lacking and strict and in_groups:
        raise CheckpointError(
            f"cannot load the optimizer: its parameter groups in {path} lack {some(lacking)}, expected all parameters "
            "of this optimizer. Build the optimizer over the same trainable parameters, or pass "
            f"{NOT_STRICT} to start these parameters without state."
        )
    if lacking:
        log("%s has no optimizer state for %s: these start without state", path, some(lacking), level=logging.WARNING)
    settings = _settings(root, stored, optimizer, path)
    return _RestoredOptimizer(state, [(tensors[name], tensor) for name, tensor in flat.items()], settings, values)


def _check_flat(stored: StoredOptimizer, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise if state has a shape that fits no parameter, as that of FSDP1's flattened parameters."""
    for name, state in stored.state.items():
        momentum = state.get("exp_avg", state.get("momentum_buffer"))
        if isinstance(momentum, StoredTensor) and name in shapes and momentum.shape != shapes[str(name)]:
            raise CheckpointError(
                f"cannot load the optimizer from {path}: the state of {name} has the shape {list(momentum.shape)}, "
                f"expected {list(shapes[str(name)])}. Save it with FSDP.optim_state_dict or get_optimizer_state_dict, "
                f"which write no flattened parameters, or pass {NO_OPTIMIZER}."
            )


def _settings(root: nn.Module, stored: StoredOptimizer, optimizer: Optimizer, path: Path) -> list[dict[str, Any]]:
    """Return the stored hyper-parameters of each group, of the keys that the optimizer has; empty if none is stored."""
    by_name = stored.settings_by_name()
    if not any(by_name.values()):
        return [{} for _ in optimizer.param_groups]
    own_keys = {key for group in optimizer.param_groups for key in group} | {"initial_lr"}
    ignored = {"params", "name", "foreach", "fused", "capturable", "differentiable"}
    settings: list[dict[str, Any]] = []
    of_parameter: dict[str, int] = {}
    for name, saved in by_name.items():
        for key in _OPTIMIZER_KINDS:
            if saved and (key in saved) != any(key in group for group in optimizer.param_groups):
                raise CheckpointError(
                    f"cannot load the optimizer from {path}: its groups have {some(sorted(map(str, saved)), 'setting')}"
                    f", expected those of {type(optimizer).__name__}. Use the class that was saved, or pass "
                    f"{NO_OPTIMIZER}."
                )
        own = {key: plain(value) for key, value in saved.items() if key in own_keys - ignored}
        own = {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}
        if own not in settings:
            settings.append(own)
        of_parameter[name] = settings.index(own)
    return settings_by_group(root, optimizer, {"settings": settings, "of_parameter": of_parameter})
