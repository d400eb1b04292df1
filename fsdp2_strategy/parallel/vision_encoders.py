"""Train vision-language models on batches in which only some ranks have images, without hanging in a collective.

Input: a vision-language model. Output: its vision encoder, for `plan`; and hooks, for `shard`. With these hooks, ranks
without images take part in the collectives of ranks with images.

[Note: unequal ranks] If only some ranks run a unit, these ranks wait in its all-gather forever. Each of three settings
of ``mixed_mm_data`` prevents this:
  "root"       the parameters of the vision encoder, and of the projector after it, belong to the root unit, which
               every rank gathers.
  "replicate"  every rank holds the full vision encoder, so it needs no gather. Its gradients are averaged over all
               ranks.
  "dummy"      the vision encoder is sharded block by block. A rank without images or without videos runs the encoder
               on an image of zeros, until all ranks have run it equally often. The output is dropped, and its
               gradients are zero.
With each setting, some parameters of the root unit or of a replicated vision encoder may have gradients on some ranks
only. On each rank, FSDP2 reduces only gradients that exist there. So before a reduction, an all-reduce finds the
parameters that have a gradient on any rank, and each rank adds zeros for those that it lacks. A parameter that no rank
used gets no gradient, as without sharding. The root unit and a replicated vision encoder get only token ids and pixels
as inputs. These have no gradients, so FSDP2 reduces both units at the end of the backward pass, in the same order on
every rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.config.strategy_config import MixedData
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.process_group import control_device, current_device, group_in_use
from fsdp2_strategy.distributed.torch_internals import (
    accumulate_gradient,
    accumulated_gradient,
    gather,
    has_unreduced_gradient,
    module_of,
    parameters_of,
    reduces_gradients,
    shard_of,
    tree_leaves,
    unsharded_of,
)
from fsdp2_strategy.errors import ShardError
from fsdp2_strategy.hf.library_internals import encodes_images_before_forward
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.gradients import set_unequal_gradients
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.unit_hooks import register_hook

# Inputs of a forward pass. The vision encoder runs once for each of them that is given.
_PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class VisionEncoder:
    """The vision encoder of a model, which runs only if there are images."""

    name: str
    module: nn.Module
    owner: nn.Module
    """The model that contains the vision encoder, and merges image features into the text embeddings."""

    @property
    def embedding(self) -> nn.Module:
        """The module that embeds the text; every rank runs it."""
        return self.owner.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def runs_for_images(self) -> list[nn.Module]:
        """Return all modules of the encoder and of the owner's children, except children with the text embedding."""
        others = [child for child in self.owner.children() if self.embedding not in child.modules()]
        return list(dict.fromkeys(module for child in (self.module, *others) for module in child.modules()))


def find_vision_encoder(model: nn.Module) -> VisionEncoder | None:
    """Return the vision encoder of a transformers vision-language model; None for any other model."""
    names = {module: clean(name) for name, module in model.named_modules()}
    for module in names:
        if not hasattr(module, "get_image_features") or not hasattr(module, "get_encoder"):
            continue
        encoder: Any = module.get_encoder(modality="image")
        if encoder is not module and encoder in names and hasattr(encoder, "config"):
            owner: Any = next(m for m in names if encoder in m.children())
            if isinstance(owner.get_input_embeddings(), nn.Module):
                return VisionEncoder(names[encoder], encoder, owner)
    return None


def add_hooks(model: nn.Module, encoder: VisionEncoder, mixed_mm_data: MixedData | None) -> None:
    """Register the hooks for ranks without images on the sharded root; see [Note: unequal ranks]."""
    if mixed_mm_data == "dummy":
        dummy = _ZeroImages(encoder)
        if encodes_images_before_forward(model):
            # ``generate`` runs the vision encoder before the first forward pass. This must come before
            # `BypassHooks.add_entry_points`, which wraps ``generate``, too.
            model.generate = functools.partial(dummy.generate, model.generate)  # type: ignore[assignment, arg-type]
        encoder.owner.register_forward_pre_hook(dummy.before_owner, with_kwargs=True)
        encoder.embedding.register_forward_hook(dummy.after_embedding)
    else:
        encoder.embedding.register_forward_hook(functools.partial(_with_graph, [*encoder.owner.parameters()]))
    param_groups = {module_of(group): group for group in parameter_groups(model)}
    for group in param_groups.values():
        register_hook(group, "reduce", "units that never ran", _reduce_if_it_ran)
    if mixed_mm_data == "replicate":  # the order of prefetching in backward must be the same on all ranks
        register_hook(param_groups[encoder.module], "record forward order", "replicated encoder", lambda *_: None)
    set_unequal_gradients(model)
    around = functools.partial(_reduce_with_zeros, group_in_use())
    for module in (model, encoder.module):
        if module in param_groups:
            register_hook(param_groups[module], "reduce", "unequal gradients", around)


def _reduce_if_it_ran(param_group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Skip gradient accumulation where the unit never ran: FSDP2 would fail there without unsharded parameters."""
    if reduces_gradients(param_group) or any(unsharded_of(p) is not None for p in parameters_of(param_group)):
        reduce(*unused)


@torch.no_grad()
def _reduce_with_zeros(process_group: Any, param_group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Add zero gradients, before a reduction, for parameters that only other ranks used."""
    trained = [p for p in parameters_of(param_group) if shard_of(p).requires_grad]
    if reduces_gradients(param_group) and trained:
        own = torch.tensor([has_unreduced_gradient(p) for p in trained], dtype=torch.uint8, device=control_device())
        anywhere = own.clone()
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=process_group)
        missing = [p for p, here, there in zip(trained, own.tolist(), anywhere.tolist(), strict=True) if here < there]
        if any(unsharded_of(p) is None for p in missing):
            gather(param_group)  # a replicated unit that never ran on this rank: no communication
        for parameter in missing:
            unsharded: Any = unsharded_of(parameter)
            unsharded.grad = torch.zeros_like(unsharded)
        if any(accumulated_gradient(p) is not None for p in trained):
            for parameter in trained:  # all gradients of one reduction must have the same dtype
                if accumulated_gradient(parameter) is None and unsharded_of(parameter) is not None:
                    accumulate_gradient(parameter)
    reduce(*unused)


def _with_graph(
    parameters: Sequence[nn.Parameter], _module: nn.Module, _inputs: object, output: torch.Tensor
) -> torch.Tensor:
    """Make the text embeddings require gradients, even if only the vision encoder is trained.

    Otherwise the loss of a rank without images has no autograd graph. Its backward would raise an error, and the
    other ranks would wait for its reductions.
    """
    if output.requires_grad or not torch.is_grad_enabled() or not any(p.requires_grad for p in parameters):
        return output
    attached: torch.Tensor = _AttachGraph.apply(output, output.new_zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    return attached


class _ZeroImages:
    """Run the vision encoder on zeros after the text embedding, as ranks with images run it at this point.

    So all ranks run gathers and reductions in the same order.
    """

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder
        self._process_group = group_in_use()
        self._missing_runs = 0
        self._was_tried = False
        self._inputs()  # raise now if the inputs cannot be made

    def before_owner(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Count how often this rank must run the vision encoder on zeros; collective.

        If the caller passes ``inputs_embeds``, the text embedding does not run, so this hook runs the vision encoder.
        """
        self._missing_runs = self._count_missing_runs(kwargs)
        if self._missing_runs and kwargs.get("inputs_embeds") is not None:
            kwargs = {**kwargs, "inputs_embeds": self._run_missing_and_attach(kwargs["inputs_embeds"])}
        return args, kwargs

    def generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the vision encoder on zeros until all ranks have run it equally often, then generate; collective."""
        for _ in range(self._count_missing_runs(kwargs)):
            with torch.no_grad():
                self._run()
        return generate(*args, **kwargs)

    def _count_missing_runs(self, inputs: Mapping[str, Any]) -> int:
        own = sum(inputs.get(name) is not None for name in _PIXELS)
        most = torch.tensor(own, device=control_device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._process_group)
        if most and not self._was_tried:
            with all_or_none(f"run {self._encoder.name} on an image of zeros", ShardError), torch.no_grad():
                try:
                    self._run()
                except Exception as error:
                    raise ShardError(
                        f"cannot run {self._encoder.name} on an image of zeros: {type(self._encoder.owner).__name__} "
                        f"raised {type(error).__name__}: {error}, expected features. Use mixed_mm_data='root' or "
                        "'replicate'."
                    ) from error
            self._was_tried = True
        return int(most) - own

    def after_embedding(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        """Run the vision encoder on zeros as often as `before_owner` counted, and attach its graph to the output."""
        return self._run_missing_and_attach(output) if self._missing_runs else output

    def _run_missing_and_attach(self, embedded: torch.Tensor) -> torch.Tensor:
        missing, self._missing_runs = self._missing_runs, 0
        features = [leaf for _ in range(missing) for leaf in self._run() if leaf.requires_grad]
        return _AttachGraph.apply(embedded, *features) if features else embedded  # type: ignore[no-untyped-call]

    def _run(self) -> list[torch.Tensor]:
        """Return the features of an image of zeros; the RNG state stays unchanged."""
        inputs = self._inputs()
        device = current_device()
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            output: Any = self._encoder.owner.get_image_features(**inputs)  # type: ignore[operator]
        features = getattr(output, "pooler_output", output)
        return [leaf for leaf in tree_leaves(features) if isinstance(leaf, torch.Tensor)]

    def _inputs(self) -> dict[str, torch.Tensor]:
        """Return inputs for the smallest image that the configuration of the vision encoder allows."""
        config: Any = self._encoder.module.config
        first = next(self._encoder.module.parameters())
        # Shards may be in host memory, but the unit computes on the device.
        device = current_device() if isinstance(first, DTensor) else first.device
        like: dict[str, Any] = {"dtype": first.dtype, "device": device}
        channels: Any = getattr(config, "num_channels", None) or getattr(config, "in_channels", 3)
        inputs: dict[str, torch.Tensor] = {}
        if (merge_size := getattr(config, "spatial_merge_size", None)) and hasattr(config, "temporal_patch_size"):
            width = channels * config.temporal_patch_size * config.patch_size**2
            inputs["pixel_values"] = torch.zeros(merge_size**2, width, **like)
            inputs["image_grid_thw"] = torch.tensor([[1, merge_size, merge_size]], device=device)
        elif size := getattr(config, "image_size", None):
            height, width = size if isinstance(size, list | tuple) else (size, size)
            inputs["pixel_values"] = torch.zeros(1, channels, height, width, **like)
        parameters = inspect.signature(self._encoder.owner.get_image_features).parameters  # type: ignore[arg-type]
        needed = {name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        if not inputs or needed - inputs.keys():
            raise ShardError(
                f"cannot run {self._encoder.name} on an image of zeros: the arguments of get_image_features of "
                f"{type(self._encoder.owner).__name__} ({', '.join(parameters)}) cannot be made from the "
                f"{type(config).__name__} of the encoder, expected an image size or patch sizes in it, and only "
                "pixel_values and image_grid_thw as required arguments. Use mixed_mm_data='root' or 'replicate'."
            )
        return inputs


class _AttachGraph(torch.autograd.Function):
    """Copy a tensor; the backward of the copy also runs the backward of other tensors, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)
