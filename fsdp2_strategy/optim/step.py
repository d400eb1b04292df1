"""One optimizer step: accumulate micro-batches, compute one global gradient norm, step or skip.

Input: a loss, a sharded model and its optimizer. Output: gradients, then a `StepResult`.

[Note: gradient scale] FSDP2 averages gradients over the ranks. `backward` divides the loss by the number of
micro-batches, so the gradient is the mean over ranks and micro-batches, with equal weights. With
``num_items_in_batch`` = N, the loss is a sum over items, and the gradient must be that of the global sum divided by N.
So the loss is multiplied by ranks / N, and FSDP2's average cancels the factor ranks.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.config.strategy_config import GradSync
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import control_device, current_device, group_in_use, world_size
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.model.offload import check_resident
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.sharding.vision_encoders import may_be_uneven


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one call of `optimizer_step`."""

    step: int
    """Optimizer steps taken so far."""
    stepped: bool
    """Whether the optimizer stepped."""
    skipped: bool
    """Whether the step was skipped because the gradient norm was not finite."""
    grad_norm: float | None
    """Global norm before clipping; None if micro-batches of the step are still missing."""


@dataclass
class LossScale:
    """Dynamic loss scale, which keeps float16 gradients from underflowing.

    It doubles after ``interval`` successive steps with finite gradients, and halves (down to 1) after each other step.
    """

    value: float = 2.0**16
    interval: int = 2000
    good_steps: int = 0
    """Successive finite steps since the scale last changed."""

    def update(self, *, finite: bool) -> None:
        """Adapt the scale after a step; not collective, but equal on all ranks because the gradient norm is."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0


@dataclass
class Accumulation:
    """The gradient accumulation state of a model."""

    micro_batches: int = 0
    """Backward passes since the last optimizer step."""
    steps: int = 0
    """Optimizer steps taken."""
    scale: LossScale | None = None
    """Loss scale of float16 training; None for other dtypes."""
    checked: ref[Optimizer] | None = None
    """The optimizer that last passed `check_belongs`."""
    synced_as: bool | None = None
    """The ``is_last`` of the last `set_gradient_sync`; None before the first (FSDP2's default equals True)."""


_ACCUMULATION = Slot[Accumulation]("accumulation")


def accumulation_of(model: nn.Module) -> Accumulation:
    """Return the accumulation state of a model or wrapper, created on first use; not collective."""
    state = model_state(unwrap_model(model))
    return state.get(_ACCUMULATION) or state.set(_ACCUMULATION, Accumulation())


def begin_accumulation(model: nn.Module, scale: LossScale | None = None) -> Accumulation:
    """Reset the accumulation state of a model; not collective.

    Args:
        model: the model, or its wrapper.
        scale: loss scale of float16 training.
    """
    return model_state(unwrap_model(model)).set(_ACCUMULATION, Accumulation(scale=scale))


def backward(
    loss: torch.Tensor,
    model: nn.Module,
    *,
    accumulation_steps: int = 1,
    grad_sync: GradSync = "every",
    num_items_in_batch: float | torch.Tensor | None = None,
) -> None:
    """Scale the loss of one micro-batch and run its backward pass; collective.

    Args:
        loss: this rank's mean over its micro-batch; or, with ``num_items_in_batch``, the sum over its items.
        model: the model that computed the loss, or its wrapper.
        accumulation_steps: micro-batches per step; without ``num_items_in_batch`` the loss is divided by it.
        grad_sync: communication in the backward passes before the last of a step; see `StrategyConfig`.
        num_items_in_batch: number of items (for example tokens) in all micro-batches of all ranks in this step; the
            gradient is that of (sum of all losses) / num_items_in_batch.

    Raises:
        StepError: ``num_items_in_batch`` is not positive.
    """
    own = accumulation_of(model)
    factor = loss_scale(accumulation_steps=accumulation_steps, num_items_in_batch=num_items_in_batch)
    factor *= own.scale.value if own.scale else 1.0
    is_last = (own.micro_batches + 1) % accumulation_steps == 0
    if is_last != (own.synced_as is not False):
        set_gradient_sync(model, grad_sync, is_last=is_last)
        own.synced_as = is_last
    (loss * factor).backward()  # type: ignore[no-untyped-call]
    own.micro_batches += 1


def optimizer_step(
    optimizer: Optimizer,
    model: nn.Module,
    scheduler: LRScheduler | None = None,
    *,
    accumulation_steps: int = 1,
    max_norm: float = 0.0,
    name: str = "model",
) -> StepResult:
    """Step the optimizer if this was the last micro-batch; call it after each `backward`; collective.

    After the last micro-batch it clips the gradients, steps optimizer and schedule, and clears the gradients. If the
    norm is not finite, all ranks skip the optimizer and the schedule, and clear the gradients.

    Args:
        optimizer: the model's optimizer.
        model: the model, or its wrapper.
        scheduler: learning-rate schedule, stepped with the optimizer.
        accumulation_steps: micro-batches per step.
        max_norm: global norm that gradients are clipped to; 0 disables clipping.
        name: name of the model in log and error messages.

    Returns:
        Whether the optimizer stepped, and the gradient norm.

    Raises:
        StepError: `backward` was not called since the last step, or the optimizer belongs to another model.
        OffloadError: the model or the optimizer is offloaded.
    """
    own = accumulation_of(model)
    if own.checked is None or own.checked() is not optimizer:
        check_belongs(optimizer, model)
        own.checked = ref(optimizer)
    if not own.micro_batches:
        raise StepError(
            f"cannot step {name!r}: no backward pass since its last step, expected strategy.backward(loss, model, "
            "optimizer). Call it instead of loss.backward()."
        )
    if own.micro_batches % accumulation_steps:
        return StepResult(step=own.steps, stepped=False, skipped=False, grad_norm=None)
    stepped, norm = take_step(optimizer, model, scheduler, max_norm, own.scale)
    own.micro_batches = 0
    own.steps += stepped
    if not stepped:
        message = "%s: step %d is skipped on all ranks: the gradient norm is %s"
        log(message, name, own.steps + 1, norm, level=logging.WARNING)
    return StepResult(step=own.steps, stepped=stepped, skipped=not stepped, grad_norm=norm)


def loss_scale(*, accumulation_steps: int, num_items_in_batch: float | torch.Tensor | None) -> float:
    """Return the factor for the loss of a micro-batch; not collective. See [Note: gradient scale].

    Raises:
        StepError: ``num_items_in_batch`` is not positive.
    """
    if num_items_in_batch is None:
        return 1 / accumulation_steps
    num_items_in_batch = float(num_items_in_batch)
    if not num_items_in_batch > 0:
        raise StepError(
            f"cannot scale the loss: num_items_in_batch is {num_items_in_batch:g}, expected the number of items of all "
            "ranks and micro-batches of this step, at least 1. Sum it over the ranks first."
        )
    return world_size() / num_items_in_batch


def set_gradient_sync(model: nn.Module, mode: GradSync, *, is_last: bool) -> None:
    """Set what each unit communicates in the next backward pass; not collective."""
    if mode == "defer_all_reduce" and may_be_uneven(unwrap_model(model)):
        mode = "every"  # FSDP2 sums deferred gradients in one flat buffer, so their parameters must not vary
    units = [module for module in unwrap_model(model).modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if mode == "last":
            unit.set_requires_gradient_sync(is_last, recurse=False)
        else:
            unit.set_requires_all_reduce(is_last or mode == "every", recurse=False)


def clip_grad_norm(parameters: nn.Module | Iterable[torch.Tensor], max_norm: float = 0.0) -> float:
    """Return the global norm of all gradients, and scale them down to ``max_norm``; collective.

    Gradients may be on different meshes and devices, in different dtypes. Local sums of squares are divided by the
    number of ranks that hold the same values, and summed over all ranks of the largest mesh.

    Args:
        parameters: a model or its parameters; those without a gradient are ignored.
        max_norm: largest norm that is not scaled down; 0 disables clipping.

    Returns:
        The global norm before clipping, equal on all ranks. If it is not finite, gradients are not scaled.

    Raises:
        OffloadError: the model is offloaded.
    """
    if isinstance(parameters, nn.Module):
        model = unwrap_model(parameters)
        check_resident(model, "clip its gradients")
        reshard(model)
        parameters = model.parameters()
    return _clip(parameters, max_norm)


def _clip(parameters: Iterable[torch.Tensor], max_norm: float, scale: float = 1.0) -> float:
    """Divide all gradients by the loss scale, clip them, and return their unscaled norm; collective."""
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    with on_ranks_of(parameters):
        norm = math.sqrt(_sum_of_squares(grads)) / scale
    clips = max_norm > 0 and norm > max_norm
    factor = (max_norm / (norm + 1e-6) if clips else 1.0) / scale
    if grads and factor != 1.0 and math.isfinite(norm):
        # Local tensors avoid the dispatch through DTensor.
        torch._foreach_mul_([_local(grad) for grad in grads], factor)
    return norm


def check_belongs(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer holds parameters that are not the model's; not collective.

    Raises:
        StepError: the optimizer belongs to another model, or was created before the model was sharded.
    """
    reshard(unwrap_model(model))
    own = {id(parameter) for parameter in unwrap_model(model).parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise StepError(
            f"cannot step: the optimizer has {len(foreign)} parameters that are not in "
            f"{type(unwrap_model(model)).__name__}, expected its own. Create it after prepare_model, for this model."
        )


def take_step(
    optimizer: Optimizer,
    model: nn.Module,
    scheduler: LRScheduler | None,
    max_norm: float,
    scale: LossScale | None = None,
) -> tuple[bool, float]:
    """Clip, step optimizer and schedule, clear the gradients; if the norm is not finite, only clear; collective.

    Args:
        optimizer: the model's optimizer.
        model: the model, or its wrapper.
        scheduler: learning-rate schedule, stepped with the optimizer.
        max_norm: global norm to clip to; 0 disables clipping.
        scale: loss scale; gradients are divided by it, and it is adapted.

    Returns:
        Whether the optimizer stepped, and the norm before clipping; both are equal on all ranks.
    """
    for subject in (unwrap_model(model), optimizer):
        check_resident(subject, "step")
    reshard(unwrap_model(model))
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    norm = _clip(parameters, max_norm, scale.value if scale else 1.0)
    finite = math.isfinite(norm)
    if scale is not None:
        scale.update(finite=finite)
    if finite:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return finite, norm


@torch.no_grad()
def _sum_of_squares(grads: list[torch.Tensor]) -> float:
    """Return the sum of squares of all gradients; collective, with one host synchronisation."""
    alike: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        local = _local(grad)
        alike[local.device, local.dtype, _copies(grad)].append(local)
    total = torch.zeros((), dtype=torch.float64, device=_reduction_device(grads))
    for (_, dtype, copies), locals_ in alike.items():
        norms = torch._foreach_norm(locals_, 2, dtype=torch.promote_types(dtype, torch.float32))
        squares = torch.stack(norms).double().square_().sum()
        total += (squares / copies).to(total.device, non_blocking=True)
    dist.all_reduce(total, group=group_in_use())
    return total.item()


def _copies(grad: torch.Tensor) -> int:
    """Return how many ranks hold the same values as this rank."""
    if not isinstance(grad, DTensor):
        return world_size()
    mesh = grad.device_mesh
    copies = (mesh.size(axis) for axis, placement in enumerate(grad.placements) if placement.is_replicate())
    return math.prod(copies) * (world_size() // mesh.size())


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _reduction_device(grads: list[torch.Tensor]) -> torch.device:
    on_accelerator = any(grad.device.type != "cpu" for grad in grads)
    return current_device() if on_accelerator else control_device()
