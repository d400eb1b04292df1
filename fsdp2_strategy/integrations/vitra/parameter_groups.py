"""Split a vision-language-action model into four parameter groups: backbone or other, with or without weight decay.

Input: a model, sharded or not. Output: parameter groups for `build_optimizer`, or lists of parameters.

[Note: VITRA's weight decay] VITRA builds its groups after FSDP1 has flattened every parameter to one dimension. VITRA
therefore treats all parameters as vectors, and decays none of them, except the cognition token on request. This module
decides by the number of dimensions of the unflattened parameter. ``as_flattened`` reproduces VITRA's behaviour.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.wrappers import unwrap_model

GROUPS = ("backbone_decay", "backbone_no_decay", "other_decay", "other_no_decay")
"""Names of the four parameter groups of a vision-language-action model, in order: see `vla_parameter_groups`."""


def vla_parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    action_model_learning_rate: float | None = None,
    action_model_weight_decay: float | None = None,
    cognition_token_weight_decay: bool = False,
    move_word_embedding_to_action_model: bool = False,
    as_flattened: bool = False,
) -> list[dict[str, Any]]:
    """Return the four groups of a model's trainable parameters, in the order of `GROUPS`; not collective.

    Args:
        model: a VLA with "backbone" in the names of its backbone's parameters.
        learning_rate: learning rate of the backbone.
        weight_decay: weight decay of the backbone's matrices (two or more dimensions, not a bias).
        action_model_learning_rate: learning rate of all other parameters; by default ``learning_rate``.
        action_model_weight_decay: weight decay of all other matrices; by default ``weight_decay``.
        cognition_token_weight_decay: whether parameters with "cognition_token" in their names are decayed. Their number
            of dimensions is ignored.
        move_word_embedding_to_action_model: put the backbone's ``embed_tokens`` into the "other" groups.
        as_flattened: decay only the cognition token (if requested), as VITRA does; see [Note: VITRA's weight decay].

    Returns:
        A dict with "name", "params", "lr" and "weight_decay" for each group. A group may have no parameters.
    """
    split = _split(
        model,
        cognition_token_weight_decay=cognition_token_weight_decay,
        move_word_embedding_to_action_model=move_word_embedding_to_action_model,
        as_flattened=as_flattened,
    )
    other_rate = learning_rate if action_model_learning_rate is None else action_model_learning_rate
    other_decay = weight_decay if action_model_weight_decay is None else action_model_weight_decay
    rates = (learning_rate, learning_rate, other_rate, other_rate)
    decays = (weight_decay, 0.0, other_decay, 0.0)
    return [
        {"name": name, "params": list(split[name].values()), "lr": rate, "weight_decay": decay}
        for name, rate, decay in zip(GROUPS, rates, decays, strict=True)
    ]


def split_modality_collator(
    vla: nn.Module,
    cognition_token_weight_decay: bool = False,
    move_word_embedding_to_action_model: bool = False,
    verbose: bool = True,
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of each group, in the order of `GROUPS`; not collective.

    Args:
        vla, cognition_token_weight_decay, move_word_embedding_to_action_model: as for `vla_parameter_groups`.
        verbose: whether to log the group of each parameter.
    """
    split = _split(
        vla,
        cognition_token_weight_decay=cognition_token_weight_decay,
        move_word_embedding_to_action_model=move_word_embedding_to_action_model,
    )
    for group, parameters in split.items():
        for name in parameters if verbose else ():
            log("%s is in %s", name, group)
    backbone_decay, backbone_no_decay, other_decay, other_no_decay = (list(p.values()) for p in split.values())
    return backbone_decay, backbone_no_decay, other_decay, other_no_decay


def _split(
    model: nn.Module,
    *,
    cognition_token_weight_decay: bool,
    move_word_embedding_to_action_model: bool,
    as_flattened: bool = False,
) -> dict[str, dict[str, nn.Parameter]]:
    split: dict[str, dict[str, nn.Parameter]] = {group: {} for group in GROUPS}
    for name, parameter in named_parameters(unwrap_model(model)).items():
        if not parameter.requires_grad:
            continue
        moved = move_word_embedding_to_action_model and "embed_tokens" in name
        kind = "backbone" if "backbone" in name and not moved else "other"
        decays = not (as_flattened or parameter.ndim <= 1 or name.split(".")[-1] == "bias")
        if "cognition_token" in name:
            decays = cognition_token_weight_decay
        split[f"{kind}_{'decay' if decays else 'no_decay'}"][name] = parameter
    return split
