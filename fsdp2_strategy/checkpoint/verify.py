"""Verify every byte of a checkpoint against its checksums.

Input: a checkpoint's directory. Output: a report of all problems.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.layout import REMOVED, extra_entries, hidden_in
from fsdp2_strategy.checkpoint.paths import as_path
from fsdp2_strategy.checkpoint.reader import open_checkpoint
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.errors import CheckpointError, counted
from fsdp2_strategy.hf.checksums import CheckedRange
from fsdp2_strategy.hf.safetensors_format import Entry, read_header, read_into

_THREADS = 4


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify_checkpoint`."""

    problems: list[str]
    """One text for each problem, with tensor, file and byte range if they are known."""
    extra: list[str] = field(default_factory=list)
    """Files and directories (with a slash) that others have put into the checkpoint. They are not verified."""
    is_deleted: bool = False
    """Whether a run that saves deleted the checkpoint while it was read. Then ``problems`` is empty."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify_checkpoint(path: str | Path, *, progress: bool = True) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with the checksums; not collective.

    Args:
        path: the checkpoint's directory.
        progress: show a progress bar, or, if standard error is no terminal, write a line to the log every 30 s.

    Returns:
        A report of all problems. Corruption is reported and never raises. If a run that saves replaces the checkpoint
        meanwhile, the new one is verified; if it deletes the checkpoint, the report says so.

    Raises:
        CheckpointError: ``path`` is not a path.
    """
    path = as_path(path, "verify a checkpoint")
    before = _identity(path)
    report = _verify(path, progress=progress)
    if before is None and any(tag == path.name for _, tag in hidden_in(path.parent, REMOVED)):
        return VerifyReport([], is_deleted=True)
    if report.ok or _identity(path) == before:
        return report
    if (again := _identity(path)) is not None:
        report = _verify(path, progress=progress)
    if again is None or _identity(path) != again:
        return VerifyReport([], is_deleted=True)
    return report


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a directory from another one of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _verify(path: Path, *, progress: bool) -> VerifyReport:
    try:
        opened = open_checkpoint(path)
    except CheckpointError as error:
        return VerifyReport([str(error)])
    problems: list[str] = []
    tensors: dict[Path, list[Entry]] = {}
    ranges: list[tuple[Path, CheckedRange]] = []
    for name, size in opened.manifest["files"].items():
        file = path / name
        try:
            if name not in opened.manifest["checksums"]:
                found = opened.checksums.covering(file, 0, size)
                ranges += [(file, checked) for checked in found]
                if found and found[-1].end != size:
                    problems.append(f"the checksums of {file} cover {found[-1].end} bytes, but the file has {size}")
            if file.suffix == ".safetensors":
                tensors[file] = list(read_header(file).values())
        except CheckpointError as error:
            if str(error) not in problems:  # a corrupt checksum manifest causes the same error for several files
                problems.append(str(error))
    total = sum(checked.end - checked.begin for _, checked in ranges)
    with ThreadPoolExecutor(_THREADS) as pool, Progress(f"verifying {path.name}", total, is_shown=progress) as shown:
        for (file, checked), problem in zip(ranges, pool.map(lambda args: _check(*args), ranges), strict=True):
            shown.update(checked.end - checked.begin)
            if problem:
                problems.append(f"{_tensor_names(tensors.get(file, []), checked)}: {problem}")
    return VerifyReport(problems, extra_entries(path, opened.manifest["files"]))


def _check(path: Path, checked: CheckedRange) -> str:
    """Read a range and compare its checksums; return the problem, or "" if there is none."""
    hasher, memory = checked.hasher(), bytearray(sizes.CACHED_BYTES)
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            for at in range(checked.begin, checked.end, sizes.CACHED_BYTES):
                part = memoryview(memory)[: checked.end - at]
                read_into(fd, at, part)
                hasher.update(part)
        finally:
            os.close(fd)
    except OSError as error:
        return f"bytes {checked.begin} to {checked.end} of {path} cannot be read: {error.strerror or error}"
    return hasher.problem(path)


def _tensor_names(entries: list[Entry], checked: CheckedRange) -> str:
    """Name the tensors that overlap a range, for an error text."""
    names = [e.name for e in entries if e.offset < checked.end and checked.begin < e.offset + e.nbytes]
    if not names:
        return "a header" if entries else "a file"
    more = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"{names[0]}{more}"
