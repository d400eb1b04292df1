"""Load weights under Hugging Face names into an unsharded model.

Input: pairs of name and tensor, as `stream_weights` yields them. Output: the values and dtypes of the model's
parameters.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy.errors import RolloutError, did_you_mean, some
from fsdp2_strategy.hf.conversions import recipe_for
from fsdp2_strategy.hf.library_internals import dtype_plan
from fsdp2_strategy.hf.meta.init_on_meta import planned_dtypes
from fsdp2_strategy.hf.save_plan import regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.weights_folder import source_of_weights
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.rollout.difference import TensorDifference, put
from fsdp2_strategy.rollout.protocol import Changes, Weights
from fsdp2_strategy.storage.regions import Computed, Piece, assemble, sources_of, target_of, value_of
from fsdp2_strategy.storage.safetensors_format import Entry

_Job = tuple[str, Piece, set[str]]
"""A parameter, a piece of it that is computed, and the weights that this needs."""


class WeightLoader:
    """Load weights under Hugging Face names into an unsharded model, with the same conversions as from files.

    With ``takes_sent_dtype``, each parameter gets the dtype in which its values are sent; see `_SentDtypes`.
    """

    def __init__(self, model: Any, *, takes_sent_dtype: bool) -> None:
        copied: Any = meta_skeleton(model)
        self.model = model
        self._takes_sent_dtype = takes_sent_dtype
        self.regions = regions_to_write(copied, tensors_to_write(model, copied))
        nowhere = Path()
        self._expected = {name: Entry(name, nowhere, 0, r.dtype, tuple(r.shape)) for name, r in self.regions.items()}
        self.direct: dict[str, list[tuple[str, Piece]]] = {name: [] for name in self._expected}
        self.computed: list[_Job] = []
        recipe = recipe_for(source_of_weights(copied), self._expected).regions
        for own_name, region in recipe.items():
            for piece in region.pieces:
                if isinstance(piece.source, Computed):
                    needed = {entry.name for inner in piece.source.regions() for entry in sources_of(inner)}
                    self.computed.append((own_name, piece, needed))
                else:
                    self.direct[piece.source.name].append((own_name, piece))
        state = model.state_dict(keep_vars=True)
        reached = {id(state[own_name]) for own_name in recipe}
        if lost := [name for name, p in model.named_parameters() if id(p) not in reached]:
            raise RolloutError(
                f"cannot make an engine: {some(lost)} of {class_name(model)} are not in the stream of its weights, "
                "expected all parameters. Use another engine."
            )

    @torch.no_grad()
    def load(self, weights: Weights | Changes, *, only_changed: bool = False) -> None:
        """Write all weights into the model, or, with ``only_changed``, those that differ from the model's."""
        writer = _Writer(self)
        if self._takes_sent_dtype and not only_changed:
            writer.dtypes = _SentDtypes(self.model, writer.state)
        missing = dict.fromkeys(self._expected)
        for name, given in weights:
            self._check(name, given, missing)
            del missing[name]
            if isinstance(given, TensorDifference):
                writer.apply(name, given)
            else:
                writer.write(name, given.contiguous())
        if only_changed:
            writer.finish()
        elif missing:
            raise RolloutError(
                f"cannot update weights: {some(list(missing))} were not received, expected all {len(self._expected)} "
                "weights. Stream the whole model."
            )
        if writer.dtypes:
            self.model.config.dtype = writer.dtypes.most_common()

    def _check(self, name: str, tensor: torch.Tensor | TensorDifference, missing: Mapping[str, None]) -> None:
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


class _Writer:
    """Write the weights of one update into the model's parameters, with the tables of a `WeightLoader`."""

    def __init__(self, loader: WeightLoader) -> None:
        # Built at each update, because `sleep` and `wake_up` move the parameters to new memory.
        self.state = {name: tensor.detach() for name, tensor in loader.model.state_dict(keep_vars=True).items()}
        self.dtypes: _SentDtypes | None = None
        """Casts parameters to the dtypes of the weights, in an update that has all weights."""
        self._direct, self._regions = loader.direct, loader.regions
        self._inputs = {name for *_, needed in loader.computed for name in needed}
        self._pending = list(loader.computed)
        self._kept: dict[str, torch.Tensor] = {}
        """Received inputs of pending computations."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a weight, and compute what all inputs are known of."""
        for own_name, piece in self._direct[name]:
            if self.dtypes:
                self.dtypes.take(own_name, tensor.dtype)
            _write(self.state[own_name], piece, tensor)
        if not self._is_needed(name):
            return
        self._kept[name] = tensor
        ready = [job for job in self._pending if job[2] <= self._kept.keys()]
        for job in ready:
            self._compute(job)
        self._pending = [job for job in self._pending if job not in ready]
        self._kept = {n: t for n, t in self._kept.items() if self._is_needed(n)}

    def apply(self, name: str, difference: TensorDifference) -> None:
        """Write the changed elements of a weight."""
        direct = self._direct[name]
        if name in self._inputs or not all(piece.has_distinct_elements for _, piece in direct):
            tensor = self._current(name, difference.dtype)
            difference.apply_(tensor)
            self.write(name, tensor)
            return
        for own_name, piece in direct:
            own = self.state[own_name]
            selected, within = piece.positions(
                difference.positions.to(own.device), math.prod(difference.shape), own.shape
            )
            values = difference.values.to(own.device)
            put(own, within, values if selected is None else values[selected])

    def finish(self) -> None:
        """Compute what depends on a weight that was received and on weights that have not changed."""
        for job in self._pending:
            if not job[2] & self._kept.keys():
                continue
            for name in job[2] - self._kept.keys():
                held = [self.state[own_name].dtype for own_name in sources_of(self._regions[name])]
                self._kept[name] = self._current(name, functools.reduce(torch.promote_types, held))
            self._compute(job)

    def _is_needed(self, name: str) -> bool:
        return any(name in needed for *_, needed in self._pending)

    def _compute(self, job: _Job) -> None:
        own_name, piece, needed = job
        if self.dtypes:
            dtypes = (self._kept[name].dtype for name in needed)
            self.dtypes.take(own_name, functools.reduce(torch.promote_types, dtypes))
        _write(self.state[own_name], piece, value_of(piece.source, lambda entry: self._kept[entry.name]))

    def _current(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight as the model has it now, in the layout of the files."""
        return assemble(self._regions[name].to(dtype), lambda own_name: self.state[own_name].contiguous())


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
        """Cast a parameter to the dtype of values to write, or to one that also holds values written before."""
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


def _write(target: torch.Tensor, piece: Piece, value: torch.Tensor) -> None:
    view = value.as_strided(piece.shape, piece.strides, value.storage_offset() + piece.offset)
    target_of(target, piece).copy_(view, non_blocking=True)
