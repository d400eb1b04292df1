"""Describe the files of a peft model's adapters, in peft's own format.

Input: a model, sharded or not, with adapters. Output: for each adapter, the tensors of its file and its configuration.
`export` and checkpoints write the files.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none, from_rank_0
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.library_internals import forget_tensor_parallel_size
from fsdp2_strategy.hf.peft.merge import peft_models
from fsdp2_strategy.hf.peft.methods import check_exportable_prompts
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.storage.regions import Region

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model"
"""Prefix of the names of the weight files."""


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """The contents of a model's adapter files."""

    regions: Mapping[str, Mapping[str, Region]]
    """For each adapter, the regions of its file by name in the file; their sources are the names of model tensors."""
    skeleton: Any
    """Meta skeleton of the peft model, with its own copy of the configurations."""

    @classmethod
    def of(cls, root: nn.Module) -> tuple[Self, dict[str, torch.Tensor]]:
        """Return the adapter files of the only peft model within a module, and its tensors by name; collective."""
        with all_or_none("export adapters", CheckpointError):
            adapted = _adapted_model(root)
            tensors = adapted.state_dict(keep_vars=True)
            skeleton: Any = meta_skeleton(adapted)
            skeleton.peft_config = copy.deepcopy(skeleton.peft_config)
            # On rank 0 only, because peft may read the base model's folder or query the hub.
            names = _names_in_files(skeleton) if is_rank_0() else {}
        names = from_rank_0(names)
        with all_or_none("export adapters", CheckpointError):
            _check_complete(root, [tensors[source] for held in names.values() for source in held.values()])
        full = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        regions = {adapter: {key: full[name] for key, name in held.items()} for adapter, held in names.items()}
        return cls(regions, skeleton), tensors

    def adapter_folder(self, adapter: str, folder: Path) -> Path:
        """Return the folder of an adapter's files; see `adapter_folder`."""
        return adapter_folder(adapter, folder)

    def write_configuration(self, adapter: str, folder: Path) -> None:
        """Write an adapter's configuration, which peft needs to load the weights, to the adapter's folder."""
        config = self.skeleton.peft_config[adapter]
        base = self.skeleton.get_base_model() if hasattr(self.skeleton, "get_base_model") else self.skeleton
        config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
        config.inference_mode = True
        classes = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(folder, auto_mapping_dict=None if config.task_type else classes)


def adapter_folder(adapter: str, folder: Path) -> Path:
    """Return the folder of an adapter's files: ``folder`` itself for "default", a subfolder for others."""
    return folder if adapter == "default" else folder / adapter


def adapter_configurations(root: nn.Module) -> dict[str, Any]:
    """Copy the configurations of the adapters of the only peft model within a module; empty if it has several."""
    found: list[Any] = _outermost(root)
    return copy.deepcopy(dict(found[0].peft_config)) if len(found) == 1 else {}


def _outermost(root: nn.Module) -> list[nn.Module]:
    found = peft_models(root)
    return [m for m in found if not any(m is not other and m in set(other.modules()) for other in found)]


def _adapted_model(root: nn.Module) -> nn.Module:
    """Return the only peft model within a module: a PeftModel, or a model into which peft injected adapters."""
    outermost = _outermost(root)
    if len(outermost) != 1:
        raise CheckpointError(
            f"cannot export adapters: {class_name(root)} contains {len(outermost)} peft models, "
            "expected one. Pass one peft model; for a model without adapters, use save_model without "
            "merge_adapters=False, or stream_weights."
        )
    return outermost[0]


def _names_in_files(skeleton: Any) -> dict[str, dict[str, str]]:
    """Map, for each adapter, the names in its file to the model's own names; not collective."""
    from peft import PeftModel, get_peft_model_state_dict  # noqa: PLC0415

    for module in skeleton.modules():
        forget_tensor_parallel_size(module)
    state = skeleton.state_dict(keep_vars=True)
    own_names = {id(tensor): name for name, tensor in state.items()}
    # peft expects the names of a PeftModel in files, even if it injected the adapters into a plain model.
    prefix = "" if isinstance(skeleton, PeftModel) else "base_model.model."
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft warns if it saves embeddings
        if any(config.is_prompt_learning for config in skeleton.peft_config.values()):
            check_exportable_prompts(skeleton)
            # peft would compute the prompts, for which the skeleton has no values.
            skeleton.get_prompt_embedding_to_save = lambda adapter: skeleton.prompt_encoder[adapter].embedding.weight
        for adapter in skeleton.peft_config:
            held = get_peft_model_state_dict(skeleton, state_dict=state, adapter_name=adapter)
            found[adapter] = {f"{prefix}{key}": own_names[id(tensor)] for key, tensor in held.items()}
    return found


def _check_complete(root: nn.Module, held: Sequence[torch.Tensor]) -> None:
    """Raise if a trainable parameter is not among the tensors of the files."""
    there = {id(tensor) for tensor in held}
    if lost := [clean(n) for n, p in root.named_parameters() if p.requires_grad and id(p) not in there]:
        raise CheckpointError(
            f"cannot export the adapters of {class_name(root)} alone: it trains {some(lost)} as well, "
            "expected only adapters. Name the modules in modules_to_save, or save or stream the full model."
        )
