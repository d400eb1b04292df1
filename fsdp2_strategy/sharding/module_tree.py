"""Index the modules of a model by all their paths from the root (a shared module has several); match their names.

Input: a model and its ignored modules, or patterns for the names of modules. Output: names, owners, depths and module
order, or the matching modules, for `plan`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy.errors import ShardError, did_you_mean
from fsdp2_strategy.hf.library_internals import lists_blocks
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.sharding.blocks import can_be_unit


class ModuleTree:
    """Index a model's modules by all their paths, except sharded modules and modules within ignored modules."""

    def __init__(self, model: nn.Module, ignored: Collection[nn.Module]) -> None:
        self.model = model
        self.ignored = dict.fromkeys(ignored)
        """Modules that are not sharded: `paths` contains them, but no module within them."""
        self.paths: dict[nn.Module, list[tuple[nn.Module, ...]]] = defaultdict(list)
        """For each module, all chains of modules from the root to the module."""
        self.names: dict[nn.Module, str] = {m: clean(n) for n, m in model.named_modules()}
        """The names of all modules in module order, the root first."""
        self._add(model, ())
        self.ignored = {module: None for module in ignored if module in self.paths}
        self.all_names: dict[nn.Parameter, list[str]] = defaultdict(list)
        """The names of each parameter in the tree; a tied parameter has several."""
        self.owners: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        """The modules in the tree that hold each parameter directly."""
        for module in filter(self.__contains__, self.paths):
            for parameter in module.parameters(recurse=False):
                self.owners[parameter].append(module)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in self.owners:
                self.all_names[parameter].append(clean(name))
        self.parameters = {names[0]: parameter for parameter, names in self.all_names.items()}

    def _add(self, module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        self.paths[module].append((*above, module))
        for child in module.children() if module not in self.ignored else ():
            if not isinstance(child, FSDPModule):
                self._add(child, (*above, module))

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether the module is in the tree and not ignored."""
        return module in self.paths and module not in self.ignored

    def inside(self, module: nn.Module, units: Container[nn.Module]) -> bool:
        """Return whether each path of the module contains a unit; the module itself may be the unit."""
        return all(any(m in units for m in path) for path in self.paths[module])

    def units_around(self, module: nn.Module, units: Container[nn.Module]) -> set[nn.Module]:
        """Return the innermost unit of each path of the module; the module itself may be the unit."""
        return {next(m for m in reversed(path) if m in units) for path in self.paths[module]}

    def depth(self, module: nn.Module) -> int:
        """Return the length of the module's longest path; a module is deeper than every module that contains it."""
        return max(map(len, self.paths[module]))

    def transformers_around(self, module: nn.Module) -> list[list[nn.Module]]:
        """Return, for each path of a module, the transformers models that contain the module."""
        return [[m for m in path[:-1] if lists_blocks(m)] for path in self.paths[module]]

    def callable_around(self, module: nn.Module) -> nn.Module:
        """Return the innermost module around a module, or itself, that can be a unit; else the root; on its first path.

        For example, the forward of a ParameterList is never called, so it cannot be a unit.
        """
        return next((m for m in reversed(self.paths[module][0]) if can_be_unit(m)), self.model)

    def parameters_by_unit(self, units: Container[nn.Module]) -> dict[nn.Module, dict[str, nn.Parameter]]:
        """Return the parameters that belong to each unit; 0-d parameters belong to none."""
        found: dict[nn.Module, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in self.parameters.items():
            if parameter.ndim:
                (unit,) = self.units_around(self.owners[parameter][0], units)
                found[unit][name] = parameter
        return found


def matching_modules(model: nn.Module, patterns: Sequence[str], action: str) -> list[nn.Module]:
    """Return the modules whose full dotted name matches a pattern, without modules inside another match.

    ``action`` is the purpose of the setting, for the error if a pattern matches no module, or the model itself.
    """
    names = [(clean(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        found = [name for name, _ in names if re.fullmatch(pattern, name)]
        if "" in found or not found:
            what = "the model itself" if found else f"no module of {type(model).__name__}"
            within = [name for name, _ in names if name]
            raise ShardError(
                f"cannot {action}: the pattern {pattern!r} matches {what}, expected a regular expression that "
                f"matches the full names of modules within it. The first names are {', '.join(within[:3])}."
                f"{did_you_mean(pattern, within)}"
            )
    matched = dict.fromkeys(m for name, m in names if any(re.fullmatch(pattern, name) for pattern in patterns))
    within_matched = {m for outer in matched for m in outer.modules() if m is not outer}
    return [module for module in matched if module not in within_matched]
