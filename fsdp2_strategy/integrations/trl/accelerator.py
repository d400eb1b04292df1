"""Give the Trainer an accelerator that shards models and steps optimizers with a strategy.

Input: the models, optimizers and losses that the Trainer passes to accelerate's ``Accelerator``. Output: models that a
strategy has sharded, and its optimizer steps. Data loaders, and gathers of metrics, remain accelerate's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy import sizes
from fsdp2_strategy.config.strategy_config import GradSync
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.hf.library_internals import drop_casts_of_embeddings
from fsdp2_strategy.hf.peft.methods import check_exportable_prompts
from fsdp2_strategy.integrations.trl.sample_order import SampleOrder
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.groups import split_groups
from fsdp2_strategy.optim.masters import FSDPadaptOptimizer
from fsdp2_strategy.optim.step import forbid_direct_steps
from fsdp2_strategy.optim.zero_grad import watch_optimizer
from fsdp2_strategy.strategy import FSDPV2Strategy
from fsdp2_strategy.tracking.step_log import Output


class TrainerStrategy(FSDPV2Strategy):
    """An `FSDPV2Strategy` for a trainer that counts the micro-batches of each step, and creates the optimizer.

    [Note: reduced once] accelerate reduces the gradients of a step in its last micro-batch, so that each rank holds
    those of all parameters until then. If these are small, so does this strategy, unless the program sets ``grad_sync``
    or accelerate's ``sync_each_batch``; otherwise, the memory decides, and each micro-batch is reduced.
    """

    may_reduce_once = False
    """Whether the program leaves the choice to [Note: reduced once]."""
    _reduces_once = False

    def _grad_sync_of(self, model: nn.Module) -> GradSync:
        return "last" if self._reduces_once else super()._grad_sync_of(model)

    def _step_output(self) -> Output:
        return "none"

    def take_step_numbers(self, model: nn.Module) -> dict[str, float]:
        """Return the numbers of the steps since the last call, for the trainer's log; not collective."""
        return self._state_of(model).meter.take_numbers()

    def start_step(self, model: nn.Module, micro_batches: int) -> None:
        """Declare the number of micro-batches of the coming step; not collective.

        Backward passes of a step that the trainer has left early are forgotten, with their gradients.
        """
        accumulation = self._state_of(model).accumulation
        if accumulation.is_pending:
            self.discard_gradients(model)
        accumulation.declared = micro_batches
        self._reduces_once = (
            self.may_reduce_once and micro_batches > 1 and _full_gradients_bytes(model) <= sizes.FULL_GRADIENTS_BYTES
        )

    def use_optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer over a model's sharded parameters that steps and checkpoints use; not collective."""
        split_groups(optimizer)
        if self.config.use_mp_opt:
            optimizer = FSDPadaptOptimizer(optimizer)
        forbid_direct_steps(optimizer)
        watch_optimizer(optimizer, model)
        self._state_of(model).optimizer = optimizer
        return optimizer


def _full_gradients_bytes(model: nn.Module) -> int:
    """Return the size of the unsharded gradients of a model in fp32."""
    return sum(torch.float32.itemsize * p.numel() for p in unwrap_model(model).parameters() if p.requires_grad)


class ShardingAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's ``Accelerator``, whose models and optimizers are those of a strategy."""

    strategy: TrainerStrategy
    trained_model: Callable[[], nn.Module]
    """Returns the model that the trainer trains."""

    sample_order: SampleOrder

    def __init__(self, **options: Any) -> None:
        # The strategy casts to half precision and scales losses; accelerate must not do so again.
        super().__init__(**options | {"mixed_precision": "no"})
        self.sample_order = SampleOrder()
        self.prepared: WeakSet[nn.Module] = WeakSet()  # accelerate forgets its models when training begins
        """The sharded models, without wrappers."""

    def attach(self, strategy: TrainerStrategy, trained_model: Callable[[], nn.Module]) -> None:
        """Set the strategy, and the function that returns the trained model; raise if accelerate shards models, too."""
        for plugin in ("fsdp_plugin", "deepspeed_plugin"):
            if getattr(self.state, plugin, None) is not None:
                raise ConfigError(
                    f"cannot use FSDP2 with this trainer: accelerate has a {plugin}, expected none, because this "
                    "package shards the model. Use an accelerate configuration without it, or torchrun."
                )
        self.strategy, self.trained_model = strategy, trained_model

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model; collective.

        The trainer's own model is prepared for training, even if it is evaluated first; others, such as reference and
        reward models, for inference.
        """
        is_trained = model is self.trained_model() and any(p.requires_grad for p in model.parameters())
        if is_trained:
            check_exportable_prompts(model)  # before hours of training, and not at the first save
            if not (self.strategy.config.bf16 or self.strategy.config.fp16):
                drop_casts_of_embeddings(model)  # to the dtype that the blocks had: they train in fp32
        self.strategy.prepare_model(model, is_training=is_trained)
        self.prepared.add(unwrap_model(model))
        if not any(model is other for other in self._models):
            self._models.append(model)
        return model

    def reshard_others(self) -> None:
        """Register the sharded parameters of the models that are not trained; not collective.

        Callbacks read them between steps, such as TRL's ``sync_ref_model``, and FSDP2 leaves the root unit gathered
        after a pass without a backward pass.
        """
        trained = unwrap_model(self.trained_model())
        for model in list(self.prepared):
            if model is not trained:
                reshard(model)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as accelerate does; the order of its samples is continued by a resume; not collective."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        self.sample_order.follow(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Return the optimizer with a ``step`` that calls the strategy; not collective."""
        if not isinstance(optimizer, SteppingOptimizer):
            optimizer = SteppingOptimizer(optimizer, self)
        if not any(optimizer is other for other in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass of a micro-batch, whose loss the trainer has scaled; collective."""
        self.strategy.backward(loss, self.trained_model())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of the trained model, and return their global norm before; collective."""
        if norm_type != 2:
            raise ConfigError(f"cannot clip gradients: norm_type is {norm_type}, expected 2. Leave it out.")
        norm = self.strategy.clip_grad_norm(self.trained_model(), 0.0 if math.isinf(max_norm) else max_norm)
        return torch.tensor(norm)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Do nothing: the strategy decides which collectives run before the last micro-batch (``grad_sync``)."""
        yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Raise: the full parameters are never gathered."""
        raise ConfigError(
            "cannot gather a state dict: the model is sharded, expected a save without a gather. Call "
            "trainer.save_model(folder) on every rank."
        )


class SteppingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer whose ``step`` is the strategy's."""

    def __init__(self, optimizer: Optimizer, accelerator: ShardingAccelerator) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._accelerator = accelerator

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take the optimizer step of the micro-batches since the last one; collective."""
        if closure is not None:
            raise ConfigError("cannot step: a closure was passed, expected none. Leave it out.")
        accelerator = self._accelerator
        model = accelerator.trained_model()
        gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        result = accelerator.strategy.optimizer_step(self.optimizer, model)
        self._is_overflow = result.skipped
        for parameter, gradient in gradients:
            parameter.grad = gradient  # for `on_optimizer_step` of callbacks; then the trainer calls `zero_grad`
        accelerator.reshard_others()
