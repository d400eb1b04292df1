"""VITRA's training strategy over FSDP2: set up a VLA, train it, and go on exactly where it was.

Input: a VLA, its options, a loader. Output: a trained model, checkpoints under VITRA's names, and metrics.

    run_setup: shard -> groups -> optimizer -> schedule
    run_training: epochs -> micro-batches -> steps -> metrics, saves
"""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from fsdp2_strategy import ranks
from fsdp2_strategy.checkpoint import load_checkpoint
from fsdp2_strategy.checkpoint.state import advance_scheduler
from fsdp2_strategy.config import StrategyConfig
from fsdp2_strategy.errors import CheckpointError, ConfigError, StepError
from fsdp2_strategy.preemption import Preemption
from fsdp2_strategy.residency import clear_gradients
from fsdp2_strategy.schedule import BACKBONE_FREEZE, check_schedule_name
from fsdp2_strategy.step import StepResult
from fsdp2_strategy.training import TrainingStrategy
from fsdp2_strategy.vla.epochs import Epochs, Position, kind_of
from fsdp2_strategy.vla.groups import GROUPS, vla_parameter_groups
from fsdp2_strategy.vla.metrics import VLAMetrics

_RESHARDS = {"shard-grad-op": False, "full-shard": True}

# What a batch calls it -> the argument of the model's forward.
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

# How metrics call the rates of the groups.
_RATES = dict(
    zip(GROUPS, ("backbone_decay_lr", "backbone_no_decay_lr", "action_decay_lr", "action_no_decay_lr"), strict=True)
)

CHECKPOINTS = "checkpoints"


class VLAFSDPStrategy(TrainingStrategy):
    """Train a vision-language-action model; one object a process, the same on every rank.

    Constructing it is collective where there is no process group yet: it starts one. ``close`` or the end of a ``with``
    block ends it. Where it differs from VITRA's class of this name, docs/vla.md says how.

    Args:
        vla: a model whose backbone has "backbone" in its parameters' names; what is frozen is not trained.
        device_id: this rank's accelerator; on a CPU it says nothing.
        stage: name of the stage of training, for the log.
        epochs: how often the data is gone through.
        max_steps: optimizer steps after which training ends, or None.
        global_batch_size: samples of one optimizer step over all ranks.
        per_device_batch_size: samples of one micro-batch of one rank.
        learning_rate: of the backbone.
        weight_decay: of the backbone's matrices.
        max_grad_norm: global norm that gradients are clipped to; 0 clips nothing.
        lr_scheduler_type: "linear-warmup+cosine-decay", "constant", "linear-warmup+constant", their aliases, or
            "backbone-freeze-warmup"; see `build_scheduler`.
        warmup_ratio: part of all steps in which the rate rises.
        enable_gradient_checkpointing: recompute activations of the classes that `run_setup` is given.
        enable_mixed_precision_training: compute in bf16, with fp32 masters; else all is fp32.
        reduce_in_full_precision: sum gradients over the ranks in fp32, and keep buffers in it; else both in bf16.
        action_model_learning_rate: of all that is not backbone; by default ``learning_rate``.
        action_model_weight_decay: of its matrices; by default ``weight_decay``.
        mixed_precision_dtype: bf16, or fp32 for all fp32.
        sharding_strategy: "shard-grad-op" keeps parameters gathered from forward to backward, "full-shard" gathers
            them twice; both shard within a node and replicate across nodes.
        state_dict_type: accepted; checkpoints are written in shards, and open as full ones.
        cognition_token_weight_decay: decay the cognition token.
        llm_freeze_step: steps for which "backbone-freeze-warmup" keeps the backbone at rate 0.
        move_word_embedding_to_action_model: train the word embedding as the action model is.
        optimizer_betas: Adam's decay rates.
        as_flattened: decay nothing, as the original did; see [Note: never applied] in `groups`.
        cast_buffers: cast buffers to the dtype of reduction, as the original did. bf16 rounds rotary frequencies.
        shard_size: ranks that a parameter is split over; by default those of a node.
        max_num: checkpoints to keep; None for all.
        max_mem: GB (10^9 bytes) that all checkpoints may take; None for no limit.
        async_save: write checkpoints behind the trainer.
        config: other settings; what is said here beats it.

    Raises:
        ConfigError, OptimizerError: an option is not valid.
    """

    def __init__(
        self,
        vla: nn.Module,
        device_id: int | torch.device | None,
        stage: str,
        epochs: int,
        max_steps: int | None,
        global_batch_size: int,
        per_device_batch_size: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float | None,
        lr_scheduler_type: str,
        warmup_ratio: float,
        enable_gradient_checkpointing: bool = True,
        enable_mixed_precision_training: bool = True,
        reduce_in_full_precision: bool = False,
        action_model_learning_rate: float | None = None,
        action_model_weight_decay: float | None = None,
        mixed_precision_dtype: torch.dtype = torch.bfloat16,
        sharding_strategy: str = "shard-grad-op",
        state_dict_type: object = None,
        cognition_token_weight_decay: bool = False,
        llm_freeze_step: int = 0,
        move_word_embedding_to_action_model: bool = False,
        optimizer_betas: tuple[float, float] = (0.9, 0.999),
        *,
        as_flattened: bool = False,
        cast_buffers: bool = True,
        shard_size: int | None = None,
        max_num: int | None = 3,
        max_mem: float | None = 1000,
        async_save: bool = True,
        config: StrategyConfig | None = None,
    ) -> None:
        _check_choice("sharding_strategy", sharding_strategy, _RESHARDS)
        _check_choice("mixed_precision_dtype", mixed_precision_dtype, (torch.bfloat16, torch.float32))
        check_schedule_name(lr_scheduler_type)
        for name, value in (("epochs", epochs), ("max_steps", max_steps), ("llm_freeze_step", llm_freeze_step + 1)):
            if value is not None and value < 1:
                raise ConfigError(f"cannot configure: {name} is {value}, expected at least 1. Give a whole number.")
        super().__init__(
            config=(config or StrategyConfig()).replace(
                max_norm=max_grad_norm or 0.0,
                micro_train_batch_size=per_device_batch_size,
                train_batch_size=global_batch_size,
                bf16=enable_mixed_precision_training and mixed_precision_dtype == torch.bfloat16,
                fp16=False,
                reduce_in_full_precision=reduce_in_full_precision,
            )
        )
        if torch.cuda.is_available() and device_id is not None:
            torch.cuda.set_device(device_id)
        self.vla, self.stage, self.epochs, self.max_steps = vla, stage, epochs, max_steps
        self.global_batch_size, self.per_device_batch_size = global_batch_size, per_device_batch_size
        self.learning_rate, self.weight_decay, self.max_grad_norm = learning_rate, weight_decay, max_grad_norm
        self.lr_scheduler_type, self.warmup_ratio = lr_scheduler_type, warmup_ratio
        self.action_model_learning_rate = _or(action_model_learning_rate, learning_rate)
        self.action_model_weight_decay = _or(action_model_weight_decay, weight_decay)
        self.cognition_token_weight_decay = cognition_token_weight_decay
        self.move_word_embedding_to_action_model = move_word_embedding_to_action_model
        self.llm_freeze_step, self.optimizer_betas, self.as_flattened = llm_freeze_step, optimizer_betas, as_flattened
        self.enable_gradient_checkpointing, self.sharding_strategy = enable_gradient_checkpointing, sharding_strategy
        self.cast_buffers, self.shard_size = cast_buffers, shard_size
        self.max_num, self.max_mem, self.async_save = max_num, max_mem, async_save
        self.grad_accumulation_steps = self.accumulated_gradient
        self._resumed: _Resumed | None = None
        self._data: Epochs | None = None

    # --- set-up ------------------------------------------------------------------------------------------------------

    def run_setup(
        self,
        run_dir: str | Path,
        n_train_examples: int,
        auto_wrap_policy_modules: Iterable[type[nn.Module] | str] | type[nn.Module] | str | None = None,
        checkpointing_policy_modules: Iterable[type[nn.Module] | str] | type[nn.Module] | str | None = None,
    ) -> None:
        """Shard the model, build optimizer and schedule, and give each rank a random state of its own; collective.

        Args:
            run_dir: directory of the run.
            n_train_examples: samples of the data.
            auto_wrap_policy_modules: classes, or their names, of the modules that become units; without any they are
                found as `find_blocks` does.
            checkpointing_policy_modules: classes, or their names, of the modules whose activations are recomputed.

        Raises:
            ShardError, OptimizerError: on every rank: a class matches nothing, or nothing is trainable.
        """
        self.run_dir = Path(run_dir)
        recompute = checkpointing_policy_modules if self.enable_gradient_checkpointing else None
        self.config = self.config.replace(
            block_class_names=_class_names(self.vla, auto_wrap_policy_modules),
            activation_checkpointing=_class_names(self.vla, recompute),
        )
        shard_size = self._ranks_of_a_node() if self.shard_size is None else self.shard_size
        self.prepare_model(
            self.vla,
            is_training=True,
            shard_size=shard_size,
            reshard_after_forward=_RESHARDS[self.sharding_strategy],
        )
        if self.cast_buffers:
            _cast_buffers(self.vla, self._buffer_dtype)
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
        whole_batches = math.ceil(n_train_examples / self.global_batch_size)
        self.num_training_steps = self.max_steps or whole_batches * self.epochs
        freezes = self.lr_scheduler_type == BACKBONE_FREEZE
        options = {"llm_freeze_step": self.llm_freeze_step} if freezes else {"warmup_ratio": self.warmup_ratio}
        self.lr_scheduler = self.create_scheduler(
            self.optimizer, self.lr_scheduler_type, num_training_steps=self.num_training_steps, **options
        )
        self.set_seed(self.config.seed, per_rank=True)
        ranks.log("%s", self._summary(n_train_examples))

    def _ranks_of_a_node(self) -> int:
        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        return of_node if 0 < of_node < self.world_size and self.world_size % of_node == 0 else -1

    @property
    def _buffer_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.bf16 and not self.config.reduce_in_full_precision else torch.float32

    def _summary(self, n_train_examples: int) -> str:
        computed = torch.bfloat16 if self.config.bf16 else torch.float32
        warmup = f"warm-up {int(self.num_training_steps * self.warmup_ratio)} steps ({self.warmup_ratio})"
        if self.lr_scheduler_type == BACKBONE_FREEZE:
            warmup = f"backbone at rate 0 for {self.llm_freeze_step} steps"
        elif self.llm_freeze_step:
            warmup += f"; llm_freeze_step {self.llm_freeze_step} says nothing to this schedule"
        facts = {
            "stage": self.stage,
            "batch": f"{self.global_batch_size} = {self.per_device_batch_size} a rank x {self.world_size} ranks x "
            f"{self.grad_accumulation_steps} micro-batches",
            "sharding": self.sharding_strategy,
            "precision": f"parameters {computed}, reduction and buffers {self._buffer_dtype}",
            "activation checkpointing": ", ".join(self.config.activation_checkpointing) or "none",
            "schedule": f"{self.lr_scheduler_type}, {warmup}",
            "rates": f"backbone {self.learning_rate}, action model {self.action_model_learning_rate}",
            "weight decay": f"backbone {self.weight_decay}, action model {self.action_model_weight_decay}"
            + (", applied to nothing (as_flattened)" if self.as_flattened else ""),
            "betas": self.optimizer_betas,
            "gradient norm": f"clipped to {self.max_grad_norm}" if self.max_grad_norm else "not clipped",
            "data": f"{n_train_examples} examples",
            "steps": self.num_training_steps,
        }
        return "set up:\n" + "\n".join(f"  {name:<24} {value}" for name, value in facts.items())

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
        """Train until ``max_steps`` or the last epoch's end; collective.

        Where a checkpoint was loaded, training goes on there, in the middle of an epoch or an accumulation, and data
        and random numbers are what they would have been.

        Args:
            dataloader: gives this rank's micro-batches, mappings of tensors. Give a ResumableLoader of
                per_device_batch_size x ranks samples; any other goes on exactly at the same number of ranks.
            metrics: gets losses and rates; its ``run_dir`` is where checkpoints go.
            save_interval: optimizer steps between checkpoints; None for none.
            epoch_save_interval: epochs between checkpoints at an epoch's end; None for none.
            start_epoch: where to begin; where a checkpoint was loaded it must agree, or be left at 0.
            start_global_step: the same for the optimizer steps taken.
            save_full_model: save frozen weights, too.

        Returns:
            Whether training is through. False: SIGTERM asked some rank to stop, and a checkpoint was saved for the run
            to go on from; leave with a status that is not 0.

        Raises:
            StepError, CheckpointError, ConfigError: on every rank; losses that are not finite skip their step instead.
        """
        self._start_at(start_epoch, start_global_step)
        resumed, self._resumed = self._resumed, None
        start = resumed.position if resumed else None
        if resumed and start and start.kind == kind_of(dataloader) != "count":
            load_checkpoint(self.vla, resumed.path, load_model=False, dataloader=dataloader)
        self._data = data = Epochs(
            dataloader,
            seed=self.config.seed,
            start=start,
            epoch=resumed.begins if resumed else start_epoch,
            keeps_marks=self.grad_accumulation_steps > 1,
        )
        self._stop = Preemption()  # what this call hears: before and after it SIGTERM is the caller's
        metrics.commit(global_step=self.global_step(self.vla), epoch=data.epoch)
        if self._is_through():
            return True
        with tqdm(
            total=self._steps_of(dataloader),
            initial=self.global_step(self.vla),
            desc=metrics.get_status(),
            unit="step",
            leave=False,
            disable=not ranks.is_rank_0(),
        ) as bar:
            try:
                through = self._train(data, metrics, bar, save_interval, epoch_save_interval, full=save_full_model)
                self.wait_for_checkpoint()
            finally:
                self._stop.end()
        return through

    def _train(
        self,
        data: Epochs,
        metrics: VLAMetrics,
        bar: Any,
        save_interval: int | None,
        epoch_save_interval: int | None,
        *,
        full: bool,
    ) -> bool:
        for epoch in range(data.epoch, self.epochs):
            self.vla.train()
            for batch in data.batches(epoch):
                result = self._micro_batch(batch, metrics)
                if not (result.stepped or result.skipped):
                    continue
                data.mark()
                if result.skipped:
                    continue
                self._report(epoch, metrics, bar)
                told = self._told_to_stop()
                on_interval = save_interval is not None and result.step % save_interval == 0
                if told or self._is_through() or on_interval:
                    self.save_checkpoint(metrics.run_dir, result.step, epoch, only_trainable=not full)
                if told or self._is_through():
                    return not told
            pending = self._run(self.vla).micro_batches
            if not pending:
                data.end_epoch()
            if epoch_save_interval is not None and epoch % epoch_save_interval == 0:
                step = self.global_step(self.vla)
                self.save_checkpoint(metrics.run_dir, step, epoch, only_trainable=not full, is_epoch_end=True)
        if pending := self._run(self.vla).micro_batches:
            ranks.log(
                "the last %d micro-batches fill no step of %d, and are dropped", pending, self.grad_accumulation_steps
            )
            clear_gradients(self.vla)
            self._run(self.vla).micro_batches = 0
        return True

    def _micro_batch(self, batch: Mapping[str, Any], metrics: VLAMetrics) -> StepResult:
        prediction = self.vla(**self.forward_inputs(batch))
        parts = {name: value for name, value in prediction.items() if _is_number(value)}
        if "loss" not in parts:
            raise StepError(
                f"cannot train {type(self.vla).__name__}: its forward returned {', '.join(prediction) or 'nothing'}, "
                "expected a mapping with a 'loss' of one element."
            )
        metrics.commit(**parts)
        self.backward(parts["loss"], self.vla, self.optimizer)
        return self.optimizer_step(self.optimizer, self.vla, self.lr_scheduler, name=self.stage)

    def forward_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch; override it for other models.

        ``pixel_values`` is passed as ``rgb`` and ``actions`` as ``action_labels``; the rest, and what else of the batch
        the forward names, under its own name; ``data_source`` is ["action"].
        """
        given = {_INPUTS.get(name, name): value for name, value in batch.items()}
        inputs = {name: value for name, value in given.items() if name in _INPUTS.values() or name in self._accepted}
        return inputs | {"data_source": ["action"]}

    @cached_property
    def _accepted(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.vla.forward).parameters)

    def _report(self, epoch: int, metrics: VLAMetrics, bar: Any) -> None:
        rates = self._rates()
        step = self.global_step(self.vla)
        metrics.commit(update_step_time=True, global_step=step, epoch=epoch, lr=rates["backbone_decay_lr"], **rates)
        with ranks.all_or_none("track metrics", StepError):
            status = metrics.push()
        bar.set_description(status, refresh=False)
        bar.update()

    def _rates(self) -> dict[str, float]:
        """Return the rate of each of the four groups; of those of a half that is not trained at all, 0."""
        found: dict[str, float] = {}
        for group in self.optimizer.param_groups:
            found.setdefault(group["name"], group["lr"])
        halves = {name: name.partition("_")[0] for name in GROUPS}
        of_half = {halves[name]: rate for name, rate in found.items()}
        return {_RATES[name]: found.get(name, of_half.get(halves[name], 0.0)) for name in GROUPS}

    def _told_to_stop(self) -> bool:
        # Signals are the main thread's.
        return threading.current_thread() is threading.main_thread() and self._stop.said()

    def _is_through(self) -> bool:
        return self.max_steps is not None and self.global_step(self.vla) >= self.max_steps

    def _steps_of(self, dataloader: Any) -> int | None:
        if self.max_steps is not None:
            return self.max_steps
        return self.epochs * len(dataloader) // self.grad_accumulation_steps if hasattr(dataloader, "__len__") else None

    def clip_grad_norm(self, model: nn.Module | None = None, max_norm: float | None = None) -> float:
        """Clip the gradients to ``max_grad_norm`` as one norm, and return it; collective. `run_training` does so."""
        return super().clip_grad_norm(self.vla if model is None else model, max_norm)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        run_dir: str | Path,
        global_step: int,
        epoch: int,
        only_trainable: bool = True,
        is_epoch_end: bool = False,
    ) -> Path:
        """Save as ``<run_dir>/checkpoints/epoch={epoch}-step={global_step}[.end].ckpt``, then rotate; collective.

        Args:
            run_dir: directory of the run.
            global_step: optimizer steps taken.
            epoch: epoch that runs.
            only_trainable: leave frozen weights out; see `save_ckpt`.
            is_epoch_end: whether the epoch has ended.

        Returns:
            The checkpoint's directory; in an async save it is there once that has ended.

        Raises:
            CheckpointError: on every rank; see `save_ckpt`.
        """
        directory = Path(run_dir) / CHECKPOINTS
        tag = f"epoch={epoch}-step={global_step}{'.end' if is_epoch_end else ''}.ckpt"
        facts = {"epoch": epoch, "global_step": global_step}
        run = self._run(self.vla)
        pending, run.micro_batches = run.micro_batches, 0  # a run that goes on computes them again
        try:
            with self._data.as_marked() if self._data else nullcontext((None, None)) as (position, loader):
                path = self.save_ckpt(
                    self.vla,
                    directory,
                    tag,
                    max_num=self.max_num,
                    max_mem=self.max_mem,
                    client_state={**facts, "position": position.as_json() if position else None},
                    dataloader=loader,
                    async_save=self.async_save,
                    only_trainable=only_trainable,
                    meta=facts,
                )
        finally:
            run.micro_batches = pending
        return Path(path)

    def load_optimizer_and_scheduler(
        self,
        checkpoint_folder: str | Path,
        *,
        load_weights: bool = True,
        load_data_position: bool = True,
        trust: bool = False,
    ) -> dict[str, int] | None:
        """Load optimizer, schedule and random state, and the weights that they belong to; collective.

        Call it after `run_setup`; `run_training` then goes on from there.

        Args:
            checkpoint_folder: a checkpoint; or a run's directory, of which the newest is loaded.
            load_weights: load them; without, the optimizer goes on beside the weights that the model has.
            load_data_position: go on in the middle of the epoch, where the checkpoint knows its place.
            trust: load what VITRA itself wrote, whose pickles run code.

        Returns:
            "epoch" and "global_step"; None where the run's directory holds no checkpoint yet.

        Raises:
            CheckpointError: on every rank: a named checkpoint is not there, or see `load_ckpt`.
        """
        folder = Path(checkpoint_folder)
        directory = folder / CHECKPOINTS if ranks.from_rank_0((folder / CHECKPOINTS).is_dir()) else folder
        path, state = self.load_ckpt(self.vla, directory, load_module=load_weights, trust=trust)
        if path is None:
            if folder.suffix == ".ckpt":
                raise CheckpointError(
                    f"cannot load {folder}: there is no checkpoint, expected one that was committed. Name another, or "
                    "the run's directory for its newest."
                )
            return None
        position = state.get("position") if load_data_position else None
        self._resumed = _Resumed(
            path=Path(path),
            epoch=state.get("epoch", 0),
            ended=path.endswith(".end.ckpt"),
            position=Position(**position) if position else None,
        )
        return {"epoch": self._resumed.epoch, "global_step": self.global_step(self.vla)}

    def _start_at(self, epoch: int, step: int) -> None:
        """Compare where the caller means to start with what was loaded; bring the schedule along where nothing was.

        Raises:
            ConfigError: they differ.
        """
        run, resumed = self._run(self.vla), self._resumed
        if resumed is None:
            if step and not run.steps:
                advance_scheduler(self.lr_scheduler, step)
            run.steps = step or run.steps
            return
        if epoch not in (0, resumed.epoch, resumed.begins) or step not in (0, run.steps):
            raise ConfigError(
                f"cannot train: start_epoch is {epoch} and start_global_step {step}, expected {resumed.epoch} and "
                f"{run.steps}, where {resumed.path} goes on. Leave them out."
            )


@dataclass(frozen=True, kw_only=True)
class _Resumed:
    """What was loaded."""

    path: Path
    epoch: int
    """The epoch that ran when it was saved."""
    ended: bool
    """Whether it was saved at that epoch's end."""
    position: Position | None

    @property
    def begins(self) -> int:
        """The epoch that goes on."""
        return self.position.epoch if self.position else self.epoch + self.ended


def _class_names(
    model: nn.Module, given: Iterable[type[nn.Module] | str] | type[nn.Module] | str | None
) -> tuple[str, ...]:
    """Return the class names of the modules of a model that are of the given classes, or of ones derived from them."""
    names: set[str] = set()
    for entry in (given,) if isinstance(given, type | str) else given or ():
        if isinstance(entry, str):
            names.add(entry)
        else:
            found = {type(module).__name__ for module in model.modules() if isinstance(module, entry)}
            names |= found or {entry.__name__}
    return tuple(sorted(names))  # a set of classes has another order in each process


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _check_choice(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        known = " or ".join(map(str, choices))
        raise ConfigError(f"cannot configure: {name} is {value!r}, expected {known}. Use one of them.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
