"""Copy tensors to a new Hugging Face folder in one process, with bounded memory; verify checksums and cast.

Input: a folder of safetensors files, or tensors by name. Output: a folder, whose floating-point tensors are cast if a
dtype is given. Its files get their names all at once, when they are complete: [Note: staged folder] in `staged_folder`.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import CheckpointError, DamageError, dtype_text, shown
from fsdp2_strategy.hf.weights_folder import CONFIG, write_index
from fsdp2_strategy.storage.checksums import Checksums
from fsdp2_strategy.storage.output_files import File, create_files, files_for
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import CONVERTED, Entry, read_header_and_metadata, read_into
from fsdp2_strategy.storage.staged_folder import StagedFolder
from fsdp2_strategy.storage.verified_read import Reader, ReadRequest
from fsdp2_strategy.storage.write import WriteRequest, force_to_disk, write_all

# File names of tokenizers and processors. These files are copied from the folder that a model was loaded from.
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


@contextmanager
def new_folder(
    output: Path,
    described: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    dtype: torch.dtype | None,
    max_bytes: int | None = None,
    metadata: Mapping[str, str] = CONVERTED,
) -> Iterator[NewFolder]:
    """Create a folder for tensors of these shapes and dtypes, for a ``with`` block that fills it."""
    staged = StagedFolder(output)
    regions = {
        name: Region.of(name, shape, dtype if dtype and stored.is_floating_point else stored)
        for name, (shape, stored) in sorted(described.items())
    }
    files = files_for(staged.path, "model", regions, max_bytes or sizes.FILE_BYTES, metadata=metadata)
    with staged:
        staged.create()
        if not staged.is_empty():
            raise CheckpointError(
                f"cannot export: {staged.folder} is not empty, expected a new folder. Name another folder."
            )
        create_files(files)
        yield NewFolder(staged, files, dtype)


class NewFolder:
    """A new folder of safetensors files; `finish` gives the files their names."""

    def __init__(self, staged: StagedFolder, files: Sequence[File], dtype: torch.dtype | None) -> None:
        self._staged, self._files, self._dtype = staged, files, dtype
        self.entries = {name: entry for file in files for name, entry in file.entries.items()}

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write full tensors to the files."""
        write_all([WriteRequest(self.entries[name], tuple((0, n) for n in t.shape), t) for name, t in tensors.items()])

    def finish(
        self, sidecars: Collection[Path], checksums: Checksums | None = None, *, replacements: Collection[Path] = ()
    ) -> None:
        """Copy sidecar files, set the dtype in the configuration, and give all files their names.

        ``replacements`` take the place of ``sidecars`` of the same names, and are not verified.
        """
        folder = self._staged.path
        force_to_disk([file.path for file in self._files])
        for path in sidecars:
            _copy_file(path, folder / path.name, checksums)
        for path in replacements:
            _copy_file(path, folder / path.name, None)
        if self._dtype is not None and (folder / CONFIG).is_file():
            config = _configuration(folder / CONFIG)
            if "dtype" in config or "model_type" in config:  # a LeRobot configuration may have neither
                config["dtype"] = dtype_text(self._dtype)
                (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_index(folder, self._files)
        self._staged.publish()


def sidecars_in(folder: Path) -> list[Path]:
    """Return the files of a folder except weights and their indexes, sorted."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json")
    )


def is_sidecar_of_model(path: Path) -> bool:
    """Return whether a file is the configuration of a model, or belongs to its tokenizer or processor."""
    names = (*TOKENIZER_FILES, CONFIG, "generation_config.json")
    return any(fnmatch.fnmatchcase(path.name, name) for name in names)


def _configuration(path: Path) -> dict[str, Any]:
    """Return the content of a ``config.json``; transformers also writes numbers that are not finite."""
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
    listed: Collection[Path] | None = None,
    replacements: Collection[Path] = (),
    progress: bool = True,
) -> None:
    """Copy the weights and sidecar files of a folder, without its subfolders; not collective.

    A single weights file stays a single file; several are split again, by size. Only files in ``listed`` are copied,
    and a warning names the others; None copies all. Without ``checksums``, nothing is verified. ``replacements`` take
    the place of sidecar files of the same names.
    """
    weights = sorted(source.glob("model*.safetensors"))
    sidecars = [*sidecars_in(source), *sorted(set(source.glob("*.safetensors")) - set(weights))]
    if listed is not None:
        unlisted = [path for path in (*weights, *sidecars) if path not in listed]
        weights = [path for path in weights if path in listed]
        sidecars = [path for path in sidecars if path in listed]
        if unlisted:
            message = "not copied from %s: %s. The checkpoint has no checksums of these files."
            log(message, source, ", ".join(path.name for path in unlisted), level=logging.WARNING)
    headers = [read_header_and_metadata(path) for path in weights]
    entries = {name: entry for stored, _ in headers for name, entry in stored.items()}
    described = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    max_bytes = sys.maxsize if len(weights) == 1 else sizes.FILE_BYTES
    metadata = CONVERTED | (headers[0][1] if headers else {})
    total = sum(entry.nbytes for entry in entries.values()) if progress else 0
    with (
        new_folder(output, described, dtype, max_bytes, metadata) as folder,
        Reader("exporting", checksums, total) as reader,
    ):
        for name, entry in folder.entries.items():
            _copy(reader, entries[name], entry)
        folder.finish(sidecars, checksums, replacements=replacements)


def _copy_file(source: Path, target: Path, checksums: Checksums | None) -> None:
    """Copy a file, and verify the bytes that are copied."""
    if checksums is None:
        shutil.copyfile(source, target)
        return
    try:
        with source.open("rb") as file, target.open("wb") as copy:
            for checked in checksums.covering(source, 0, os.fstat(file.fileno()).st_size):
                content = bytearray(checked.end - checked.begin)
                read_into(file.fileno(), checked.begin, memoryview(content))
                checked.check(memoryview(content), source, source.name)
                copy.write(content)
    except OSError as error:
        raise DamageError(f"cannot read {source}: {error.strerror or error}. Load another checkpoint.") from error


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
