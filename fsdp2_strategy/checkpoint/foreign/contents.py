"""Tell the parts of another system's checkpoint apart: weights, optimizer, schedule, step, values of the trainer.

Input: a `Foreign`, and the names of a model if there is one. Output: `Contents`. Only metadata, schedules and plain
values are read; the tensors stay where they are. Not collective.

[Note: parts] An optimizer is a dictionary with ``param_groups`` and ``state``, or with keys that begin with these (as
``flatten_optimizer_state_dict`` and torchtitan write them); a schedule is one with ``last_epoch``. Both are found at
any depth. The weights are those of the dictionary with the most names of the model; without a model, those of the one
whose name says so. All else that is plain data belongs to the trainer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.recognise import LIGHTNING, Foreign
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, Tree, read_tree
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.model.names import clean

_Path = tuple[str | int, ...]

_MODEL_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "network",
    "policy",
    "actor",
    "weights",
    "params",
)
_STEP_KEYS = (
    "global_step",
    "global_steps",
    "step",
    "steps",
    "iteration",
    "iter",
    "iter_num",
    "train_steps",
    "num_steps",
)
_AVERAGES = re.compile(r"(^|_)(ema|average|averages|shadow)(_|$)", re.IGNORECASE)
_OF_RANK = re.compile(r"dataloader|sampler|rng|random|callbacks|loops", re.IGNORECASE)
"""Keys below which no step of the run is looked for."""
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
        steps = [plain(state["step"]) for state in self.state.values() if "step" in state]
        return max((int(step) for step in steps if isinstance(step, int | float)), default=0)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The parts of a checkpoint of another system."""

    foreign: Foreign
    weights: dict[str, StoredTensor]
    """By `clean` name, without prefixes such as DistributedDataParallel's ``module.``."""
    optimizer: StoredOptimizer | None
    schedule: dict[str, Any] | None
    step: int
    client_state: dict[str, Any]
    is_step_recorded: bool = True
    """Whether the trainer's values, a file or a name give the step, or the optimizer's state does."""
    others: tuple[str, ...] = ()
    """What is in the checkpoint and in none of these parts: random states, averages, objects."""

    @property
    def training_state(self) -> list[str]:
        """Which of "optimizer" and "scheduler" have state."""
        return [*(["optimizer"] if self.optimizer else []), *(["scheduler"] if self.schedule is not None else [])]

    @property
    def has_safetensors(self) -> bool:
        """Whether the weights are in a folder for ``from_pretrained``, under the names of files."""
        return any(source.form == "weights" for source in self.foreign.sources)

    @property
    def folder(self) -> Path:
        """The folder or file of the weights."""
        return self.foreign.model

    @property
    def has_position(self) -> bool:
        """Whether the position of the schedule is known: by its state, or by the step."""
        return self.schedule is not None or self.is_step_recorded

    @property
    def position(self) -> int:
        """The number of steps of the schedule."""
        last = (self.schedule or {}).get("last_epoch", self.step)
        # accelerate's schedule takes a step for each process.
        is_multiple = self.foreign.processes > 1 and self.step > 0 and last == self.step * self.foreign.processes
        return self.step if is_multiple else int(last)

    def renamed(self, names: Mapping[str, str]) -> Contents:
        """Return the same with other names of weights; names that are not in the mapping are kept."""
        return replace(self, weights={names.get(name, name): tensor for name, tensor in self.weights.items()})

    def describe(self) -> str:
        """Describe the parts in a few words, for messages."""
        parts = [f"{len(self.weights)} weights"]
        if self.optimizer:
            parts.append(f"the optimizer's state of {len(self.optimizer.state)} parameters")
        parts += ["a schedule"] if self.schedule is not None else []
        return f"{', '.join(parts)} (step {self.step})"


def read_contents(foreign: Foreign, wanted: Collection[str] = ()) -> Contents:
    """Return the parts of a checkpoint; ``wanted`` has the names of the model that is to be loaded, if there is one."""
    tree: Tree = {}
    for source in foreign.sources:
        _merge(tree, read_tree(source))
    optimizers = list(_take_optimizers(tree, ()))
    schedules = list(_take_schedules(tree, ()))
    step = _recorded_step(tree)
    weights, taken = _find_weights(tree, set(wanted), is_lightning=foreign.kind == LIGHTNING)
    optimizer = _joined(optimizers, foreign)
    if optimizer is not None and optimizer.has_names:
        optimizer = optimizer.renamed(_parameter_names(optimizer, wanted or weights))
    client_state, others = _client_state(tree, taken)
    schedule = _only_schedule(schedules, foreign)
    found = _step(foreign, step, optimizer, schedule)
    return Contents(
        foreign=foreign,
        weights=weights,
        optimizer=optimizer,
        schedule=schedule,
        step=foreign.number if found is None else found,
        is_step_recorded=found is not None,
        client_state=client_state,
        others=others,
    )


def plain(value: Any) -> Any:
    """Return the value of a tensor with one element; other values as they are."""
    return value.value() if isinstance(value, StoredTensor) and value.shape in ((), (1,)) else value


def _merge(tree: Tree, other: Tree) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _take_optimizers(tree: Tree, path: _Path) -> Iterator[StoredOptimizer]:
    """Remove the optimizers from a tree, and yield them; see [Note: parts]."""
    is_named = "optim" in str(path[-1] if path else "")
    if isinstance(tree.get("param_groups"), dict | list) or (is_named and isinstance(tree.get("state"), dict)):
        yield _nested_optimizer(tree.pop("state", {}), tree.pop("param_groups", {}))
    flat = {key: tree[key] for key in tree if str(key).startswith(("state.", "param_groups."))}
    if is_named or any(str(key).startswith("param_groups.") for key in flat):
        for key in flat:
            del tree[key]
        if flat:
            yield _flat_optimizer(flat)
    for key in [key for key, value in tree.items() if isinstance(value, dict)]:
        yield from _take_optimizers(tree[key], (*path, key))
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
        settings = {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")}
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


def _flat_optimizer(flat: Mapping[Any, Any]) -> StoredOptimizer:
    """Return the optimizer of keys such as ``state.<name>.exp_avg`` and ``param_groups.<name>.lr``."""
    state: dict[str | int, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = str(key).partition(".")
        name, _, of = rest.rpartition(".")
        if kind == "state":
            state.setdefault(clean_name(name), {})[of] = value
        elif of not in ("params", "param_names"):
            settings.setdefault(clean_name(name), {})[of] = plain(value)
    return StoredOptimizer(state, tuple(StoredGroup((name,), own) for name, own in settings.items()))


def _as_id(key: Any) -> str | int:
    return int(key) if isinstance(key, int) or str(key).isdecimal() else str(key)


def _items(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, Mapping) else value or ())


def _joined(optimizers: Sequence[StoredOptimizer], foreign: Foreign) -> StoredOptimizer | None:
    """Return several optimizers as one, with the groups of all; integer ids go on counting."""
    found = [each for each in optimizers if each.state or each.groups]
    if not found:
        return None
    if len({each.has_names for each in found}) > 1:
        raise CheckpointError(
            f"cannot load {foreign.path}: of its optimizers, some have names of parameters and some only numbers, "
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


def _parameter_names(optimizer: StoredOptimizer, wanted: Iterable[str]) -> dict[str, str]:
    """Map stored names of parameters to those without the prefix that the names of the model do not have."""
    names = [*dict.fromkeys([*optimizer.settings_by_name(), *map(str, optimizer.state)])]
    prefix = prefix_of(names, set(wanted))
    return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _take_schedules(tree: Tree, path: _Path) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """Remove the schedules from a tree, and yield them with their paths; see [Note: parts]."""
    for key in list(tree):
        value = tree[key]
        if not isinstance(value, dict):
            continue
        if "last_epoch" in value:
            yield (*path, key), {k: _plain_tree(v) for k, v in tree.pop(key).items()}
        else:
            yield from _take_schedules(value, (*path, key))
            if not value:
                del tree[key]


def _only_schedule(found: Sequence[tuple[_Path, dict[str, Any]]], foreign: Foreign) -> dict[str, Any] | None:
    positions = {schedule["last_epoch"] for _, schedule in found}
    if len(positions) > 1:
        listed = ", ".join(f"{'.'.join(map(str, path))} at {schedule['last_epoch']}" for path, schedule in found)
        raise CheckpointError(
            f"cannot load {foreign.path}: it has {len(found)} schedules at different steps ({listed}), expected one. "
            "Pass load_lr_scheduler_states=False (load_checkpoint: scheduler=None)."
        )
    return found[0][1] if found else None


def _plain_tree(value: Any) -> Any:
    """Return a tree with lists in place of dictionaries with the keys 0, 1, ..., and numbers in place of tensors."""
    if isinstance(value, dict):
        own = {key: _plain_tree(each) for key, each in value.items()}
        return list(own.values()) if own and list(own) == list(range(len(own))) else own
    return plain(value)


def _recorded_step(tree: Tree) -> int | None:
    """Return the step that the trainer's values name; the one nearest to the top counts."""
    level = [tree]
    while level:
        for key in _STEP_KEYS:
            for node in level:
                value = plain(node.get(key))
                if isinstance(value, int | float) and not isinstance(value, bool) and int(value) == value:
                    return int(value)
        level = [v for n in level for k, v in n.items() if isinstance(v, dict) and not _OF_RANK.search(str(k))]
        level = [node for node in level if not any(isinstance(v, StoredTensor) and v.shape for v in node.values())]
    return None


def _step(
    foreign: Foreign, recorded: int | None, optimizer: StoredOptimizer | None, schedule: Mapping[str, Any] | None
) -> int | None:
    """Return the step: of the trainer's values, of a name that says so, of the optimizer, of the schedule."""
    for step in (recorded, foreign.named_step):
        if step is not None:
            return step
    if optimizer is not None and (step := optimizer.last_step()):
        return step
    last = (schedule or {}).get("last_epoch")
    return int(last) if isinstance(last, int | float) else None


def _tensors_in(tree: Tree, path: _Path = ()) -> Iterator[tuple[_Path, StoredTensor]]:
    for key, value in tree.items():
        if isinstance(value, StoredTensor):
            yield (*path, key), value
        elif isinstance(value, dict):
            yield from _tensors_in(value, (*path, key))


def _find_weights(tree: Tree, wanted: set[str], *, is_lightning: bool) -> tuple[dict[str, StoredTensor], set[_Path]]:
    """Return the weights by name, and the paths of all tensors that were taken."""
    found = dict(_tensors_in(tree))
    regular = {p: t for p, t in found.items() if not any(_AVERAGES.search(str(key)) for key in p[:-1])} or found
    dotted = {path: clean_name(".".join(map(str, path))) for path in regular}
    prefix = prefix_of(dotted.values(), wanted, preferred=_preferred_path(tree)) if wanted else ""
    below = [path for path, name in dotted.items() if name.startswith(prefix)]
    hits = [path for path in below if dotted[path].removeprefix(prefix) in wanted]
    if 2 * len(hits) >= min(len(below), len(wanted)) > 0:  # else it is another model
        parents = {path[:-1] for path in hits}
    else:
        parent = _preferred_path(tree)
        parents = {path[:-1] for path in regular if path[: len(parent)] == parent and _is_weight(tree, path, parent)}
        prefix = "".join(f"{key}." for key in parent)
    names = {dotted[p].removeprefix(prefix): p for p in regular if p[:-1] in parents and dotted[p].startswith(prefix)}
    weights = {name: regular[path] for name, path in names.items() if not (len(path) == 1 and name in _STEP_KEYS)}
    if not wanted:
        weights = _without_common_prefix(weights, is_lightning=is_lightning)
    return weights, {path for path in regular if path[:-1] in parents}


def _is_weight(tree: Tree, path: _Path, parent: _Path) -> bool:
    """Return whether a tensor below a node is a weight: if the node has tensors itself, only these are."""
    node = _node(tree, parent)
    has_own = any(isinstance(value, StoredTensor) and value.shape for value in node.values())
    return len(path) == len(parent) + 1 or not has_own


def _node(tree: Tree, path: _Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _preferred_path(tree: Tree) -> _Path:
    """Return the path of the dictionary whose name says that it has the weights, or that has the only tensors."""
    path: _Path = ()
    while True:
        inner = {key: value for key, value in tree.items() if isinstance(value, dict) and any(_tensors_in(value))}
        own = [key for key, value in tree.items() if isinstance(value, StoredTensor) and value.shape]
        named = [key for key in _MODEL_KEYS if key in inner]
        inner = {key: value for key, value in inner.items() if not _AVERAGES.search(str(key))}
        if named:
            key: str | int = named[0]
        elif not own and len(inner) == 1:
            key = next(iter(inner))
        else:
            return path
        path, tree = (*path, key), tree[key]


def _without_common_prefix(weights: dict[str, StoredTensor], *, is_lightning: bool) -> dict[str, StoredTensor]:
    """Remove ``module.`` from all names; from those of a LightningModule, the attribute that holds the model."""
    firsts = {name.partition(".")[0] for name in weights}
    if len(firsts) == 1 and len(weights) > 1 and (firsts == {"module"} or is_lightning):
        prefix = f"{firsts.pop()}."
        return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def prefix_of(stored: Iterable[str], wanted: set[str], preferred: _Path = ()) -> str:
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


def _client_state(tree: Tree, taken: set[_Path]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plain data that no other part has, and the names of all else."""
    others: list[str] = []

    def kept(node: Tree, path: _Path) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.items():
            here = (*path, key)
            if here in taken:
                continue
            if isinstance(value, dict):
                if (inner := kept(value, here)) or not value:
                    found[key] = inner
            elif isinstance(value, StoredTensor) and value.shape not in ((), (1,)):
                others.append(".".join(map(str, here)))
            elif _is_plain(own := plain(value)):
                found[key] = own
            else:
                others.append(".".join(map(str, here)))
        return found

    state = kept(tree, ())
    client = state.pop("client", None)
    state |= client if isinstance(client, dict) else {}
    for key in ("model", "optimizer", "scheduler"):
        if state.get(key) == {}:
            del state[key]
    return _plain_tree(state) if state else {}, tuple(others)


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return isinstance(value, Mapping) and all(isinstance(k, str | int) and _is_plain(v) for k, v in value.items())


def names_text(names: Collection[str]) -> str:
    """Return a short list of names for a message."""
    return some(sorted(names))
