"""Compare which experts two models choose: record the choices of one as a tensor.

Input: a mixture-of-experts model, sharded or not, while it runs once. Output: the indices of the chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch
from torch import nn

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.hf.transformers_models import inner_model
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.parallel.routing.replay import record_routing
from fsdp2_strategy.parallel.routing.routers import NO_EXPERTS, without_routers


def has_routers(model: nn.Module) -> bool:
    """Return whether a model has modules that choose experts, also if their choices cannot be recorded."""
    return without_routers(inner_model(unwrap_model(model))) != NO_EXPERTS


def chosen_experts(model: nn.Module, run: Callable[[], object]) -> torch.Tensor | None:
    """Return the experts [layers, batch, length, k] chosen while ``run`` runs the model once; -1 for padding."""
    routing = None
    with ExitStack() as stack:
        with suppress(RolloutError):  # no experts, or a model that `record_routing` refuses by name
            routing = stack.enter_context(record_routing(model))
        run()
    layers = [] if routing is None else list(routing.layers.values())
    if len({choices.shape for choices in layers}) != 1:
        return None
    return torch.stack([choices.long() for choices in layers])
