"""Convert the checkpoint of another system to one of this package, the command ``convert``.

Input: a checkpoint of another system. Output: a directory that ``load_ckpt`` resumes from without trust.
"""

from __future__ import annotations

import argparse

from fsdp2_strategy.checkpoint.convert import convert_foreign
from fsdp2_strategy.checkpoint.listing import checkpoints_with_manifest, is_checkpoint
from fsdp2_strategy.cli.foreign import newest_foreign
from fsdp2_strategy.cli.output import Output
from fsdp2_strategy.distributed.log import show_log
from fsdp2_strategy.errors import CheckpointError, some


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Convert a checkpoint of another system, or the newest in a directory; return 0."""
    show_log("WARNING" if output.is_quiet else None)  # for the progress
    if is_checkpoint(parsed.path) or checkpoints_with_manifest(parsed.path):
        raise CheckpointError(
            f"cannot convert {parsed.path}: it has checkpoints of this package, expected one of another system. Load "
            "them with load_ckpt; to-dcp writes them for other programs."
        )
    if parsed.key_file is not None:
        raise CheckpointError(
            f"cannot convert {parsed.path}: --key-file is given, expected no key, because only this package signs "
            "checkpoints. Omit --key-file."
        )
    foreign = newest_foreign(parsed.path, parsed.tag, "convert", trust=parsed.trust)
    result = convert_foreign(foreign, parsed.output, parsed.sidecars, progress=not output.is_quiet)
    contents = result.contents
    facts = {"path": str(foreign.path), "output": str(result.path), "kind": foreign.kind, "step": contents.step}
    output.values.append(facts | {"parts": contents.describe(), "not_converted": list(contents.others)})
    output.line(f"converted {foreign.path}, {foreign.kind}, to {result.path}: {contents.describe()}")
    if contents.others:
        output.line(f"not converted: {some(contents.others, 'value')}")
    output.line(f"resume with load_ckpt(model, {str(parsed.output)!r})")
    return 0
