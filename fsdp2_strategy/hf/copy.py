"""A Hugging Face folder -> another, tensor by tensor, checked and cast on the way; one process, bounded memory.

Input: a folder of safetensors files. Output: the same folder elsewhere, its floating tensors in another dtype.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.arrange import create, files_for, index_of
from fsdp2_strategy.hf.checksum import Checksums
from fsdp2_strategy.hf.container import Entry, read_header
from fsdp2_strategy.hf.folder import CONFIG
from fsdp2_strategy.hf.read import Reader, Wish
from fsdp2_strategy.hf.region import Region
from fsdp2_strategy.hf.write import Job, force_to_disk, write_all

_AT_ONCE_BYTES = 64 << 20
_MOST_BYTES = 5 * 10**9


def copy_folder(source: Path, output: Path, dtype: torch.dtype | None, checksums: Checksums | None = None) -> None:
    """Copy a folder of safetensors files with all that lies beside them; not collective.

    Args:
        source: the folder.
        output: where it goes: a new folder, or an empty one.
        dtype: of the floating tensors; by default as they are.
        checksums: what the source's bytes are compared with.

    Raises:
        CheckpointError: the output is not empty, or a file cannot be read.
        DamageError: bytes do not match their checksum.
    """
    if output.exists() and any(output.iterdir()):
        raise CheckpointError(f"cannot export: {output} is not empty, expected a new folder. Name another one.")
    weights = sorted(source.glob("*.safetensors"))
    entries = {name: entry for path in weights for name, entry in read_header(path).items()}
    regions = {name: _cast(entry, dtype) for name, entry in sorted(entries.items())}
    files = files_for(output, "model", regions, _MOST_BYTES)
    output.mkdir(parents=True, exist_ok=True)
    create(files)
    with Reader("exporting", checksums) as reader:
        for file in files:
            for name, entry in file.entries.items():
                _copy(reader, entries[name], entry)
    force_to_disk([file.path for file in files])
    if len(files) > 1:
        (output / "model.safetensors.index.json").write_text(json.dumps(index_of(files), indent=2) + "\n")
    for path in source.iterdir():
        if path.is_file() and path not in weights and not path.name.endswith(".index.json"):
            shutil.copyfile(path, output / path.name)
    if dtype is not None and (output / CONFIG).is_file():
        config = json.loads((output / CONFIG).read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _cast(entry: Entry, dtype: torch.dtype | None) -> Region:
    return Region.of(entry, entry.shape, dtype if dtype and entry.dtype.is_floating_point else entry.dtype)


def _copy(reader: Reader, source: Entry, target: Entry) -> None:
    """Copy one tensor, some rows at a time."""
    rows = source.shape[0] if source.shape else 1
    at_once = max(1, rows * _AT_ONCE_BYTES // max(1, source.nbytes))
    region = Region.of(source, source.shape, target.dtype)
    for begin in range(0, rows, at_once):
        length = min(at_once, rows - begin)
        box = ((begin, length), *((0, n) for n in source.shape[1:])) if source.shape else ()
        part = torch.empty([n for _, n in box], dtype=target.dtype)
        reader.read([Wish(source.name, region, box, part)])
        write_all([Job(target, box, part)])
