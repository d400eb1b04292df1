"""Reduce or gather numbers, tensors and nested dicts of them over all ranks.

Input: the same structure on every rank. Output: that structure with reduced or gathered values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.agreement import check_equal
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import control_device, current_device, group_in_use, world_size
from fsdp2_strategy.errors import ConfigError

Op = Literal["mean", "max", "sum"]
Path = tuple[Any, ...]

_REDUCTIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@collective
def all_reduce(data: Any, op: Op = "mean", *, copies: int = 1) -> Any:
    """Reduce a tensor, a number or a nested dict of them over all ranks; collective.

    Args:
        data: the structure, with the same keys, shapes and dtypes on every rank; it is not modified.
        op: ``"mean"``, ``"max"`` or ``"sum"``.
        copies: number of ranks that have the same values, and together count once in a sum.

    Returns:
        The same structure. Tensors keep their device and dtype, except that means of integer tensors are fp32. Numbers
        stay numbers; sums and maxima of integers are integers, exact up to 2^53.

    Raises:
        ConfigError: on every rank, if ``op`` is unknown or the structures differ.
    """
    if op not in _REDUCTIONS:
        raise ConfigError(f"cannot reduce: op is {op!r}, expected mean, max or sum.")
    leaves = _leaves("reduce", data)
    by_type: dict[tuple[torch.dtype, torch.device], list[Path]] = defaultdict(list)
    for path, value in leaves.items():
        tensor = _tensor(value)
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        dtype = torch.float32 if op == "mean" and is_integer else tensor.dtype
        by_type[dtype, _communication_device(value)].append(path)
    reduced: dict[Path, Any] = {}
    for (dtype, device), paths in by_type.items():
        sent = [_tensor(leaves[path]).to(device, dtype).reshape(-1) for path in paths]
        flat = torch.cat(sent)
        dist.all_reduce(flat, op=_REDUCTIONS[op], group=group_in_use())
        if op == "mean":
            flat = flat / world_size()
        elif op == "sum" and copies > 1:
            is_inexact = flat.is_floating_point() or flat.is_complex()
            flat = flat / copies if is_inexact else flat // copies
        for path, part in zip(paths, torch.split(flat, [len(s) for s in sent]), strict=True):
            reduced[path] = _restore_type(leaves[path], part, op)
    return _rebuilt(data, reduced.__getitem__)


@collective
def all_gather(data: Any) -> Any:
    """Gather a tensor, a number or a nested dict of them from all ranks; collective.

    Args:
        data: the structure, with the same keys, shapes and dtypes on every rank.

    Returns:
        The same structure. The tensors of all ranks are concatenated along the first dimension, in rank order. A number
        becomes a tensor with the numbers of all ranks.

    Raises:
        ConfigError: on every rank, if the structures differ.
    """
    leaves = _leaves("gather", data)

    def gather(value: Any) -> torch.Tensor:
        tensor = _tensor(value)
        tensor = tensor.reshape(1) if not tensor.ndim else tensor
        sent = tensor.to(_communication_device(value)).contiguous()
        parts = [torch.empty_like(sent) for _ in range(world_size())]
        dist.all_gather(parts, sent, group=group_in_use())
        return torch.cat(parts).to(tensor.device)

    gathered = {path: gather(value) for path, value in leaves.items()}  # in the order that is equal on all ranks
    return _rebuilt(data, gathered.__getitem__)


def _leaves(action: str, data: Any) -> dict[Path, Any]:
    """Return the leaves by path, or raise on every rank if the structures differ; collective.

    They are sorted, because another rank may have added the same keys to its dicts in another order.
    """
    leaves: dict[Path, Any] = {}
    wrong: list[str] = []

    def collect(value: Any, path: Path) -> None:
        if isinstance(value, Mapping):
            for key in value:
                collect(value[key], (*path, key))
        elif isinstance(value, torch.Tensor | int | float):
            leaves[path] = value
        else:
            wrong.append(f"{'/'.join(map(str, path)) or 'data'} is a {type(value).__name__}")

    collect(data, ())
    leaves = dict(sorted(leaves.items(), key=lambda leaf: [repr(key) for key in leaf[0]]))
    layout = [(path, tuple(_tensor(v).shape), _tensor(v).dtype) for path, v in leaves.items()]
    expected = "the same keys, shapes and dtypes on every rank. Fill in values that a rank does not have."
    check_equal(action, (layout, wrong), ConfigError, expected)
    if wrong:
        raise ConfigError(f"cannot {action}: {wrong[0]}, expected numbers, tensors and dicts of them. Convert it.")
    return leaves


def _rebuilt(data: Any, value_at: Callable[[Path], Any], path: Path = ()) -> Any:
    if isinstance(data, Mapping):
        return {key: _rebuilt(data[key], value_at, (*path, key)) for key in data}
    return value_at(path)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64)  # integers too, because another rank may have a float here


def _communication_device(value: Any) -> torch.device:
    """Return the device on which a value is communicated: for CPU values `control_device`, else the accelerator."""
    on_host = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    return control_device() if on_host else current_device()


def _restore_type(value: Any, flat: torch.Tensor, op: Op) -> Any:
    if isinstance(value, torch.Tensor):
        return flat.reshape(value.shape).to(value.device)
    number = float(flat.item())
    return int(number) if isinstance(value, int) and op != "mean" and number.is_integer() else number
