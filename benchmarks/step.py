"""A training step through the strategy against a hand-written fully_shard loop: collectives counted, time beside.

    python benchmarks/step.py [--ranks 2] [--pairs 7] [--out runs/benchmarks]

Both loops train copies of one Llama in bf16 with fp32 masters, clipping and fused AdamW, alternating in one process
group; each sample is the time of several steps. Writes step.json and step.png, prints a table.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from harness import OUT, circumstances
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

STEPS = 4
LR = 1e-3


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name.split("::")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def hand_written(model: torch.nn.Module, device: str) -> Callable[[dict], float]:
    """Shard and step with nothing but torch."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model.model.layers, model.model.embed_tokens, model.lm_head]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: dict) -> float:
        model(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def through_strategy(model: torch.nn.Module) -> Callable[[dict], float]:
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, max_norm=1.0))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=LR)

    def step(batch: dict) -> float:
        strategy.backward(model(**batch).loss, model, optimizer)
        return strategy.optimizer_step(optimizer, model, None).grad_norm

    return step


def seconds(step: Callable[[dict], float], batch: dict) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / STEPS


def measure(rank: int, ranks: int, pairs: int, store: str, out: Path) -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    device = "cuda" if cuda else "cpu"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    scale = 4 if cuda else 1
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=256 * scale,
        intermediate_size=768 * scale,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    ours = transformers.LlamaForCausalLM(config)
    theirs = copy.deepcopy(ours)
    steps = {"hand-written": hand_written(theirs, device), "strategy": through_strategy(ours)}
    ids = torch.randint(0, 4096, (2, 64 * scale), generator=torch.Generator().manual_seed(rank)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    collectives, norms = {}, {}
    for name, step in steps.items():
        with CountCollectives() as counter:
            norms[name] = [step(batch) for _ in range(2)]
        collectives[name] = {key: count // 2 for key, count in sorted(counter.counts.items())}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(pairs):
        for name in list(steps)[:: 1 if pair % 2 else -1]:
            times[name].append(seconds(steps[name], batch))
    if rank == 0:
        count = sum(p.numel() for p in ours.parameters())
        report(times, collectives, norms, parameters=count, ranks=ranks, out=out)
    dist.barrier()
    os._exit(0)  # gloo can abort an interpreter that is on its way out


def report(times: dict, collectives: dict, norms: dict, *, parameters: int, ranks: int, out: Path) -> None:
    ratios = [ours / theirs for ours, theirs in zip(times["strategy"], times["hand-written"], strict=True)]
    result = {
        **circumstances(),
        "ranks": ranks,
        "parameters": parameters,
        "seconds_per_step": times,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "collectives_per_step": collectives,
        "grad_norms": norms,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(times, result, out / "step.png")
    print(f"| loop | s a step, median (least - most) of {len(ratios)} | gathers | reduce-scatters |\n|---|---|---|---|")
    for name, samples in times.items():
        spread = f"{statistics.median(samples):.3f} ({min(samples):.3f} - {max(samples):.3f})"
        counts = collectives[name]
        print(f"| {name} | {spread} | {counts['allgather_base']} | {counts['reduce_scatter_base']} |")
    print(f"\nratio, median of pairs: {result['ratio_median']:.3f} ({min(ratios):.3f} - {max(ratios):.3f})")
    print(f"gradient norms of the first two steps: {norms}")


def draw(times: dict, result: dict, picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
    for row, samples in enumerate(times.values()):
        axes.plot(samples, [row] * len(samples), "o", alpha=0.6, color=("#888888", "#1f6fb4")[row])
        axes.plot([statistics.median(samples)] * 2, [row - 0.3, row + 0.3], color="#333333")
    axes.set_yticks(range(len(times)), times)
    axes.set_ylim(-0.6, len(times) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds a step")
    axes.set_title(f"{result['hardware']}, {result['ranks']} ranks: ratio {result['ratio_median']:.3f}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    store = args.out / f"store-{os.getpid()}"
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        mp.spawn(measure, (args.ranks, args.pairs, str(store), args.out), nprocs=args.ranks)
    finally:
        store.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
