"""Optimizers, schedules, steps, accumulation and averages of sharded models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2_strategy.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from fsdp2_strategy.optim.accumulation import accumulation_of as accumulation_of
    from fsdp2_strategy.optim.ema import EMA as EMA
    from fsdp2_strategy.optim.groups import build_optimizer as build_optimizer
    from fsdp2_strategy.optim.groups import rebind_optimizer as rebind_optimizer
    from fsdp2_strategy.optim.masters import FSDPadaptOptimizer as FSDPadaptOptimizer
    from fsdp2_strategy.optim.masters import is_mp_optimizer as is_mp_optimizer
    from fsdp2_strategy.optim.schedule import build_scheduler as build_scheduler
    from fsdp2_strategy.optim.schedule import (
        get_constant_schedule_with_freeze_warmup as get_constant_schedule_with_freeze_warmup,
    )
    from fsdp2_strategy.optim.step import StepResult as StepResult
    from fsdp2_strategy.optim.step import backward as backward
    from fsdp2_strategy.optim.step import clip_grad_norm as clip_grad_norm
    from fsdp2_strategy.optim.step import optimizer_step as optimizer_step
    from fsdp2_strategy.optim.zero_grad import discard_gradients as discard_gradients

_MODULE_OF = {
    "EMA": "ema",
    "FSDPadaptOptimizer": "masters",
    "StepResult": "step",
    "accumulation_of": "accumulation",
    "backward": "step",
    "build_optimizer": "groups",
    "build_scheduler": "schedule",
    "clip_grad_norm": "step",
    "discard_gradients": "zero_grad",
    "get_constant_schedule_with_freeze_warmup": "schedule",
    "is_mp_optimizer": "masters",
    "optimizer_step": "step",
    "rebind_optimizer": "groups",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)
__getattr__, __dir__ = lazy_imports(__name__, _MODULE_OF)
