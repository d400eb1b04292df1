"""Tell the parts of another system's checkpoint apart: weights, optimizer, schedule, step, values of the trainer.

Input: a `Foreign`, and the names of a model if there is one. Output: `Contents`. Only metadata, schedules and plain
values are read; the tensors stay where they are. Not collective.

[Note: parts] An optimizer is a dictionary with ``param_groups`` and ``state``, or with keys that begin with these (as
``flatten_optimizer_state_dict`` and torchtitan write them); a schedule is one with ``last_epoch``. Both are found at
any depth, after [Note: flat keys]. The weights are those of the dictionary with the most names of the model; without a
model, those of the one whose name says so. All else that is plain data belongs to the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.flat_keys import AVERAGES, MODEL_KEYS, OPTIMIZER_NAME, nest_flat_keys
from fsdp2_strategy.checkpoint.foreign.sources import LIGHTNING, Foreign
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import (
    Keys,
    StoredOptimizer,
    clean_name,
    joined,
    plain,
    prefix_of,
    short_names,
    take_optimizers,
)
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, Tree, read_tree
from fsdp2_strategy.errors import CheckpointError

_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
"""Keys of the state of a parameter in torch's optimizers."""
_STEP_KEYS = ("global_step", "global_steps", "step", "iteration", "iter", "iter_num")
_WITHOUT_STEP = re.compile(r"dataloader|sampler|rng|random|callbacks|loops|config|args|param", re.IGNORECASE)
"""Keys below which no step of the run is looked for."""


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
    nest_flat_keys(tree)
    optimizers = list(take_optimizers(tree, ()))
    schedules = list(_take_schedules(tree, ()))
    step = _recorded_step(tree)
    weights, taken = _find_weights(tree, set(wanted), is_lightning=foreign.kind == LIGHTNING)
    optimizer = joined(optimizers, foreign.path)
    if optimizer is not None and optimizer.has_names:
        optimizer = optimizer.renamed(short_names(optimizer, wanted or weights))
    client_state, others = _client_state(tree, taken, {source.role for source in foreign.sources})
    schedule = _only_schedule(schedules, foreign)
    found = _step(foreign, step, optimizer, schedule)
    return Contents(
        foreign=foreign,
        weights=weights,
        optimizer=optimizer,
        schedule=schedule,
        step=found or 0,
        is_step_recorded=found is not None,
        client_state=client_state,
        others=others,
    )


def _merge(tree: Tree, other: Tree) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _take_schedules(tree: Tree, path: Keys) -> Iterator[tuple[Keys, dict[str, Any]]]:
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


def _only_schedule(found: Sequence[tuple[Keys, dict[str, Any]]], foreign: Foreign) -> dict[str, Any] | None:
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
        level = [v for n in level for k, v in n.items() if isinstance(v, dict) and not _WITHOUT_STEP.search(str(k))]
        level = [node for node in level if not any(isinstance(v, StoredTensor) and v.shape for v in node.values())]
    for key in sorted((key for key in map(str, tree) if not _WITHOUT_STEP.search(key)), key=len):
        value = plain(tree.get(key))  # a flat key
        if key.rpartition(".")[2] in _STEP_KEYS and isinstance(value, int):
            return value
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
    if not isinstance(last, int | float):
        return None
    processes = max(foreign.processes, 1)  # accelerate's schedule takes a step for each process
    return int(last) // processes if int(last) % processes == 0 else int(last)


def _tensors_in(tree: Tree, path: Keys = ()) -> Iterator[tuple[Keys, StoredTensor]]:
    for key, value in tree.items():
        if isinstance(value, StoredTensor):
            yield (*path, key), value
        elif isinstance(value, dict):
            yield from _tensors_in(value, (*path, key))


def _find_weights(tree: Tree, wanted: set[str], *, is_lightning: bool) -> tuple[dict[str, StoredTensor], set[Keys]]:
    """Return the weights by name, and the paths of all tensors that were taken."""
    found = {path: tensor for path, tensor in _tensors_in(tree) if not _is_optimizer_state(path, wanted)}
    regular = {path: tensor for path, tensor in found.items() if not _is_average(path, wanted)} or found
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
    names = {name: path for name, path in names.items() if not (len(path) == 1 and name in _STEP_KEYS)}
    weights = {name: regular[path] for name, path in names.items()}
    if not wanted:
        weights = _without_common_prefix(weights, is_lightning=is_lightning)
    return weights, set(names.values())


def _is_average(path: Keys, wanted: Collection[str]) -> bool:
    """Return whether a tensor is in a dictionary of moving averages, or has a flat key of one."""
    first = str(path[0]).partition(".")[0]
    is_flat = len(path) == 1 and str(path[0]) not in wanted and AVERAGES.search(first) is not None
    return is_flat or any(AVERAGES.search(str(key)) for key in path[:-1])


def _is_optimizer_state(path: Keys, wanted: Collection[str]) -> bool:
    """Return whether a tensor that is in no known form of an optimizer is of one by its name."""
    parts = re.split(r"[./]", ".".join(map(str, path)))
    is_wanted = any(".".join(parts[begin:]) in wanted for begin in range(len(parts)))
    return not is_wanted and (parts[-1] in _MOMENTS or any(OPTIMIZER_NAME.search(part) for part in parts[:-1]))


def _is_weight(tree: Tree, path: Keys, parent: Keys) -> bool:
    """Return whether a tensor below a node is a weight: if the node has tensors itself, only these are."""
    node = _node(tree, parent)
    has_own = any(isinstance(value, StoredTensor) and value.shape for value in node.values())
    return len(path) == len(parent) + 1 or not has_own


def _node(tree: Tree, path: Keys) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _preferred_path(tree: Tree) -> Keys:
    """Return the path of the dictionary whose name says that it has the weights, or that has the only tensors."""
    path: Keys = ()
    while True:
        inner = {key: value for key, value in tree.items() if isinstance(value, dict) and any(_tensors_in(value))}
        own = [key for key, value in tree.items() if isinstance(value, StoredTensor) and value.shape]
        named = [key for key in MODEL_KEYS if key in inner]
        inner = {key: value for key, value in inner.items() if not AVERAGES.search(str(key))}
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


def _client_state(tree: Tree, taken: set[Keys], roles: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plain data that no other part has, and the names of all else.

    Plain data in the file of a role belongs to no dictionary of the role's name.
    """
    others: list[str] = []

    def kept(node: Tree, path: Keys) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.items():
            here = (*path, key)
            if here in taken:
                continue
            if isinstance(value, dict):
                if (inner := kept(value, here)) or not value:
                    found[key] = inner
            elif isinstance(value, StoredTensor) and not value.is_number:
                others.append(".".join(map(str, here)))
            elif _is_plain(own := plain(value)):
                found[key] = own
            else:
                others.append(".".join(map(str, here)))
        return found

    state = kept(tree, ())
    for role in ("client", "model", "optimizer", "scheduler"):
        if (role in roles and isinstance(state.get(role), dict)) or state.get(role) == {}:
            own = state.pop(role)
            state = state | own if role == "client" else own | state
    return _plain_tree(state) if state else {}, tuple(others)


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return isinstance(value, Mapping) and all(isinstance(k, str | int) and _is_plain(v) for k, v in value.items())
