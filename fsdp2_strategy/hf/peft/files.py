"""The adapters of a model of peft alone, as peft's own files hold them.

Input: a model, sharded or not, with adapters in it. Output: for each adapter what its file holds, and its
configuration; `export` and checkpoints write them.
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
from fsdp2_strategy.hf.peft.merge import has_adapters
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.skeleton import original_class, twin
from fsdp2_strategy.model.names import clean

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model"
"""How the names of the files with weights begin."""


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """What files hold of a model's adapters."""

    regions: Mapping[str, Mapping[str, Region]]
    """By adapter, and by name in its file; the sources are names of tensors."""
    copied: Any
    """Twin of the model of peft, with configurations of its own."""

    @classmethod
    def of(cls, root: nn.Module) -> tuple[Self, dict[str, torch.Tensor]]:
        """Lay out the adapters of the one model of peft within a module; collective.

        Returns:
            What files hold, and the tensors of that model by name.

        Raises:
            CheckpointError: on every rank: there is no such model, or several, or it trains more than its adapters.
        """
        with all_or_none("export adapters", CheckpointError):
            adapted = _adapted_model(root)
            tensors = adapted.state_dict(keep_vars=True)
            copied: Any = twin(adapted)
            copied.peft_config = copy.deepcopy(copied.peft_config)
            # peft may look into the base model's folder, or on the hub.
            names = _names_in_files(copied) if is_rank_0() else {}
        names = from_rank_0(names)
        with all_or_none("export adapters", CheckpointError):
            _check_complete(root, [tensors[source] for held in names.values() for source in held.values()])
        whole = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        regions = {adapter: {key: whole[name] for key, name in held.items()} for adapter, held in names.items()}
        return cls(regions, copied), tensors

    def folder_of(self, adapter: str, folder: Path) -> Path:
        """Return where an adapter lies in the folder of all: the one called "default" in that itself."""
        return folder if adapter == "default" else folder / adapter

    def write_configuration(self, adapter: str, folder: Path) -> None:
        """Write what peft reads beside the weights of an adapter, into its folder."""
        config = self.copied.peft_config[adapter]
        base = self.copied.get_base_model() if hasattr(self.copied, "get_base_model") else self.copied
        config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
        config.inference_mode = True
        classes = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(folder, auto_mapping_dict=None if config.task_type else classes)


def _adapted_model(root: nn.Module) -> nn.Module:
    """Return the one model of peft within a module: a PeftModel, or a model that peft put adapters into.

    Raises:
        CheckpointError: there is none, or several.
    """
    found: list[nn.Module] = []
    if has_adapters(root):
        from peft import PeftMixedModel, PeftModel  # noqa: PLC0415

        kinds = (PeftModel, PeftMixedModel)
        found = [module for module in root.modules() if isinstance(module, kinds) or "peft_config" in vars(module)]
    outermost = [m for m in found if not any(m is not other and m in set(other.modules()) for other in found)]
    if len(outermost) != 1:
        raise CheckpointError(
            f"cannot export adapters: {original_class(root).__name__} has {len(outermost)} models of peft, expected "
            "one. Leave merge_adapters out."
        )
    return outermost[0]


def _names_in_files(copied: Any) -> dict[str, dict[str, str]]:
    """Return for each adapter of a model what its file holds: names there, and the model's own; not collective.

    Args:
        copied: twin of the model.
    """
    from peft import PeftModel, get_peft_model_state_dict  # noqa: PLC0415

    state = copied.state_dict(keep_vars=True)
    own_names = {id(tensor): name for name, tensor in state.items()}
    # peft loads the names of a PeftModel, also where it put adapters into a model without one around it.
    prefix = "" if isinstance(copied, PeftModel) else "base_model.model."
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that embeddings are in the file
        for adapter in copied.peft_config:
            held = get_peft_model_state_dict(copied, state_dict=state, adapter_name=adapter)
            found[adapter] = {f"{prefix}{key}": own_names[id(tensor)] for key, tensor in held.items()}
    return found


def _check_complete(root: nn.Module, held: Sequence[torch.Tensor]) -> None:
    """Raise where a model trains what is not held.

    Raises:
        CheckpointError: naming it.
    """
    there = {id(tensor) for tensor in held}
    if lost := [clean(n) for n, p in root.named_parameters() if p.requires_grad and id(p) not in there]:
        raise CheckpointError(
            f"cannot export the adapters of {original_class(root).__name__} alone: it trains {some(lost)} as well, "
            "expected nothing else. Name them in modules_to_save, or save the whole model."
        )
