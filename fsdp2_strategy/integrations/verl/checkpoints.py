"""Save and load one directory for a worker of verl, with the contents that its configuration selects.

Input: a `StrategyEngine` and a path. Output: a committed checkpoint in that path, in this package's format. The
contents are verl's: "model" is the weights, "optimizer" the optimizer's state with the loss scale of float16, "extra"
the schedule. The weights are in a Hugging Face folder, so "hf_model" needs no further files. The random state is always
saved, and restored with the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint import directory, save_checkpoint, wait_for_checkpoint
from fsdp2_strategy.checkpoint.file_schemas import STATE_BYTES, STATE_OF_ONLY_MODEL, parse_state, read_small_file
from fsdp2_strategy.checkpoint.listing import describe_missing
from fsdp2_strategy.checkpoint.paths import TRAINER_STATE, CheckpointPaths
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError, ConfigError
from fsdp2_strategy.optim.accumulation import accumulation_of


def save(engine: Any, path: Path, *, step: int, max_num: int | None) -> None:
    """Save a checkpoint in exactly this path, and keep the newest ``max_num`` of this engine, or all; collective.

    Older ones are deleted after the commit, with ``async_save`` at the next save. As in rotation, they are renamed at
    once, and a background thread deletes their files. One that cannot be deleted is only logged.
    """
    config = engine.checkpoint_config
    contents = set(config.save_contents)
    only_trainable = config.save_lora_only and engine.model_config.lora_rank > 0
    if config.async_save and path.match(_STEP):
        raise ConfigError(
            f"cannot save {path} in the background: checkpoint.async_save is True, expected False for a directory "
            "global_step_<n>, to which verl's trainer for supervised fine-tuning adds files when the call returns. "
            "Remove checkpoint.async_save."
        )
    wait_for_checkpoint()  # what was saved in the background before is complete, and counts
    options: dict[str, Any] = {
        "max_num": None,
        "max_mem": None,
        "save_latest": False,
        "client_state": {"global_step": step},
        "tokenizer": None if only_trainable else engine.model_config.get_processor(),
        "async_save": config.async_save,
        "only_trainable": only_trainable,
    }
    with all_or_none(f"replace {path}", CheckpointError):
        if is_rank_0():
            _delete_files_of_verl(path)
    saved: list[Path] = engine.saved_paths
    if path in saved:
        saved.append(saved.pop(saved.index(path)))
    if config.async_save:  # after `wait_for_checkpoint`, and before the background save, which waits for the deletion
        _delete_older(saved, path, max_num)
    trained = engine.optimizer is not None
    scale = accumulation_of(engine.module).scale
    if trained and {"optimizer", "extra"} <= contents:
        engine.strategy.save_ckpt(engine.module, path.parent, path.name, **options)
    else:
        save_checkpoint(
            engine.module,
            path.parent,
            path.name,
            step=engine.strategy.global_step(engine.module),
            seed=engine.strategy.seed,
            key_file=engine.strategy.config.checkpoint_key_file,
            optimizer=engine.optimizer if "optimizer" in contents else None,
            scheduler=engine.lr_scheduler if "extra" in contents else None,
            loss_scale=asdict(scale) if trained and scale and "optimizer" in contents else None,
            **options,
        )
    if path not in saved:
        saved.append(path)
    if not config.async_save:
        _delete_older(saved, path, max_num)


_STEP = "global_step_*"
"""Pattern of the name that verl gives to the directory of a step: in supervised fine-tuning, that of the checkpoint."""


def _delete_files_of_verl(path: Path) -> None:
    """Delete the files that verl added to a checkpoint that is replaced or deleted; verl writes them after each save.

    Otherwise, they would be kept as files of others; see [Note: files of others] in `deletion`.
    """
    if CheckpointPaths.found_in(path).manifest.exists():
        for file in (*path.glob("data_*.pt"), *path.glob("lora_train_meta.json")):
            file.unlink()


def _delete_older(saved: list[Path], path: Path, max_num: int | None) -> None:
    """Delete all but the newest saved checkpoints, and what an interrupted deletion left; collective.

    `directory.delete_leftovers` misses these leftovers: in RLHF, verl saves each checkpoint in a folder of its own; in
    supervised fine-tuning, verl adds files to a checkpoint.
    """
    with all_or_none(f"delete checkpoints older than {path}", CheckpointError):
        if is_rank_0():
            directory.finish_removals()
            saved[:] = [each for each in saved if each.exists()]  # a save that failed in the background left none
            surplus = saved[:-max_num] if max_num else []
            for each in surplus:
                with contextlib.suppress(OSError):  # they are kept then
                    _delete_files_of_verl(each)
            removed = directory.remove(surplus, _leftovers(path))
            saved[:] = [each for each in saved if each not in removed]


def _leftovers(path: Path) -> list[Path]:
    """Return what interrupted deletions left of a run whose newest checkpoint is ``path``."""
    of_fine_tuning = directory.removed_path(Path(_STEP)).name
    of_rlhf = f"{_STEP}/{escape(directory.removed_path(path).name)}"
    return [*path.parent.glob(of_fine_tuning), *path.parent.parent.glob(of_rlhf)]


def load(engine: Any, path: Path) -> None:
    """Load the selected contents of a checkpoint, saved on any number of ranks; collective."""
    contents = set(engine.checkpoint_config.load_contents)
    trained = engine.optimizer is not None
    if trained:
        with all_or_none(f"load {path}", CheckpointError):
            _check_contents(path, contents)
    loaded, _ = engine.strategy.load_ckpt(
        engine.module,
        path,
        load_module=bool(contents & {"model", "hf_model"}),
        load_optimizer_states=trained and "optimizer" in contents,
        load_lr_scheduler_states=trained and "extra" in contents,
    )
    if loaded is None:
        raise CheckpointError(
            f"cannot load: {describe_missing(path)} Expected a checkpoint that this engine saved. Set "
            "trainer.resume_from_path to one, or trainer.resume_mode to disable."
        )


def _check_contents(path: Path, selected: Collection[str]) -> None:
    """Raise if a checkpoint lacks selected contents, before any of it is loaded; not collective."""
    try:
        file = CheckpointPaths.found_in(path).state / TRAINER_STATE
        state = parse_state(read_small_file(file, STATE_BYTES), file, STATE_OF_ONLY_MODEL)
    except CheckpointError:  # the load reports what is missing or corrupt
        return
    lacking = [name for name, key in _KEYS.items() if name in selected and state[key] is None]
    if lacking:
        raise CheckpointError(
            f"cannot load {lacking}: {path} was saved without them, expected a checkpoint with all of "
            f"checkpoint.load_contents, which is {sorted(selected)}. Remove {lacking} from it, or load a checkpoint "
            "that was saved with them in checkpoint.save_contents."
        )


_KEYS = {"optimizer": "optimizer", "extra": "scheduler"}
"""Contents of verl's, and the entries of ``trainer_state.json`` that are null if a checkpoint lacks them."""


def local_path(path: str, hdfs_path: str | None, others: Collection[str]) -> Path:
    """Return the absolute path of a checkpoint; raise for a path on HDFS, and for arguments that verl 0.9 lacks."""
    if hdfs_path is not None:
        raise ConfigError(
            f"cannot save or load {path}: hdfs_path is {hdfs_path!r}, expected None, because only a local path is "
            "supported. Mount the file system, and set trainer.default_hdfs_dir to null."
        )
    if others:
        raise ConfigError(
            f"cannot save or load {path}: got the arguments {sorted(others)}, expected only those of verl 0.9. Install "
            "verl 0.9, or remove them from the call."
        )
    return Path(path).absolute()
