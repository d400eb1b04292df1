"""Measure how long a save blocks the training thread, and how much it slows training down.

    python benchmarks/stall.py [--ranks 2] [--rounds 7] [--parameters 16 83 330] [--contestants NAME ...] [--dir DIR]
                               [--out DIR] [--smoke]

The state is that of a Llama with the given millions of parameters and AdamW, all fp32: 12 bytes per parameter over all
ranks, by default 0.1, 0.5 and 2 GB per rank. With up to 20 million parameters its layers have a width of 256, so that
there are many tensors. Contestants, in turns: ours, asynchronous and synchronous; torch's `dcp.async_save` with a
thread and with a process; VITRA's way (the full state is gathered on rank 0, then a thread runs torch.save). The bare
copy copies the same bytes into existing memory. The time is that of the call, on the rank where it takes longest; the
following wait for the files is not timed. After that, steps of a smaller model are timed with and without a save of the
large state in flight. At the end each contestant saves once more, all tensors are set to zero as soon as its call
returns, and the saved files are loaded: if they do not hold the values at the time of the call, the contestant gets an
error instead of times. Writes stall.json and stall.png, prints a table. `--smoke` runs everything in seconds, with a
tiny model.
"""

import gc
import multiprocessing
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

ALONE, DURING_SAVE = "alone", "beside a save"  # keys of the recorded results
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def llama(strategy: FSDPV2Strategy, millions: float, *, smoke: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    width, vocab_size = (1024 if millions > 20 else 256, 4096) if not smoke else (32, 64)
    layers = max(2, round(millions * 1e6 / (15.7 * width * width)))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocab_size,
    )
    model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-4)
    step(strategy, model, optimizer)
    return model, optimizer


def step(strategy: FSDPV2Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.zeros(1, 32, dtype=torch.long, device=strategy.device)
    strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
    strategy.optimizer_step(optimizer, model)


class Contestants:
    """Start saves: one method per contestant, which returns a function that waits until the save is complete."""

    def __init__(self, strategy: FSDPV2Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.tensors = self.current()
        self.copies = {n: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for n, t in self.tensors.items()}
        self.group = dist.new_group(backend="gloo")

    def current(self) -> dict[str, torch.Tensor]:
        """Return this rank's current part of all tensors."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = sorted(self.optimizer.state[parameter].items())
            found |= {name: parameter, **{f"{name}.{key}": tensor for key, tensor in state}}
        return {name: harness.local_of(tensor.detach()) for name, tensor in found.items()}

    def bare_copy(self, _folder: Path) -> Callable[[], object]:
        for name, copy in self.copies.items():
            copy.copy_(self.tensors[name], non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return int

    def ours(self, folder: Path) -> Callable[[], object]:
        self.strategy.save_ckpt(self.model, folder, "tag", async_save=True)
        return self.strategy.wait_for_checkpoint

    def ours_sync(self, folder: Path) -> Callable[[], object]:
        self.strategy.save_ckpt(self.model, folder, "tag")
        return int

    def dcp_thread(self, folder: Path) -> Callable[[], object]:
        return self._dcp(folder, AsyncCheckpointerType.THREAD)

    def dcp_process(self, folder: Path) -> Callable[[], object]:
        return self._dcp(folder, AsyncCheckpointerType.PROCESS)

    def _dcp(self, folder: Path, kind: AsyncCheckpointerType) -> Callable[[], object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        future = dcp.async_save(state, checkpoint_id=folder, process_group=self.group, async_checkpointer_type=kind)
        return getattr(future, "upload_completion", future).result

    def gather_then_thread(self, folder: Path) -> Callable[[], object]:
        state = get_state_dict(self.model, self.optimizer, options=FULL)
        # The state dict contains the optimizer's own CPU scalars; the next step would change them during the write.
        state = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t if t.ndim else t.clone(), state)
        if dist.get_rank():
            return int
        folder.mkdir(parents=True, exist_ok=True)
        thread = threading.Thread(target=torch.save, args=(state, folder / "state.pt"))
        thread.start()
        return thread.join

    def load(self, name: str, folder: Path) -> None:
        """Load the files of a contestant."""
        if name == "bare_copy":
            for key, tensor in self.current().items():
                tensor.copy_(self.copies[key])
        elif name.startswith("ours"):
            self.strategy.load_ckpt(self.model, folder, tag="tag")
        else:
            if name.startswith("dcp"):
                state = dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))
                dcp.load(state, checkpoint_id=folder)
                options = StateDictOptions()
            else:
                state = dict(zip(("model", "optimizer"), torch.load(folder / "state.pt"), strict=True))
                options = StateDictOptions(full_state_dict=True)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )


NAMES = ["bare_copy", "ours", "ours_sync", "dcp_thread", "dcp_process", "gather_then_thread"]


def measure_stalls(contestants: Contestants, names: list[str], rounds: int, folder: Path) -> dict[str, list]:
    """Time the calls, after a warm-up save of each contestant that allocates its buffers."""
    found: dict[str, list] = {name: [] for name in names}
    for name in [*names, *harness.turn_order(names, rounds)]:
        if any("error" in outcome for outcomes in found[name] for outcome in outcomes):
            continue
        waits: list[Callable[[], object]] = []

        def timed(name: str = name, waits: list = waits) -> dict:
            seconds: list[float] = []

            def call() -> None:
                start = time.perf_counter()
                waits.append(getattr(contestants, name)(folder / name))
                seconds.append(time.perf_counter() - start)

            outcome = harness.turn(call)
            waits[0]()
            slowest = torch.tensor(seconds)  # the other ranks wait for the slowest one in their next step
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            return outcome | {"seconds": slowest.item()}

        found[name].append(harness.attempt(timed))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        dist.barrier()
        gc.collect()
    return {name: turns[1:] or turns for name, turns in found.items()}


def check_snapshots(contestants: Contestants, found: dict[str, list], folder: Path) -> None:
    """Compare the files of each contestant with the values at the time of its call; an error replaces its times."""
    expected = harness.digests_of(contestants.current())
    before = {key: tensor.clone() for key, tensor in contestants.current().items()}

    def save_and_load(name: str) -> dict:
        try:
            wait = getattr(contestants, name)(folder / name)
            for tensor in contestants.current().values():
                tensor.zero_()
            wait()
        finally:
            dist.barrier(harness.harness_group())  # all ranks have written; also after an error on some ranks
        contestants.load(name, folder / name)
        return {}

    for name, timed in found.items():
        if harness.error_of(timed):
            continue
        outcomes = harness.attempt(
            lambda name=name: save_and_load(name),
            lambda: harness.check_values(harness.digests_of(contestants.current()), expected),
        )
        if harness.error_of([outcomes]):
            found[name] = [outcomes]
            for key, tensor in contestants.current().items():
                tensor.copy_(before[key])
        dist.barrier(harness.harness_group())
        if dist.get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)


def measure_throughput(
    strategy: FSDPV2Strategy, large: Contestants, rounds: int, folder: Path, *, smoke: bool
) -> dict[str, list[float]]:
    """Time steps of a small model without a save, and during a save of the large state."""
    model, optimizer = llama(strategy, 0.03 if smoke else 4, smoke=smoke)
    found: dict[str, list[float]] = {key: [] for key in (ALONE, DURING_SAVE)}
    for _ in range(rounds):
        for name, times in found.items():
            wait: Callable[[], object] = int
            if name == DURING_SAVE:
                wait = large.ours(folder / "throughput")
            start, steps = time.perf_counter(), 0
            while steps < 5:
                step(strategy, model, optimizer)
                steps += 1
            times.append((time.perf_counter() - start) / steps)
            wait()
            dist.barrier()
    return found


def work(rank: int, options: dict) -> None:
    harness.init_rank(rank, options)
    folder = Path(options["dir"])
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    smoke, rounds = options["smoke"], options["rounds"]
    contestants = Contestants(strategy, *llama(strategy, options["parameters"], smoke=smoke))
    found = measure_stalls(contestants, options["contestants"], rounds, folder)
    steps = measure_throughput(strategy, contestants, rounds, folder, smoke=smoke)
    check_snapshots(contestants, found, folder)
    nbytes = sum(t.nbytes for t in contestants.tensors.values())
    for process in multiprocessing.active_children():  # the process of dcp.async_save would report an error at exit
        process.terminate()
    harness.finish(
        rank,
        options,
        {"bytes_of_a_rank": nbytes, "tensors": len(contestants.tensors), "stalls": found, "throughput": steps},
    )


def label_of(name: str) -> str:
    return {"ours_sync": "ours, synchronous", "gather_then_thread": "gather + thread"}.get(name, name.replace("_", " "))


def table(entry: dict) -> str:
    nbytes = entry["bytes_of_a_rank"]
    lines = [
        f"{nbytes / 1e9:.2f} GB per rank, {entry['tensors']} tensors, {entry['ranks']} ranks, {entry['hardware']}",
        "",
    ]
    lines += [
        "| | seconds: median (min - max) | time / bare copy (middle half) | extra memory, MB |",
        "|---|---|---|---|",
    ]
    bare = entry["stalls"]["bare_copy"]["seconds"]
    for name, facts in entry["stalls"].items():
        if "error" in facts:
            lines.append(f"| {label_of(name)} | {facts['error'][:120]} | | |")
            continue
        middle, low, high = harness.ratio(facts["seconds"], bare)
        text = f"{middle:.2f} ({low:.2f} - {high:.2f})"
        lines.append(
            f"| {label_of(name)} | {harness.format_times(facts['seconds'])} | {text} "
            f"| {facts['peak_bytes'] / 1e6:.0f} |"
        )
    alone, during_save = (entry["throughput"][key] for key in (ALONE, DURING_SAVE))
    middle, low, high = harness.ratio(during_save, alone)
    lines += ["", f"a step of the small model: {statistics.median(alone) * 1e3:.0f} ms without a save, "]
    lines[-1] += f"{middle:.2f} x as long during one ({low:.2f} - {high:.2f})"
    return "\n".join(lines)


def _title(entry: dict) -> str:
    gigabytes = entry["bytes_of_a_rank"] / 1e9
    return f"blocked by a save: {gigabytes:.2f} GB per rank, {entry['ranks']} ranks"


def _bars(entry: dict) -> dict[str, list[float]]:
    return {label_of(name): facts["seconds"] for name, facts in entry["stalls"].items() if "seconds" in facts}


def main() -> None:
    parser = harness.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, torch.accelerator.device_count()))
    parser.add_argument("--parameters", type=float, nargs="+", default=[16, 83, 330], help="millions of parameters")
    parser.add_argument("--contestants", nargs="+", default=NAMES, choices=NAMES, help="at least two; bare_copy first")
    args = harness.parse(parser, smoke={"parameters": [0.05]}, scratch_folders={"dir": Path("runs/stall")})
    for millions in args.parameters:
        measured = harness.run_on_ranks(work, {**vars(args), "parameters": millions})
        shutil.rmtree(args.dir, ignore_errors=True)
        entry = {"ranks": args.ranks, "parameters": millions, "dir": str(args.dir)}
        entry |= {**harness.environment(smoke=args.smoke), **measured}
        entry["stalls"] = {name: harness.summary(turns) for name, turns in measured["stalls"].items()}
        entries = harness.merge(args.out / "stall.json", entry, ("ranks", "parameters", "hardware"))
        harness.draw([(_title(e), _bars(e)) for e in entries], args.out / "stall.png", smoke=args.smoke)
        print(table(entry), end="\n\n")


if __name__ == "__main__":
    main()
