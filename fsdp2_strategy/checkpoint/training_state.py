"""What a checkpoint holds beside the model: tensors by parameter name, everything else as JSON.

Input: an optimizer over a sharded model, its schedule. Output: flat mappings of tensors, and JSON; and the way back.

[Note: optimizer by name] Optimizer state is keyed ``state.<parameter name>.<key>`` and hyper-parameters are kept for
each parameter, never by position. So a checkpoint loads into an optimizer that groups its parameters otherwise, state
of parameters that are frozen now is kept, and a parameter that never had a gradient simply has none.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.model.fsdp_state import is_sharded, reshard
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.shards import sharded_like
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.masters import FSDPadaptOptimizer

# How a kernel is chosen is this run's affair, not the checkpoint's.
_IMPLEMENTATION = {"params", "name", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Say what was loaded."""

    path: Path
    step: int
    """Optimizer steps taken when it was saved."""
    client_state: dict[str, Any]
    missing: tuple[str, ...] = ()
    """Names that the model has and the checkpoint has not; they keep their values (not strict)."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and the model has not (not strict)."""
    cast: tuple[str, ...] = ()
    """Names that have another dtype in the checkpoint than in the model."""
    loss_scale: dict[str, Any] | None = None
    """State of the loss scale that it was saved with."""


def require(content: object, what: str, switch: str, path: Path) -> None:
    """Raise where a checkpoint has no state for what is to be loaded.

    Raises:
        CheckpointError: it has none.
    """
    if content is None:
        raise CheckpointError(
            f"cannot load the {what}: {path} was saved without one, expected its state, for going on with a fresh "
            f"{what} would change the run without a word. Pass {switch} if that is what you want."
        )


def prepared(model: nn.Module) -> nn.Module:
    """Return the sharded module that a model is, its parameters in sharded form.

    Raises:
        CheckpointError: the model was not prepared, or a module keeps a state that is no tensor of its own.
    """
    inner = unwrap_model(model)
    if not is_sharded(inner):
        raise CheckpointError(
            f"cannot save or load: {type(inner).__name__} is not sharded, expected a prepared model. Call "
            "prepare_model first, and pass the model that it returned."
        )
    for name, module in inner.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"cannot save or load: {name or type(inner).__name__} keeps an extra state, expected parameters and "
                "buffers alone. Register what it keeps as a buffer, or store it in client_state."
            )
    reshard(inner)
    return inner


def optimizer_tensors(
    model: nn.Module, optimizer: Optimizer, names: Mapping[int, str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer's state as ``state.<parameter name>.<key>``.

    Args:
        model: the model that it steps.
        optimizer: the optimizer.
        names: of the model's parameters by identity, where they are known already.
    """
    return {
        f"state.{name}.{key}": value
        for name, state in _named_state(optimizer, names or names_by_identity(model)).items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_hyper(model: nn.Module, optimizer: Optimizer, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return what of an optimizer is no tensor, as JSON: settings by parameter name, and plain state values.

    The arguments are those of `optimizer_tensors`.
    """
    settings: list[dict[str, Any]] = []
    of_parameter: dict[str, int] = {}
    names = names or names_by_identity(model)
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
        if own not in settings:
            settings.append(own)
        index = settings.index(own)
        of_parameter |= {_name_of(p, names): index for p in group["params"]}
    values = {
        name: plain
        for name, state in _named_state(optimizer, names).items()
        if (plain := {k: v for k, v in state.items() if v is not None and not isinstance(v, torch.Tensor)})
    }
    return {
        "class": _class_of(optimizer),
        "settings": settings,
        "of_parameter": of_parameter,
        "values": values,
    }


def check_optimizer(model: nn.Module, optimizer: Optimizer, hyper: Mapping[str, Any], *, strict: bool) -> None:
    """Compare an optimizer with the one that was saved, before anything is touched.

    Raises:
        CheckpointError: it is of another class; or strict, and it has parameters that the saved one did not have.
    """
    own = _class_of(optimizer)
    if own != hyper["class"]:
        raise CheckpointError(
            f"cannot load the optimizer: the checkpoint holds the state of {hyper['class']}, expected that of {own}. "
            "Use the same class, or pass load_optimizer_states=False."
        )
    names = names_by_identity(model)
    known = hyper["of_parameter"]
    missing = [n for g in optimizer.param_groups for p in g["params"] if (n := _name_of(p, names)) not in known]
    if missing and strict:
        raise CheckpointError(
            f"cannot load the optimizer: the checkpoint lacks {len(missing)} parameters that this optimizer steps, "
            f"{missing[0]} first, which would start afresh. Build it over the same trainable parameters, or pass "
            "load_module_strict=False."
        )


def restore_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Put loaded state into a schedule, and the rate that it says into its optimizer.

    Where the optimizer groups its parameters otherwise than the saved one, the base rates are those of its groups.
    """
    state, groups = dict(state), scheduler.optimizer.param_groups
    if len(state.get("base_lrs", groups)) != len(groups):
        state["base_lrs"] = [group["initial_lr"] for group in groups]
        state["_last_lr"] = [group["lr"] for group in groups]
        state |= {"lr_lambdas": [None] * len(groups)} if "lr_lambdas" in state else {}
    scheduler.load_state_dict(state)
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def advance_scheduler(scheduler: LRScheduler, steps: int) -> None:
    """Bring a schedule, whose state nobody saved, to where it is after so many optimizer steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        if isinstance(scheduler, LambdaLR):  # whose rates follow from the step alone
            scheduler.last_epoch = steps - 1
            scheduler.step()
        else:
            for _ in range(getattr(scheduler, "last_epoch", 0), steps):
                scheduler.step()


def allocate_optimizer_state(
    model: nn.Module, optimizer: Optimizer, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, strict: bool
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Make room for the stored state of every parameter that the optimizer has, sharded as the parameter is.

    State that the optimizer has already is that room, so that a load never holds it twice.

    Returns:
        The new state by parameter name and key, and the same tensors under their stored names.

    Raises:
        CheckpointError: strict, and the checkpoint holds state of parameters that this optimizer does not have.
    """
    names = names_by_identity(model)
    of_optimizer = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in of_optimizer}
    flat: dict[str, torch.Tensor] = {}
    unexpected = []
    for stored, (shape, dtype) in layout.items():
        name, _, key = stored.removeprefix("state.").rpartition(".")
        if name not in of_optimizer:
            unexpected.append(name)
            continue
        parameter, group = of_optimizer[name]
        there = optimizer.state.get(parameter, {}).get(key)
        fits = isinstance(there, torch.Tensor) and (tuple(there.shape), there.dtype) == (shape, dtype)
        state[name][key] = flat[stored] = there if fits else _room(parameter, group, key, shape, dtype)
    if unexpected and strict:
        listed = sorted(set(unexpected))
        raise CheckpointError(
            f"cannot load the optimizer: the checkpoint holds state of {len(listed)} parameters that this optimizer "
            f"does not have, {listed[0]} first. Build it over the same trainable parameters, or pass "
            "load_module_strict=False."
        )
    return state, flat


def settings_by_group(model: nn.Module, optimizer: Optimizer, hyper: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each group of an optimizer the settings that its parameters were saved with.

    Raises:
        CheckpointError: one group spans parameters that were saved with different settings.
    """
    names = names_by_identity(model)
    found = []
    for group in optimizer.param_groups:
        indices = {hyper["of_parameter"].get(names[id(p)]) for p in group["params"]} - {None}
        if len(indices) > 1:
            first, second = sorted(indices)[:2]
            raise CheckpointError(
                f"cannot load the optimizer: group {group.get('name')!r} spans parameters that were saved with "
                f"different settings, {hyper['settings'][first]} and {hyper['settings'][second]}. Group them "
                "as they were saved."
            )
        found.append(hyper["settings"][indices.pop()] if indices else {})
    return found


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, torch.Tensor]],
    settings: Sequence[Mapping[str, Any]],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:
    """Put loaded state and hyper-parameters into the optimizer.

    Args:
        model: the model that it steps.
        optimizer: the optimizer.
        state: tensors by parameter name and key.
        settings: hyper-parameters of each group.
        plain: what of the state is no tensor, by parameter name and key.
    """
    names = names_by_identity(model)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        # JSON has no tuples: betas come back as what they were.
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in own.items()})
        for parameter in group["params"]:
            name = names[id(parameter)]
            values = {**state.get(name, {}), **plain.get(name, {})}
            if values:
                optimizer.state[parameter] = dict(values)
            else:
                optimizer.state.pop(parameter, None)


def _class_of(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"{name}({type(optimizer.inner).__name__})" if isinstance(optimizer, FSDPadaptOptimizer) else name


def names_by_identity(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's parameters by their identity."""
    return {id(parameter): name for name, parameter in named_parameters(unwrap_model(model)).items()}


def _named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    return {_name_of(p, names): state for p, state in optimizer.state.items() if state}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"cannot save or load the optimizer: it steps a parameter of shape {list(parameter.shape)} that is not in "
            "the model, expected the model's own. Create it after prepare_model, for this model."
        )
    return names[id(parameter)]


def _room(
    parameter: torch.Tensor, group: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return an empty tensor for one entry of a parameter's state, placed where the optimizer wants it."""
    device = parameter.device  # where its values belong, also while they are away
    if shape == tuple(parameter.shape) and key != "step":
        form = local_of(parameter)
        return sharded_like(parameter, torch.empty_strided(form.size(), form.stride(), dtype=dtype, device=device))
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros(shape, dtype=dtype, device=device if on_device else "cpu")
