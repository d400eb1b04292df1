"""Compare a training step of the strategy with a hand-written fully_shard loop: time, collectives and calls.

    python benchmarks/step.py [--ranks 2] [--rounds 7] [--out DIR] [--smoke]

The loops train copies of one Llama in bf16 with fp32 master weights, clipping and fused AdamW, in turns of several
steps: one by hand, the strategy with its log, and the strategy without. They take the same number of steps, and the
gradient norms of the first ten must agree. Calls of Python functions and of C functions from Python are counted in
further steps: they do not depend on the load of the machine. Writes step.json and step.png, prints a table. `--smoke`
runs everything in seconds, with a tiny model.
"""

import argparse
import copy
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

BY_HAND, OURS, WITHOUT_LOG = "hand-written", "strategy", "strategy without log"
STEPS = 4
LR = 1e-3
COMPARED = 10
"""Steps whose gradient norms must agree; the first two are not timed. In later steps training amplifies rounding."""
LARGEST_DIFFERENCE = 0.05
"""Between the gradient norms of two loops in one of these steps, relative."""


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name.split("::")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def reference_loop(model: torch.nn.Module, device: str) -> Callable[[dict], float]:
    """Shard the model and return a training step, both with plain torch."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model.model.layers, model.model.embed_tokens]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    # The backward pass begins with the head, so nothing is won by freeing it after its forward.
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: dict) -> float:
        model(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def strategy_loop(model: torch.nn.Module, **options: object) -> Callable[[dict], float]:
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, max_norm=1.0, **options))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=LR)

    def step(batch: dict) -> float:
        strategy.backward(model(**batch).loss, model, optimizer)
        return strategy.optimizer_step(optimizer, model, None).grad_norm

    return step


def calls_per_step(step: Callable[[], object], steps: int = 2) -> dict[str, float]:
    """Return how many Python functions, and C functions from Python, this rank calls in a step."""
    counts: Counter[str] = Counter()

    def count(_frame: object, event: str, _argument: object) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return {"python": counts["call"] / steps, "c": counts["c_call"] / steps}


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    scale = 4 if cuda else 1
    vocab_size, width, layers = (64, 32, 2) if options["smoke"] else (4096, 256 * scale, 12)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    ours = LlamaForCausalLM(config)
    reference, silent = copy.deepcopy(ours), copy.deepcopy(ours)
    steps = {
        BY_HAND: reference_loop(reference, device),
        OURS: strategy_loop(ours),
        WITHOUT_LOG: strategy_loop(silent, log_every_seconds=0),
    }
    ids = torch.randint(0, vocab_size, (2, 64 * scale), generator=torch.Generator().manual_seed(rank)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    collectives: dict[str, dict] = {}
    norms: dict[str, list[float]] = {name: [] for name in steps}

    def run(name: str, count: int) -> None:
        norms[name] += [steps[name](batch) for _ in range(count)]
        if cuda:
            torch.cuda.synchronize()

    def check() -> None:
        """Compare the gradient norms of the first steps that all loops have taken."""
        for i, found in enumerate(zip(*(of_loop[:COMPARED] for of_loop in norms.values()), strict=False)):
            if not max(found) / min(found) - 1 <= LARGEST_DIFFERENCE:
                limit = f"{LARGEST_DIFFERENCE:.0%}"
                raise harness.ValuesError(f"the gradient norms of step {i}, {found}, differ by more than {limit}")

    for name in steps:
        with CountCollectives() as counter:
            run(name, 2)
        collectives[name] = {key: count // 2 for key, count in sorted(counter.counts.items())}
    turns: dict[str, list] = {name: [] for name in steps}
    for name in harness.turn_order(list(steps), options["rounds"]):
        turns[name].append(harness.attempt(lambda n=name: harness.turn(lambda: run(n, STEPS)), check))
    calls = {name: calls_per_step(lambda n=name: steps[n](batch)) for name in steps}
    result = {
        "parameters": sum(p.numel() for p in ours.parameters()),
        "contestants": {name: harness.summary(taken) for name, taken in turns.items()},
        "collectives_per_step": collectives,
        "calls_per_step": calls,
        "grad_norms": {name: found[:2] for name, found in norms.items()},
    }
    harness.finish(rank, options, result)


def report(found: dict, args: argparse.Namespace) -> None:
    contestants = found.pop("contestants")
    result = {**harness.environment(smoke=args.smoke), "ranks": args.ranks, **found}
    if error := next((facts["error"] for facts in contestants.values() if "error" in facts), None):
        result["error"] = error
        print(error)
    else:
        times = {name: [s / STEPS for s in facts["seconds"]] for name, facts in contestants.items()}
        ratios = [ours / reference for ours, reference in zip(times[OURS], times[BY_HAND], strict=True)]
        result |= {"seconds_per_step": times, "ratio_median": statistics.median(ratios), "ratios": ratios}
        print_table(times, result)
        draw(times, result, args.out / "step.png", smoke=args.smoke)
    (args.out / "step.json").write_text(json.dumps(result, indent=1) + "\n")


def print_table(times: dict[str, list[float]], result: dict) -> None:
    count = len(times["strategy"])
    columns = "all-gathers | reduce-scatters | Python calls | C calls"
    print(f"| loop | seconds per step: median (min - max) of {count} | {columns} |")
    print("|---|---|---|---|---|---|")
    for name, samples in times.items():
        counts, calls = result["collectives_per_step"][name], result["calls_per_step"][name]
        print(
            f"| {name} | {harness.format_times(samples, 3)} | {counts['allgather_base']} "
            f"| {counts['reduce_scatter_base']} | {calls['python']:,.0f} | {calls['c']:,.0f} |"
        )
    for one, other in ((OURS, BY_HAND), (OURS, WITHOUT_LOG)):
        middle, low, high = harness.ratio(times[one], times[other])
        print(f"\ntime of {one} / {other}, median of pairs (middle half): {middle:.3f} ({low:.3f} - {high:.3f})")
    print(f"gradient norms of the first two steps: {result['grad_norms']}")


def draw(times: dict, result: dict, path: Path, *, smoke: bool) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
    for row, samples in enumerate(times.values()):
        axes.plot(samples, [row] * len(samples), "o", alpha=0.6, color=("#888888", "#1f6fb4", "#7fb0d8")[row])
        axes.plot([statistics.median(samples)] * 2, [row - 0.3, row + 0.3], color="#333333")
    axes.set_yticks(range(len(times)), times)
    axes.set_ylim(-0.6, len(times) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds per step")
    axes.set_title(f"{result['hardware']}, {result['ranks']} ranks: ratio {result['ratio_median']:.3f}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if smoke:
        figure.suptitle(harness.SMOKE_TITLE, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    args = harness.parse(parser, smoke={})
    report(harness.run_on_ranks(work, vars(args)), args)


if __name__ == "__main__":
    main()
