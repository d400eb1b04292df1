"""Verify every byte of a checkpoint against its checksums.

Input: a checkpoint's directory. Output: a report of all problems.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fsdp2_strategy.checkpoint.listing import REMOVED, extra_entries, hidden_in, models_in
from fsdp2_strategy.checkpoint.paths import RNG, as_path, identity_of
from fsdp2_strategy.checkpoint.random_state import RNG_BYTES, check_rng
from fsdp2_strategy.checkpoint.reader import Opened, open_checkpoint, problems_in
from fsdp2_strategy.checkpoint.signature import read_key
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.errors import CheckpointError, counted
from fsdp2_strategy.hf.weights_folder import read_index
from fsdp2_strategy.storage.checksums import CheckedRange, adjacent_ranges
from fsdp2_strategy.storage.file_reads import read_repeats
from fsdp2_strategy.storage.safetensors_format import Entry, read_header

_THREADS = 4
_MAX_PROBLEMS = 1000
"""A report contains at most this number of problems, and the number of further ones."""


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


def verify_checkpoint(path: str | Path, *, key_file: str | Path | None = None, progress: bool = True) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with the checksums; not collective.

    Args:
        path: the checkpoint's directory.
        key_file: check that this key signed the checkpoint, and compare the digests that it signed; see `read_key`.
        progress: show a progress bar, or, if standard error is no terminal, write a line to the log every 30 s.

    Returns:
        A report of all problems. Corruption is reported and never raises. If a run that saves replaces the checkpoint
        meanwhile, the new one is verified; if it deletes the checkpoint, the report says so.

    Raises:
        CheckpointError: ``path`` is not a path, or the key file cannot be used.
    """
    path = as_path(path, "verify a checkpoint")
    key = read_key(key_file) if key_file is not None else None
    before = identity_of(path)
    report = _verify(path, key, progress=progress)
    if before is None and any(tag == path.name for _, tag in hidden_in(path.parent, REMOVED)):
        return VerifyReport([], is_deleted=True)
    if report.ok or identity_of(path) == before:
        return report
    if (again := identity_of(path)) is not None:
        report = _verify(path, key, progress=progress)
    if again is None or identity_of(path) != again:
        return VerifyReport([], is_deleted=True)
    return report


def _verify(path: Path, key: bytes | None, *, progress: bool) -> VerifyReport:
    repeats = read_repeats()
    try:
        opened = open_checkpoint(path, key=key)
    except CheckpointError as error:
        return VerifyReport([str(error)])
    tensors, tasks, problems = _tasks(opened)
    total = sum(checked.end - checked.begin for _, together in tasks for checked in together)
    with ThreadPoolExecutor(_THREADS) as pool, Progress(f"verifying {path.name}", total, is_shown=progress) as shown:
        for (file, together), found_problems in zip(
            tasks, pool.map(lambda task: problems_in(*task), tasks), strict=True
        ):
            shown.update(sum(checked.end - checked.begin for checked in together))
            problems += [f"{_tensor_names(tensors.get(file, []), c)}: {problem}" for c, problem in found_problems]
    if not problems:
        problems = _problems_of_states(opened)
    if (repeated := read_repeats() - repeats) > 0:
        log("read again: %s", counted(repeated, "time"), level=logging.WARNING)
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"and {len(problems) - _MAX_PROBLEMS:,} further problems"]
    return VerifyReport(problems, extra_entries(path, opened.manifest["files"]))


_Task = tuple[Path, list[CheckedRange]]


def _tasks(opened: Opened) -> tuple[dict[Path, list[Entry]], list[_Task], list[str]]:
    """Return the tensors of each file, the ranges to verify, and the problems of headers and checksum manifests."""
    tensors: dict[Path, list[Entry]] = {}
    tasks: list[_Task] = []
    problems: list[str] = []
    for name, size in opened.manifest["files"].items():
        file = opened.paths.root / name
        try:
            if name not in opened.manifest["checksums"]:
                found = opened.checksums.covering(file, 0, size)
                tasks += [(file, together) for together in adjacent_ranges(found)]
                if found and found[-1].end != size:
                    problems.append(f"the checksums of {file} cover {found[-1].end} bytes, but the file has {size}")
            if file.suffix == ".safetensors":
                tensors[file] = sorted(read_header(file).values(), key=lambda entry: entry.offset)
        except CheckpointError as error:
            if str(error) not in problems:  # a corrupt checksum manifest causes the same error for several files
                problems.append(str(error))
    return tensors, tasks, problems


def _problems_of_states(opened: Opened) -> list[str]:
    """Return why the content of files whose bytes are right cannot be used."""
    problems = []
    paths = opened.paths
    checks: list[Callable[[], object]] = [partial(opened.state_of, name) for name in ("", *models_in(opened.manifest))]
    for name in opened.manifest["files"]:
        file = paths.root / name
        if file.parent == paths.state / RNG:
            checks.append(partial(_check_rng, opened, file))
        if file.name.endswith(".safetensors.index.json"):
            checks.append(partial(read_index, file))
    for check in checks:
        try:
            check()
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _check_rng(opened: Opened, file: Path) -> None:
    check_rng(opened.read(file, RNG_BYTES), file)


def _tensor_names(entries: list[Entry], checked: CheckedRange) -> str:
    """Name the tensors that overlap a range, for an error text; ``entries`` are sorted by offset."""
    first = bisect.bisect_right(entries, checked.begin, key=lambda entry: entry.offset + entry.nbytes)
    last = bisect.bisect_left(entries, checked.end, key=lambda entry: entry.offset)
    names = [entry.name for entry in entries[first:last] if entry.nbytes]
    if not names:
        return "a header" if entries else "a file"
    more = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"{names[0]}{more}"
