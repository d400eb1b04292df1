"""Update the weights of a vLLM worker in this process, through vLLM's own interface for transfers of weights.

Input: a stream of weights or of changes. Output: the weights of the worker's model. `register` registers a transfer
engine with vLLM, whose worker builds and calls it.

[Note: layerwise reload] After it has loaded a model, vLLM converts the weights of some layers for its kernels: experts
are swapped, shuffled or padded, quantized weights are packed. ``load_weights`` writes in the layout of the files. For a
converted layer, it raises, or mixes both layouts without an error. vLLM's layerwise reload first gives each layer the
layout of the files, and converts the layer again when it has all of its weights. So all weights of a layer must be
sent. Differences are written into the converted layers, therefore only models without such layers take them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.background_save import await_end
from fsdp2_strategy.errors import RolloutError, dtype_text
from fsdp2_strategy.rollout.difference import Change, TensorDifference
from fsdp2_strategy.rollout.protocol import Changes, Weights

BACKEND = "fsdp2_strategy"
"""Name of the transfer engine in vLLM's ``WeightTransferConfig``."""

_CALLS = ("start_weight_update", "update_weights", "finish_weight_update")
"""Methods of ``vllm.LLM``: a transfer in steps."""
_DEFINED = {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
"""The abstract methods of vLLM's ``WeightTransferEngine`` that the transfer engine defines."""
_UNCONVERTED_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_UNCONVERTED_LAYERS = {"Attention", "MMEncoderAttention"}
"""Classes of vLLM whose ``process_weights_after_loading`` changes no weights that a trainer sends, on CUDA devices."""


def register(vllm: Any) -> bool:
    """Register the transfer engine with vLLM; not collective.

    Returns:
        Whether this version of vLLM transfers weights in steps; if not, it has a layerwise reload.

    Raises:
        RolloutError: this version has neither.
    """
    if all(hasattr(vllm.LLM, name) for name in _CALLS):
        with suppress(ImportError, AttributeError):
            transfer = import_module("vllm.distributed.weight_transfer")
            base, factory = transfer.WeightTransferEngine, transfer.WeightTransferEngineFactory
            if base.__abstractmethods__ <= _DEFINED:
                _register(base, factory)
                return True
    try:
        import_module("vllm.model_executor.model_loader.reload")
    except ImportError as error:
        raise RolloutError(
            f"cannot build an engine: vllm has version {getattr(vllm, '__version__', 'unknown')}, expected one that "
            "transfers weights in steps or reloads them layer by layer. Install vllm 0.33."
        ) from error
    return False


@cache  # vLLM refuses a second engine with the same name
def _register(base: Any, factory: Any) -> None:
    factory.register_engine(BACKEND, transfer_engine(base))


@dataclass
class _InitInfo:
    """There is nothing to connect: trainer and worker are in one process."""


@dataclass
class _UpdateInfo:
    """One of both."""

    weights: Weights | None = None
    changes: Changes | None = None


def transfer_engine(base: Any) -> Any:
    """Return the transfer engine: a subclass of vLLM's ``WeightTransferEngine``."""

    class InProcessTransferEngine(base):  # type: ignore[misc]
        """Load weights from an iterator of the same process, all in one step."""

        init_info_cls, update_info_cls = _InitInfo, _UpdateInfo
        supports_draft_weight_update = False

        def init_transfer_engine(self, init_info: _InitInfo) -> None:
            """Do nothing."""

        def start_weight_update(self) -> None:
            """Do nothing: whether layers are reloaded depends on what is sent."""

        def receive_weights(self, update_info: _UpdateInfo) -> None:
            """Load all weights, or write changes in place."""
            if update_info.changes is not None:
                apply_changes(self.model, update_info.changes)
            elif update_info.weights is not None:
                reload(self.model, self.model_config, update_info.weights)

        def finish_weight_update(self) -> None:
            """Do nothing: the weights are complete."""

        def shutdown(self) -> None:
            """Do nothing."""

    return InProcessTransferEngine


def reload(model: Any, model_config: Any, weights: Weights) -> None:
    """Load all weights into a vLLM model whose layers may be converted; see [Note: layerwise reload]."""
    layerwise = import_module("vllm.model_executor.model_loader.reload")
    layerwise.initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
    except BaseException:
        # Else the next update would count its weights on top of those that were received in this one, and convert
        # layers that are incomplete. The error to raise is that of the load.
        with suppress(Exception):
            layerwise.finalize_layerwise_reload(model, model_config)
        raise
    layerwise.finalize_layerwise_reload(model, model_config)


def apply_changes(model: Any, changes: Changes) -> None:
    """Write the changes of weights into a vLLM model in place, in batches of ``sizes.BUCKET_BYTES``.

    vLLM writes a batch by loading tensors of the full size, in which NaN means "unchanged". A weight that is sent in
    full is a patch of all its elements: a reload needs all weights of a layer. Meanwhile, vLLM replaces
    ``torch.Tensor.copy_`` in the whole process, so a save of this process is complete first.
    """
    patches = import_module("vllm.model_executor.model_loader.checkpoint_weight_patch")

    def load(batch: Iterable[Any]) -> None:
        await_end()
        # Positions are distinct by construction; vLLM would sort them to see that.
        patches.load_checkpoint_weight_patches(model, batch, validate_unique_indices=False)

    batch: list[Any] = []
    held_bytes = 0
    for name, change in changes:
        shape, positions, values = parts_of(name, change)
        batch.append(patches.CheckpointWeightPatch(name, shape, change.dtype, values, positions))
        held_bytes += prod(shape) * change.dtype.itemsize
        if held_bytes >= sizes.BUCKET_BYTES:
            load(batch)
            batch, held_bytes = [], 0
    load(batch)


def parts_of(name: str, change: Change) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Return the shape of a weight, the positions [n] that change, and their values [n]; all, if it is sent in full."""
    if not change.dtype.is_floating_point:
        raise RolloutError(
            f"cannot update weights by difference: {name} has dtype {dtype_text(change.dtype)}, expected a "
            "floating-point dtype, because vLLM takes no other differences. Update without by_difference."
        )
    if isinstance(change, TensorDifference):
        return tuple(change.shape), change.positions, change.values
    return tuple(change.shape), torch.arange(change.numel(), device=change.device), change.reshape(-1)


def converted_layers(model: nn.Module) -> list[str]:
    """Return the layers of a vLLM model in which differences cannot be written; see [Note: layerwise reload]."""
    layers = dict(model.named_modules())
    methods = {id(getattr(layer, "quant_method", None)) for layer in layers.values()}  # may be modules themselves
    return [
        f"{name} ({type(layer).__name__})"
        for name, layer in layers.items()
        if id(layer) not in methods and _is_converted(layer)
    ]


def _is_converted(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    if method is not None:
        name = type(method).__name__
        if name == "UnquantizedFusedMoEMethod":  # only the kernels in Triton read the layout of the files
            return getattr(getattr(method, "unquantized_backend", None), "name", None) != "TRITON"
        return name not in _UNCONVERTED_METHODS
    if not hasattr(layer, "process_weights_after_loading"):
        return False
    return not any(owner.__name__ in _UNCONVERTED_LAYERS for owner in type(layer).__mro__)
