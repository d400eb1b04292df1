"""Save and load one directory for a worker of verl, with the contents that its configuration selects.

Input: a `StrategyEngine` and a path. Output: a committed checkpoint in that path, in this package's format. The
contents are verl's: "model" is the weights, "optimizer" its state, "extra" the schedule and the random state. The
weights are in a Hugging Face folder, so "hf_model" needs no further files.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint import save_checkpoint, wait_for_save
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError, ConfigError


def save(engine: Any, path: Path, *, step: int, max_num: int | None) -> None:
    """Save a checkpoint in exactly this path, then delete older ones of this engine; collective.

    Args:
        engine: the `StrategyEngine`.
        path: the directory of the checkpoint.
        step: verl's number of the step, which a load does not need.
        max_num: maximum number of checkpoints that this engine keeps; None or 0 for no limit.

    Raises:
        CheckpointError: on every rank; see `save_checkpoint`.
    """
    config = engine.checkpoint_config
    contents = set(config.save_contents)
    only_trainable = config.save_lora_only and engine.model_config.lora_rank > 0
    wait_for_save()  # what was saved in the background before is complete, and counts
    options: dict[str, Any] = {
        "max_num": None,
        "max_mem": None,
        "save_latest": False,
        "client_state": {"global_step": step},
        "tokenizer": None if only_trainable else engine.model_config.get_processor(),
        "async_save": config.async_save,
        "only_trainable": only_trainable,
    }
    trained = engine.optimizer is not None
    if trained and {"optimizer", "extra"} <= contents:
        engine.strategy.save_ckpt(engine.module, path.parent, path.name, **options)
    else:
        save_checkpoint(
            engine.module,
            path.parent,
            path.name,
            step=engine.strategy.global_step(engine.module),
            seed=engine.strategy.seed,
            optimizer=engine.optimizer if "optimizer" in contents else None,
            scheduler=engine.lr_scheduler if "extra" in contents else None,
            **options,
        )
    saved = engine.saved_paths
    if path in saved:
        saved.remove(path)
    surplus = saved[: max(0, len(saved) + (not config.async_save) - max_num)] if max_num else []
    del saved[: len(surplus)]
    saved.append(path)
    for old in surplus if is_rank_0() else ():
        shutil.rmtree(old, ignore_errors=True)


def load(engine: Any, path: Path) -> None:
    """Load the selected contents of a checkpoint, saved on any number of ranks; collective.

    Raises:
        CheckpointError: on every rank: there is no checkpoint, or it lacks a selected content.
    """
    contents = set(engine.checkpoint_config.load_contents)
    trained = engine.optimizer is not None
    loaded, _ = engine.strategy.load_ckpt(
        engine.module,
        path,
        load_module=bool(contents & {"model", "hf_model"}),
        load_optimizer_states=trained and "optimizer" in contents,
        load_lr_scheduler_states=trained and "extra" in contents,
    )
    if loaded is None:
        raise CheckpointError(f"cannot load: {path} has no checkpoint, expected one that this engine saved.")


def local_path(path: str, hdfs_path: str | None, others: Collection[str]) -> Path:
    """Return the path of a checkpoint.

    Args:
        path: the path that verl passes.
        hdfs_path: a path on HDFS that verl passes.
        others: names of further arguments.

    Raises:
        ConfigError: a path on HDFS or an unknown argument is given.
    """
    if hdfs_path is not None or others:
        raise ConfigError(
            f"cannot save or load {path}: got {['hdfs_path'] if hdfs_path is not None else sorted(others)}, expected a "
            "local path only. Mount the file system, and set trainer.default_hdfs_dir to null."
        )
    return Path(path).absolute()
