"""Name the methods of peft that cannot be trained, or exported, on sharded models.

Input: a model, sharded or not, or a skeleton of one. Output: an error that names the method. docs/rlhf.md has the table
of all methods.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from fsdp2_strategy.errors import CheckpointError, ShardError
from fsdp2_strategy.model.fsdp_state import class_name, original_class

_REFUSED = {
    "ADALORA": "chooses its ranks by the gradients of full weights (update_and_allocate), which a rank does not have",
    "SHIRA": "draws the places of its weights when the model is built, and a checkpoint does not contain them",
}
"""Methods that cannot be trained: the type in peft, and why."""


def check_trainable_adapters(model: nn.Module) -> None:
    """Raise if a model has adapters of a method that cannot be trained when it is sharded; not collective."""
    for name, kind in _methods_of(model):
        if kind in _REFUSED:
            raise ShardError(
                f"cannot prepare {class_name(model)} for training: its adapter {name!r} is {kind}, which "
                f"{_REFUSED[kind]}, expected another method of peft. Use LoRA; docs/rlhf.md lists the methods."
            )


def check_exportable_prompts(model: nn.Module) -> None:
    """Raise if a model learns prompts that peft computes from other weights, so that its files lack these weights."""
    for module in model.modules():
        encoders = module._modules.get("prompt_encoder")
        for adapter, encoder in encoders.items() if isinstance(encoders, nn.ModuleDict) else ():
            if not _is_lookup(encoder):
                kind = original_class(encoder).__name__
                raise CheckpointError(
                    f"cannot save the adapter {adapter!r} of {class_name(model)} in peft's format: {kind} computes its "
                    "prompts from other weights, which peft does not save, expected prompts that are weights. Use "
                    "prompt tuning, or prefix tuning without projection; or train with FSDPV2Strategy, whose save_ckpt "
                    "saves all weights."
                )


def _is_lookup(encoder: nn.Module) -> bool:
    """Return whether a prompt encoder of peft returns the rows of its embedding unchanged."""
    kind = original_class(encoder).__name__
    return kind in ("PromptEmbedding", "MultitaskPromptEmbedding") or (
        kind == "PrefixEncoder" and not getattr(encoder, "prefix_projection", True)
    )


def _methods_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each adapter within a model, and the type of its method in peft."""
    if "peft" not in sys.modules:  # no adapter can exist
        return
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            kind = getattr(config, "peft_type", "")
            yield name, str(getattr(kind, "value", kind)).upper()
