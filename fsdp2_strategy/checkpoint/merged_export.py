"""Export a checkpoint with adapters as a Hugging Face folder with the adapters merged, without its model or a GPU.

Input: an open checkpoint with LoRA adapters, and their configuration. Output: the folder that `save_model` would write.

The model is built on meta from its configuration, and peft puts the adapters into it. Each weight is a placeholder that
reads its values from the checkpoint when the export writes it, so a few tensors are in memory at a time; only the
adapters are read at the beginning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.checkpoint.file_schemas import STATE_BYTES
from fsdp2_strategy.checkpoint.paths import WRAPPER, CheckpointPaths
from fsdp2_strategy.checkpoint.reader import Opened
from fsdp2_strategy.checkpoint.stored_model import StoredModel, read_region, stored_model
from fsdp2_strategy.distributed.torch_internals import non_persistent_buffers
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.copy_folder import sidecars_in
from fsdp2_strategy.hf.export import save_in_one_process
from fsdp2_strategy.hf.known_models import build_known
from fsdp2_strategy.hf.peft.files import ADAPTER_CONFIG
from fsdp2_strategy.hf.peft.merge import without_adapters
from fsdp2_strategy.model.placeholders import computed
from fsdp2_strategy.storage.verified_read import Reader

_GENERATION = "generation_config.json"


def export_merged(
    opened: Opened,
    paths: CheckpointPaths,
    output: Path,
    dtype: torch.dtype | None,
    sidecars: Path | None,
    *,
    progress: bool,
) -> None:
    """Write a checkpoint's model with its adapters merged to a Hugging Face folder; for a single process.

    Args:
        opened: the checkpoint.
        paths: its paths, or those of one of its models.
        output: the folder to write.
        dtype: dtype of floating-point tensors; by default that of the checkpoint.
        sidecars: a folder with ``adapter_config.json``, for checkpoints that do not have it.
        progress: whether to show the progress.
    """
    model = build_known(paths.weights)
    if model is None:
        raise CheckpointError(
            f"cannot merge the adapters of {paths.root}: {paths.weights} is of no class of transformers, expected one "
            "that its config.json names. Load it into a model with adapters, and call save_model."
        )
    name = "" if paths.root == paths.state else paths.state.name
    hyper = opened.state_of(name).get("optimizer") or {"of_parameter": ()}
    stored = stored_model(paths, hyper["of_parameter"])
    _add_adapters(model, stored, _configuration(opened, paths, sidecars))
    _check_output(output)
    total = sum(region.numel() * region.dtype.itemsize for region in stored.regions.values()) if progress else 0
    with Reader("exporting", opened.checksums, total) as reader, torch.no_grad():
        _fill(model, stored, reader)
        _set_generation(model, paths.weights)

        def copy_sidecars(folder: Path) -> None:
            for path in sidecars_in(paths.model):
                if opened.lists(path) and not (folder / path.name).exists():
                    (folder / path.name).write_bytes(opened.read(path, STATE_BYTES))

        save_in_one_process(model, output, without_adapters, dtype=dtype, further=copy_sidecars)


def _check_output(output: Path) -> None:
    if output.is_dir() and any(output.iterdir()):
        raise CheckpointError(f"cannot export: {output} is not empty, expected a new folder. Name another folder.")


def _configuration(opened: Opened, paths: CheckpointPaths, sidecars: Path | None) -> Any:
    """Return peft's configuration of the only adapter, from the checkpoint or from a folder."""
    from peft import PeftConfig  # noqa: PLC0415

    folder = paths.state / WRAPPER
    if opened.lists(folder / ADAPTER_CONFIG):
        opened.read(folder / ADAPTER_CONFIG, STATE_BYTES)  # verifies its checksum
    elif sidecars is not None and (sidecars / ADAPTER_CONFIG).is_file():
        folder = sidecars
    else:
        raise CheckpointError(
            f"cannot merge the adapters of {paths.root}: the checkpoint lacks {WRAPPER}/{ADAPTER_CONFIG} (earlier "
            "versions did not save it), expected the configuration of the adapter 'default'. Pass --sidecars with a "
            f"folder that has {ADAPTER_CONFIG}, such as one that peft's save_pretrained wrote."
        )
    return PeftConfig.from_pretrained(str(folder))


def _add_adapters(model: nn.Module, stored: StoredModel, configuration: Any) -> None:
    """Put the adapter on meta into a model, as peft does, and check that these are the adapters of the checkpoint."""
    from peft import inject_adapter_in_model  # noqa: PLC0415

    configuration.inference_mode = True
    try:
        inject_adapter_in_model(configuration, model, "default", low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"cannot merge adapters: peft cannot put them into {type(model).__name__}: {error}. Pass the configuration "
            "of the adapters that were trained."
        ) from error
    shapes = {f"{stored.prefix}{name}": tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()}
    of_model = {name: region for name, region in stored.regions.items() if name.startswith(stored.prefix)}
    missing = [name for name in shapes if name not in of_model]
    further = [name for name in of_model if name not in shapes and ".lora_" in name]
    other = [name for name, shape in shapes.items() if name in of_model and tuple(of_model[name].shape) != shape]
    if missing or further or other:
        found = {"lacks": missing, "also has": further, "has with another shape": other}
        text = "; ".join(f"it {what} {names[0]}" for what, names in found.items() if names)
        raise CheckpointError(
            f"cannot merge adapters: the checkpoint does not have the tensors that {ADAPTER_CONFIG} describes: {text}, "
            "expected the same. Pass the configuration of the adapters that were trained; several adapters can only be "
            "merged by save_model."
        )


def _fill(model: nn.Module, stored: StoredModel, reader: Reader) -> None:
    """Give each tensor its values: those of adapters and buffers now, those of other weights when they are needed."""
    replaced: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or key in non_persistent_buffers(module):
                    continue
                if id(tensor) not in replaced:
                    name = f"{stored.prefix}{path}.{key}" if path else stored.prefix + key
                    replaced[id(tensor)] = _values(name, stored, reader, tensor)
                tensors[key] = replaced[id(tensor)]


def _values(name: str, stored: StoredModel, reader: Reader, tensor: torch.Tensor) -> torch.Tensor:
    region = stored.regions[name]
    if not isinstance(tensor, nn.Parameter):
        return read_region(reader, name, region)
    if ".lora_" in name:
        return nn.Parameter(read_region(reader, name, region), requires_grad=False)
    like = torch.empty(region.shape, dtype=region.dtype, device="meta")
    return computed(lambda: read_region(reader, name, region), like)


def _set_generation(model: Any, folder: Path) -> None:
    if (folder / _GENERATION).is_file():
        from transformers import GenerationConfig  # noqa: PLC0415

        model.generation_config = GenerationConfig.from_pretrained(folder)
