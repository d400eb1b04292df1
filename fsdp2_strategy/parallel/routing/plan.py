"""Plan how the choices of a model are intercepted, and try it on a tiny model.

Input: a model of transformers. Output: its routers by name, or the reason why its choices cannot be replayed.

[Note: tried routers] A tiny model of the same class and structure runs; `routers` finds the modules that choose
experts. Then the tiny model replays its own choices, and those of another model. If this does not work, the model is
refused. So no table of classes is needed, and a new release of transformers is checked when a model is first used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.hf.library_internals import set_attention_implementations
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.model.fsdp_state import class_name, original_class
from fsdp2_strategy.parallel.routing.passes import Router, Session
from fsdp2_strategy.parallel.routing.recorded import Routing
from fsdp2_strategy.parallel.routing.recorder import Recorder
from fsdp2_strategy.parallel.routing.replayer import Replayer
from fsdp2_strategy.parallel.routing.routers import (
    LENGTHS,
    NO_EXPERTS,
    RouterPlan,
    find_routers,
    tiny_batch,
    without_routers,
)
from fsdp2_strategy.parallel.tiny_config import tiny_config
from fsdp2_strategy.parallel.tiny_model import SEED, add_noise, build_tiny

_NOISE = 0.1
"""Standard deviation of what is added to weights, so that routers choose different experts for different tokens."""

_plans: dict[tuple[type, str], RouterPlan] = {}
"""By model class and tiny configuration."""


def routers_of(model: nn.Module, action: str) -> dict[str, Router]:
    """Return the routers of a model by name, in the order of its modules; raise if they cannot be intercepted."""
    plan = plan_routers(model)
    if plan.refused:
        raise RolloutError(
            f"cannot {action}: {class_name(model)} {plan.refused}, expected a causal model of transformers whose "
            "routers choose experts with torch.topk. docs/rollout.md lists them; train others without replay."
        )
    return _routers(model, plan)


def plan_routers(model: Any) -> RouterPlan:
    """Return how a model chooses experts, found on a tiny model: [Note: tried routers]; not collective."""
    if not is_transformers_model(model):
        return RouterPlan(refused="is not a model of transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        return RouterPlan(refused="has an encoder and a decoder")
    cls, config = original_class(model), tiny_config(model.config)
    key = (cls, config.to_json_string())
    if key not in _plans:
        _plans[key] = _plan(cls, config)
    return _plans[key]


def _routers(model: nn.Module, plan: RouterPlan) -> dict[str, Router]:
    return {
        name.replace(".base_layer", ""): Router(module, plan.kinds[class_name(module)])  # peft wraps layers
        for name, module in model.named_modules()
        if class_name(module) in plan.kinds
    }


def _plan(cls: type[nn.Module], config: Any) -> RouterPlan:
    failure: Exception | None = None
    for make, its_config in _tiny_models(cls, config):
        tiny = None
        try:
            set_attention_implementations(its_config, "eager")
            tiny = build_tiny(make, its_config, torch.float32)
            _add_noise(tiny)
            plan = find_routers(tiny)
            problem = plan.refused or _problem_of_replay(tiny, plan)
            return RouterPlan(refused=problem) if problem else plan
        except Exception as error:  # noqa: BLE001  models run arbitrary code
            failure = failure or error
            if tiny is not None and without_routers(tiny) == NO_EXPERTS:
                return RouterPlan(refused=NO_EXPERTS)
    lines = str(failure).strip().splitlines() or ["no message"]
    return RouterPlan(refused=f"cannot run as a tiny model ({type(failure).__name__}: {lines[-1]})")


def _tiny_models(cls: type[nn.Module], config: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Yield how to build a tiny model, and its configuration: the class itself, then its text model without a head."""
    yield cls, copy.deepcopy(config)
    text = config.get_text_config()
    if text is not config:  # some image-text models do not run without images
        from transformers import AutoModel  # noqa: PLC0415

        yield AutoModel.from_config, text


def _add_noise(model: nn.Module) -> None:
    add_noise(model, _NOISE, torch.Generator().manual_seed(SEED))


# --- the trial --------------------------------------------------------------------------------------------------------


def _problem_of_replay(tiny: Any, plan: RouterPlan) -> str:
    """Return what is wrong when a tiny model replays choices; an empty text if nothing is."""
    ids, routers = tiny_batch(tiny, LENGTHS[0]), _routers(tiny, plan)
    expected = _values(tiny, ids)
    _, own = _run(tiny, routers, ids)
    if own.layers.keys() != routers.keys():
        return "has routers that do not run in a forward pass"
    _, rows = _run(tiny, routers, ids[1:])
    agreement = [(rows.layers[name] == own.layers[name][1:]).float().mean() for name in routers]
    if min(agreement) < 0.9:
        return "chooses experts for a sequence by the other sequences of the batch"
    if not torch.equal(_run(tiny, routers, ids, own)[0], expected):
        return "computes other values with its own choices"
    other_model = copy.deepcopy(tiny)
    _add_noise(other_model)
    _, other = _run(other_model, _routers(other_model, plan), ids)
    values, replayed = _run(tiny, routers, ids, other)
    if any(not torch.equal(replayed.layers[name], other.layers[name]) for name in routers):
        return "chooses other experts than those that are replayed"
    if torch.equal(values, expected):
        return "computes the same values with other choices"
    return ""


def _values(tiny: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits; the hidden states of a model without a head."""
    with torch.no_grad():
        output = tiny(input_ids=ids, use_cache=False)
    values: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return values


def _run(
    tiny: Any, routers: Mapping[str, Router], ids: torch.Tensor, routing: Routing | None = None
) -> tuple[torch.Tensor, Routing]:
    """Return the values and the choices of a pass, in which a routing is replayed if there is one."""
    recorder = Recorder(tiny)
    replays: list[Any] = [] if routing is None else [Replayer(tiny, routing).open]
    sessions = [Session(tiny, routers, open_pass) for open_pass in (*replays, recorder.open)]
    try:
        values = _values(tiny, ids)
    finally:
        for session in sessions:
            session.close()
    return values, recorder.routing()
