"""Collect and restore the state of an optimizer and its schedule: tensors by parameter name, other values as JSON.

Input: the optimizer of a sharded model, and its schedule. Output of a save: tensors by name, and JSON. Output of a
load: the restored optimizer and schedule.

[Note: optimizer by name] Optimizer state is stored as ``state.<parameter name>.<key>``. Hyper-parameters are stored by
parameter name, too. Nothing is stored by position, so a checkpoint also loads into an optimizer with other parameter
groups. If a parameter is frozen during training, its state is still saved. A parameter that never had a gradient has no
state.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fsdp2_strategy.checkpoint.load_options import NO_OPTIMIZER, NO_SCHEDULER, NOT_STRICT
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import CheckpointError, shown, some
from fsdp2_strategy.model.fsdp_state import is_sharded, reshard
from fsdp2_strategy.model.names import named_modules, named_parameters, tied_names
from fsdp2_strategy.model.shards import sharded_like
from fsdp2_strategy.model.swapped_weights import check_own_weights
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.masters import FSDPadaptOptimizer
from fsdp2_strategy.storage.json_files import check_json
from fsdp2_strategy.storage.json_values import as_json_values, from_json_values

_T = TypeVar("_T")

POSITION = "last_epoch"
"""The only entry of a saved schedule of which only the position is known: a load advances the schedule to it."""
CONVERTED_FROM = "converted_from"
"""The entry of a checkpoint that was converted: the kind of the source. Its schedule may be of another class."""

# Keys of parameter groups that are not saved: they depend on how a run builds the optimizer and chooses its kernels.
IMPLEMENTATION = {"params", "name", "foreach", "fused", "capturable", "differentiable"}


# Keys of parameter groups that schedules set, besides the betas or the momentum of those that cycle them.
_RATES = {"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The result of a load."""

    path: Path
    step: int
    """Optimizer steps taken before the save."""
    client_state: dict[str, Any]
    missing: tuple[str, ...] = ()
    """Names that only the model has. Their values are unchanged. Empty after a strict load."""
    unexpected: tuple[str, ...] = ()
    """Names that only the checkpoint has. Empty after a strict load."""
    cast: tuple[str, ...] = ()
    """Names of loaded tensors whose dtypes differ between the checkpoint and the model."""
    loss_scale: dict[str, Any] | None = None
    """The saved state of the loss scale; None if the checkpoint has none."""
    models: Mapping[str, LoadedCheckpoint] = field(default_factory=dict)
    """If several models were loaded: the result of each, by name. Fields that belong to a model are then only here."""


def log_differences(missing: Collection[str], unexpected: Collection[str], cast: Collection[str]) -> None:
    """Log the fields of a `LoadedCheckpoint` that name tensors of a model."""
    differences = {
        "not in the checkpoint": missing,
        "not in the model": unexpected,
        "cast to the model's dtype": cast,
    }
    for what, names in differences.items():
        if names:
            log("%s: %s", what, some(sorted(names)))


def require_saved(content: _T | None, what: str, option: str, path: Path) -> _T:
    """Return ``content``; raise if the checkpoint lacks it. ``option`` is the argument of a load that skips it."""
    if content is None:
        raise CheckpointError(
            f"cannot load the {what}: {path} was saved without it, expected a checkpoint with it. Pass {option} to "
            "load the rest of the checkpoint."
        )
    return content


_CREATED_BY = {"optimizer": "create_optimizer", "scheduler": "create_scheduler"}
_SKIPPED_BY = {"optimizer": NO_OPTIMIZER, "scheduler": NO_SCHEDULER}


def check_restored(
    must_restore: Collection[str], given: Mapping[str, object], saved: Collection[str], path: Path
) -> None:
    """Raise if the state of an object that must be restored is in ``saved``, and ``given`` lacks the object."""
    for name in must_restore:
        if name in saved and given[name] is None:
            raise CheckpointError(
                f"cannot load {path}: it has the state of the {name}, and the model has no {name} yet, expected one to "
                f"restore. Call {_CREATED_BY[name]} before load_ckpt, or pass {_SKIPPED_BY[name]} to start without "
                "this state."
            )


def unwrap_and_reshard(model: nn.Module) -> nn.Module:
    """Unwrap a model, free its unsharded parameters, and return the module; raise if it cannot be saved or loaded."""
    inner = unwrap_model(model)
    if not is_sharded(inner):
        raise CheckpointError(
            f"cannot save or load: {type(inner).__name__} is not sharded, expected a prepared model. Call "
            "prepare_model first, and pass the model that it returned."
        )
    for name, module in named_modules(inner):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"cannot save or load: {name or type(inner).__name__} has an extra state, expected only parameters and "
                "buffers. Register the values as buffers, or store them in client_state."
            )
    check_own_weights(inner, "save or load", CheckpointError)
    reshard(inner)
    return inner


def names_by_identity(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter of a model, by the parameter's `id`."""
    return {id(parameter): name for name, parameter in named_parameters(unwrap_model(model)).items()}


def optimizer_tensors(
    model: nn.Module, optimizer: Optimizer, names: Mapping[int, str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer's state as ``state.<parameter name>.<key>``.

    ``names`` is the result of `names_by_identity` if the caller has it.
    """
    return {
        f"state.{name}.{key}": value
        for name, state in _named_state(optimizer, names or names_by_identity(model)).items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_hyper(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return, as JSON, an optimizer's hyper-parameters and the state values that are not tensors, by parameter name."""
    settings: list[dict[str, Any]] = []
    indices: dict[object, int] = {}
    of_parameter: dict[str, int] = {}
    for group in optimizer.param_groups:
        own = {key: as_json_values(value) for key, value in group.items() if key not in IMPLEMENTATION}
        index = indices.setdefault(_hashable(own), len(settings))
        if index == len(settings):
            settings.append(own)
        for parameter in group["params"]:
            of_parameter[_name_of(parameter, names)] = index
    values = {
        name: non_tensors
        for name, state in _named_state(optimizer, names).items()
        if (non_tensors := {k: v for k, v in state.items() if v is not None and not isinstance(v, torch.Tensor)})
    }
    return {
        "class": _class_of(optimizer),
        "settings": settings,
        "of_parameter": of_parameter,
        "values": as_json_values(values),
    }


def _hashable(value: Any) -> object:
    """Return an object that equals those of equal JSON values, and can be a key."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(each)) for key, each in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return value if isinstance(value, str | int | float | None) else repr(value)  # `check_json` refuses it


def check_optimizer(model: nn.Module, optimizer: Optimizer, hyper: Mapping[str, Any], *, strict: bool) -> None:
    """Raise if an optimizer has another class than the saved one, or with ``strict`` further parameters."""
    own = _class_of(optimizer)
    if not hyper["class"]:
        _check_kind(optimizer, hyper["settings"])
    elif own != hyper["class"]:
        raise CheckpointError(
            f"cannot load the optimizer: the checkpoint holds the state of {hyper['class']}, expected that of {own}. "
            f"Use the same class, or pass {NO_OPTIMIZER}."
        )
    names = names_by_identity(model)
    known = hyper["of_parameter"]
    missing = [n for g in optimizer.param_groups for p in g["params"] if (n := _name_of(p, names)) not in known]
    if missing and strict:
        raise CheckpointError(
            f"cannot load the optimizer: the checkpoint lacks {some(missing, 'parameter')} that this optimizer "
            "steps, expected all of them. Build the optimizer over the same trainable parameters, "
            f"or pass {NOT_STRICT} to start these parameters without state."
        )


def _check_kind(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise if saved hyper-parameters are those of another family of optimizers; for a checkpoint without the class."""
    for key in ("betas", "momentum"):
        is_own = any(key in group for group in optimizer.param_groups)
        if any(bool(saved) and (key in saved) != is_own for saved in settings):
            raise CheckpointError(
                f"cannot load the optimizer: the saved groups have {some(sorted(settings[0]), 'setting')}, expected "
                f"those of {type(optimizer).__name__}. Use the class that was saved, or pass {NO_OPTIMIZER}."
            )


def with_first_names(
    model: nn.Module, hyper: Mapping[str, Any], stored: Mapping[str, _T]
) -> tuple[dict[str, Any], dict[str, _T]]:
    """Rename tied parameters to the first of their names in the model: a converted checkpoint may have another one.

    ``hyper`` and ``stored`` are the hyper-parameters and the state's tensors as in files. Both are returned.
    """
    own = named_parameters(model)
    first = {alias: name for alias, group in tied_names(model).items() for name in group if name in own}
    states = {name: name.removeprefix("state.").rpartition(".") for name in stored}
    renamed = {f"state.{first.get(name, name)}.{key}": stored[full] for full, (name, _, key) in states.items()}
    names = {part: {first.get(n, n): value for n, value in hyper[part].items()} for part in ("of_parameter", "values")}
    return {**hyper, **names}, renamed


def schedule_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the state of a schedule as JSON values, or raise if it has others."""
    state: dict[str, Any] = as_json_values(scheduler.state_dict())
    check_json(state, "scheduler")
    return state


def check_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Raise if an entry of a saved state has another type than in the schedule, or would replace a method."""
    saved, own = from_json_values(dict(state)), scheduler.state_dict()
    for key, value in saved.items():
        is_method = key == "optimizer" or callable(getattr(type(scheduler), key, None))
        if is_method or key.startswith("__") or (key in own and not _is_same_kind(value, own[key])):
            expected = "no such entry" if key not in own else f"a value such as {shown(own[key])}"
            raise CheckpointError(
                f"cannot load the scheduler: its saved state has {shown(key)} = {shown(value)}, expected {expected} "
                f"for {type(scheduler).__name__}. Use the schedule of the saved run, or pass {NO_SCHEDULER}."
            )


def has_position_only(state: Mapping[str, Any]) -> bool:
    """Return whether a saved schedule is only the number of steps, as in converted checkpoints."""
    return state.keys() == {POSITION}


def _is_same_kind(saved: Any, own: Any) -> bool:
    """Return whether a saved value can replace another one: numbers, texts, lists or mappings in both places."""
    if own is None:
        return True
    if isinstance(own, bool | int | float | torch.Tensor):
        return isinstance(saved, bool | int | float | torch.Tensor)
    if saved is None:
        return True
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and all(
            each is None or not len(own) or _is_same_kind(each, own[0]) for each in saved
        )
    if isinstance(own, Mapping):
        return isinstance(saved, Mapping)
    return not isinstance(own, str) or isinstance(saved, str)


def restore_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Load a saved state into a schedule, and set the schedule's learning rates in the optimizer's groups.

    If the number of groups has changed, the learning rates are taken from the groups that the optimizer has now.
    """
    groups = scheduler.optimizer.param_groups
    own: dict[str, Any] = from_json_values(dict(state))
    if any(len(own.get(key, groups)) != len(groups) for key in ("base_lrs", "_last_lr", "lr_lambdas")):
        own["base_lrs"] = [group["initial_lr"] for group in groups]
        own["_last_lr"] = [group["lr"] for group in groups]
        own |= {"lr_lambdas": [None] * len(groups)} if "lr_lambdas" in own else {}
    before = _numbers(getattr(scheduler, "base_lrs", []))
    scheduler.load_state_dict(own)
    after = _numbers(getattr(scheduler, "base_lrs", []))
    if before != after:
        message = (
            "the schedule's base learning rates %s are replaced by %s, those of the checkpoint. To keep them, pass %s"
        )
        log(message, before, after, NO_SCHEDULER, level=logging.WARNING)
    for group, lr in zip(groups, scheduler.get_last_lr(), strict=True):
        _set(group, "lr", lr)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a hyper-parameter; a tensor keeps its identity, because a CUDA graph may read it."""
    current = group.get(key)
    if isinstance(current, torch.Tensor):
        current.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor) and current is not None:
        group[key] = value.item()
    else:
        group[key] = tuple(value) if isinstance(value, list) else value  # JSON stores tuples, such as betas, as lists


def advance_scheduler(scheduler: LRScheduler, steps: int) -> None:
    """Advance a schedule to the given optimizer step, for a checkpoint without schedule state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        if isinstance(scheduler, LambdaLR):  # its learning rates depend only on the step, so one call suffices
            scheduler.last_epoch = steps - 1
            scheduler.step()
        else:
            for _ in range(getattr(scheduler, "last_epoch", 0), steps):
                scheduler.step()


def allocate_optimizer_state(
    model: nn.Module, optimizer: Optimizer, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, strict: bool
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Allocate tensors for the stored optimizer state: by parameter name and key, and the same by stored name.

    Tensors of the optimizer are reused if shape and dtype match, so that a load does not need memory for two copies.
    """
    names = names_by_identity(model)
    of_optimizer = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in of_optimizer}
    flat: dict[str, torch.Tensor] = {}
    unexpected = set()
    for stored, (shape, dtype) in layout.items():
        name, _, key = stored.removeprefix("state.").rpartition(".")
        if name not in of_optimizer:
            unexpected.add(name)
            continue
        parameter, group = of_optimizer[name]
        existing = optimizer.state.get(parameter, {}).get(key)
        matches = isinstance(existing, torch.Tensor) and (tuple(existing.shape), existing.dtype) == (shape, dtype)
        state[name][key] = flat[stored] = existing if matches else _allocate(parameter, group, key, shape, dtype)
    if unexpected and strict:
        raise CheckpointError(
            f"cannot load the optimizer: the checkpoint holds state of {some(sorted(unexpected), 'parameter')} that "
            "this optimizer does not have, expected only its own parameters. Build the "
            f"optimizer over the same trainable parameters, or pass {NOT_STRICT} to skip that state."
        )
    return state, flat


def settings_by_group(model: nn.Module, optimizer: Optimizer, hyper: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved hyper-parameters of each group; raise if its parameters were saved with different ones."""
    names = names_by_identity(model)
    settings = []
    for group in optimizer.param_groups:
        indices = {hyper["of_parameter"].get(names[id(p)]) for p in group["params"]} - {None}
        if len(indices) > 1:
            first, second = sorted(indices)[:2]
            raise CheckpointError(
                f"cannot load the optimizer: group {group.get('name')!r} has parameters that were saved with "
                f"different settings, {hyper['settings'][first]} and {hyper['settings'][second]}, expected the same "
                "for all. Group them as they were saved."
            )
        settings.append(hyper["settings"][indices.pop()] if indices else {})
        _check_settings(group, settings[-1])
    return settings


def _check_settings(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in from_json_values(dict(saved)).items():
        own = group.get(key)
        is_number = isinstance(own, bool | int | float | torch.Tensor) and key not in _NUMBERS
        has_other_length = isinstance(own, tuple) and isinstance(value, list) and len(own) != len(value)
        if (value is None and is_number) or (_is_same_kind(value, own) and not has_other_length):
            continue
        raise CheckpointError(
            f"cannot load the optimizer: the saved {shown(key)} of group {group.get('name')!r} is {shown(value)}, "
            f"expected a value such as {shown(own)}. Load another checkpoint, or pass {NO_OPTIMIZER}."
        )


_NUMBERS = {"lr", "eps", "weight_decay", "momentum", "dampening"}
"""Hyper-parameters that are never None."""


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, torch.Tensor]],
    settings: Sequence[Mapping[str, Any]],
    non_tensors: Mapping[str, Mapping[str, Any]],
    *,
    load_learning_rates: bool = True,
) -> None:
    """Set an optimizer's state and hyper-parameters; remove the state of parameters that have no saved state.

    ``state`` and ``non_tensors`` contain values by parameter name and key. ``settings`` contains the hyper-parameters
    of each group. Without ``load_learning_rates``, hyper-parameters that schedules set are not changed.
    """
    names, non_tensors = names_by_identity(model), from_json_values(dict(non_tensors))
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        own = {
            key: value
            for key, value in from_json_values(saved).items()
            if load_learning_rates or key not in _driven(group)
        }
        _log_replaced(group, own)
        for key, value in own.items():
            _set(group, key, value)
        for parameter in group["params"]:
            name = names[id(parameter)]
            values = {**state.get(name, {}), **non_tensors.get(name, {})}
            if values:
                optimizer.state[parameter] = dict(values)
            else:
                optimizer.state.pop(parameter, None)


def _driven(group: Mapping[str, Any]) -> set[str]:
    """Return the hyper-parameters of a group that schedules set."""
    return _RATES | ({"betas", "momentum"} if "max_momentum" in group else set())


def _log_replaced(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    # Under a schedule, they follow from its position; only the initial rate does not.
    silent = _driven(group) - {"initial_lr"} if "initial_lr" in group else set()
    replaced = [
        f"{key} {_plain(group[key])} by {_plain(value)}"
        for key, value in saved.items()
        if key in group and key not in silent and _plain(group[key]) != _plain(value)
    ]
    if replaced:
        message = "parameter group %s: the checkpoint replaces %s"
        log(message, group.get("name", ""), ", ".join(replaced), level=logging.WARNING)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list) else value


def _class_of(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"{name}({type(optimizer.inner).__name__})" if isinstance(optimizer, FSDPadaptOptimizer) else name


def _named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    return {_name_of(p, names): state for p, state in optimizer.state.items() if state}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"cannot save or load the optimizer: it steps a parameter of shape {list(parameter.shape)} that is not in "
            "the model, expected parameters of the model. Create the optimizer after prepare_model, for this model."
        )
    return names[id(parameter)]


def _allocate(
    parameter: torch.Tensor, group: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a tensor for one state entry, with the sharding and device that the optimizer expects."""
    device = parameter.device  # a DTensor keeps its device while its values are offloaded
    if shape == tuple(parameter.shape) and key != "step":
        local = local_of(parameter)
        return sharded_like(parameter, torch.empty_strided(local.size(), local.stride(), dtype=dtype, device=device))
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros(shape, dtype=dtype, device=device if on_device else "cpu")
