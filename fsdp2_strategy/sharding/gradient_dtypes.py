"""Override FSDP2's choice of gradient dtypes for units that are frozen at first, or whose optimizer has the masters.

Input: the ``FSDPParamGroup`` of a unit. Output: hooks that set the dtypes in which its gradients are reduced and kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fsdp2_strategy.distributed.torch_internals import (
    keep_gradients_in,
    lacks_gradient_dtypes,
    parameters_of,
    set_gradient_dtype,
    set_gradient_dtypes_of,
    shard_of,
)
from fsdp2_strategy.model.unit_hooks import register_hook


def fix_gradient_dtypes(param_group: Any, *, masters_in_optimizer: bool) -> None:
    """Register hooks that set the gradient dtypes of a unit without a trainable parameter in the first pass.

    FSDP2 derives them from the parameters that are trainable then: none if adapters are disabled, or in a warmup. With
    ``masters_in_optimizer``, gradients of half-precision shards are kept in fp32; FSDP2 would round them to that dtype.
    """
    if masters_in_optimizer:
        register_hook(param_group, "choose gradient dtypes", "masters in the optimizer", _choose_fp32)
    shards = [shard_of(parameter) for parameter in parameters_of(param_group)]
    floating = [i for i, shard in enumerate(shards) if shard.is_floating_point()]
    trained = [i for i in floating if shards[i].requires_grad] or floating
    if trained:
        around = functools.partial(_choose_dtypes_of, trained[0])
        register_hook(param_group, "choose gradient dtypes", "units that are frozen at first", around)


def _choose_dtypes_of(i: int, param_group: Any, choose: Callable[[], None]) -> None:
    choose()
    if lacks_gradient_dtypes(param_group):
        set_gradient_dtypes_of(param_group, parameters_of(param_group)[i])


def _choose_fp32(param_group: Any, choose: Callable[[], None]) -> None:
    half = [p for p in parameters_of(param_group) if shard_of(p).dtype in (torch.bfloat16, torch.float16)]
    for parameter in half:
        keep_gradients_in(parameter, torch.float32)
    choose()
    if half and not lacks_gradient_dtypes(param_group):
        set_gradient_dtype(param_group, torch.float32)
