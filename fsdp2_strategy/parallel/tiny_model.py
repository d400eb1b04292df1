"""Build tiny models, on which the features of this package are tried before they change a model.

Input: a class of models, and a tiny configuration. Output: a model on the CPU, with the same weights on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.generators import restored_generators
from fsdp2_strategy.hf.library_internals import (
    set_attention_implementation,
    set_attention_implementations,
    set_experts_implementation,
    supports_sdpa,
)

SEED = 0


def build_tiny(make: Callable[[Any], Any], config: Any, dtype: torch.dtype, *, noise: float = 0.0) -> Any:
    """Build a model for evaluation, and add normal numbers of the standard deviation ``noise`` to its weights."""
    set_experts_implementation(config.get_text_config(), "eager")
    with restored_generators(SEED), torch.device("cpu"):
        tiny = make(config).to(dtype).eval()
        if noise:
            add_noise(tiny, noise)
    return tiny


def add_noise(model: nn.Module, noise: float, generator: torch.Generator | None = None) -> None:
    """Add normal numbers of the standard deviation ``noise`` to the weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=noise)


def use_attention_of_cpu(config: Any, cls: type[nn.Module], implementation: str) -> None:
    """Make a tiny configuration use an attention implementation, or the most similar one that a CPU has."""
    has_sdpa = supports_sdpa(cls)
    if implementation not in ("eager", "sdpa"):
        implementation = "sdpa" if has_sdpa else "eager"
    set_attention_implementations(config, implementation if has_sdpa else "eager")
    set_attention_implementation(config.get_text_config(), implementation)
