"""Measure what `from fsdp2_strategy import FSDPV2Strategy` costs, compared with the parts of torch that it stands on.

    python benchmarks/imports.py [--rounds 7] [--out DIR] [--smoke]

New processes run each import in turn. Processor time does not depend on other processes as seconds do. "torch's part"
is FSDP2, DTensor and `torch.distributed.checkpoint`, which every user of sharded checkpoints imports. Writes
imports.json, prints a table. `--smoke` runs each import once.
"""

import statistics
import subprocess
import sys

import harness

CONTESTANTS = {
    "torch": "import torch",
    "torch's part": "import torch, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint",
    "fsdp2_strategy": "from fsdp2_strategy import FSDPV2Strategy",
    "transformers": "from transformers import PreTrainedModel",
}
_REPORT = (
    "; import resource, sys; used = resource.getrusage(resource.RUSAGE_SELF); "
    "print(used.ru_utime + used.ru_stime, len(sys.modules))"
)


def imported(statement: str) -> tuple[float, int]:
    """Return the processor time of a new process that runs an import, and how many modules it has loaded."""
    ran = subprocess.run([sys.executable, "-c", statement + _REPORT], capture_output=True, text=True, check=True)
    seconds, modules = ran.stdout.split()
    return float(seconds), int(modules)


def main() -> None:
    args = harness.parse(harness.parser_of(__doc__), smoke={})
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    modules: dict[str, int] = {}
    for turn in range(args.rounds + 1):
        for name, statement in CONTESTANTS.items():
            taken, modules[name] = imported(statement)
            if turn or args.smoke:  # the first one compiles and reads from disk
                seconds[name].append(taken)
    ratio = harness.ratio(seconds["fsdp2_strategy"], seconds["torch's part"])
    result = {"processor_seconds": seconds, "modules": modules, "ours / torch's part": ratio}
    harness.merge(args.out / "imports.json", {**harness.environment(smoke=args.smoke), **result}, ("hardware",))
    for name, taken in seconds.items():
        print(f"{name:16} {statistics.median(taken):5.2f} s of processor time, {modules[name]:5} modules")
    median, low, high = ratio
    print(f"fsdp2_strategy / torch's part: {median:.2f} ({low:.2f} - {high:.2f})")


if __name__ == "__main__":
    main()
