"""Keep fp32 master weights in the optimizer, so that small updates of half-precision parameters are not lost.

Input: a torch optimizer, or parameters and optimizer options. Output: an optimizer over the same parameters. Its step
updates fp32 copies of the parameters, and rounds the copies into the parameters.

The master weights are optimizer state (``state[parameter]["master"]``), so they are saved, sharded, offloaded and
loaded together with Adam's moments. If gradients are fp32 (`shard_model` with ``masters_in_optimizer``), the weights in
the forward pass are bitwise equal to those of a model whose sharded parameters are the fp32 master weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp2_strategy.distributed.torch_internals import is_driven_by_schedule
from fsdp2_strategy.errors import OptimizerError
from fsdp2_strategy.model.master_weights import MASTER, register_masters
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.model.shards import sharded_like


class FSDPadaptOptimizer(Optimizer):
    """Step fp32 master weights of half-precision parameters with any torch optimizer.

    Parameters in fp32 are stepped directly. Each step uses the hyper-parameters in this object's ``param_groups``, so
    build learning-rate schedules over this object.

    Args:
        optimizer: an optimizer over the model's parameters; its groups and state are moved to this object. If
            parameters or parameter groups are given instead, ``optimizer_cls`` constructs an optimizer over them.
        optimizer_cls: a torch optimizer class.
        **kwargs: options of ``optimizer_cls``.

    Raises:
        OptimizerError: a learning-rate schedule was already built over ``optimizer``; or the arguments are neither an
            optimizer, nor parameters and a class.
    """

    def __init__(
        self,
        optimizer: Optimizer | Iterable[Any],
        optimizer_cls: Callable[..., Optimizer] = torch.optim.AdamW,
        **kwargs: Any,
    ) -> None:
        if (
            not callable(optimizer_cls)
            or isinstance(optimizer, str | nn.Module)
            or not isinstance(optimizer, Iterable | Optimizer)
        ):
            raise OptimizerError(
                f"cannot keep master weights: got a {type(optimizer).__name__} and {optimizer_cls!r}, expected an "
                "optimizer, or parameters and a class of optimizers. Pass model.parameters(), and torch.optim.AdamW."
            )
        inner = optimizer if isinstance(optimizer, Optimizer) else optimizer_cls(optimizer, **kwargs)
        if is_driven_by_schedule(inner):
            raise OptimizerError(
                f"cannot keep master weights for this {type(inner).__name__}: a learning-rate schedule was already "
                "built over it, expected none. Build the schedule afterwards, over the FSDPadaptOptimizer."
            )
        state = dict(inner.state)
        groups = inner.param_groups
        inner.param_groups, self.inner = [], inner
        inner.state.clear()
        super().__init__(groups, inner.defaults)
        for parameter, own in state.items():
            self.state[parameter] = {**self.state[parameter], **own}
        register_masters(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and create the fp32 master weights of its parameters; not collective."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if _is_half(parameter):
                self.state[parameter][MASTER] = _master_of(parameter)
        self.inner.param_groups.append({**self.param_groups[-1], "params": []})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the master weights, and round them into the parameters; collective only if the inner step is.

        Args:
            closure: evaluates the model and returns the loss; called once, before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(p, self._move_to_inner(p)) for group in self.param_groups for p in group["params"]]
        for own, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({**own, "params": [self.state[p].get(MASTER, p) for p in own["params"]]})
        self.inner.step()
        masters = [(p, m) for p, m in stepped if m is not p and m.grad is not None]
        if masters:
            torch._foreach_copy_([values_of(p) for p, _ in masters], [values_of(m) for _, m in masters])
        for parameter, master in stepped:
            own = self.inner.state.pop(master, {})
            self.state[parameter] = {MASTER: master, **own} if master is not parameter else own
            if master is not parameter:
                master.grad = None
        return loss

    def _move_to_inner(self, parameter: torch.Tensor) -> torch.Tensor:
        """Pass a parameter's gradient and state to the inner optimizer, and return the tensor to step."""
        state = self.state[parameter]
        master: torch.Tensor = state.get(MASTER, parameter)
        if _is_half(parameter):
            if not isinstance(master, nn.Parameter) or master is parameter:  # replaced or removed by a load
                master = state[MASTER] = _master_of(master)
            # FSDP2 may reduce a gradient in fp32 and keep the dtype of the parameter in its DTensorSpec, which
            # operators on DTensors read.
            own = parameter.grad
            master.grad = None if own is None else sharded_like(own, values_of(own).float())
        self.inner.state[master] = {key: value for key, value in state.items() if key != MASTER}
        return master

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the ``state_dict`` of an optimizer with the same groups; master weights stay in fp32.

        Raises:
            ValueError: the saved groups have other numbers of parameters.
        """
        groups = state_dict["param_groups"]
        saved, expected = ([len(group["params"]) for group in each] for each in (groups, self.param_groups))
        if saved != expected:
            raise ValueError(
                f"cannot load the optimizer: the saved groups have {saved} parameters, expected {expected}. Build the "
                "optimizer over the same parameters."
            )
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update({key: copy.deepcopy(value) for key, value in given.items() if key != "params"})
            for parameter, index in zip(own["params"], given["params"], strict=True):
                self.state[parameter] = copy.deepcopy(state_dict["state"].get(index, {}))


def is_mp_optimizer(optim: object) -> bool:
    """Return whether an optimizer keeps fp32 master weights (`FSDPadaptOptimizer`); not collective."""
    return isinstance(optim, FSDPadaptOptimizer)


def _is_half(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.element_size() < 4


def _master_of(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(_fp32(tensor.detach()), requires_grad=True)


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to fp32 and keep its sharding."""
    return tensor if tensor.dtype == torch.float32 else sharded_like(tensor, values_of(tensor).float())
