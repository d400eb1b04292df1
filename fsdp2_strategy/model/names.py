"""Return the names of parameters and buffers, and match names with patterns.

A pattern with ``*``, ``?`` or ``[`` is a shell-style pattern for the full dotted name. Any other pattern matches each
name that contains the pattern: ``"norm"`` matches ``model.norm.weight``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import non_persistent_buffers

_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
_COMPILE_PREFIX = "_orig_mod."


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any of ``patterns`` matches the dotted ``name``."""
    return any(
        fnmatch.fnmatchcase(name, pattern) if any(c in pattern for c in "*?[") else pattern in name
        for pattern in patterns
    )


def clean(name: str) -> str:
    """Remove the prefixes that torch's checkpoint and compile wrappers add to ``name``."""
    return name.replace(_CHECKPOINT_PREFIX, "").replace(_COMPILE_PREFIX, "")


def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """Return what ``model.named_modules`` does, without a call for each module and each level above it: in every step.

    A shared module has only its first name, or with ``remove_duplicate=False`` all of them.
    """
    walks = _walks.get()
    if walks is not None and (walked := walks.get((id(model), remove_duplicate))) is not None:
        return walked.copy()
    found: list[tuple[str, nn.Module]] = []
    known: dict[nn.Module, None] = {}
    remaining: list[tuple[str, nn.Module | None]] = [("", model)]
    while remaining:
        name, module = remaining.pop()
        if module is None or (remove_duplicate and module in known):
            continue
        known[module] = None
        found.append((name, module))
        if children := module._modules:
            prefix = f"{name}." if name else ""
            remaining += [(prefix + key, child) for key, child in reversed(children.items())]
    if walks is not None:
        walks[id(model), remove_duplicate] = found.copy()  # its first entry keeps the model, and so the id
    return found


_walks: ContextVar[dict[tuple[int, bool], list[tuple[str, nn.Module]]] | None] = ContextVar("walks", default=None)


@contextmanager
def modules_unchanged() -> Iterator[None]:
    """Make `named_modules` walk over each model once within the block, in which no model gets or loses a module."""
    token = None if _walks.get() is not None else _walks.set({})
    try:
        yield
    finally:
        if token is not None:
            _walks.reset(token)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by `clean` name, in module order; a tied parameter only under its first name."""
    found: dict[str, nn.Parameter] = {}
    known: set[int] = set()
    for module_name, module in named_modules(model):
        if parameters := module._parameters:
            prefix = clean(f"{module_name}." if module_name else "")
            for name, parameter in parameters.items():
                if parameter is not None and id(parameter) not in known:
                    known.add(id(parameter))
                    found[prefix + name] = parameter
    return found


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return for each tied parameter of a model all names of its tensor, cleaned."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(name))
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, each tensor once."""
    return {**named_parameters(model), **persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by `clean` name, in module order; a shared buffer only under its first name."""
    found = {}
    seen = set()
    for prefix, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in non_persistent_buffers(module) and id(buffer) not in seen:
                seen.add(id(buffer))
                found[clean(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


def generic_name(name: str) -> str:
    """Replace the numbers between dots in a name by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
