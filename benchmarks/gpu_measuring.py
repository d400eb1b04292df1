"""Provide what the parts of gpu.py share: options, pairs of timed turns, results, models.

Input: calls of two contestants. Output: rates, times and peaks of the device memory, as gpu.json has them.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Options of a part."""

    rank: int
    billions: float
    """Parameters of the largest model, in billions."""
    rounds: int
    smoke: bool
    scratch: Path
    """A folder that is removed after the part; on a RAM disk if there is a large one."""
    begin: float
    """When the part began, as of `time.monotonic`."""
    seconds: float
    """The part's share of the time."""

    def until(self, share: float = 1.0) -> float:
        """Return when a share of the part's time is over."""
        return self.begin + share * self.seconds


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float
    peak_bytes: int | None
    """Peak of the device memory minus the memory allocated before; None on the CPU."""


def timed(call: Callable[[], object]) -> Turn:
    """Time a call on all ranks, with synchronised devices before and after it; collective."""
    gc.collect()
    harness.synchronize()
    before = harness.allocated()
    if before is not None:
        torch.accelerator.reset_peak_memory_stats()
    dist.barrier()
    start = time.perf_counter()
    call()
    harness.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - start
    return Turn(seconds, None if before is None else torch.accelerator.max_memory_allocated() - before)


Calls = Sequence[Callable[[], object]]


def in_pairs(
    ours: Calls,
    reference: Calls,
    rounds: int,
    between: Callable[[], object] = int,
    until: float | None = None,
) -> list[tuple[list[Turn], list[Turn]]]:
    """Time two contestants in turns, after a warm-up round; collective.

    Args:
        ours: the calls of a turn, each timed separately.
        reference: the same number of calls.
        rounds: number of timed turns of each contestant.
        between: called after each turn, not timed.
        until: when the turns should end; see `harness.turn_order`.

    Returns:
        The turns of both contestants, for each call.
    """
    calls = {"ours": ours, "reference": reference}
    found: dict[str, list[list[Turn]]] = {name: [] for name in calls}
    for name in itertools.chain(calls, harness.turn_order(list(calls), rounds, until)):
        found[name].append([timed(call) for call in calls[name]])
        between()
    by_call = {name: [list(turns) for turns in zip(*of[1:], strict=True)] for name, of in found.items()}
    return list(zip(by_call["ours"], by_call["reference"], strict=True))


def compared(unit: str, amount: float, ours: list[Turn], reference: list[Turn]) -> dict:
    """Return the rates, times and memory peaks of turns, each of which processed ``amount`` units."""
    times = [[turn.seconds for turn in turns] for turns in (ours, reference)]
    peaks = [
        max((turn.peak_bytes for turn in turns if turn.peak_bytes is not None), default=None)
        for turns in (ours, reference)
    ]
    return _compared(unit, amount, times, peaks)


def compared_summaries(unit: str, amount: float, ours: dict, reference: dict, key: str = "seconds") -> dict:
    """Return the same for two contestants of another benchmark, which `harness.summary` has summarised."""
    times = [facts[key] for facts in (ours, reference)]
    return _compared(unit, amount, times, [facts.get("device_peak_bytes") for facts in (ours, reference)])


def _compared(unit: str, amount: float, times: list[list[float]], peaks: list[int | None]) -> dict:
    sides = [
        {"value": amount / statistics.median(seconds), "seconds": seconds, "peak_bytes": peak}
        for seconds, peak in zip(times, peaks, strict=True)
    ]
    # Median and middle half of our time / time of the reference, pair by pair.
    return {"unit": f"{unit}/s", "ours": sides[0], "reference": sides[1], "time_ratio": harness.ratio(*times)}


def in_gigabytes(ours: float | None, reference: float | None) -> dict:
    """Compare two sizes in bytes; None if there is no accelerator."""
    sides = [{"value": None if nbytes is None else nbytes / 1e9} for nbytes in (ours, reference)]
    return {"unit": "GB", "ours": sides[0], "reference": sides[1]}


def min_over_ranks(value: int) -> int:
    """Return the minimum over all ranks; for booleans, whether all are true; collective."""
    minimum = torch.tensor(int(value))
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return int(minimum)


class BareCopy:
    """Copy bytes between the device and pinned host memory in one call, as a reference."""

    def __init__(self, nbytes: int) -> None:
        self.host = harness.pinned(nbytes, dtype=torch.uint8)
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=harness.device())

    def to_host(self) -> None:
        self.host.copy_(self.device, non_blocking=True)

    def to_device(self) -> None:
        self.device.copy_(self.host, non_blocking=True)


def llama(billions: float, **changes: int) -> LlamaConfig:
    """Configure a Llama with about ``billions`` billion parameters and at least two layers."""
    width = 3072 if billions >= 2.5 else 2048 if billions >= 0.05 else 64
    heads = max(2, width // 128)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,  # 15 x width^2 parameters per layer
        "num_hidden_layers": max(2, round((billions * 1e9 / width**2 - 32) / 15)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": 16 * width,
    }
    return LlamaConfig(**sizes | changes, max_position_embeddings=8192, pad_token_id=0, use_cache=False)


def build(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with harness.device():
        return LlamaForCausalLM(config)


def tokens(config: LlamaConfig, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(1, config.vocab_size, shape, generator=generator).to(harness.device())


def learning_rate_of(model: nn.Module) -> float:
    """Return a learning rate with which the loss falls within a few steps: 1e-4 for a width of 2048."""
    return 0.2 / model.config.hidden_size


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's part of the optimizer state, in a fixed order."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return [harness.local_of(state[key]) for state in states for key in sorted(state)]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [harness.local_of(parameter.detach()) for parameter in model.parameters()]


def outcome(measures: dict, facts: dict, errors: list[str]) -> dict:
    """Return the result of a part: what was compared, other facts, and what was wrong."""
    return {"measures": measures, "facts": facts, "error": "; ".join(errors) or None, "skipped": None}


def skipped(reason: str) -> dict:
    """Return the result of a part that cannot run here."""
    return {**outcome({}, {}, []), "skipped": reason}


def all_equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return whether the tensors are bitwise equal on every rank; collective."""
    return bool(min_over_ranks(all(torch.equal(a, b) for a, b in zip(some, others, strict=True))))
