"""Put tensor-parallel parameters together by how they were split, and not by the code of DTensor."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.model.names import named_parameters
from helpers.models import on_device
from helpers.reference import (
    Unsharded,
    _all_gather,
    assert_close,
    assert_parameters_close,
    full_parameters,
    same_on_all_ranks,
)
from helpers.split import InFloat64, targets_of

LENGTH = 14
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def whole_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather tensors; collective over all ranks.

    First a tensor was split along the axis "tp", in one part or in two halves, or along "ep"; then `fully_shard` split
    what each rank had by rows.
    """
    of_ranks = _all_gather({name: _local(tensor) for name, tensor in tensors.items()})
    return {
        name: _whole(tensor, [own[name] for own in of_ranks]) if isinstance(tensor, DTensor) else of_ranks[0][name]
        for name, tensor in tensors.items()
    }


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return whole_tensors(named_parameters(model))


def whole_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return whole_tensors({name: p.grad for name, p in named_parameters(model).items() if p.grad is not None})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()


def _whole(tensor: DTensor, of_ranks: list[torch.Tensor]) -> torch.Tensor:
    mesh = tensor.device_mesh
    axes: Any = dict(zip(mesh.mesh_dim_names, tensor.placements, strict=True))
    ranks = mesh.mesh
    if "replicate" in axes:
        _check_equal(of_ranks, ranks)
        ranks = ranks[0]
    split = "ep" if "ep" in axes else "tp"
    if split not in axes:
        ranks = ranks[..., None]
    # [shard, tp] -> one tensor for each rank of "tp"
    parts = [torch.cat([of_ranks[rank] for rank in column]) for column in ranks.T.tolist()]
    placed = axes.get(split)
    if placed is None or placed.is_replicate():
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    halves = getattr(placed, "split_factor", 1)
    apart = [part.tensor_split(halves, placed.dim) for part in parts]
    whole = torch.cat([of_rank[half] for half in range(halves) for of_rank in apart], placed.dim)
    assert whole.shape == tensor.shape, (tensor.placements, whole.shape, tensor.shape)
    return whole


def _check_equal(of_ranks: list[torch.Tensor], ranks: torch.Tensor) -> None:
    for replicas in ranks.flatten(1).T.tolist():
        assert all(torch.equal(of_ranks[rank], of_ranks[replicas[0]]) for rank in replicas)


def batch_for(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return two sequences in which each token of a tiny vocabulary can occur."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.get_text_config().vocab_size
    return on_device({"input_ids": torch.randperm(size, generator=generator)[: 2 * LENGTH].view(2, LENGTH)})


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a cross-entropy outside of the model, in float64 if the model has this dtype."""
    is_double = next(model.parameters()).dtype == torch.float64
    with InFloat64() if is_double else nullcontext():
        logits = model(**batch, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets_of(batch).flatten())


def train_beside_reference(
    model: nn.Module,
    strategy: FSDPV2Strategy,
    *,
    tolerances: tuple[float, float],
    steps: int = 3,
    accumulation: int = 1,
    loss: Any = loss_of,
    batches: Any = None,
    eps: float = 1e-6,
    **prepared: Any,
) -> None:
    """Train a model and its unsharded copy side by side; compare gradients, norm and parameters at each step.

    With a smaller ``eps``, AdamW would amplify the rounding of gradients that are zero but for rounding.
    """
    options = OPTIONS | {"eps": eps}
    of_gradients, of_parameters = tolerances
    batches = batches or (lambda seed: batch_for(model, seed))
    size, rank = strategy.dp_size, strategy.dp_rank
    unsharded = Unsharded(model, loss, max_norm=strategy.config.max_norm, ranks=size, **options)
    strategy.prepare_model(model, is_training=True, **prepared)
    optimizer = strategy.create_optimizer(model, **options)
    for step in range(steps):
        micro = [[batches(1000 * step + 10 * a + r) for r in range(size)] for a in range(accumulation)]
        losses, norm = unsharded.step([b for row in micro for b in row], scale=1 / accumulation)
        for a in range(accumulation):
            value = loss(model, micro[a][rank])
            assert value.item() == pytest.approx(losses[a * size + rank], rel=of_gradients)
            strategy.backward(value, model, optimizer)
            grads = whole_grads(model) if a == accumulation - 1 else None
            result = strategy.optimizer_step(optimizer, model, None)
        assert grads is not None
        missing = unsharded.grads.keys() - grads.keys()
        assert not [name for name in missing if unsharded.grads[name].any()], missing
        assert_close(grads, {name: unsharded.grads[name] for name in grads}, of_gradients, "gradient")
        assert result.grad_norm == pytest.approx(norm, rel=of_gradients)
        assert result.loss == pytest.approx(sum(losses) / len(losses), rel=of_gradients)
        assert same_on_all_ranks(result.grad_norm)
        assert_parameters_close(whole_parameters(model), full_parameters(unsharded.model), of_parameters)
    assert result.step == steps
