"""Compare batches and losses between ranks that must have the same ones.

Input: the batches or losses of this and other ranks. Output: the facts about batches that are compared, and an error on
every rank if they differ.

[Note: later comparisons] Values of an accelerator cannot be compared without waiting for it. So their checksums are
compared by the next optimizer step, which waits for the accelerator in any case, and raises before the weights change.
Shapes, dtypes and values in host memory are compared at once: batches of other shapes would not get so far. Without
gradients, there is no step, and everything is compared at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.accelerator import on_accelerator
from fsdp2_strategy.distributed.lost_ranks import agreed_error
from fsdp2_strategy.distributed.process_group import control_device, group_in_use, ranks_of, world_size

_LOSS_TOLERANCE = {"rtol": 1e-2, "atol": 1e-4}
"""The second is for losses that are nearly zero, such as those of a policy whose advantages have the mean zero."""
_MOST_LATER = 256
"""So many values are compared without a step: a loop may step by itself."""


@dataclass(frozen=True, slots=True)
class Later:
    """Values on an accelerator of which the next step compares what ``size`` successive ranks have."""

    names: tuple[str, ...]
    """Arguments of the batch; empty for a loss."""
    values: torch.Tensor
    """Their checksums, int64; or the loss, float64 with one element."""
    size: int
    shared: str
    """What these ranks share: "layers" or "sequences"."""


_later: WeakKeyDictionary[Any, list[Later]] = WeakKeyDictionary()
"""What the next step compares, by the default process group."""


def facts_of(batch: Mapping[str, Any], at_once: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that are compared at once, and the checksums that the next step compares; not collective.

    Facts are shape, dtype and checksum of each tensor, and numbers as they are. Checksums on an accelerator are for the
    step, but for the arguments ``at_once``. See [Note: later comparisons].
    """
    numbers = {name: value for name, value in sorted(batch.items()) if isinstance(value, int | float)}
    tensors = {name: value for name, value in sorted(batch.items()) if _is_plain(value)}
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    chosen = at_once if torch.is_grad_enabled() else tensors
    later = {name: own for name, own in sums.items() if on_accelerator(own) and name not in chosen}
    now = [own for name, own in sums.items() if name not in later]
    read = iter(torch.stack(now).tolist() if len({own.device for own in now}) == 1 else [int(own) for own in now])
    facts = {name: (tuple(t.shape), str(t.dtype), None if name in later else next(read)) for name, t in tensors.items()}
    return facts | numbers, later


def compare_later(sums: Mapping[str, torch.Tensor], size: int, shared: str) -> None:
    """Record checksums that the next step compares between ``size`` successive ranks; collective after very many."""
    if sums:
        _add(Later(tuple(sums), torch.stack([*sums.values()]), size, shared))


def _add(later: Later) -> None:
    found = _later.setdefault(dist.group.WORLD, [])
    found.append(later)
    if len(found) >= _MOST_LATER:
        check_later(take_later())


def take_later() -> list[Later]:
    """Return what is to be compared, on its way to host memory, and forget it; not collective.

    The values can be read after the host has waited for the stream that is current now.
    """
    return [
        Later(later.names, later.values.to("cpu", non_blocking=True), later.size, later.shared)
        for later in _later.pop(dist.group.WORLD, [])
    ]


def check_later(comparisons: Sequence[Later]) -> None:
    """Raise on every rank if values of `take_later` differ; collective if there are any."""
    if not comparisons:
        return
    own = torch.cat([later.values.view(torch.int64) for later in comparisons]).to(control_device())
    of_ranks = _gathered(own).cpu()
    ends = torch.tensor([len(later.values) for later in comparisons]).cumsum(0).tolist()
    for later, end in zip(comparisons, ends, strict=True):
        found = of_ranks[:, end - len(later.values) : end]
        if not later.names:
            _check_losses(found.contiguous().view(torch.float64).view(-1, later.size))
            continue
        groups = found.view(-1, later.size, len(later.names))
        differs = (groups != groups[:, :1]).nonzero()
        if len(differs):
            group, place, _ = differs[0].tolist()
            names = [name for n, name in enumerate(later.names) if groups[group, place, n] != groups[group, 0, n]]
            raise _batches_differ(names, group * later.size, place, later.size, later.shared)


def check_batches_of_groups(batch: Mapping[str, Any], size: int) -> None:
    """Raise on every rank if a batch differs within a group of ``size`` successive ranks; collective.

    Values of an accelerator are compared by the next step.
    """
    facts, later = facts_of(batch, at_once=())
    digest = hashlib.sha256(repr(facts).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(control_device())
    groups = _gathered(own).view(-1, size, len(own))
    if bool((groups == groups[:, :1]).all()):
        compare_later(later, size, "layers")
        return
    of_ranks: list[dict[str, Any]] = [{}] * world_size()
    dist.all_gather_object(of_ranks, facts, group=group_in_use())
    for begin in range(0, len(of_ranks), size):
        for place, other in enumerate(of_ranks[begin : begin + size]):
            if names := differing_names(of_ranks[begin], other):
                raise _batches_differ(names, begin, place, size, "layers")


def _batches_differ(names: Sequence[str], begin: int, place: int, size: int, shared: str) -> Exception:
    """Return the error of ranks of the group in use; they begin at ``begin``, and the one at ``place`` differs."""
    sharing = ranks_of(group_in_use())[begin : begin + size]
    return agreed_error(
        f"cannot compute a batch: {', '.join(names)} of rank {sharing[place]} differ from those of rank {sharing[0]}, "
        f"expected the same batch on the ranks {', '.join(map(str, sharing))}, which share {shared}. Draw batches by "
        "strategy.dp_rank and strategy.dp_size."
    )


def check_losses_of_groups(loss: torch.Tensor, size: int) -> None:
    """Raise on every rank if the loss differs by more than rounding within ``size`` successive ranks; collective.

    A loss of an accelerator is compared by the next step.
    """
    own = loss.detach().reshape(1).to(torch.float64)
    if on_accelerator(own):
        _add(Later((), own.clone(), size, "layers"))
    else:
        _check_losses(_gathered(own.to(control_device())).view(-1, size))


def _check_losses(groups: torch.Tensor) -> None:
    """Raise if losses differ within a row: the ranks of the group in use, in their order."""
    is_close = torch.isclose(groups, groups[:, :1], **_LOSS_TOLERANCE, equal_nan=True)
    if bool(is_close.all()):
        return
    ranks, size = ranks_of(group_in_use()), groups.shape[1]
    first = int((~is_close).any(dim=1).nonzero()[0])
    sharing = ranks[first * size :][:size]
    raise agreed_error(
        f"cannot run backward: the losses of the ranks {', '.join(map(str, sharing))} are "
        f"{', '.join(f'{value:.6g}' for value in groups[first].tolist())}, expected equal losses, because these ranks "
        "share layers. Compute the loss from the same labels, advantages and masks on these ranks: draw data by "
        "strategy.dp_rank and strategy.dp_size."
    )


def _gathered(own: torch.Tensor) -> torch.Tensor:
    """Return the one-dimensional tensors of all ranks of the group in use, stacked; collective."""
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own, group=group_in_use())
    return torch.stack(gathered)


def differing_names(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose facts differ."""
    return [name for name in {**first, **other} if first.get(name) != other.get(name)]


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that changes if a value or the order of the values changes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).to(torch.int64)
    return (bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum()
