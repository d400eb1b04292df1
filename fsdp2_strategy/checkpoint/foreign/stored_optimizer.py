"""Find the optimizers in the content of another system's checkpoint, with state by parameter name or by number.

Input: a tree, see [Note: trees] in `tensors`. Output: `StoredOptimizer`s, which are removed from the tree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, Tree, values_of
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.model.names import clean

Keys = tuple[str | int, ...]
"""The path of a value in a tree."""

_NAMES = ("params", "param_names")
"""The entries of a group with its parameters."""
_PARAM_OF_GROUP = re.compile(r"(\d+)\.(params|param_names)\.(\d+)")
_WRAPPERS = ("_fsdp_wrapped_module.", "_forward_module.")


@dataclass(frozen=True)
class StoredGroup:
    """A parameter group in the file of an optimizer."""

    params: tuple[str | int, ...]
    """Names of parameters, or their integer ids."""
    settings: dict[str, Any]
    """Hyper-parameters, such as ``lr``."""


@dataclass(frozen=True)
class StoredOptimizer:
    """The state of an optimizer, of several optimizers that step one model as of one with all their groups."""

    state: dict[str | int, dict[str, Any]]
    """A `StoredTensor` or a plain value for each key, by parameter name or integer id."""
    groups: tuple[StoredGroup, ...]

    @property
    def has_names(self) -> bool:
        """Whether parameters have names, not integer ids."""
        keys = [*self.state, *(param for group in self.groups for param in group.params)]
        return not all(isinstance(key, int) for key in keys)

    def renamed(self, names: Mapping[Any, str]) -> StoredOptimizer:
        """Return the same with other names; names that are not in the mapping are kept."""
        state = {names.get(key, key): values for key, values in self.state.items()}
        groups = tuple(StoredGroup(tuple(names.get(p, p) for p in g.params), g.settings) for g in self.groups)
        return StoredOptimizer(state, groups)

    def settings_by_name(self) -> dict[str, dict[str, Any]]:
        """Return the hyper-parameters of each parameter."""
        return {str(param): group.settings for group in self.groups for param in group.params}

    def last_step(self) -> int:
        """Return the largest number of steps of a parameter; 0 if the state has none."""
        steps = [state["step"] for state in self.state.values() if "step" in state]
        stored = [step for step in steps if isinstance(step, StoredTensor) and step.is_number]
        numbers = [step for step in steps if isinstance(step, int | float)] + values_of(stored)
        return max(map(int, numbers), default=0)


def take_optimizers(tree: Tree, path: Keys) -> Iterator[StoredOptimizer]:
    """Remove the optimizers from a tree, and yield them; see [Note: parts]."""
    named = [key for key in path[-2:] if not str(key).isdecimal()]  # a list of optimizers has numbers
    is_named = bool(named) and "optim" in str(named[-1])
    if isinstance(tree.get("param_groups"), dict | list) or (is_named and isinstance(tree.get("state"), dict)):
        yield _nested_optimizer(tree.pop("state", {}), tree.pop("param_groups", {}))
    flat = {key: tree[key] for key in tree if str(key).startswith(("state.", "param_groups."))}
    if is_named or any(str(key).startswith("param_groups.") for key in flat):
        for key in flat:
            del tree[key]
        if flat:
            yield _flat_optimizer(flat, path)
    for key in [key for key, value in tree.items() if isinstance(value, dict)]:
        yield from take_optimizers(tree[key], (*path, key))
        if not tree[key]:
            del tree[key]


def _nested_optimizer(state: Any, groups: Any) -> StoredOptimizer:
    found = []
    listed = groups.values() if isinstance(groups, Mapping) else groups
    by_id: dict[int, str] = {}
    for group in listed:
        params = [_as_id(param) for param in _items(group.get("params", ()))]
        names: list[str | int] = [clean_name(str(name)) for name in _items(group.get("param_names", ()))]
        if names and all(isinstance(param, int) for param in params):
            by_id |= {param: str(name) for param, name in zip(params, names, strict=True) if isinstance(param, int)}
            params = names
        settings = {k: plain(v) for k, v in group.items() if k not in _NAMES}
        found.append(StoredGroup(tuple(clean_name(p) if isinstance(p, str) else p for p in params), settings))
    states = {}
    for key, values in (state or {}).items():
        name = _as_id(key)
        name = by_id.get(name, name) if isinstance(name, int) else clean_name(name)
        states[name] = dict(values)
    if not all(isinstance(key, int) for key in states) or any(isinstance(p, str) for g in found for p in g.params):
        states = {str(key): values for key, values in states.items()}  # a parameter whose name is a number
        found = [StoredGroup(tuple(str(p) for p in g.params), g.settings) for g in found]
    return StoredOptimizer(states, tuple(found))


def _flat_optimizer(flat: Mapping[Any, Any], path: Keys) -> StoredOptimizer:
    """Return the optimizer of keys such as ``state.<name>.exp_avg`` and ``param_groups.<name>.lr``.

    In place of names, the state may have integer ids, and the groups numbers, as in ``param_groups.0.params``.
    """
    state: dict[str | int, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = str(key).partition(".")
        name, _, of = rest.rpartition(".")
        match = _PARAM_OF_GROUP.fullmatch(rest)
        if kind == "state":
            state.setdefault(clean_name(name), {})[of] = value
        elif match:
            settings.setdefault(match[1], {}).setdefault(match[2], {})[int(match[3])] = value
        else:
            settings.setdefault(clean_name(name), {})[of] = value
    is_by_number = any(name.isdecimal() and "params" in own for name, own in settings.items())
    if not is_by_number and set(settings) == {"0"}:  # the only group
        is_by_number, settings["0"]["params"] = True, list(state)
    if is_by_number or (not settings and all(str(key).isdecimal() for key in state)):
        return _nested_optimizer(state, {key: settings[key] for key in sorted(settings, key=_number_of)})
    if unknown := [name for name in settings if state and name.isdecimal() and name not in state]:
        where = ".".join(map(str, path)) or "its keys"
        raise CheckpointError(
            f"cannot load the optimizer: the groups {', '.join(unknown[:3])} of {where} "
            "have no params, expected the names of parameters. Save the state with get_optimizer_state_dict, which has "
            "names."
        )
    named = {name: {k: plain(v) for k, v in own.items() if k not in _NAMES} for name, own in settings.items()}
    return StoredOptimizer(state, tuple(StoredGroup((name,), own) for name, own in named.items()))


def _number_of(name: str) -> int:
    return int(name) if name.isdecimal() else -1


def _as_id(key: Any) -> str | int:
    return int(key) if isinstance(key, int) or str(key).isdecimal() else str(key)


def _items(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, Mapping) else value or ())


def joined(optimizers: Sequence[StoredOptimizer], path: Path) -> StoredOptimizer | None:
    """Return several optimizers as one, with the groups of all; integer ids go on counting."""
    found = [each for each in optimizers if each.state or each.groups]
    if not found:
        return None
    if len({each.has_names for each in found}) > 1:
        raise CheckpointError(
            f"cannot load {path}: of its optimizers, some have names of parameters and some only numbers, "
            "expected names. Save the state with get_optimizer_state_dict."
        )
    state: dict[str | int, dict[str, Any]] = {}
    groups: list[StoredGroup] = []
    begin = 0
    for each in found:
        shift = {key: key + begin for key in each.state if isinstance(key, int)}
        shift |= {p: p + begin for group in each.groups for p in group.params if isinstance(p, int)}
        shifted = each.renamed(shift)  # type: ignore[arg-type]
        state |= shifted.state
        groups += shifted.groups
        begin += len(shift)
    return StoredOptimizer(state, tuple(groups))


def short_names(optimizer: StoredOptimizer, wanted: Iterable[str]) -> dict[str, str]:
    """Map stored names of parameters to those without the prefix that the names of the model do not have."""
    names = [*dict.fromkeys([*optimizer.settings_by_name(), *map(str, optimizer.state)])]
    prefix = prefix_of(names, set(wanted))
    return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def plain(value: Any) -> Any:
    """Return the value of a tensor with one element; other values as they are."""
    return values_of([value])[0] if isinstance(value, StoredTensor) and value.is_number else value


def prefix_of(stored: Iterable[str], wanted: set[str], preferred: Keys = ()) -> str:
    """Return the prefix with which most of the wanted names are stored; "" if none is stored."""
    found: Counter[str] = Counter()
    for name in stored:
        for at in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if name[at:] in wanted:
                found[name[:at]] += 1
                break
    if not found:
        return ""
    most = max(found.values())
    best = [prefix for prefix, count in found.items() if count == most]
    start = "".join(f"{key}." for key in preferred)
    return next((prefix for prefix in best if prefix.startswith(start)), best[0])


def clean_name(name: str) -> str:
    """Remove the prefixes of torch's and Lightning's wrappers from a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return clean(name)
