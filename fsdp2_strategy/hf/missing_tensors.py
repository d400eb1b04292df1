"""Decide which tensors of a model the files of a load may lack, and which of the files the model may lack.

Input: the tensors of a model with their values in files, and what the caller of the load allows. Output: an error, or a
log line about tensors that are initialised instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.load_plan import LoadReport, Target
from fsdp2_strategy.hf.mismatches import Advice
from fsdp2_strategy.model.fsdp_state import class_name

AllowedMissing = Literal["anything", "heads", "nothing"]
"""What files may lack: anything; tensors outside the layers of a base model; nothing, and then the files may not have
tensors that the model lacks, either."""


def check_missing(
    root: nn.Module, targets: Sequence[Target], report: LoadReport, allowed: AllowedMissing, advice: Advice
) -> None:
    """Raise if files or model lack tensors that they may not lack; for "heads", log those that they may."""
    name = class_name(root)
    wanted = [t for t in targets if not (t.is_non_persistent or t.regions or t.may_be_missing)]
    if allowed == "heads":
        layers = [t for t in wanted if _is_in_base_model_layer(t, targets)]
        if wanted and not layers:
            text = "%s: not in the files, initialised instead: %s"
            log(text, name, ", ".join(t.name for t in wanted), level=logging.WARNING)
        if report.unexpected:
            log("%s: in the files, not used: %s", name, ", ".join(report.unexpected))
        wanted = layers
    if allowed != "anything" and wanted:
        raise CheckpointError(
            f"cannot load {name}: the files lack {some([t.name for t in wanted], 'tensor')}, expected all tensors of "
            f"the model. {advice.missing}"
        )
    if allowed == "nothing" and report.unexpected:
        raise CheckpointError(
            f"cannot load {name}: the files contain {some(report.unexpected, 'tensor')}, expected only tensors of the "
            f"model. {advice.unexpected}"
        )


def _is_in_base_model_layer(target: Target, targets: Sequence[Target]) -> bool:
    """Return whether a tensor is inside the base model, and not in a head or a pooler.

    Its name contains the number of a layer, or the files contain other tensors of its module.
    """
    model = target.origin.model if target.origin else None
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix) and not target.name_in_origin.startswith(f"{prefix}."):
        return False
    modules = {module for module, _ in target.registrations}
    in_part = any(t.regions and modules.intersection(module for module, _ in t.registrations) for t in targets)
    return in_part or any(part.isdigit() for part in target.name_in_origin.split("."))
