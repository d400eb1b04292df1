"""Record the routing of a forward pass or of ``generate``, and replay it in another model.

Input: a mixture-of-experts model of transformers, sharded or not, or its wrapper. Output: a `Routing`; or forward
passes, and their backward, that choose the experts of a `Routing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from fsdp2_strategy.distributed.torch_internals import is_compiled
from fsdp2_strategy.errors import RolloutError, some
from fsdp2_strategy.hf.transformers_models import inner_model
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.ranks import sequence_group_of
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.parallel.routing.passes import Router, Session
from fsdp2_strategy.parallel.routing.plan import routers_of
from fsdp2_strategy.parallel.routing.recorded import Routing
from fsdp2_strategy.parallel.routing.recorder import Recorder
from fsdp2_strategy.parallel.routing.replayer import Replayer, agree_on_ranks_of, mismatch


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Record the experts that a model chooses in the forward passes of this block; not collective.

    The passes of one ``generate`` are concatenated along the sequence: the prompt, then each generated token except the
    last, which the model never gets. Passes that do not continue a cache begin a new batch. Several batches are
    concatenated along the first dimension, padded on the right. The choices of padding are -1.

    Args:
        model: a mixture-of-experts model of transformers, sharded or not, or its wrapper; or ``engine.model`` of a
            `TransformersEngine`.

    Yields:
        The routing. It is filled when the block ends, on the device of the model.

    Raises:
        RolloutError: the routers of the model cannot be observed; it ran no forward pass in this block; or a pass
            continues a cache that was filled before the block began.

    Example:
        >>> import torch
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, pad_token_id=0)
        >>> model = MixtralForCausalLM(config)
        >>> with record_routing(model) as routing:
        ...     _ = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)
        >>> {name: tuple(choices.shape) for name, choices in routing.layers.items()}
        {'model.layers.0.mlp.gate': (1, 5, 2)}
    """
    root, routers = _routers_of(model, "record routing")
    recorder, routing = Recorder(root), Routing()
    session = Session(root, routers, recorder.open)
    try:
        yield routing
    finally:
        session.close()
    found = recorder.routing()
    routing.layers, routing.input_ids, routing.attention_mask = found.layers, found.input_ids, found.attention_mask


@contextmanager
def replay_routing(model: nn.Module, routing: Routing) -> Iterator[None]:
    """Make a model choose the recorded experts in the forward passes of this block; collective for a sharded model.

    The weights of the experts are computed from the model's own router logits, by its own rule, and gradients flow to
    the router. Tokens without a recorded choice get the model's own: padding, and the last token of a generated
    sequence. The batch may be padded differently from the recorded one, if the model gets its ``attention_mask``.

    Backward may run after the block. Activations are recomputed with the same choices. Each forward pass that does not
    continue a cache replays the routing from its beginning. Nested in this block, `record_routing` records the choices
    that were replayed.

    Args:
        model: a mixture-of-experts model of transformers, sharded or not, or its wrapper.
        routing: the choices for the sequences of the forward passes, in their order. For a micro-batch, select its
            sequences: ``routing[rows]``.

    Raises:
        RolloutError: on every rank: the routers of the model cannot be intercepted; the routing is that of another
            model, or of other tokens; or no forward pass ran in this block.
    """
    with ExitStack() as stack:
        agree_on_ranks_of(stack, model, "replay routing")
        root, routers = _routers_of(model, "replay routing")
        _check_routing(root, routers, routing)
    replayer = Replayer(model, routing)
    session = Session(root, routers, replayer.open)
    try:
        yield
    finally:
        session.close()
    if not replayer.passes:
        raise RolloutError(
            f"cannot replay routing: {class_name(root)} ran no forward pass, expected one at least. Run the model "
            "inside of the block of replay_routing."
        )


def _routers_of(model: nn.Module, action: str) -> tuple[nn.Module, dict[str, Router]]:
    if not isinstance(model, nn.Module):
        raise RolloutError(
            f"cannot {action}: the model is a {type(model).__name__}, expected an nn.Module. Of a TransformersEngine, "
            "pass engine.model; of an engine in another process, use generate(…, return_routing=True)."
        )
    outer = unwrap_model(model)
    root = inner_model(outer)
    if sequence_group_of(outer) is not None:
        raise RolloutError(
            f"cannot {action}: ranks share the sequences of {class_name(root)}, expected a model that computes full "
            "sequences. Set sequence_parallel_size=1."
        )
    if compiled := [name for name, module in outer.named_modules() if is_compiled(module)]:
        raise RolloutError(
            f"cannot {action}: {compiled[0] or class_name(outer)} is compiled, expected routers whose calls can be "
            "intercepted. Set compile_blocks=False."
        )
    return root, routers_of(root, action)


def _check_routing(root: nn.Module, routers: Mapping[str, Router], routing: Routing) -> None:
    """Check what can be checked without a batch."""
    if not isinstance(routing, Routing):
        raise RolloutError(
            f"cannot replay routing: routing is a {type(routing).__name__}, expected a Routing. Make one of tensors "
            "with Routing.from_tensors."
        )
    _ = routing.shape  # raises if there are no layers
    if unknown := sorted(routing.layers.keys() - routers.keys()):
        raise mismatch(
            f"{some(unknown, 'layer')} of the routing are no routers of {class_name(root)}",
            f"names such as {next(iter(routers))}",
        )
    for name, choices in routing.layers.items():
        ordered = choices.sort(dim=-1).values
        is_repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        is_partial = (choices < 0).any(-1) & (choices >= 0).any(-1)
        if bool(is_repeated.any() | is_partial.any()):
            raise mismatch(
                f"{name} has a token with an expert twice, or with fewer than {choices.shape[-1]} experts",
                "different experts, or -1 in all places",
            )
