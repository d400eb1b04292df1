"""Divide the experts of a model among ranks, before `fully_shard` splits those that a rank holds.

Input: a model with full parameters, and the axes "tp" and "ep" of meshes. Output: the same model; the parameters of
experts are DTensors on the axis "ep", and tokens are sent to the ranks that hold their experts.

[Note: expert parallelism] transformers' models have plans that name the modules with experts and their parameters. Each
rank holds some experts, in full. In a forward pass, an all-to-all sends each token to the ranks of its experts, and a
second one sends the results back; transformers' ``AllToAllEP`` does this, on every backend, in training and inference.
In its forward, a module has the number of experts of this rank in ``num_experts``. Otherwise, it has that of all
experts, because copies of the module, such as those of an engine, have all of them.
Ranks may have different batches. Those that share layers (axis "tp") have the same batch, and each sends a part of it.

[Note: gradients of experts] A rank's experts compute the tokens of several batches, so the gradient of an expert is a
sum over them. `fully_shard` averages it over the ranks that hold the same experts. To average over all batches, as for
other parameters, the number of batches per rank is missing: the ranks along "ep" divided by those along "tp". Gradients
are divided by it in backward, where they arise. FSDP2's ``set_gradient_divide_factor`` would do the same, but needs a
reduction that gloo lacks, and that NCCL rounds to zero in bfloat16 up to torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.mesh import divisors_of
from fsdp2_strategy.errors import ShardError, counted, some
from fsdp2_strategy.hf.library_internals import ATTRIBUTES_OF_EXPERTS, dispatch_to_experts, parallel_styles
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import clean, generic_name
from fsdp2_strategy.parallel.tensor.plan import plans_of_models
from fsdp2_strategy.parallel.tensor.split import replaced_parameters

OLDEST_TRANSFORMERS = "5.24"
"""The lowest version of transformers whose expert parallelism this package has been tested with."""
_OF_MODULE, _OF_PARAMETER = "ep_dispatch_experts", "grouped_gemm"


def plan_experts(root: nn.Module, size: int) -> dict[str, nn.Module]:
    """Return the modules whose experts are divided among ``size`` ranks, by name; raise if they cannot be."""
    name = class_name(root)
    if dispatch_to_experts() is None:
        raise ShardError(
            f"cannot divide the experts of {name}: the installed transformers cannot send tokens to experts on other "
            f"ranks, expected version {OLDEST_TRANSFORMERS} or newer. Update transformers, or set "
            "expert_parallel_size=1."
        )
    plan = plans_of_models(root, "ep_plan")
    modules = dict(root.named_modules())
    found = {each: m for each, m in modules.items() if plan.get(generic_name(clean(each))) == _OF_MODULE}
    if not found:
        raise ShardError(
            f"cannot divide the experts of {name}: it has no plan for expert parallelism that names modules with "
            "experts, expected a mixture-of-experts model of transformers with an ep_plan. Set expert_parallel_size=1, "
            "or tensor_parallel_size, which splits each expert."
        )
    others = {key: style for key, style in plan.items() if style not in (_OF_MODULE, _OF_PARAMETER)}
    if others:
        raise ShardError(
            f"cannot divide the experts of {name}: its plan has the styles {some(sorted(set(others.values())))}, "
            f"expected {_OF_MODULE} and {_OF_PARAMETER} only. Set expert_parallel_size=1."
        )
    for each, module in found.items():
        _check_module(each, module, plan, size)
    return found


def _check_module(name: str, module: nn.Module, plan: Mapping[str, str], size: int) -> None:
    divided = {own: p for own, p in module.named_parameters() if plan.get(generic_name(f"{clean(name)}.{own}"))}
    if left := [own for own, _ in module.named_parameters() if own not in divided]:
        raise ShardError(
            f"cannot divide the experts of {name}: its plan does not divide {some(left, 'parameter')}, expected all "
            "parameters of the module, and no adapters in it. Set expert_parallel_size=1."
        )
    if wrong := [own for own, parameter in divided.items() if parameter.shape[0] % size]:
        raise ShardError(
            f"cannot divide the experts of {name} among {size} ranks: {wrong[0]} has "
            f"{counted(divided[wrong[0]].shape[0], 'expert')}, expected a number that {size} ranks divide. Use one "
            f"of {divisors_of(divided[wrong[0]].shape[0])} as expert_parallel_size."
        )


def divide_experts(
    modules: Mapping[str, nn.Module], mesh: DeviceMesh, layer_mesh: DeviceMesh
) -> dict[nn.Parameter, nn.Parameter]:
    """Divide the experts of the modules of `plan_experts` in place; return the new parameters by the old ones."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    style = parallel_styles()[_OF_PARAMETER]
    for each in modules.values():
        module: Any = each
        of_all = {name: vars(module)[name] for name in ATTRIBUTES_OF_EXPERTS if name in vars(module)}
        for own, old in list(module.named_parameters(recurse=False)):
            style.shard_param(module, own, mesh)
            made: Any = module._parameters[own]
            made.__dict__.update(old.__dict__)
            new[old] = made
        own_forward = vars(module).pop("forward", None)
        dispatch: Any = dispatch_to_experts()
        around = _Dispatch(dispatch(module, mesh, layer_mesh), mesh.size() // layer_mesh.size(), own_forward)
        module.forward = MethodType(around, module)
        around.attributes = {name: vars(module)[name] for name in of_all}
        vars(module).update(of_all)
    return new


class _Dispatch:
    """The forward of a module with experts; its first argument is the module. See [Note: expert parallelism]."""

    def __init__(self, implementation: Any, batches: int, own_forward: Any) -> None:
        self.implementation = implementation
        self.batches = batches
        self.own_forward = own_forward
        """The forward that the module had instead of that of its class, or None."""
        self.attributes: dict[str, Any] = {}
        """Attributes that the module has in its forward only."""

    def __call__(
        self, module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        own: Any = {name: self._local(p) for name, p in module._parameters.items() if p is not None}
        self.implementation.experts_forward = self.own_forward or MethodType(type(module).forward, module)
        of_all = {name: vars(module)[name] for name in self.attributes}
        vars(module).update(self.attributes)
        try:
            with replaced_parameters(module, own):
                output: torch.Tensor = self.implementation(hidden_states, top_k_index, top_k_weights)
        finally:
            vars(module).update(of_all)
        return output.to(hidden_states.dtype)

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if self.batches > 1 and local.requires_grad and torch.is_grad_enabled():
            local = _DividedGradient.apply(local, self.batches)  # type: ignore[no-untyped-call]
        return local


class _DividedGradient(torch.autograd.Function):
    """Return a tensor unchanged; in backward, divide its gradient; see [Note: gradients of experts]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.divisor, None
