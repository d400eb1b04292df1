"""Send a sharded model's weights to a vLLM server, with vLLM's own trainer-side transfer.

Input: a model, or a stream of its changes. Output: the two things that vLLM's ``WeightTransferTrainerFactory`` and its
transfers take: a ``WeightSource`` for all weights, patches for changes. The transfer, the connection and the client are
vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.rollout.protocol import Weights
from fsdp2_strategy.rollout.stream import WeightStream, stream_weights, weight_metadata
from fsdp2_strategy.rollout.trainer_arguments import import_package
from fsdp2_strategy.rollout.vllm_transfer import parts_of

_INT32_ELEMENTS = 2**31
"""vLLM sends positions in 32 bits."""


def vllm_weight_source(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    bucket_bytes: int | None = None,
    merge_adapters: bool = True,
) -> Any:
    """Return a ``WeightSource`` of vLLM that streams a model's weights as full tensors; collective.

    Every rank passes it to ``WeightTransferTrainerFactory.trainer_init(init_info, client=..., source=...)``. Each
    ``send_weights()`` then streams the weights of that time, and is collective. Names, shapes and dtypes are those of
    this call, so make a new source after a change of the model's parameters.

    Args:
        model: as in `stream_weights`.
        dtype: as in `stream_weights`.
        bucket_bytes: as in `stream_weights`.
        merge_adapters: as in `stream_weights`.

    Raises:
        RolloutError: vLLM is not installed, or its version has no ``WeightSource``; or as `stream_weights`.
    """
    transfer = _vllm_module("vllm.distributed.weight_transfer", "WeightSource")
    planned = weight_metadata(model, dtype=dtype, bucket_bytes=bucket_bytes, merge_adapters=merge_adapters)

    class StreamSource(transfer.WeightSource):  # type: ignore[misc, name-defined]
        """Yield the tensors of `stream_weights`."""

        @cached_property
        def metadata(self) -> list[Any]:
            """Name, dtype and shape of each tensor, in the order of the stream."""
            return [transfer.ParamMeta(name, of_tensor, shape) for name, of_tensor, shape in planned]

        def iter_full(self) -> Weights:
            """Stream all weights; collective."""
            return stream_weights(model, dtype=dtype, bucket_bytes=bucket_bytes, merge_adapters=merge_adapters)

    return StreamSource()


def vllm_patches(changes: WeightStream[Any]) -> list[Any]:
    """Return the changes of a stream as vLLM's ``SparseWeightPatch``; collective, as reading a stream is.

    Every rank makes the list, and passes it to ``send_weights(patches)`` of the transfer "sparse_nccl". vLLM writes
    patches only into models that it keeps in the layout of the files; see `VLLMEngine.update_changed_weights`.

    Args:
        changes: a stream with ``since`` that is not full.

    Raises:
        RolloutError: vLLM is not installed, or its version takes no patches; the stream is full; or a weight is not a
            floating-point tensor, or has 2^31 elements or more.
    """
    module = _vllm_module("vllm.distributed.weight_transfer.sparse_nccl_engine", "SparseWeightPatch")
    if changes.is_full:
        changes.close()
        raise RolloutError(
            "cannot send patches: the stream has all weights, expected one of changes. Send all weights from "
            "vllm_weight_source first, and pass the version that this stream has as since= to the next."
        )
    return [module.SparseWeightPatch(**_fields(name, change)) for name, change in _closed_after(changes)]


def _closed_after(changes: WeightStream[Any]) -> Iterator[tuple[str, Any]]:
    try:
        yield from changes
    finally:
        changes.close()  # after an error here, the other ranks read on


def _fields(name: str, change: Any) -> dict[str, object]:
    shape, positions, values = parts_of(name, change)
    if prod(shape) >= _INT32_ELEMENTS:
        raise RolloutError(
            f"cannot send patches: {name} has {prod(shape)} elements, expected less than 2^31, because vLLM sends "
            "positions in 32 bits. Send all weights."
        )
    return {"name": name, "indices": positions.to(torch.int32), "values": values, "full_shape": shape}


def _vllm_module(path: str, needed: str) -> Any:
    version = getattr(import_package("vllm"), "__version__", "unknown")
    try:
        module = import_module(path)
    except ImportError:
        module = None
    if not hasattr(module, needed):
        raise RolloutError(
            f"cannot send weights to vLLM: its version {version} has no {path}.{needed}, expected one. Install vllm "
            "0.33."
        )
    return module
