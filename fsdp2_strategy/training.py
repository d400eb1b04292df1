"""The strategy methods that every trainer needs: models, optimizers, steps and checkpoints.

Input: a configuration and the trainer's models. Output: the results of the free functions that the methods call. The
class keeps state: the configuration, the ranks that train, and for each model its optimizer, schedule, moving averages
and gradient accumulation.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TextIO, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint.background_save import forget_groups
from fsdp2_strategy.checkpoint.data_position import DataPositionMode, Later, Loader
from fsdp2_strategy.checkpoint.different_steps import compare_with_next_directories
from fsdp2_strategy.checkpoint.layout import Layout
from fsdp2_strategy.checkpoint.load import load_checkpoint
from fsdp2_strategy.checkpoint.random_state import seed_everything
from fsdp2_strategy.checkpoint.save import end_saving, save_checkpoint, wait_for_checkpoint
from fsdp2_strategy.checkpoint.several_models import Models, for_each, joined, models_by_name
from fsdp2_strategy.checkpoint.training_state import LoadedCheckpoint, schedule_state
from fsdp2_strategy.config.aliases import PARALLEL_SIZES, resolve_aliases
from fsdp2_strategy.config.arguments import check_keywords
from fsdp2_strategy.config.strategy_config import GradSync, ShardSize, StrategyConfig
from fsdp2_strategy.data.loader import ResumableLoader
from fsdp2_strategy.distributed import process_group as ranks
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log, show_log
from fsdp2_strategy.distributed.lost_ranks import collective, disconnect, report_end
from fsdp2_strategy.distributed.mesh import check_shard_size, forget_meshes, group_of, groups_that_share
from fsdp2_strategy.distributed.preemption import Preemption
from fsdp2_strategy.distributed.tcp_rendezvous import Rendezvous
from fsdp2_strategy.distributed.terminal import above_bars
from fsdp2_strategy.distributed.wait_log import begin_wait_log
from fsdp2_strategy.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    FSDP2StrategyError,
    MeshError,
    SequenceError,
    ShardError,
    StepError,
    counted,
    some,
)
from fsdp2_strategy.hf.export import save_model
from fsdp2_strategy.hf.load import load_pretrained, needs_values
from fsdp2_strategy.hf.meta.init_on_meta import init_on_meta
from fsdp2_strategy.hf.packed_rows import keep_documents_apart
from fsdp2_strategy.model.buffers import differing_buffers
from fsdp2_strategy.model.fsdp_state import is_sharded, parameters_outside_units
from fsdp2_strategy.model.names import modules_unchanged, named_parameters
from fsdp2_strategy.model.offloading import free_host_buffers
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.accumulation import Accumulation, LossScale, begin_accumulation
from fsdp2_strategy.optim.ema import EMA
from fsdp2_strategy.optim.groups import build_optimizer
from fsdp2_strategy.optim.schedule import build_scheduler, check_schedule_of, drives
from fsdp2_strategy.optim.step import StepResult, backward, clip_for_step, forbid_direct_steps, optimizer_step
from fsdp2_strategy.optim.zero_grad import discard_gradients, watch_optimizer
from fsdp2_strategy.sharding.explain import explain
from fsdp2_strategy.sharding.features import feature
from fsdp2_strategy.sharding.shard import check_dtypes, is_for_training, mesh_for, shard_model, watch_wrapper
from fsdp2_strategy.tracking.memory_snapshot import record_allocations, stop_recording
from fsdp2_strategy.tracking.profile import Profile, check_writable
from fsdp2_strategy.tracking.step_log import Output
from fsdp2_strategy.tracking.step_meter import StepMeter, publish_host, watch_forward

_OTHER_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)

_SETTINGS_OF_STEPS = (
    "accumulation",
    "bf16",
    "fp16",
    "grad_sync",
    "loss_reduction",
    "memory_snapshot",
    "profile",
    "reduce_in_full_precision",
    "sync_buffers",
    "use_mp_opt",
)

ModelT = TypeVar("ModelT", bound=nn.Module | None)


class _Unset:
    """The default of arguments that are taken from the configuration if they are not given."""

    def __repr__(self) -> str:
        return "<from the configuration>"


_UNSET: Any = _Unset()


@dataclass
class _TrainingState:
    """The state that the strategy keeps for one model."""

    accumulation: Accumulation
    meter: StepMeter
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    ema: EMA | None = None
    """The averages last used with this model; for a ``model_ema``, those that are copied into it."""
    created_scheduler: tuple[LRScheduler, int, int] | None = None
    """The schedule of `create_scheduler`, and its last epoch and the optimizer steps when it was created or loaded."""
    loaded_steps: int = 0
    """Optimizer steps of the checkpoint that was loaded last."""
    averaged_steps: WeakKeyDictionary[EMA, int] = field(default_factory=WeakKeyDictionary)
    """Optimizer steps at the last update of each average."""

    def schedule_of(self, optimizer: Optimizer | None) -> LRScheduler | None:
        """Return the schedule, unless it sets the learning rates of another optimizer."""
        is_other = self.scheduler is not None and optimizer is not None and not drives(self.scheduler, optimizer)
        return None if is_other else self.scheduler


@check_keywords
class TrainingStrategy:
    """Shard, step, save and resume models; `FSDPV2Strategy` documents the arguments."""

    def __init__(
        self,
        seed: int = _UNSET,
        max_norm: float = _UNSET,
        micro_train_batch_size: int = _UNSET,
        train_batch_size: int | None = _UNSET,
        bf16: bool = _UNSET,
        args: object = None,
        *,
        config: StrategyConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        rendezvous: Rendezvous | None = None,
        max_grad_norm: float = _UNSET,
        gradient_accumulation_steps: int | None = _UNSET,
        log_level: int | str | None = None,
    ) -> None:
        show_log(log_level)
        for name, value, kind in (
            ("process_group", process_group, dist.ProcessGroup),
            ("rendezvous", rendezvous, Rendezvous),
        ):
            # An int: torch's mark of a group that this rank is not in.
            if not isinstance(value, kind | int | None):
                raise MeshError(
                    f"cannot train: {name} is a {type(value).__name__}, expected a {kind.__name__} or None. Leave it "
                    "out to use all ranks that torchrun started."
                )
        given = {
            "seed": seed,
            "max_norm": max_norm,
            "micro_train_batch_size": micro_train_batch_size,
            "train_batch_size": train_batch_size,
            "bf16": bf16,
            "max_grad_norm": max_grad_norm,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
        base = StrategyConfig.resolve(args, config)
        given = resolve_aliases({name: value for name, value in given.items() if value is not _UNSET})
        self.config = base.replace(**given)
        self.args = args
        self._is_closed = False
        self._declared: int | None = None
        """Micro-batches of each step in the block of `accumulate` that is running."""
        self._owns_process_group = ranks.start_process_group(self.config.timeout_minutes, rendezvous)
        begin_wait_log(self.config.wait_warning_seconds)
        self._trainers = ranks.TrainingRanks(
            process_group, self.config.sequence_parallel_size, self.config.tensor_parallel_size
        )
        ranks.use_own_device(self._trainers.group)
        self.world_size = self._trainers.count
        self.accumulated_gradient = self.config.accumulation_steps(self.dp_size)
        self._trainers.begin()
        publish_host()
        self._states: WeakKeyDictionary[nn.Module, _TrainingState] = WeakKeyDictionary()
        self._checked_loaders: WeakSet[ResumableLoader] = WeakSet()
        self._preemption = Preemption()
        self._profile: Profile | None = None
        self._records_memory = False
        self.set_seed(self.config.seed)
        log("strategy on %s: %s", counted(self.world_size, "rank"), self.config.changes() or "default settings")

    # --- the process ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return ranks.current_device()

    def get_rank(self) -> int:
        """Return this process's rank among the ranks that train; not collective."""
        return ranks.rank()

    @property
    def sp_size(self) -> int:
        """Number of ranks that share sequences: ``sequence_parallel_size`` of the configuration."""
        return self.config.sequence_parallel_size

    @property
    def sp_rank(self) -> int:
        """Which part of the sequences this rank computes, from 0."""
        return self.get_rank() % self.sp_size

    @property
    def tp_size(self) -> int:
        """Number of ranks that share layers: ``tensor_parallel_size`` of the configuration."""
        return self.config.tensor_parallel_size

    @property
    def tp_rank(self) -> int:
        """Which part of the layers this rank computes, from 0."""
        return self.get_rank() % self.tp_size

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks: of parts that each batch is divided into."""
        return self.world_size // self.config.ranks_per_batch

    @property
    def dp_rank(self) -> int:
        """Which part of each batch this rank gets, from 0; equal on the ranks that share sequences or layers."""
        return self.get_rank() // self.config.ranks_per_batch

    @property
    def sp_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequences, in their order."""
        return self._ranks_that_share(self.sp_size)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's layers, in their order."""
        return self._ranks_that_share(self.tp_size)

    def _ranks_that_share(self, size: int) -> dist.ProcessGroup:
        return groups_that_share(self.config.ranks_per_batch)[0] if size > 1 else group_of([dist.get_rank()])

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that compute the same part of other batches; all ranks if no ranks share sequences or layers."""
        everyone: Any = ranks.group_in_use() or dist.group.WORLD
        return groups_that_share(shared)[1] if (shared := self.config.ranks_per_batch) > 1 else everyone

    @staticmethod
    def is_rank_0() -> bool:
        """Return whether this is rank 0; not collective, and can be called on the class, too."""
        return ranks.is_rank_0()

    @staticmethod
    def print(*message: object) -> None:
        """Write a message to standard output, on rank 0 only; not collective, and can be called on the class, too."""
        if ranks.is_rank_0():
            with above_bars(sys.stdout):
                sys.stdout.write(" ".join(map(str, message)) + "\n")
                sys.stdout.flush()

    def set_seed(self, seed: int, *, per_rank: bool = False) -> None:
        """Seed all generators; not collective.

        Build models with the same seed on all ranks. Then call this with ``per_rank``, so that dropout and noise differ
        between data parallel ranks.
        """
        seed_everything(seed + self.dp_rank if per_rank else seed)

    @collective(needs_groups=False)
    def close(self) -> None:
        """Wait for an asynchronous save, and destroy the process group that the constructor started; collective.

        A process group that existed before is kept, and repeated calls have no effect. The locks on the directories
        that this process saved into are released. If an error is being handled, such as at the end of a ``with`` block,
        other ranks that wait for this one raise an error at once.

        Raises:
            CheckpointError: on every rank, if an asynchronous save has failed. The strategy is closed nevertheless.
        """
        self._is_closed = True
        for state in self._states.values():
            state.meter.close()
        self._states.clear()
        if self._profile is not None:
            self._profile.close()
        if self._records_memory:
            stop_recording()
        try:
            end_saving()
        finally:
            self._preemption.close()
            free_host_buffers()
            self._trainers.close()
            if self._owns_process_group and dist.is_initialized():
                report_end()
                if sys.exc_info()[1] is not None:
                    disconnect()
                forget_meshes()
                forget_groups()
                dist.destroy_process_group()
            self._owns_process_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Call `close`. If the block raised an error, an error of `close` becomes a note of it."""
        try:
            self.close()
        except FSDP2StrategyError as failed:
            if error is None:
                raise
            error.add_note(f"Closing the strategy then failed: {failed}")

    # --- models --------------------------------------------------------------------------------------------------

    def init_model_context(self, meta_init: bool = False) -> AbstractContextManager[None]:
        """Return a context to build models in, on the meta device (`init_on_meta`) if ``meta_init``; not collective."""
        return init_on_meta() if meta_init else nullcontext()

    @collective
    def prepare_model(
        self,
        model: ModelT,
        is_training: bool = False,
        shard_size: ShardSize = _UNSET,
        reshard_after_forward: bool | int = _UNSET,
        *,
        tensor_parallel_plan: Mapping[str, str] | None = None,
    ) -> ModelT:
        """Shard a model in place by the settings of the configuration; collective.

        Returned unchanged: None, prepared models, wrappers that add no parameters to a prepared model, and modules with
        a ``base_model`` that is not an nn.Module. If the model was built on the meta device, its weights are loaded or
        initialised.

        Args:
            model: any module, or a wrapper around one; every rank must have the same weights.
            is_training: keep fp32 master weights; if false, store the parameters in the compute dtype only.
            shard_size: number of ranks that `fully_shard` splits a parameter over, a divisor of the number of ranks /
                ``tensor_parallel_size``. -1 means all of these. "auto" selects a number by the size of the model: see
                `auto_shard_size`. By default, that of the configuration.
            reshard_after_forward: free gathered parameters after a unit's forward. With an int, keep them sharded over
                groups of that many ranks until backward. By default, the configuration's.
            tensor_parallel_plan: how the layers of this model are split, if ``tensor_parallel_size`` is above 1; by
                default that of the configuration, else the model's own plan. See docs/tensor_parallel.md.

        Returns:
            ``model`` itself.

        Raises:
            MeshError, ShardError: on every rank; see `build_mesh` and `shard_model`.
            CheckpointError: on every rank: the weights of a model on the meta device cannot be loaded.
            SequenceError: on every rank: ``sequence_parallel_size`` is above 1, and the sequences of a model that is
                trained cannot be split.
            ConfigError: on every rank: the configuration of parallelism or of optimizer steps differs between ranks.
        """
        if model is None:
            return model
        self._check_open()
        check_is_model(model)
        if not _should_shard(model):
            if isinstance(model, nn.Module):
                watch_wrapper(model)
            return model
        self._check_same_settings()
        self._begin_profile()
        config = self._with_arguments(self.config, shard_size, reshard_after_forward)
        if tensor_parallel_plan is not None:
            config = config.replace(tensor_parallel_plan=tensor_parallel_plan)
        shard_model(model, mesh_for(model, config, is_training=is_training), config, is_training=is_training)
        if needs_values(model):
            load_pretrained(model)
        keep_documents_apart(model)
        watch_forward(unwrap_model(model))
        if self.sp_size > 1:
            feature("sequence.prepare").prepare_for_split(model, self.sp_group, is_training=is_training)
        return model

    def _check_same_settings(self) -> None:
        """Raise on every rank if a setting that decides which collectives a rank runs differs between the ranks."""
        own = {name: getattr(self.config, name) for name in (*PARALLEL_SIZES, *_SETTINGS_OF_STEPS)}
        own["gradient_accumulation_steps"] = self.accumulated_gradient
        of_ranks: list[dict[str, Any]] = [own] * self.world_size
        dist.all_gather_object(of_ranks, own, group=ranks.group_in_use())
        for name in own:
            values = [each[name] for each in of_ranks]
            if any(value != values[0] for value in values):
                shown = ", ".join(
                    f"{value} on {some([str(rank) for rank, each in enumerate(values) if each == value], 'rank')}"
                    for value in dict.fromkeys(values)
                )
                kind = "number" if name in PARALLEL_SIZES else "setting"
                raise ConfigError(
                    f"cannot shard a model: {name} is {shown}, expected the same {kind} on all ranks. Start all ranks "
                    "with the same configuration."
                )

    def _begin_profile(self) -> None:
        """Check on all ranks that the files of ``profile`` and ``memory_snapshot`` can be written; record memory.

        Collective in the first call, if the configuration, which is equal on all ranks, has one of the two.
        """
        config = self.config
        if config.profile is not None and self._profile is None:
            self._profile = Profile(config.profile, config.profile_dir)
        if config.memory_snapshot and not self._records_memory:
            with all_or_none("record memory for memory_snapshot", ConfigError):
                folder = Path(config.profile_dir)
                check_writable(folder, dist.get_rank())
                record_allocations(folder)
            self._records_memory = True

    @collective
    def shard_sequence(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, as keyword arguments of a prepared model; collective.

        All ranks that share sequences must be given the same full batch. Without sequence parallelism, this is the
        batch itself. Other arguments, the result and errors are those of the free function `shard_sequence`. The mean
        over all ranks of the model's loss is the loss of the full batches::

            loss = model(**strategy.shard_sequence(batch)).loss
            strategy.backward(loss, model, optimizer)

        Raises:
            SequenceError: on every rank: the batch has no sequences, or differs between ranks that share sequences.
        """
        self._check_open()
        if self.sp_size == 1:
            if not isinstance(batch, Mapping):
                raise SequenceError(
                    f"cannot split sequences: the batch is a {type(batch).__name__}, expected a mapping of names to "
                    "tensors. Pass for example {'input_ids': ids}."
                )
            return dict(batch)
        with all_or_none("split sequences", SequenceError):
            split = feature("sequence.shard")
            split.check_same_batch(batch, self.sp_group)
            part: dict[str, Any] = split.shard_sequence(batch, self.sp_group)
            return part

    def explain(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: ShardSize = _UNSET,
        reshard_after_forward: bool | int = _UNSET,
        *,
        run: Callable[[nn.Module], object] | None = None,
        file: TextIO | None = None,
    ) -> str:
        """Print how `prepare_model` would shard a model with the same arguments; not collective.

        Call this method before `prepare_model`. ``compile_blocks``, ``forward_methods``, ``prefetch_depth`` and
        ``cast_inputs`` of the configuration do not change what the text contains.

        Args:
            model: any module, or a wrapper around one; it is only read, and may be on the meta device.
            is_training, shard_size, reshard_after_forward: as for `prepare_model`, with the same defaults.
            run, file: see the free function `explain`.

        Returns:
            The text, on every rank.

        Raises:
            ShardError, MeshError: see the free function `explain`.
        """
        self._check_open()
        check_is_model(model)
        config = self._with_arguments(self.config, shard_size, reshard_after_forward)
        return explain(model, config, is_training=is_training, world_size=self.world_size, run=run, file=file)

    def _with_arguments(
        self, config: StrategyConfig, shard_size: ShardSize, reshard_after_forward: bool | int
    ) -> StrategyConfig:
        """Return a configuration with the arguments of a call that are given.

        Raises:
            MeshError: ``shard_size`` does not divide the number of ranks.
            ConfigError: ``reshard_after_forward`` is invalid.
        """
        if shard_size is not _UNSET and shard_size != "auto":
            check_shard_size(shard_size, self.world_size, self.tp_size)
        given = {"shard_size": shard_size, "reshard_after_forward": reshard_after_forward}
        return config.replace(**{name: value for name, value in given.items() if value is not _UNSET})

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that is sharded as the root, for a model or its wrapper; not collective."""
        return unwrap_model(model)

    def create_optimizer(
        self,
        model: nn.Module,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        **kwargs: Any,
    ) -> Optimizer:
        """Build the optimizer of a prepared model, and use it for this model's checkpoints; not collective.

        Arguments and errors are those of `build_optimizer`. ``masters`` is ``use_mp_opt`` by default.
        """
        masters = kwargs.pop("masters", self.config.use_mp_opt)
        optimizer = build_optimizer(model, lr, betas, eps, weight_decay, masters=masters, **kwargs)
        forbid_direct_steps(optimizer)
        state = self._state_of(model)
        # A schedule of an earlier optimizer of this model would neither set these rates, nor may it be saved with them.
        state.optimizer, state.scheduler, state.created_scheduler = optimizer, None, None
        if self._profile is not None:
            self._profile.reached(state.accumulation.steps)
        return optimizer

    def create_scheduler(self, optimizer: Optimizer, name: str, **kwargs: Any) -> LRScheduler:
        """Build a schedule, and save it in checkpoints together with ``optimizer``; not collective.

        Arguments and errors are those of `build_scheduler`.
        """
        scheduler = build_scheduler(optimizer, name, **kwargs)
        schedule_state(scheduler)  # refuse now what the first save would refuse
        for state in self._states.values():
            if state.optimizer is optimizer:
                state.scheduler = scheduler
                state.meter.log.total_steps = kwargs.get("num_training_steps")
                state.created_scheduler = (scheduler, scheduler.last_epoch, state.accumulation.steps)
        return scheduler

    def _ema(self, model: nn.Module, model_ema: nn.Module | EMA, device: torch.device | str = "cpu") -> EMA:
        """Return the averages that are copied into ``model_ema``, and record them as those of ``model``.

        If ``model_ema`` is a module, its averages are created at first use. If it is an `EMA`, it is returned itself.
        """
        state = self._state_of(model)
        if isinstance(model_ema, EMA):
            state.ema = model_ema
            return model_ema
        averaged = self._state_of(model_ema)
        if averaged.ema is None:
            trained = [name for name, p in named_parameters(unwrap_model(model)).items() if p.requires_grad]
            averaged.ema = EMA(model_ema, names=trained, device="cpu" if torch.device(device).type == "cpu" else None)
        state.ema = averaged.ema
        return averaged.ema

    # --- steps ---------------------------------------------------------------------------------------------------

    @collective
    def backward(
        self,
        loss: torch.Tensor,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        num_items_in_batch: float | torch.Tensor | None = None,
        num_items: int | torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
        num_samples: int | torch.Tensor | None = None,
    ) -> None:
        """Run the backward pass of one micro-batch; collective.

        This method multiplies the loss by 1 / ``accumulated_gradient``, or by (number of ranks) /
        ``num_items_in_batch`` if given; and, with fp16, by the loss scale. The caller must not scale it.

        ``loss``, ``model``, ``num_items_in_batch``, ``num_tokens`` and errors are those of `optim.step.backward`. From
        then on, ``zero_grad`` of ``optimizer``, if it is given, keeps the gradients of earlier micro-batches of a step:
        see `discard_gradients`. ``num_samples`` is the number of samples in this rank's micro-batch, for
        `StepResult.samples` only; by default the size of the first dimension of the first tensor that the model's
        forward got. Ranks that share a batch pass the same number.
        """
        state = self._state_of(model)
        if optimizer is not None:
            if not hasattr(optimizer, "param_groups"):
                raise StepError(
                    f"cannot run backward: the optimizer is a {type(optimizer).__name__}, expected a torch optimizer "
                    "or None. Check the order of the arguments: backward(loss, model, optimizer)."
                )
            watch_optimizer(optimizer, model)
        self._declare(state.accumulation)
        with state.meter.backward(num_samples):
            backward(
                loss,
                model,
                accumulation_steps=self.accumulated_gradient,
                accumulation=self.config.accumulation,
                loss_reduction=self.config.loss_reduction,
                grad_sync=self._grad_sync_of(model),
                num_items_in_batch=num_items_in_batch,
                num_items=num_items,
                num_tokens=num_tokens,
            )

    def _grad_sync_of(self, model: nn.Module) -> GradSync:
        """Return how the micro-batches of this step communicate a model's gradients."""
        return self.config.effective_grad_sync

    def discard_gradients(self, model: nn.Module) -> None:
        """Drop the gradients of the micro-batches since the last optimizer step; not collective; call it on all ranks.

        The next ``backward`` begins a new step. ``optimizer.zero_grad()`` and ``model.zero_grad()`` do not drop them
        between the micro-batches of a step, because loops call these at their top.

        Args:
            model: the model, or its wrapper.
        """
        self._state_of(model)
        discard_gradients(model)

    @contextmanager
    def accumulate(self, micro_batches: int) -> Iterator[None]:
        """Declare that each optimizer step in this block has so many micro-batches; not collective.

        Each call of ``backward`` in the block is a micro-batch, unless the configuration has
        ``accumulation="optimizer_step"``. The number may differ from step to step, and from `accumulated_gradient`; the
        losses are divided by it. ``optimizer_step`` steps when all micro-batches are run, in the block or after it. If
        the block raises, the gradients of an incomplete step are cleared.

        Args:
            micro_batches: number of micro-batches of a step, the same on every rank.

        Raises:
            StepError: the number is not a positive integer; a step is incomplete at the begin or the end of the block;
                or the block is in another one.

        Example::

            with strategy.accumulate(len(batches)):
                for batch in batches:
                    strategy.backward(model(**batch).loss, model, optimizer)
                strategy.optimizer_step(optimizer, model, scheduler)
        """
        if not isinstance(micro_batches, int) or micro_batches < 1 or self._declared is not None:
            problem = "it is in a block of accumulate" if self._declared is not None else f"it is {micro_batches!r}"
            raise StepError(
                f"cannot accumulate: {problem}, expected the number of micro-batches of a step, at least 1, and one "
                "block at a time."
            )
        self._declared = micro_batches
        is_complete = False
        try:
            yield
            is_complete = not any(own.is_incomplete for own in self._accumulations() if own.declared is not None)
        finally:
            self._declared = None
            if not is_complete:
                for root, state in self._states.items():
                    if state.accumulation.declared is not None:
                        discard_gradients(root)
        if not is_complete:
            raise StepError(
                f"cannot accumulate: a model has not run all {micro_batches} micro-batches at the end of the block, "
                "expected complete steps. Declare the number of micro-batches that the loop runs."
            )

    def _accumulations(self) -> Iterator[Accumulation]:
        return (state.accumulation for state in self._states.values())

    def _declare(self, accumulation: Accumulation) -> None:
        """Tell a model how many micro-batches its next step has, if it runs in a block of `accumulate`."""
        if self._declared is None or accumulation.declared is not None:
            return
        if accumulation.is_pending:
            raise StepError(
                "cannot accumulate: the block begins in the middle of a step, expected it to begin before the step's "
                "first backward pass. Put all micro-batches of the step into the block."
            )
        accumulation.declared = self._declared

    @collective
    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None = None,
        name: str = "model",
    ) -> StepResult:
        """Step the optimizer if this was the last micro-batch; call it after each ``backward``; collective.

        After the last micro-batch, this method clips the gradients to ``max_norm``, steps the optimizer and the
        schedule, and clears the gradients. If the gradient norm is not finite, all ranks skip the steps of optimizer
        and schedule, and clear the gradients.

        Arguments, result and errors are those of `optim.step.optimizer_step`; ``max_norm`` and the number of
        micro-batches are those of the configuration.
        """
        state = self._state_of(model)
        if scheduler is not state.scheduler and isinstance(scheduler, LRScheduler):
            schedule_state(scheduler)  # refuse now what the first save would refuse
        self._begin_profile()
        result = optimizer_step(
            optimizer,
            model,
            scheduler,
            accumulation_steps=self.accumulated_gradient,
            accumulation=self.config.accumulation,
            max_norm=self.config.max_norm,
            name=name,
            sync_buffers=self.config.sync_buffers,
        )
        if result.stepped or result.skipped:
            state.optimizer, state.scheduler = optimizer, scheduler or state.schedule_of(optimizer)
            result = state.meter.finish(result, name)
        if self._profile is not None:
            self._profile.step(result)
        return result

    @collective
    def clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> float:
        """Clip a model's gradients to a global norm, and return the norm before clipping; collective.

        If ``max_norm`` of the configuration is 0, `optimizer_step` uses this norm and computes no other.

        Args:
            model: the model, or its wrapper.
            max_norm: maximum global norm, to which larger gradients are scaled down; by default that of the
                configuration; 0 disables clipping.
        """
        own = self._state_of(model).accumulation
        if own.sums.has_items:
            raise StepError(
                "cannot clip: the gradients are not divided by the number of items yet, expected a step without "
                "num_items. Leave clipping to optimizer_step, which divides and clips."
            )
        max_norm = self.config.max_norm if max_norm is None else max_norm
        return clip_for_step(model, max_norm, sync_buffers=self.config.sync_buffers)

    @collective
    def preempted(self) -> bool:
        """Return whether any rank has received SIGTERM; collective, the same on every rank.

        Call this method between steps. If it returns True, save a checkpoint, and exit with a status other than 0,
        because the run is not complete; for example 143, which shells report for a process that SIGTERM ended. From the
        first call on, SIGTERM no longer ends the process; `close` restores the previous handler. docs/checkpoints.md
        says how much time there is to save.

        Raises:
            StepError: the first call is not in the main thread, or the strategy is closed.
        """
        return self._preemption.requested()

    def global_step(self, model: nn.Module) -> int:
        """Return the number of optimizer steps of a model, including those before a resume; not collective."""
        return self._state_of(model).accumulation.steps

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @collective
    @modules_unchanged()
    def save_ckpt(
        self,
        model: Models,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int | None = 3,
        max_mem: float | None = 1000,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        optimizer: Optimizer | Mapping[str, Optimizer | None] | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler | None] | None = None,
        *,
        dataloader: Loader | None = None,
        tokenizer: Any = None,
        ema: EMA | nn.Module | Mapping[str, EMA | nn.Module | None] | None = None,
        protect: bool = False,
        metric: float | None = None,
        higher_is_better: bool = True,
        async_save: bool = False,
        only_trainable: bool = False,
        meta: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> str:
        """Save a model with its optimizer, schedule and random state, then delete surplus checkpoints; collective.

        Errors are those of `save_checkpoint`; the result is its path as a str. A mapping of models by name is saved as
        one checkpoint, with one commit, so that a load gets all models of the same moment::

            strategy.save_ckpt({"actor": actor, "critic": critic}, "ckpts")

        ``optimizer``, ``scheduler``, ``ema`` and ``tokenizer`` are then mappings by the same names. The defaults of a
        model that they do not name are the same as for a single model.

        Args:
            model: a prepared model, or its wrapper; or a mapping of these by name.
            save_dir: directory of the run's checkpoints, on a file system that all ranks share.
            tag: name of this checkpoint; by default ``global_step<step>``, or the layout's name for the step. The step
                of several models is the largest number of optimizer steps of a model.
            max_num: maximum number of unprotected checkpoints, at least 1; None for no limit.
            optimizer: by default the one that ``create_optimizer`` made, or that was stepped last, for this model.
            scheduler: by default the one that was created for that optimizer or stepped with it.
            ema: the averages to save, or the ``model_ema`` that was passed to `moving_average`; by default the averages
                that were last used with this model.
            max_mem, client_state, save_latest, dataloader, tokenizer, protect, metric, higher_is_better, async_save,
                only_trainable, meta, layout: as for `save_checkpoint`.
        """
        if not isinstance(client_state, Mapping | None):
            raise CheckpointError(
                f"cannot save: client_state is a {type(client_state).__name__}, expected a dictionary. Store the value "
                "under a name: client_state={'name': value}."
            )
        models = models_by_name("save", model)
        optimizers, schedulers = (
            for_each("save", what, models, given)
            for what, given in (("optimizer", optimizer), ("scheduler", scheduler))
        )
        averages = for_each("save", "ema", models, ema)
        states = {name: self._state_of(own) for name, own in models.items()}
        self._check_loader(dataloader)
        for name, state in states.items():
            self._check_saved(models[name], state, has_scheduler=schedulers[name] is not None)
            optimizers[name] = optimizers[name] or state.optimizer
            schedulers[name] = schedulers[name] or state.schedule_of(optimizers[name])
            if averages[name] is not None:
                averages[name] = self._ema(models[name], averages[name])
            averages[name] = averages[name] or state.ema
        if isinstance(layout, Layout):
            layout = layout.of_run(
                batch_size=self.config.micro_train_batch_size, gradient_accumulation_steps=self.accumulated_gradient
            )
        scales = {name: state.accumulation.scale for name, state in states.items()}
        with spent_time.saves:
            path = save_checkpoint(
                model,
                save_dir,
                tag,
                step=joined({name: state.accumulation.steps for name, state in states.items()}),
                optimizer=joined(optimizers),
                scheduler=joined(schedulers),
                client_state=dict(client_state or {}),
                dataloader=dataloader,
                tokenizer=tokenizer,
                ema=joined({name: own.averages if own else None for name, own in averages.items()}),
                loss_scale=joined({name: asdict(scale) if scale else None for name, scale in scales.items()}),
                seed=self.config.seed,
                max_num=max_num,
                max_mem=max_mem,
                save_latest=save_latest,
                protect=protect,
                metric=metric,
                higher_is_better=higher_is_better,
                async_save=async_save,
                only_trainable=only_trainable,
                meta=meta,
                layout=layout,
                key_file=self.config.checkpoint_key_file,
            )
        return str(path)

    def _check_saved(self, model: nn.Module, state: _TrainingState, *, has_scheduler: bool) -> None:
        """Check a model before it is saved, and log what is not saved of it; collective.

        Raises:
            StepError: see `_check_scheduler_steps`.
            ShardError: see `check_dtypes`.
        """
        if state.accumulation.is_pending:
            pending = max(state.accumulation.micro_batches, 1)
            message = "saving in the middle of a step: the gradients of %s are not saved"
            log(message, counted(pending, "micro-batch", "es"), level=logging.WARNING)
        if not has_scheduler:
            _check_scheduler_steps(state)
        check_dtypes(model)
        if self.config.sync_buffers != "off":
            _warn_of_differing_buffers(model)

    @collective(needs_groups=False)
    def wait_for_checkpoint(self) -> None:
        """Wait until no asynchronous save is in flight; collective, so that all ranks raise its error.

        Raises:
            CheckpointError: on every rank, if the save has failed. The error is raised only once.
        """
        with spent_time.saves:
            wait_for_checkpoint()

    @collective
    def load_ckpt(
        self,
        model: Models,
        load_dir: str | Path,
        optimizer: Optimizer | Mapping[str, Optimizer | None] | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler | None] | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        *,
        tag: str | None = None,
        dataloader: Loader | Later | None = None,
        load_data_position: DataPositionMode = True,
        ema: EMA | nn.Module | Mapping[str, EMA | nn.Module | None] | None = None,
        load_module: bool = True,
        verify: bool = True,
        fallback: bool = False,
        trust: bool = False,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest checkpoint of a directory, or the one named by ``tag``, or a single checkpoint; collective.

        Errors are those of `load_checkpoint`. A checkpoint of several models is loaded into a mapping of models by the
        same names; ``optimizer``, ``scheduler`` and ``ema`` are then mappings by these names, too.

        Args:
            model: a prepared model, or its wrapper; or a mapping of these by name.
            load_dir: directory of a run's checkpoints, or one checkpoint, or LeRobot's link ``last``.
            optimizer: by default the one that ``create_optimizer`` made, or that was stepped last, for this model.
            scheduler: by default the one that was created for that optimizer or stepped with it.
            load_module_strict: raise if tensor names in the checkpoint and in the model differ.
            load_optimizer_states: restore the optimizer's state and the loss scale of float16. It is an error if the
                checkpoint has an optimizer's state, and a model that was prepared for training has no optimizer yet.
            load_lr_scheduler_states: restore the schedule's state, and the learning rates. It is an error if the
                checkpoint has a schedule, and a model that was prepared for training has none yet. If false, the
                learning rates are those of ``create_optimizer`` and of the new schedule from the first step on.
            ema: an `EMA` to restore; or a ``model_ema`` of `moving_average`: its averages are restored, then copied
                into it. None restores none.
            load_module: load the model's parameters and buffers; if false, load all other state only.
            load_module_only: load the model only; the same as ``load_optimizer_states=False,
                load_lr_scheduler_states=False``.
            tag, dataloader, load_data_position, verify, fallback, trust: as for `load_checkpoint`.

        Returns:
            The directory that was loaded, and its client state; (None, {}) if there is no checkpoint.
        """
        for kind, each in (("optimizer", optimizer), ("scheduler", scheduler)):
            if isinstance(each, str):
                raise ArgumentError(f"cannot load: {kind} is {each!r}, expected the {kind} itself. Pass tag={each!r}.")
        models = models_by_name("load", model)
        optimizers, schedulers, emas = (
            for_each("load", what, models, given)
            for what, given in (("optimizer", optimizer), ("scheduler", scheduler), ("ema", ema))
        )
        states = {name: self._state_of(own) for name, own in models.items()}
        averages = {name: self._ema(models[name], own) if own is not None else None for name, own in emas.items()}
        load_optimizer_states &= not load_module_only
        load_lr_scheduler_states &= not load_module_only
        must_restore: list[Literal["optimizer", "scheduler"]] = ["optimizer"] if load_optimizer_states else []
        must_restore += ["scheduler"] if load_lr_scheduler_states else []
        for name, state in states.items():
            optimizers[name] = optimizers[name] or state.optimizer
            schedulers[name] = schedulers[name] or state.schedule_of(optimizers[name])
            check_schedule_of(schedulers[name], optimizers[name], "load", CheckpointError)
        self._check_loader(dataloader)
        loaded = load_checkpoint(
            model,
            load_dir,
            tag=tag,
            optimizer=joined({n: each if load_optimizer_states else None for n, each in optimizers.items()}),
            scheduler=joined({n: each if load_lr_scheduler_states else None for n, each in schedulers.items()}),
            ema=joined({name: own.averages if own else None for name, own in averages.items()}),
            dataloader=dataloader,
            load_data_position=load_data_position,
            load_model=load_module,
            strict=load_module_strict,
            verify=verify,
            fallback=fallback,
            trust=trust,
            must_restore=joined({n: must_restore if is_for_training(own) else () for n, own in models.items()}),
            load_learning_rates=load_lr_scheduler_states,
            key_file=self.config.checkpoint_key_file,
        )
        if loaded is None:
            return None, {}
        for name, state in states.items():
            of_model = loaded.models.get(name, loaded)
            _continue_from(state, of_model, has_loss_scale=load_optimizer_states)
            restored, given = averages[name], emas[name]
            if restored is not None and isinstance(given, nn.Module):
                restored.copy_to(given)
            compare_with_next_directories(models[name], self._states)
            if self._profile is not None:
                self._profile.loaded(of_model.step)
        return str(loaded.path), loaded.client_state

    @collective
    def save_model(
        self, model: nn.Module, tokenizer: Any = None, output_dir: str | Path | None = None, **kwargs: Any
    ) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` can load; collective; see `hf.export.save_model`."""
        with spent_time.saves:
            save_model(model, tokenizer, output_dir, **kwargs)

    def _check_loader(self, loader: object) -> None:
        """Log a warning, once for each loader, if its batches or its data set do not fit to the ranks; collective."""
        if not isinstance(loader, ResumableLoader) or loader in self._checked_loaders:
            return
        self._checked_loaders.add(loader)
        of_pass, of_step = self.config.micro_train_batch_size * self.dp_size, self.config.train_batch_size
        if of_step is not None and loader.global_batch_size not in {of_pass, of_step}:
            log(
                "the loader has batches of %d samples, expected %d (micro_train_batch_size x data parallel ranks) or "
                "%d (train_batch_size): optimizer steps have another number of samples than train_batch_size",
                loader.global_batch_size,
                of_pass,
                of_step,
                level=logging.WARNING,
            )
        if not loader.is_shared_by_all_ranks:
            return
        own = loader.facts_of_data()
        of_ranks = [own] * self.world_size
        dist.all_gather_object(of_ranks, own, group=ranks.group_in_use())
        if len(set(of_ranks)) > 1:
            log(
                "the data set of the ResumableLoader differs between the ranks: each rank gets a part of a part, and "
                "samples are left out. Pass the whole data set on all ranks, or dp_rank=0 and dp_size=1",
                level=logging.WARNING,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise StepError(
                "cannot use the strategy: it is closed, expected an open one. Call close, or leave the with block, "
                "after the last use."
            )

    def _step_output(self) -> Output:
        """Return where the numbers of the steps are written; integrations with a log or a bar of their own differ."""
        return "lines or bar"

    # --- state of each model ---------------------------------------------------------------------------------------

    def _state_of(self, model: nn.Module) -> _TrainingState:
        self._check_open()
        if not isinstance(model, nn.Module):
            raise StepError(
                f"cannot use this model: it is a {type(model).__name__}, expected the nn.Module that prepare_model "
                "returned. Check the order of the arguments."
            )
        root = unwrap_model(model)
        if root not in self._states:
            accumulation = begin_accumulation(root, LossScale() if self.config.fp16 else None)
            meter = StepMeter(self.config, accumulation, self._step_output())
            self._states[root] = _TrainingState(accumulation, meter)
            if is_sharded(root):
                watch_forward(root)
        return self._states[root]


def _continue_from(state: _TrainingState, loaded: LoadedCheckpoint, *, has_loss_scale: bool) -> None:
    """Set a model's counts of steps, and its loss scale, to those of a loaded checkpoint."""
    own = state.accumulation
    own.reset()
    own.steps, own.checked_optimizer, own.stepped_schedule = loaded.step, None, None
    state.loaded_steps = loaded.step
    if state.created_scheduler is not None:
        created = state.created_scheduler[0]
        state.created_scheduler = (created, created.last_epoch, loaded.step)
    state.averaged_steps.clear()
    if own.scale is not None and loaded.loss_scale and has_loss_scale:
        own.scale = LossScale.of(loaded.loss_scale)


def _check_scheduler_steps(state: _TrainingState) -> None:
    """Raise if the schedule that `create_scheduler` made was never stepped while the optimizer was.

    Raises:
        StepError: it was not stepped.
    """
    if state.created_scheduler is None:
        return
    scheduler, last_epoch, steps = state.created_scheduler
    taken = state.accumulation.steps - steps
    if state.scheduler is scheduler and taken and scheduler.last_epoch == last_epoch:
        raise StepError(
            f"cannot save the schedule: this {type(scheduler).__name__} was not stepped in "
            f"{counted(taken, 'optimizer step')}, expected a step with each. Pass it to optimizer_step(optimizer, "
            "model, scheduler); if you step it yourself, more rarely, pass scheduler= to save_ckpt."
        )


def _warn_of_differing_buffers(model: nn.Module) -> None:
    """Log a warning if persistent buffers differ between the ranks; collective."""
    root = unwrap_model(model)
    with on_ranks_of(root):
        names = differing_buffers(root)
    if names:
        log(
            "values differ between the ranks in %s: those of rank 0 are saved",
            some(names, "buffer"),
            level=logging.WARNING,
        )


def check_is_model(model: object) -> None:
    """Raise if the argument of `prepare_model` cannot be sharded as a whole.

    Raises:
        ShardError: it is not an nn.Module, or it contains a wrapper of another data-parallel implementation.
    """
    if not isinstance(model, nn.Module):
        shown = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        fix = "Load the model first, with from_pretrained." if isinstance(model, str) else "Pass one model per call."
        raise ShardError(f"cannot prepare a model: it is {shown}, expected an nn.Module. {fix}")
    for name, module in model.named_modules():
        if isinstance(module, _OTHER_WRAPPERS):
            raise ShardError(
                f"cannot prepare {type(model).__name__}: {name or 'the model'} is a {type(module).__name__}, expected "
                "a model without data parallelism. Pass the inner model (.module)."
            )


def _should_shard(model: object) -> bool:
    """Return whether to call `shard_model`, which returns prepared models unchanged.

    False if ``base_model`` is set and is not an nn.Module, or if units inside this model hold all parameters and the
    model is no unit.
    """
    if not isinstance(model, nn.Module) or not isinstance(vars(model).get("base_model", model), nn.Module):
        return False
    return is_sharded(model) or any(True for _ in parameters_outside_units(model))
