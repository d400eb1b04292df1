"""Find the head of a causal language model, and run the model with another forward of its head.

Input: a model. Output: its head, the head's parameters on this rank, and what the other forward returns.

The head remains a module with FSDP2's hooks, in its own unit or in the root unit. These hooks run when the module is
called and when its output gets a gradient, so the head's parameters are gathered for forward and again for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.model.fsdp_state import class_name


def head_of(root: Any) -> nn.Linear:
    """Return the linear layer that computes the logits; raise LogProbError if the model has none."""
    model = root if hasattr(root, "get_output_embeddings") else getattr(root, "model", root)
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    generates = not hasattr(model, "can_generate") or model.can_generate()
    causal = generates and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if causal and isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    raise LogProbError(
        f"cannot compute log-probabilities: the head of {class_name(model)} is a {type(head).__name__}, expected "
        "the nn.Linear that get_output_embeddings of a causal language model returns. Use such a model, add no adapter "
        "to its head, or call linear_log_probs in its forward."
    )


def parts_of(head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None]:
    """Return weight and bias of a gathered head, or this rank's parts of them and the ranks that share the head."""
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias, None
    (placed,) = head.weight.placements
    if placed != Shard(0):
        raise LogProbError(
            f"cannot compute log-probabilities: the weight of the head has the placement {placed}, expected a head "
            "whose outputs are split. Use the style colwise_gather_output for the head."
        )
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
    return head.weight.to_local(), bias, head.weight.device_mesh.get_group()


def run_with_head(
    root: nn.Module,
    head: nn.Module,
    compute: Callable[[torch.Tensor], torch.Tensor],
    inputs: Mapping[str, Any],
    *,
    with_output: bool = False,
) -> Any:
    """Run a model with ``compute`` as the forward of its head; collective for a sharded model.

    Returns:
        The head's output. It has passed through FSDP2's hooks of the head and of the root unit, so backward gathers
        both units. With ``with_output``, a pair: the head's output and the model's output.
    """
    made: list[torch.Tensor] = []
    forward = root.forward

    def forward_of_root(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if len(made) != 1:
            raise LogProbError(
                f"cannot compute log-probabilities: {class_name(root)} called its head {len(made)} times, expected "
                "one call in a forward pass. Use a causal language model."
            )
        return output if with_output else made[0]

    with (
        _replaced_forward(head, compute),
        head.register_forward_hook(lambda _module, _inputs, output: made.append(output)),
        _replaced_forward(root, forward_of_root),
    ):
        output = root(**inputs)
    return (made[0], output) if with_output else output


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward while the context is active; the module's hooks still run."""
    own = vars(module).pop("forward", None)
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
