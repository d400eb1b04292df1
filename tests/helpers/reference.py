"""The unsharded model, in one process: what sharded training is compared with."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import build_optimizer
from fsdp2_strategy.model.names import named_parameters

CPU = torch.device("cpu")
Loss = Callable[[nn.Module, Any], torch.Tensor]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor; collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather copies of many tensors, in host memory; collective.

    Shards of all ranks on the CPU travel together and are put together by their placements: a tenth of the time of
    `full`, and none of the code of DTensor.
    """
    whole, shards = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() == dist.get_world_size() and tensor.device == CPU:
            shards[name] = tensor.detach().to_local()
        else:
            whole[name] = full(tensor).to(CPU, copy=True)
    if shards:
        of_ranks = _all_gather(shards)
        for name in shards:
            tensor = tensors[name]
            parts = [of_ranks[rank][name] for rank in tensor.device_mesh.mesh.flatten().tolist()]
            whole[name] = _put_together(parts, tensor.device_mesh.shape, tensor.placements)
            assert whole[name].shape == tensor.shape, name
    return {name: whole[name] for name in tensors}


def _all_gather(shards: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return what each rank holds under the names, of shapes of its own."""
    shapes: list[dict[str, torch.Size]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shapes, {name: tuple(shard.shape) for name, shard in shards.items()})
    dtypes = {name: shard.dtype for name, shard in shards.items()}
    sizes = [sum(math.prod(s) * dtypes[n].itemsize for n, s in of_rank.items()) for of_rank in shapes]
    flat = [shard.contiguous().flatten().view(torch.uint8) for shard in shards.values()]
    ours = torch.cat([*flat, torch.zeros(max(sizes) - sizes[dist.get_rank()], dtype=torch.uint8)])
    of_ranks = [torch.empty_like(ours) for _ in shapes]
    dist.all_gather(of_ranks, ours)
    found = []
    for of_rank, values in zip(shapes, of_ranks, strict=True):
        parts = values[: sizes[len(found)]].split([math.prod(s) * dtypes[n].itemsize for n, s in of_rank.items()])
        pairs = zip(of_rank.items(), parts, strict=True)
        found.append({n: part.clone().view(dtypes[n]).reshape(shape) for (n, shape), part in pairs})
    return found


def _put_together(parts: list[torch.Tensor], shape: Sequence[int], placements: Sequence[Any]) -> torch.Tensor:
    """Join the shards of a mesh, the last of whose dimensions changes fastest from shard to shard."""
    if not shape:
        return parts[0]
    size = len(parts) // shape[0]
    inner = [_put_together(parts[i : i + size], shape[1:], placements[1:]) for i in range(0, len(parts), size)]
    return torch.cat(inner, placements[0].dim) if placements[0].is_shard() else inner[0]


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return full_tensors(named_parameters(model))


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return full_tensors({name: p.grad for name, p in named_parameters(model).items() if p.grad is not None})


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, what: str
) -> None:
    """Compare tensors by name, each by the norm of its difference relative to the largest norm of all."""
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())
    largest = max((t.double().norm().item() for t in expected.values()), default=0.0)
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, (what, name)
        # A tensor that is tiny beside the others is noise of its own: floor its scale.
        scale = max(tensor.double().norm().item(), 1e-3 * largest)
        error = (actual[name].cpu().double() - tensor.cpu().double()).norm().item() / max(scale, 1e-30)
        assert error <= tolerance, f"{what} {name}: {error:.3g} > {tolerance:.3g}"


def assert_parameters_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Compare parameters element by element, relative to the largest element of their tensor."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, tensor in expected.items():
        difference = actual[name].cpu().double() - tensor.cpu().double()
        error = difference.abs().max().item() / tensor.abs().max().item()
        assert error <= tolerance, f"parameter {name}: {error:.3g} > {tolerance:.3g}"


class Unsharded:
    """Train a copy of a model on the batches of all ranks, in this process.

    ``ranks`` is the number of ranks that gradients are averaged over: of those that do not share batches.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, *, max_norm: float = 0.0, ranks: int | None = None, **options: Any
    ) -> None:
        self.model = copy.deepcopy(model)
        self.loss = loss
        self.max_norm = max_norm
        self.ranks = ranks or dist.get_world_size()
        self.optimizer = build_optimizer(self.model, **options)
        self.grads: dict[str, torch.Tensor] = {}

    def step(self, batches: Sequence[Any], *, scale: float = 1.0) -> tuple[list[float], float]:
        """Take one optimizer step on all batches of all ranks; return their losses and the norm before clipping.

        Each loss is multiplied by ``scale`` before its backward, as sharded training does, and the gradients are
        averaged over the ranks after it: where a model computes parts in fp32, the place of a division shows.
        """
        losses = []
        for batch in batches:
            loss = self.loss(self.model, batch)
            (loss * scale).backward()
            losses.append(loss.item())
        parameters = named_parameters(self.model)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.ranks
        self.grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norm = math.sqrt(sum(g.double().square().sum().item() for g in self.grads.values()))
        if self.max_norm and norm > self.max_norm:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad *= self.max_norm / (norm + 1e-6)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm


class MixedPrecision(nn.Module):
    """The arithmetic of mixed precision, unsharded: fp32 parameters, a bf16 copy of each for every forward."""

    def __init__(self, model):
        super().__init__()
        self.inner = copy.deepcopy(model)

    def forward(self, **inputs):
        low = {n: p.to(torch.bfloat16) if p.ndim else p for n, p in self.inner.named_parameters()}
        inputs = {
            k: v.to(torch.bfloat16) if getattr(v, "dtype", None) == torch.float32 else v for k, v in inputs.items()
        }
        return torch.func.functional_call(self.inner, low, kwargs=inputs)


class CountCollectives(TorchDispatchMode):
    """Count the collectives that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._schema.name.split("::")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def same_on_all_ranks(value: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


def resident(which):
    """Return the bytes of memory that this process holds (VmRSS), or has held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)[which].split()[0]) * 1024
