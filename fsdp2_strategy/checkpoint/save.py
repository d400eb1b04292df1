"""Save a checkpoint: write, commit, then rotate.

Input: a sharded model with optimizer and schedule. Output: a committed directory; see [Note: commit] in `layout`. Each
phase ends alike on all ranks; see [Note: one decision] in `ranks`.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint import layout
from fsdp2_strategy.checkpoint.rng import save_rng
from fsdp2_strategy.checkpoint.rotation import check_limits, check_room, surplus
from fsdp2_strategy.checkpoint.state import check_json, model_tensors, optimizer_hyper, optimizer_tensors
from fsdp2_strategy.checkpoint.storage import total_bytes, write_tensors
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
    seed: int = 0,
    max_num: int | None = 3,
    max_mem: float | None = 1000,
    save_latest: bool = True,
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
        seed: from which a run on another number of ranks derives its random state.
        max_num: checkpoints to keep; older ones go once this one is committed. None for no limit.
        max_mem: GB (10^9 bytes) that all checkpoints may take together; None for no limit.
        save_latest: let the file ``latest`` name this checkpoint.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on every rank; nothing that was committed before is lost.
    """
    save_dir = Path(save_dir)
    asked = (str(save_dir), tag, step, optimizer is None, scheduler is None, max_num, max_mem, save_latest)
    expected = "the same directory, tag, step, limits and objects to save everywhere. Make the tag from the step."
    agree("save", asked, CheckpointError, expected)
    with all_or_none("save", CheckpointError):
        tag = layout.check_tag(f"global_step{step}" if tag is None else tag)
        check_limits(max_num, max_mem)
        check_json(client_state or {}, "client_state")
        tensors = {layout.MODEL: model_tensors(model)}
        hyper = None
        if optimizer is not None:
            tensors[layout.OPTIMIZER] = optimizer_tensors(model, optimizer)
            hyper = optimizer_hyper(model, optimizer)
            check_json(hyper, "optimizer")
        schedule = scheduler.state_dict() if scheduler is not None else None
        check_json(schedule, "scheduler")
    partial = layout.partial_path(save_dir, tag)
    with _removed_on_failure(partial):
        with all_or_none(f"save into {save_dir}", CheckpointError):
            if is_rank_0():
                save_dir.mkdir(parents=True, exist_ok=True)
                layout.check_replaceable(save_dir, tag)
                layout.sweep(save_dir)
                check_room(save_dir, sum(map(total_bytes, tensors.values())), max_mem)
                (partial / layout.RNG).mkdir(parents=True)
        for name, part in tensors.items():
            with all_or_none(f"write {name} of {tag}", CheckpointError):
                write_tensors(part, partial / name)
        with all_or_none(f"write the random state of {tag}", CheckpointError):
            save_rng(partial / layout.RNG / f"rank{dist.get_rank():05d}.safetensors")
        with all_or_none(f"commit {tag}", CheckpointError):
            if is_rank_0():
                state = {
                    "step": step,
                    "seed": seed,
                    "world_size": dist.get_world_size(),
                    "client_state": client_state or {},
                    "scheduler": schedule,
                    "optimizer": hyper,
                    "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                }
                layout.write_json(partial / layout.TRAINER_STATE, state)
                layout.commit(save_dir, tag, step=step)
                if save_latest:
                    layout.point_latest(save_dir, tag)
    with all_or_none(f"rotate the checkpoints in {save_dir}", CheckpointError):
        if is_rank_0():
            for old in surplus(layout.list_checkpoints(save_dir), max_num=max_num, max_mem=max_mem):
                layout.remove(old)
                if layout.named_latest(save_dir) == old.tag:  # it was left behind with save_latest=False
                    layout.point_latest(save_dir, tag)
                log("removed %s: the limits are max_num %s, max_mem %s GB", old.path, max_num, max_mem)
    log("saved %s", save_dir / tag)
    return save_dir / tag


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Any:
    """Give the disk back at once when a save fails; what cannot be removed now the next save sweeps."""
    try:
        yield
    except CheckpointError:
        if is_rank_0():
            shutil.rmtree(partial, ignore_errors=True)
        raise
