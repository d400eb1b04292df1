"""Nest the flat keys with dots that some programs write, such as ``optimizer.state.layers.0.weight.exp_avg``.

Input: the tree of a checkpoint, see [Note: trees] in `tensors`. Output: the tree with a dictionary for each optimizer
and schedule and, where these are flat, for the weights. The names of parameters keep their dots.

[Note: flat keys] ``{f"model.{name}": ..., f"optimizer.{key}": ...}`` has the same parts as nested dictionaries. Dots
are also in the names of parameters, so a key is divided only where it says so: before ``state.`` and ``param_groups.``
if the prefix names an optimizer or has both, before ``last_epoch``, and after the container of the weights if an
optimizer has such a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, Tree

MODEL_KEYS = (
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
"""Names of the dictionary of the weights, as programs choose them."""
AVERAGES = re.compile(r"(^|_)(ema|average|averages|shadow)(_|$)", re.IGNORECASE)
"""Names of dictionaries with moving averages of the weights."""
OPTIMIZER_NAME = re.compile(r"(?:^|[._])optim(?:izers?)?(?=[._\d]|$)", re.IGNORECASE)
"""Names of an optimizer and its state, also within a key with dots."""
_PART_OF_OPTIMIZER = re.compile(r"(?:^|\.)(state|param_groups)\.")


def nest_flat_keys(tree: Tree) -> None:
    """Nest the flat keys in all dictionaries of a tree, in place; see [Note: flat keys]."""
    keys = [key for key in tree if isinstance(key, str) and "." in key]
    optimizers = _prefixes_of_optimizers(keys)
    schedules = {key.removesuffix("last_epoch") for key in keys if key.endswith(".last_epoch")}
    longest_first = sorted(optimizers | schedules, key=len, reverse=True)
    of_prefix: dict[str, list[str]] = {}  # in the order of the file, by which several optimizers number parameters
    for key in keys:
        if prefix := next(filter(key.startswith, longest_first), None):
            of_prefix.setdefault(prefix, []).append(key)
    for prefix, own in of_prefix.items():
        _nest(tree, own, prefix)
    names = {name for prefix in optimizers for name in _parameters_of(_node(tree, prefix))}
    for around in {_around(prefix) for prefix in optimizers}:
        rest = [key for key in keys if key in tree and key.startswith(around) and isinstance(tree[key], StoredTensor)]
        for first in _containers([key.removeprefix(around) for key in rest], names):
            prefix = f"{around}{first}."
            _nest(tree, [key for key in keys if key in tree and key.startswith(prefix)], prefix)
    for value in tree.values():
        if isinstance(value, dict):
            nest_flat_keys(value)


def _prefixes_of_optimizers(keys: Collection[str]) -> set[str]:
    """Return the prefixes with a dot at the end before ``state.`` and ``param_groups.``; "" is none."""
    kinds: dict[str, set[str]] = {}
    for key in keys:
        for match in _PART_OF_OPTIMIZER.finditer(key):
            kinds.setdefault(key[: match.start(1)], set()).add(match[1])
    named = {prefix for prefix, found in kinds.items() if OPTIMIZER_NAME.search(prefix) or len(found) > 1} - {""}
    # In the name of a parameter of an optimizer, which can contain "state.", no other optimizer begins.
    return {prefix for prefix in named if not any(_is_below(prefix, other) for other in named)}


def _is_below(prefix: str, other: str) -> bool:
    return prefix.startswith((f"{other}state.", f"{other}param_groups."))


def _around(prefix: str) -> str:
    """Return the prefix of the dictionary that an optimizer is in; one in a list has its number at the end."""
    parts = prefix.removesuffix(".").split(".")
    while parts[-1].isdecimal() and len(parts) > 1:
        parts.pop()
    return "".join(f"{part}." for part in parts[:-1])


def _containers(weights: Collection[str], names: Collection[str]) -> Collection[str]:
    """Return the first parts of the weights' names if they are those of containers, not of modules.

    ``names`` has the parameters of the optimizers.
    """
    firsts = {key.partition(".")[0] for key in weights}
    is_named_so = all(first in MODEL_KEYS or AVERAGES.search(first) for first in firsts)
    return firsts if is_named_so and not set(names) & set(weights) else ()


def _parameters_of(optimizer: object) -> Iterator[str]:
    for key in optimizer if isinstance(optimizer, dict) else ():
        kind, _, rest = str(key).partition(".")
        if kind == "state" and "." in rest:
            yield rest.rpartition(".")[0]


def _node(tree: Tree, prefix: str) -> object:
    node: object = tree
    for part in prefix.removesuffix(".").split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _nest(tree: Tree, keys: Collection[str], prefix: str) -> None:
    """Move keys with a prefix to the dictionaries that the parts of the prefix name."""
    node = tree
    for part in prefix.removesuffix(".").split("."):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        node = inner
    for key in keys:
        node.setdefault(key.removeprefix(prefix), tree.pop(key))
