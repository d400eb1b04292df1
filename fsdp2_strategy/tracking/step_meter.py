"""Measure the steps of one model: samples, FLOPs, times and memory, summed over the ranks by the step's all-reduce.

Input: the forward and backward passes of a model, and the timers of this process. Output: `StepResult` with these
numbers, and on rank 0 a `StepLog`; a warning that names a rank which is slower than the others.

[Note: numbers of a step] The all-reduce of the gradient norm also sums a few numbers of `StepMeter.numbers`, equally
many on all ranks. A maximum needs a number of each rank: in some steps, each rank adds its numbers at its own place of
a further vector, which is zero elsewhere. Rank 0 asks for this when its clock says that a line is due; the others learn
it from the sums, so that all ranks add the vector to the next step. No further collective is made, and nothing is read
from the device.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed import spent_time
from fsdp2_strategy.distributed.accelerator import accelerator_type
from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.memory import memory_of_rank
from fsdp2_strategy.distributed.process_group import group_in_use, rank, ranks_of, world_size
from fsdp2_strategy.distributed.torch_internals import default_store, is_in_backward
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.optim.accumulation import Accumulation, accumulation_of
from fsdp2_strategy.optim.step import StepResult
from fsdp2_strategy.optim.step_sums import checked_tokens
from fsdp2_strategy.tracking.flops import FlopCount, can_count, can_separate_recomputation
from fsdp2_strategy.tracking.peaks import peak_flops
from fsdp2_strategy.tracking.step_log import Output, StepLog

clock = time.monotonic
SECONDS_BETWEEN_EXCHANGES = 30.0
"""So often the ranks exchange their memory and times if no line is due."""
SECONDS_OF_BAR = 1.0
"""So often the numbers of a bar, or of a loop with a log of its own, are renewed."""
SLOW = 1.15
"""A rank is slow if its own work takes so many times the median of the other ranks."""
LEAST_SECONDS = 10.0
"""Ranks are compared over at least so much time: in short spans, another process of the host slows down any rank."""
_LEAST_SHARE = 0.05
"""... and the difference is at least this share of it: ranks that mostly wait may differ by chance."""

_SUMMED = (
    "samples",
    "has_samples",
    "model_flops",
    "has_model_flops",
    "hardware_flops",
    "has_hardware_flops",
    "peak_flops",
    "has_peak_flops",
    "data_seconds",
    "has_data",
    "save_seconds",
    "seconds",
    "requests",
)
_OF_RANK = 3
"""Numbers of each rank: memory allocated and reserved, and seconds of its own work."""

_IS_WATCHED = Slot[bool]("forward passes are measured")


@dataclasses.dataclass
class _Passes:
    """What the forward passes of a micro-batch, or of a step, have as input."""

    count: int = 0
    samples: float | torch.Tensor = 0
    has_samples: bool = False
    elements: int = 0
    """Elements of the first tensor of each pass, by which FLOPs of later steps are scaled."""
    flops: FlopCount = dataclasses.field(default_factory=FlopCount)
    """FLOPs of these passes, and of their backward passes, if they are counted."""


class StepMeter:
    """The measurements of one model's steps; every rank has one.

    Args:
        config: ``log_every_seconds``, ``log_every_steps`` and ``peak_flops`` are used, and the compute dtype.
        accumulation: the model's; its ``measurements`` become this object.
        output: where rank 0 writes the numbers.
    """

    def __init__(self, config: StrategyConfig, accumulation: Accumulation, output: Output) -> None:
        self._accumulation = accumulation
        accumulation.measurements = self
        self._is_on = config.logs_steps
        self.log = StepLog(output if self._is_on else "none")
        self._every_steps = config.log_every_steps if output != "none" else None
        self._every_seconds = config.log_every_seconds or SECONDS_BETWEEN_EXCHANGES
        if self.log.has_bar or output == "none":
            self._every_seconds = SECONDS_OF_BAR
        half = torch.float16 if config.fp16 else torch.bfloat16
        dtype = half if config.fp16 or config.bf16 else torch.float32
        self._peak = config.peak_flops or peak_flops(dtype)
        self._copies = config.ranks_per_batch
        self._recomputes = bool(config.activation_checkpointing)
        self._forward, self._step = _Passes(), _Passes()
        self._counts = self._is_on
        """Whether FLOPs are counted: in the first step."""
        self._mode: Any = None
        """The mode that counts the forward pass that is running; None if there is none."""
        self._flops: tuple[float | None, float | None] = None, None
        """Model and hardware FLOPs for each element of the inputs, if they are known."""
        self._exchanges = True
        """Whether the coming all-reduce has the numbers of each rank; the same on all ranks."""
        self._sums: dict[str, float] = {}
        self._of_ranks: list[float] = []
        self._ranks: list[int] = [0]
        self._own, self._count = 0, 1
        """Place of this rank among the model's ranks, and their number."""
        self._has_device, self._is_measuring = accelerator_type() is not None, False
        self._received: float | None = None
        """When the last step's sums came; None before the first step."""
        self._now = self._waited_now = 0.0
        self._before = self._timers()
        self._busy = self._window = 0.0
        """Seconds of this rank's own work, and of the clock, since ranks were last compared."""
        self._steps = 0
        self._slow: int | None = None
        self._last_request = clock()
        self._memory: tuple[int | None, int | None] = None, None

    # --- passes ------------------------------------------------------------------------------------------------------

    def begin_forward(self, model: nn.Module, arguments: Iterable[Any]) -> None:
        """Count the inputs of a forward pass with gradients, and begin to count its FLOPs in the first step."""
        first = _first_tensor(arguments)
        self._forward.count += 1
        if first is not None and first.dim():
            self._forward.samples = max(self._forward.samples, first.shape[0])
            self._forward.has_samples = True
        self._forward.elements += 1 if first is None else first.numel()
        if self._counts and self._mode is None:
            if not can_count(model):
                self._counts = False
                return
            recomputes = self._recomputes or any(
                getattr(module, "gradient_checkpointing", False) for module in model.modules()
            )
            self._forward.flops.is_separate = can_separate_recomputation(model, recomputes=recomputes)
            self._mode = self._forward.flops.counting(is_backward=False)
            self._mode.__enter__()

    def end_forward(self) -> None:
        """End what `begin_forward` has begun, also after an error."""
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)

    @contextmanager
    def backward(self, num_samples: int | torch.Tensor | None) -> Iterator[None]:
        """Add the micro-batch whose backward pass runs in this block to the step; not collective."""
        num_samples = checked_tokens(num_samples, "num_samples")
        if not self._accumulation.is_pending:
            self._step = _Passes()
        passes, self._forward = self._forward, _Passes()
        if num_samples is not None:
            passes.samples, passes.has_samples = num_samples, True
        self._step.count += passes.count
        self._step.samples = self._step.samples + passes.samples
        self._step.has_samples |= passes.has_samples
        self._step.elements += passes.elements
        with passes.flops.counting(is_backward=True) if self._counts else nullcontext():
            yield
        self._step.flops.add(passes.flops)

    # --- the all-reduce of a step ------------------------------------------------------------------------------------

    def numbers(self) -> list[float]:
        """Return the numbers to sum over the ranks; see [Note: numbers of a step]."""
        self._count, self._own = world_size(), rank()
        model_flops, hardware_flops = self._flops_of_step()
        data, saves, _ = self._timers()
        now = clock()
        values: dict[str, Any] = {
            "samples": self._step.samples / self._copies,
            "has_samples": self._step.has_samples,
            "model_flops": model_flops or 0.0,
            "has_model_flops": model_flops is not None,
            "hardware_flops": hardware_flops or 0.0,
            "has_hardware_flops": hardware_flops is not None,
            "peak_flops": self._peak or 0.0,
            "has_peak_flops": self._peak is not None,
            "data_seconds": data - self._before[0],
            "has_data": spent_time.data.is_used,
            "save_seconds": saves - self._before[1],
            "seconds": now - self._received if self._own == 0 and self._received is not None else 0.0,
            "requests": self._own == 0 and self._must_request(now),
        }
        numbers = [values[name] for name in _SUMMED]
        if self._exchanges:
            self._ranks = ranks_of(group_in_use())
            of_ranks = [0.0] * (_OF_RANK * self._count)
            of_ranks[_OF_RANK * self._own : _OF_RANK * (self._own + 1)] = [*memory_of_rank(), self._busy]
            numbers += of_ranks
        return numbers

    def receive(self, sums: Sequence[float]) -> None:
        """Take the sums; `finish` uses those of the last call.

        What the ranks send next time is decided here, by sums that all have, and not in `finish`, which a rank whose
        step raises does not reach.
        """
        spent_time.read_device_waits()
        self._now, self._waited_now = clock(), spent_time.other_ranks.seconds
        self._sums = dict(zip(_SUMMED, sums, strict=False))
        self._of_ranks = [*sums[len(_SUMMED) :]]
        self._exchanges = bool(self._sums["requests"])

    def _must_request(self, now: float) -> bool:
        if self._every_steps is not None:
            return (self._accumulation.steps + 2) % self._every_steps == 0
        return now - self._last_request >= self._every_seconds

    def _flops_of_step(self) -> tuple[float | None, float | None]:
        step = self._step
        if not step.count:
            return None, None
        if self._counts:
            return step.flops.numbers()
        of_model, of_hardware = self._flops
        return of_model and of_model * step.elements, of_hardware and of_hardware * step.elements

    def _timers(self) -> tuple[float, float, float]:
        return spent_time.data.seconds, spent_time.saves.seconds, spent_time.other_ranks.seconds

    # --- the end of a step -------------------------------------------------------------------------------------------

    def finish(self, result: StepResult, name: str) -> StepResult:
        """Return the result of a step that was taken or skipped with its numbers, and write the log; not collective."""
        if not self._sums:
            return result
        sums, count, is_first = self._sums, self._count, self._received is None
        has_exchanged = bool(self._of_ranks)
        if has_exchanged:
            self._take_exchange()
        seconds = None if is_first else sums["seconds"]

        def known(value: str, by: str) -> float | None:
            return sums[value] if sums[by] == count else None

        model_flops, peak = known("model_flops", "has_model_flops"), known("peak_flops", "has_peak_flops")
        samples = known("samples", "has_samples")
        result = dataclasses.replace(
            result,
            samples=None if samples is None else round(samples),
            seconds=seconds,
            data_seconds=sums["data_seconds"] / count if sums["has_data"] else None,
            save_seconds=sums["save_seconds"] / count,
            model_flops=model_flops,
            hardware_flops=known("hardware_flops", "has_hardware_flops"),
            mfu=model_flops / seconds / peak if model_flops is not None and seconds and peak else None,
            memory_allocated_bytes=self._memory[0],
            memory_reserved_bytes=self._memory[1],
        )
        self._end_step(seconds or 0.0)
        self.log.is_shown = self._own == 0
        self.log.add(result, name, peak)
        if has_exchanged:
            self.log.write()
        return result

    def _end_step(self, seconds: float) -> None:
        """Keep what the next steps are compared with, and forget this one."""
        if self._counts and self._step.elements:
            of_model, of_hardware = self._step.flops.numbers()
            elements = self._step.elements
            self._flops = of_model and of_model / elements, of_hardware and of_hardware / elements
        self._counts = False
        is_measured = not self._has_device or self._steps % spent_time.MEASURED == 0
        if self._received is not None and is_measured:
            self._busy += max(0.0, self._now - self._received - (self._waited_now - self._before[2]))
            self._window += seconds
        if self._exchanges or self._received is None:
            self._last_request = self._now
        self._steps += 1
        self._measure(is_measured=self._has_device and self._steps % spent_time.MEASURED == 0)
        data, saves, _ = self._timers()
        self._received, self._before = self._now, (data, saves, self._waited_now)
        self._step, self._sums, self._of_ranks = _Passes(), {}, []

    def _measure(self, *, is_measured: bool) -> None:
        if is_measured != self._is_measuring:
            self._is_measuring = is_measured
            spent_time.measure_device_waits(is_measured=is_measured)

    def close(self) -> None:
        """Write the steps since the last line, and end the bar; not collective."""
        self._measure(is_measured=False)
        self.log.close()

    def _take_exchange(self) -> None:
        rows = [self._of_ranks[i : i + _OF_RANK] for i in range(0, len(self._of_ranks), _OF_RANK)]
        allocated, reserved = (int(max(row[i] for row in rows)) for i in (0, 1))
        self._memory = allocated, reserved or None
        if self._window >= LEAST_SECONDS:
            self._compare([row[2] for row in rows])
            self._busy = self._window = 0.0

    def _compare(self, busy: Sequence[float]) -> None:
        """Name the rank whose own work takes clearly longer than that of the others, once while it stays so."""
        slowest = slowest_rank(busy, self._window)
        slow, self._slow = self._slow, slowest
        if slowest is None or slowest == slow or self._own != 0 or not self._is_on:
            return
        others = statistics.median(seconds for i, seconds in enumerate(busy) if i != slowest)
        logger.warning(
            "rank %d on %s is slower than the others: of the last %.1f s, it has worked %.1f s, and the other ranks "
            "%.1f s (median); they have waited for it. docs/metrics.md says what is measured",
            self._ranks[slowest],
            host_of(self._ranks[slowest]),
            self._window,
            busy[slowest],
            others,
        )

    def take_numbers(self) -> dict[str, float]:
        """Return the numbers of the steps since the last call, for a loop with a log of its own; not collective."""
        numbers = self.log.take().numbers()
        return numbers if self._is_on else {}

    def take_text(self) -> str:
        """Return these numbers as text if a second has passed since the last text, else ""; not collective."""
        if not self._is_on or self.log.interval.seconds < SECONDS_OF_BAR:
            return ""
        return self.log.take().short_text()


def slowest_rank(busy: Sequence[float], seconds: float) -> int | None:
    """Return the place of the rank that is clearly slower than the others, from the seconds of their own work.

    It is slow if its work takes more than `SLOW` times the median of the others, and the difference is at least 5% of
    the ``seconds`` that have passed.
    """
    if len(busy) < 2:
        return None
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = statistics.median(value for i, value in enumerate(busy) if i != slowest)
    is_slow = busy[slowest] > SLOW * others and busy[slowest] - others >= _LEAST_SHARE * seconds
    return slowest if is_slow else None


def publish_host() -> None:
    """Write the name of this rank's host to the store of the process group, for `host_of`; not collective."""
    default_store().set(_key(torch.distributed.get_rank()), socket.gethostname())


def host_of(rank: int) -> str:
    """Return the name of a rank's host; not collective."""
    store, key = default_store(), _key(rank)
    return str(store.get(key).decode()) if store.check([key]) else "an unknown host"


def _key(rank: int) -> str:
    return f"fsdp2_strategy/host/{rank}"


def watch_forward(root: nn.Module) -> None:
    """Register hooks on a sharded model with which its `StepMeter`, if it has one, sees its forward passes."""
    if not model_state(root).get(_IS_WATCHED):
        model_state(root).set(_IS_WATCHED, True)
        root.register_forward_pre_hook(_before_forward, with_kwargs=True)
        root.register_forward_hook(_after_forward, always_call=True)


def _before_forward(root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    meter = accumulation_of(root).measurements
    if isinstance(meter, StepMeter) and torch.is_grad_enabled() and not is_in_backward():  # not in a recomputation
        meter.begin_forward(root, (*args, *kwargs.values()))


def _after_forward(root: nn.Module, *_: object) -> None:
    meter = accumulation_of(root).measurements
    if isinstance(meter, StepMeter):
        meter.end_forward()


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, Mapping | list | tuple):
            within = value.values() if isinstance(value, Mapping) else value
            if (found := _first_tensor(within)) is not None:
                return found
    return None
