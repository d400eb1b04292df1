"""Count the architectures of transformers that train, sharded on two ranks, like the unsharded model.

    python benchmarks/architectures.py [--ranks 2] [--types llama gpt2 ...] [--contestants plain accelerate ours]
                                       [--seconds 60] [--out DIR] [--smoke]

For each model type with a causal language model, a tiny model with the structure of the published ones takes three
steps of AdamW in fp32, with another batch on each rank. The contestants are:

- plain: `fully_shard` on each block that the model's ``_no_split_modules`` names, or on the layers of its largest
  ModuleList, and on the root, as in torch's tutorial;
- accelerate: its FSDP2 with ``transformer_based_wrap``, which is told that it has an accelerator and runs with gloo;
- ours: `prepare_model` and `create_optimizer`, without further options.

A type passes if the loss of each rank and the gradient norm of each step are those of the unsharded model, to a
relative 1e-4 and 1e-3. Each failure is written with its error. A type whose ranks do not answer within ``--seconds``
fails, too. Unsharded models that cannot be built or trained count for nobody. Writes architectures.json.
"""

import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.parallel.tiny_config import tiny_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.architectures import default_config

STEPS = 3
ADAMW = {"lr": 1e-4, "eps": 1e-5, "weight_decay": 0.0}
"""A larger eps than usual, so that gradients that are zero but for rounding move no weight."""
TOLERANCE = {"loss": 1e-4, "grad_norm": 1e-3}
LENGTH = 24

Batch = dict[str, torch.Tensor]
Values = list[tuple[float, float]]
"""The loss and the gradient norm of each step."""


# --- models and batches ----------------------------------------------------------------------------------------------


def build(name: str) -> nn.Module:
    config = tiny_config(default_config(name))
    for part in (config, config.get_text_config()):
        for key, value in vars(part).items():
            if re.search("drop|jitter", key) and isinstance(value, float):
                setattr(part, key, 0.0)
        part.use_cache = False
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().train()


def batch_of(model: nn.Module, rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(1, min(64, model.config.get_text_config().vocab_size), (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def unsharded(name: str) -> Values:
    """Train the model on the batches of all ranks in this process; return this rank's losses, and the norms."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    values, ranks = [], dist.get_world_size()
    for step in range(STEPS):
        losses = [model(**batch_of(model, rank, step)).loss for rank in range(ranks)]
        (sum(losses) / ranks).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        values.append((losses[dist.get_rank()].item(), norm.item()))
    if not all(math.isfinite(value) for pair in values for value in pair):
        raise ValueError(f"the unsharded model has the values {values}")
    return values


# --- contestants -----------------------------------------------------------------------------------------------------


def plain(model: nn.Module, step: Callable[[nn.Module, int], torch.Tensor]) -> Values:
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = list(max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))) if lists else []
    for block in reversed(blocks):  # some contain others, which come first
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    values = []
    for number in range(STEPS):
        loss = step(model, number)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        values.append((loss.item(), full(norm)))
    return values


def accelerate(model: nn.Module, step: Callable[[nn.Module, int], torch.Tensor]) -> Values:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # read, although the process group exists
    if not torch.cuda.is_available():
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    values = []
    for number in range(STEPS):
        loss = step(model, number)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        values.append((loss.item(), full(norm)))
    return values


def ours(model: nn.Module, step: Callable[[nn.Module, int], torch.Tensor]) -> Values:
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    model = strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, **ADAMW)
    values = []
    for number in range(STEPS):
        loss = step(model, number)
        strategy.backward(loss, model, optimizer)
        values.append((loss.item(), strategy.optimizer_step(optimizer, model).grad_norm))
    return values


CONTESTANTS = {"plain": plain, "accelerate": accelerate, "ours": ours}


def full(norm: torch.Tensor | float) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def error_of(contestant: str, name: str) -> str | None:
    """Train one model type with one contestant; return how its values differ from those of the unsharded model."""
    expected = unsharded(name)
    if contestant == "unsharded":
        return None
    found = CONTESTANTS[contestant](
        build(name), lambda model, number: model(**batch_of(model, dist.get_rank(), number)).loss
    )
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for key, value, right in zip(TOLERANCE, one, other, strict=True):
            if not abs(value - right) <= TOLERANCE[key] * abs(right):
                return f"{key} of step {number + 1} is {value:.6g} instead of {right:.6g}"
    return None


# --- ranks -----------------------------------------------------------------------------------------------------------


def run_rank(rank: int, contestant: str, names: list[str], options: dict) -> None:
    """Try one type after another, and write a line for each; end at a failure, which may leave a wrong state."""
    harness.init_rank(rank, options)
    with Path(f"{options['lines']}{rank}").open("a") as lines:
        for name in names:
            try:
                error = error_of(contestant, name)
            except Exception as failure:  # noqa: BLE001  every error is a result
                error = f"{type(failure).__name__}: {str(failure).strip()}"[:300]
            lines.write(json.dumps([name, error]) + "\n")
            lines.flush()
            if error is not None:
                os._exit(1)
    os._exit(0)


def survey(contestant: str, names: list[str], args: object) -> dict[str, str | None]:
    """Return the error of each type, None where it passes."""
    found: dict[str, str | None] = {}
    while rest := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory(prefix="architectures-") as folder:
            options = {"ranks": args.ranks, "smoke": args.smoke, "store": f"{folder}/store", "lines": f"{folder}/rank"}
            context = mp.start_processes(
                run_rank, (contestant, rest, options), nprocs=args.ranks, join=False, start_method="forkserver"
            )
            lines = [Path(f"{options['lines']}{rank}") for rank in range(args.ranks)]
            lost = _wait(context, lines, args.seconds)
            by_rank = [dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {} for path in lines]
        failed = {name: error for answers in by_rank for name, error in answers.items() if error is not None}
        passed = [name for name in rest if all(answers.get(name, lost) is None for answers in by_rank)]
        if not failed:  # no rank has written an error: it crashed or waits in the first type without all answers
            failed = dict.fromkeys([name for name in rest if name not in passed][:1], lost)
        found |= {**dict.fromkeys(passed), **failed}
        print(f"{contestant}: {len(found)} of {len(names)}", flush=True)
    return found


def _wait(context: mp.ProcessContext, lines: list[Path], seconds: float) -> str:
    """Wait until the ranks end, or until one of them has ended or does not answer, and then kill the others."""
    size, since = -1, time.monotonic()
    try:
        while not context.join(timeout=0.2):
            written = sum(path.stat().st_size for path in lines if path.exists())
            if written != size:
                size, since = written, time.monotonic()
            if time.monotonic() - since > seconds:
                return f"no answer within {seconds:.0f} s"
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        return f"a rank ended: {error}".splitlines()[0]
    finally:
        for process in context.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()
    return "a rank ended without an answer"


# --- main ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=60, help="time for one type")
    args = harness.parse(parser, {"types": ["llama", "gpt2"]})
    mp.set_forkserver_preload(harness.PRELOADED)
    transformers.logging.set_verbosity_error()
    unbuilt = {name: error for name, error in survey("unsharded", args.types, args).items() if error}
    names = [name for name in args.types if name not in unbuilt]
    results = {contestant: survey(contestant, names, args) for contestant in args.contestants}
    failures = {
        contestant: {name: error for name, error in found.items() if error} for contestant, found in results.items()
    }
    entry = {**harness.environment(smoke=args.smoke), "ranks": args.ranks, "types": len(names), "not_built": unbuilt}
    entry["passed"] = {contestant: len(names) - len(failed) for contestant, failed in failures.items()}
    entry["failures"] = failures
    (args.out / "architectures.json").write_text(json.dumps(entry, indent=1) + "\n")
    print(f"| | of {len(names)} model types |\n|---|---|")
    for contestant, passed in entry["passed"].items():
        print(f"| {contestant} | {passed} |")


if __name__ == "__main__":
    main()
