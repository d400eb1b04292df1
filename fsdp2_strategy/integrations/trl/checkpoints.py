"""Save checkpoints under the Trainer's names, and check those that it resumes from.

Input: a trainer. Output: ``checkpoint-<step>``, a Hugging Face folder with ``trainer_state.json`` and, in
``training_state/``, the optimizer, schedule, random state and manifest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import SaveStrategy

from fsdp2_strategy.checkpoint import save_checkpoint as save_without_optimizer
from fsdp2_strategy.checkpoint.find import newest_committed
from fsdp2_strategy.checkpoint.listing import is_checkpoint
from fsdp2_strategy.distributed.agreement import all_or_none, from_rank_0
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError, DamageError
from fsdp2_strategy.integrations.trl.layout import TrainerLayout

SAMPLE_ORDER = "sample_order"
"""Key of the random states of `SampleOrder` in the client state of a checkpoint."""
_SAMPLES = "samples_per_step"


def save_checkpoint(trainer: Any, run_dir: Path) -> Path:
    """Save a checkpoint, and delete older ones; return its path, where a background save ends later; collective."""
    args, state, settings = trainer.args, trainer.state, trainer.fsdp2_settings
    trainer.store_flos()
    tag = f"checkpoint-{state.global_step}"
    is_best = bool(state.best_global_step) and state.best_global_step == state.global_step
    if is_best and args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST):
        state.best_model_checkpoint = str(run_dir / tag)
    order = trainer.accelerator.sample_order.saved()
    options: dict[str, Any] = {
        "max_num": args.save_total_limit or None,
        "max_mem": settings.max_mem,
        "client_state": {_SAMPLES: trainer.get_total_train_batch_size(args)}
        | ({} if order is None else {SAMPLE_ORDER: order}),
        "save_latest": False,
        "tokenizer": trainer._processor(),
        "metric": state.best_metric if is_best else None,
        "higher_is_better": bool(args.greater_is_better),
        "async_save": settings.async_save,
        "layout": TrainerLayout(files=_files(trainer)),
    }
    if args.save_only_model:
        save_without_optimizer(trainer.model, run_dir, tag, step=state.global_step, **options)
    else:
        optimizer = getattr(trainer.optimizer, "optimizer", None)
        trainer.strategy.save_ckpt(
            trainer.model, run_dir, tag, optimizer=optimizer, scheduler=trainer.lr_scheduler, **options
        )
    return run_dir / tag


def _files(trainer: Any) -> dict[str, str]:
    """Return the Trainer's own files: its state, and its arguments as JSON."""
    state = trainer.state
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            name, own = type(callback).__name__, callback.state()
            saved = state.stateful_callbacks[name]
            state.stateful_callbacks[name] = [*saved, own] if isinstance(saved, list) else own
    if not is_rank_0():
        return {}
    arguments = trainer.args.to_json_string()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer_state.json"
        state.save_to_json(str(path))
        return {path.name: path.read_text(encoding="utf-8"), "training_args.json": arguments}


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the checkpoint of a directory that was saved last, whatever its number; None if there is none; collective.

    A run that was resumed from an earlier step saves lower numbers than those that it left behind.
    """
    with all_or_none(f"resume from {run_dir}", DamageError):
        path = newest_committed(run_dir) if is_rank_0() else None
    return from_rank_0(None if path is None else str(path))


def check_resumable(checkpoint: str) -> None:
    """Raise on every rank unless a directory is a checkpoint that `save_checkpoint` wrote; collective."""
    if from_rank_0(is_checkpoint(Path(checkpoint)) if is_rank_0() else False):
        return
    raise CheckpointError(
        f"cannot resume: {checkpoint} is not a checkpoint of this package, expected one that this trainer saved. To "
        "continue with the weights of another trainer's checkpoint, load them with from_pretrained, and start a new "
        "run."
    )


def position_in_stream(checkpoint: str, args: Any) -> tuple[int, int]:
    """Return the epochs of a stream that a saved run has finished, and its micro-batches since; not collective.

    The length of a stream is unknown, so the Trainer takes ``max_steps`` steps for its epoch. After a resume, it would
    look for the position in the first epoch. But the ``epoch`` that it saves counts the epochs that have ended.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    epochs = int(state.epoch or 0)
    steps = round(((state.epoch or 0) - epochs) * state.max_steps)
    return epochs, 0 if args.ignore_data_skip else steps * args.gradient_accumulation_steps


def check_same_samples(trainer: Any, client_state: Mapping[str, Any], checkpoint: str) -> None:
    """Raise if a step of the saved run had another number of samples, so that the position in the data would differ."""
    saved, now = client_state.get(_SAMPLES), trainer.get_total_train_batch_size(trainer.args)
    if saved in (None, now) or trainer.args.ignore_data_skip:
        return
    raise CheckpointError(
        f"cannot resume {checkpoint}: a step of the saved run had {saved} samples, now it has {now}, expected the same "
        "number, because the Trainer counts its position in the data in steps. Change per_device_train_batch_size or "
        "gradient_accumulation_steps so that their product with the number of ranks is the same; or pass "
        "ignore_data_skip=True, which starts the epoch again."
    )
