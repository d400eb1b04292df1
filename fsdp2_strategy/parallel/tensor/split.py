"""Split the layers of a model over ranks by a `TensorPlan`, before `fully_shard` splits what each rank has.

Input: a model with full parameters, a plan, and the axis "tp" of a mesh. Output: the same model; its parameters are
DTensors on that axis, and its modules exchange activations over it.

[Note: tensor-parallel forwards] transformers' styles split parameters, and change the inputs and outputs of a module.
They install a closure as the module's forward, which a copy of the module would share with the original. Here, the
forward is a bound method that calls the same style: it is bound to the copy if the module is copied. `fully_shard`
is called later, so its hooks run outside of this forward, and parameters are gathered over the data parallel ranks
before the style uses them.

[Note: partial gradients] Norms of queries and keys hold a full weight, and see only the heads of this rank. So their
gradients must be summed over the ranks. transformers registers a hook on the accumulated gradient, which would sum the
gradients of earlier micro-batches again if they accumulate without communication. Here, the weight goes through a
function that sums its gradient in each backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2_strategy.distributed.lost_ranks import is_lost_rank
from fsdp2_strategy.distributed.process_group import group_in_use, on_group
from fsdp2_strategy.distributed.same_batch import check_batches_of_groups
from fsdp2_strategy.hf.library_internals import parallel_styles, set_tensor_parallel_size
from fsdp2_strategy.parallel.tensor.plan import TensorPlan, transformers_models
from fsdp2_strategy.parallel.tensor.random import draw_own_random_numbers

SUMS_GRADIENTS = "replicated_with_grad_allreduce"
"""The style of modules whose gradients are parts of a sum; see [Note: partial gradients]."""


def split_layers(root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
    """Split the layers of a full model in place; return the new DTensors by the old parameters; not collective."""
    modules = dict(root.named_modules())
    before = dict(root.named_parameters(remove_duplicate=False))
    new: dict[nn.Parameter, nn.Parameter] = {}
    styles = parallel_styles()
    for name, style_name in plan.styles.items():
        style = styles[style_name]
        if name in before:
            parent, _, own = name.rpartition(".")
            _split_parameter(modules[parent], own, style, mesh, new)
        else:
            _install(name, root, plan, mesh)
    for model in transformers_models(root).values():
        set_tensor_parallel_size(model, plan.size)
    draw_own_random_numbers(root, plan, mesh.get_local_rank())
    return new


def _split_parameter(
    module: nn.Module, own: str, style: Any, mesh: DeviceMesh, new: dict[nn.Parameter, nn.Parameter]
) -> None:
    old: Any = module._parameters[own]
    if old in new:  # tied
        module._parameters[own] = new[old]
        return
    style.validate_param(module, own, mesh, parameter_name=own)
    style.shard_param(module, own, mesh)
    made: Any = module._parameters[own]
    if made is not old:
        made.__dict__.update(old.__dict__)
        new[old] = made


def _install(name: str, root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Replace the forward of the module of this name; see [Note: tensor-parallel forwards]."""
    module, style_name = root.get_submodule(name), plan.styles[name]
    own_forward = vars(module).get("forward")
    style = parallel_styles()[style_name]
    if style_name == "mla_kv_a_proj":  # it reads the dimension of the rotated part
        models: Any = transformers_models(root).values()
        module.config = next(m for m in models if module in set(m.modules())).config.get_text_config()
    if style_name == SUMS_GRADIENTS:
        around: Any = _SummedGradients(mesh.get_group())
    else:
        style.install_forward(module, mesh)  # it checks the module, and changes parameters in some styles
        around = _Styled(style, mesh, name, style_name, copies_output=plan.copies_outputs)
    vars(module).pop("forward", None)
    module.forward = MethodType(_Forward(around, own_forward), module)


class _Forward:
    """The forward of a module with a style; its first argument is the module."""

    def __init__(self, around: Any, own_forward: Any) -> None:
        self.around = around
        self.own_forward = own_forward
        """The forward that the module had instead of that of its class, or None."""

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.own_forward or MethodType(type(module).forward, module)
        return self.around(module, forward, args, kwargs)


class _Styled:
    """A style of transformers around the forward of a module."""

    def __init__(self, style: Any, mesh: DeviceMesh, name: str, style_name: str, *, copies_output: bool) -> None:
        self.style = style
        self.mesh = mesh
        self.note = (
            f"This is the forward of {name}, which the tensor-parallel plan splits by {style_name!r} over "
            f"{mesh.size()} ranks. Check that its inputs and outputs fit those of the modules before and after it."
        )
        self.copies_output = copies_output

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            args, kwargs = self.style.transform_inputs_pre_forward(module, args, kwargs, self.mesh)
            with self.style.context_around_forward(module, self.mesh):
                output = forward(*args, **kwargs)
            output = self.style.transform_output_post_forward(module, output, self.mesh)
        except (RuntimeError, ValueError) as error:
            if not is_lost_rank(error) and self.note not in getattr(error, "__notes__", []):
                error.add_note(self.note)
            raise
        return output.clone() if self.copies_output and isinstance(output, torch.Tensor) else output


class _SummedGradients:
    """Run a module with parameters whose gradients are summed over the ranks; see [Note: partial gradients]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with replaced_parameters(module, {n: self._summed(p) for n, p in module._parameters.items() if p is not None}):
            return forward(*args, **kwargs)

    def _summed(self, parameter: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = SumGradient.apply(parameter, self.group)  # type: ignore[no-untyped-call]
        return summed if parameter.requires_grad else parameter


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Put tensors in the places of a module's own parameters for a ``with`` block."""
    present = dict(module._parameters)
    module._parameters.update(tensors)
    try:
        yield
    finally:
        module._parameters.update(present)


class SumGradient(torch.autograd.Function):
    """Return a tensor unchanged; in backward, sum its gradient over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: D102
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def check_batches(root: nn.Module, size: int) -> None:
    """Make each forward raise on every rank if its inputs differ between ``size`` successive ranks that share layers.

    Call this after `fully_shard`. Not collective; the forward is, on the group in use at the time of this call.
    """
    group = group_in_use()

    def check(_root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with on_group(group):
            check_batches_of_groups({**{f"input {i}": value for i, value in enumerate(args)}, **kwargs}, size)

    root.register_forward_pre_hook(check, prepend=True, with_kwargs=True)  # before FSDP2 gathers the root unit
