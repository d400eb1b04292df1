"""Override the methods of transformers' ``Trainer`` that shard, step, save and load.

Input: a trainer class and its arguments. Output: the trainer, on a `TrainerStrategy`. The loop, the data, the losses,
the logs and the callbacks remain the trainer's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast
from unittest.mock import patch

import torch
import transformers.trainer
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_utils import HubStrategy, has_length

from fsdp2_strategy.checkpoint.directory import NOT_CHECKPOINTS
from fsdp2_strategy.checkpoint.random_state import load_rng, rng_content
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.hf.library_internals import resume_generations, set_weights_of_engine
from fsdp2_strategy.hf.peft.merge import is_peft_model
from fsdp2_strategy.integrations.trl.accelerator import ShardingAccelerator, SteppingOptimizer, TrainerStrategy
from fsdp2_strategy.integrations.trl.checkpoints import (
    SAMPLE_ORDER,
    check_resumable,
    check_same_samples,
    newest_checkpoint,
    position_in_stream,
    save_checkpoint,
)
from fsdp2_strategy.integrations.trl.settings import Settings, check_supported, may_reduce_once, strategy_config
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout.stream import stream_weights

TrainerT = TypeVar("TrainerT", bound=Trainer)


class FSDP2Trainer(Trainer):
    """transformers' ``Trainer`` on a `FSDPV2Strategy`; use `with_fsdp2` for other trainer classes and for options.

    All arguments are those of ``Trainer``. Every rank constructs it with the same arguments, under torchrun.

    Raises:
        ConfigError: ``TrainingArguments`` shard the model in another way, or request what is not supported.
    """

    fsdp2_settings: ClassVar[Settings] = Settings(config={})
    model: Any
    optimizer: Any
    state: Any
    accelerator: ShardingAccelerator
    strategy: TrainerStrategy
    """Shards the model and steps the optimizer; of no use before ``__init__`` has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = inspect.signature(super().__init__).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        optimizer, _ = given.get("optimizers") or (None, None)
        self._chooses_optimizer = optimizer is None and given.get("optimizer_cls_and_kwargs") is None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and the strategy that it uses; collective if there is no process group yet."""
        check_supported(self.args, chooses_optimizer=self._chooses_optimizer)
        with patch.object(transformers.trainer, "Accelerator", ShardingAccelerator):
            super().create_accelerator_and_postprocess()
        self.strategy = TrainerStrategy(config=strategy_config(self.args, self.fsdp2_settings))
        self.strategy.may_reduce_once = may_reduce_once(self.args, self.fsdp2_settings)
        self.accelerator.attach(self.strategy, lambda: self.model)
        self._resumed_rng: bytes | None = None
        self._skips_batches = False

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave the full model where it is: each rank moves only its shards to its device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Apply Liger before an evaluation shards the model: the units depend on its forward; not collective."""
        if self.args.use_liger_kernel and not training and unwrap_model(model) not in self.accelerator.prepared:
            apply_liger_kernel(model, self.args.liger_kernel_config)  # type: ignore[no-untyped-call]
        return super()._wrap_model(model, training=training, dataloader=dataloader)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Shard the model, and create the optimizer over the sharded parameters; collective."""
        if isinstance(self.optimizer, SteppingOptimizer):
            return cast(Optimizer, self.optimizer)  # `train` was called before
        if self.optimizer is not None:
            self.strategy.prepare((self.model, self.optimizer))
        else:
            self.accelerator.prepare_model(self.model)
            super().create_optimizer(model)
        self.optimizer = self.strategy.use_optimizer(self.model, self.optimizer)
        if (engine := getattr(self, "vllm_generation", None)) is not None:
            self._stream_weights_to(engine)
        return cast(Optimizer, self.optimizer)

    def _stream_weights_to(self, engine: Any) -> None:
        """Make TRL's vLLM engine take its weights from `stream_weights`; not collective.

        TRL would pass the shards of this model. It calls the replaced method in each ``sync_weights``, on every rank.
        """
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        set_weights_of_engine(engine, partial(stream_weights, self.model, dtype=dtype))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the batches of a step, and tell the strategy how many they are; collective."""
        with self.accelerator.sample_order.of_training(), spent_time.data:
            samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples:
            self.strategy.start_step(self.model, len(samples))
        return samples, num_items

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the trainer's numbers, and with those of training steps the strategy's; not collective."""
        if "loss" in logs:
            logs = self.strategy.take_step_numbers(self.model) | logs
        super().log(logs, start_time)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the strategy computes one norm over all meshes

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and register the sharded parameters again, which callbacks may read; collective."""
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            for model in list(self.accelerator.prepared):
                reshard(model)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with ``resume_from_checkpoint=True``, from the checkpoint that was saved last; collective."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(Path(str(self.args.output_dir))) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save ``checkpoint-<step>``, and delete older checkpoints, as `save_total_limit` says; collective."""
        path = save_checkpoint(self, Path(self._get_output_dir(trial)))
        pushes = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END
        if pushes or getattr(self, "use_adaptive_entropy", False):  # TRL writes a file of its own into the checkpoint
            self.strategy.wait_for_checkpoint()
        if pushes:
            self._push_from_checkpoint(str(path))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Start to upload a checkpoint's model, and with some `hub_strategy` the checkpoint; rank 0 uploads."""
        with _uploads_of_saved_files():
            super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model to the output directory, and upload that; collective."""
        with _uploads_of_saved_files():
            return super().push_to_hub(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, to a folder that ``from_pretrained`` loads; collective."""
        folder = self.args.output_dir if output_dir is None else output_dir
        self.strategy.save_model(
            self.model,
            self._processor(),
            folder,
            dtype=self.fsdp2_settings.save_dtype,
            merge_adapters=not is_peft_model(self.model),
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _processor(self) -> Any:
        """Return the tokenizer or processor to save with the model; None if there is none."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check a checkpoint; `_load_optimizer_and_scheduler` loads it, into the sharded model; collective."""
        check_resumable(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load model, optimizer, schedule and random state; collective."""
        if checkpoint is None:
            return
        check_resumable(checkpoint)
        _, client_state = self.strategy.load_ckpt(self.model, checkpoint, self.optimizer.optimizer, self.lr_scheduler)
        check_same_samples(self, client_state, checkpoint)
        self.accelerator.sample_order.resume(client_state.get(SAMPLE_ORDER), is_within_epoch=self._skips_batches)
        self._resumed_rng = rng_content()

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Read the Trainer's state of a checkpoint, and set the position within TRL's generations; not collective."""
        epochs, micro_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None and not has_length(self.train_dataset):
            epochs, micro_batches = position_in_stream(resume_from_checkpoint, self.args)
        self._skips_batches = micro_batches > 0
        if resume_from_checkpoint is not None:
            resume_generations(self, micro_batches)
        return epochs, micro_batches

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the loss scale was loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state of this rank, which skipping the first batches has changed; not collective."""
        if checkpoint is not None and self._resumed_rng is not None:
            load_rng(self._resumed_rng)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint; collective."""
        self.strategy.load_ckpt(self.model, self.state.best_model_checkpoint, load_module_only=True)

    def _finalize_training(self, *args: Any) -> Any:
        self.strategy.wait_for_checkpoint()
        return super()._finalize_training(*args)  # type: ignore[no-untyped-call]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, because trials would each need a new model; not collective.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "cannot search hyper-parameters: the trainer shards one model in place, expected one run per process. "
            "Start each trial with torchrun."
        )


def with_fsdp2(trainer_class: type[TrainerT], /, **options: Any) -> type[TrainerT]:
    """Return a trainer class that shards, steps, saves and loads with this package; not collective.

    The methods of `FSDP2Trainer` come between the class and ``Trainer``. So methods that the class overrides still run,
    and where they call those of ``Trainer``, they call this package's.

    Args:
        trainer_class: ``Trainer`` or a subclass, such as TRL's ``SFTTrainer``.
        **options: fields of `StrategyConfig` that no argument of the trainer sets, such as ``shard_size``,
            ``block_class_names`` or ``cpu_offload``; and:
            ``async_save``: write checkpoints in the background (default: no).
            ``max_mem``: maximum total size of the checkpoints in GB (10^9 bytes); older ones are deleted.
            ``save_dtype``: dtype of the weights that ``save_model`` writes; by default fp32 for trained weights.

    Raises:
        ConfigError: the class is not a subclass of ``Trainer``, or an option is unknown.

    Example::

        SFTTrainer = with_fsdp2(SFTTrainer)
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, Trainer):
        raise ConfigError(
            f"cannot use FSDP2 with {trainer_class!r}: it is not a subclass of transformers.Trainer, expected one. For "
            "a loop of your own, use FSDPV2Strategy."
        )
    bases = (FSDP2Trainer,) if trainer_class is Trainer else (trainer_class, FSDP2Trainer)
    body = {"fsdp2_settings": Settings.of(options), "__module__": trainer_class.__module__}
    body["__doc__"] = trainer_class.__doc__
    return type(trainer_class.__name__, bases, body)


@contextlib.contextmanager
def _uploads_of_saved_files() -> Iterator[None]:
    """Make the uploads of the Trainer that this block starts ignore the lock and uncommitted saves."""
    trainer: Any = transformers.trainer
    api = trainer.hf_api() if hasattr(trainer, "hf_api") else trainer  # before transformers 5.24, functions
    upload = api.upload_folder

    def upload_folder(*args: Any, ignore_patterns: Sequence[str] | None = None, **options: Any) -> Any:
        return upload(*args, ignore_patterns=[*(ignore_patterns or ()), *NOT_CHECKPOINTS], **options)

    with patch.object(api, "upload_folder", upload_folder):
        yield
