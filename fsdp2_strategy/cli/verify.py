"""Verify checkpoints, the command ``verify``.

Input: a checkpoint, or a directory of checkpoints. Output: the problems of each.
"""

from __future__ import annotations

import argparse

from fsdp2_strategy.checkpoint.paths import exists
from fsdp2_strategy.checkpoint.verify import VerifyReport, verify_checkpoint
from fsdp2_strategy.cli.found import checkpoints_at, extra_text
from fsdp2_strategy.cli.output import Output
from fsdp2_strategy.distributed.log import show_log
from fsdp2_strategy.errors import counted


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Verify every byte of a checkpoint, or of all in a directory; return 1 if any has a problem, else 0."""
    show_log("WARNING" if output.is_quiet else None)  # for the progress
    status = 0
    for path, _, _ in checkpoints_at(parsed.path, parsed.key_file):
        report = verify_checkpoint(path, key_file=parsed.key_file, progress=not output.is_quiet)
        if not report.ok and not exists(path):
            report = VerifyReport([], is_deleted=True)
        facts = {"ok": report.ok, "problems": report.problems, "extra": report.extra, "deleted": report.is_deleted}
        output.values.append({"path": str(path), **facts})
        text = "ok" if report.ok else counted(len(report.problems), "problem")
        text = "deleted by a run while it was read" if report.is_deleted else text
        output.line(f"{path}: {text}{extra_text(report.extra)}", is_problem=not report.ok)
        for problem in report.problems:
            output.line(f"  {problem}", is_problem=True)
        status |= not report.ok
    return status
