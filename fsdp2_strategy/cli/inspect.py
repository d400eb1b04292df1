"""Print the content of a checkpoint, the command ``inspect``.

Input: a checkpoint. Output: a summary (writer, step, size, tensors, parameters, bytes by dtype, components), then
optimizer, schedule, data position and client state; on request the name, dtype and shape of each tensor instead.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.listing import extra_entries, models_in, read_checkpoint
from fsdp2_strategy.checkpoint.paths import EMA, OPTIMIZER, CheckpointPaths
from fsdp2_strategy.checkpoint.reader import Opened, opened_with_headers
from fsdp2_strategy.checkpoint.storage import stored_in
from fsdp2_strategy.checkpoint.training_state import CONVERTED_FROM
from fsdp2_strategy.cli.found import components_in, key_of, read_newest
from fsdp2_strategy.cli.inspect_foreign import inspect_foreign, is_of_another_system
from fsdp2_strategy.cli.output import Output, line_of, text_of_fact, time_text, to_minutes
from fsdp2_strategy.errors import counted, dtype_text, size_text
from fsdp2_strategy.storage.safetensors_format import Entry

_LAYOUTS = {"own": "fsdp2_strategy", "lerobot": "LeRobot", "trainer": "transformers Trainer"}
_OWN = "fsdp2_strategy"
_IN_SUMMARY = {
    *("path", "written_by", "converted_from", "step", "bytes", "modified", "ranks", "shard_size"),
    *("tensor_count", "parameters", "bytes_by_dtype", "components"),
}
"""Facts that the first lines of the text contain."""


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Print the content of a checkpoint, or of the newest in a directory, from headers and small files; return 0."""
    if is_of_another_system(parsed.path):
        return inspect_foreign(parsed, output)
    read = partial(_read, key=key_of(parsed.key_file))
    opened, state, components = read_newest(parsed.path, parsed.tag, read)
    facts = _facts(opened.paths.root, opened.manifest, state) | _count(components)
    if models := models_in(opened.manifest):
        facts["models"] = {name: _of_model(opened, name) for name in models}
    facts["components"] = {name: _totals(entries) for name, entries in components.items()}
    output.values.append(facts | {"tensors": {name: _listed(entries) for name, entries in components.items()}})
    if parsed.tensors is None:
        _print_summary(facts, output)
        _print_details(facts, output)
        return 0
    output.line(facts["path"])
    for name, entries in components.items():
        listed = [entry for entry in entries.values() if fnmatch.fnmatchcase(entry.name, parsed.tensors)]
        output.line(f"\n{name}: {counted(len(listed), 'tensor')}")
        for entry in listed:
            output.line(f"  {entry.name}  {dtype_text(entry.dtype)}  {list(entry.shape)}")
    return 0


def _count(components: Mapping[str, Mapping[str, Entry]]) -> dict[str, Any]:
    """Return the number of tensors and parameters of a checkpoint, and its bytes by dtype; buffers are parameters."""
    nbytes: Counter[str] = Counter()
    for entry in (entry for entries in components.values() for entry in entries.values()):
        nbytes[dtype_text(entry.dtype)] += entry.nbytes
    of_models = [entries for name, entries in components.items() if name.rpartition("/")[2] not in (OPTIMIZER, EMA)]
    return {
        "tensor_count": sum(map(len, components.values())),
        "parameters": sum(math.prod(entry.shape) for entries in of_models for entry in entries.values()),
        "bytes_by_dtype": dict(nbytes.most_common()),
    }


def _print_summary(facts: Mapping[str, Any], output: Output) -> None:
    output.line(facts["path"])
    source = f", converted from {facts['converted_from']}" if facts["converted_from"] else ""
    output.line(line_of("written by", facts["written_by"] + source))
    shards = f", each parameter split over {facts['shard_size']}" if (facts["shard_size"] or 1) > 1 else ""
    ranks = "" if facts["converted_from"] else f", saved on {counted(facts['ranks'], 'rank')}{shards}"
    output.line(line_of("step", f"{facts['step']}{ranks}"))
    output.line(line_of("files", f"{size_text(facts['bytes'])}, modified {to_minutes(facts['modified'])}"))
    in_dtypes = ", ".join(f"{size_text(size)} {dtype}" for dtype, size in facts["bytes_by_dtype"].items())
    parameters = counted(facts["parameters"], "parameter")
    output.line(line_of("content", f"{parameters} in {counted(facts['tensor_count'], 'tensor')}: {in_dtypes}"))
    for name, totals in facts["components"].items():
        text = f"{counted(totals['tensors'], 'tensor')}, {counted(totals['elements'], 'element')}"
        output.line(line_of(f"  {name}", f"{text}, {size_text(totals['bytes'])}"))
    output.line("")


def _print_details(facts: Mapping[str, Any], output: Output) -> None:
    """Print the facts that the summary does not have, except for empty ones."""
    for name, value in facts.items():
        if name == "models":
            output.line(line_of(name, ", ".join(value)))
            for model, its_facts in value.items():
                for fact, its_value in its_facts.items():
                    if text := text_of_fact(fact, its_value):
                        output.line(f"  {model} {fact.replace('_', ' '):<14} {text}")
        elif name not in _IN_SUMMARY and (text := text_of_fact(name, value)):
            output.line(line_of(name.replace("_", " "), text))


def _read(path: Path, key: bytes | None) -> tuple[Opened, dict[str, Any], dict[str, dict[str, Entry]]]:
    """Return a checkpoint, its state, and the tensors of its components."""
    opened = opened_with_headers(path, key)
    return opened, opened.state_of(), _components(opened)


def _of_model(opened: Opened, name: str) -> dict[str, Any]:
    """Return what a checkpoint has of one of several models, besides tensors."""
    state = opened.state_of(name)
    return {
        "step": state["step"],
        "shard_size": opened.manifest["models"][name].get("shard_size"),
        **_training_state(state),
    }


def _components(opened: Opened) -> dict[str, dict[str, Entry]]:
    folders = components_in(opened.paths, models_in(opened.manifest))
    found = {name: stored_in(folder, opened.paths) for name, folder in folders.items() if folder.is_dir()}
    return {name: dict(sorted(entries.items())) for name, entries in found.items() if entries}


def _facts(path: Path, manifest: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = read_checkpoint(path)
    assert checkpoint is not None  # `open_checkpoint` has read the manifest
    data = state.get("data")
    versions = state.get("versions") or {}
    return {
        "path": str(path),
        "written_by": " ".join([_OWN, *filter(None, [versions.get(_OWN)])]),
        "converted_from": state.get(CONVERTED_FROM),
        "modified": time_text(CheckpointPaths.found_in(path).manifest.stat().st_mtime),
        "step": checkpoint.step,
        "sequence": checkpoint.sequence,
        "layout": _LAYOUTS[CheckpointPaths.found_in(path).kind],
        "bytes": checkpoint.total_bytes,
        "ranks": state["world_size"],
        "shard_size": manifest.get("shard_size"),
        "protected": checkpoint.protected,
        "metric": checkpoint.metric,
        "versions": state.get("versions"),
        "seed": None if state.get(CONVERTED_FROM) else state.get("seed"),  # that of a conversion is a constant
        **_training_state(state),
        "data_position": data and data.get("state", {"saved by": f"{data.get('ranks')} ranks, one state per rank"}),
        "client_state": state.get("client_state"),
        "extra_files": extra_entries(path, manifest["files"]),
    }


def _training_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of the optimizer, the settings that occur in its groups, the schedule and the loss scale."""
    hyper, facts = state.get("optimizer"), None
    if hyper:
        facts = {"class": hyper.get("class"), "parameters": len(hyper["of_parameter"]), "settings": hyper["settings"]}
    return {"optimizer": facts, "scheduler": state.get("scheduler"), "loss_scale": state.get("loss_scale")}


def _totals(entries: Mapping[str, Entry]) -> dict[str, int]:
    elements = sum(math.prod(entry.shape) for entry in entries.values())
    return {"tensors": len(entries), "elements": elements, "bytes": sum(entry.nbytes for entry in entries.values())}


def _listed(entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    return [
        {"name": e.name, "dtype": dtype_text(e.dtype), "shape": list(e.shape), "file": e.path.name}
        for e in entries.values()
    ]
