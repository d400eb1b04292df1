"""Export a critic: its transformers model as a folder for ``from_pretrained``, its value head as a file next to it.

Input: a critic, sharded or not. Output: a Hugging Face folder that also contains ``value_head.safetensors``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import counted
from fsdp2_strategy.hf.export import save_with_further_files
from fsdp2_strategy.hf.transformers_models import is_transformers_model, outermost_models
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.model.names import named_parameters, persistent_buffers
from fsdp2_strategy.model.placeholders import full_tensor_of
from fsdp2_strategy.model.ranks import on_ranks_of
from fsdp2_strategy.model.wrappers import unwrap_model

VALUE_HEAD = "value_head.safetensors"


def is_critic(model: nn.Module) -> bool:
    """Return whether a model is a transformers model with further tensors around it, such as a value head."""
    root = unwrap_model(model)
    return _wraps_one_model(root) and bool(_tensors_of_head(root))


def is_plain_wrapper(model: object) -> bool:
    """Return whether a model is a wrapper whose tensors are all those of the transformers model ``.model``."""
    inner = getattr(model, "model", None)
    if not isinstance(model, nn.Module) or not isinstance(inner, nn.Module) or not is_transformers_model(inner):
        return False
    return _wraps_one_model(model) and not _tensors_of_head(model)


def _wraps_one_model(model: nn.Module) -> bool:
    return not is_transformers_model(model) and len(outermost_models(model)) == 1


def save_critic(model: nn.Module, tokenizer: Any = None, output_dir: str | Path | None = None, **kwargs: Any) -> None:
    """Write a critic as a folder whose backbone ``from_pretrained`` loads; collective.

    All other tensors of the critic are written to ``value_head.safetensors``, under the critic's names
    (``score.weight``), in their own dtype. Arguments and errors are those of `save_model`.
    """
    root = unwrap_model(model)
    reshard(root)
    (backbone,) = outermost_models(root).values()
    with on_ranks_of(root):
        head = {name: full_tensor_of(tensor).cpu().contiguous() for name, tensor in _tensors_of_head(root).items()}

    def write_head(folder: Path) -> None:
        save_file(head, folder / VALUE_HEAD)

    save_with_further_files(backbone, tokenizer, output_dir, write_head, **kwargs)
    assert output_dir is not None, "save_with_further_files requires it"
    log("exported %s of the critic's head to %s", counted(len(head), "tensor"), Path(output_dir) / VALUE_HEAD)


def _tensors_of_head(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors outside the critic's transformers model, by name."""
    inside = {
        id(tensor) for inner in outermost_models(root).values() for tensor in inner.state_dict(keep_vars=True).values()
    }
    tensors: dict[str, torch.Tensor] = {**named_parameters(root), **persistent_buffers(root)}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) not in inside}
