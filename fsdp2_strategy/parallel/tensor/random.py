"""Give each rank that shares layers its own random numbers where it computes a part of the activations.

Input: a model and the plan that splits its layers. Output: hooks on its modules.

[Note: random numbers of split layers] Ranks that share layers have the same random state, because they compute the same
activations between split modules: dropout there must be the same. Between a module whose outputs are split and the one
whose inputs are, each rank computes other heads or other columns. With the same random state, the mask of head h of one
rank would be that of its counterpart on the others, where the masks of the unsharded model are independent. So there,
each rank draws from a stream of its own. Its seed is drawn from the common state, plus the number of the rank: the
common state stays equal, a resumed run draws the same numbers without any further state in a checkpoint, and so does
a block that is recomputed from the common state. Within a layer of peft whose input is full, random numbers are common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

import torch
from torch import nn

from fsdp2_strategy.distributed.generators import seed_torch, set_torch_states, torch_states
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.parallel.tensor.plan import TensorPlan

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_SPLIT_OUTPUTS = ("colwise", "packed_colwise")
_SPLIT_INPUTS = ("rowwise", "packed_rowwise", "all_reduce")
_SPLIT_INSIDE = ("moe_tp_experts",)
_PART_OF_LAYER = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+|original_module|modules_to_save\.[^.]+)$")


def draw_own_random_numbers(root: nn.Module, plan: TensorPlan, rank: int) -> None:
    """Register hooks that switch between common and own random numbers, for one of the ranks that share layers."""
    modules = dict(root.named_modules())
    styles = {_layer_of(name): style for name, style in plan.styles.items() if name in modules}
    ends = [name for name, style in styles.items() if style in _SPLIT_INPUTS]
    scopes = {name: _scope_of(name, ends, modules) for name, style in styles.items() if style in _SPLIT_OUTPUTS}
    inside = [name for name, style in styles.items() if style in _SPLIT_INSIDE]
    regions = {
        scope: _Region(rank, _settings(modules[scope])) for scope in (*scopes.values(), *inside) if scope is not None
    }
    for scope, region in regions.items():
        modules[scope].register_forward_pre_hook(region.enter)
        modules[scope].register_forward_hook(region.leave, always_call=True)
    for name in inside:
        modules[name].register_forward_pre_hook(regions[name].begin)
    for name, module in modules.items():
        around = [scope for scope in regions if not scope or name.startswith(f"{scope}.")]
        innermost = scopes[name] if name in scopes else max(around, key=len, default=None)
        if innermost is None:
            continue
        region = regions[innermost]
        if name in ends:
            module.register_forward_hook(region.end, always_call=True)  # recomputation may stop within the module
        elif name in scopes:
            if _is_adapted(module):
                module.register_forward_pre_hook(region.pause)
            module.register_forward_hook(region.begin)
        elif _is_adapted(module):
            module.register_forward_pre_hook(region.pause)
            module.register_forward_hook(region.resume)


def _layer_of(name: str) -> str:
    """Return the name of the layer of peft that a module is a part of, or the name itself."""
    while (layer := _PART_OF_LAYER.sub("", name)) != name:
        name = layer
    return name


def _is_adapted(module: nn.Module) -> bool:
    return "lora_dropout" in module._modules


def _scope_of(name: str, ends: Iterable[str], modules: dict[str, nn.Module]) -> str | None:
    """Return the innermost module that runs a module and the next one whose inputs are split; None if there is none."""

    def common(other: str) -> list[str]:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return [own for own, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]

    parts = max(map(common, ends), key=len, default=None)
    while parts and isinstance(modules[".".join(parts)], (nn.ModuleList, nn.ModuleDict)):
        parts = parts[:-1]  # its forward is not called
    return None if parts is None else ".".join(parts)


_Setting = tuple[nn.Module | None, str]
"""A module (None: the one that has the hook) and the name of an attribute with a probability."""


def _settings(module: nn.Module) -> list[_Setting]:
    """Return where a module and those within it store probabilities of dropout."""
    found: list[_Setting] = []
    for each in module.modules():
        names = [name for name, value in vars(each).items() if "drop" in name and isinstance(value, (int, float))]
        names += ["p"] if isinstance(each, DROPOUTS) else []
        found += [(None if each is module else each, name) for name in names]
    return found


class _Region:
    """The random states within one module that runs split layers; see [Note: random numbers of split layers].

    Its methods are hooks. `enter` and `leave` do not run if a block is recomputed without its hooks.
    """

    def __init__(self, rank: int, settings: list[_Setting]) -> None:
        self.rank = rank
        self.settings = settings
        self.has_dropout = False
        self.common: list[torch.Tensor] | None = None
        """The common random states, while those of this rank are in use."""
        self.own: list[torch.Tensor] | None = None
        """The random states of this rank, while the common ones are in use for a while."""

    def enter(self, module: nn.Module, _args: object) -> None:
        """Find out whether the module has dropout."""
        self.has_dropout = any(getattr(holder or module, name, 0) > 0 for holder, name in self.settings)
        self.common = self.own = None

    def leave(self, *_: object) -> None:
        """Use the common random numbers, also after an error."""
        self.end()

    def begin(self, module: nn.Module, *_: object) -> None:
        """Use this rank's random numbers."""
        if self.common is not None or not (self.has_dropout and module.training):
            return
        device = current_device()
        if self.own is not None:
            self.common = torch_states(device)
            set_torch_states(self.own, device)
            self.own = None
            return
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        self.common = torch_states(device)
        seed_torch(seed)

    def end(self, *_: object) -> None:
        """Use the common random numbers, and forget those of this rank."""
        if self.common is not None:
            set_torch_states(self.common, current_device())
        self.common = self.own = None

    def pause(self, *_: object) -> None:
        """Use the common random numbers until `resume` or `begin`."""
        if self.common is not None:
            device = current_device()
            self.own = torch_states(device)
            set_torch_states(self.common, device)
            self.common = None

    def resume(self, module: nn.Module, *_: object) -> None:
        """Undo `pause`."""
        if self.own is not None:
            self.begin(module)
