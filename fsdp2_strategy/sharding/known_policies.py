"""Look up a policy's block classes, its entry points other than forward, and whether it bypasses its blocks.

Input: a model. Output: a `Policy`, from two sources. The first is the model's attributes ``_fsdp_wrap_modules`` and
``_fsdp_forward_methods``, which policies may declare. The second is the entry that `register_policy` made for the name
or class of the model: by the user, or by an integration for the policies of its system (`features.load_policies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.sharding.features import load_policies

ENTRY_POINTS = ("select_action", "predict_action_chunk")
"""Methods that run a policy on a robot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The properties of a policy that determine how it is sharded and run."""

    name: str
    """The name under which it is registered, or its class name if it is not registered."""
    blocks: tuple[str, ...] | None = None
    """Class names of its blocks; None if not known. If empty, units are chosen by size."""
    entry_points: tuple[str, ...] = ENTRY_POINTS
    """Methods other than forward that need gathered parameters."""
    bypassed: bool = False
    """Whether the forward of its blocks is bypassed; see [Note: bypassed units] in `bypassed_units`."""
    declared: bool = False
    """Whether ``blocks`` comes from its ``_fsdp_wrap_modules``. If so, blocks of its backbones are not added."""


_registered: dict[str, Policy] = {}


def register_policy(
    name: str, blocks: Sequence[str] = (), *, entry_points: Sequence[str] = ENTRY_POINTS, bypassed: bool = False
) -> None:
    """Register how a policy is sharded and run; not collective.

    Call this function on every rank, before the model is sharded.

    Args:
        name: the class name of the policy, or the attribute ``name`` of the class, which LeRobot's policies have.
        blocks: class names of its blocks; names that match no module of a model are skipped. Blocks that its
            transformers backbones declare are added automatically. If empty, units are chosen by size.
        entry_points: methods other than forward that need gathered parameters; missing methods are skipped.
        bypassed: whether the policy never calls the forward of its blocks. To find out, pass ``run`` to `explain`.

    Raises:
        ConfigError: ``blocks`` or ``entry_points`` is a string, or contains something other than an identifier.

    Example:
        >>> register_policy("MyPolicy", ["MyBlock"], entry_points=["act"])
    """
    for what, names in (("blocks", blocks), ("entry_points", entry_points)):
        if isinstance(names, str) or not all(isinstance(n, str) and n.isidentifier() for n in names):
            fix = f"Write [{names!r}]." if isinstance(names, str) else "Use names of classes or methods, without dots."
            raise ConfigError(
                f"cannot register the policy {name}: {what} is {names!r}, expected a list of Python names. {fix}"
            )
    _registered[name] = Policy(name=name, blocks=tuple(blocks), entry_points=tuple(entry_points), bypassed=bypassed)


def policy_of(model: nn.Module) -> Policy | None:
    """Return the outermost known policy among a model and the modules within it; None if there is none."""
    load_policies()
    for module in model.modules():
        name = getattr(type(module), "name", None)  # a string in policies; of any type in other modules
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
    """Return an attribute of a module itself or its class, not one of an inner module that a wrapper passes on."""
    is_own = attribute in vars(module) or hasattr(type(module), attribute)
    return getattr(module, attribute) if is_own else None
