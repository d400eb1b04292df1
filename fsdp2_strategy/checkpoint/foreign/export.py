"""Export the weights of another system's checkpoint to a Hugging Face folder, in one process.

Input: a `Foreign`. Output: a folder for ``from_pretrained``. Only the weights are written, a few tensors at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.foreign.contents import read_contents
from fsdp2_strategy.checkpoint.foreign.sources import Foreign
from fsdp2_strategy.checkpoint.foreign.tensors import read_into
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.copy_folder import is_sidecar_of_model, new_folder, sidecars_in
from fsdp2_strategy.hf.known_models import check_configuration


def sidecars_for(foreign: Foreign, folder: Path | None) -> list[Path]:
    """Return the configuration and tokenizer for a foreign checkpoint: those of ``folder``, else those that it has."""
    if folder is not None:
        return sidecars_in(folder)
    source = foreign.path if foreign.path.is_dir() else foreign.path.parent
    return list(filter(is_sidecar_of_model, sidecars_in(source)))


def export_foreign(foreign: Foreign, output: Path, dtype: torch.dtype | None, sidecar_folder: Path | None) -> None:
    """Export the weights of a foreign checkpoint to a Hugging Face folder; for a single process.

    Raises:
        CheckpointError: the checkpoint has no weights, or the configuration is that of another model.
    """
    weights = read_contents(foreign).weights
    if not weights:
        raise CheckpointError(
            f"cannot export {foreign.path}: it is {foreign.kind} without weights, expected those of a model. Export "
            "another checkpoint."
        )
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    if sidecar_folder is not None:
        check_configuration(sidecar_folder, described, str(foreign.path))
    with new_folder(output, described, dtype) as folder:
        batch: dict[str, torch.Tensor] = {}
        last = list(weights)[-1]
        for name, stored in weights.items():
            batch[name] = torch.empty(stored.shape, dtype=stored.dtype)
            if name == last or sum(tensor.nbytes for tensor in batch.values()) > sizes.CONVERSION_BYTES:
                read_into([(weights[each], tensor) for each, tensor in batch.items()], no_dist=True)
                folder.write(batch)
                batch = {}
        folder.finish(sidecars_for(foreign, sidecar_folder))
