"""VITRA's training strategy on FSDP2: set up a VLA, train it, and resume it exactly.

Input: a VLA, its options, and a loader. Output: a trained model, checkpoints with VITRA's names, and metrics.

    run_setup: shard the model -> parameter groups -> optimizer -> schedule
    run_training: epochs -> training loop -> metrics, checkpoints
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from fsdp2_strategy.checkpoint import load_checkpoint
from fsdp2_strategy.checkpoint.data_position import LATER, DataPositionMode
from fsdp2_strategy.checkpoint.random_state import load_rng
from fsdp2_strategy.checkpoint.training_state import advance_scheduler
from fsdp2_strategy.config.arguments import check_keywords
from fsdp2_strategy.config.strategy_config import ShardSize, StrategyConfig
from fsdp2_strategy.distributed import process_group
from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.preemption import Preemption
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.distributed.terminal import is_terminal
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.vitra.epochs import Epochs, kind_of
from fsdp2_strategy.integrations.vitra.metrics import VLAMetrics
from fsdp2_strategy.integrations.vitra.parameter_groups import vla_parameter_groups
from fsdp2_strategy.integrations.vitra.resume import Resumed, check_new_run
from fsdp2_strategy.integrations.vitra.settings import RESHARDS, VLASettings
from fsdp2_strategy.integrations.vitra.summary import summary
from fsdp2_strategy.integrations.vitra.training_loop import Loop
from fsdp2_strategy.model.buffers import is_statistic
from fsdp2_strategy.optim.schedule import BACKBONE_FREEZE
from fsdp2_strategy.sharding.blocks import Classes, class_names_of
from fsdp2_strategy.sharding.explain import explain
from fsdp2_strategy.tracking.step_log import Output
from fsdp2_strategy.training import TrainingStrategy

_CHECKPOINTS = "checkpoints"  # the subfolder of a run's directory that contains its checkpoints

# Keys of a batch -> arguments of the model's forward, unless it has a parameter with the name of the key.
_INPUTS = {
    "pixel_values": "rgb",
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "actions": "action_labels",
    "action_masks": "action_masks",
    "current_state_mask": "current_state_mask",
    "current_state": "current_state",
    "fov": "fov",
}


@check_keywords
class VLAFSDPStrategy(VLASettings, TrainingStrategy):
    """Train a vision-language-action model; every rank constructs one object with the same arguments.

    If there is no process group, the constructor starts one and is collective; ``close`` or the end of a ``with`` block
    destroys this group. The arguments are the fields of `VLASettings`, in this order; they are also attributes.
    docs/vla.md lists the differences from VITRA's class of this name.

    Raises:
        ConfigError, OptimizerError: an argument is invalid.
    """

    def __post_init__(self, config: StrategyConfig | None) -> None:
        super().__post_init__(config)
        config = config or StrategyConfig()
        for name in ("sequence_parallel_size", "tensor_parallel_size"):
            if getattr(config, name) > 1:
                raise ConfigError(
                    f"cannot configure: {name} is {getattr(config, name)}, expected 1, because the training loop of "
                    "this class draws other batches on each rank. Use FSDPV2Strategy and a loop of your own."
                )
        TrainingStrategy.__init__(
            self,
            config=config.replace(
                max_norm=self.max_grad_norm or 0.0,
                micro_train_batch_size=self.per_device_batch_size,
                train_batch_size=self.global_batch_size,
                bf16=self.enable_mixed_precision_training and self.mixed_precision_dtype == torch.bfloat16,
                fp16=False,
                reduce_in_full_precision=self.reduce_in_full_precision,
            ),
        )
        if torch.accelerator.is_available() and self.device_id is not None:
            torch.accelerator.set_device_index(self.device_id)
        self.grad_accumulation_steps = self.accumulated_gradient
        for name, value in (
            ("batch_size", self.per_device_batch_size),
            ("gradient_accumulation_steps", self.grad_accumulation_steps),
        ):
            if self.layout is not None and getattr(self.layout, name) not in (None, value):
                raise ConfigError(
                    f"cannot configure: {name} of layout is {getattr(self.layout, name)}, expected {value}, as this "
                    f"strategy trains. Pass LeRobotLayout({name}={value})."
                )
        self._resumed: Resumed | None = None
        self._data: Epochs | None = None
        self._interrupted = False

    # --- set-up ------------------------------------------------------------------------------------------------------

    @collective
    def run_setup(
        self,
        run_dir: str | Path,
        n_train_examples: int,
        auto_wrap_policy_modules: Classes = None,
        checkpointing_policy_modules: Classes = None,
    ) -> None:
        """Shard the model, build the optimizer and the schedule, and seed each rank differently; collective.

        Args:
            run_dir: directory of the run.
            n_train_examples: number of samples per epoch.
            auto_wrap_policy_modules: classes, or class names, of the modules that become units; by default those that
                `find_blocks` finds. Classes that match no module are ignored if another one does.
            checkpointing_policy_modules: classes, or class names, of the modules whose activations are recomputed.

        Raises:
            ShardError, OptimizerError: on every rank: a class name or all classes match no module, or no parameter is
                trainable.
        """
        self.run_dir = Path(run_dir)
        self.config = self._with_classes(self.vla, auto_wrap_policy_modules, checkpointing_policy_modules)
        reshard = RESHARDS[self.sharding_strategy]
        self.prepare_model(self.vla, is_training=True, shard_size=self._shard_size(), reshard_after_forward=reshard)
        if self.cast_buffers:
            _cast_buffers(self.vla, self.buffer_dtype, with_statistics=self.cast_buffers == "all")
        groups = vla_parameter_groups(
            self.vla,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            action_model_learning_rate=self.action_model_learning_rate,
            action_model_weight_decay=self.action_model_weight_decay,
            cognition_token_weight_decay=self.cognition_token_weight_decay,
            move_word_embedding_to_action_model=self.move_word_embedding_to_action_model,
            as_flattened=self.as_flattened,
        )
        self.optimizer = self.create_optimizer(
            self.vla, betas=self.optimizer_betas, param_groups=[group for group in groups if group["params"]]
        )
        steps_per_epoch = math.ceil(n_train_examples / self.global_batch_size)
        self.num_training_steps = self.max_steps or steps_per_epoch * self.epochs
        freezes = self.lr_scheduler_type == BACKBONE_FREEZE
        options = {"llm_freeze_step": self.llm_freeze_step} if freezes else {"warmup_ratio": self.warmup_ratio}
        self.lr_scheduler = self.create_scheduler(
            self.optimizer, self.lr_scheduler_type, num_training_steps=self.num_training_steps, **options
        )
        self.set_seed(self.config.seed, per_rank=True)
        log("%s", summary(self, n_train_examples))

    def explain(
        self,
        model: nn.Module | None = None,
        is_training: bool = True,
        shard_size: ShardSize | None = None,
        reshard_after_forward: bool | int | None = None,
        *,
        auto_wrap_policy_modules: Classes = None,
        checkpointing_policy_modules: Classes = None,
        run: Callable[[nn.Module], object] | None = None,
        file: TextIO | None = None,
    ) -> str:
        """Print how `run_setup` would shard the model with the same classes; not collective.

        Call this method before `run_setup`. The sizes of buffers are those before ``cast_buffers``.

        Args:
            model: the model; by default the strategy's ``vla``.
            is_training, shard_size, reshard_after_forward: by default as `run_setup` passes them to `prepare_model`.
            auto_wrap_policy_modules, checkpointing_policy_modules: as for `run_setup`.
            run, file: see the free function `explain`.

        Returns:
            The text, on every rank.

        Raises:
            ShardError, MeshError: see the free function `explain`.
        """
        self._check_open()
        model = self.vla if model is None else model
        shard_size = self._shard_size() if shard_size is None else shard_size
        reshard = RESHARDS[self.sharding_strategy] if reshard_after_forward is None else reshard_after_forward
        config = self._with_classes(model, auto_wrap_policy_modules, checkpointing_policy_modules)
        config = config.replace(shard_size=shard_size, reshard_after_forward=reshard)
        return explain(model, config, is_training=is_training, world_size=self.world_size, run=run, file=file)

    def _with_classes(self, model: nn.Module, blocks: Classes, recompute: Classes) -> StrategyConfig:
        return self.config.replace(
            block_class_names=class_names_of(model, blocks),
            activation_checkpointing=class_names_of(model, recompute if self.enable_gradient_checkpointing else None),
        )

    def _shard_size(self) -> int:
        """Return ``shard_size``, by default the ranks per node, or -1 (all ranks) if those do not divide the ranks."""
        if self.shard_size is not None:
            return self.shard_size
        local = process_group.local_world_size(self.world_size)
        return local if 0 < local < self.world_size and self.world_size % local == 0 else -1

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The dtype of gradient reduction, and of buffers with ``cast_buffers``."""
        return torch.bfloat16 if self.config.bf16 and not self.config.reduce_in_full_precision else torch.float32

    # --- training ----------------------------------------------------------------------------------------------------

    def run_training(
        self,
        dataloader: Any,
        metrics: VLAMetrics,
        save_interval: int | None = 2500,
        epoch_save_interval: int | None = 1,
        start_epoch: int = 0,
        start_global_step: int = 0,
        save_full_model: bool = True,
    ) -> bool:
        """Train until ``max_steps`` or the end of the last epoch; collective.

        After `load_optimizer_and_scheduler`, training resumes at the checkpoint, even within an epoch, with the data
        and random numbers of an uninterrupted run. All ranks skip a step whose gradient norm is not finite.

        Args:
            dataloader: yields this rank's micro-batches as mappings of tensors. Pass a ResumableLoader with a global
                batch of per_device_batch_size x ranks; other loaders resume only on the same number of ranks.
            metrics: receives losses and learning rates. Checkpoints are saved below ``metrics.run_dir``.
            save_interval: optimizer steps between checkpoints; None for no checkpoints within an epoch. The step
                ``max_steps`` is always saved.
            epoch_save_interval: epochs between checkpoints at the end of an epoch; None for none. If either interval is
                given, the end of the last epoch is also saved, unless its last step is already saved.
            start_epoch: the first epoch. After a checkpoint is loaded, pass its epoch or 0.
            start_global_step: optimizer steps taken before. After a checkpoint is loaded, pass its step or 0.
            save_full_model: whether checkpoints contain all frozen weights.

        Returns:
            True at the end of training. False if SIGTERM stopped the run, whose last step is then saved: exit with a
            non-zero status, so that the run is started again.

        Raises:
            StepError: the forward returns no loss; or, on every rank, a tracker fails.
            DataError: on every rank: the loader fails, yields no batch, or yields more batches on some ranks than on
                others.
            CheckpointError: on every rank: a checkpoint cannot be saved, or the loader cannot resume at the position.
            ConfigError: on every rank: a start argument differs from the loaded checkpoint, or SIGTERM stopped an
                earlier call.
        """
        self._check_start(start_epoch, start_global_step)
        resumed = self._resumed
        start = resumed.position if resumed else None
        if self._interrupted:
            raise ConfigError(
                "cannot train: SIGTERM stopped this run before its end, expected its checkpoint to be loaded first. "
                "Restart the process, or call load_optimizer_and_scheduler and create the loader again."
            )
        if resumed and start and start.kind == kind_of(dataloader) != "count":
            load_checkpoint(
                self.vla,
                resumed.path,
                load_model=False,
                dataloader=dataloader,
                load_data_position=resumed.load_data_position,
                key_file=self.config.checkpoint_key_file,
            )
        if resumed:
            load_rng(resumed.rng)  # random numbers may have been drawn since the load
        data = Epochs(
            dataloader,
            seed=self.config.seed,
            start=start,
            any_batch_size=resumed is not None and resumed.load_data_position == "samples",
            epoch=resumed.start_epoch if resumed else start_epoch,
            sampler_may_be_positioned=start is None and self.global_step(self.vla) > 0,
            accumulates=self.grad_accumulation_steps > 1,
        )
        self._data, self._resumed = data, None
        metrics.commit(global_step=self.global_step(self.vla), epoch=data.epoch)
        if self.is_finished():
            return True
        stop = Preemption()  # handles SIGTERM during this call only
        with (
            closing(stop),
            Progress(
                metrics.get_status(),
                self._steps_of(dataloader),
                unit="step",
                done=self.global_step(self.vla),
                is_shown=process_group.is_rank_0() and is_terminal() and self.config.logs_steps,
            ) as progress,
        ):
            loop = Loop(
                strategy=self,
                data=data,
                metrics=metrics,
                progress=progress,
                stop=stop,
                save_interval=save_interval,
                epoch_save_interval=epoch_save_interval,
                save_full_model=save_full_model,
            )
            finished = loop.run()
            self.wait_for_checkpoint()
            self._interrupted = not finished
        return finished

    def _step_output(self) -> Output:
        """On a terminal, the bar of `run_training` has the numbers."""
        return "none" if is_terminal() else "lines"

    def step_text(self) -> str:
        """Return the numbers of the steps since the last call, at most once a second; "" between; not collective."""
        return self._state_of(self.vla).meter.take_text()

    def forward_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch; not collective; override it for other models.

        Keys that are parameters of the forward keep their names. Otherwise ``pixel_values`` is passed as ``rgb``, and
        ``actions`` as ``action_labels``; VITRA's other inputs keep their names, and other keys are dropped.
        ``data_source=["action"]`` is added.
        """
        given = {name if name in self._accepted else _INPUTS.get(name, name): value for name, value in batch.items()}
        inputs = {name: value for name, value in given.items() if name in _INPUTS.values() or name in self._accepted}
        return inputs | {"data_source": ["action"]}

    @cached_property
    def _accepted(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.vla.forward).parameters)

    def is_finished(self) -> bool:
        """Return whether ``max_steps`` optimizer steps have been taken; not collective."""
        return self.max_steps is not None and self.global_step(self.vla) >= self.max_steps

    @property
    def pending_micro_batches(self) -> int:
        """Number of micro-batches since the last optimizer step."""
        return self._state_of(self.vla).accumulation.micro_batches

    @pending_micro_batches.setter
    def pending_micro_batches(self, count: int) -> None:
        self._state_of(self.vla).accumulation.micro_batches = count

    def _steps_of(self, dataloader: Any) -> int | None:
        if self.max_steps is not None:
            return self.max_steps
        try:
            return self.epochs * len(dataloader) // self.grad_accumulation_steps
        except TypeError:  # an iterable data set has no length
            return None

    @collective
    def clip_grad_norm(self, model: nn.Module | None = None, max_norm: float | None = None) -> float:
        """Clip the gradients to ``max_norm`` (default: ``max_grad_norm``), and return their norm before; collective.

        `run_training` clips in each step without this call.
        """
        return super().clip_grad_norm(self.vla if model is None else model, max_norm)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @collective
    def save_checkpoint(
        self,
        run_dir: str | Path,
        global_step: int,
        epoch: int,
        only_trainable: bool = True,
        is_epoch_end: bool = False,
        *,
        async_save: bool = False,
    ) -> Path:
        """Save as ``<run_dir>/checkpoints/epoch={epoch}-step={global_step}[.end].ckpt``; collective.

        With a ``layout``, the name is LeRobot's for this step, and the end of an epoch replaces a checkpoint of the
        same step. Then delete old checkpoints, as ``max_num`` and ``max_mem`` require.

        Args:
            run_dir: directory of the run.
            global_step: optimizer steps taken.
            epoch: the current epoch.
            only_trainable: omit frozen weights; see `save_ckpt`.
            is_epoch_end: whether the epoch has ended.
            async_save: write in the background; `run_training` passes the strategy's ``async_save``.

        Returns:
            The checkpoint's directory. With ``async_save`` it exists only after the write has finished.

        Raises:
            CheckpointError: on every rank; see `save_ckpt`.
        """
        tag = f"epoch={epoch}-step={global_step}{'.end' if is_epoch_end else ''}.ckpt"
        if self.layout is not None:
            tag = self.layout.tag(global_step)
        progress = {"epoch": epoch, "global_step": global_step}
        if self._resumed is not None:
            message = "saving before run_training: a run that loads this checkpoint starts at the beginning of an epoch"
            log(message, level=logging.WARNING)
        pending, self.pending_micro_batches = self.pending_micro_batches, 0  # a resumed run computes them again
        try:
            with self._data.state_of_last_step() if self._data else nullcontext((None, None)) as (position, loader):
                path = self.save_ckpt(
                    self.vla,
                    Path(run_dir) / _CHECKPOINTS,
                    tag,
                    max_num=self.max_num,
                    max_mem=self.max_mem,
                    client_state={**progress, "position": asdict(position) if position else None},
                    dataloader=loader,
                    async_save=async_save,
                    only_trainable=only_trainable,
                    layout=self.layout,
                    meta=progress,
                )
        finally:
            self.pending_micro_batches = pending
        return Path(path)

    @collective
    def load_optimizer_and_scheduler(
        self,
        checkpoint_folder: str | Path,
        *,
        load_weights: bool = True,
        load_data_position: DataPositionMode = True,
        strict: bool = True,
        trust: bool = False,
    ) -> dict[str, int] | None:
        """Load the weights, optimizer, schedule and random state of a checkpoint; collective.

        Call it after `run_setup`. `run_training` then resumes at the checkpoint.

        Args:
            checkpoint_folder: a checkpoint, or a run's directory, whose newest checkpoint is loaded.
            load_weights: whether to load the weights; if false, the model keeps its current weights.
            load_data_position: resume at the data position in the checkpoint, if there is one. If "samples", the
                micro-batches of a ResumableLoader may have another size than in the saved run; training continues at
                the same sample.
            strict: raise if the checkpoint, the model and the optimizer have different parameter names.
            trust: also load checkpoints that VITRA wrote. They are pickles, which can execute code.

        Returns:
            "epoch" and "global_step", or None if the run's directory contains no checkpoint yet.

        Raises:
            CheckpointError: on every rank: the checkpoint does not exist or cannot be loaded; see `load_ckpt`.
        """
        folder = Path(checkpoint_folder)
        directory = folder / _CHECKPOINTS if from_rank_0((folder / _CHECKPOINTS).is_dir()) else folder
        path, state = self.load_ckpt(
            self.vla, directory, load_module=load_weights, load_module_strict=strict, dataloader=LATER, trust=trust
        )
        if path is None:
            check_new_run(folder, self.run_dir)
            return None
        self._data, self._interrupted = None, False
        self._resumed = Resumed.of(path, state, load_data_position=load_data_position)
        return {"epoch": self._resumed.epoch, "global_step": self.global_step(self.vla)}

    def _check_start(self, epoch: int, step: int) -> None:
        """Compare the start arguments with the loaded checkpoint; if none was, advance the schedule to ``step``."""
        accumulation = self._state_of(self.vla).accumulation
        if self._resumed is not None:
            self._resumed.check_start(epoch, step, accumulation.steps)
        elif step:
            if accumulation.steps not in (0, step):
                raise ConfigError(
                    f"cannot train: start_global_step is {step}, expected {accumulation.steps}, the number of steps "
                    "taken. Omit it."
                )
            if not self.lr_scheduler.last_epoch:
                advance_scheduler(self.lr_scheduler, step)
            accumulation.steps = step


def _cast_buffers(model: nn.Module, dtype: torch.dtype, *, with_statistics: bool) -> None:
    """Cast a model's floating-point buffers; modules that share a buffer still share it afterwards."""
    cast: dict[int, torch.Tensor] = {}
    kept = {
        id(buffer)
        for module_name, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if not with_statistics and buffer is not None and is_statistic(module_name, module, name)
    }
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and id(buffer) not in kept:
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(dtype))
