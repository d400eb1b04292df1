"""Define `FSDPV2Strategy`, which adds to `TrainingStrategy` the further methods that RLHF trainers call.

Input: a configuration and the trainer's models. Output: the results of the free functions that the methods call.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from fsdp2_strategy.config.arguments import check_keywords, check_number
from fsdp2_strategy.data.sampler import ResumableSampler
from fsdp2_strategy.data.timed_loader import TimedLoader
from fsdp2_strategy.distributed import collectives, memory
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.mesh import set_timeouts
from fsdp2_strategy.distributed.process_group import group_in_use
from fsdp2_strategy.distributed.unit_log import run_noted
from fsdp2_strategy.errors import ConfigError, DataError, OptimizerError
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import offload, reload
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.ema import EMA, check_decay
from fsdp2_strategy.optim.groups import rebind_optimizer
from fsdp2_strategy.optim.masters import FSDPadaptOptimizer, is_mp_optimizer
from fsdp2_strategy.optim.schedule import check_schedule_of
from fsdp2_strategy.training import TrainingStrategy, check_is_model

if TYPE_CHECKING:
    from fsdp2_strategy.rollout import EngineAgreement, Rollout, RolloutEngine, WeightUpdate

__all__ = ["FSDPV2Strategy", "FSDPadaptOptimizer", "ModelOptimPair", "ModelOrModelOptimPair", "is_mp_optimizer"]

ModelOptimPair = tuple[nn.Module, Optimizer]
"""A model with its optimizer, as trainers pass them to `FSDPV2Strategy.prepare`."""
ModelOrModelOptimPair = nn.Module | ModelOptimPair
"""A model for inference, or one with its optimizer."""

T = TypeVar("T")

# Defaults of RLHF trainers, for options that are not set in ``args``.
_DEFAULTS: dict[str, Any] = {
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "adam_betas": (0.9, 0.95),
    "l2": 0.0,
    "lr_warmup_ratio": 0.03,
    "remote_rm_url": None,
    "enable_engine_sleep": False,
    "engine_type": "vllm",
}


@check_keywords
class FSDPV2Strategy(TrainingStrategy):
    """Shard, train, save and resume models with FSDP2; construct one per process, with equal arguments on every rank.

    The constructor seeds every rank with the same seed. If there is no process group, it starts one
    (collective): over the ranks of ``rendezvous``; else over torchrun's ranks if torchrun's environment variables are
    set, else over this rank alone. `close`, which the end of a ``with`` block calls, destroys a group that the
    constructor started.

    There are two groups of methods. What any trainer needs is in `TrainingStrategy`: models, optimizers, steps and
    checkpoints. What this class adds has the names and defaults of RLHF trainers: `prepare` for actor, critic and
    reference models, data loaders of prompts, offloaded models, averages of weights, and the engine that generates.

    Args:
        seed: seed of all random number generators.
        max_norm: global gradient norm to clip to; 0 disables clipping.
        micro_train_batch_size: number of samples in one forward pass on one rank.
        train_batch_size: number of samples in one optimizer step over all ranks.
        bf16: compute in bfloat16.
        max_grad_norm: another name for ``max_norm``.
        gradient_accumulation_steps: number of micro-batches in one optimizer step; an alternative to
            ``train_batch_size``.
        log_level: level of the package's log, such as "WARNING"; by default INFO, unless the program has set one.
        args: a trainer's namespace or mapping, or a StrategyConfig. Its fields configure the strategy; some methods
            read further options.
        config: a StrategyConfig; if given, the fields in ``args`` are not used.
        process_group: the ranks that train; by default all ranks of the default group. Until `close`, "all ranks" means
            the ranks of this group, for all methods and free functions.
        rendezvous: where and as which rank this process joins the process group, if it was not started by torchrun but,
            for example, as an actor of Ray. Environment variables are then not read. Each rank uses the accelerator
            that it sees; if the ranks of a host see the same ones, each uses another one.

    Explicit arguments override ``args`` and ``config``, which override the defaults of StrategyConfig.

    Raises:
        ConfigError: a value is not valid, or ``train_batch_size`` is not a multiple of ``micro_train_batch_size`` x
            number of ranks.
        MeshError: this rank is not in ``process_group``, an open strategy of this process trains on other ranks, or the
            process group cannot be started; see also `Rendezvous`.

    Example:
        >>> from torch import nn
        >>> with FSDPV2Strategy(max_norm=1.0, bf16=False) as strategy:
        ...     model = strategy.prepare_model(nn.Linear(4, 1), is_training=True)
        ...     optimizer = strategy.create_optimizer(model, lr=0.1)
        ...     strategy.backward(model(torch.ones(2, 4)).mean(), model, optimizer)
        ...     result = strategy.optimizer_step(optimizer, model, None)
        >>> result.step, result.stepped
        (1, True)
    """

    _option_defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    # --- settings that trainers read ----------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """The seed of the configuration."""
        return self.config.seed

    @property
    def max_norm(self) -> float:
        """The global gradient norm to clip to; 0 if clipping is disabled."""
        return self.config.max_norm

    @property
    def micro_train_batch_size(self) -> int:
        """Samples of one forward pass on one rank."""
        return self.config.micro_train_batch_size

    @property
    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks, also if the configuration has only the number of steps."""
        return self.micro_train_batch_size * self.dp_size * self.accumulated_gradient

    @property
    def bf16(self) -> bool:
        """Whether to compute in bfloat16; false with ``fp16``."""
        return self.config.bf16 and not self.config.fp16

    @property
    def engine_type(self) -> str:
        """The option ``engine_type`` of ``args``, by default "vllm"; see also `inference_engine_type`."""
        return str(self._option("engine_type", None))

    # --- the ranks ----------------------------------------------------------------------------------------------------

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None) -> None:
        """Set the time-out of collectives if one is given, else do nothing; not collective, but call it on every rank.

        Trainers call this method to start the process group. The constructor has started it already, if there was none.

        Args:
            timeout: time-out of collectives between the ranks that train.
            num_gpu_per_node: ignored, because a launcher starts the ranks; trainers pass it.
        """
        if timeout is not None:
            set_timeouts(timeout)

    @collective
    def all_reduce(self, data: Any, op: collectives.Op = "mean") -> Any:
        """Reduce numbers, tensors and dicts of them over all ranks; collective; see `collectives.all_reduce`.

        Ranks that share layers or sequences have the same batch: in a sum, they count once.
        """
        return collectives.all_reduce(data, op, copies=self.tp_size * self.sp_size)

    @collective
    def all_gather(self, data: Any) -> Any:
        """Gather numbers, tensors and dicts of them from all ranks; collective; see `collectives.all_gather`."""
        return collectives.all_gather(data)

    @collective
    def report_memory(self, prefix: str = "") -> str:
        """Log the device and host memory of all ranks on one line; collective; see `memory.report_memory`."""
        return memory.report_memory(prefix)

    @collective
    def sync_and_clear_cache(self) -> None:
        """Run Python's garbage collector, synchronise ranks and device, free cached device memory; collective."""
        gc.collect()
        run_noted("waits in a barrier", lambda: dist.barrier(group=group_in_use()))
        memory.clear_cache()

    # --- data ---------------------------------------------------------------------------------------------------------

    def setup_dataloader(
        self,
        replay_buffer: Sized,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        sampler: Sampler[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Build a DataLoader for this rank's part of a data set; not collective.

        Args:
            replay_buffer: a data set with a length.
            batch_size: number of samples in a batch on one rank.
            pin_memory: copy batches to pinned memory.
            shuffle: permute the samples by seed and epoch; ``loader.sampler.set_epoch(n)`` begins epoch n.
            collate_fn: a function that makes a batch from a list of samples.
            drop_last: drop the samples that remain after an equal number for each rank, and a rank's last batch if it
                is not full.
            sampler: replaces the default `ResumableSampler`; ``shuffle`` and ``consumed_samples`` are then ignored.
            consumed_samples: number of samples of epoch 0 that all ranks together have drawn already; the loader skips
                these. To resume in epoch n, call ``loader.sampler.set_epoch(n, consumed_samples)``.

        Raises:
            DataError: the data set has no length, or ``batch_size`` is not a positive integer.
            ConfigError: ``consumed_samples`` is more than an epoch has, or not a multiple of the number of ranks.
        """
        if not hasattr(replay_buffer, "__len__"):
            raise DataError(
                f"cannot build a DataLoader: the data set is a {type(replay_buffer).__name__}, expected one with a "
                "length. Pass a list or a map-style data set."
            )
        check_number("build a DataLoader", "batch_size", batch_size, DataError, integer=True, minimum=1)
        check_number("build a DataLoader", "consumed_samples", consumed_samples, ConfigError, integer=True)
        if sampler is None:
            part, parts = self._part_of_data()
            sampler = ResumableSampler(
                replay_buffer,
                num_replicas=parts,
                rank=part,
                shuffle=shuffle,
                seed=self.config.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        dataset: Dataset[Any] = replay_buffer  # type: ignore[assignment]
        return TimedLoader(
            dataset, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn, pin_memory=pin_memory
        )

    def _part_of_data(self) -> tuple[int, int]:
        """Return which part of a data set this rank draws, and the number of parts."""
        return self.dp_rank, self.dp_size

    # --- the roles of a trainer's models ------------------------------------------------------------------------------

    @collective
    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Prepare models for inference, and (model, optimizer, ...) tuples for training; collective.

        If an optimizer was created before its model was sharded, its parameters are replaced by the sharded parameters.

        Args:
            *models_or_pairs: models, or tuples of a model, its optimizer and, optionally, its schedule.
            is_rlhf: ignored; accepted for compatibility.

        Returns:
            The arguments with their models prepared; if there are several, a list of them.

        Raises:
            MeshError, ShardError, CheckpointError: see `prepare_model`.
            OptimizerError: see `rebind_optimizer`; or ``use_mp_opt`` is true and an optimizer keeps no master weights.
        """
        prepared = [self._prepare_model_or_pair(given) for given in models_or_pairs]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_model_or_pair(self, given: Any) -> Any:
        if not isinstance(given, tuple | list):
            return self.prepare_model(given)
        if len(given) not in {2, 3}:
            raise OptimizerError(
                f"cannot prepare a tuple of {len(given)}: expected a model, its optimizer and, optionally, its "
                "schedule. To prepare several models, pass them as separate arguments."
            )
        model, optimizer, *rest = given
        if model is None:
            return given
        check_is_model(model)
        _check_pair(model, optimizer, *rest)
        names = {id(p): name for name, p in named_parameters(unwrap_model(model)).items()}
        model = self.prepare_model(model, is_training=True)
        if optimizer is not None:
            if self.config.use_mp_opt and not is_mp_optimizer(optimizer):
                raise OptimizerError(
                    f"cannot train with this {type(optimizer).__name__}: it keeps no fp32 master weights, expected an "
                    "optimizer that keeps them, because use_mp_opt is true. Create it with create_optimizer, after "
                    "prepare_model."
                )
            rebind_optimizer(optimizer, names, model)
            state = self._state_of(model)
            if rest:
                check_schedule_of(rest[0], optimizer, "prepare", OptimizerError)
            state.optimizer, state.scheduler = optimizer, rest[0] if rest else state.schedule_of(optimizer)
        return type(given)((model, optimizer, *rest))

    @collective
    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: nn.Module | Sequence[nn.Module | None] | None,
        initial_model: nn.Module | None,
        args: object = None,
        max_steps: int = int(1e8),
    ) -> tuple[Any, Any, Any, Any]:
        """Prepare an RLHF trainer's models, and create optimizers and schedules for actor and critic; collective.

        Args:
            actor: the policy; this method sets its attribute ``is_actor`` to True.
            critic: the value model, or None.
            reward_models: a model, a list of models, or None; not prepared if ``args.remote_rm_url`` is set.
            initial_model: the reference model, or None.
            args: a namespace or mapping with the options ``actor_learning_rate``, ``critic_learning_rate``,
                ``adam_betas``, ``l2`` (weight decay), ``lr_warmup_ratio`` and ``remote_rm_url``. Options that it lacks
                are taken from the strategy's ``args``.
            max_steps: number of optimizer steps of the run.

        Returns:
            (actor, optimizer, schedule), (critic, optimizer, schedule), reward models, reference model. Without a
            critic, the second tuple is (None, None, None). The schedules warm up linearly, and then decay along a
            cosine to a tenth of the peak learning rate.

        Raises:
            MeshError, ShardError, CheckpointError: see `prepare_model`.
            OptimizerError: see `create_optimizer` and `create_scheduler`.
        """
        check_is_model(actor)
        actor.is_actor = True  # type: ignore[assignment]
        actor_triple = self._prepare_trained(actor, "actor_learning_rate", args, max_steps)
        critic_triple = self._prepare_trained(critic, "critic_learning_rate", args, max_steps)
        if not self._option("remote_rm_url", args):
            for model in _each(reward_models):
                self.prepare_model(model, shard_size="auto")
        return actor_triple, critic_triple, reward_models, self.prepare_model(initial_model)

    @collective
    def prepare_reward_model(
        self, reward_model: nn.Module, args: object = None, max_steps: int = int(1e8)
    ) -> tuple[nn.Module, Optimizer, LRScheduler]:
        """Prepare a reward model for training, with the actor's options; collective.

        ``args``, ``max_steps`` and the errors are those of `prepare_models_and_optimizers`.

        Returns:
            (reward model, optimizer, schedule).
        """
        prepared: tuple[nn.Module, Optimizer, LRScheduler]
        prepared = self._prepare_trained(reward_model, "actor_learning_rate", args, max_steps)
        return prepared

    def _prepare_trained(self, model: nn.Module | None, lr_name: str, args: object, max_steps: int) -> Any:
        if model is None:
            return None, None, None
        lr = self._option(lr_name, args)
        model = self.prepare_model(model, is_training=True)
        betas = tuple(self._option("adam_betas", args))
        optimizer = self.create_optimizer(model, lr=lr, betas=betas, weight_decay=self._option("l2", args))
        scheduler = self.create_scheduler(
            optimizer,
            "cosine_with_min_lr",
            num_training_steps=max_steps,
            num_warmup_steps=math.ceil(max_steps * self._option("lr_warmup_ratio", args)),
            min_lr=lr * 0.1,
        )
        return model, optimizer, scheduler

    def _option(self, name: str, args: object) -> Any:
        """Return an option from ``args``, else from the strategy's ``args``, else its default; skip values of None."""
        for source in (args, self.args):
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if value is not None:
                return value
        return self._option_defaults[name]

    # --- offloading ---------------------------------------------------------------------------------------------------

    def offload_model(self, models: T, empty_cache: bool = True) -> T:
        """Move models' parameters and gradients to host memory until `reload_model`; not collective; see `offload`.

        Args:
            models: a prepared model, a wrapper, a list of them, or None.
            empty_cache: release the memory that the CUDA allocator caches, so that other processes can use it.

        Returns:
            ``models`` itself.

        Raises:
            OffloadError: a model has gradients that are accumulated but not reduced yet, or the host is out of memory.
        """
        for model in _each(models):
            offload(model)
        if empty_cache:
            memory.clear_cache()
        return models

    def reload_model(self, models: T) -> T:
        """Copy offloaded models back to the device, bitwise equal, and return ``models``; not collective."""
        for model in _each(models):
            reload(model)
        return models

    def maybe_offload_optimizer(self, optimizer: T) -> T:
        """Move an optimizer's state to host memory, unless ``adam_offload`` is false; not collective.

        Returns:
            ``optimizer`` itself.
        """
        if self.config.adam_offload and isinstance(optimizer, Optimizer):
            offload(optimizer)
            memory.clear_cache()
        return optimizer

    def maybe_load_optimizer(self, optimizer: T, device: object = None) -> T:
        """Copy an optimizer's offloaded state back to the device, and return ``optimizer``; not collective.

        Args:
            optimizer: an optimizer; any other value is returned unchanged.
            device: ignored; accepted for compatibility.
        """
        if isinstance(optimizer, Optimizer):
            reload(optimizer)
        return optimizer

    # --- averages -----------------------------------------------------------------------------------------------------

    @collective
    def moving_average(
        self, model: nn.Module, model_ema: nn.Module | EMA, beta: float = 0.992, device: torch.device | str = "cpu"
    ) -> None:
        """Update a moving average of a model's trainable parameters; collective unless all are sharded the same way.

        "All" are the average and both models. The update is average = beta x average + (1 - beta) x model.

        Call this method after every ``optimizer_step``. It updates the average once per step: after a micro-batch
        without a step, it does nothing. If `optimizer_step` is not used for ``model``, every call updates the average.
        The average is kept in fp32, and is saved in checkpoints of ``model``.

        Args:
            model: the model that is trained.
            model_ema: a prepared model that the average is copied into, or an `EMA`.
            beta: weight of the old average.
            device: "cpu" keeps the fp32 average in host memory; any other value keeps it on the device of
                ``model_ema``. Used only when the averages of a ``model_ema`` are created.

        Raises:
            ShardError: ``model`` lacks an averaged parameter, or has it in another shape.
            ConfigError: ``beta`` is not a number from 0 to 1.
        """
        check_decay(beta)
        ema, state = self._ema(model, model_ema, device), self._state_of(model)
        steps, is_stepped_here = state.accumulation.steps, state.accumulation.checked_optimizer is not None
        if is_stepped_here and state.averaged_steps.get(ema, state.loaded_steps) == steps:
            return
        state.averaged_steps[ema] = steps
        ema.update(model, beta)
        if ema is not model_ema:
            ema.copy_to(model_ema)  # type: ignore[arg-type]

    # --- rollout ------------------------------------------------------------------------------------------------------

    @cached_property
    def _rollout(self) -> Rollout:
        config = self.config
        engines = import_module("fsdp2_strategy.rollout.engine")  # loaded by those who use an engine
        rollout: Rollout = engines.Rollout(torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None)
        return rollout

    @property
    def inference_engine(self) -> RolloutEngine:
        """The engine of this rank, which `setup_inference_engine` has built or was given.

        On ranks without an engine, and before that call, it is false (``if strategy.inference_engine:``), and any use
        of it raises a RolloutError that names the ranks that have one.
        """
        return self._rollout.engine_or_absent()

    @property
    def inference_engine_type(self) -> str | None:
        """The ``engine_type`` given to `setup_inference_engine`; its class name if it was an engine."""
        return self._rollout.engine_type if "_rollout" in self.__dict__ else None

    @collective
    def setup_inference_engine(
        self, args: object = None, engine_type: str | RolloutEngine = "vllm", actor: nn.Module | None = None
    ) -> RolloutEngine | None:
        """Build the inference engine, and load an actor's weights into it; collective.

        If the option ``enable_engine_sleep`` is true, the engine is then put to sleep.

        Args:
            args: the trainer's arguments, which are passed to the engine's builder; by default the strategy's ``args``.
            engine_type: "transformers", "vllm", "sglang", "remote", a name that you have added to `rollout.ENGINES`,
                or an engine. "remote" is an engine in another process, at ``args.remote_engine_address`` or on rank
                ``args.remote_engine_rank`` of the default group. Rank 0 connects to it. An error is raised if it does
                not connect, or sends no heartbeat, for ``args.remote_engine_timeout_seconds`` (default 60). Other
                options of it: ``remote_engine_progress_seconds``, ``remote_engine_secret_file`` and
                ``remote_engine_tls_ca_file``; see `RemoteEngine`.
            actor: the model whose weights are loaded; with None, no weights are loaded.

        Returns:
            The engine; None on ranks without an engine.

        Raises:
            RolloutError: on every rank, if ``engine_type`` is unknown, if the engine cannot be built, or if it did not
                receive all weights.
        """
        self._rollout.set_up(self.args if args is None else args, engine_type, actor)
        if actor is not None:
            self.update_engine_weights(actor)
        self.maybe_sleep_inference_engine()
        return self._rollout.engine

    @collective
    def update_engine_weights(
        self, actor: nn.Module, *, verify: bool = False, by_difference: bool | Literal["hashes"] = False
    ) -> WeightUpdate:
        """Load a model's weights into the engine, in the compute dtype; collective.

        A sleeping engine is woken for the update, and put to sleep again after it.

        Args:
            actor: the model, or its wrapper; it may be offloaded.
            verify: compare the checksums of the sent weights with the checksums of the engine's weights. With
                ``by_difference``, this gathers all weights; if checksums differ after a difference, all weights are
                sent, and compared again.
            by_difference: send only what has changed since the version that the engine has; all weights if it has none
                or another one (either side was restarted, or the last update failed). Each rank retains a copy of its
                shards in the dtype in which they are sent; with "hashes", a sixteenth of that, and blocks of 128
                bytes are sent in full.

        Returns:
            What was sent, in bytes.

        Raises:
            RolloutError: on every rank, if no engine was set up, the engine did not receive all weights, it does not
                take differences, or, with ``verify``, the checksums differ or the engine computes none.
        """
        update = self._rollout.update(actor, verify=verify, by_difference=by_difference)
        self._steps_when_sent[unwrap_model(actor)] = self._steps_of(actor)
        return update

    @cached_property
    def _steps_when_sent(self) -> WeakKeyDictionary[nn.Module, int]:
        """For each model whose weights were sent to the engine, its optimizer steps at that time."""
        return WeakKeyDictionary()

    def _steps_of(self, model: nn.Module) -> int:
        """Return the number of a model's optimizer steps; 0 for a model that this strategy does not train."""
        state = self._states.get(unwrap_model(model))
        return 0 if state is None else state.accumulation.steps

    @collective
    def check_engine_agreement(
        self,
        actor: nn.Module,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        answer_mask: torch.Tensor,
        engine_log_probs: torch.Tensor | None = None,
        temperature: float = 1.0,
        tolerance: float | None = None,
        on_disagreement: Literal["warn", "raise"] = "warn",
        **options: Any,
    ) -> EngineAgreement:
        """Compare the log-probabilities of a few sampled tokens by the actor and the engine; collective.

        If they differ by more than rounding explains, the cause is measured and named: stale weights, dtype,
        temperature, router, tokenizer, chat template or prompts.

        Args:
            actor: the model whose weights the engine has, or its wrapper; it must not be offloaded.
            sequences: [batch, length], int64: prompts and answers; every rank passes at least one.
            attention_mask: [batch, length]; padding may be anywhere.
            answer_mask: [batch, n]: which of the last n tokens are compared.
            engine_log_probs: [batch, n], as the engine returned them with the samples (`sampled_log_probs`); by default
                the engine computes them, if it can.
            temperature: temperature of these log-probabilities.
            tolerance: largest mean difference that counts as agreement, in nats; by default 0.001, or 0.05 if the actor
                computes in half precision.
            on_disagreement: "warn" logs a warning on rank 0; "raise" raises RolloutError on every rank.
            **options: ``ratio_band``, ``compare_weights``, ``tokenizers``, ``engine_prompts`` and further inputs of the
                models, as for `rollout.check_engine_agreement`.

        Returns:
            Mean and largest difference, KL, share of tokens outside the band, and causes; equal on every rank.

        Raises:
            RolloutError: on every rank, if there is no engine, an argument is invalid, or, with "raise", trainer and
                engine disagree.
        """
        steps = self._steps_of(actor)
        return self._rollout.check_agreement(
            actor,
            sequences,
            attention_mask,
            answer_mask=answer_mask,
            engine_log_probs=engine_log_probs,
            temperature=temperature,
            tolerance=tolerance,
            on_disagreement=on_disagreement,
            steps_since_update=max(0, steps - self._steps_when_sent.get(unwrap_model(actor), steps)),
            **options,
        )

    def maybe_sleep_inference_engine(self) -> None:
        """Put the engine to sleep if ``enable_engine_sleep`` is true, which frees its device memory; not collective."""
        if "_rollout" in self.__dict__ and self._option("enable_engine_sleep", self._rollout.args):
            self._rollout.sleep()

    def wakeup_inference_engine(self) -> None:
        """Wake the engine if it sleeps; not collective."""
        if "_rollout" in self.__dict__:
            self._rollout.wake_up()

    def close(self) -> None:
        """Close the engine if it was built by name, then call `TrainingStrategy.close`; collective, idempotent."""
        try:
            if (rollout := self.__dict__.pop("_rollout", None)) is not None:
                rollout.close()
        finally:
            super().close()


def _check_pair(model: nn.Module, optimizer: object, schedule: object = None) -> None:
    """Raise OptimizerError unless a model comes with an optimizer and a schedule, or None in their places."""
    for what, value, attribute in (("optimizer", optimizer, "param_groups"), ("schedule", schedule, "step")):
        if value is not None and (not hasattr(value, attribute) or isinstance(value, nn.Module)):
            shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
            raise OptimizerError(
                f"cannot prepare this {type(model).__name__}: its {what} is {shown}, expected a torch {what}. Pass "
                "(model, optimizer) or (model, optimizer, schedule); pass several models as separate arguments."
            )


def _each(models: Any) -> Iterator[nn.Module]:
    """Yield the modules in an argument that may be a module, a list of modules, or None."""
    for model in models if isinstance(models, list | tuple) else [models]:
        if isinstance(model, nn.Module):
            yield model
