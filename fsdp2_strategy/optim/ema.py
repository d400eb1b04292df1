"""Compute exponential moving averages of a sharded model's parameters: each rank averages its shards in fp32.

Input: a sharded model, at construction and after each optimizer step. Output: averages, sharded like the parameters.
They can replace the parameters for an evaluation or an export.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.accelerator import on_accelerator
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.errors import ConfigError, ShardError, StepError
from fsdp2_strategy.model.fsdp_state import class_name, reshard
from fsdp2_strategy.model.master_weights import masters_of, refresh_masters_of
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import copies_on_host, copy_from_host
from fsdp2_strategy.model.placeholders import full_tensor_of, values_of
from fsdp2_strategy.model.shards import local_shard, sharded_like
from fsdp2_strategy.model.swapped_weights import check_own_weights, marked_as_swapped
from fsdp2_strategy.model.weight_versions import count_change
from fsdp2_strategy.model.wrappers import unwrap_model


class EMA:
    """Average the parameters of a model: average = decay x average + (1 - decay) x parameter.

    If an optimizer keeps fp32 master weights, the master weights are averaged, not the half-precision parameters.

    Args:
        model: a prepared model, or its wrapper; the averages are initialised with its parameters.
        decay: weight of the old average, in [0, 1].
        names: names of the parameters to average; by default all that are trainable at construction. Parameters that
            are not floating-point are left out.
        device: device of the averages; by default the device of the parameters. "cpu" saves device memory; an update
            then copies the parameters together, and waits for the device once per 128 MiB of this rank's shard.

    Raises:
        ConfigError: ``decay`` is not in [0, 1].
        StepError: the model's parameters are averages, within a block of `swapped_in`.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        names: Collection[str] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_decay(decay)
        if isinstance(names, str):
            raise ConfigError(f"cannot average: names is {names!r}, expected a list of names. Pass [{names!r}].")
        self.decay = decay
        root = unwrap_model(model)
        check_own_weights(root, "begin averages", StepError)
        reshard(root)
        sources = _sources(root)
        self.averages: dict[str, torch.Tensor] = {
            name: sharded_like(p, values_of(sources[name]).to(device=device, dtype=torch.float32, copy=True))
            for name, p in named_parameters(root).items()
            if (p.requires_grad if names is None else name in names) and p.is_floating_point()
        }
        """The averages by parameter name, in fp32, sharded like the parameters."""

    @collective
    @torch.no_grad()
    def update(self, model: nn.Module, decay: float | None = None) -> None:
        """Update the averages with a model's parameters; collective unless it is sharded like the averages.

        If it is sharded otherwise, parameters are gathered one by one.

        Args:
            model: the averaged model, or a model with the same parameter names and shapes.
            decay: overrides the decay given at construction.

        Raises:
            ShardError: the model lacks an averaged parameter, or has it in another shape.
            StepError: the model's parameters are averages, within a block of `swapped_in`.
            ConfigError: ``decay`` is not a number from 0 to 1.
        """
        if decay is not None:
            check_decay(decay)
        root = unwrap_model(model)
        check_own_weights(root, "update the averages", StepError)
        reshard(root)
        self._check_parameters(root)
        sources = _sources(root)
        weight = 1 - (self.decay if decay is None else decay)
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, average in self.averages.items():
            target, source = values_of(average), _local_values_for(average, sources[name])
            if _is_in_other_memory(target, source):
                elsewhere.append((target, source))
            else:
                target.lerp_(source.to(target), weight)
        for (target, _), source in zip(elsewhere, copies_on_host(source for _, source in elsewhere), strict=True):
            target.lerp_(source.to(target), weight)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """Copy the averages into a model for a ``with`` block; collective unless it is sharded like the averages.

        At the end of the block, the parameters are restored bitwise. If the model is sharded otherwise, averages are
        gathered one by one.

        In the block, you can evaluate, export and stream the model, with the averages. Calls that need its own weights
        raise an error: saving and loading checkpoints, loading weights, backward and optimizer steps, building an
        optimizer, and updating averages. See [Note: swapped weights] in `model.swapped_weights`.

        Raises:
            ShardError: the model lacks an averaged parameter, or has it in another shape.
        """
        root = unwrap_model(model)
        reshard(root)
        parameters = {name: p for name, p in named_parameters(root).items() if name in self.averages}
        own = {name: values_of(p).clone() for name, p in parameters.items()}
        try:
            self._copy_averages(root)
            with marked_as_swapped(root):
                yield model
        finally:
            reshard(root)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    values_of(parameter).copy_(own[name])
            count_change(root)

    @collective
    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages into a model and its master weights; collective unless it is sharded like the averages.

        If it is sharded otherwise, averages are gathered one by one. The master weights are the fp32 copies of
        half-precision parameters, if the optimizer has some.

        Raises:
            ShardError: the model lacks an averaged parameter, or has it in another shape.
            StepError: the model's parameters are averages, within a block of `swapped_in`.
        """
        root = unwrap_model(model)
        check_own_weights(root, "copy averages into a model", StepError)
        reshard(root)
        self._copy_averages(root)
        refresh_masters_of(root)

    @torch.no_grad()
    def _copy_averages(self, root: nn.Module) -> None:
        self._check_parameters(root)
        count_change(root)
        parameters = named_parameters(root)
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, average in self.averages.items():
            target, source = values_of(parameters[name]), _local_values_for(parameters[name], average)
            if _is_in_other_memory(source, target):
                elsewhere.append((target, source))
            else:
                target.copy_(source)
        copy_from_host([target for target, _ in elsewhere], (source for _, source in elsewhere))

    def _check_parameters(self, root: nn.Module) -> None:
        """Raise ShardError if a model lacks an averaged parameter, or has it in another shape."""
        parameters = named_parameters(root)
        for name, average in self.averages.items():
            shape = list(parameters[name].shape) if name in parameters else None
            if shape != list(average.shape):
                raise ShardError(
                    f"cannot use these averages with {class_name(root)}: {name} is "
                    f"{f'of shape {shape}' if shape is not None else 'missing'}, expected shape {list(average.shape)}. "
                    "Use a model with the parameters that were averaged."
                )


def check_decay(decay: object) -> None:
    """Raise ConfigError unless a decay is a number from 0 to 1; not collective."""
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ConfigError(f"cannot average: decay is {decay!r}, expected a number from 0 to 1, for example 0.999.")


def _sources(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the fp32 master weights of a model's parameters, or the parameter itself if it has none."""
    masters = masters_of(root)
    return {name: masters.get(id(p), p) for name, p in named_parameters(root).items()}


def _is_in_other_memory(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory, and another one in that of an accelerator."""
    return other.numel() > 0 and on_accelerator(other) and not on_accelerator(own)


def _local_values_for(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Shard ``source`` like ``target``, and return this rank's shard; collective if they are not sharded equally."""
    wanted, given = ((t.device_mesh, t.placements) if isinstance(t, DTensor) else None for t in (target, source))
    return values_of(source) if wanted == given else local_shard(target).of(full_tensor_of(source))
