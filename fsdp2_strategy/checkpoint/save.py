"""Save a checkpoint: write, commit, then rotate.

Input: a sharded model with optimizer and schedule. Output: a committed directory; see [Note: commit] in `layout`. Each
phase ends alike on all ranks; see [Note: one decision] in `ranks`.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint import layout
from fsdp2_strategy.checkpoint.data import DataPosition, Loader, file_of_rank
from fsdp2_strategy.checkpoint.lock import hold, let_go
from fsdp2_strategy.checkpoint.parts import ModelOnDisk
from fsdp2_strategy.checkpoint.rng import save_rng
from fsdp2_strategy.checkpoint.rotation import check_limits, check_room, surplus
from fsdp2_strategy.checkpoint.state import check_json, optimizer_hyper, optimizer_tensors, prepared
from fsdp2_strategy.checkpoint.storage import Part, write_parts
from fsdp2_strategy.damage import check_usable
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.ranks import agree, all_or_none, is_rank_0, log


def save_checkpoint(
    model: nn.Module,
    save_dir: str | Path,
    tag: str | None = None,
    *,
    step: int = 0,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    client_state: dict[str, Any] | None = None,
    tokenizer: Any = None,
    ema: Mapping[str, torch.Tensor] | None = None,
    loss_scale: dict[str, Any] | None = None,
    dataloader: Loader | None = None,
    seed: int = 0,
    max_num: int | None = 3,
    max_mem: float | None = 1000,
    save_latest: bool = True,
    protect: bool = False,
    metric: float | None = None,
    higher_is_better: bool = True,
) -> Path:
    """Save a sharded model and what belongs to it as one committed checkpoint; collective.

    Args:
        model: a sharded model, or its wrapper.
        save_dir: directory of all checkpoints of the run, seen by every rank.
        tag: name of this one; by default ``global_step<step>``. An existing tag is replaced, safely.
        step: optimizer steps taken.
        optimizer: saved by parameter name.
        scheduler: its state is saved as JSON.
        client_state: anything that JSON holds; rank 0's is kept.
        tokenizer: tokenizer or processor to save into ``model/``; by default the files of the folder that the model
            came from, where that is known.
        ema: averages of parameters by name (``EMA.averages``).
        loss_scale: state of a loss scale, as JSON.
        dataloader: a ResumableLoader, whose position is one for all ranks; or another loader with ``state_dict``, whose
            state is kept for each rank and loads on as many ranks alone.
        seed: from which a run on another number of ranks derives its random state.
        max_num: checkpoints to keep; older ones go once this one is committed. None for no limit.
        max_mem: GB (10^9 bytes) that all checkpoints may take together; None for no limit.
        save_latest: let the file ``latest`` name this checkpoint.
        protect: never let rotation remove it.
        metric: how good it is; rotation never removes the best of those that have one.
        higher_is_better: what is good of ``metric``.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on every rank; nothing that was committed before is lost. Another run that saves into the same
            directory is one reason.
    """
    save_dir = Path(save_dir)
    tag = f"global_step{step}" if tag is None else tag
    limits = (max_num, max_mem, save_latest, protect, metric, higher_is_better)
    missing = tuple(given is None for given in (optimizer, scheduler, ema, dataloader))
    asked = (str(save_dir), tag, step, missing, loss_scale, *limits)
    expected = "the same directory, tag, step, limits and objects to save everywhere. Make the tag from the step."
    agree("save", asked, CheckpointError, expected)
    with all_or_none("save", CheckpointError):
        layout.check_tag(tag)
        check_limits(max_num, max_mem)
        if metric is not None and not math.isfinite(metric):
            raise CheckpointError(f"cannot save: metric is {metric}, expected a finite number. Leave it out.")
        partial = layout.partial_path(save_dir, tag)
        state = _collect(
            model,
            partial,
            optimizer=optimizer,
            scheduler=scheduler,
            ema=ema,
            client_state=client_state or {},
            loss_scale=loss_scale,
            dataloader=dataloader,
        )
    if state.data is not None:
        agree("save", state.data.facts, CheckpointError, "loaders that are equally far. Save at the same batch.")
    facts = {"step": step, "protected": protect, "metric": metric, "higher_is_better": higher_is_better}
    with _removed_on_failure(layout.partial_path(save_dir, tag)):
        _write(state, save_dir, tag, step=step, seed=seed, max_mem=max_mem, tokenizer=tokenizer)
        with all_or_none(f"commit {tag}", CheckpointError):
            if is_rank_0():
                layout.commit(save_dir, tag, facts)
                if save_latest:
                    layout.point_latest(save_dir, tag)
    with all_or_none(f"rotate the checkpoints in {save_dir}", CheckpointError):
        if is_rank_0():
            old = surplus(layout.list_checkpoints(save_dir), max_num=max_num, max_mem=max_mem)
            layout.remove(old)
            if layout.named_latest(save_dir) in {o.tag for o in old}:  # left behind with save_latest=False
                layout.point_latest(save_dir, tag)
            for gone in old:
                log("removed %s: the limits are max_num %s, max_mem %s GB", gone.path, max_num, max_mem)
    log("saved %s", save_dir / tag)
    return save_dir / tag


@dataclass(frozen=True, kw_only=True)
class _State:
    """What is saved."""

    model: ModelOnDisk
    parts: list[Part]
    hyper: dict[str, Any] | None
    schedule: dict[str, Any] | None
    client_state: dict[str, Any]
    loss_scale: dict[str, Any] | None
    data: DataPosition | None


def _collect(
    model: nn.Module,
    partial: Path,
    *,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    ema: Mapping[str, torch.Tensor] | None,
    client_state: dict[str, Any],
    loss_scale: dict[str, Any] | None,
    dataloader: Loader | None,
) -> _State:
    """Collect what is saved, and check that it can be.

    Raises:
        CheckpointError: something cannot.
    """
    check_json(client_state, "client_state")
    root = prepared(model)
    check_usable(root)
    on_disk = ModelOnDisk.of(root, partial)
    parts = list(on_disk.parts)
    hyper = None
    if optimizer is not None:
        check_usable(optimizer)
        parts.append(Part.of(partial / layout.OPTIMIZER, optimizer_tensors(model, optimizer), stem=layout.OPTIMIZER))
        hyper = optimizer_hyper(model, optimizer)
        check_json(hyper, "optimizer")
    if ema is not None:
        parts.append(Part.of(partial / layout.EMA, ema, stem=layout.EMA))
    schedule = scheduler.state_dict() if scheduler is not None else None
    check_json(schedule, "scheduler")
    return _State(
        model=on_disk,
        parts=parts,
        hyper=hyper,
        schedule=schedule,
        client_state=client_state,
        loss_scale=loss_scale,
        data=DataPosition.of(dataloader) if dataloader is not None else None,
    )


def _write(
    state: _State, save_dir: Path, tag: str, *, step: int, seed: int, max_mem: float | None, tokenizer: Any
) -> None:
    """Write everything but the manifest; collective."""
    partial = layout.partial_path(save_dir, tag)
    with all_or_none(f"save into {save_dir}", CheckpointError):
        if is_rank_0():
            save_dir.mkdir(parents=True, exist_ok=True)
            hold(save_dir)
            layout.check_replaceable(save_dir, tag)
            layout.finish_removals()
            layout.sweep(save_dir)
            check_room(save_dir, sum(part.total_bytes for part in state.parts), max_mem)
            of_ranks = [layout.DATA] if state.data and state.data.of_rank is not None else []
            for folder in (layout.RNG, layout.CHECKSUMS, *of_ranks):
                (partial / folder).mkdir(parents=True)
    with all_or_none(f"write {tag}", CheckpointError):
        blocks = write_parts(partial, state.parts)
    with all_or_none(f"write the random state of {tag}", CheckpointError):
        save_rng(partial / layout.RNG / f"rank{dist.get_rank():05d}.safetensors")
        if state.data and state.data.of_rank is not None:
            (partial / file_of_rank()).write_bytes(state.data.of_rank)
        if is_rank_0():
            state.model.write_beside(tokenizer)
            content = {
                "step": step,
                "seed": seed,
                "world_size": dist.get_world_size(),
                "client_state": state.client_state,
                "scheduler": state.schedule,
                "optimizer": state.hyper,
                "loss_scale": state.loss_scale,
                "data": state.data.facts if state.data else None,
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            }
            layout.write_json(partial / layout.TRAINER_STATE, content)
    with all_or_none(f"write the checksums of {tag}", CheckpointError):
        if is_rank_0():
            tensors = {file.path for part in state.parts for file in part.files}
            small = [path for path in partial.rglob("*") if path.is_file() and path not in tensors]
            blocks |= layout.blocks_of_files(path for path in small if path.parent.name != layout.CHECKSUMS)
        layout.write_checksums(partial, dist.get_rank(), blocks)


def end_saving() -> None:
    """Wait until rotated checkpoints are gone, and let other runs save where this process did; not collective."""
    layout.finish_removals()
    let_go()


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    """Give the disk back at once when a save fails; what cannot be removed now the next save sweeps."""
    try:
        yield
    except CheckpointError:
        if is_rank_0():
            shutil.rmtree(partial, ignore_errors=True)
        raise
