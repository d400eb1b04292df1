"""Build optimizers over sharded parameters, with parameter groups.

Input: a sharded model and hyper-parameters. Output: a torch optimizer with named groups. All parameters of a group have
the same learning rate, weight decay, dtype and mesh.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2_strategy.config.arguments import check_number
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import BATCH_NORMS, FUSED_ADAM_DEVICES
from fsdp2_strategy.errors import ArgumentError, OptimizerError, counted, did_you_mean
from fsdp2_strategy.model.fsdp_state import class_name, reshard
from fsdp2_strategy.model.names import clean, matches, named_parameters
from fsdp2_strategy.model.shards import shard_size_of
from fsdp2_strategy.model.swapped_weights import check_own_weights
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.masters import FSDPadaptOptimizer
from fsdp2_strategy.optim.zero_grad import watch_optimizer

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, *BATCH_NORMS)

# Optimizers with operations that DTensor does not support.
_NO_DTENSOR = (torch.optim.Adafactor, torch.optim.Rprop)


def build_optimizer(
    model: nn.Module,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    *,
    no_decay: Sequence[str] | None = None,
    optimizer_cls: Callable[..., Optimizer] = torch.optim.AdamW,
    param_groups: Iterable[Mapping[str, Any]] | None = None,
    masters: bool = False,
    **kwargs: Any,
) -> Optimizer:
    """Build an optimizer over the trainable parameters of ``model``; not collective.

    Omitted arguments keep the defaults of ``optimizer_cls``. If neither ``fused`` nor ``foreach`` is given, Adam and
    AdamW get ``fused=True`` if the fused kernel supports the devices and dtypes of all parameters, and ``foreach=True``
    otherwise. All other optimizers that have the option ``foreach`` get ``foreach=True``.

    A name pattern with ``*``, ``?`` or ``[`` is a shell-style pattern for the full name of a parameter. Any other
    pattern matches each name that contains it.

    Args:
        model: a sharded model, or any module.
        lr: learning rate.
        betas: Adam's decay rates.
        eps: term that Adam adds to the denominator.
        weight_decay: weight decay of all parameters that ``no_decay`` does not exempt.
        no_decay: name patterns of parameters without weight decay. None exempts parameters with at most one dimension,
            parameters of normalisation modules, and biases (``bias``, ``*_bias``). () exempts no parameter.
        optimizer_cls: a torch optimizer class.
        param_groups: groups with their own settings. Each is a mapping with "params" (name patterns or parameters of
            the model), and optionally "name", "lr", "weight_decay" and other options of the optimizer. A group's
            "weight_decay" applies to all its parameters, also to those that ``no_decay`` exempts. Trainable parameters
            that are in none of these groups form groups with the options of this call.
        masters: keep fp32 master weights of half-precision parameters in the optimizer (`FSDPadaptOptimizer`).
        **kwargs: further options of ``optimizer_cls``.

    Returns:
        The optimizer. Each group has a "name": the name given in ``param_groups``, or "decay" without one. Parameters
        that are exempt from weight decay are split off into a group "<given name>_no_decay", or "no_decay". Groups are
        also split by dtype and mesh, so several groups may have the same name.

    Raises:
        OptimizerError: a hyper-parameter is not a number in its range, or ``optimizer_cls`` is not a class; no
            parameter is trainable; a group matches no trainable parameter, or contains a trainable parameter of another
            model; two groups share a parameter; the class does not support sharded parameters; averages replace the
            model's parameters (`EMA.swapped_in`); or, without ``masters``, only some of the parameters are in half
            precision.
        ArgumentError: ``model`` is not an nn.Module, or the class has no option of a name.

    Example::

        >>> from torch import nn
        >>> model = nn.ModuleDict({"backbone": nn.Linear(4, 8), "head": nn.Linear(8, 2)})
        >>> groups = [{"name": "backbone", "params": ["backbone.*"], "lr": 1e-5}]
        >>> optimizer = build_optimizer(model, lr=1e-4, weight_decay=0.1, param_groups=groups)
        >>> for group in optimizer.param_groups:
        ...     print(group["name"], group["lr"], group["weight_decay"])
        backbone 1e-05 0.1
        backbone_no_decay 1e-05 0.0
        decay 0.0001 0.1
        no_decay 0.0001 0.0
    """
    model = unwrap_model(model)
    check_own_weights(model, "build an optimizer", OptimizerError)  # master weights would be averages
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    options = {name: value for name, value in options.items() if value is not None} | kwargs
    _check_options(options)
    if not callable(optimizer_cls) or isinstance(optimizer_cls, Optimizer):
        shown = repr(optimizer_cls) if isinstance(optimizer_cls, str | None) else f"a {type(optimizer_cls).__name__}"
        raise OptimizerError(
            f"cannot build an optimizer: optimizer_cls is {shown}, expected a class of optimizers. Pass the class, for "
            "example optimizer_cls=torch.optim.AdamW."
        )
    _check_no_decay(no_decay)
    given = _checked_groups(param_groups)
    reshard(model)  # after a forward pass without backward, the root unit still has unsharded parameters
    trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if not trainable:
        raise OptimizerError(
            f"cannot build an optimizer: no parameter of {class_name(model)} is trainable, expected at least one. "
            "Set requires_grad first."
        )
    exempt = _exempt(model, trainable, no_decay)
    groups: list[dict[str, Any]] = []
    for group in _resolve_groups(trainable, given):
        groups += _split_group(group, trainable, exempt)
    optimizer = _construct(optimizer_cls, groups, options)
    _log_groups(optimizer)
    _check_dtypes(trainable.values(), masters=masters)
    if masters:
        optimizer = FSDPadaptOptimizer(optimizer)
    watch_optimizer(optimizer, model)
    return optimizer


def _check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raise OptimizerError unless the hyper-parameters that all optimizers share are numbers in their range."""
    action = f"build an optimizer{where}"
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if options.get(name) is not None:
            check_number(action, name, options[name], OptimizerError, minimum=0)
    if (betas := options.get("betas")) is None:
        return
    if not isinstance(betas, tuple | list) or len(betas) < 2:
        raise OptimizerError(
            f"cannot {action}: betas is {betas!r}, expected a pair of numbers. Pass for example betas=(0.9, 0.95)."
        )
    for beta in betas:
        check_number(action, "an element of betas", beta, OptimizerError, minimum=0, below=1)


def _check_no_decay(patterns: object) -> None:
    """Raise OptimizerError unless patterns are a list of strings; a string would be taken for its characters."""
    if patterns is not None and not (_is_list(patterns) and all(isinstance(each, str) for each in patterns)):
        raise OptimizerError(
            f"cannot build an optimizer: no_decay is {patterns!r}, expected a list of name patterns. Pass for example "
            "no_decay=['bias', 'norm']."
        )


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)


def _checked_groups(param_groups: Any) -> list[dict[str, Any]]:
    """Return the parameter groups as dictionaries with lists of patterns and parameters."""
    if param_groups is None:
        return []
    given = list(param_groups) if _is_list(param_groups) else None
    if given is None or not all(isinstance(group, Mapping) for group in given):
        shown = f"a {type(param_groups).__name__}" if given is None else f"a list with a {_first_kind(given)}"
        raise OptimizerError(
            f"cannot build an optimizer: param_groups is {shown}, expected a list of mappings. Pass for example "
            "param_groups=[{'name': 'head', 'params': ['head.*'], 'lr': 1e-4}]."
        )
    groups = []
    for number, group in enumerate(given):
        label = group.get("name", number)
        params = group.get("params", ())
        params = [params] if isinstance(params, str | torch.Tensor) else params
        params = list(params) if isinstance(params, Iterable) and not isinstance(params, Mapping) else [params]
        if not all(isinstance(each, str | torch.Tensor) for each in params):
            raise OptimizerError(
                f"cannot build an optimizer: params of parameter group {label!r} contains a "
                f"{_first_kind(params, (str, torch.Tensor))}, expected name patterns and parameters. Correct the list."
            )
        _check_options(group, f" with the parameter group {label!r}")
        groups.append({**group, "params": params})
    return groups


def _first_kind(values: Iterable[Any], accepted: tuple[type, ...] = (Mapping,)) -> str:
    return next(type(value).__name__ for value in values if not isinstance(value, accepted))


def rebind_optimizer(optimizer: Optimizer, names: Mapping[int, str], model: nn.Module) -> None:
    """Replace an optimizer's unsharded parameters by the sharded parameters of the same model; not collective.

    Args:
        optimizer: an optimizer without state, created before the model was sharded.
        names: names of the unsharded parameters, by the ``id`` of the parameter.
        model: the same model, sharded.

    Raises:
        OptimizerError: the optimizer contains parameters of another model; or it has state for unsharded parameters.
    """
    if not hasattr(optimizer, "param_groups") or not isinstance(names, Mapping):
        raise OptimizerError(
            f"cannot keep this optimizer for the sharded model: it is a {type(optimizer).__name__}, and names is a "
            f"{type(names).__name__}, expected a torch optimizer and a mapping. Check the order of the arguments."
        )
    now = named_parameters(unwrap_model(model))
    own = {id(parameter) for parameter in now.values()}
    stale = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    foreign = [p for p in stale if id(p) not in names]
    if foreign or (stale and optimizer.state):
        problem = f"contains {counted(len(foreign), 'parameter')} of another model" if foreign else "already has state"
        raise OptimizerError(
            f"cannot keep this optimizer for the sharded model: it {problem}, expected an optimizer without state over "
            "parameters of this model. Create it with create_optimizer, after prepare_model."
        )
    for group in optimizer.param_groups if stale else ():
        group["params"] = [p if id(p) in own else now[names[id(p)]] for p in group["params"]]
    watch_optimizer(optimizer, model)


def _resolve_groups(
    trainable: dict[str, nn.Parameter], param_groups: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Replace patterns and parameters in groups by names, and add a group of the trainable parameters that are left."""
    name_of = {id(p): name for name, p in trainable.items()}
    taken: dict[str, int] = {}
    groups = []
    for i, given in enumerate(param_groups):
        group = dict(given)
        listed = group.pop("params", ())
        patterns = [entry for entry in listed if isinstance(entry, str)]
        tensors = [entry for entry in listed if not isinstance(entry, str)]
        foreign = [p for p in tensors if id(p) not in name_of and p.requires_grad]
        picked = {name_of[id(p)] for p in tensors if id(p) in name_of}
        picked |= {name for name in trainable if matches(name, patterns)}
        label = group.get("name", i)
        if frozen := [p for p in tensors if not p.requires_grad]:
            log("parameter group %s: %s left out", label, counted(len(frozen), "frozen parameter"))
        if foreign or not picked:
            problem = f"{counted(len(foreign), 'parameter')} of another model" if foreign else "no trainable parameter"
            raise OptimizerError(
                f"cannot build an optimizer: parameter group {label!r}, with patterns {patterns}, contains {problem}, "
                f"expected trainable parameters of this model, such as {next(iter(trainable))!r}. Correct the "
                "patterns, or collect the parameters after prepare_model."
            )
        if twice := picked & taken.keys():
            first = min(twice)
            raise OptimizerError(
                f"cannot build an optimizer: {first} is in the groups {taken[first]!r} and {label!r}, expected one "
                "group. Make a pattern more specific."
            )
        taken |= dict.fromkeys(picked, label)
        groups.append({**group, "params": [name for name in trainable if name in picked]})
    rest = [name for name in trainable if name not in taken]
    return [*groups, {"params": rest}] if rest else groups


def _split_group(group: dict[str, Any], trainable: dict[str, nn.Parameter], exempt: set[str]) -> list[dict[str, Any]]:
    """Split a group by weight decay, dtype and mesh."""
    split: dict[tuple[bool, tuple[torch.dtype, DeviceMesh | None]], list[nn.Parameter]] = defaultdict(list)
    for name in group["params"]:
        no_decay = name in exempt and "weight_decay" not in group
        split[no_decay, _kernel_of(trainable[name])].append(trainable[name])
    decayed = {"name": group.get("name", "decay")}
    exempted = {"name": f"{group['name']}_no_decay" if "name" in group else "no_decay", "weight_decay": 0.0}
    return [
        {**group, "params": parameters, **(exempted if no_decay else decayed)}
        for (no_decay, _), parameters in split.items()
    ]


def split_groups(optimizer: Optimizer) -> None:
    """Split the groups of an optimizer without state by dtype and mesh, and name those without a name."""
    if isinstance(optimizer, _NO_DTENSOR):
        raise _no_dtensor(type(optimizer))
    groups = []
    for group in optimizer.param_groups:
        split: dict[tuple[torch.dtype, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            split[_kernel_of(parameter)].append(parameter)
        name = group.get("name") or ("decay" if group.get("weight_decay") else "no_decay")
        groups += [{**group, "params": parameters, "name": name} for parameters in split.values()]
    optimizer.param_groups[:] = groups
    _log_groups(optimizer)


def _kernel_of(parameter: nn.Parameter) -> tuple[torch.dtype, DeviceMesh | None]:
    """Return what the parameters of one fused or foreach kernel must have in common: dtype and mesh."""
    return parameter.dtype, parameter.device_mesh if isinstance(parameter, DTensor) else None


def _no_dtensor(optimizer_cls: type[Optimizer]) -> OptimizerError:
    return OptimizerError(
        f"cannot build an optimizer: {optimizer_cls.__name__} does not support sharded parameters, expected one "
        "that does. Use AdamW, Adam, SGD, Adagrad or RMSprop."
    )


def _exempt(model: nn.Module, trainable: dict[str, nn.Parameter], no_decay: Sequence[str] | None) -> set[str]:
    """Return the names of the parameters without weight decay."""
    if no_decay is not None:
        return {name for name in trainable if matches(name, no_decay)}
    found = set()
    for prefix, module in model.named_modules():
        is_norm = isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()
        for leaf, parameter in module.named_parameters(recurse=False):
            if is_norm or parameter.ndim <= 1 or leaf == "bias" or leaf.endswith("_bias"):
                found.add(clean(f"{prefix}.{leaf}" if prefix else leaf))
    return found & trainable.keys()


def _construct(
    optimizer_cls: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]
) -> Optimizer:
    known = inspect.signature(optimizer_cls).parameters
    name = getattr(optimizer_cls, "__name__", "the optimizer")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if not takes_any and (unknown := [option for option in options if option not in known]):
        raise ArgumentError(
            f"cannot build an optimizer: {unknown[0]!r} is not an argument of {name}, "
            f"expected one of {', '.join(known)}.{did_you_mean(unknown[0], known)}"
        )
    parameters = [p for group in groups for p in group["params"]]
    if optimizer_cls in _NO_DTENSOR and any(isinstance(p, DTensor) for p in parameters):
        raise _no_dtensor(optimizer_cls)
    if not options.keys() & {"fused", "foreach"} and "foreach" in known:
        is_adam = inspect.isclass(optimizer_cls) and issubclass(optimizer_cls, torch.optim.Adam | torch.optim.AdamW)
        # Only the fused kernels of Adam and AdamW support DTensors.
        fused = is_adam and all(p.is_floating_point() and p.device.type in FUSED_ADAM_DEVICES for p in parameters)
        options = {**options, "fused" if fused else "foreach": True}
    try:
        return optimizer_cls(groups, **options)
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"cannot build an optimizer: {name} refuses the options {options}, expected those that it accepts: "
            f"{error}. Change the options."
        ) from error


def _log_groups(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        first = group["params"][0]
        count = sum(p.numel() for p in group["params"])
        message = "parameter group %s: %s, lr %s, weight decay %s, %s, shard size %d"
        settings = group.get("lr"), group.get("weight_decay"), first.dtype, shard_size_of(first)
        log(message, group["name"], counted(count, "parameter"), *settings)


def _check_dtypes(parameters: Collection[nn.Parameter], *, masters: bool) -> None:
    """Without ``masters``, raise if only some parameters are half precision, and warn if all are."""
    total, half = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.dtype.itemsize < 4)
    if masters:
        log("the optimizer keeps fp32 master weights of %s of %s", f"{half:,}", counted(total, "parameter"))
    elif 0 < half < total:
        raise OptimizerError(
            f"cannot train: {half:,} of {counted(total, 'parameter')} are stored in half precision, expected fp32 for "
            "all. Make them trainable before prepare_model(is_training=True). If they "
            "train only later, freeze them after that call."
        )
    elif half:
        log(
            "the trainable parameters are stored in half precision (%s): small updates are lost in rounding. Pass "
            "is_training=True to prepare_model, which then keeps fp32 master weights of all parameters that are "
            "trainable at that time.",
            counted(half, "parameter"),
            level=logging.WARNING,
        )
