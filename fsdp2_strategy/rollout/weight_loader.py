"""Load weights under Hugging Face names into an unsharded model.

Input: pairs of name and tensor, as `stream_weights` yields them. Output: the values and dtypes of the model's
parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.errors import RolloutError, did_you_mean, some
from fsdp2_strategy.hf.conversions import recipe_for
from fsdp2_strategy.hf.library_internals import dtype_plan
from fsdp2_strategy.hf.meta.init_on_meta import planned_dtypes
from fsdp2_strategy.hf.regions import Computed, Piece, sources_of, target_of, value_of
from fsdp2_strategy.hf.safetensors_format import Entry
from fsdp2_strategy.hf.save_plan import regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.weights_folder import source_of_weights
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.rollout.protocol import Weights


class WeightLoader:
    """Load weights under Hugging Face names into an unsharded model, with the same conversions as from files.

    With ``takes_sent_dtype``, each parameter gets the dtype in which its values are sent; see `_SentDtypes`.
    """

    def __init__(self, model: Any, *, takes_sent_dtype: bool) -> None:
        copied: Any = meta_skeleton(model)
        self._model = model
        self._takes_sent_dtype = takes_sent_dtype
        regions = regions_to_write(copied, tensors_to_write(model, copied))
        nowhere = Path()
        self._expected = {name: Entry(name, nowhere, 0, r.dtype, tuple(r.shape)) for name, r in regions.items()}
        self._direct: dict[str, list[tuple[str, Piece]]] = {name: [] for name in self._expected}
        self._computed: list[tuple[str, Piece, set[str]]] = []
        recipe = recipe_for(source_of_weights(copied), self._expected).regions
        for own_name, region in recipe.items():
            for piece in region.pieces:
                if isinstance(piece.source, Computed):
                    needed = {entry.name for inner in piece.source.regions() for entry in sources_of(inner)}
                    self._computed.append((own_name, piece, needed))
                else:
                    self._direct[piece.source.name].append((own_name, piece))
        state = model.state_dict(keep_vars=True)
        reached = {id(state[own_name]) for own_name in recipe}
        if lost := [name for name, p in model.named_parameters() if id(p) not in reached]:
            raise RolloutError(
                f"cannot make an engine: {some(lost)} of {class_name(model)} are not in the stream of its weights, "
                "expected all parameters. Use another engine."
            )

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Write all weights into the model; raise if a weight is missing, unknown, repeated or has another shape."""
        # Built at each update, because `sleep` and `wake_up` move the parameters to new memory.
        state = {name: tensor.detach() for name, tensor in self._model.state_dict(keep_vars=True).items()}
        dtypes = _SentDtypes(self._model, state) if self._takes_sent_dtype else None
        missing = dict.fromkeys(self._expected)
        pending = list(self._computed)
        kept: dict[str, torch.Tensor] = {}  # received inputs of pending computations
        for name, given in weights:
            self._check(name, given, missing)
            del missing[name]
            tensor = given.contiguous()
            for own_name, piece in self._direct[name]:
                if dtypes:
                    dtypes.take(own_name, tensor.dtype)
                _write(state[own_name], piece, tensor)
            if any(name in needed for *_, needed in pending):
                kept[name] = tensor
                for own_name, piece, needed in (job for job in pending if job[2] <= kept.keys()):
                    if dtypes:
                        dtypes.take(own_name, functools.reduce(torch.promote_types, (kept[n].dtype for n in needed)))
                    _write(state[own_name], piece, _computed(piece, kept))
                pending = [job for job in pending if not job[2] <= kept.keys()]
                kept = {n: t for n, t in kept.items() if any(n in needed for *_, needed in pending)}
        if missing:
            raise RolloutError(
                f"cannot update weights: {some(list(missing))} were not received, expected all {len(self._expected)} "
                "weights. Stream the whole model."
            )
        if dtypes:
            self._model.config.dtype = dtypes.most_common()

    def _check(self, name: str, tensor: torch.Tensor, missing: Mapping[str, None]) -> None:
        if name not in missing:
            raise RolloutError(
                f"cannot update weights: {name} {'was received twice' if name in self._expected else 'is unknown'}, "
                f"expected each of {len(self._expected)} names once.{did_you_mean(name, missing)}"
            )
        if tuple(tensor.shape) != self._expected[name].shape:
            raise RolloutError(
                f"cannot update weights: {name} has shape {list(tensor.shape)}, expected "
                f"{list(self._expected[name].shape)}. Stream the model from which the engine was created."
            )


class _SentDtypes:
    """Give the parameters of a model the dtypes in which their values are sent, during one update.

    Each parameter is cast separately, because a stream may contain several dtypes: casting the whole model would round
    the values that have been received before. Parameters that transformers keeps in fp32 stay in fp32.
    """

    def __init__(self, model: Any, state: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._state = state
        """The tensors that values are written into; those of cast parameters are replaced."""
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names: dict[int, list[str]] = {}
        for name, parameter in self._parameters.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._taken: set[int] = set()
        self._kept: dict[torch.dtype, dict[str, torch.dtype]] = {}

    def take(self, name: str, dtype: torch.dtype) -> None:
        """Cast a parameter to the dtype of values that will be written into it.

        If other values of this update are in it already, cast it to a dtype that can hold both.
        """
        parameter = self._parameters.get(name)
        if parameter is None or not (parameter.is_floating_point() and dtype.is_floating_point):
            return
        if id(parameter) in self._taken:
            dtype = torch.promote_types(parameter.dtype, dtype)
        self._taken.add(id(parameter))
        if dtype not in self._kept:
            self._kept[dtype] = planned_dtypes(self._parameters, dtype_plan(self._model, dtype))
        dtype = self._kept[dtype].get(name, dtype)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            self._state |= dict.fromkeys(self._names[id(parameter)], parameter.detach())

    def most_common(self) -> torch.dtype:
        """Return the dtype of most elements of the model's parameters."""
        counts = Counter[torch.dtype]()
        for parameter in self._model.parameters():
            counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
        return counts.most_common(1)[0][0]


def _computed(piece: Piece, arrived: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return value_of(piece.source, lambda entry: arrived[entry.name])


def _write(target: torch.Tensor, piece: Piece, value: torch.Tensor) -> None:
    view = value.as_strided(piece.shape, piece.strides, value.storage_offset() + piece.offset)
    target_of(target, piece).copy_(view, non_blocking=True)
