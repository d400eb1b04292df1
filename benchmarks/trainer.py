"""Fine-tune with transformers' Trainer: on this package, and on accelerate's FSDP2.

    python benchmarks/trainer.py [--ranks 2] [--rounds 7] [--hidden 768] [--layers 8] [--steps 6] [--where disk tmpfs]
                                 [--contestants NAME NAME] [--disk DIR] [--tmpfs DIR] [--out DIR] [--smoke]

A Llama is trained on token sequences, fp32, with AdamW and two micro-batches per step. Each turn is one run in new
processes; the contestants take turns, each round in another order. Timed are the steps (the median of a run, without
its first two), then a save of a checkpoint, then a load into the same trainer. Before the load, this rank's part of all
weights and of the optimizer state is set to zero; after it, the values are compared with those before the save. A
contestant whose values differ gets an error instead of times. "ours, in the background" saves with ``async_save``: its
time is that of the call, which blocks the training. The losses of the contestants must be equal to 1e-5.

By default, this package reduces the gradients of each micro-batch, so that a rank holds only its part of them, and
accelerate reduces once per step, so that a rank holds all of them. "ours, reduced once" (``grad_sync="last"``) and
"accelerate, reduced each time" (``sync_each_batch``) do what the other does by default.

accelerate has FSDP2 for accelerators only; on CPUs, it is told that it has one, and then runs with gloo. On disks,
files are removed from the page cache before the load. Peak memory is that of the worst rank: of the whole process in
the steps, in addition to what it holds in saves and loads. Writes trainer.json, prints a table. `--smoke` runs
everything in seconds, with a tiny model.
"""

import os
import shutil
import statistics
import time
from pathlib import Path
from unittest.mock import patch

import harness
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fsdp2_strategy.integrations.trl import with_fsdp2

OPTIONS = {"ours": {}, "ours, reduced once": {"grad_sync": "last"}, "ours, in the background": {"async_save": True}}
CONTESTANTS = (*OPTIONS, "accelerate", "accelerate, reduced each time")
PHASES = ("save", "load")
ACCELERATE = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
ACCELERATE |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true"}
ACCELERATE |= {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
LENGTH = 128
LARGEST_DIFFERENCE = 1e-3 if torch.accelerator.is_available() else 1e-5
"""Between the losses of two contestants, relative; kernels of accelerators do not always sum in the same order."""


class Sequences(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 1000, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


class Clock(TrainerCallback):
    """Record the seconds of each step and its loss, and the peak memory of this process after the second step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_bytes = 0

    def on_step_begin(self, *_: object, **__: object) -> None:
        if len(self.seconds) == 2:
            Path("/proc/self/clear_refs").write_text("5")
            if torch.accelerator.is_available():
                torch.accelerator.reset_peak_memory_stats()
        harness.synchronize()
        self.begin = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        harness.synchronize()
        self.seconds.append(time.perf_counter() - self.begin)
        on_device = torch.accelerator.is_available()
        self.peak_bytes = torch.accelerator.max_memory_allocated() if on_device else harness.proc_value("VmHWM")

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def trainer_for(name: str, options: dict, folder: Path, clock: Clock) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options["hidden"],
        intermediate_size=4 * options["hidden"],
        num_hidden_layers=options["layers"],
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000 if options["smoke"] else 32000,
    )
    arguments = TrainingArguments(
        str(folder),
        max_steps=options["steps"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        seed=1,
        dataloader_pin_memory=False,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": name.endswith("reduced each time")}},
    )
    if name not in OPTIONS:
        trainer_class = Trainer
        _accept_fsdp_on_cpu()
    else:
        trainer_class = with_fsdp2(Trainer, **OPTIONS[name])
    return trainer_class(LlamaForCausalLM(config), arguments, train_dataset=Sequences(), callbacks=[clock])


def _accept_fsdp_on_cpu() -> None:
    from accelerate.state import DistributedType, PartialState

    os.environ.update(ACCELERATE)
    if not torch.accelerator.is_available():
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's part of all weights, and of their optimizer state."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        state = trainer.optimizer.state[parameter]
        found |= {name: parameter, **{f"{name}.{key}": tensor for key, tensor in sorted(state.items())}}
    return {name: harness.local_of(tensor.detach()) for name, tensor in found.items()}


def largest_of(value: int) -> int:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def load(trainer: Trainer, name: str, checkpoint: str) -> None:
    if name not in OPTIONS:
        trainer._load_from_checkpoint(checkpoint, trainer.model_wrapped)
    trainer._load_optimizer_and_scheduler(checkpoint)


def measure(rank: int, options: dict) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(options["ranks"])
    harness.init_rank(rank, options)
    name, folder, clock = options["name"], Path(options["dir"]), Clock()
    trainer = trainer_for(name, options, folder, clock)
    with patch("builtins.print"):
        trainer.train()
    taken = dict.fromkeys(PHASES)
    expected = harness.digests_of(tensors_of(trainer))
    trainer._save_checkpoint(trainer.model, None)  # the first save allocates memory that later ones reuse
    if name in OPTIONS:
        trainer.strategy.wait_for_checkpoint()
    dist.barrier()
    taken["save"] = harness.attempt(lambda: harness.turn(lambda: trainer._save_checkpoint(trainer.model, None)))
    if name in OPTIONS:
        trainer.strategy.wait_for_checkpoint()
    dist.barrier()
    checkpoint = folder / f"checkpoint-{trainer.state.global_step}"
    file_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    if options["cold"]:
        harness.drop_from_cache(checkpoint)
        dist.barrier()
    for tensor in tensors_of(trainer).values():
        tensor.zero_()
    taken["load"] = harness.attempt(
        lambda: harness.turn(lambda: load(trainer, name, str(checkpoint))),
        lambda: harness.check_values(harness.digests_of(tensors_of(trainer)), expected),
    )
    result = {phase: harness.of_device(taken[phase]) for phase in PHASES}
    result |= {"steps": clock.seconds[2:], "step_peak_bytes": largest_of(clock.peak_bytes)}
    result |= {"losses": clock.losses, "file_bytes": file_bytes}
    result["parameters"] = sum(p.numel() for p in trainer.model.parameters())
    harness.finish(rank, options, result)


def combined(turns: list[dict]) -> dict:
    """Return the figures of a contestant over its turns, or its first error."""
    for phase in PHASES:
        if error := harness.error_of([taken[phase] for taken in turns]):
            return {"error": f"{phase}: {error}"}
    phases = {phase: harness.summary([taken[phase] for taken in turns]) for phase in PHASES}
    steps: dict = {"seconds": [statistics.median(taken["steps"]) for taken in turns]}
    steps["peak_bytes"] = max(taken["step_peak_bytes"] for taken in turns)
    return {"step": steps, **phases, "file_bytes": turns[0]["file_bytes"], "losses": turns[0]["losses"]}


def check_losses(results: dict[str, dict]) -> None:
    """Replace the figures of a contestant by an error if its losses are not those of the first one, which is ours."""
    expected = next(iter(results.values())).get("losses", ())
    for name, facts in results.items():
        pairs = zip(facts.get("losses", ()), expected, strict=False)
        if any(abs(a - b) > LARGEST_DIFFERENCE * abs(b) for a, b in pairs):
            results[name] = {"error": "other losses than ours"}


def print_table(where: str, results: dict[str, dict]) -> None:
    print(f"\n| {where} | step, s | save, s | load, s | peak, MB | save peak, MB | load peak, MB | files, MB |")
    print("|---|---|---|---|---|---|---|---|")
    first = next(iter(results))
    for name, facts in results.items():
        if "error" in facts:
            print(f"| {name} | {facts['error']} |")
            continue
        cells = []
        for phase in ("step", *PHASES):
            if name == first or "error" in results[first]:
                cells.append(harness.format_times(facts[phase]["seconds"]))
                continue
            middle, low, high = harness.ratio(facts[phase]["seconds"], results[first][phase]["seconds"])
            ratio = f"; / ours {middle:.2f} ({low:.2f} - {high:.2f})"
            cells.append(f"{harness.format_times(facts[phase]['seconds'])}{ratio}")
        cells += [f"{facts[phase]['peak_bytes'] / 1e6:.0f}" for phase in ("step", *PHASES)]
        print(f"| {name} | {' | '.join(cells)} | {facts['file_bytes'] / 1e6:.0f} |")


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS, help="one of ours first")
    parser.add_argument("--where", nargs="+", default=["disk", "tmpfs"], choices=["tmpfs", "disk"])
    args = harness.parse(
        parser,
        smoke={"hidden": 32, "layers": 2, "steps": 4, "where": ["disk"]},
        scratch_folders={"disk": Path("runs/trainer"), "tmpfs": Path("/dev/shm/trainer")},
    )
    sizes = {name: getattr(args, name) for name in ("hidden", "layers", "steps", "ranks", "rounds")}
    for where in args.where:
        scratch = (args.disk if where == "disk" else args.tmpfs).absolute()
        turns: dict[str, list[dict]] = {name: [] for name in args.contestants}
        for name in harness.turn_order(list(args.contestants), args.rounds):
            options = {**sizes, "smoke": args.smoke, "dir": str(scratch), "cold": where == "disk", "name": name}
            try:
                turns[name].append(harness.run_on_ranks(measure, options))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        results = {name: combined(taken) for name, taken in turns.items()}
        check_losses(results)
        print_table(where, results)
        parameters = turns[args.contestants[0]][0]["parameters"]
        entry = {**harness.environment(smoke=args.smoke), **sizes, "where": where, "parameters": parameters, **results}
        harness.merge(args.out / "trainer.json", entry, ("where", "hidden", "layers", "ranks", "hardware"))
    print(f"\nwrote {args.out / 'trainer.json'} ({parameters / 1e6:.0f} M parameters)")


if __name__ == "__main__":
    main()
