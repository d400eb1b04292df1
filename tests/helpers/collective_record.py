"""Record each collective that a process begins, whoever calls it: this package, FSDP2, DTensor, or C++ code of torch.

All of them reach their backend through an operator of `c10d`, on every thread. `start` registers a kernel for each of
these operators at a dispatch key that every call passes and that they do not use, so that the operators themselves, and
the process groups, are those of torch. On a busy host, it costs 30 to 150 microseconds of CPU time a collective.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_TESTS = str(Path(__file__).parents[1])
_PACKAGE = str(Path(__file__).parents[2] / "fsdp2_strategy")
_HERE = (__file__, str(Path(__file__).with_name("pool.py")))
_KEY = "BackendSelect"
_MAIN = "MainThread"
LATE_SECONDS = 0.05
"""How late collectives of other threads are on every second rank, so that an order that nothing enforces is seen."""


class Group(NamedTuple):
    """A process group and the backend of one device type in it, as all of its ranks know it."""

    name: str
    ranks: tuple[int, ...]
    device: str
    on_host: bool
    """Whether it communicates between hosts also where ranks have an accelerator."""

    def __str__(self) -> str:
        return f"group {self.name} of the ranks {list(self.ranks)}"


class Call(NamedTuple):
    """One collective that a rank has begun, or one message to or from another rank."""

    group: Group
    kind: str
    agreed: tuple[Any, ...]
    """What must be equal on all ranks: dtype, numbers of elements, root, reduction."""
    sent: tuple[int, ...] | None
    """Numbers of elements for each rank of an all-to-all, or None."""
    received: tuple[int, ...] | None
    peer: tuple[int, int] | None
    """The other rank and the tag of a message, or None for a collective."""
    thread: str
    place: str

    @property
    def is_message(self) -> bool:
        return self.peer is not None

    def __str__(self) -> str:
        details = [str(each) for each in (*self.agreed, self.sent, self.received) if each is not None]
        thread = "" if self.thread == _MAIN else f", thread {self.thread}"
        return f"{self.kind}({', '.join(details)}) at {self.place}{thread}"


class Record(NamedTuple):
    """What one rank has begun during a job."""

    calls: list[Call]
    failed_at: int | None
    """The number of calls before the first one that has failed; None if none has."""


_calls: list[Call] = []
_failures: list[int] = []
_is_started = False
_libraries: list[torch.library.Library] = []
_host_groups: set[str] = set()
_groups: dict[tuple[str, str, tuple[int, ...]], Group] = {}
_of_thread = threading.local()
"""The reduction of the call that this thread makes, which Python cannot read from the operators' arguments; and how
many calls had begun when this thread last waited for one."""


def start() -> None:
    """Record the collectives of this process from now on."""
    global _is_started  # noqa: PLW0603  kernels are registered once in a process
    if _is_started:
        return
    _is_started = True
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace != "c10d" or name in _WITHOUT_PARTNER:
            continue
        if any(each.name == "process_group" for each in getattr(torch.ops.c10d, name).default._schema.arguments):
            _register(namespace, name, _OPERATORS.get(name, lambda *_: _Details(())))
    for name in _REDUCING_FUNCTIONS:
        if hasattr(torch.ops._c10d_functional, name):
            _register_functional(name, _noting_reduction)
    _register_functional("wait_tensor", _noting_failures)
    for name in _REDUCING_METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _noting_reduction(getattr(dist.ProcessGroup, name)))
    dist.Work.wait = _noting_failures(dist.Work.wait)  # type: ignore[method-assign]
    dist.new_group = _noting_host_groups(dist.new_group)


def begin() -> None:
    """Forget what was recorded: a new job begins."""
    _calls.clear()
    _failures.clear()
    _groups.clear()
    _of_thread.waited = 0


def end() -> Record:
    """Return what was recorded since `begin`."""
    return Record(list(_calls), min(_failures, default=None))


# --- the operators ----------------------------------------------------------------------------------------------------


def _of_tensors(tensors: Any) -> tuple[Any, ...]:
    flat = [each for each in tensors if isinstance(each, torch.Tensor)]
    return (str(flat[0].dtype).removeprefix("torch."), *(each.numel() for each in flat)) if flat else ()


def _numbers(tensors: Any) -> tuple[int, ...]:
    return tuple(each.numel() for each in tensors)


def _splits(tensor: torch.Tensor, sizes: list[int], ranks: int) -> tuple[int, ...]:
    row = tensor.numel() // max(1, len(tensor)) if tensor.ndim else 1
    return tuple(size * row for size in sizes) if sizes else (tensor.numel() // ranks,) * ranks


def _all_to_all_base(group: Group, output: Any, given: Any, _: Any, output_sizes: Any, input_sizes: Any) -> _Details:
    ranks = len(group.ranks)
    return _Details(_of_tensors([given])[:1], _splits(given, input_sizes, ranks), _splits(output, output_sizes, ranks))


class _Details(NamedTuple):
    agreed: tuple[Any, ...]
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None
    peer: tuple[int, int] | None = None


# By name: what of the arguments must agree; of others, the name alone. The first argument is the group, the others are
# those of the operator.
_OPERATORS: dict[str, Callable[..., _Details]] = {
    "allreduce_": lambda group, tensors, *_: _Details((*_of_tensors(tensors), _reduction())),
    "allreduce_coalesced_": lambda group, tensors, *_: _Details((*_of_tensors(tensors), _reduction())),
    "broadcast_": lambda group, tensors, _, root, *__: _Details((*_of_tensors(tensors), f"from rank {root}")),
    "reduce_": lambda group, tensors, _, __, root, *___: _Details((*_of_tensors(tensors), f"to {root}", _reduction())),
    "allgather_": lambda group, outputs, *_: _Details(_of_tensors(outputs[0])),
    "_allgather_base_": lambda group, output, given, *_: _Details(_of_tensors([given])),
    "allgather_coalesced_": lambda group, outputs, given, *_: _Details(_of_tensors(given)),
    "allgather_into_tensor_coalesced_": lambda group, outputs, given, *_: _Details(_of_tensors(given)),
    "reduce_scatter_": lambda group, _, given, *__: _Details((*_of_tensors(given[0]), _reduction())),
    "_reduce_scatter_base_": lambda group, output, *_: _Details((*_of_tensors([output]), _reduction())),
    "reduce_scatter_tensor_coalesced_": lambda group, outputs, *_: _Details((*_of_tensors(outputs), _reduction())),
    "gather_": lambda group, outputs, given, _, root, *__: _Details((*_of_tensors(given), f"on rank {root}")),
    "scatter_": lambda group, outputs, given, _, root, *__: _Details((*_of_tensors(outputs), f"from rank {root}")),
    "alltoall_base_": lambda group, *arguments: _all_to_all_base(group, *arguments[:5]),
    "alltoall_": lambda group, outputs, given, *_: _Details(_of_tensors(given)[:1], _numbers(given), _numbers(outputs)),
    "barrier": lambda group, *_: _Details(()),
    "monitored_barrier_": lambda group, *_: _Details(()),
    "send": lambda group, tensors, _, to, tag: _Details(_of_tensors(tensors), peer=(to, tag)),
    "recv_": lambda group, tensors, _, source, tag: _Details(_of_tensors(tensors), peer=(source, tag)),
}
_WITHOUT_PARTNER = ("recv_any_source_",)
"""Not recorded: its other end is unknown when it begins."""
_REDUCING_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
_REDUCING_FUNCTIONS = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)


def _register(namespace: str, name: str, describe: Callable[..., _Details]) -> None:
    operator = getattr(getattr(torch.ops, namespace), name).default
    [at] = [i for i, each in enumerate(operator._schema.arguments) if each.name == "process_group"]
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        group = _group(dist.ProcessGroup.unbox(args[at]), args[:2])
        if group is not None and not group.on_host and _thread() != _MAIN and dist.get_rank() % 2:
            time.sleep(LATE_SECONDS)
        place = len(_calls)
        if group is not None:
            _calls.append(Call(group, name.strip("_"), *describe(group, *args), _thread(), _place()))
        try:
            return operator.redispatch(keys & below, *args, **kwargs)
        except BaseException:
            if group is not None:
                _failures.append(place)
            raise

    _library(namespace).impl(name, kernel, _KEY, with_keyset=True)


def _register_functional(name: str, noting: Callable[..., Any]) -> None:
    """Note the reduction of a functional collective, which calls an operator of `c10d`, or a failure of a wait."""
    operator = getattr(torch.ops._c10d_functional, name).default
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
    noted = noting(operator.redispatch)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return noted(keys & below, *args, **kwargs)

    _library("_c10d_functional").impl(name, kernel, _KEY, with_keyset=True)


def _library(namespace: str) -> torch.library.Library:
    for library in _libraries:
        if library.ns == namespace:
            return library
    _libraries.append(torch.library.Library(namespace, "IMPL"))
    return _libraries[-1]


# --- what the operators do not say ------------------------------------------------------------------------------------


def _reduction() -> str | None:
    return getattr(_of_thread, "reduction", None)


def _noting_reduction(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        given = [getattr(each, "reduceOp", each) for each in (*args, *kwargs.values())]
        found = [each for each in given if isinstance(each, str | dist.ReduceOp | dist.ReduceOp.RedOpType)]
        if not found:
            return call(*args, **kwargs)
        _of_thread.reduction = str(getattr(found[0], "op", found[0])).rpartition(".")[2].upper()
        try:
            return call(*args, **kwargs)
        finally:
            _of_thread.reduction = None

    return noted


def _noting_failures(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = wait(*args, **kwargs)
        except BaseException:
            # Which call has failed is unknown: one of those since the last wait of this thread.
            _failures.append(getattr(_of_thread, "waited", 0))
            raise
        _of_thread.waited = len(_calls)
        return result

    return call


def _noting_host_groups(new_group: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(new_group)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if kwargs.get("backend") == "gloo" and isinstance(group, dist.ProcessGroup):
            _host_groups.add(group.group_name)
        return group

    return call


def _group(group: Any, tensors: Any) -> Group | None:
    """Return the group of a call with the device of its first tensor, or None for a group of one rank."""
    device = next((tensor.device.type for tensor in _flat(tensors)), "cpu")
    ranks = tuple(distributed_c10d._world.pg_group_ranks.get(group, range(group.size())))
    if len(ranks) == 1:
        return None
    key = (group.group_name, device, ranks)
    if key not in _groups:
        has_accelerator = torch.accelerator.is_available()
        on_host = device == "cpu" and (has_accelerator or group.group_name in _host_groups)
        _groups[key] = Group(group.group_name, ranks, device, on_host)
    return _groups[key]


def _flat(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists: a rank that gets no output of a collective has only its input."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)


def _thread() -> str:
    """Return the name of this thread; autograd's own threads work while the one that called backward waits."""
    return _MAIN if torch._C._current_graph_task_id() >= 0 else threading.current_thread().name


def _place() -> str:
    """Return the lines of this package and of the tests that made the call, or else torch's line."""
    frame: Any = sys._getframe(2)
    innermost, of_package, of_tests = frame, "", ""
    while frame is not None and not of_tests:
        file = frame.f_code.co_filename
        if file.startswith(_TESTS) and file not in _HERE:
            of_tests = f"tests{file[len(_TESTS) :]}:{frame.f_lineno}"
        elif file.startswith(_PACKAGE) and not of_package:
            of_package = f"fsdp2_strategy{file[len(_PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    if of_tests or of_package:
        return " from ".join(filter(None, (of_package, of_tests)))
    return f"{'/'.join(Path(innermost.f_code.co_filename).parts[-2:])}:{innermost.f_lineno}"
