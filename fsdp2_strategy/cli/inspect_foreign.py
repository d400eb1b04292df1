"""Print the content of another system's checkpoint, for the command ``inspect``.

Input: a path. Output: kind, step, size and the command that converts it; and, where its pickles may be read, tensors,
parameters, bytes by dtype, parts, and the settings of optimizer and schedule.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.contents import Contents, read_contents
from fsdp2_strategy.checkpoint.foreign.recognise import newest_in
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor
from fsdp2_strategy.checkpoint.listing import checkpoints_with_manifest, is_checkpoint
from fsdp2_strategy.checkpoint.training_state import IMPLEMENTATION
from fsdp2_strategy.cli.foreign import facts_of, newest_foreign
from fsdp2_strategy.cli.output import Output, line_of, text_of_fact, to_minutes
from fsdp2_strategy.errors import counted, dtype_text, size_text, some

_UNREAD = line_of("content", "in pickles, which can run any code: pass --trust to read them")


def is_of_another_system(path: Path) -> bool:
    """Return whether a path has a checkpoint of another system, and none of this package."""
    return not is_checkpoint(path) and not checkpoints_with_manifest(path) and newest_in(path) is not None


def inspect_foreign(parsed: argparse.Namespace, output: Output) -> int:
    """Print what names, sizes and JSON tell about a checkpoint, and its content if that may be read; return 0."""
    foreign = newest_foreign(parsed.path, parsed.tag, "inspect", trust=True)  # no pickle is read without --trust
    facts = facts_of(foreign)
    contents = read_contents(foreign) if parsed.trust or not foreign.needs_trust else None
    tensors = _tensors(contents) if contents is not None else {}
    if contents is not None:
        facts |= {"step": contents.step} | _count(tensors)
        facts["parts"], facts["not_converted"] = contents.describe(), list(contents.others)
        facts |= _training_state(contents)
        listed = {part: list(map(_described, own.items())) for part, own in tensors.items()}
        output.values.append(facts | {"tensors": listed})
    else:
        output.values.append(facts)
    output.line(facts["path"])
    if parsed.tensors is None:
        _print_summary(facts, contents, output)
        return 0
    if contents is None:
        output.line(_UNREAD)
    for part, own in tensors.items():
        chosen = {name: tensor for name, tensor in own.items() if fnmatch.fnmatchcase(name, parsed.tensors)}
        output.line(f"\n{part}: {counted(len(chosen), 'tensor')}")
        for name, tensor in chosen.items():
            output.line(f"  {name}  {dtype_text(tensor.dtype)}  {list(tensor.shape)}")
    return 0


def _print_summary(facts: Mapping[str, Any], contents: Contents | None, output: Output) -> None:
    output.line(line_of("written by", f"another system: {facts['written_by']}"))
    step = "unknown" if facts["step"] is None else facts["step"]
    output.line(line_of("step", str(step)))
    output.line(line_of("files", f"{size_text(facts['bytes'])}, modified {to_minutes(facts['modified'])}"))
    if contents is None:
        output.line(_UNREAD)
    else:
        in_dtypes = ", ".join(f"{size_text(size)} {dtype}" for dtype, size in facts["bytes_by_dtype"].items())
        parameters, count = counted(facts["parameters"], "parameter"), counted(facts["tensor_count"], "tensor")
        output.line(line_of("content", f"{parameters} in {count}: {in_dtypes}"))
        output.line(line_of("parts", facts["parts"]))
        for name in ("optimizer", "scheduler", "client_state"):
            if text := text_of_fact(name, facts[name]):
                output.line(line_of(name.replace("_", " "), text))
        if contents.others:
            output.line(line_of("not convertible", some(contents.others, "value")))
    output.line(line_of("convert it with", facts["convert"]))


def _training_state(contents: Contents) -> dict[str, Any]:
    """Return the settings that occur in the optimizer's groups, the schedule and the trainer's values."""
    facts = None
    if contents.optimizer is not None:
        settings: list[dict[str, Any]] = []
        for group in contents.optimizer.groups:
            own = {key: value for key, value in group.settings.items() if key not in IMPLEMENTATION}
            settings += [own] if own not in settings else []
        facts = {"parameters": len(contents.optimizer.state), "settings": settings}
    return {"optimizer": facts, "scheduler": contents.schedule, "client_state": contents.client_state}


def _tensors(contents: Contents) -> dict[str, dict[str, StoredTensor]]:
    found = {"model": contents.weights}
    if contents.optimizer is not None:
        found["optimizer"] = {
            f"state.{name}.{key}": value
            for name, of_name in contents.optimizer.state.items()
            for key, value in of_name.items()
            if isinstance(value, StoredTensor)
        }
    return found


def _count(tensors: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, Any]:
    nbytes: Counter[str] = Counter()
    for tensor in (each for own in tensors.values() for each in own.values()):
        nbytes[dtype_text(tensor.dtype)] += math.prod(tensor.shape) * tensor.dtype.itemsize
    return {
        "tensor_count": sum(map(len, tensors.values())),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors["model"].values()),
        "bytes_by_dtype": dict(nbytes.most_common()),
    }


def _described(item: tuple[str, StoredTensor]) -> dict[str, Any]:
    name, tensor = item
    return {"name": name, "dtype": dtype_text(tensor.dtype), "shape": list(tensor.shape)}
