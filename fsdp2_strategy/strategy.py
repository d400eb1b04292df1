"""The facade that a trainer holds: the trainer's vocabulary over the free functions.

Input: a configuration and the trainer's models. Output: what the free functions return. What the facade adds is memory
of what belongs together: for each model its optimizer, its schedule and how far its accumulation is.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from fsdp2_strategy import collect, memory, ranks, residency
from fsdp2_strategy.checkpoint import Loader, end_saving, load_checkpoint, save_checkpoint
from fsdp2_strategy.config import StrategyConfig
from fsdp2_strategy.data.sampler import ResumableSampler
from fsdp2_strategy.ema import EMA
from fsdp2_strategy.errors import ConfigError, OptimizerError, StepError
from fsdp2_strategy.hf.export import save_model
from fsdp2_strategy.hf.folder import init_on_meta
from fsdp2_strategy.hf.load import load_remembered
from fsdp2_strategy.masters import FSDPadaptOptimizer, is_mp_optimizer
from fsdp2_strategy.mesh import ShardSize, auto_shard_size, build_mesh, forget_meshes
from fsdp2_strategy.names import named_parameters
from fsdp2_strategy.offload import forget_slabs, offload, reload
from fsdp2_strategy.optimizer import build_optimizer, rebind_optimizer
from fsdp2_strategy.rollout import Rollout, RolloutEngine
from fsdp2_strategy.schedule import build_scheduler
from fsdp2_strategy.shard import shard_model
from fsdp2_strategy.step import (
    LossScale,
    StepResult,
    check_belongs,
    clip_grad_norm,
    loss_scale,
    set_gradient_sync,
    take_step,
)

ModelOptimPair = tuple[nn.Module, Optimizer]
ModelOrModelOptimPair = nn.Module | ModelOptimPair

T = TypeVar("T")
__all__ = ["FSDPV2Strategy", "FSDPadaptOptimizer", "ModelOptimPair", "ModelOrModelOptimPair", "is_mp_optimizer"]

ModelT = TypeVar("ModelT", bound=nn.Module | None)

# What RLHF trainers set where their arguments say nothing.
_RLHF_DEFAULTS: dict[str, Any] = {
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "adam_betas": (0.9, 0.95),
    "l2": 0.0,
    "lr_warmup_ratio": 0.03,
    "remote_rm_url": None,
    "enable_engine_sleep": False,
}


class _Unset:
    """Stands for an argument that was not given, so that the configuration's value holds."""

    def __repr__(self) -> str:
        return "<from the configuration>"


_UNSET: Any = _Unset()


@dataclass
class _Run:
    """What belongs to one model."""

    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    checked: Optimizer | None = None
    """The optimizer that is known to step this model's parameters."""
    micro_batches: int = 0
    """Backward passes since the last optimizer step."""
    steps: int = 0
    """Optimizer steps taken."""
    scale: LossScale | None = None
    """What losses are multiplied with, in float16."""
    ema: EMA | None = None
    """Averages of its parameters that `moving_average` keeps."""
    synced_as: bool | None = None
    """Whether the units were last told that a backward pass is the last of its step."""


class FSDPV2Strategy:
    """Shard, train, save and resume models with FSDP2; one object a process, the same on every rank.

    Constructing it is collective: it starts the process group where there is none (under torchrun from its variables,
    else one rank), and seeds every rank alike. ``close`` or the end of a ``with`` block ends what it started.

    Args:
        seed: seed of all generators.
        max_norm: global gradient norm to clip to; 0 clips nothing.
        micro_train_batch_size: samples of one forward pass of one rank.
        train_batch_size: samples of one optimizer step over all ranks.
        bf16: compute in bfloat16.
        args: a trainer's namespace or mapping, whose names of ours count, or a StrategyConfig.
        config: a StrategyConfig, instead of ``args``.

    Arguments that are given beat ``args`` and ``config``; what nobody gives has StrategyConfig's default.

    Raises:
        ConfigError: a value is not valid, or ``train_batch_size`` is no multiple of micro batch size x ranks.

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
    ) -> None:
        given = {
            "seed": seed,
            "max_norm": max_norm,
            "micro_train_batch_size": micro_train_batch_size,
            "train_batch_size": train_batch_size,
            "bf16": bf16,
        }
        base = _base_config(args, config)
        self.config = base.replace(**{name: value for name, value in given.items() if value is not _UNSET})
        self.args = args
        self._owns_process_group = ranks.start_process_group(self.config.timeout_minutes)
        self.world_size = dist.get_world_size()
        self.accumulated_gradient = self._accumulation()
        self._runs: WeakKeyDictionary[nn.Module, _Run] = WeakKeyDictionary()
        self._rollout = Rollout(torch.bfloat16 if self.config.bf16 else torch.float16 if self.config.fp16 else None)
        self.set_seed(self.config.seed)
        ranks.show_log()
        ranks.log("strategy on %d ranks\n%s", self.world_size, self.config)

    # --- the process ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return ranks.current_device()

    def get_rank(self) -> int:
        """Return the number of this rank."""
        return dist.get_rank()

    def is_rank_0(self) -> bool:
        """Say whether this is rank 0."""
        return ranks.is_rank_0()

    def print(self, *message: object) -> None:
        """Log a message once for all ranks."""
        ranks.log("%s", " ".join(map(str, message)))

    def set_seed(self, seed: int, *, per_rank: bool = False) -> None:
        """Seed all generators; not collective.

        Build models under one seed for all ranks; ``per_rank`` then lets dropout and noise differ between the ranks.
        """
        ranks.seed_everything(seed + dist.get_rank() if per_rank else seed)

    def close(self) -> None:
        """End the process group if this strategy started it; collective, and harmless when called again.

        Directories that this process saved into are free for other runs from then on.
        """
        self._runs.clear()
        self._rollout = Rollout(None)
        end_saving()
        forget_slabs()
        if self._owns_process_group and dist.is_initialized():
            forget_meshes()
            dist.destroy_process_group()
        self._owns_process_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def setup_distributed(self, timeout: timedelta | None = None, **kwargs: Any) -> None:
        """Have nothing left to start: constructing the strategy did; collective where it sets a time-out.

        Args:
            timeout: after which the default group's collectives are given up.
            **kwargs: accepted for trainers that pass more.
        """
        if timeout is not None:
            dist.distributed_c10d._set_pg_timeout(timeout)

    def all_reduce(self, data: Any, op: collect.Op = "mean") -> Any:
        """Reduce numbers, tensors and dicts of them over all ranks; collective; see `collect.all_reduce`."""
        return collect.all_reduce(data, op)

    def all_gather(self, data: Any) -> Any:
        """Gather numbers, tensors and dicts of them from all ranks; collective; see `collect.all_gather`."""
        return collect.all_gather(data)

    def report_memory(self, prefix: str = "") -> str:
        """Log the memory of all ranks on one line, device and host; collective; see `memory.report_memory`."""
        return memory.report_memory(prefix)

    def sync_and_clear_cache(self) -> None:
        """Wait for all ranks and their devices, and give unused device memory back; collective."""
        gc.collect()
        dist.barrier()
        memory.clear_cache()

    # --- data ----------------------------------------------------------------------------------------------------

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
        """Build a loader of this rank's part of a data set; not collective.

        Args:
            replay_buffer: a data set with a length.
            batch_size: samples of one batch of one rank.
            pin_memory: copy batches to pinned memory.
            shuffle: permute the samples by seed and epoch; ``loader.sampler.set_epoch(n)`` begins another epoch.
            collate_fn: makes a batch of samples.
            drop_last: leave out what does not give every rank a sample, and the last batch if it is not full.
            sampler: draws the samples instead.
            consumed_samples: samples of this epoch that all ranks together have drawn already; it goes on there.

        Raises:
            ConfigError: ``consumed_samples`` is more than an epoch, or no multiple of the ranks.
        """
        if sampler is None:
            sampler = ResumableSampler(
                replay_buffer,
                num_replicas=self.world_size,
                rank=dist.get_rank(),
                shuffle=shuffle,
                seed=self.config.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        dataset: Dataset[Any] = replay_buffer  # type: ignore[assignment]
        return DataLoader(
            dataset, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn, pin_memory=pin_memory
        )

    # --- models --------------------------------------------------------------------------------------------------

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Build models inside; with ``meta_init`` without memory, as `init_on_meta` does; not collective."""
        with init_on_meta() if meta_init else nullcontext():
            yield

    def prepare_model(
        self,
        model: ModelT,
        is_training: bool = False,
        shard_size: ShardSize = -1,
        reshard_after_forward: bool | int = True,
    ) -> ModelT:
        """Shard a model in place, as the configuration says; collective. Prepared models and None pass through.

        Args:
            model: any module, or a wrapper around one; every rank must hold the same weights.
            is_training: keep fp32 masters and reduce in fp32; else hold the compute dtype alone.
            shard_size: ranks that a parameter is split over, a divisor of the world size; -1 for all; "auto" for all
                in training, else the fewest that a model of its size needs.
            reshard_after_forward: free gathered parameters after a block's forward; or the number of ranks to keep them
                split over until backward.

        Returns:
            ``model`` itself.

        Raises:
            MeshError, ShardError: on every rank; see `build_mesh` and `shard_model`.
        """
        if model is None or not _is_ours_to_shard(model):
            return model
        if shard_size == "auto":
            count = sum(p.numel() for p in model.parameters())
            shard_size = auto_shard_size(count, is_training=is_training, world_size=self.world_size)
        config = self.config
        shard_model(
            model,
            build_mesh(shard_size),
            is_training=is_training,
            bf16=config.bf16,
            fp16=config.fp16,
            keep_fp32=config.keep_fp32,
            masters_in_optimizer=config.use_mp_opt,
            class_names=config.block_class_names,
            min_unit_params=config.min_unit_params,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=config.cpu_offload,
            prefetch_depth=config.prefetch_depth,
            activation_checkpointing=config.activation_checkpointing,
            compile_blocks=config.compile_blocks,
            forward_methods=config.forward_methods,
        )
        if residency.is_unreal(model):
            load_remembered(model)
        return model

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the inner model of an actor wrapper, else the model itself."""
        return residency.unwrap_model(model)

    def create_optimizer(
        self,
        model: nn.Module,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        **kwargs: Any,
    ) -> Optimizer:
        """Build the optimizer of a prepared model, and remember it as this model's; not collective.

        Args:
            model: the model, or its wrapper.
            lr: learning rate; like the next three by default that of the optimizer class.
            betas: Adam's decay rates.
            eps: Adam's denominator term.
            weight_decay: decay of all parameters but biases and norms.
            **kwargs: no_decay, optimizer_cls, param_groups, masters (by default what ``use_mp_opt`` says) and options
                of the class, as in `build_optimizer`.

        Raises:
            OptimizerError: see `build_optimizer`.
        """
        kwargs = {"masters": self.config.use_mp_opt, **kwargs}
        optimizer = build_optimizer(model, lr, betas, eps, weight_decay, **kwargs)
        self._run(model).optimizer = optimizer
        return optimizer

    def create_scheduler(self, optimizer: Optimizer, name: str, **kwargs: Any) -> LRScheduler:
        """Build a schedule, and remember it beside its optimizer; not collective; see `build_scheduler`."""
        scheduler = build_scheduler(optimizer, name, **kwargs)
        for run in self._runs.values():
            if run.optimizer is optimizer:
                run.scheduler = scheduler
        return scheduler

    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Prepare models for inference, and (model, optimizer, ...) tuples for training; collective.

        An optimizer that was made before its model was sharded steps the sharded parameters from then on.

        Args:
            *models_or_pairs: models, or tuples of a model, its optimizer and, if you like, its schedule.
            is_rlhf: accepted for its place in the trainer's call.

        Returns:
            What was given: one of them, or a list of all.

        Raises:
            MeshError, ShardError, OptimizerError: see `prepare_model` and `rebind_optimizer`.
        """
        prepared = [self._prepare_one(given) for given in models_or_pairs]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, given: Any) -> Any:
        if not isinstance(given, tuple | list):
            return self.prepare_model(given)
        model, optimizer, *rest = given
        if model is None:
            return given
        names = {id(p): name for name, p in named_parameters(residency.unwrap_model(model)).items()}
        model = self.prepare_model(model, is_training=True)
        if optimizer is not None:
            if self.config.use_mp_opt and not is_mp_optimizer(optimizer):
                raise OptimizerError(
                    f"cannot keep this {type(optimizer).__name__}: with use_mp_opt the model is bf16 alone, expected "
                    "an optimizer that keeps fp32 masters. Create it with create_optimizer, after prepare_model."
                )
            rebind_optimizer(optimizer, names, model)
            run = self._run(model)
            run.optimizer, run.scheduler = optimizer, rest[0] if rest else run.scheduler
        return type(given)((model, optimizer, *rest))

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: nn.Module | Sequence[nn.Module | None] | None,
        initial_model: nn.Module | None,
        args: object = None,
        max_steps: int = int(1e8),
    ) -> tuple[Any, Any, Any, Any]:
        """Prepare an RLHF trainer's models, with optimizers and schedules of actor and critic; collective.

        Args:
            actor: the policy; it is marked as an actor.
            critic: the value model, or None.
            reward_models: one, several or None; left alone where ``args.remote_rm_url`` says that they run elsewhere.
            initial_model: the reference, or None.
            args: ``actor_learning_rate``, ``critic_learning_rate``, ``adam_betas``, ``l2`` (weight decay) and
                ``lr_warmup_ratio``; by default the strategy's.
            max_steps: optimizer steps of the run.

        Returns:
            (actor, optimizer, schedule), (critic, optimizer, schedule), reward models, reference; Nones for a critic
            that is None. Schedules are cosines to a tenth of the peak.

        Raises:
            MeshError, ShardError, OptimizerError: see `prepare_model`, `create_optimizer` and `create_scheduler`.
        """
        actor.is_actor = True  # type: ignore[assignment]
        of_actor = self._prepare_trained(actor, "actor_learning_rate", args, max_steps)
        of_critic = self._prepare_trained(critic, "critic_learning_rate", args, max_steps)
        if not self._option("remote_rm_url", args):
            for model in _each(reward_models):
                self.prepare_model(model, shard_size="auto")
        return of_actor, of_critic, reward_models, self.prepare_model(initial_model)

    def prepare_reward_model(
        self, reward_model: nn.Module, args: object = None, max_steps: int = int(1e8)
    ) -> tuple[nn.Module, Optimizer, LRScheduler]:
        """Prepare a reward model to be trained, as `prepare_models_and_optimizers` prepares the actor; collective."""
        prepared: tuple[nn.Module, Optimizer, LRScheduler]
        prepared = self._prepare_trained(reward_model, "actor_learning_rate", args, max_steps)
        return prepared

    def _prepare_trained(self, model: nn.Module | None, rate: str, args: object, max_steps: int) -> Any:
        if model is None:
            return None, None, None
        lr = self._option(rate, args)
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
        """Return what the trainer's arguments say, else what trainers do."""
        for source in (args, self.args):
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if value is not None:
                return value
        return _RLHF_DEFAULTS[name]

    # --- memory that moves ---------------------------------------------------------------------------------------

    def offload_model(self, models: T, empty_cache: bool = True) -> T:
        """Move models' parameters to host memory until `reload_model`; not collective; see `offload`.

        Args:
            models: a prepared model, a wrapper, a list of them, or None.
            empty_cache: give the device's memory to other programs, not only to other tensors of this one.

        Returns:
            What was given.

        Raises:
            OffloadError: a model is between two micro-batches.
        """
        for model in _each(models):
            offload(model)
        if empty_cache:
            memory.clear_cache()
        return models

    def reload_model(self, models: T) -> T:
        """Bring models back to the device, bit for bit; not collective. Returns what was given."""
        for model in _each(models):
            reload(model)
        return models

    def maybe_offload_optimizer(self, optimizer: T) -> T:
        """Move an optimizer's state to host memory, unless ``adam_offload`` is false; not collective.

        Returns what was given.
        """
        if self.config.adam_offload and isinstance(optimizer, Optimizer):
            offload(optimizer)
            memory.clear_cache()
        return optimizer

    def maybe_load_optimizer(self, optimizer: T, device: object = None) -> T:
        """Bring an optimizer's state back to where it was; not collective. Returns what was given.

        Args:
            optimizer: the optimizer.
            device: accepted for its place in the trainer's call.
        """
        if isinstance(optimizer, Optimizer):
            reload(optimizer)
        return optimizer

    def moving_average(
        self, model: nn.Module, model_ema: nn.Module | EMA, beta: float = 0.992, device: torch.device | str = "cpu"
    ) -> None:
        """Take a model's trainable parameters into a second model: beta x second + (1 - beta) x model.

        The average is kept in fp32 beside the second model, whatever its dtype, and saved with the first one's
        checkpoints. Without communication where both are sharded alike, else collective.

        Args:
            model: the model that trains.
            model_ema: a prepared model that holds the average, or an `EMA`.
            beta: weight of the old average.
            device: "cpu" keeps the fp32 average of a second model in host memory; anything else beside its parameters.

        Raises:
            ShardError: the two do not have the same parameters.
        """
        ema = self._ema(model, model_ema, device)
        ema.update(model, beta)
        if ema is not model_ema:
            ema.copy_to(model_ema)  # type: ignore[arg-type]

    def _ema(self, model: nn.Module, model_ema: nn.Module | EMA, device: torch.device | str = "cpu") -> EMA:
        """Return the averages behind a second model, and remember them beside the first."""
        run = self._run(model)
        if isinstance(model_ema, EMA):
            run.ema = model_ema
            return model_ema
        kept = self._run(model_ema)
        if kept.ema is None:
            trained = [name for name, p in named_parameters(self.unwrap_model(model)).items() if p.requires_grad]
            kept.ema = EMA(model_ema, names=trained, device="cpu" if torch.device(device).type == "cpu" else None)
        run.ema = kept.ema
        return kept.ema

    # --- rollout -------------------------------------------------------------------------------------------------

    @property
    def inference_engine(self) -> RolloutEngine | None:
        """The engine that `setup_inference_engine` made; None before, and on a rank that has none."""
        return self._rollout.engine

    @property
    def inference_engine_type(self) -> str | None:
        """The name under which it was asked for."""
        return self._rollout.engine_type

    def setup_inference_engine(
        self, args: object = None, engine_type: str | RolloutEngine = "vllm", actor: nn.Module | None = None
    ) -> RolloutEngine | None:
        """Build the engine that generates sequences, bring an actor's weights into it, and let it sleep; collective.

        Args:
            args: the trainer's, which what builds the engine may read; ``enable_engine_sleep`` lets it sleep.
            engine_type: "transformers", a name that was added to `rollout.ENGINES`, or an engine.
            actor: whose weights it gets.

        Returns:
            The engine; None on a rank that has none.

        Raises:
            RolloutError: on every rank: nothing is known under that name, or it cannot be built.
        """
        self._rollout.set_up(args, engine_type, actor)
        if actor is not None:
            self.update_engine_weights(actor)
        if self._option("enable_engine_sleep", args):
            self._rollout.sleep()
        return self.inference_engine

    def update_engine_weights(self, actor: nn.Module, *, verify: bool = False) -> None:
        """Bring a model's weights, in the compute dtype, into the engine; collective. One that sleeps sleeps again.

        Args:
            actor: the model, or its wrapper; it may be away in host memory.
            verify: compare the checksums of what was sent with those of what the engine holds.

        Raises:
            RolloutError: on every rank: there is no engine, or it did not get all of them.
        """
        self._rollout.update(actor, verify=verify)

    def maybe_sleep_inference_engine(self) -> None:
        """Let the engine give its memory away, where ``enable_engine_sleep`` says so; not collective."""
        if self._option("enable_engine_sleep", None):
            self._rollout.sleep()

    def wakeup_inference_engine(self) -> None:
        """Wake the engine if it sleeps; not collective."""
        self._rollout.wake_up()

    # --- steps ---------------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        num_items_in_batch: float | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the gradient of one micro-batch; collective.

        The loss is divided by ``accumulated_gradient`` here: a caller that divides already must not.

        Args:
            loss: this rank's mean over its micro-batch; or, with ``num_items_in_batch``, the sum over its items.
            model: the model, or its wrapper, that made the loss.
            optimizer: accepted for its place in the trainer's call.
            num_items_in_batch: items (tokens, say) of all micro-batches of all ranks in this step; the gradient is that
                of (sum of all losses) / num_items_in_batch.
            **kwargs: accepted for trainers that pass more.

        Raises:
            StepError: ``num_items_in_batch`` is not positive.
        """
        run = self._run(model)
        scale = loss_scale(accumulation_steps=self.accumulated_gradient, num_items_in_batch=num_items_in_batch)
        scale *= run.scale.value if run.scale else 1.0
        is_last = (run.micro_batches + 1) % self.accumulated_gradient == 0
        if is_last != (run.synced_as is not False):
            set_gradient_sync(model, self.config.grad_sync, is_last=is_last)
            run.synced_as = is_last
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        run.micro_batches += 1

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None = None,
        name: str = "model",
        **kwargs: Any,
    ) -> StepResult:
        """Step once the micro-batches of a step are through; call it after each ``backward``; collective.

        At the boundary gradients are clipped to ``max_norm``, optimizer and schedule step, gradients are cleared. A
        norm that is not finite skips optimizer and schedule on every rank.

        Args:
            optimizer: the model's optimizer.
            model: the model, or its wrapper.
            scheduler: stepped with the optimizer; None is fine.
            name: labels the log, nothing else.
            **kwargs: accepted for trainers that pass more.

        Returns:
            What happened; between boundaries nothing did.

        Raises:
            StepError: there was no ``backward``, or the optimizer is not this model's.
        """
        run = self._run(model)
        if run.checked is not optimizer:
            check_belongs(optimizer, model)
            run.checked = optimizer
        if not run.micro_batches:
            raise StepError(
                f"cannot step {name!r}: no backward pass since its last step, expected strategy.backward(loss, model, "
                "optimizer). Call it instead of loss.backward()."
            )
        if run.micro_batches % self.accumulated_gradient:
            return StepResult(step=run.steps, stepped=False, skipped=False, grad_norm=None)
        run.optimizer, run.scheduler = optimizer, scheduler or run.scheduler
        stepped, norm = take_step(optimizer, model, scheduler, self.config.max_norm, run.scale)
        run.micro_batches = 0
        run.steps += stepped
        if not stepped:
            message = "%s: step %d is skipped on all ranks: the gradient norm is %s"
            ranks.log(message, name, run.steps + 1, norm, level=logging.WARNING)
        return StepResult(step=run.steps, stepped=stepped, skipped=not stepped, grad_norm=norm)

    def clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> float:
        """Clip a model's gradients to one global norm, by default the configured one; collective."""
        scale = run.scale.value if (run := self._run(model)).scale else 1.0
        return clip_grad_norm(model, (self.config.max_norm if max_norm is None else max_norm) * scale) / scale

    def global_step(self, model: nn.Module) -> int:
        """Return how many optimizer steps a model has taken, those before a resume included."""
        return self._run(model).steps

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int | None = 3,
        max_mem: float | None = 1000,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        dataloader: Loader | None = None,
        tokenizer: Any = None,
        ema: EMA | nn.Module | None = None,
        protect: bool = False,
        metric: float | None = None,
        higher_is_better: bool = True,
    ) -> str:
        """Save a model with its optimizer, schedule and random state, then rotate; collective.

        Args:
            model: a prepared model, or its wrapper.
            save_dir: directory of the run's checkpoints, seen by every rank.
            tag: name of this checkpoint, by default ``global_step<step>``.
            max_num: checkpoints to keep, at least 1; None for no limit.
            max_mem: GB (10^9 bytes) that all checkpoints may take; None for no limit.
            client_state: anything that JSON holds.
            save_latest: let the file ``latest`` name this checkpoint.
            optimizer: by default the one that ``create_optimizer`` made for this model.
            scheduler: by default the one last used with it.
            dataloader: a ResumableLoader, or another loader with ``state_dict``; see `save_checkpoint`.
            tokenizer: tokenizer or processor to save into ``model/``, by default that of the model's own folder.
            ema: averages, or the second model of `moving_average`; by default those last used with this model.
            protect: never let rotation remove it.
            metric: how good it is; rotation never removes the best.
            higher_is_better: what is good of ``metric``.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on every rank; see `save_checkpoint`.
        """
        run = self._run(model)
        if pending := run.micro_batches % self.accumulated_gradient:
            message = "saving between steps: the gradients of %d micro-batches are not part of a checkpoint"
            ranks.log(message, pending, level=logging.WARNING)
        averages = self._ema(model, ema) if ema is not None else run.ema
        path = save_checkpoint(
            model,
            save_dir,
            tag,
            step=run.steps,
            optimizer=optimizer or run.optimizer,
            scheduler=scheduler or run.scheduler,
            client_state=dict(client_state or {}),
            dataloader=dataloader,
            tokenizer=tokenizer,
            ema=averages.averages if averages else None,
            loss_scale=asdict(run.scale) if run.scale else None,
            seed=self.config.seed,
            max_num=max_num,
            max_mem=max_mem,
            save_latest=save_latest,
            protect=protect,
            metric=metric,
            higher_is_better=higher_is_better,
        )
        return str(path)

    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str | Path,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        *,
        tag: str | None = None,
        dataloader: Loader | None = None,
        ema: EMA | nn.Module | None = None,
        load_module: bool = True,
        verify: bool = True,
        fallback: bool = False,
        trust: bool = False,
        **kwargs: Any,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest checkpoint of a directory, one by tag, or one directory; collective.

        Args:
            model: a prepared model, or its wrapper.
            load_dir: directory of a run's checkpoints, or one checkpoint.
            optimizer: by default the one that ``create_optimizer`` made for this model, if any.
            scheduler: by default the one made for it.
            load_module_strict: names in checkpoint and model must agree in both directions.
            load_optimizer_states: load them, where there is an optimizer.
            load_lr_scheduler_states: load them, where there is a schedule.
            tag: the checkpoint to load instead of the newest.
            dataloader: goes on where it was; it must not have begun.
            ema: averages that get their values back, or the second model of `moving_average`.
            load_module: load the model; without it, the optimizer's state alone.
            verify: compare what is read with its checksums.
            fallback: where the newest is damaged, load the newest that is not, and say so.
            trust: load what other systems wrote, whose pickles run code.
            **kwargs: accepted for trainers that pass more.

        Returns:
            The directory that was loaded, and its client state; (None, {}) where there is no checkpoint.

        Raises:
            CheckpointError: on every rank; see `load_checkpoint`.
        """
        run = self._run(model)
        averages = self._ema(model, ema) if ema is not None else None
        loaded = load_checkpoint(
            model,
            load_dir,
            tag=tag,
            optimizer=(optimizer or run.optimizer) if load_optimizer_states else None,
            scheduler=(scheduler or run.scheduler) if load_lr_scheduler_states else None,
            ema=averages.averages if averages else None,
            dataloader=dataloader,
            load_model=load_module,
            strict=load_module_strict,
            verify=verify,
            fallback=fallback,
            trust=trust,
        )
        if loaded is None:
            return None, {}
        run.micro_batches, run.steps, run.checked = 0, loaded.step, None
        if run.scale is not None and loaded.loss_scale:
            run.scale = LossScale(**loaded.loss_scale)
        if averages is not None and isinstance(ema, nn.Module):
            averages.copy_to(ema)
        return str(loaded.path), loaded.client_state

    def save_model(self, model: nn.Module, tokenizer: Any, output_dir: str | Path, **kwargs: Any) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads; collective; see `save_model`."""
        save_model(model, tokenizer, output_dir, **kwargs)

    # --- memory of what belongs together ---------------------------------------------------------------------------

    def _run(self, model: nn.Module) -> _Run:
        if not isinstance(model, nn.Module):
            raise StepError(
                f"cannot use this model: it is a {type(model).__name__}, expected the nn.Module that prepare_model "
                "returned. Check the order of the arguments."
            )
        fresh = _Run(scale=LossScale() if self.config.fp16 else None)
        return self._runs.setdefault(residency.unwrap_model(model), fresh)

    def _accumulation(self) -> int:
        micro, total = self.config.micro_train_batch_size, self.config.train_batch_size
        at_once = micro * self.world_size
        if total is None:
            return 1
        if total % at_once:
            below = max(total // at_once, 1) * at_once
            raise ConfigError(
                f"cannot accumulate: train_batch_size is {total}, expected a multiple of micro_train_batch_size x "
                f"ranks = {micro} x {self.world_size} = {at_once}. Use {below} or {below + at_once}."
            )
        return total // at_once


def _each(models: Any) -> Iterator[nn.Module]:
    """Return the models of what a trainer passes: one, several or none."""
    for model in models if isinstance(models, list | tuple) else [models]:
        if isinstance(model, nn.Module):
            yield model


def _base_config(args: object, config: StrategyConfig | None) -> StrategyConfig:
    if config is not None and not isinstance(config, StrategyConfig):
        raise ConfigError(
            f"cannot configure: config is a {type(config).__name__}, expected a StrategyConfig. Use "
            "StrategyConfig.from_mapping, from_yaml or from_args."
        )
    if config is not None and isinstance(args, StrategyConfig):
        raise ConfigError(
            "cannot configure: args and config are both a StrategyConfig, expected one. Drop one of them."
        )
    if config is not None:
        return config
    return StrategyConfig() if args is None else StrategyConfig.from_args(args)


def _is_ours_to_shard(model: object) -> bool:
    """Say whether a model is one to shard: no wrapper around an engine, and none whose parameters all are sharded."""
    if not isinstance(model, nn.Module) or not isinstance(vars(model).get("base_model", model), nn.Module):
        return False
    return residency.is_sharded(model) or residency.has_unsharded_parameters(model)
