"""Take parameters out of FSDP1's flattened ones, of which each rank saved a shard.

Input: the state of an optimizer from one file per rank, as verl writes it with FSDP1, and the model. Output: the same
state by parameter name.

[Note: flattened parameters] FSDP1 without ``use_orig_params`` concatenates the parameters of a unit to one vector, in
the order of the unit's modules, pads it, and gives each rank an equal shard. The optimizer numbers these vectors in
module order: that of the root first. The files do not say which modules were units, so the units of the sharded model
are tried: all lengths must fit. Which vector is which unit follows from the groups, as in [Note: parameter ids].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.checkpoint.foreign.parameter_ids import OwnGroup, Parameter, name_parameters
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredGroup, StoredOptimizer
from fsdp2_strategy.checkpoint.foreign.tensors import PickledTensor


@dataclass(frozen=True)
class _Unit:
    """The parameters of a unit, and where each begins in the vector."""

    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """The name of its first parameter."""
        return self.parameters[0].name

    def shard_length(self, ranks: int) -> int:
        """Return the length of each rank's shard, with padding."""
        return -(-sum(math.prod(p.shape) for p in self.parameters) // ranks)

    def begins(self) -> dict[str, int]:
        begin, found = 0, {}
        for parameter in self.parameters:
            found[parameter.name] = begin
            begin += math.prod(parameter.shape)
        return found


def without_flat_parameters(
    optimizer: StoredOptimizer,
    parameters: Sequence[Parameter],
    unit_names: Sequence[str],
    path: Path,
    own_groups: Sequence[OwnGroup],
) -> StoredOptimizer:
    """Return the optimizer by parameter name if its ids are flattened parameters, else as it is.

    Args:
        optimizer: the stored optimizer.
        parameters: the parameters of the model, in its order.
        unit_names: the names of the modules that are units, without the root.
        path: the checkpoint, for messages.
        own_groups: the groups of the optimizer that is to be loaded.

    Raises:
        CheckpointError: the groups allow several units for a vector.
    """
    vectors = [param for group in optimizer.groups for param in group.params]
    if optimizer.has_names or not all(_is_flat(optimizer.state.get(param, {})) for param in vectors):
        return optimizer
    layers = [name for name in unit_names if name.rpartition(".")[2].isdecimal()]
    for names in (layers, unit_names):  # most programs wrap only the layers
        units = {unit.name: unit for unit in _units(parameters, names)}
        if (ranks := _ranks_if_fitting(optimizer, vectors, list(units.values()))) is not None:
            as_parameters = [Parameter(name, (unit.shard_length(ranks),)) for name, unit in units.items()]
            own = _groups_of_units(own_groups, units)
            return _with_units(name_parameters(optimizer, as_parameters, path, own), units)
    return optimizer


def _ranks_if_fitting(optimizer: StoredOptimizer, vectors: Sequence[str | int], units: Sequence[_Unit]) -> int | None:
    """Return the number of ranks that saved the vectors if their lengths, in any order, are those of these units."""
    of_vector = [{_shards(value) for value in optimizer.state[p].values() if _is_vector(value)} for p in vectors]
    ranks = {len(lengths) for own in of_vector for lengths in own}
    if len(ranks) != 1 or any(len(own) != 1 for own in of_vector):
        return None
    count = ranks.pop()
    expected = sorted(unit.shard_length(count) * count for unit in units)
    return count if sorted(sum(lengths) for own in of_vector for lengths in own) == expected else None


def _groups_of_units(own_groups: Sequence[OwnGroup], units: Mapping[str, _Unit]) -> list[OwnGroup]:
    """Return the groups with names of units in place of those of their parameters; none if a group has part of one."""
    unit_of = {parameter.name: name for name, unit in units.items() for parameter in unit.parameters}
    groups = [OwnGroup(tuple(dict.fromkeys(unit_of.get(n, "") for n in g.names)), g.settings) for g in own_groups]
    names = [name for group in groups for name in group.names]
    return groups if len(set(names)) == len(names) else []


def _with_units(optimizer: StoredOptimizer, units: Mapping[str, _Unit]) -> StoredOptimizer:
    """Return the state of each parameter, from an optimizer with the names of units."""
    state: dict[str | int, dict[str, Any]] = {}
    for name, stored in optimizer.state.items():
        unit = units[str(name)]
        shards = {key: value.of_ranks for key, value in stored.items() if _is_vector(value)}
        begins = unit.begins()
        for parameter in unit.parameters:
            own = {key: _slice(of_ranks, begins[parameter.name], parameter) for key, of_ranks in shards.items()}
            state[parameter.name] = {**{key: v for key, v in stored.items() if key not in shards}, **own}
    groups = [
        StoredGroup(tuple(p.name for name in group.params for p in units[str(name)].parameters), group.settings)
        for group in optimizer.groups
    ]
    return StoredOptimizer(state, tuple(groups))


def _shards(value: PickledTensor) -> tuple[int, ...]:
    return tuple(map(len, value.of_ranks))


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
