"""Verify every byte of a checkpoint against its checksums.

Input: a checkpoint's directory. Output: a report of all problems.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fsdp2_strategy.checkpoint.paths import as_path
from fsdp2_strategy.checkpoint.reader import open_checkpoint, problem_in
from fsdp2_strategy.checkpoint.signature import read_key
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.errors import CheckpointError, counted
from fsdp2_strategy.hf.checksums import CheckedRange
from fsdp2_strategy.hf.safetensors_format import Entry, read_header

_THREADS = 4


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify_checkpoint`."""

    problems: list[str]
    """One text for each problem, with tensor, file and byte range if they are known."""

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
        A report of all problems. Corruption is reported and never raises.

    Raises:
        CheckpointError: ``path`` is not a path, or the key file cannot be used.
    """
    path = as_path(path, "verify a checkpoint")
    key = read_key(key_file) if key_file is not None else None
    try:
        opened = open_checkpoint(path, key=key)
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
        for (file, checked), problem in zip(ranges, pool.map(lambda args: problem_in(*args), ranges), strict=True):
            shown.update(checked.end - checked.begin)
            if problem:
                problems.append(f"{_tensor_names(tensors.get(file, []), checked)}: {problem}")
    return VerifyReport(problems)


def _tensor_names(entries: list[Entry], checked: CheckedRange) -> str:
    """Name the tensors that overlap a range, for an error text."""
    names = [e.name for e in entries if e.offset < checked.end and checked.begin < e.offset + e.nbytes]
    if not names:
        return "a header" if entries else "a file"
    more = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"{names[0]}{more}"
