"""Check that all ranks shard the same model: with the same plan, the same options and the same weights.

Input: the plan and the parameters of this rank. Output: an error on every rank if they differ between ranks. Only
samples of the weights are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import check_equal
from fsdp2_strategy.errors import ShardError, some
from fsdp2_strategy.model.buffers import differing_numbers

_SAMPLES_PER_PARAMETER = 256


def check_same_everywhere(name: str, planned: object, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise on every rank if the ranks planned different units or hold different weights; collective.

    The ``repr`` of ``planned`` is compared, and a few hundred elements of each parameter that is not on meta.
    """
    expected = (
        "the same options, and a model with the same names, shapes, dtypes and frozen parameters in the same order, on "
        "every rank. Build it from the same configuration."
    )
    check_equal(f"shard {name}", planned, ShardError, expected)
    samples = {name: _sample(p) for name, p in parameters.items() if not p.is_meta}
    if different := differing_numbers(samples):
        raise ShardError(
            f"cannot shard {name}: {some(different, 'parameter')} of {len(samples)} differ between the ranks, "
            "expected the same weights on every rank. Set the same seed on every rank before "
            "building the model, or load the same files."
        )


def _sample(parameter: torch.Tensor) -> float:
    """Return a weighted sum of a few hundred elements; equal tensors have equal sums."""
    flat = parameter.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // _SAMPLES_PER_PARAMETER)].to("cpu", torch.float64)
    weights = torch.arange(1, picked.numel() + 1, dtype=torch.float64).sqrt()
    return float(picked.nan_to_num(nan=0.5).clamp(-1e30, 1e30) @ weights)
