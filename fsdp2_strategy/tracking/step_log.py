"""Write what runs: a line in the log now and then, or a bar on a terminal, with the numbers of a model's steps.

Input: the `StepResult` of each step, on rank 0. Output: the log, or standard error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tqdm import tqdm

from fsdp2_strategy.distributed.log import logger
from fsdp2_strategy.distributed.terminal import drawn, is_terminal
from fsdp2_strategy.errors import size_text
from fsdp2_strategy.optim.step import StepResult

_BAR = "{desc} {percentage:.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_BAR_WITHOUT_TOTAL = "{desc} {n_fmt} steps [{elapsed}{postfix}]"
Output = Literal["lines or bar", "lines", "none"]
"""Where the numbers go: "lines or bar" is a bar on a terminal; "none" leaves them to a loop with a log of its own."""


@dataclass
class Interval:
    """The steps since the last line, and the last of them."""

    last: StepResult | None = None
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    tokens: int | None = 0
    samples: int | None = 0
    model_flops: float | None = 0.0
    hardware_flops: float | None = 0.0
    data_seconds: float | None = 0.0
    save_seconds: float = 0.0
    peak_flops: float | None = None
    """Peak of all devices together, in FLOP/s."""

    def add(self, result: StepResult, peak_flops: float | None) -> None:
        """Add a step; the first one of a run has no time, and no part in the rates."""
        self.last, self.peak_flops = result, peak_flops
        self.skipped += result.skipped
        if result.seconds is None:
            return
        self.steps += 1
        self.seconds += result.seconds
        self.tokens = _sum(self.tokens, result.tokens)
        self.samples = _sum(self.samples, result.samples)
        self.model_flops = _sum(self.model_flops, result.model_flops)
        self.hardware_flops = _sum(self.hardware_flops, result.hardware_flops)
        self.data_seconds = _sum(self.data_seconds, result.data_seconds)
        self.save_seconds += result.save_seconds or 0.0

    def numbers(self) -> dict[str, float]:
        """Return rates and times by the names of `Metrics`; unknown numbers are omitted."""
        last, steps = self.last, self.steps
        found = {
            "seconds_per_step": self.seconds / steps if steps else None,
            "tokens_per_second": self._per_second(self.tokens),
            "samples_per_second": self._per_second(self.samples),
            "mfu": self._utilisation(self.model_flops),
            "hfu": self._utilisation(self.hardware_flops),
            "data_seconds": self.data_seconds if steps else None,
            "save_seconds": self.save_seconds if steps else None,
            "memory_allocated_bytes": last.memory_allocated_bytes if last else None,
            "memory_reserved_bytes": last.memory_reserved_bytes if last else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def text(self, total_steps: int | None) -> str:
        """Return loss, norm and learning rate of the last step, and `numbers`, in one line."""
        last = self.last
        assert last is not None
        parts = [f"loss {last.loss:.4f}", f"grad norm {last.grad_norm:.3f}", f"lr {last.lr:.2e}", *self._rates()]
        if self.steps:
            if self.data_seconds is not None:
                parts.append(f"data {self.data_seconds:.1f} s")
            if self.save_seconds:
                parts.append(f"saves {self.save_seconds:.1f} s")
            per_step = self.seconds / self.steps
            parts.append(f"{per_step:.3g} s/step")
            if total_steps is not None and last.step < total_steps:
                parts.append(f"{_duration((total_steps - last.step) * per_step)} left")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        return ", ".join(parts)

    def short_text(self) -> str:
        """Return the most important numbers for a bar, which has little room; what it shows itself is left out."""
        last, numbers = self.last, self.numbers()
        assert last is not None
        parts = [f"loss {last.loss:.4f}", f"norm {last.grad_norm:.2f}", f"lr {last.lr:.1e}"]
        if "tokens_per_second" in numbers:
            parts.append(f"{numbers['tokens_per_second']:,.0f} tok/s")
        elif "samples_per_second" in numbers:
            parts.append(f"{numbers['samples_per_second']:,.1f} samples/s")
        if "mfu" in numbers:
            parts.append(f"MFU {numbers['mfu']:.0%}")
        if "memory_allocated_bytes" in numbers:
            parts.append(size_text(numbers["memory_allocated_bytes"]))
        for name, seconds in (("data", self.data_seconds), ("saves", self.save_seconds)):
            if self.seconds and seconds and (share := seconds / self.seconds) >= 0.005:
                parts.append(f"{name} {share:.0%}")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        return ", ".join(parts)

    def _rates(self) -> list[str]:
        numbers, parts = self.numbers(), []
        if "tokens_per_second" in numbers:
            parts.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
        if "samples_per_second" in numbers:
            parts.append(f"{numbers['samples_per_second']:,.1f} samples/s")
        if "mfu" in numbers:
            parts.append(f"MFU {numbers['mfu']:.1%}")
        if "hfu" in numbers and numbers["hfu"] != numbers.get("mfu"):
            parts.append(f"{numbers['hfu']:.1%} with recomputation")
        if "memory_allocated_bytes" in numbers:
            reserved = numbers.get("memory_reserved_bytes")
            more = "" if reserved is None else f" ({size_text(reserved)} reserved)"
            parts.append(f"memory {size_text(numbers['memory_allocated_bytes'])}{more}")
        return parts

    def _per_second(self, count: float | None) -> float | None:
        return count / self.seconds if count is not None and self.seconds else None

    def _utilisation(self, flops: float | None) -> float | None:
        rate = self._per_second(flops)
        return rate / self.peak_flops if rate is not None and self.peak_flops else None


class StepLog:
    """The lines, or the bar, of one model; used on rank 0."""

    def __init__(self, output: Output) -> None:
        self.has_bar = output == "lines or bar" and is_terminal()
        self._has_lines = output != "none" and not self.has_bar
        self.total_steps: int | None = None
        """Number of steps at the end of the run, if it is known."""
        self.interval = Interval()
        self.is_shown = True
        """Whether this rank writes; the others add up the same numbers."""
        self._has_warned = False
        self._name = ""
        self._bar: tqdm[Any] | None = None

    def add(self, result: StepResult, name: str, peak_flops: float | None) -> None:
        """Add a step to the interval, and to the bar."""
        self.interval.add(result, peak_flops)
        self._name = "" if name == "model" else name
        if self.has_bar and self.is_shown:
            if self._bar is None:
                before = result.step - result.stepped
                self._bar = drawn(
                    tqdm(
                        total=self.total_steps,
                        desc=self._name or "training",
                        unit="step",
                        initial=before,
                        dynamic_ncols=True,
                    )
                )
            self._bar.total = self.total_steps
            self._bar.bar_format = _BAR if self.total_steps else _BAR_WITHOUT_TOTAL
            self._bar.update(int(result.stepped))

    def write(self) -> None:
        """Write the interval, and begin the next one."""
        if (last := self.interval.last) is None or last.loss is None:
            return
        self._check_mfu()
        if not self.is_shown and (self._has_lines or self.has_bar):
            self.interval = Interval()
        elif self._bar is not None:
            self._bar.set_postfix_str(self.interval.short_text())
        elif self._has_lines:
            of = f"/{self.total_steps}" if self.total_steps is not None else ""
            prefix = f"{self._name}: " if self._name else ""
            logger.info("%sstep %d%s: %s", prefix, last.step, of, self.interval.text(self.total_steps))
        else:
            return  # the loop takes the interval
        self.interval = Interval()

    def take(self) -> Interval:
        """Return the interval, and begin the next one, for a loop with a log of its own."""
        self._check_mfu()
        interval, self.interval = self.interval, Interval()
        return interval

    def _check_mfu(self) -> None:
        """Warn once if the devices do more than their peak."""
        mfu, peak = self.interval.numbers().get("mfu"), self.interval.peak_flops
        if mfu is None or mfu <= 1 or peak is None or self._has_warned or not self.is_shown:
            return
        self._has_warned = True
        logger.warning(
            "MFU is %.0f %%, expected at most 100 %%: the peak of all devices, %.3g FLOP/s, is too low. Set peak_flops "
            "to the peak of one device in the dtype of the computation.",
            100 * mfu,
            peak,
        )

    def close(self) -> None:
        """Write what was not written yet, and end the bar."""
        if self.interval.steps:
            self.write()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _sum(total: Any, value: Any) -> Any:
    return None if total is None or value is None else total + value


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
