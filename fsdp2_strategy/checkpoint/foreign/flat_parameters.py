"""Take parameters out of FSDP1's flattened ones, of which each rank saved a shard.

Input: the state of an optimizer from one file per rank, as verl writes it with FSDP1, and the model. Output: the same
state by parameter name.

[Note: flattened parameters] FSDP1 without ``use_orig_params`` concatenates the parameters of a unit to one vector, in
the order of the unit's modules, pads it, and gives each rank an equal shard. The optimizer numbers these vectors in
module order: that of the root first. The files do not say which modules were units, so the units of the sharded model
are tried: all lengths must fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2_strategy.checkpoint.foreign.parameter_ids import Parameter
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredGroup, StoredOptimizer
from fsdp2_strategy.checkpoint.foreign.tensors import PickledTensor


@dataclass(frozen=True)
class _Unit:
    """The parameters of a unit, and where each begins in the vector."""

    parameters: tuple[Parameter, ...]

    @property
    def length(self) -> int:
        return sum(math.prod(p.shape) for p in self.parameters)

    def begins(self) -> dict[str, int]:
        begin, found = 0, {}
        for parameter in self.parameters:
            found[parameter.name] = begin
            begin += math.prod(parameter.shape)
        return found


def without_flat_parameters(
    optimizer: StoredOptimizer, parameters: Sequence[Parameter], unit_names: Sequence[str]
) -> StoredOptimizer:
    """Return the optimizer by parameter name if its ids are flattened parameters, else as it is.

    Args:
        optimizer: the stored optimizer.
        parameters: the parameters of the model, in its order.
        unit_names: the names of the modules that are units, without the root.
    """
    vectors = [param for group in optimizer.groups for param in group.params]
    if optimizer.has_names or not all(_is_flat(optimizer.state.get(param, {})) for param in vectors):
        return optimizer
    layers = [name for name in unit_names if name.rpartition(".")[2].isdecimal()]
    for names in (layers, unit_names):  # most programs wrap only the layers
        if (found := _with_units(optimizer, vectors, _units(parameters, names))) is not None:
            return found
    return optimizer


def _with_units(
    optimizer: StoredOptimizer, vectors: Sequence[str | int], units: Sequence[_Unit]
) -> StoredOptimizer | None:
    """Return the state of each parameter if the vectors are those of these units, else None."""
    if len(units) != len(vectors):
        return None
    state: dict[str | int, dict[str, Any]] = {}
    groups: dict[Any, list[str]] = {param: [] for param in vectors}
    for param, unit in zip(vectors, units, strict=True):
        stored = optimizer.state[param]
        shards = {key: value.of_ranks for key, value in stored.items() if _is_vector(value)}
        ranks = {len(of_ranks) for of_ranks in shards.values()}
        lengths = {sum(len(shard) for shard in of_ranks) for of_ranks in shards.values()}
        count = max(ranks)
        if len(ranks) > 1 or lengths != {-(-unit.length // count) * count}:
            return None
        begins = unit.begins()
        for parameter in unit.parameters:
            own = {key: _slice(of_ranks, begins[parameter.name], parameter) for key, of_ranks in shards.items()}
            state[parameter.name] = {**{key: v for key, v in stored.items() if key not in shards}, **own}
            groups[param].append(parameter.name)
    named = [
        StoredGroup(tuple(name for param in group.params for name in groups[param]), group.settings)
        for group in optimizer.groups
    ]
    return StoredOptimizer(state, tuple(named))


def _is_vector(value: Any) -> bool:
    return isinstance(value, PickledTensor) and len(value.shape) == 1 and bool(value.of_ranks)


def _is_flat(state: Mapping[str, Any]) -> bool:
    """Return whether all state of a parameter with elements is a vector with a shard of each rank."""
    large = [value for value in state.values() if isinstance(value, PickledTensor) and value.shape]
    return bool(large) and all(map(_is_vector, large))


def _units(parameters: Sequence[Parameter], unit_names: Sequence[str]) -> list[_Unit]:
    """Return the units with their own parameters, the root first, in the order of the model."""
    prefixes = sorted((f"{name}." for name in unit_names), key=len, reverse=True)
    of_unit: dict[str, list[Parameter]] = {"": []}
    for parameter in parameters:
        prefix = next((each for each in prefixes if parameter.name.startswith(each)), "")
        of_unit.setdefault(prefix, []).append(parameter)
    return [_Unit(tuple(found)) for found in of_unit.values() if found]


def _slice(of_ranks: Sequence[torch.Tensor], begin: int, parameter: Parameter) -> PickledTensor:
    """Return a parameter's elements of a vector."""
    length = math.prod(parameter.shape)
    pieces, at = [], 0
    for shard in of_ranks:
        first, last = max(begin - at, 0), min(begin + length - at, len(shard))
        if first < last:
            pieces.append(shard[first:last])
        at += len(shard)
    full = torch.cat(pieces) if len(pieces) != 1 else pieces[0]
    box = tuple((0, n) for n in parameter.shape)
    return PickledTensor(parameter.shape, full.dtype, ((box, full.view(parameter.shape)),))
