"""Load a checkpoint: find it, check its structure, compare it with the model, then read it.

Input: a directory, and optionally a tag. Output: the model, optimizer, schedule and random generators in their saved
state. Each phase succeeds or raises on all ranks; see [Note: agreed errors] in `agreement`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.checkpoint.components import match_model
from fsdp2_strategy.checkpoint.data_position import Later, Loader, check_position, restore_position
from fsdp2_strategy.checkpoint.directory import recover
from fsdp2_strategy.checkpoint.foreign_formats import find_foreign, is_foreign, load_foreign
from fsdp2_strategy.checkpoint.gc_pause import no_collections
from fsdp2_strategy.checkpoint.layout import is_last, with_manifest
from fsdp2_strategy.checkpoint.lock import is_held_elsewhere
from fsdp2_strategy.checkpoint.paths import DATA, EMA, OPTIMIZER, RNG, TRAINER_STATE, Places
from fsdp2_strategy.checkpoint.random_state import derive_rng, load_rng
from fsdp2_strategy.checkpoint.reader import Opened, check_structure, open_checkpoint
from fsdp2_strategy.checkpoint.storage import Wanted, by_name, read_wishes, stored_in
from fsdp2_strategy.checkpoint.trainable_only import LeftOut
from fsdp2_strategy.checkpoint.training_state import (
    LoadedCheckpoint,
    allocate_optimizer_state,
    check_optimizer,
    prepared,
    require,
    restore_optimizer,
    restore_scheduler,
    settings_by_group,
)
from fsdp2_strategy.distributed.agreement import agree, all_or_none, from_rank_0
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import is_rank_0, rank, world_size
from fsdp2_strategy.errors import CheckpointError, DamageError, did_you_mean
from fsdp2_strategy.hf.load_plan import LoadReport
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.replicated_reads import shares
from fsdp2_strategy.hf.verified_read import ranges_of
from fsdp2_strategy.model.failed_loads import unusable_unless_done
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.model.master_weights import refresh_masters_of
from fsdp2_strategy.model.ranks import on_its_ranks


@on_its_ranks
@no_collections()
def load_checkpoint(
    model: nn.Module,
    load_dir: str | Path,
    *,
    tag: str | None = None,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    ema: Mapping[str, torch.Tensor] | None = None,
    dataloader: Loader | Later | None = None,
    load_model: bool = True,
    strict: bool = True,
    verify: bool = True,
    fallback: bool = False,
    trust: bool = False,
) -> LoadedCheckpoint | None:
    """Load a checkpoint into a sharded model, saved on any number of ranks and at any shard size; collective.

    A checkpoint of only the trainable weights (``only_trainable``) needs the frozen weights of its save. Frozen weights
    of the model that differ from those are read again from the folder that they came from.

    Args:
        model: a sharded model, or its wrapper.
        load_dir: directory of a run's checkpoints, from which the newest or ``tag`` is loaded; or one checkpoint, or
            the link ``last``. The layout is detected.
        tag: name of the checkpoint in ``load_dir``.
        optimizer: restore its state and hyper-parameters, by parameter name. The random state is restored only if an
            optimizer is given, because then the run continues.
        scheduler: restore its state.
        ema: averages of parameters by name (``EMA.averages``); restore their values.
        dataloader: restore its position, for a ResumableLoader on any number of ranks. The loader must not have
            started. LATER means that a later load restores it.
        load_model: load parameters and buffers.
        strict: raise if the checkpoint and the model have different names. If False, load the names that both have and
            report the others. Shapes must always match.
        verify: verify the checksums of the bytes that are read.
        fallback: if the checkpoint is corrupted, load the newest intact one that is older, and log a warning.
        trust: allow checkpoints of other systems (``.distcp`` folders, ``.pt`` and ``.bin`` files): pickles run code.

    Returns:
        A report of the load; None if the directory is missing or contains no checkpoint.

    Raises:
        CheckpointError: on every rank: no such tag, other names or shapes, no state for the optimizer or scheduler. If
            the headers show the error, it is raised before the model is modified.
        DamageError: on every rank: files are corrupted, or the folder of the frozen weights has changed. If this is
            found only during the read, model and optimizer raise when used, until a load succeeds.
    """
    background_save.wait()
    load_dir = Path(load_dir)
    asked = (
        str(load_dir),
        tag,
        optimizer is None,
        scheduler is None,
        ema is None,
        dataloader is None,
        load_model,
        strict,
        verify,
        fallback,
        trust,
    )
    agree("load", asked, CheckpointError, "the same directory, tag and objects to load everywhere.")
    with all_or_none(f"find a checkpoint in {load_dir}", CheckpointError):
        found = _find(load_dir, tag, fallback=fallback) if is_rank_0() else []
    paths = from_rank_0(found)
    if not paths:
        with all_or_none(f"find a checkpoint in {load_dir}", CheckpointError):
            where = load_dir if tag is None else load_dir / tag
            foreign = find_foreign(where, trust=trust) if is_rank_0() else None
        foreign = from_rank_0(foreign)
        if foreign is not None:
            if dataloader is not None and not isinstance(dataloader, Later):
                require(None, "data position", "dataloader=None", load_dir)
            return load_foreign(model, foreign, optimizer, scheduler, load_model=load_model, strict=strict)
        log("no checkpoint in %s: nothing is loaded", load_dir)
        return None
    into = _Into(model, optimizer, scheduler, ema, *((None, True) if isinstance(dataloader, Later) else (dataloader,)))
    for path, older in zip(paths, [*paths[1:], None], strict=True):
        try:
            return _load(into, path, load_model=load_model, strict=strict, verify=verify)
        except DamageError as error:
            if older is None:
                raise
            log("%s is damaged: trying %s instead. %s", path, older, error, level=logging.WARNING)
    return None


@dataclass(frozen=True)
class _Into:
    """The objects to restore."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    ema: Mapping[str, torch.Tensor] | None
    dataloader: Loader | None
    data_comes_later: bool = False


def _load(into: _Into, path: Path, *, load_model: bool, strict: bool, verify: bool) -> LoadedCheckpoint:
    model, optimizer, scheduler, dataloader = into.model, into.optimizer, into.scheduler, into.dataloader
    opened, state = _open(path)
    with all_or_none(f"load {path}", DamageError):
        rng, of_rank = _files_of_rank(opened, state, dataloader)
    with all_or_none(f"load {path}", CheckpointError):
        root = prepared(model)
        plan = _plan(into, root, opened.places, state, load_model=load_model, strict=strict)
    left_out = LeftOut.from_json(state.get("left_out") if load_model else None)
    others = left_out.find_differing(root, path, strict=strict)
    with all_or_none(f"load {path}", DamageError):
        wishes, broadcasts = shares(plan.wanted)
        if verify:
            opened.read_checksum_manifests(ranges_of(wishes))
    touched: list[nn.Module | Optimizer] = [*([root] if load_model else []), *([optimizer] if optimizer else [])]
    with unusable_unless_done(touched):
        with torch.no_grad():
            clear_gradients(root)
            read_wishes(path, wishes, opened.checksums if verify else None, f"loading {path.name}")
            for shared in broadcasts:
                shared.carry_out()
            left_out.restore(root, others, path)
        with all_or_none(f"load the run's state from {path}", CheckpointError):
            if load_model and optimizer is None:
                refresh_masters_of(root)
            if optimizer is not None and plan.optimizer is not None:
                restore_optimizer(
                    model, optimizer, plan.optimizer.slots, plan.optimizer.settings, state["optimizer"]["values"]
                )
            if scheduler is not None:
                restore_scheduler(scheduler, state["scheduler"])
            if optimizer is not None:
                _restore_rng(rng, state)
            if dataloader is not None:
                restore_position(dataloader, state["data"], of_rank)
    log("loaded %s (step %d)", path, state["step"])
    nobody_asked = dataloader is None and not into.data_comes_later and optimizer is not None
    _tell_what_was_left(opened.places, state, averages=into.ema is None and load_model, data=nobody_asked)
    return LoadedCheckpoint(
        path=path,
        step=state["step"],
        client_state=state["client_state"],
        missing=tuple(plan.report.missing),
        unexpected=tuple(plan.report.unexpected),
        cast=tuple(plan.report.cast),
        loss_scale=state.get("loss_scale"),
    )


def _open(path: Path) -> tuple[Opened, dict[str, Any]]:
    """Open a checkpoint, and read its ``trainer_state.json``; collective.

    Raises:
        DamageError: on every rank: the manifest, a file's length, a header or the state is corrupted.
    """
    with all_or_none(f"load {path}", DamageError):
        found = check_structure(path) if is_rank_0() else {}
    manifest = from_rank_0(found)
    with all_or_none(f"load {path}", DamageError):
        same_ranks = len(manifest["checksums"]) == world_size()
        opened = open_checkpoint(path, manifest, rank=rank() if same_ranks else None)
        opened.check_headers()
        return opened, opened.read_json(opened.places.state / TRAINER_STATE)


def _files_of_rank(
    opened: Opened, state: Mapping[str, Any], dataloader: Loader | None
) -> tuple[bytes | None, bytes | None]:
    """Return this rank's random state and its loader's state; None if the number of ranks changed or no file exists."""
    if state["world_size"] != world_size():
        return None, None
    rng = opened.read(opened.places.of_rank(RNG, rank()))
    has_file = dataloader is not None and "ranks" in (state.get("data") or {})
    return rng, opened.read(opened.places.of_rank(DATA, rank())) if has_file else None


def _tell_what_was_left(places: Places, state: Mapping[str, Any], *, averages: bool, data: bool) -> None:
    path = places.root
    if averages and (places.state / EMA).is_dir():
        log("%s holds averages that nobody asked for: pass ema= to go on with them", path, level=logging.WARNING)
    if data and state.get("data"):
        log("%s holds a data position that nobody asked for: pass dataloader=", path, level=logging.WARNING)


@dataclass(frozen=True)
class _Plan:
    """What is read, and from where."""

    report: LoadReport
    optimizer: _OptimizerPlan | None
    wanted: Wanted


def _plan(
    into: _Into, root: nn.Module, places: Places, state: Mapping[str, Any], *, load_model: bool, strict: bool
) -> _Plan:
    """Compare a checkpoint with the objects to restore; reads only headers.

    Raises:
        CheckpointError: names, shapes or kinds of state do not match.
    """
    wanted: list[tuple[str, Region, torch.Tensor]] = []
    report, optimizer = LoadReport(), None
    if load_model:
        left_out = (state.get("left_out") or {}).get("weights", ())
        of_model, report = match_model(root, places, left_out, strict=strict)
        wanted += of_model
    if into.optimizer is not None:
        optimizer = _plan_optimizer(into.model, into.optimizer, state["optimizer"], places, strict=strict)
        wanted += optimizer.wanted
    if into.ema is not None:
        wanted += _plan_ema(into.ema, places)
    if into.scheduler is not None:
        require(state["scheduler"], "scheduler", "load_lr_scheduler_states=False", places.root)
    if into.dataloader is not None:
        check_position(into.dataloader, state.get("data"), places.root)
    return _Plan(report, optimizer, wanted)


@dataclass(frozen=True)
class _OptimizerPlan:
    slots: dict[str, dict[str, torch.Tensor]]
    """State tensors to fill, by parameter name and key."""
    settings: list[dict[str, Any]]
    """Hyper-parameters of each group."""
    wanted: Wanted
    """The same tensors, with their location in files."""


def _plan_optimizer(
    model: nn.Module, optimizer: Optimizer, hyper: dict[str, Any] | None, places: Places, *, strict: bool
) -> _OptimizerPlan:
    """Find an optimizer's state in a checkpoint, and allocate it; reads only headers.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, or it does not match.
    """
    require(hyper, "optimizer", "load_optimizer_states=False", places.root)
    hyper = hyper or {}
    check_optimizer(model, optimizer, hyper, strict=strict)
    settings = settings_by_group(model, optimizer, hyper)
    stored = stored_in(places.state / OPTIMIZER)
    described = {name: (entry.shape, entry.dtype) for name, entry in stored.items()}
    slots, flat = allocate_optimizer_state(model, optimizer, described, strict=strict)
    return _OptimizerPlan(slots, settings, by_name("optimizer", flat, stored))


def _plan_ema(ema: Mapping[str, torch.Tensor], places: Places) -> Wanted:
    """Find the averages in a checkpoint; reads only headers.

    Raises:
        CheckpointError: it has none, or their names or shapes differ.
    """
    require((places.state / EMA).is_dir() or None, "ema", "ema=None", places.root)
    return by_name("ema", ema, stored_in(places.state / EMA))


def _find(load_dir: Path, tag: str | None, *, fallback: bool) -> list[Path]:
    """Return the checkpoint to load, followed by its fallbacks, newest first; empty if there is none."""
    if tag is None and is_last(load_dir):
        load_dir, tag = load_dir.parent, load_dir.readlink().name  # its target may have been moved aside
    if tag is None and Places.found_in(load_dir).manifest.exists():
        return [load_dir]
    if not load_dir.is_dir():
        return []
    if not is_held_elsewhere(load_dir):  # a run that saves there may be in the middle of a commit
        recover(load_dir)
    committed = with_manifest(load_dir)[::-1]
    if tag is None:
        return [c.path for c in committed][: None if fallback else 1]
    tags = [c.tag for c in committed]
    if tag not in tags and is_foreign(load_dir / tag):
        return []
    if tag not in tags:
        raise CheckpointError(
            f"cannot load: {tag!r} is no committed checkpoint in {load_dir}, expected one of {tags[::-1]}."
            f"{did_you_mean(tag, tags)}"
        )
    after = committed[tags.index(tag) :]
    return [c.path for c in after][: None if fallback else 1]


def _restore_rng(saved: bytes | None, state: Mapping[str, Any]) -> None:
    if saved is not None:
        load_rng(saved)
    else:
        derive_rng(state["seed"], step=state["step"], rank=rank(), world_size=world_size())
