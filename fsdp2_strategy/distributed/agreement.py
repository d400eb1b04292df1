"""Agreement: phases of work that end alike on every rank, and values that all ranks share.

Input: what one rank met or holds. Output: one decision, error or value on all of them.

[Note: one decision] An error that one rank meets alone would leave the others waiting in their next collective until
its time-out. So each phase of a collective call runs inside `all_or_none`: it ends with the all-reduce of one flag,
and only when that flag is up are the texts gathered and the error raised, everywhere, in milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import control_device, group_in_use, is_rank_0, world_size
from fsdp2_strategy.errors import FSDP2StrategyError

T = TypeVar("T")


@contextmanager
def all_or_none(action: str, error: type[FSDP2StrategyError]) -> Iterator[None]:
    """End a phase of work alike on every rank: all go on, or all raise ``error``; collective.

    See [Note: one decision]. The message names the failing rank and its cause. Phases nest: where one rank fails in the
    outer and the others wait in an inner one, all of them raise.

    Raises:
        FSDP2StrategyError: of the given class, on every rank, when any rank failed inside.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as failure:
        if getattr(failure, "is_agreed", False):
            raise  # they have heard of it, in an inner phase or in this one
        cause = failure
    if not any_rank(cause is not None):
        return
    texts: list[str | None] = [None] * world_size()
    own = None if cause is None else _text(cause)
    dist.all_gather_object(texts, own, group=group_in_use())
    failed = {number: text for number, text in enumerate(texts) if text is not None}
    first, text = next(iter(failed.items()))
    others = f" (and on ranks {', '.join(map(str, list(failed)[1:]))})" if len(failed) > 1 else ""
    same = len(set(failed.values())) == 1 and len(failed) == len(texts)
    agreed = error(text if same else f"cannot {action}: failed on rank {first}{others}: {text}")
    agreed.is_agreed = True
    raise agreed from cause


def _text(cause: Exception) -> str:
    return str(cause) if isinstance(cause, FSDP2StrategyError) else f"{type(cause).__name__}: {cause}"


def any_rank(own: bool) -> bool:
    """Say whether any rank says yes; collective."""
    flag = torch.tensor(float(own), device=control_device())
    dist.all_reduce(flag, group=group_in_use())
    return bool(flag.item())


def agree(action: str, value: object, error: type[FSDP2StrategyError], expected: str) -> None:
    """Raise on every rank where the ranks hold different values; collective.

    Args:
        action: what cannot be done otherwise.
        value: anything with a faithful ``repr``.
        error: class of the error.
        expected: what should be the same, and what to do about it.
    """
    digest = hashlib.sha256(repr(value).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(control_device())
    digests = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(digests, own, group=group_in_use())
    odd = [number for number, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if odd:
        raise error(f"cannot {action}: ranks {odd} differ from rank 0, expected {expected}")


def to_rank_0(value: T) -> list[T]:
    """Return all ranks' values on rank 0, an empty list elsewhere; collective."""
    values: list[Any] = [None] * world_size() if is_rank_0() else []
    dist.gather_object(value, values or None, group_dst=0, group=group_in_use())
    return values


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank; collective."""
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group_in_use(), device=control_device())
    return box[0]
