"""Write a checkpoint for plain `torch.distributed.checkpoint`, the command ``to-dcp``.

Input: a checkpoint. Output: a folder that ``dcp.load`` loads in a program without this package.
"""

from __future__ import annotations

import argparse
from functools import partial

from fsdp2_strategy.checkpoint.reader import opened_with_headers
from fsdp2_strategy.checkpoint.to_dcp import dcp_state, write_dcp
from fsdp2_strategy.cli.found import key_of, read_newest
from fsdp2_strategy.cli.output import Output
from fsdp2_strategy.distributed.log import show_log


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Write a checkpoint, or the newest in a directory, for torch.distributed.checkpoint; return 0."""
    show_log("WARNING" if output.is_quiet else None)  # for the progress
    opened = read_newest(parsed.path, parsed.tag, partial(opened_with_headers, key=key_of(parsed.key_file)))
    state = dcp_state(opened)
    write_dcp(opened, state, parsed.output, progress=not output.is_quiet)
    path, entries = opened.paths.root, list(state.content)
    output.values.append(
        {"path": str(path), "output": str(parsed.output), "entries": entries, "partial": state.partial}
    )
    output.line(f"wrote {path} to {parsed.output}: {', '.join(entries)}")
    for model in state.partial:
        name = f"model {model}" if model else "the model"
        output.line(
            f"{name} has no frozen weights there, as in the checkpoint: load it with "
            "dcp.load(..., planner=DefaultLoadPlanner(allow_partial_load=True))."
        )
    return 0
