"""Collectives that make every rank raise the same error or use the same value.

Input: an error or a value of each rank. Output: the same error, decision or value on all ranks.

[Note: agreed errors] If one rank raised an error alone, the others would wait in their next collective until its
time-out. So each phase of a collective call runs inside `all_or_none`, which ends with the all-reduce of one flag. If a
rank has set the flag, the error texts are gathered and every rank raises. What this means for collectives that some
ranks have begun is in [Note: groups after a failure] in `unusable_groups`.

[Note: deferred errors] A call that is not collective, such as writing a metric on rank 0, cannot agree with the other
ranks. It defers its error: the next optimizer step sends a flag with the sum of the gradient norm, which costs nothing.
If a rank has set the flag, every rank raises before the gradients are scaled, so the step can be called again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.equal_values import digest_numbers, is_equal
from fsdp2_strategy.distributed.lost_ranks import add_note_outside_calls, is_lost_rank
from fsdp2_strategy.distributed.out_of_memory import snapshot_text
from fsdp2_strategy.distributed.process_group import control_device, group_in_use, is_rank_0, world_size
from fsdp2_strategy.distributed.unit_log import current_log, run_noted
from fsdp2_strategy.distributed.unusable_groups import begun_collectives, mark_unusable, unpaired_group
from fsdp2_strategy.errors import FSDP2StrategyError, StepError

T = TypeVar("T")

_deferred: list[FSDP2StrategyError] = []


class Terms:
    """Values that are equal on all ranks, and a number of rank 0, which travel with the flag of an `all_or_none`."""

    def __init__(self) -> None:
        self._equal: list[tuple[object, str]] = []
        self.number = 0
        """Within the block, the number that rank 0 sends; after the block, rank 0's number on every rank."""

    def require_equal(self, value: object, expected: str) -> None:
        """Raise after the block if the ``repr`` of a value differs between ranks; ``expected`` ends the text."""
        self._equal.append((value, expected))

    def numbers(self) -> list[float]:
        """Return the numbers to sum over the ranks."""
        own = float(self.number) if is_rank_0() else 0.0
        return [own, *digest_numbers([value for value, _ in self._equal])]

    def check(self, sums: list[float], action: str, error: type[FSDP2StrategyError]) -> None:
        """Take rank 0's number from the sums of `numbers`; raise if a value differs; collective if one does."""
        number, *digests = sums
        self.number = int(number)
        if not is_equal(digests, world_size()):
            for value, expected in self._equal:
                check_equal(action, value, error, expected)


@contextmanager
def all_or_none(action: str, error: type[FSDP2StrategyError], *, has_terms: bool = False) -> Iterator[Terms]:
    """Raise ``error`` on every rank if the block raised on any rank; collective.

    See [Note: agreed errors]. The message names the first failing rank and contains the text of its error. If all ranks
    fail with the same text, the message is this text. Blocks may be nested: if one rank fails in the outer block while
    the others wait in an inner one, all ranks raise.

    With ``has_terms``, the same all-reduce compares values: see `Terms`, which the block gets.

    Raises:
        FSDP2StrategyError: of the given class, on every rank, if the block raised on any rank, or values differ.
    """
    cause: Exception | None = None
    terms = Terms()
    try:
        yield terms
    except Exception as failure:
        if getattr(failure, "is_agreed", False) or is_lost_rank(failure):
            raise  # an inner block made all ranks raise this error, or they can no longer agree on one
        cause = failure
    try:
        has_failed, *sums = _sums([float(cause is not None), *(terms.numbers() if has_terms else [])])
    except RuntimeError as lost:
        if cause is None:
            add_note_outside_calls(lost, f"the call to {action}")
            raise
        raise cause from None  # the other ranks cannot hear of it, because they are lost
    if not has_failed:
        if has_terms:
            terms.check(sums, action, error)
        return
    own = None if cause is None else error_text(cause)
    of_ranks: list[Any] = [None] * world_size()
    is_foreign = cause is not None and not isinstance(cause, FSDP2StrategyError)
    dist.all_gather_object(of_ranks, (own, is_foreign, begun_collectives()), group=group_in_use())
    texts: list[str | None] = [text for text, _, _ in of_ranks]
    (first, text), *later = [(number, text) for number, text in enumerate(texts) if text is not None]
    others = ", ".join(str(number) for number, _ in later)
    others = f" (and on rank{'s' if len(later) > 1 else ''} {others})" if later else ""
    same_everywhere = len(set(texts)) == 1
    agreed = error(text if same_everywhere else f"cannot {action}: failed on rank {first}{others}: {text}")
    agreed.is_agreed = True
    unpaired = unpaired_group([begun for *_, begun in of_ranks], is_foreign=any(each for _, each, _ in of_ranks))
    if unpaired is not None:
        mark_unusable(f"cannot {action}, in which the ranks have begun different collectives in the group {unpaired}")
        agreed.add_note("The process groups are unusable from here on: do not catch this error to go on.")
    # One traceback, which ends where this rank's own error was raised; its text is in the message.
    raise agreed.with_traceback(None if cause is None else cause.__traceback__) from None


def defer_error(error: FSDP2StrategyError) -> None:
    """Make every rank raise this rank's error in its next optimizer step; not collective; [Note: deferred errors]."""
    _deferred.append(error)


def withdraw_error(error: FSDP2StrategyError) -> bool:
    """Undo `defer_error`; return whether no step has raised the error yet; not collective."""
    if is_deferred := error in _deferred:
        _deferred.remove(error)
    return is_deferred


def has_deferred_error() -> bool:
    """Return whether this rank has deferred an error that no step has raised yet; not collective."""
    return bool(_deferred)


def raise_deferred_error() -> None:
    """Raise a `StepError` on every rank if any rank has deferred an error; collective."""
    own = _deferred.copy()
    _deferred.clear()
    with all_or_none("take an optimizer step", StepError):
        if own:
            raise own[0]


def error_text(cause: BaseException) -> str:
    """Return the text of an error for another process, after its class name if the class is not of this package."""
    if isinstance(cause, FSDP2StrategyError):
        return str(cause)
    return f"{type(cause).__name__}: {cause} {snapshot_text(cause)}".rstrip()


def any_rank(own: bool) -> bool:
    """Return whether ``own`` is true on any rank; collective; raises if the ranks have run different units."""
    return bool(_sums([float(own)])[0])


def _sums(numbers: list[float]) -> list[float]:
    """Sum numbers over the ranks, in float64; collective; raises if the ranks have run different units."""
    log, count = current_log(), len(numbers)
    numbers = [*numbers, *(log.numbers() if log is not None else [])]
    # Not the default dtype: another thread may have changed it, as from_pretrained does while it builds a model.
    total = torch.tensor(numbers, dtype=torch.float64, device=control_device())
    if log is None:
        dist.all_reduce(total, group=group_in_use())
    else:
        log.all_reduce(total, "makes another collective call, or has failed")
    sums: list[float] = total.tolist()
    if log is not None:
        log.check(sums[count:])
    return sums[:count]


def check_equal(action: str, value: object, error: type[FSDP2StrategyError], expected: str) -> None:
    """Raise on every rank if the ``repr`` of a value differs between ranks; collective; ``expected`` ends the text."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(control_device())
    digests = own.new_empty(world_size(), len(own))
    rows = list(digests)
    run_noted("compares values with the other ranks", lambda: dist.all_gather(rows, own, group=group_in_use()))
    different = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()  # one call for all ranks
    if different:
        raise error(f"cannot {action}: ranks {different} differ from rank 0, expected {expected}")


def results_on_rank_0(call: Callable[[], T]) -> list[T]:
    """Gather the results of a call on rank 0; return an empty list on other ranks; collective.

    If the call raises on some ranks, these raise after the gather, and rank 0 gets an empty list: call it at the end of
    an `all_or_none` block, which makes the error that of all ranks.
    """
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(call())
    except Exception as error:
        if getattr(error, "is_agreed", False) or is_lost_rank(error):
            raise
        failure = error
    of_ranks = to_rank_0(result)
    if failure is not None:
        raise failure
    return [each for found in of_ranks for each in found] if all(of_ranks) else []


def to_rank_0(value: T) -> list[T]:
    """Gather the values of all ranks on rank 0; return an empty list on other ranks; collective."""
    values: list[Any] = [None] * world_size() if is_rank_0() else []
    run_noted(
        "gathers values on rank 0",
        lambda: dist.gather_object(value, values or None, group_dst=0, group=group_in_use()),
    )
    return values


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank; collective."""
    box = [value]
    run_noted(
        "gets a value from rank 0",
        lambda: dist.broadcast_object_list(box, group_src=0, group=group_in_use(), device=control_device()),
    )
    return box[0]
