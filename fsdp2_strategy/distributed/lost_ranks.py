"""Name the missing ranks when a collective fails; torch's errors contain only an address or a time-out.

Input: an error that torch raises in a collective. Output: the same error with a note (PEP 678), which Python prints
below the error's message: the call that failed, and what the other ranks did instead.

A rank whose collective fails writes a report to the store of the process group: the name of the call. A rank that ends
reports that it ends, and its error. The failing ranks then read the reports of the others. This needs no collective,
which would fail again. A rank that ends with an error also closes its connections, so that the others notice it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.out_of_memory import add_snapshot_note, snapshot_text
from fsdp2_strategy.distributed.process_end import call_at_end
from fsdp2_strategy.distributed.process_group import group_in_use, ranks_of
from fsdp2_strategy.distributed.thread_stacks import Position, Stack, stack_of_main_thread
from fsdp2_strategy.distributed.torch_internals import (
    default_store,
    is_of_default_store,
    is_profiling,
    process_groups,
)
from fsdp2_strategy.distributed.unusable_groups import check_groups
from fsdp2_strategy.errors import StepError

F = TypeVar("F", bound=Callable[..., Any])

_WAIT_SECONDS = 1.0
_DIVERGENCE_SECONDS = 0.5
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_FILES_OF_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "_fsdp_collectives.py")
_DIVERGENCE = "fsdp2_strategy/divergence"
_IMMEDIATELY = timedelta(milliseconds=1)
_UNUSED_TAG = 0x66736470
_OF_BACKEND = re.compile(r"[Gg]loo|NCCL|pair closure|Connection (closed|reset) by peer")
_NOTHING = contextlib.nullcontext()
# The outermost call of this package that is running and that every rank must make.
_call: ContextVar[str | None] = ContextVar("call", default=None)
names_of_calls: set[str] = set()
"""Names of all functions that `collective` has decorated."""


@overload
def collective(function: F, *, needs_groups: bool = True) -> F: ...


@overload
def collective(*, needs_groups: bool = True) -> Callable[[F], F]: ...


def collective(function: Any = None, *, needs_groups: bool = True) -> Any:
    """Decorate a function that every rank must call: if torch loses another rank in it, add a note to torch's error.

    Unless ``needs_groups`` is false, the call raises if an earlier failure has left the process groups unusable. In a
    trace of torch's profiler, the call is a range with the function's name.
    """
    if function is None:
        return functools.partial(collective, needs_groups=needs_groups)

    names_of_calls.add(function.__name__)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _call.get() is not None:
            return function(*args, **kwargs)
        if needs_groups:
            check_groups(f"call {function.__name__}")
        token = _call.set(function.__name__)
        try:
            with torch.profiler.record_function(function.__name__) if is_profiling() else _NOTHING:
                return function(*args, **kwargs)
        except RuntimeError as error:
            if is_lost_rank(error) and (text := reported_divergence(wait=False)):
                raise agreed_error(text) from error
            add_note(error, function.__name__)
            add_snapshot_note(error)
            raise
        finally:
            _call.reset(token)

    return run


def current_call() -> str | None:
    """Return the name of the call, decorated by `collective`, that this thread is in; None if it is in none."""
    return _call.get()


def agreed_error(text: str) -> StepError:
    """Return an error that every rank raises at the same point; see [Note: agreed errors] in `agreement`."""
    error = StepError(text)
    error.is_agreed = True
    return error


_code_of_calls = collective(lambda: None).__code__
"""The code of all functions that `collective` has decorated."""


def after_forward(name: str, *_: object) -> None:
    """Add a note to an error that ends the forward pass of the model ``name``: a hook that torch always calls."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError):
        add_note_outside_calls(error, f"the forward pass of {name}")
        add_snapshot_note(error)


@dataclass(frozen=True)
class Call:
    """A call of this package, or a collective of torch, that a thread is in."""

    name: str
    place: str
    """File and line that made the call; "" if unknown."""
    group: object = None
    """The process group of a collective of torch; None for the default one, or if it is unknown."""


def call_of(stack: Stack) -> Call | None:
    """Return the outermost call of this package that every rank must make, from a thread's stack."""
    depths = [depth for depth, position in enumerate(stack.positions) if position.code is _code_of_calls]
    function = stack.local(depths[-1], "function") if depths else None
    return None if function is None else Call(function.__name__, _place_of(stack.positions[depths[-1] + 1 :]))


def collective_of(stack: Stack) -> Call | None:
    """Return the collective of torch that a thread is in, from its stack; None if it is in none."""
    of_torch = list(itertools.takewhile(lambda position: "/torch/" in position.file, stack.positions))
    depth = next((d for d, each in enumerate(of_torch[:8]) if each.file.endswith(_FILES_OF_COLLECTIVES)), None)
    if depth is None:
        return None
    inner = of_torch[depth].function
    for position in of_torch[depth:]:
        if position.function not in ("wrapper", "inner"):
            inner = position.function
    return Call(inner, _place_of(stack.positions[len(of_torch) :]), stack.local(depth, "group"))


def _place_of(positions: Iterable[Position]) -> str:
    """Return the innermost line of the program, outside of this package and of torch."""
    found = next((position for position in positions if not _is_of_library(position.file)), None)
    return "" if found is None else f"{Path(found.file).name}:{found.line}"


def _is_of_library(file: str) -> bool:
    return file.startswith(_PACKAGE) or "/torch/" in file


def collective_in_progress(ranks: Collection[int]) -> str | None:
    """Describe the collective in which the main thread may wait for one of ``ranks``; None if there is none.

    A trainer may also wait for processes that generate.
    """
    stack = stack_of_main_thread()
    found = None if stack is None else collective_of(stack)
    if found is None or _is_elsewhere(found.group, ranks):
        return None
    return f"{found.name}, called at {found.place}" if found.place else found.name


def _is_elsewhere(group: object, ranks: Collection[int]) -> bool:
    """Return whether a process group has this rank alone of ``ranks``."""
    if not isinstance(group, dist.ProcessGroup):
        return False
    return not is_of_default_store(group) or len(set(ranks_of(group)).intersection(ranks)) == 1


def report_divergence(text: str) -> None:
    """Write to the store that the ranks run different units; other ranks raise this text in place of torch's error."""
    default_store().set(_DIVERGENCE, text)


def reported_divergence(*, wait: bool) -> str | None:
    """Return what `report_divergence` wrote; None if nothing. With ``wait``, wait for it for a few seconds."""
    until = time.monotonic() + (_DIVERGENCE_SECONDS if wait else 0)
    with contextlib.suppress(Exception):  # the store may be lost, too
        while True:
            if default_store().check([_DIVERGENCE]):
                return str(default_store().get(_DIVERGENCE).decode())
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
    return None


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error is one that torch raises if another rank is lost or does not answer in time."""
    is_of_backend = type(error) is RuntimeError and _OF_BACKEND.search(str(error)) is not None
    return is_of_backend or isinstance(error, dist.DistError)


def add_note(error: BaseException, call: str) -> None:
    """Add a note about the missing ranks, if the error is about a lost rank and has no such note yet."""
    if dist.is_initialized() and is_lost_rank(error) and not getattr(error, "__notes__", None):
        with contextlib.suppress(Exception):  # the store may be lost, too
            error.add_note(_note(error, call))


def add_note_outside_calls(error: BaseException, call: str) -> None:
    """Call `add_note`, unless a call that `collective` decorates is running, which adds the note under its own name."""
    if _call.get() is None:
        add_note(error, call)


def disconnect() -> None:
    """Close the connections of gloo to all other ranks, so that ranks that wait for this one raise an error at once.

    Not collective. Call it before the process groups are destroyed because of an error. Destroying a group does not
    close its connections before nothing refers to the group any more, and the traceback of an error refers to models
    and their groups. The end of the process closes them, but a process may survive, such as an actor of Ray. gloo has
    no call for this, but closes the connections of a group when a receive of this group times out.
    """
    for group in process_groups():
        if dist.get_world_size(group) > 1 and re.search(r"cpu:gloo|^gloo$", dist.get_backend_config(group)):
            for other in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
                # If the connection to this rank is lost, this fails at once and closes no other connection.
                with contextlib.suppress(RuntimeError, ValueError):
                    received = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_UNUSED_TAG)
                    received.wait(_IMMEDIATELY)  # type: ignore[union-attr]


def report_end() -> None:
    """Write to the store that this rank ends, and the error that ends it, if there is one; not collective."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # the second: at the exit of Python
    if error is not None and is_lost_rank(error):
        return  # this rank has reported the call
    with contextlib.suppress(Exception):  # the store may be lost already
        text = "ended without this call"
        if error:
            snapshot = f". {snapshot_text(error)}".rstrip(". ")
            text = f"ended with {type(error).__name__}: {str(error)[:500].rstrip('.')}{snapshot}"
        default_store().set(report_key(dist.get_rank()), text)


# Registered after `process_group._destroy_at_exit`, so it runs before.
call_at_end(report_end)


def _note(error: BaseException, call: str) -> str:
    own, store = dist.get_rank(), default_store()
    store.set(report_key(own), f"was in {call}")
    others = [rank for rank in ranks_of(group_in_use()) if rank != own]
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until and not all(store.check([report_key(rank)]) for rank in others):
        time.sleep(0.02)
    reported = {rank: store.get(report_key(rank)).decode() for rank in others if store.check([report_key(rank)])}
    found = [f"rank {rank} {text}" for rank, text in reported.items()]
    if silent := [str(rank) for rank in others if rank not in reported]:
        name = "rank" if len(silent) == 1 else "ranks"
        found.append(f"{name} {', '.join(silent)} did not make this call, or ended without a report")
    return (
        f"Rank {own} was in {call} ({_operation(error)}), which every rank must call: {'; '.join(found)}. Check "
        "conditions such as 'if rank == 0' before this call, and the first error of the other ranks."
    )


def _operation(error: BaseException) -> str:
    """Return the name of the innermost function of torch.distributed in an error's traceback."""
    frames = [
        frame.name for frame in traceback.extract_tb(error.__traceback__) if "/torch/distributed/" in frame.filename
    ]
    names = [name for name in frames if name not in ("wrapper", "inner", "__call__")]
    return names[-1] if names else "a collective"


def report_key(rank: int) -> str:
    """Return the key of the store under which a rank reports that it ends."""
    return f"fsdp2_strategy/report/{rank}"
