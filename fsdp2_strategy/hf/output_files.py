"""Create the output files of a save: weights, which `write` fills, their index, and the configuration.

Input: the regions to write, by their names in the files. Output: files of full length with their headers. Not
collective: callers decide which rank creates which file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.storage.json_files import write_text
from fsdp2_strategy.storage.output_files import File, index_of
from fsdp2_strategy.storage.regions import Region


def write_index(folder: Path, files: Sequence[File], index_name: str = "model.safetensors.index.json") -> None:
    """Write the index of several files; no-op if there is only one."""
    if len(files) > 1:
        write_text(folder / index_name, json.dumps(index_of(files), indent=2) + "\n")


def write_configuration(folder: Path, skeleton: Any, regions: Mapping[str, Region]) -> None:
    """Write the configuration files that ``from_pretrained`` reads; no-op if it is not a transformers model."""
    if not is_transformers_model(skeleton):
        return
    config = copy.deepcopy(skeleton.config)
    floating = [region.dtype for region in regions.values() if region.dtype.is_floating_point]
    config.dtype = str(floating[0]).removeprefix("torch.") if floating else config.dtype
    config.architectures = [type(skeleton).__name__]
    if skeleton.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save  # noqa: PLC0415

        custom_object_save(skeleton, folder, config=config)
    config.save_pretrained(folder)
    if skeleton.can_generate():
        skeleton.generation_config.save_pretrained(folder)
