"""Save and load the checkpoints of LeRobot's training script, in LeRobot's layout.

Input: the arguments of the script's own functions of these names. Output: a checkpoint, with the averaged weights in
``pretrained_model_ema/`` if the script averages them; and the state of a resumed run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2_strategy.checkpoint.file_schemas import read_small_file
from fsdp2_strategy.checkpoint.paths import EMA, TRAINING_STATE, TRAINING_STEP
from fsdp2_strategy.checkpoint.random_state import rng_content
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.integrations.lerobot.accelerator import Accelerator, Averages, SteppingOptimizer
from fsdp2_strategy.integrations.lerobot.layout import LeRobotLayout
from fsdp2_strategy.storage.checksum_manifests import damage
from fsdp2_strategy.storage.schema import InvalidError, integer, parse_json, record

_AVERAGED_STEPS = "lerobot_ema_steps"


def save_checkpoint(
    checkpoint_dir: Path,
    step: int,
    cfg: Any,
    policy: nn.Module,
    optimizer: SteppingOptimizer,
    scheduler: Any = None,
    preprocessor: Any = None,
    postprocessor: Any = None,
    accelerator: Any = None,
) -> None:
    """Save a checkpoint in LeRobot's layout, and set the link ``last``; collective.

    Arguments are those of LeRobot's function of this name; ``step`` counts micro-batches.

    Raises:
        CheckpointError: see `FSDPV2Strategy.save_ckpt`.
    """
    layout = LeRobotLayout(
        total_steps=cfg.steps,
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=accelerator.strategy.accumulated_gradient,
        micro_batches=step,
        train_config=accelerator.config,
        preprocessor=preprocessor,
        postprocessor=postprocessor,
    )
    averages = accelerator.averages
    accelerator.strategy.save_ckpt(
        policy,
        checkpoint_dir.parent,
        checkpoint_dir.name,
        max_num=None,
        max_mem=None,
        optimizer=optimizer.optimizer,
        scheduler=scheduler,
        ema=averages.ema if averages else None,
        client_state={_AVERAGED_STEPS: averages.steps} if averages else None,
        layout=layout,
    )


def resume_before_prepare(cfg: Any) -> int:
    """Return the number of micro-batches that a checkpoint's run has trained on; not collective.

    Raises:
        DamageError: ``training_step.json`` cannot be read, or its content is invalid.
    """
    path = Path(cfg.checkpoint_path) / TRAINING_STATE / TRAINING_STEP
    try:
        step: int = parse_json(read_small_file(path, 1 << 20), _TRAINING_STEP)["step"]
    except InvalidError as error:
        raise damage(path, f"its content is invalid: {error}") from error
    return step


_TRAINING_STEP = record({"step": integer()})


def resume_after_prepare(
    cfg: Any, accelerator: Accelerator, policy: nn.Module, _optimizer: Any, scheduler: Any
) -> None:
    """Load a checkpoint's weights, optimizer, schedule, averages and random state; collective."""
    path, averages = Path(cfg.checkpoint_path).resolve(), accelerator.averages
    saved = averages if (path / TRAINING_STATE / EMA).is_dir() else None
    _, client_state = accelerator.strategy.load_ckpt(
        policy,
        path.parent,
        accelerator.optimizer,
        scheduler,
        tag=path.name,
        ema=saved.ema if saved else None,
    )
    if saved is not None:
        steps = resume_before_prepare(cfg) // accelerator.strategy.accumulated_gradient
        saved.steps = client_state.get(_AVERAGED_STEPS, steps)  # another trainer does not record them
    elif averages is not None:
        accelerator.averages = Averages(policy, averages.options)
        log("%s has no averages (ema); they start from its weights", path, level=logging.WARNING)
    if accelerator.loader is not None:
        accelerator.loader.random_state = rng_content()
