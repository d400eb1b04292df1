"""Policies as they are: which of their classes are blocks, which methods beside forward run them, what bypasses blocks.

Input: a model. Output: what it declares of itself, as LeRobot's policies do (``_fsdp_wrap_modules``,
``_fsdp_forward_methods``), else what is registered under its name or its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fsdp2_strategy.errors import ConfigError

ENTRY_POINTS = ("select_action", "predict_action_chunk")
"""What runs a policy on a robot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Say how a policy is sharded and run."""

    name: str
    """Its ``name``, or that of its class."""
    blocks: tuple[str, ...] | None = None
    """Class names of its blocks; empty: it has none, its units go by size; None: not known."""
    entry_points: tuple[str, ...] = ENTRY_POINTS
    """Methods beside forward that need gathered parameters."""
    bypassed: bool = False
    """Whether a function runs its blocks, their own forward never: [Note: bypassed units] in `bypassed_blocks`."""
    declared: bool = False
    """Whether it says so itself: then these are all of its blocks, and not those of its backbones as well."""


_registered: dict[str, Policy] = {}


def register_policy(
    name: str, blocks: Sequence[str] = (), *, entry_points: Sequence[str] = ENTRY_POINTS, bypassed: bool = False
) -> None:
    """Say once how a policy is sharded and run, wherever it is met from then on; not collective: do it on every rank.

    Args:
        name: its class's name, or the class's attribute ``name``, as LeRobot's policies have it.
        blocks: class names of its blocks, of which those that a variant lacks are skipped; blocks that backbones from
            transformers know of come by themselves. None at all: units go by size.
        entry_points: methods beside forward that need gathered parameters; those that it lacks are skipped.
        bypassed: whether a function runs its blocks without their forward, which `explain` then points out.

    Raises:
        ConfigError: names are no names.

    Example:
        >>> register_policy("MyPolicy", ["MyBlock"], entry_points=["act"])
    """
    for what, names in (("blocks", blocks), ("entry_points", entry_points)):
        if isinstance(names, str) or not all(isinstance(n, str) and n.isidentifier() for n in names):
            raise ConfigError(
                f"cannot register {name}: {what} is {names!r}, expected names in a list. Write [{str(names)!r}]."
            )
    _registered[name] = Policy(name=name, blocks=tuple(blocks), entry_points=tuple(entry_points), bypassed=bypassed)


def policy_of(model: nn.Module) -> Policy | None:
    """Return what is known of a model, or of the outermost policy within it; None where nothing is; only reads."""
    for module in model.modules():
        name = getattr(type(module), "name", None)  # of a policy; another module may call anything so
        known = _registered.get(name if isinstance(name, str) else "") or _registered.get(type(module).__name__)
        declared, methods = _declared(module, "_fsdp_wrap_modules"), _declared(module, "_fsdp_forward_methods")
        if declared or methods or known:
            entry_points = (*(methods or ()), *(known.entry_points if known else ENTRY_POINTS))
            return Policy(
                name=known.name if known else type(module).__name__,
                blocks=tuple(declared) if declared else known.blocks if known else None,
                entry_points=tuple(dict.fromkeys(entry_points)),
                bypassed=known is not None and known.bypassed,
                declared=bool(declared),
            )
    return None


def _declared(module: nn.Module, attribute: str) -> Sequence[str] | None:
    """Return what a module says of itself: a wrapper, as peft has them, would hand on what the one within says."""
    says_so = attribute in vars(module) or hasattr(type(module), attribute)
    return getattr(module, attribute) if says_so else None


# LeRobot's policies, and transformers' own.
register_policy("act", ["ACTEncoderLayer", "ACTDecoderLayer"])
register_policy("diffusion")
register_policy("groot", ["BasicTransformerBlock"])
register_policy("multi_task_dit", ["TransformerBlock"])
register_policy("pi0", ["_PiGemmaDecoderLayerBase", "GemmaDecoderLayer", "SiglipEncoderLayer"], bypassed=True)
register_policy("pi05", ["_PiGemmaDecoderLayerBase", "GemmaDecoderLayer", "SiglipEncoderLayer"], bypassed=True)
register_policy("pi0_fast", ["_PiGemmaDecoderLayerBase", "GemmaDecoderLayer", "SiglipEncoderLayer"])
register_policy("smolvla", ["LlamaDecoderLayer", "SmolVLMEncoderLayer"], bypassed=True)
register_policy("vla_jepa", ["BasicTransformerBlock"])
register_policy("xvla", ["TransformerBlock"])
register_policy(
    "PI0ForConditionalGeneration", ["GemmaDecoderLayer", "SiglipEncoderLayer"], entry_points=["sample_actions"]
)
