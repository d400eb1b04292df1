"""One optimizer step: accumulate micro-batches, compute one global gradient norm, step or skip.

Input: a loss, a sharded model and its optimizer. Output: gradients, then a `StepResult`.

[Note: gradient scale] FSDP2 averages gradients over the ranks. `backward` divides the loss by the number of
micro-batches, so the gradient is the mean over ranks and micro-batches, with equal weights. With
``num_items_in_batch`` = N, the loss is a sum over items, and the gradient must be that of the global sum divided by N.
So the loss is multiplied by (number of ranks) / N, because FSDP2's average divides by the number of ranks. If N is not
known yet, each micro-batch passes its own ``num_items``. Then `backward` does not scale the loss, the all-reduce of the
gradient norm sums N, too, and `optimizer_step` multiplies the gradients by (number of ranks) / N. Ranks that share
layers compute the same loss, and count as one rank. Ranks that share sequences do so, too, if their loss is that of
full sequences: see [Note: shared losses] in `step_sums`.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, get_args
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.config.arguments import check_choice, check_number
from fsdp2_strategy.config.strategy_config import AccumulationRule, GradSync, LossReduction, SyncBuffers
from fsdp2_strategy.distributed.accelerator import on_accelerator
from fsdp2_strategy.distributed.agreement import defer_error, has_deferred_error, raise_deferred_error
from fsdp2_strategy.distributed.equal_values import digest_numbers, is_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import control_device, current_device, data_size, group_in_use, world_size
from fsdp2_strategy.distributed.same_batch import check_later, check_losses_of_groups, take_later
from fsdp2_strategy.distributed.spent_time import device_wait
from fsdp2_strategy.distributed.torch_internals import with_placements
from fsdp2_strategy.distributed.unit_log import current_log
from fsdp2_strategy.errors import StepError, counted
from fsdp2_strategy.model.buffers import changed_buffers, check_same_buffers
from fsdp2_strategy.model.buffers import sync_buffers as sync
from fsdp2_strategy.model.failed_passes import failed_pass, record_failed_backward
from fsdp2_strategy.model.fsdp_state import class_name, parameters_outside_units, reshard
from fsdp2_strategy.model.gradients import may_have_unequal_gradients
from fsdp2_strategy.model.offloading import check_resident
from fsdp2_strategy.model.ranks import on_ranks_of, ranks_per_layer
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.swapped_weights import check_own_weights, is_swapped, swapped_error
from fsdp2_strategy.model.weight_versions import count_change
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.optim.accumulation import Accumulation, ReducedStep, accumulation_of
from fsdp2_strategy.optim.compared_numbers import check_equal_numbers, numbers_of_step
from fsdp2_strategy.optim.schedule import check_schedule_of, check_steps_without_metric
from fsdp2_strategy.optim.step_sums import MicroBatchSums, checked_tokens, shared_loss
from fsdp2_strategy.optim.used_parameters import remove_unused_gradients, used_numbers
from fsdp2_strategy.optim.zero_grad import discard_after_failed_pass, watch_model, watch_optimizer
from fsdp2_strategy.sharding.shard import check_dtypes

_STEPS_WITH_EQUAL_LOSSES = 5
"""So many successive steps in which different batches have the same loss by chance are ruled out."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one call of `optimizer_step`; docs/metrics.md has a table of its fields."""

    step: int
    """Optimizer steps taken so far."""
    stepped: bool
    """Whether the optimizer stepped."""
    skipped: bool
    """Whether the step was skipped because the gradient norm was not finite."""
    grad_norm: float | None
    """Global norm before clipping; None if micro-batches of the step are still missing."""
    lr: float | None = None
    """Learning rate of the first parameter group in this step, also if it was skipped; None as for ``grad_norm``."""
    loss: float | None = None
    """Loss of the step over all ranks: the mean of the losses over micro-batches and ranks; with
    ``num_items_in_batch``, their sum divided by it. NaN or infinite if a loss is. None as for ``grad_norm``."""
    tokens: int | None = None
    """Tokens of the step over all ranks: the sum of all ``num_tokens``; or ``num_items_in_batch`` if no rank passed
    ``num_tokens``. None as for ``grad_norm``, or if neither was passed, or if only some ranks passed ``num_tokens``."""
    samples: int | None = field(default=None, compare=False)
    """Samples of the step over all ranks: the sum of all ``num_samples``, by default of the batch sizes of the forward
    passes. This and the following numbers are those of steps of a strategy, None if unknown, equal on every rank, and
    not compared by ``==``; docs/metrics.md defines them."""
    seconds: float | None = field(default=None, compare=False)
    """Wall-clock time since the step before, on rank 0."""
    data_seconds: float | None = field(default=None, compare=False)
    """Part of this time that a rank has waited for batches, mean over the ranks."""
    save_seconds: float | None = field(default=None, compare=False)
    """Part of this time that a rank has spent in saves, mean over the ranks."""
    model_flops: float | None = field(default=None, compare=False)
    """Floating-point operations of the forward and backward passes of all ranks, without recomputation."""
    hardware_flops: float | None = field(default=None, compare=False)
    """The same, with the recomputation of activation checkpointing."""
    mfu: float | None = field(default=None, compare=False)
    """Model FLOPs utilisation: ``model_flops`` / ``seconds``, divided by the peak of all devices."""
    memory_allocated_bytes: int | None = field(default=None, compare=False)
    """Largest peak of the memory that tensors of a rank occupy, when the ranks last exchanged it; without an
    accelerator, the largest resident set of a process."""
    memory_reserved_bytes: int | None = field(default=None, compare=False)
    """Largest memory that the allocator of a rank reserves, as above; None without an accelerator."""

    @property
    def tokens_per_second(self) -> float | None:
        """``tokens`` / ``seconds``."""
        return self.tokens / self.seconds if self.tokens is not None and self.seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """``samples`` / ``seconds``."""
        return self.samples / self.seconds if self.samples is not None and self.seconds else None


@collective
def backward(
    loss: torch.Tensor,
    model: nn.Module,
    *,
    accumulation_steps: int = 1,
    accumulation: AccumulationRule = "auto",
    loss_reduction: LossReduction = "mean",
    grad_sync: GradSync = "defer_all_reduce",
    num_items_in_batch: float | torch.Tensor | None = None,
    num_items: int | torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
) -> None:
    """Scale the loss of one micro-batch and run its backward pass; collective.

    Args:
        loss: this rank's mean over its micro-batch; or, with ``num_items_in_batch`` or ``num_items``, the sum over its
            items.
        model: the model that computed the loss, or its wrapper.
        accumulation_steps: micro-batches per step; without numbers of items, the loss is divided by it.
        accumulation: where a micro-batch ends; see `StrategyConfig` and [Note: micro-batches] in `optim.accumulation`.
        loss_reduction: "sum" does not divide the loss by ``accumulation_steps``.
        grad_sync: communication in the backward passes before the last of a step; see `StrategyConfig`.
        num_items_in_batch: number of items (for example tokens) in all micro-batches of all ranks in this step; the
            gradient is that of (sum of all losses) / num_items_in_batch. Pass it in every micro-batch of a step: one
            without it has its loss divided by ``accumulation_steps``.
        num_items: number of items in this rank's micro-batch, if the number of all items is not known yet: the gradient
            is that of (sum of all losses) / (sum of all num_items), and the second sum is known at the step. Pass it in
            every backward pass of a step, on every rank.
        num_tokens: number of tokens in this rank's micro-batch, for `StepResult.tokens` only. Ranks that share
            sequences pass the numbers that their losses belong to, as for ``num_items``: those of their parts; or those
            of full sequences, which count once, if the loss is computed from `token_log_probs`. Every rank must pass it
            in at least one micro-batch of a step (0 if it has no tokens); a micro-batch without it adds none.

    Raises:
        StepError: ``num_items_in_batch`` is not positive and finite (a tensor of an accelerator is checked by
            `optimizer_step`, which reads all values at once); ``num_items`` or ``num_tokens`` is not an integer
            of at least 0 or a tensor of one; both numbers of items are given; only some backward passes of a step have
            ``num_items``; averages replace the model's parameters (`EMA.swapped_in`); the loss is not a tensor with one
            element and an autograd graph; there are several ranks and the model is not sharded; or, on every rank, the
            losses of ranks that share layers differ.
    """
    check_own_weights(model, "run backward", StepError)
    _check_loss(loss)
    _check_choices("run backward", accumulation=accumulation, loss_reduction=loss_reduction, grad_sync=grad_sync)
    check_number("run backward", "accumulation_steps", accumulation_steps, StepError, integer=True, minimum=1)
    _check_prepared(unwrap_model(model), "run backward")
    layers = ranks_per_layer(model)
    if layers > 1:
        check_losses_of_groups(loss, layers)
    num_tokens = checked_tokens(num_tokens)
    num_items = checked_tokens(num_items, "num_items")
    discard_after_failed_pass(model, in_forward=False)
    watch_model(model)
    own = accumulation_of(model)
    own.check_declared()
    if not own.is_pending:
        own.sums = MicroBatchSums()
    elif own.sums.has_items != (num_items is not None):
        raise StepError(
            "cannot run backward: num_items was passed in some backward passes of this step, and not in others, "
            "expected in all or none. Pass it in every one, 0 for a loss without items."
        )
    items = None if num_items_in_batch is None else _number_of_items(num_items_in_batch)
    is_summed = items is not None or num_items is not None
    if items is not None and num_items is not None:
        raise StepError(
            "cannot run backward: num_items_in_batch and num_items were passed, expected one of them. Pass num_items "
            "if the number of items in the whole step is not known yet."
        )
    own.size_of_step = own.size(accumulation, accumulation_steps)
    size = own.size_of_step if num_items is None and loss_reduction == "mean" else None
    factor = _loss_factor(size, items, world_size() // layers)
    is_last = own.is_last(accumulation, accumulation_steps)
    if is_last != (own.last_sync is not False):
        _set_gradient_sync(model, grad_sync, is_last=is_last)
        own.last_sync = is_last
    try:
        with shared_loss(is_summed=is_summed) as shared:
            (loss * (factor * own.loss_scale)).backward()  # type: ignore[no-untyped-call]
    except BaseException:
        record_failed_backward(unwrap_model(model))
        raise
    own.sums.add(loss, factor, num_tokens, items, num_items, copies=shared.copies)
    own.add_backward(accumulation)


@collective
def optimizer_step(
    optimizer: Optimizer,
    model: nn.Module,
    scheduler: LRScheduler | None = None,
    *,
    accumulation_steps: int = 1,
    accumulation: AccumulationRule = "auto",
    max_norm: float = 0.0,
    name: str = "model",
    sync_buffers: SyncBuffers = "broadcast",
) -> StepResult:
    """Step the optimizer if this was the last micro-batch; call it after each `backward`; collective.

    After the last micro-batch it clips the gradients, steps optimizer and schedule, and clears the gradients. If the
    norm is not finite, all ranks skip the optimizer and the schedule, and clear the gradients.

    Args:
        optimizer: the model's optimizer.
        model: the model, or its wrapper.
        scheduler: learning-rate schedule, stepped with the optimizer.
        accumulation_steps: micro-batches per step.
        accumulation: as for `backward`.
        max_norm: global norm that gradients are clipped to; 0 disables clipping.
        name: name of the model in log and error messages.
        sync_buffers: how buffers that have changed are made equal on all ranks; see [Note: changing buffers] in
            `model.buffers`.

    Returns:
        Whether the optimizer stepped, and the gradient norm, learning rate, loss and tokens of the step; all are equal
        on every rank.

    Raises:
        StepError: `backward` was not called since the last call, or has raised; or averages replace the model's
            parameters (`EMA.swapped_in`); or it is unknown whether the backward passes since then are micro-batches; or
            the optimizer belongs to another model or was created before this one was sharded; or there are several
            ranks and the model is not sharded; or, on every rank: a rank has deferred an error (`defer_error`),
            ``num_items`` was passed on some ranks only, or their sum is 0; or ``num_items_in_batch``, ``max_norm``, the
            number of backward passes or a hyper-parameter of the optimizer differs between ranks; or the ranks have run
            different units.
        OffloadError: the model or the optimizer is offloaded.
    """
    if not hasattr(optimizer, "param_groups"):
        raise StepError(
            f"cannot step {name!r}: the optimizer is {_described(optimizer)}, expected a torch optimizer. Pass the one "
            "that create_optimizer returned, and check the order of the arguments."
        )
    _check_choices(f"step {name!r}", accumulation=accumulation, sync_buffers=sync_buffers)
    check_number(f"step {name!r}", "accumulation_steps", accumulation_steps, StepError, integer=True, minimum=1)
    check_number(f"step {name!r}", "max_norm", max_norm, StepError, minimum=0)
    root = unwrap_model(model)
    _check_prepared(root, f"step {name!r}")
    own = accumulation_of(model)
    if own.checked_optimizer is None or own.checked_optimizer() is not optimizer:
        _check_parameters(optimizer, root)
        own.checked_optimizer = ref(optimizer)
        watch_optimizer(optimizer, model)
    if scheduler is not None:
        _check_schedule(scheduler, optimizer, own, name)
    if failed_pass(root) == "backward":
        raise StepError(
            f"cannot step {name!r}: its last backward pass has raised, expected one that is complete. Call "
            "optimizer.zero_grad(), which discards the gradients of this step, and run the passes again."
        )
    if not own.end_micro_batch(accumulation, accumulation_steps, name):
        return StepResult(step=own.steps, stepped=False, skipped=False, grad_norm=None)
    norm, lr, reduced = _take_step(optimizer, root, scheduler, own=own, max_norm=max_norm, sync_buffers=sync_buffers)
    stepped = math.isfinite(norm)
    own.reset()
    own.steps += stepped
    _warn_of_equal_losses(own, name, has_equal_losses=reduced.has_equal_losses)
    own.stepped_schedule = None if scheduler is None else (ref(scheduler), _position_of(scheduler))
    if not stepped:
        message = "%s: all ranks skip step %d, because the gradient norm is %s"
        log(message, name, own.steps + 1, norm, level=logging.WARNING)
    return StepResult(
        step=own.steps,
        stepped=stepped,
        skipped=not stepped,
        grad_norm=norm,
        lr=lr,
        loss=reduced.loss,
        tokens=reduced.tokens,
    )


def _warn_of_equal_losses(own: Accumulation, name: str, *, has_equal_losses: bool) -> None:
    """Log a warning once if all ranks had the same loss in several successive steps."""
    own.steps_with_equal_losses = own.steps_with_equal_losses + 1 if has_equal_losses else 0
    if own.steps_with_equal_losses == _STEPS_WITH_EQUAL_LOSSES and not own.has_said_equal_losses:
        own.has_said_equal_losses = True
        log(
            "%s: in %d successive steps, the loss was the same on all ranks: they seem to train on the same batches, "
            "as with a DataLoader without a sampler for the ranks. Use ResumableLoader, setup_dataloader or a "
            "DistributedSampler",
            name,
            own.steps_with_equal_losses,
            level=logging.WARNING,
        )


def _check_schedule(scheduler: LRScheduler, optimizer: Optimizer, own: Accumulation, name: str) -> None:
    """Raise if a schedule does not fit to a step; log a warning once if the program has stepped it, too."""
    if isinstance(scheduler, Optimizer | nn.Module) or not callable(getattr(scheduler, "step", None)):
        raise StepError(
            f"cannot step {name!r}: the schedule is {_described(scheduler)}, expected a learning-rate schedule. Check "
            "the order of the arguments: optimizer_step(optimizer, model, scheduler)."
        )
    check_schedule_of(scheduler, optimizer, f"step {name!r}", StepError)
    last, position = own.stepped_schedule, _position_of(scheduler)
    if last is None or last[0]() is not scheduler:
        check_steps_without_metric(scheduler)
    elif last[1] is not None and position is not None and position > last[1] and not own.has_said_stepped_twice:
        own.has_said_stepped_twice = True
        log(
            "%s: the program has stepped the %s %s since the last optimizer step, and optimizer_step steps it, too, so "
            "its learning rates are those of a later step. Remove one of the calls",
            name,
            type(scheduler).__name__,
            counted(position - last[1], "time"),
            level=logging.WARNING,
        )


def _position_of(scheduler: LRScheduler) -> int | None:
    position = getattr(scheduler, "last_epoch", None)
    return position if isinstance(position, int) else None


def _check_loss(loss: object) -> None:
    """Raise StepError unless a loss can be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise StepError(
            f"cannot run backward: the loss is {_described(loss)}, expected a tensor. Check the order of the "
            "arguments: backward(loss, model, optimizer)."
        )
    if loss.numel() != 1:
        raise StepError(
            f"cannot run backward: the loss has the shape {list(loss.shape)}, expected one element. Take its mean."
        )
    if not loss.requires_grad:
        raise StepError(
            "cannot run backward: the loss has no autograd graph, expected one. It was computed under torch.no_grad, "
            "detached, or does not depend on a trainable parameter."
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "accumulation": get_args(AccumulationRule),
    "grad_sync": get_args(GradSync),
    "loss_reduction": get_args(LossReduction),
    "sync_buffers": get_args(SyncBuffers),
}


def _check_choices(action: str, **given: str) -> None:
    """Raise StepError unless arguments are among their possible values."""
    for name, value in given.items():
        check_choice(action, name, value, _CHOICES[name], StepError)


def _check_prepared(root: nn.Module, action: str) -> None:
    """Raise StepError if a model is not sharded and there are several ranks: each would train a copy of its own."""
    if world_size() > 1 and any(p.requires_grad and not isinstance(p, DTensor) for p in parameters_outside_units(root)):
        raise StepError(
            f"cannot {action}: {class_name(root)} is not sharded, so each of the {world_size()} ranks would train a "
            "copy of its own, expected a prepared model. Call prepare_model(model, is_training=True) first (without a "
            "strategy: shard_model)."
        )


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _number_of_items(given: Any) -> float | torch.Tensor:
    """Return the number as a float, or as a tensor on its accelerator: reading its value would synchronise."""
    if isinstance(given, torch.Tensor | numbers.Real | np.ndarray) and torch.as_tensor(given).numel() == 1:
        if isinstance(given, torch.Tensor) and on_accelerator(given):
            return given.detach().reshape(()).to(torch.float64, copy=True)  # the caller may reuse it
        return float(given)
    raise StepError(
        f"cannot scale the loss: num_items_in_batch is {given!r}, expected a number or a tensor of one element. Sum "
        "the number of items over the micro-batches and ranks of the step."
    )


def _loss_factor(size: int | None, items: float | torch.Tensor | None, ranks: int) -> float | torch.Tensor:
    """Return the factor for the loss of a micro-batch; see [Note: gradient scale]."""
    if items is None:
        return 1 / (size or 1)
    if isinstance(items, torch.Tensor):  # `MicroBatchSums.totals` checks its value
        return ranks / items
    if not 0 < items < math.inf:
        raise StepError(
            f"cannot scale the loss: num_items_in_batch is {items:g}, expected the number of items in all "
            "micro-batches of all ranks in this step, more than 0 and finite. Sum it over the ranks first."
        )
    return ranks / items


def _set_gradient_sync(model: nn.Module, mode: GradSync, *, is_last: bool) -> None:
    """Set which collectives each unit runs in backward passes from the next one on; not collective."""
    root = unwrap_model(model)
    if mode == "defer_all_reduce" and may_have_unequal_gradients(root):
        # FSDP2 sums deferred gradients in a flat buffer, so each pass must have gradients of the same parameters.
        mode = "every"
    for unit in root.modules():
        if isinstance(unit, FSDPModule) and mode == "last":
            unit.set_requires_gradient_sync(is_last, recurse=False)
        elif isinstance(unit, FSDPModule):
            unit.set_requires_all_reduce(is_last or mode == "every", recurse=False)


@collective
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
        OffloadError: ``parameters`` is a model that is offloaded.
    """
    check_number("clip gradients", "max_norm", max_norm, StepError, minimum=0)
    model = None
    if isinstance(parameters, nn.Module):
        model = unwrap_model(parameters)
        check_resident(model, "clip its gradients")
        reshard(model)
        parameters = model.parameters()
    parameters = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    if wrong := [each for each in parameters if not isinstance(each, torch.Tensor)]:
        raise StepError(
            f"cannot clip gradients: got {_described(wrong[0])}, expected a model or its parameters. Pass the model."
        )
    with on_ranks_of(parameters):
        used = [] if model is None else used_numbers(parameters, model, world_size())
        squares, used = _sum_over_ranks(_gradients(parameters), *used)
        if model is not None:
            remove_unused_gradients(parameters, model, used, world_size())
    return _scale(_gradients(parameters), math.sqrt(squares), max_norm)


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _scale(grads: list[torch.Tensor], norm: float, max_norm: float, scale: float = 1.0) -> float:
    """Divide gradients of this norm by ``scale``, and clip them; return the norm before clipping."""
    norm /= scale
    clips = max_norm > 0 and norm > max_norm
    factor = (max_norm / (norm + 1e-6) if clips else 1.0) / scale
    if grads and factor != 1.0 and math.isfinite(norm):
        # Local tensors avoid the dispatch through DTensor.
        torch._foreach_mul_([local for local, *_ in with_placements(grads)], factor)
    return norm


def _check_parameters(optimizer: Optimizer, root: nn.Module) -> None:
    """Raise StepError if the optimizer is another model's, or was created before the model was sharded."""
    reshard(root)
    own = {id(parameter) for parameter in root.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise StepError(
            f"cannot step: the optimizer has {counted(len(foreign), 'parameter')} not in {class_name(root)}, expected "
            "only parameters of this model. Create it for this model, after prepare_model."
        )


def _take_step(
    optimizer: Optimizer,
    root: nn.Module,
    scheduler: LRScheduler | None,
    *,
    own: Accumulation,
    max_norm: float,
    sync_buffers: SyncBuffers,
) -> tuple[float, float, ReducedStep]:
    """Clip, step optimizer and schedule, clear the gradients; if the norm is not finite, only clear; collective.

    Return the norm, the learning rate, and what the ranks have exchanged.
    """
    check_resident(root, "step")
    check_resident(optimizer, "step")
    check_dtypes(root)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if own.reduced is not None and max_norm == 0.0:
        check_own_weights(root, "step", StepError)  # `_reduce` raises it on every rank
        reduced = own.reduced
    else:
        reduced = _reduce(parameters, root, optimizer, own=own, max_norm=max_norm, sync_buffers=sync_buffers)
    factor = own.loss_scale * reduced.divisor
    norm = _scale(_gradients(parameters), reduced.norm * factor, max_norm, factor)
    if reduced.have_buffers_changed:
        with on_ranks_of(root):
            sync(root, sync_buffers)
    lr = float(optimizer.param_groups[0]["lr"])
    finite = math.isfinite(norm)
    if own.scale is not None:
        own.scale.update(finite=finite)
    if finite:
        state = model_state(optimizer)
        state.set(_IS_STEPPING, True)
        try:
            optimizer.step()
        finally:
            state.set(_IS_STEPPING, False)
            count_change(root)
        if scheduler is not None:
            scheduler.step()
    # The class's method: the instance's keeps the gradients of a step that is pending, see [Note: zero_grad].
    type(optimizer).zero_grad(optimizer, set_to_none=True)
    return norm, lr, reduced


def _reduce(
    parameters: Sequence[torch.Tensor],
    root: nn.Module,
    optimizer: Optimizer | None,
    *,
    own: Accumulation,
    max_norm: float,
    sync_buffers: SyncBuffers,
) -> ReducedStep:
    """Exchange what the ranks must know for an optimizer step; raise on every rank if they differ; collective."""
    later = take_later()  # [Note: later comparisons] in `same_batch`
    numbers = numbers_of_step(own, optimizer, max_norm) | {"the number of batches and losses": len(later)}
    if is_swapped(root):
        defer_error(swapped_error(root, "step", StepError))
    is_changed, buffers = changed_buffers(root) if sync_buffers != "off" else (False, digest_numbers(None))
    with on_ranks_of(parameters):
        ranks = world_size()
        sums, used = own.sums.values(), used_numbers(parameters, root, ranks)
        measured = [] if own.measurements is None else own.measurements.numbers()
        compared = digest_numbers(sorted(numbers.items()))
        squares, (changed, deferred, *others) = _sum_over_ranks(
            _gradients(parameters), is_changed, has_deferred_error(), *compared, *buffers, *sums, *used, *measured
        )
        if own.measurements is not None:  # first: what follows may fail on one rank
            own.measurements.receive(others[len(others) - len(measured) :])
        if deferred:
            raise_deferred_error()
        rest = iter(others)
        of_numbers, of_buffers, of_batches = ([*islice(rest, len(sent))] for sent in (compared, buffers, sums))
        check_equal_numbers(of_numbers, numbers)
        if changed and not is_equal(of_buffers, ranks):
            check_same_buffers(root, "synchronise the buffers", StepError)
        loss, tokens, divisor = own.sums.totals(of_batches, ranks, ranks_per_layer(root))
        is_shared = data_size() == 1 or ranks_per_layer(root) == ranks
        has_equal_losses = not is_shared and own.sums.are_losses_equal(of_batches, ranks)
        remove_unused_gradients(parameters, root, [*islice(rest, len(used))], ranks)
    check_later(later)
    return ReducedStep(
        norm=math.sqrt(squares) / (own.loss_scale * divisor),
        divisor=divisor,
        loss=loss,
        tokens=tokens,
        have_buffers_changed=bool(changed),
        has_equal_losses=has_equal_losses,
    )


@collective
def clip_for_step(model: nn.Module, max_norm: float, *, sync_buffers: SyncBuffers = "broadcast") -> float:
    """Clip the gradients of the coming optimizer step, by its all-reduce, and return their norm; collective."""
    root = unwrap_model(model)
    check_number("clip gradients", "max_norm", max_norm, StepError, minimum=0)
    _check_prepared(root, "clip gradients")
    check_resident(root, "clip its gradients")
    reshard(root)
    own = accumulation_of(model)
    parameters = [p for p in root.parameters() if p.requires_grad]
    optimizer = own.checked_optimizer() if own.checked_optimizer is not None else None
    own.reduced = _reduce(parameters, root, optimizer, own=own, max_norm=max_norm, sync_buffers=sync_buffers)
    _scale(_gradients(parameters), own.reduced.norm * own.loss_scale, max_norm * own.loss_scale)
    return own.reduced.norm


_IS_STEPPING = Slot[bool]("stepping in optimizer_step")


def forbid_direct_steps(optimizer: Optimizer) -> None:
    """Make ``optimizer.step()`` raise StepError unless `optimizer_step` calls it; not collective."""
    optimizer.register_step_pre_hook(_raise_on_direct_step)


def _raise_on_direct_step(optimizer: Optimizer, *_: object) -> None:
    if not model_state(optimizer).get(_IS_STEPPING):
        raise StepError(
            f"cannot step this {type(optimizer).__name__} directly: gradients would not be clipped, and the step would "
            "not be counted, so every checkpoint would have the same name. Call strategy.optimizer_step(optimizer, "
            "model, scheduler); or create the optimizer with build_optimizer, which the strategy does not control."
        )


@torch.no_grad()
def _sum_over_ranks(grads: list[torch.Tensor], *values: float | torch.Tensor) -> tuple[float, list[float]]:
    """Return the sums of squared gradients and of values over ranks: one all-reduce, one host synchronisation."""
    grouped: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
    ranks = world_size()
    copies_of: dict[tuple[int, tuple[Any, ...]], int] = {}
    for local, mesh, placements in with_placements(grads):
        if mesh is None:
            copies = ranks
        elif not (copies := copies_of.get((id(mesh), placements), 0)):
            copies = copies_of[id(mesh), placements] = _copies(mesh, placements, ranks)
        grouped[local.device, local.dtype, copies].append(local)
    on_accelerator = any(device.type != "cpu" for device, _, _ in grouped)
    device = current_device() if on_accelerator else control_device()
    log = current_log()
    units = [] if log is None else log.numbers()
    numbers = [0.0, *(0.0 if isinstance(value, torch.Tensor) else float(value) for value in values), *units]
    # A copy that blocks would synchronise with an accelerator; one to the CPU must block before its result is used.
    total = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    for place, value in enumerate(values, start=1):
        if isinstance(value, torch.Tensor):
            total[place] += value.to(device, torch.float64, non_blocking=device.type != "cpu")
    for (_, dtype, copies), locals_ in grouped.items():
        norms = torch._foreach_norm(locals_, 2, dtype=torch.promote_types(dtype, torch.float32))
        squares = torch.stack(norms).double().square_().sum()
        total[0] += (squares / copies).to(device, non_blocking=True)
    with device_wait(total.device):
        if log is None:
            dist.all_reduce(total, group=group_in_use())
        else:
            log.all_reduce(total, "takes an optimizer step")
    of_gradients, *sums = total.tolist()
    if log is not None:
        log.check(sums[len(values) :])
    return of_gradients, sums[: len(values)]


def _copies(mesh: DeviceMesh, placements: Sequence[Any], ranks: int) -> int:
    """Return the number of ranks, of those in use, that hold the same values of a DTensor."""
    copies = math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if placement.is_replicate())
    return copies * (ranks // mesh.size())
