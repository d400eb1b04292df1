"""Choose the dtypes in which parameters are stored and gathered, and in which their gradients are reduced.

Input: the precision settings, and a parameter with its name. Output: dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.model.names import matches


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision settings, and the dtypes that follow from them for each parameter."""

    half: torch.dtype | None
    """The half-precision compute dtype: that of ``fp16``, or else of ``bf16``; None if neither is set."""
    is_training: bool
    keep_fp32: tuple[str, ...]
    """Name patterns of parameters that are gathered in fp32."""
    use_mp_opt: bool
    """Whether the optimizer keeps the fp32 master weights; if so, shards have the compute dtype."""
    reduce_in_full_precision: bool
    """Reduce gradients in fp32 or wider. If False, use the compute dtype: half the traffic, but rounded gradients."""

    @classmethod
    def of(cls, config: StrategyConfig, *, is_training: bool) -> Self:
        """Return the precision that a configuration asks for."""
        return cls(
            half=torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None,
            is_training=is_training,
            keep_fp32=config.keep_fp32,
            use_mp_opt=config.use_mp_opt,
            reduce_in_full_precision=config.reduce_in_full_precision,
        )

    def compute_dtype(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is gathered and used in computations."""
        if not parameter.is_floating_point():
            return parameter.dtype
        if matches(name, self.keep_fp32):
            return torch.float32
        if self.half is not None:
            return self.half
        return _at_least_fp32(parameter.dtype) if self.is_training else parameter.dtype

    def unsharded_dtype(self, parameters: Mapping[str, torch.Tensor]) -> torch.dtype:
        """Return the dtype in which a module that is not sharded is stored and computes, given its parameters."""
        floating = {name: p for name, p in parameters.items() if p.is_floating_point()}
        dtypes = [self.compute_dtype(name, p) for name, p in floating.items()]
        if self.is_training and any(p.requires_grad for p in floating.values()):
            dtypes.append(torch.float32)
        return max(dtypes, key=lambda d: d.itemsize, default=self.half or torch.float32)

    def reduce_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradients of a unit are summed over the ranks."""
        return _at_least_fp32(compute_dtype) if self.reduce_in_full_precision else compute_dtype

    def stored_dtype(self, parameter: torch.Tensor, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter's shard: fp32 or wider for trained ones, unless the optimizer has masters.

        Other parameters are stored in the compute dtype. One exception: in training without half precision, a frozen
        parameter whose dtype is narrower than fp32 keeps its dtype, although it is gathered in fp32.
        """
        if not parameter.is_floating_point():
            return parameter.dtype
        if self.is_training and parameter.requires_grad:
            return compute_dtype if self.use_mp_opt else _at_least_fp32(compute_dtype)
        if self.is_training and self.half is None and compute_dtype == torch.float32:
            return parameter.dtype if parameter.element_size() <= compute_dtype.itemsize else compute_dtype
        return compute_dtype


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
