"""Every rank shards the same model: the same names and options, and weights that agree in samples.

Input: what this rank plans. Output: an error on every rank where another plans, or holds, something else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy.distributed.agreement import agree
from fsdp2_strategy.distributed.process_group import control_device, group_in_use
from fsdp2_strategy.errors import ShardError

_SAMPLES_PER_PARAMETER = 256


def check_same_everywhere(name: str, planned: object, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise on every rank where the ranks planned different units or hold different weights; collective.

    Args:
        name: of the model, for the error.
        planned: units and options, with a faithful ``repr``.
        parameters: by name; a few hundred elements of each that is not on meta are compared.

    Raises:
        ShardError: they did, or do.
    """
    expected = (
        "the same options, and a model with the same names, shapes, dtypes and frozen parameters, everywhere. Build it "
        "from the same configuration."
    )
    agree(f"shard {name}", planned, ShardError, expected)
    parameters = {name: p for name, p in parameters.items() if not p.is_meta}
    samples = torch.tensor([_sample(p) for p in parameters.values()], dtype=torch.float64, device=control_device())
    extremes = torch.stack([samples, -samples])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group_in_use())
    different = [name for name, spread in zip(parameters, extremes.sum(dim=0).tolist(), strict=True) if spread]
    if different:
        raise ShardError(
            f"cannot shard {name}: {len(different)} of {len(parameters)} parameters differ "
            f"between the ranks, {different[0]} first, expected the same weights everywhere. Seed every rank alike "
            "before building the model, or load the same files."
        )


def _sample(parameter: torch.Tensor) -> float:
    """Return a number that two tensors share when a few hundred of their elements are equal."""
    flat = parameter.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // _SAMPLES_PER_PARAMETER)].to("cpu", torch.float64)
    weights = torch.arange(1, picked.numel() + 1, dtype=torch.float64).sqrt()
    return float(picked.nan_to_num(nan=0.5).clamp(-1e30, 1e30) @ weights)
