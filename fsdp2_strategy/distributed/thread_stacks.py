"""Read where the threads of this process are, without holding a frame while another thread runs.

Input: the threads. Output: the functions that each is in, with their lines, and single local variables.

[Note: frames of other threads] Whoever holds a frame holds what its function refers to, such as activations, also after
the function has returned, and then releases it in the wrong thread, perhaps in the middle of a backward pass. So frames
are read by iterators and functions that are written in C, called by one such function: no other thread runs until the
frames are released. In Python 3.11, garbage that is collected within ``sys._current_frames`` may wait forever for a
lock which that call holds (python/cpython#106883), so collection is off meanwhile.
"""

from __future__ import annotations

import functools
import gc
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from types import CodeType
from typing import Any, NamedTuple

from fsdp2_strategy.distributed.torch_internals import current_frames

_position = operator.attrgetter("f_code", "f_lineno", "f_lasti")


class Position(NamedTuple):
    """Where a thread is in one of the functions that it has called."""

    code: CodeType
    """The function's code."""
    line: int | None
    """The line in its file; None if the instruction has none."""
    instruction: int
    """The offset of the instruction in the code."""

    @property
    def file(self) -> str:
        """The path of the function's file."""
        return self.code.co_filename

    @property
    def function(self) -> str:
        """The function's name."""
        return self.code.co_name


@dataclass(frozen=True)
class Stack:
    """The functions that a thread is in."""

    thread: int
    """The thread's identifier."""
    innermost: int
    """The same number as long as the thread is in this call of its innermost function."""
    positions: list[Position]
    """The innermost function first."""

    def local(self, depth: int, name: str) -> Any:
        """Return a local variable of the function ``positions[depth]``; None if the thread has left it.

        Before Python 3.13, this keeps the values of all variables of the function until it returns.
        """
        frames: list[dict[int, Any]] = []
        values: list[Any] = []
        from_end = depth - len(self.positions)  # the thread may have called other functions since
        only_it = operator.itemgetter(slice(from_end, from_end + 1 or None))

        def at_depth() -> Iterator[Any]:
            stacks = _stacks(map(operator.methodcaller("get", self.thread), iter(frames)))
            return chain.from_iterable(map(only_it, map(list, stacks)))

        is_same = functools.partial(operator.is_, self.positions[depth].code)
        same = map(is_same, map(operator.attrgetter("f_code"), at_depth()))
        scopes = map(operator.attrgetter("f_locals"), compress(at_depth(), same))
        found = map(operator.methodcaller("get", name), scopes)
        _read(frames, functools.partial(values.extend, found), _exhaust(same))
        return values[0] if values else None


def stacks_of_threads() -> dict[int, Stack]:
    """Return the stack of each other thread, by the thread's identifier."""
    stacks = _stacks_of_all()
    del stacks[threading.get_ident()]
    return stacks


def stack_of_main_thread() -> Stack | None:
    """Return the stack of the main thread, from which this may be called, too; None if the thread has ended."""
    return _stacks_of_all().get(threading.main_thread().ident or 0)


def _stacks_of_all() -> dict[int, Stack]:
    frames: list[dict[int, Any]] = []
    threads: list[int] = []
    innermost: list[int] = []
    stacks: list[list[tuple[CodeType, int | None, int]]] = []

    def of_threads() -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, iter(frames)))

    _read(
        frames,
        functools.partial(threads.extend, chain.from_iterable(iter(frames))),
        functools.partial(innermost.extend, map(id, of_threads())),
        functools.partial(stacks.extend, map(list, map(map, repeat(_position), _stacks(of_threads())))),
    )
    facts = zip(threads, innermost, stacks, strict=True)
    return {thread: Stack(thread, inner, [Position(*each) for each in stack]) for thread, inner, stack in facts}


def _stacks(frames: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Return for each frame an iterator over it and those of its callers; see [Note: frames of other threads]."""
    # Not with zip, which keeps what it last returned. The sequence is: frame, "f_back", "f_back", ...
    attributes = map(chain, map(repeat, frames, repeat(1)), repeat(repeat("f_back")))
    outwards = map(operator.attrgetter("__next__"), map(accumulate, attributes, repeat(getattr)))
    return map(iter, outwards, repeat(None))


def _read(frames: list[dict[int, Any]], *calls: Callable[[], object]) -> None:
    """Put the threads' frames into a list for as long as ``calls`` run; see [Note: frames of other threads]."""
    was_enabled: list[bool] = []
    around: tuple[Callable[[], object], ...] = (
        functools.partial(was_enabled.extend, map(operator.call, (gc.isenabled,))),
        gc.disable,
        functools.partial(frames.extend, map(operator.call, (current_frames,))),
        *calls,
        frames.clear,
        _exhaust(map(operator.call, compress((gc.enable,), was_enabled))),
    )
    _exhaust(map(operator.call, around))()


def _exhaust(iterator: Iterator[Any]) -> Callable[[], None]:
    """Return a function that takes everything from an iterator, and keeps nothing."""
    return functools.partial(deque[Any](maxlen=0).extend, iterator)
