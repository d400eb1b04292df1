"""Find the names of parameters that the file of an optimizer knows only by number.

Input: a `StoredOptimizer` with integer ids, and the parameters of the model in order. Output: the name of each id.

[Note: parameter ids] ``optimizer.state_dict()`` numbers the parameters group by group. A program builds its groups from
``named_parameters()``, so a group has its parameters in the order of the model. Without groups, the ids are this order.
With several groups, each id has a shape, that of its state. If all parameters of a shape are in one group, the order
decides. Otherwise, the rules that programs use are tried: the groups of the optimizer to be loaded, weight decay for
matrices only, that of transformers' Trainer, and consecutive parameters. They must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.contents import Contents
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredGroup, StoredOptimizer
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor
from fsdp2_strategy.checkpoint.load_options import NO_OPTIMIZER
from fsdp2_strategy.errors import CheckpointError, counted, some

Shape = tuple[int, ...]

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""As ``Trainer.get_decay_parameter_names`` of transformers 5.24; earlier versions also name all modules LayerNorm."""
_BUFFERS = re.compile(
    r"running_(mean|var)|num_batches_tracked|inv_freq|position_ids|rotary_emb\.|attn\.(masked_)?bias$|_buffer$"
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, or of the weights in a checkpoint."""

    name: str
    shape: Shape
    requires_grad: bool = True


Parts = list[list[Parameter]]
"""The parameters of each group."""


@dataclass(frozen=True)
class OwnGroup:
    """A group of the optimizer that is to be loaded."""

    names: frozenset[str]
    settings: Mapping[str, Any]


def name_parameters(
    optimizer: StoredOptimizer,
    parameters: Sequence[Parameter],
    path: Path,
    own_groups: Sequence[OwnGroup] = (),
) -> StoredOptimizer:
    """Return the optimizer with names in place of integer ids; see [Note: parameter ids].

    Args:
        optimizer: the stored optimizer; returned as it is if it has names.
        parameters: all parameters of the model, in its order.
        path: the checkpoint, for messages.
        own_groups: the groups of the optimizer that is to be loaded.

    Raises:
        CheckpointError: the numbers of parameters or the shapes differ, or the names are ambiguous.
    """
    if optimizer.has_names:
        return optimizer
    groups = [group for group in optimizer.groups if group.params]
    groups = groups or [StoredGroup(tuple(sorted(optimizer.state, key=int)), {})]
    shapes = {int(key): _shape_of(state) for key, state in optimizer.state.items()}
    count = sum(len(group.params) for group in groups)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    candidates = next((found for found in (trainable, list(parameters)) if len(found) == count), None)
    if candidates is None:
        raise CheckpointError(
            f"cannot load the optimizer from {path}: it numbers {counted(count, 'parameter')} without names, expected "
            f"the model's {len(trainable)} that are trained, or all {len(parameters)}. Freeze the same parameters, or "
            f"pass {NO_OPTIMIZER}."
        )
    assignments = _assignments(groups, shapes, candidates, own_groups)
    if not assignments:
        raise CheckpointError(
            f"cannot load the optimizer from {path}: it numbers {counted(count, 'parameter')} without names, in groups "
            f"of {', '.join(str(len(group.params)) for group in groups)}, and their shapes are not those of the model "
            f"in its order, expected {shapes_text(candidates)}. Save it with get_optimizer_state_dict, which has "
            f"names, or pass {NO_OPTIMIZER}."
        )
    if len(assignments) > 1:
        first, second = assignments[:2]
        unclear = sorted(first[key] for key in first if first[key] != second[key])
        raise CheckpointError(
            f"cannot load the optimizer from {path}: its groups number the parameters without names, and "
            f"{some(unclear, 'parameter')} can be in more than one of them, expected one way to match shapes. Create "
            "the optimizer with the same groups as in the saved program, or save it with get_optimizer_state_dict, "
            "which has names."
        )
    return optimizer.renamed(assignments[0])


def named_optimizer(contents: Contents) -> StoredOptimizer | None:
    """Return the optimizer of a checkpoint with parameter names, without a model; None if it has none.

    Integer ids follow the order of the weights in the checkpoint, without buffers.

    Raises:
        CheckpointError: the numbers of weights or the shapes differ, or the names are ambiguous.
    """
    optimizer = contents.optimizer
    if optimizer is None or optimizer.has_names:
        return optimizer
    count = sum(len(group.params) for group in optimizer.groups) or len(optimizer.state)
    return name_parameters(optimizer, parameters_of_weights(contents.weights, count), contents.foreign.path)


def parameters_of_weights(weights: Mapping[str, StoredTensor], count: int) -> list[Parameter]:
    """Return the weights of a checkpoint that can be the ``count`` parameters of its optimizer, without a model."""
    every = [Parameter(name, tensor.shape) for name, tensor in weights.items()]
    if len(every) == count:
        return every
    floating = [p for p in every if weights[p.name].dtype.is_floating_point and not _BUFFERS.search(p.name)]
    return floating if len(floating) == count else every


def shapes_text(parameters: Sequence[Parameter]) -> str:
    """Return the first shapes of parameters with their names, for a message."""
    listed = ", ".join(f"{p.name} {list(p.shape)}" for p in parameters[:3])
    return f"{listed}{', ...' if len(parameters) > 3 else ''}"


def _shape_of(state: Mapping[str, object]) -> Shape | None:
    """Return the shape of a parameter by its state; None if all of it is smaller."""
    shapes = [value.shape for key, value in state.items() if isinstance(value, StoredTensor) and key != "step"]
    return max(shapes, key=len, default=None)


def _assignments(
    groups: Sequence[StoredGroup],
    shapes: Mapping[int, Shape | None],
    parameters: Sequence[Parameter],
    own_groups: Sequence[OwnGroup],
) -> list[dict[int, str]]:
    """Return the different ways to name the ids that fit all shapes."""
    if len(groups) == 1:
        found = [_in_order(groups, shapes, [list(parameters)])]
    else:
        by_shape = _by_shape(groups, shapes, parameters)
        if by_shape is not None:
            return [by_shape]
        found = [_in_order(groups, shapes, parts) for parts in _ways_to_group(groups, parameters, own_groups)]
    distinct: list[dict[int, str]] = []
    for names in found:
        if names is not None and names not in distinct:
            distinct.append(names)
    return distinct


def _in_order(groups: Sequence[StoredGroup], shapes: Mapping[int, Shape | None], parts: Parts) -> dict[int, str] | None:
    if [len(group.params) for group in groups] != [len(part) for part in parts]:
        return None
    names = {}
    for group, part in zip(groups, parts, strict=True):
        for index, parameter in zip(group.params, part, strict=True):
            if shapes.get(int(index)) not in (None, parameter.shape):
                return None
            names[int(index)] = parameter.name
    return names


def _by_shape(
    groups: Sequence[StoredGroup], shapes: Mapping[int, Shape | None], parameters: Sequence[Parameter]
) -> dict[int, str] | None:
    """Return the names if each id has a shape that occurs in one group only; else None."""
    group_of: dict[Shape, set[int]] = {}
    ids: dict[Shape, list[int]] = {}
    for number, group in enumerate(groups):
        for index in group.params:
            shape = shapes.get(int(index))
            if shape is None:
                return None
            group_of.setdefault(shape, set()).add(number)
            ids.setdefault(shape, []).append(int(index))
    names: dict[Shape, list[str]] = {}
    for parameter in parameters:
        names.setdefault(parameter.shape, []).append(parameter.name)
    if any(len(numbers) > 1 for numbers in group_of.values()):
        return None
    if {shape: len(found) for shape, found in names.items()} != {shape: len(found) for shape, found in ids.items()}:
        return None
    return {index: name for shape, own in ids.items() for index, name in zip(own, names[shape], strict=True)}


def _ways_to_group(
    groups: Sequence[StoredGroup], parameters: Sequence[Parameter], own_groups: Sequence[OwnGroup]
) -> Iterator[Parts]:
    """Yield the parameters of each group, by the rules that programs use; the groups of the optimizer decide first."""
    if (parts := _as_own(own_groups, groups, parameters)) is not None:
        yield parts
        return
    if len(groups) == 2:
        rules: list[Callable[[Parameter], bool]] = [
            lambda p: len(p.shape) >= 2,
            lambda p: not _NO_DECAY.search(p.name),
            lambda p: not p.name.endswith("bias"),
        ]
        for rule in rules:
            chosen, rest = [p for p in parameters if rule(p)], [p for p in parameters if not rule(p)]
            yield [chosen, rest]
            yield [rest, chosen]
    sizes = [len(group.params) for group in groups]
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    yield [list(parameters[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]


def _as_own(own: Sequence[OwnGroup], stored: Sequence[StoredGroup], parameters: Sequence[Parameter]) -> Parts | None:
    """Return the parameters of each stored group if the optimizer to be loaded has the same groups, in any order.

    Groups are the same if they have as many parameters, and of those with as many, the same weight decay.
    """
    sizes = [len(group.params) for group in stored]
    if sorted(len(group.names) for group in own) != sorted(sizes):
        return None
    is_decay_needed = len(set(sizes)) < len(sizes)

    def key(size: int, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        return (size, settings.get("weight_decay")) if is_decay_needed else (size,)

    by_key = {key(len(group.names), group.settings): group.names for group in own}
    keys = [key(len(group.params), group.settings) for group in stored]
    if len(by_key) < len(own) or set(keys) != set(by_key):
        return None
    return [[p for p in parameters if p.name in by_key[each]] for each in keys]
