"""Keep the persistent buffers of a model equal on all ranks while training changes them.

Input: a sharded model. Output: buffers that are equal on all ranks after each optimizer step.

[Note: changing buffers] Batch norm and EMA codebooks update buffers in forward, from the samples of one rank. A
checkpoint contains rank 0's buffers, so without a synchronisation an evaluation on another rank uses other values than
the ones that are saved. PyTorch counts the changes of a tensor (``_version``), except those of ``F.batch_norm``. So a
change of one buffer, such as a count of batches, counts as a change of all buffers of its module. A step compares the
counters with those of the previous step, and sends one flag with the sum of the gradient norm, which costs nothing.
Only if a buffer has changed on any rank, the ranks exchange which ones, and then their values in one flat tensor per
dtype. Non-persistent buffers are not synchronised: they are computed from other values, such as the length of a rank's
own sequences.

Buffers are paired by name: ranks may register them in another order. The ranks compare a digest of the names and dtypes
in the same sum as the flag. A buffer that is registered in several modules has the first of its names in alphabetical
order.

"broadcast" is the default, as in DistributedDataParallel: rank 0's buffers belong together, and are what one process
would have. "mean" averages floating-point buffers, which uses the samples of all ranks; but averages of buffers that
depend on each other (a codebook and its counts) may no longer fit together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.agreement import check_equal
from fsdp2_strategy.distributed.equal_values import digest_numbers
from fsdp2_strategy.distributed.process_group import control_device, current_device, group_in_use, ranks_of, world_size
from fsdp2_strategy.distributed.torch_internals import BATCH_NORMS, changes_of, non_persistent_buffers
from fsdp2_strategy.errors import CheckpointError, FSDP2StrategyError, StepError
from fsdp2_strategy.model.names import clean, named_modules
from fsdp2_strategy.model.state import Slot, model_state

_Seen = dict[str, tuple[torch.Tensor, int]]
_SEEN = Slot[_Seen]("persistent buffers at the last step")
"""Each buffer with its number of changes. The tensors are kept, so that a new tensor is never taken for an old one."""


_STATISTIC = re.compile(
    r"(^|_|\.)(mean|std|stdev|stddev|var|variance|min|max|low|high|median|q\d+|p\d+|quantiles?|percentiles?|count|stats?)"
    r"(s|es)?(\d*)($|_|\.)"
)
_NORMALISER = re.compile(r"(un|de)?normali[sz]|statistics", re.IGNORECASE)


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module normalises by statistics that it keeps of its inputs, as BatchNorm does."""
    return isinstance(module, BATCH_NORMS) and module.running_mean is not None


def is_statistic(module_name: str, module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer is a statistic of data: of BatchNorm, of a normaliser, or by its name."""
    is_normaliser = _NORMALISER.search(f"{module_name}.{type(module).__name__}") is not None
    return keeps_statistics(module) or is_normaliser or _STATISTIC.search(buffer) is not None


def remember_buffers(root: nn.Module) -> None:
    """Store the state of all persistent buffers, as equal on all ranks; not collective."""
    model_state(root).set(_SEEN, {name: (b, changes_of(b)) for name, b in _plain_buffers(root).items()})


def changed_buffers(root: nn.Module) -> tuple[bool, list[float]]:
    """Return whether any buffer has changed since the last step, and `digest_numbers` of all names and dtypes."""
    seen = model_state(root).get(_SEEN)
    buffers = {} if seen == {} else _plain_buffers(root)  # walking the modules of a large model takes milliseconds
    facts = [(name, buffer.dtype) for name, buffer in buffers.items()]
    return bool(_changed(seen or {}, buffers)), digest_numbers(facts)


def check_same_buffers(root: nn.Module, action: str, error: type[FSDP2StrategyError]) -> None:
    """Raise ``error`` on every rank if the names or dtypes of persistent buffers differ between ranks; collective."""
    _check_same(_plain_buffers(root), action, error)


def _check_same(buffers: Mapping[str, torch.Tensor], action: str, error: type[FSDP2StrategyError]) -> None:
    facts = [(name, buffer.dtype) for name, buffer in buffers.items()]
    expected = "persistent buffers with the same names and dtypes on all ranks. Register the same buffers on every rank"
    check_equal(action, facts, error, f"{expected}, or register those that differ with persistent=False.")


def sync_buffers(root: nn.Module, mode: str) -> None:
    """Make the persistent buffers that have changed on any rank equal on all ranks; collective.

    ``mode`` is "broadcast" or "mean", see [Note: changing buffers]. Raises StepError on every rank if sizes differ.
    """
    buffers = _plain_buffers(root)
    changed = _changed(model_state(root).get(_SEEN) or {}, buffers)
    flat: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for name in _changed_on_any_rank(buffers, changed):
        flat[buffers[name].device, buffers[name].dtype].append(buffers[name].detach())
    group = group_in_use()
    first = ranks_of(group)[0]
    for (_, dtype), tensors in flat.items():
        values = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(current_device())
        if mode == "mean" and dtype.is_floating_point:
            sums = values.to(torch.float32 if dtype.itemsize < 4 else dtype)
            dist.all_reduce(sums, group=group)
            values = (sums / world_size()).to(dtype)
        else:
            dist.broadcast(values.view(torch.uint8), src=first, group=group)  # not all backends know all dtypes
        parts = torch.split(values, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
    remember_buffers(root)


def differing_buffers(root: nn.Module) -> list[str]:
    """Return the names of the persistent buffers whose values differ between the ranks; collective."""
    buffers = _plain_buffers(root)
    _check_same(buffers, "compare the buffers", CheckpointError)
    return differing_numbers({name: _sum(buffer) for name, buffer in buffers.items()}) if buffers else []


def differing_numbers(numbers: Mapping[str, float]) -> list[str]:
    """Return the names of the numbers that differ between the ranks, which have the same names; collective."""
    own = torch.tensor(list(numbers.values()), dtype=torch.float64, device=control_device())
    extremes = torch.stack([own, -own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group_in_use())
    return [name for name, spread in zip(numbers, extremes.sum(dim=0).tolist(), strict=True) if spread]


def _sum(buffer: torch.Tensor) -> float:
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return float(values.detach().double().sum().nan_to_num())


@contextmanager
@torch.no_grad()
def unchanged_buffers(model: nn.Module) -> Iterator[dict[str, None]]:
    """Restore all buffers of a model after the block; yield a dict that then has the names of those that changed."""
    before = {
        (module, name): (buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    }
    changed: dict[str, None] = {}
    try:
        yield changed
    finally:
        for prefix, module in model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if (module, name) not in before:
                    del module._buffers[name]
                    continue
                old, values = before[module, name]
                if buffer is not old or not (buffer.is_meta or torch.equal(buffer, values)):
                    changed[f"{prefix}.{name}" if prefix else name] = None
                    module._buffers[name] = old
                    old.copy_(values)


def _plain_buffers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that are not sharded, sorted by name, whatever the order of registration is."""
    names: dict[int, str] = {}
    found: dict[int, torch.Tensor] = {}
    for prefix, module in named_modules(root, remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is None or isinstance(buffer, DTensor) or buffer.is_meta or key in non_persistent_buffers(module):
                continue
            name = clean(f"{prefix}.{key}" if prefix else key)
            names[id(buffer)] = min(name, names.get(id(buffer), name))
            found[id(buffer)] = buffer
    return {name: found[key] for key, name in sorted(names.items(), key=lambda item: item[1])}


def _changed(seen: _Seen, buffers: Mapping[str, torch.Tensor]) -> set[str]:
    own = {n for n, b in buffers.items() if n not in seen or seen[n][0] is not b or seen[n][1] != changes_of(b)}
    modules = {name.rpartition(".")[0] for name in own}
    return {name for name in buffers if name.rpartition(".")[0] in modules}


def _changed_on_any_rank(buffers: Mapping[str, torch.Tensor], changed: set[str]) -> list[str]:
    """Return the names of the buffers that have changed on any rank; StepError if a size differs; collective."""
    facts = torch.tensor([[n in changed, b.numel(), -b.numel()] for n, b in buffers.items()], device=control_device())
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=group_in_use())
    names = []
    for name, (has_changed, most, least) in zip(buffers, facts.tolist(), strict=True):
        if has_changed and most != -least:
            raise StepError(
                f"cannot synchronise the buffer {name}: it has {-least} to {most} elements, expected the same number "
                "on all ranks. Pass sync_buffers='off', or register it with persistent=False."
            )
        names += [name] if has_changed else []
    return names
