"""Run other benchmarks on the device, as parts of gpu.py.

Input: the contestants, checks and turns of the other scripts. Output: for each part, comparisons of ours with one of
the references. The sizes are those of an accelerator; with ``--smoke`` those of the scripts' own smoke runs.
"""

import gc
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import checkpoint
import harness
import memory
import rollout
import sequence
import torch
import torch.distributed as dist
import vla
import weights
from gpu_measuring import (
    Job,
    build,
    compared,
    compared_summaries,
    in_gigabytes,
    in_pairs,
    learning_rate_of,
    llama,
    outcome,
    skipped,
    timed,
    tokens,
)
from transformers import LlamaForCausalLM, MixtralForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

LARGEST_DIFFERENCE = 2e-2
"""Between the losses of two ways to split a model, relative: they sum in bf16, in different orders."""
HELD_TOLERANCE = 0.05
"""Between the bytes that a rank holds and the documented ones."""
SETTINGS: dict[str, dict] = {
    "default": {},
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "activation_checkpointing=True": {"activation_checkpointing": True},
    "cpu_offload=True": {"cpu_offload": True},
    "bf16=False": {"bf16": False},
}
SPLITS: dict[str, dict] = {"tensor_parallel_size=2": {"tensor_parallel_size": 2}}
SPLITS["expert_parallel_size=2"] = {"expert_parallel_size": 2}


def differences(job: Job) -> dict:
    """Send changed weights only to an engine of this rank on the device; compare with a full stream."""
    shape = (10, (64, 64)) if job.smoke else (75, (2048, 2048))
    measures, facts, errors = {}, {}, []
    for retain, share in (("copy", 0.5), ("hashes", 1.0)):
        options = {"changing": shape, "rounds": job.rounds, "until": job.until(share)}
        found = rollout.measure_changes(options, "on each rank", retain)
        facts[f"retained bytes, {retain}"] = found.pop("retained_bytes")
        summaries = {name: harness.summary(of.pop("turns")) for name, of in found.items()}
        nbytes = found["all"]["sent_bytes"]
        for name in rollout.SHARES:
            label = f"{name} changed, {retain}"
            if failed := summaries[name].get("error", summaries["all"].get("error")):
                errors.append(f"{label}: {failed}")
                continue
            key = f"{label}, against all weights"
            measures[key] = compared_summaries("updates", 1, summaries[name], summaries["all"])
            measures[f"bytes, {label}"] = in_gigabytes(found[name]["sent_bytes"], nbytes)
    return outcome(measures, {**facts, "tensors": shape}, errors)


def checkpoints(job: Job) -> dict:
    """Save and load a model alone and with AdamW's state; compare with bare files of each rank, and with DCP."""
    measures, facts, errors = {}, {}, []
    for case, share in (("model-0.4", 0.3), ("adam-0.4", 1.0)):
        options = {"case": case, "rounds": min(5, job.rounds), "smoke": job.smoke, "until": job.until(share)}
        options |= {"cold": False, "folder": str(job.scratch / "checkpoint"), "contestants": ["bare", "ours", "DCP"]}
        found = checkpoint.measure(options)
        facts[f"bytes, {case}"] = found["payload_bytes"]
        for kind, turns in found["results"].items():
            names = {"bare": "bare files", "DCP": "DCP"}
            summaries = {name: harness.summary(of) for name, of in turns.items()}
            figures, failed = with_references(f"{kind} {case}", found["payload_bytes"], summaries, names)
            measures |= figures
            errors += failed
    return outcome(measures, facts, errors)


def hugging_face(job: Job) -> dict:
    """Load a Hugging Face folder onto the device, and export it; compare with bare files and with other libraries."""
    source = job.scratch / "source"
    payload = [weights.write_model("1.5", source, smoke=job.smoke) if job.rank == 0 else 0]
    dist.broadcast_object_list(payload, 0)
    loaders = {"bare": "bare files", "DCP Hugging Face reader": "DCP's reader"}
    loaders["rank 0 + broadcast"] = "from_pretrained on rank 0 and broadcast"
    exporters = {"bare": "bare files", "gather + save_file": "gather and save_file"}
    options = {"rounds": min(5, job.rounds), "cold": False, "source": str(source), "target": str(job.scratch / "out")}
    measures, errors = {}, []
    for kind, names, share in (("load", loaders, 0.6), ("export", exporters, 1.0)):
        chosen = {"kinds": [kind], "contestants": {kind: ["ours", *names]}, "until": job.until(share)}
        turns = weights.measure(options | chosen)[kind]
        summaries = {name: weights.summarise(of) for name, of in turns.items()}
        figures, failed = with_references(kind, payload[0], summaries, names)
        measures |= figures
        errors += failed
    return outcome(measures, {"bytes": payload[0]}, errors)


def with_references(
    label: str, nbytes: int, summaries: dict[str, dict], references: dict[str, str]
) -> tuple[dict, list[str]]:
    """Compare ours with each reference; bare files are compared with our reads and writes alone.

    Args:
        label: what was done.
        nbytes: the bytes of all ranks.
        summaries: the figures of each contestant.
        references: the names of contestants, and what the table calls them.

    Returns:
        The comparisons, and the errors of contestants that failed.
    """
    measures, errors = {}, []
    for name, text in references.items():
        if failed := summaries["ours"].get("error", summaries[name].get("error")):
            errors.append(f"{label}, against {text}: {failed}")
            continue
        key = "core_seconds" if name == "bare" and "core_seconds" in summaries["ours"] else "seconds"
        pair, gigabytes = (summaries["ours"], summaries[name]), nbytes / dist.get_world_size() / 1e9
        measures[f"{label}, against {text}"] = compared_summaries("GB", gigabytes, *pair, key)
    return measures, errors


def memory_by_setting(job: Job) -> dict:
    """Measure the memory that a training step needs by setting; compare it with the default and with docs/memory.md."""
    config = llama(job.billions / 6)
    ids = tokens(config, 1, 32 if job.smoke else 2048)
    peaks, measures, facts, errors = {}, {}, {}, []
    for name, changes in SETTINGS.items():
        gc.collect()
        before = harness.allocated()
        strategy = FSDPV2Strategy(config=StrategyConfig(**{"bf16": True, "max_norm": 1.0, **changes}))
        model = strategy.prepare_model(build(config), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=learning_rate_of(model))
        count = sum(harness.local_of(p).numel() for p in model.parameters())

        def step(strategy=strategy, model=model, optimizer=optimizer) -> None:
            strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)

        turns = [timed(step) for _ in range(3)]
        held = None if before is None else harness.allocated() - before
        expected = 0 if "cpu_offload" in changes else 12 * count  # fp32 weights and two moments of AdamW
        peaks[name] = None if held is None else held + turns[-1].peak_bytes
        measures[f"peak of a step, {name}, against the default"] = in_gigabytes(peaks[name], peaks["default"])
        measures[f"held between steps, {name}, against 12 bytes per parameter"] = in_gigabytes(held, 12 * count)
        facts[name] = {"parameters": count, "seconds": [turn.seconds for turn in turns]}
        if held is not None and abs(held - expected) > HELD_TOLERANCE * 12 * count + SMALL_BYTES:
            errors.append(f"a rank holds {held} bytes between steps with {name}, expected {expected}")
        del strategy, model, optimizer, step
    options = {"micro_batches": 4, "rounds": job.rounds, "smoke": job.smoke}
    modes = memory.accumulation(options, -1, config, ids.shape[1], job.until())
    summaries = {mode: harness.summary(found["turns"]) for mode, found in modes.items()}
    for mode in memory.MODES[1:]:
        if failed := summaries[mode].get("error", summaries["every"].get("error")):
            errors.append(f"grad_sync={mode}: {failed}")
            continue
        key = f"step of 4 micro-batches, grad_sync={mode}, against every"
        measures[key] = compared_summaries("steps", 1, summaries[mode], summaries["every"])
    return outcome(measures, facts, errors)


SMALL_BYTES = 64 << 20
"""Memory that does not grow with the model, such as workspaces of matrix products."""


def frozen(job: Job) -> dict:
    """Train a VLA with a frozen backbone; compare with one that is trained as a whole."""
    options = {"hidden": 16 if job.smoke else 1024, "dir": str(job.scratch), "rounds": job.rounds, "until": job.until()}
    found = vla.turns_of_steps(options)
    pair = [found["turns"][name] for name in ("frozen", "trained")]
    errors = [facts["error"] for facts in pair if "error" in facts]
    label = "3 steps with a frozen backbone, against a trained one"
    measures = {} if errors else {label: compared_summaries("steps", 3, *pair)}
    return outcome(measures, {name: found[name] for name in ("traffic", "state_bytes", "parameter_bytes")}, errors)


def split_sequences(job: Job) -> dict:
    """Split sequences over all ranks; compare with full sequences, and count the exchanges."""
    ranks = dist.get_world_size()
    if ranks < 2:
        return skipped("sequences are split over at least 2 accelerators, and there is 1 rank")
    if sequence.HEADS % ranks:
        return skipped(f"the {sequence.HEADS} heads of the model cannot be split over {ranks} ranks")
    lengths = [32, 48] if job.smoke else [4096, 16384]
    lengths = [length // ranks * ranks for length in lengths]
    shape = {"hidden": 64, "layers": 2, "vocabulary": 128} if job.smoke else {"hidden": 2048, "layers": 4}
    steps = sequence.Steps({"vocabulary": 32_000, "longest": max(lengths), **shape})
    measures, errors = {}, []
    for i, length in enumerate(lengths):
        found = sequence.turns_of(steps, length, job.rounds, job.until((i + 1) / len(lengths)))
        for name in (sequence.SAME, sequence.ONE):
            if failed := found[name].get("error", found[sequence.FULL].get("error")):
                errors.append(f"{name}, {length} tokens: {failed}")
                continue
            label = f"{name}, {length:,} tokens, against full sequences"
            measures[label] = compared_summaries("steps", 1, found[name], found[sequence.FULL])
    exchanges = sequence.exchanges_of(steps, lengths[0])
    errors += [facts["error"] for facts in exchanges.values() if "error" in facts]
    return outcome(measures, {"exchanges_per_layer": exchanges}, errors)


def split_layers(job: Job) -> dict:
    """Divide layers or experts among pairs of ranks; compare a step with that of a model that is sharded only."""
    ranks, rank = dist.get_world_size(), job.rank
    if ranks % 2:
        return skipped(f"layers and experts are divided among pairs of ranks, and their number is {ranks}")
    measures, facts, errors = {}, {}, []
    for i, (name, changes) in enumerate(SPLITS.items()):
        is_dense = "tensor_parallel_size" in changes
        heads = {"num_key_value_heads": 2} if job.smoke else {}  # as many as the ranks of a pair
        config = llama(job.billions / 3, **heads) if is_dense else harness.mixtral_config(smoke=job.smoke)
        length = 32 if job.smoke else 4096
        # Each pair has two sequences: ranks that share layers compute both, others one each.
        ids = torch.randint(1, config.vocab_size, (ranks, length), generator=torch.Generator().manual_seed(0))
        own = slice(rank // 2 * 2, rank // 2 * 2 + 2) if is_dense else slice(rank, rank + 1)
        sides = []
        for options, part in ((changes, own), ({}, slice(rank, rank + 1))):
            strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, max_norm=1.0, **options))
            torch.manual_seed(0)
            with harness.device():
                model = (LlamaForCausalLM if is_dense else MixtralForCausalLM)(config)
            model = strategy.prepare_model(model, is_training=True)
            # Without changes of the weights, all losses are equal.
            optimizer = strategy.create_optimizer(model, lr=0.0, weight_decay=0.0)
            sides.append((strategy, model, optimizer, ids[part].to(strategy.device)))
        losses: list[list[float]] = [[], []]

        def step(side: int, sides=sides, losses=losses) -> None:
            strategy, model, optimizer, batch = sides[side]
            strategy.backward(model(input_ids=batch, labels=batch, use_cache=False).loss, model, optimizer)
            losses[side].append(strategy.optimizer_step(optimizer, model).loss)

        until = job.until((i + 1) / len(SPLITS))
        [pair] = in_pairs([partial(step, 0)], [partial(step, 1)], job.rounds, until=until)
        measures[f"step, {name}, against sharding only"] = compared("tokens", length, *pair)
        worst = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
        facts[name] = {"largest_relative_difference": worst}
        if not worst <= LARGEST_DIFFERENCE:
            errors.append(f"{name}: a loss differs by {worst:.2g} from that of sharding only")
    return outcome(measures, facts, errors)


def trainer(job: Job) -> dict:
    """Fine-tune with transformers' Trainer on this package; compare with accelerate's FSDP2."""
    if importlib.util.find_spec("accelerate") is None:
        return skipped("accelerate is not installed")
    if (found := device_of_accelerate().type) != (own := harness.device().type):
        return skipped(f"accelerate would train on the {found}, because it does not know the device {own}")
    if job.rank:
        return outcome({}, {}, [])
    ours, reference = "ours, reduced once", "accelerate"
    sizes = {"--hidden": 32, "--layers": 2, "--steps": 4} if job.smoke else {"--hidden": 2048, "--layers": 8}
    options = {**sizes, "--ranks": dist.get_world_size(), "--rounds": 1 if job.smoke else 2, "--where": "tmpfs"}
    options |= {"--tmpfs": job.scratch / "trainer", "--out": job.scratch / "out"}
    command = [sys.executable, str(Path(__file__).with_name("trainer.py")), *(["--smoke"] if job.smoke else [])]
    command += [str(word) for pair in options.items() for word in pair]
    done = subprocess.run([*command, "--contestants", ours, reference], capture_output=True, text=True, check=False)
    if done.returncode:
        return outcome({}, {}, [f"{(done.stdout + done.stderr)[-3000:]}\ntrainer.py exited with {done.returncode}"])
    [entry] = json.loads((job.scratch / "out" / "trainer.json").read_text())
    shutil.rmtree(job.scratch / "out")
    sides = entry[ours], entry[reference]
    errors = [facts["error"] for facts in sides if "error" in facts]
    measures = {}
    for phase in () if errors else ("step", "save", "load"):
        pair = [{"device_peak_bytes": of[phase]["peak_bytes"], **of[phase]} for of in sides]
        measures[f"{phase}, against accelerate's FSDP2"] = compared_summaries(f"{phase}s", 1, *pair)
        if not torch.accelerator.is_available():
            for side in ("ours", "reference"):
                measures[f"{phase}, against accelerate's FSDP2"][side]["peak_bytes"] = None
    facts = {"parameters": entry["parameters"], "file_bytes": [of.get("file_bytes") for of in sides]}
    return outcome(measures, facts, errors)


def device_of_accelerate() -> torch.device:
    """Return the device that accelerate chooses: the property asks which kinds there are, and keeps no state."""
    from accelerate.state import PartialState

    return PartialState.default_device.fget(PartialState.__new__(PartialState))


PARTS: dict[str, Callable[[Job], dict]] = {
    "differences": differences,
    "checkpoint": checkpoints,
    "weights": hugging_face,
    "memory": memory_by_setting,
    "frozen": frozen,
    "sequence": split_sequences,
    "split": split_layers,
    "trainer": trainer,
}
