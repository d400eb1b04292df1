"""Load a checkpoint: find it, compare its structure with the model's, then copy.

Input: a directory, and optionally a tag. Output: a model, optimizer, schedule and generators as they were saved. Each
phase ends alike on all ranks; see [Note: one decision] in `ranks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint import layout
from fsdp2_strategy.checkpoint.rng import derive_rng, load_rng
from fsdp2_strategy.checkpoint.state import (
    allocate_optimizer_state,
    check_optimizer,
    model_tensors,
    restore_optimizer,
    restore_scheduler,
)
from fsdp2_strategy.checkpoint.storage import check_shapes, read_layout, read_tensors
from fsdp2_strategy.errors import CheckpointError, did_you_mean
from fsdp2_strategy.ranks import agree, all_or_none, from_rank_0, is_rank_0, log
from fsdp2_strategy.residency import clear_gradients


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Say what was loaded."""

    path: Path
    step: int
    """Optimizer steps taken when it was saved."""
    client_state: dict[str, Any]
    missing: tuple[str, ...] = ()
    """Names that the model has and the checkpoint has not; they keep their values (not strict)."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and the model has not (not strict)."""
    cast: tuple[str, ...] = ()
    """Names that have another dtype in the checkpoint than in the model."""


def load_checkpoint(
    model: nn.Module,
    load_dir: str | Path,
    *,
    tag: str | None = None,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    strict: bool = True,
) -> LoadedCheckpoint | None:
    """Load a checkpoint into a sharded model, saved on any number of ranks and at any shard size; collective.

    Args:
        model: a sharded model, or its wrapper.
        load_dir: the directory of a run's checkpoints, of which the newest or ``tag`` is loaded; or one checkpoint.
        tag: name of the checkpoint in ``load_dir``.
        optimizer: gets its state and hyper-parameters back, by parameter name. With it the run goes on, so the random
            state is restored too; a model that is loaded alone leaves it as it is.
        scheduler: gets its state back.
        strict: the checkpoint and the model must hold the same names; else what both have is loaded and the rest is
            reported. Shapes must agree either way.

    Returns:
        What was loaded; None where the directory is missing or holds no committed checkpoint.

    Raises:
        CheckpointError: on every rank: no such tag, other names or shapes, no state for the optimizer or scheduler. It
            is raised before the model is touched where the structure tells.
    """
    asked = (str(load_dir), tag, optimizer is None, scheduler is None, strict)
    agree("load", asked, CheckpointError, "the same directory, tag and objects to load everywhere.")
    with all_or_none(f"find a checkpoint in {load_dir}", CheckpointError):
        found = _find(Path(load_dir), tag) if is_rank_0() else None
    path = from_rank_0(found)
    if path is None:
        log("no checkpoint in %s: nothing is loaded", load_dir)
        return None
    with all_or_none(f"load {path}", CheckpointError):
        state = json.loads((path / layout.TRAINER_STATE).read_text(encoding="utf-8"))
        tensors, missing, unexpected, cast = _match_model(model, path, strict=strict)
        slots: dict[str, dict[str, torch.Tensor]] = {}
        flat: dict[str, torch.Tensor] = {}
        if optimizer is not None:
            _require(state["optimizer"], "optimizer", "load_optimizer_states=False", path)
            stored = read_layout(path / layout.OPTIMIZER)
            check_optimizer(model, optimizer, state["optimizer"], strict=strict)
            slots, flat = allocate_optimizer_state(model, optimizer, stored, strict=strict)
            check_shapes("optimizer", flat, stored)
        if scheduler is not None:
            _require(state["scheduler"], "scheduler", "load_lr_scheduler_states=False", path)
    with all_or_none(f"load the model from {path}", CheckpointError), torch.no_grad():
        clear_gradients(model)
        read_tensors(tensors, path / layout.MODEL)
    if optimizer is not None:
        with all_or_none(f"load the optimizer from {path}", CheckpointError):
            read_tensors(flat, path / layout.OPTIMIZER)
            restore_optimizer(model, optimizer, slots, state["optimizer"])
    with all_or_none(f"load the run's state from {path}", CheckpointError):
        if scheduler is not None:
            restore_scheduler(scheduler, state["scheduler"])
        if optimizer is not None:
            _restore_rng(path, state)
    log("loaded %s (step %d)", path, state["step"])
    return LoadedCheckpoint(
        path=path,
        step=state["step"],
        client_state=state["client_state"],
        missing=missing,
        unexpected=unexpected,
        cast=cast,
    )


def _find(load_dir: Path, tag: str | None) -> Path | None:
    """Return the checkpoint meant, None where there is none at all."""
    if tag is None and (load_dir / layout.MANIFEST).exists():
        if layout.read_checkpoint(load_dir) is None:
            raise CheckpointError(
                f"cannot load: {load_dir} is no whole checkpoint: files of its manifest are missing or cut off, or it "
                "is of another format. Load another one."
            )
        return load_dir
    layout.recover(load_dir)
    committed = layout.list_checkpoints(load_dir)
    if tag is None:
        return committed[-1].path if committed else None
    tags = [c.tag for c in committed]
    if tag not in tags:
        raise CheckpointError(
            f"cannot load: {tag!r} is no committed checkpoint in {load_dir}, expected one of {tags}."
            f"{did_you_mean(tag, tags)}"
        )
    return load_dir / tag


def _match_model(
    model: nn.Module, path: Path, *, strict: bool
) -> tuple[dict[str, torch.Tensor], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the tensors to fill, and the names that are missing, unexpected and cast."""
    tensors = model_tensors(model)
    stored = read_layout(path / layout.MODEL)
    missing = tuple(name for name in tensors if name not in stored)
    unexpected = tuple(name for name in stored if name not in tensors)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"cannot load the model: the checkpoint lacks {_some(missing)} and holds {_some(unexpected)} that the "
            "model does not have, expected the same names. Build the same model, or pass load_module_strict=False."
        )
    shared = {name: tensor for name, tensor in tensors.items() if name in stored}
    check_shapes("model", shared, stored)
    cast = tuple(name for name, tensor in shared.items() if stored[name][1] != tensor.dtype)
    for what, names in (("missing", missing), ("unexpected", unexpected), ("cast to the model's dtype", cast)):
        if names:
            log("%s: %s", what, _some(names))
    return shared, missing, unexpected, cast


def _some(names: tuple[str, ...]) -> str:
    return f"{len(names)} names ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else "no name"


def _require(content: object, what: str, switch: str, path: Path) -> None:
    if content is None:
        raise CheckpointError(
            f"cannot load the {what}: {path} was saved without one, expected its state, for going on with a fresh "
            f"{what} would change the run without a word. Pass {switch} if that is what you want."
        )


def _restore_rng(path: Path, state: Mapping[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if state["world_size"] == world_size:
        load_rng(path / layout.RNG / f"rank{rank:05d}.safetensors")
    else:
        derive_rng(state["seed"], step=state["step"], rank=rank, world_size=world_size)
