"""Copy tensors to a new Hugging Face folder in one process, with bounded memory; verify checksums and cast.

Input: a folder of safetensors files, or tensors by name. Output: a folder, whose floating-point tensors are cast if a
dtype is given.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.errors import CheckpointError, shown
from fsdp2_strategy.hf.checksums import Checksums
from fsdp2_strategy.hf.output_files import create_files, files_for, publish
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.safetensors_format import CONVERTED, Entry, read_header_and_metadata
from fsdp2_strategy.hf.verified_read import Reader, ReadRequest
from fsdp2_strategy.hf.weights_folder import CONFIG
from fsdp2_strategy.hf.write import WriteRequest, force_to_disk, write_all

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


class NewFolder:
    """A new folder of safetensors files, which a ``with`` block fills; `finish` gives the files their final names.

    Args:
        output: the new folder; it must be missing or empty.
        described: shape and dtype of each tensor.
        dtype: dtype of floating-point tensors in the files; by default unchanged.
        max_bytes: the limit, in bytes of tensors per file; by default 5 GB.
        metadata: metadata of the headers.

    Raises:
        CheckpointError: the output is not empty.
    """

    def __init__(
        self,
        output: Path,
        described: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        dtype: torch.dtype | None,
        max_bytes: int | None = None,
        metadata: Mapping[str, str] = CONVERTED,
    ) -> None:
        if output.exists() and any(output.iterdir()):
            raise CheckpointError(f"cannot export: {output} is not empty, expected a new folder. Name another folder.")
        self._output, self._dtype = output, dtype
        regions = {
            name: Region.of(name, shape, dtype if dtype and stored.is_floating_point else stored)
            for name, (shape, stored) in sorted(described.items())
        }
        max_bytes = max_bytes or sizes.FILE_BYTES
        self._files = files_for(output, "model", regions, max_bytes, partial=True, metadata=metadata)
        self.entries = {name: entry for file in self._files for name, entry in file.entries.items()}
        output.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        create_files(self._files)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:  # exists only if `finish` did not rename the file
            file.path.unlink(missing_ok=True)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write full tensors to the files."""
        write_all([WriteRequest(self.entries[name], tuple((0, n) for n in t.shape), t) for name, t in tensors.items()])

    def finish(self, sidecars_from: Path | None) -> None:
        """Copy a folder's sidecar files, set the dtype in the configuration, and give the files their final names."""
        force_to_disk([file.path for file in self._files])
        for path in sidecars_from.iterdir() if sidecars_from else ():
            if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self._output / path.name)
        if self._dtype is not None and (self._output / CONFIG).is_file():
            config = _configuration(self._output / CONFIG)
            if "dtype" in config or "model_type" in config:  # a LeRobot configuration may have neither
                config["dtype"] = str(self._dtype).removeprefix("torch.")
                (self._output / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        publish(self._output, self._files)


def _configuration(path: Path) -> dict[str, Any]:
    """Return the content of a ``config.json``; transformers also writes numbers that are not finite.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: it is not JSON ({error}). Export without --dtype.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"cannot read {path}: it is {shown(config)}, expected an object. Export without --dtype.")
    return config


def copy_folder(
    source: Path,
    output: Path,
    dtype: torch.dtype | None,
    checksums: Checksums | None = None,
    *,
    progress: bool = True,
) -> None:
    """Copy the weights and sidecar files of a folder, without its subfolders; not collective.

    A single weights file stays a single file. Several weights files are split again, by size.

    Args:
        source: the folder.
        output: the new folder; it must be missing or empty.
        dtype: dtype of floating-point tensors in the copy; by default unchanged.
        checksums: checksums of the source's files; by default nothing is verified.
        progress: show the progress; see `Progress`.

    Raises:
        CheckpointError: the output is not empty, or a file cannot be read.
        DamageError: bytes do not match their checksum.
    """
    weights = sorted(source.glob("model*.safetensors"))
    headers = [read_header_and_metadata(path) for path in weights]
    entries = {name: entry for stored, _ in headers for name, entry in stored.items()}
    described = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    max_bytes = sys.maxsize if len(weights) == 1 else sizes.FILE_BYTES
    metadata = CONVERTED | (headers[0][1] if headers else {})
    total = sum(entry.nbytes for entry in entries.values()) if progress else 0
    with (
        NewFolder(output, described, dtype, max_bytes, metadata) as folder,
        Reader("exporting", checksums, total) as reader,
    ):
        for name, entry in folder.entries.items():
            _copy(reader, entries[name], entry)
        folder.finish(source)
        for path in set(source.glob("*.safetensors")) - set(weights):  # for example those of a processor
            shutil.copyfile(path, output / path.name)


def _copy(reader: Reader, source: Entry, target: Entry) -> None:
    """Copy one tensor, a few rows at a time."""
    rows = source.shape[0] if source.shape else 1
    at_once = max(1, rows * sizes.COPY_BYTES // max(1, source.nbytes))
    region = Region.of(source, source.shape, target.dtype)
    for begin in range(0, rows, at_once):
        length = min(at_once, rows - begin)
        box = ((begin, length), *((0, n) for n in source.shape[1:])) if source.shape else ()
        part = torch.empty([n for _, n in box], dtype=target.dtype)
        reader.read([ReadRequest(source.name, region, box, part)])
        write_all([WriteRequest(target, box, part)])
