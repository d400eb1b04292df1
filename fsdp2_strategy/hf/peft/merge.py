"""Present a peft model as its base model; adapters are merged into the weights when the weights are read.

Input: a model, sharded or not, with or without peft layers. Output: a copy of its module tree without peft's modules,
with the names of the base model, for files, streams and engines. The model itself does not change.

[Note: row-wise merging] ``fully_shard`` splits weights by rows. A rank computes its rows of ``W + scaling * B @ A``
from its rows of W and the full adapters. The adapters are small, and are gathered once. Weights are merged one at a
time, when they are read. peft's own ``merge`` merges the rows, on a copy of the layer that has only these rows. If a
rank holds only some columns of its rows, too, the complete rows are computed, and those columns are kept.

Rows are merged in chunks whose boundaries do not depend on the number of ranks. If a rank holds only some rows of a
chunk, it fills the others with zeros and drops their results. So the merged values are the same on any number of ranks.
With chunks of other sizes they could differ, because matrix products of other shapes may round differently.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.library_internals import reset_caches
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.model.boxes import ShardBox, box_of
from fsdp2_strategy.model.fsdp_state import class_name, original_class
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.placeholders import computed, values_of
from fsdp2_strategy.model.shards import local_shard, shard_group_of

Adapted = Callable[[Any, str, nn.Module], None]
"""A function that is called with an adapted layer, its name, and the base layer that replaces it in a copy."""


@dataclass(frozen=True, eq=False)
class Merged:
    """A model without its adapters; see [Note: row-wise merging]."""

    model: nn.Module
    """The base model; the model itself if it has no adapters. Call `gather` before reading its adapted weights."""
    adapters: dict[int, torch.Tensor] = field(default_factory=dict)
    """The parameters of the merged adapters, by their ``id``."""
    gathered: dict[int, torch.Tensor] = field(default_factory=dict)
    """The full tensors of the same parameters; filled by `gather`."""

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the adapters' parameters from all ranks; collective if they are sharded."""
        self.gathered.update(gather_full(self.adapters))


def without_adapters(root: nn.Module) -> Merged:
    """Replace each adapted weight by a sharded placeholder that merges the active adapters; not collective."""
    if not has_adapters(root):
        return Merged(root)
    adapters: dict[int, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}

    def merge(layer: Any, name: str, base: nn.Module) -> None:
        active = _active(layer)
        if not active:
            return
        _check(layer, name, active)
        adapters.update({id(p): p for key, p in _own_parameters(layer) if set(key.split(".")) & set(active)})
        for key in _adapted_keys(layer, active):
            weight = layer.get_base_layer()._parameters[key]
            # Copy the layer, because a forward pass registers gathered parameters in the original.
            rows = _Rows(meta_skeleton(layer, lambda tensor: tensor), key, tuple(active), weight, gathered)
            base._parameters[key] = computed(rows.merged, like=weight)

    model = _remove_adapters(meta_skeleton(root, lambda tensor: tensor), root, merge)
    _untie(model)
    return Merged(model, adapters, gathered)


def without_adapter_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model without adapters but with the same parameters; the model if it has no adapters."""
    return _remove_adapters(meta_skeleton(model, lambda tensor: tensor), model, None) if has_adapters(model) else model


def base_skeleton(model: nn.Module) -> nn.Module:
    """Return a meta skeleton of the model without adapters, with the names of the base model; not collective."""
    return meta_skeleton(without_adapter_modules(model))


def names_without_adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Map each module of a model to its name in the base model; modules of adapters are left out."""
    if not has_adapters(model):
        return {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        if path := _path_inside(module, merging=False):
            walk(module.get_submodule(path), name)
        elif module not in found:
            found[module] = name
            for child_name, child in module.named_children():
                walk(child, f"{name}.{child_name}" if name else child_name)

    walk(model, "")
    return found


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model contains peft layers."""
    if "peft" not in sys.modules:  # no peft layer can exist
        return False
    from peft import PeftMixedModel, PeftModel  # noqa: PLC0415
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415
    from peft.utils import AuxiliaryTrainingWrapper  # noqa: PLC0415

    kinds = (PeftModel, PeftMixedModel, BaseTunerLayer, AuxiliaryTrainingWrapper)
    return any(isinstance(module, kinds) for module in model.modules())


def is_peft_model(model: nn.Module) -> bool:
    """Return whether peft wrapped or changed the model itself, rather than only a module within it.

    LeRobot saves such a model as its adapters, and a policy that contains a peft model with all its weights.
    """
    return any(module is model for module in peft_models(model))


def peft_models(root: nn.Module) -> list[nn.Module]:
    """Return the modules within a module that are a PeftModel, or into which peft injected adapters."""
    if not has_adapters(root):
        return []
    from peft import PeftMixedModel, PeftModel  # noqa: PLC0415

    kinds = (PeftModel, PeftMixedModel)
    return [module for module in root.modules() if isinstance(module, kinds) or "peft_config" in vars(module)]


# --- module tree without adapters ------------------------------------------------------------------------------------


def _remove_adapters(
    new: nn.Module,
    module: nn.Module,
    merge: Adapted | None,
    name: str = "",
    done: dict[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Remove the adapters' modules from the copy ``new`` of a module, and return the module that replaces the copy.

    ``merge`` is called for each adapted layer. ``done`` has results by original module: one may be registered twice.
    """
    done = {} if done is None else done
    if module in done:
        return done[module]
    if path := _path_inside(module, merging=merge is not None):
        inner = _remove_adapters(new.get_submodule(path), module.get_submodule(path), merge, name, done)
        if merge is not None and path == "base_layer":
            merge(module, clean(name), inner)
    else:
        inner = new
        for child_name, child in list(module._modules.items()):
            if child is not None:
                in_full = f"{name}.{child_name}" if name else child_name
                inner._modules[child_name] = _remove_adapters(new._modules[child_name], child, merge, in_full, done)  # type: ignore[arg-type]
    done[module] = inner
    return inner


def _path_inside(module: nn.Module, *, merging: bool) -> str:
    """Return the relative path of the submodule that replaces a peft module; empty for other modules.

    With ``merging``, that of a module in ``modules_to_save`` is its trained copy, otherwise its original.
    """
    from peft import PeftMixedModel, PeftModel  # noqa: PLC0415
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer  # noqa: PLC0415
    from peft.utils import AuxiliaryTrainingWrapper  # noqa: PLC0415

    if isinstance(module, PeftModel | PeftMixedModel):
        if merging and not isinstance(module.base_model, BaseTuner):
            raise CheckpointError(
                f"cannot merge adapters: {class_name(module)} learns prompts, expected adapters of "
                "weights. Save only the adapters with merge_adapters=False."
            )
        return "base_model"
    if isinstance(module, BaseTuner):
        return "model"
    if isinstance(module, BaseTunerLayer):
        return "base_layer"
    if not isinstance(module, AuxiliaryTrainingWrapper):
        return ""
    if hasattr(module, "modules_to_save"):
        trained = [name for name in module.active_adapters if name in module.modules_to_save]
        return f"modules_to_save.{trained[0]}" if merging and trained else "original_module"
    return "token_adapter"


def _untie(model: nn.Module) -> None:
    """Mark an embedding and a head as not tied in the configuration, if adapters were merged into one of them only."""
    for part in model.modules():
        ties: dict[str, str] = vars(part).get("all_tied_weights_keys") or {}
        broken = [pair for pair in ties.items() if _tensor(part, pair[0]) is not _tensor(part, pair[1])]
        if not broken:
            continue
        if len(ties) > 1:
            raise CheckpointError(
                f"cannot merge adapters: they change only one of the tied weights {broken[0][0]} and {broken[0][1]}, "
                "and the model ties other weights, too, expected adapters that change no tied weight. Save only the "
                "adapters with merge_adapters=False."
            )
        vars(part)["all_tied_weights_keys"] = {}
        memo: dict[int, Any] = {}
        for module in part.modules():
            if "config" in vars(module):
                vars(module)["config"] = copy.deepcopy(vars(module)["config"], memo)  # the original keeps its own
        config: Any = vars(part)["config"]
        for own in (config, config.get_text_config()):
            own.tie_word_embeddings = False


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(key)


# --- which adapters --------------------------------------------------------------------------------------------------


def _active(layer: Any) -> list[str]:
    """Return a layer's active adapters, except those that peft has already merged into its weights."""
    own = {key.split(".")[1] for key, _ in _own_parameters(layer) if key.count(".")}
    return [name for name in layer.active_adapters if name in own and name not in layer.merged_adapters]


def _own_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a layer's adapters, with names such as ``lora_A.default.weight``."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("base_layer."):
            yield clean(name), parameter


def _check(layer: Any, name: str, active: Sequence[str]) -> None:
    """Raise if peft cannot merge the adapters, or if a merged row depends on other rows of the weight."""
    from peft.tuners.lora import layer as lora  # noqa: PLC0415
    from peft.tuners.lora import variants  # noqa: PLC0415

    kind = original_class(layer)
    convolutions = (lora.Conv1d, lora.Conv2d, lora.Conv3d)
    known = kind in (lora.Linear, lora.Embedding, lora.ParamWrapper, *convolutions)
    used = {type(layer.lora_variant[adapter]) for adapter in active if adapter in getattr(layer, "lora_variant", {})}
    by_rows = {variants.DoraLinearVariant, variants.DoraConv1dVariant, variants.DoraConv2dVariant}
    by_rows.add(variants.DoraConv3dVariant)
    what = kind.__name__ if known else f"{kind.__module__}.{kind.__name__}"
    if known and not used and getattr(layer.get_base_layer(), "groups", 1) == 1:
        no_bias = getattr(layer.get_base_layer(), "bias", None) is None
        if not (no_bias and any(layer.lora_bias.get(adapter) for adapter in active)):
            return
        what += " without a bias, but its adapter has one"
    elif known and used:
        if used <= by_rows and not _is_transposed(layer) and not layer.merged_adapters:
            return
        what += f" with {', '.join(sorted(variant.__name__ for variant in used))}"
    elif known:
        what += " in groups"
    raise CheckpointError(
        f"cannot merge the adapters of {name}: it is a {what}, expected LoRA of a linear layer, an embedding, a "
        "convolution or a parameter, or DoRA that scales rows of the weight. Save only the adapters with "
        "merge_adapters=False."
    )


def _is_transposed(layer: Any) -> bool:
    """Return whether a layer's weight is stored as (in, out)."""
    return bool(getattr(layer, "fan_in_fan_out", False))


def _adapted_keys(layer: Any, active: Sequence[str]) -> list[str]:
    """Return the names of the base layer's parameters that the active adapters change."""
    biased = any(layer.lora_bias.get(adapter) for adapter in active)
    return [getattr(layer, "parameter_name", "weight"), *(["bias"] if biased else [])]


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """This rank's rows of an adapted weight; see [Note: row-wise merging]."""

    layer: Any
    """A copy of the adapted layer."""
    key: str
    """Name of the weight in the base layer."""
    active: tuple[str, ...]
    weight: torch.Tensor
    gathered: Mapping[int, torch.Tensor]
    """The full tensors of the adapters' parameters, by the ``id`` of the parameter."""

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return the rows with the adapters merged, on this rank's device."""
        local = values_of(self.weight).to(current_device(), copy=True, memory_format=torch.contiguous_format)
        shard = local_shard(self.weight)
        chunk = sizes.MERGED_EXPERTS if self._experts > 1 else sizes.MERGED_ROWS
        for low, high in _row_chunks(self.weight.shape[0], chunk):
            own = [part for box in shard.boxes if (part := _rows_of_box(box, low, high))]
            if not own:
                continue
            if shard.is_row_range and own[0].full[0] == (0, high - low):
                [(begin, length)] = [box.local[0] for box in own]
                rows = local[begin : begin + length]
                merged = self._merge(rows, low)
                if merged.data_ptr() != rows.data_ptr():  # else peft merged in place
                    rows.copy_(merged)
                continue
            rows = local.new_zeros((high - low, *self.weight.shape[1:]))
            for box in own:
                box_of(rows, box.full).copy_(box_of(local, box.local))
            merged = self._merge(rows, low)
            for box in own:
                box_of(local, box.local).copy_(box_of(merged, box.full))
        return local

    @property
    def _experts(self) -> int:
        """Number of matrices in a three-dimensional weight; 1 for other weights."""
        return int(getattr(self.layer, "num_experts", 1))

    @property
    def _rows_are_inputs(self) -> bool:
        """Whether each row of the weight belongs to an input of the layer; otherwise it belongs to an output."""
        return self.key != "bias" and (bool(len(self.layer.lora_embedding_A)) or _is_transposed(self.layer))

    def _merge(self, rows: torch.Tensor, begin: int) -> torch.Tensor:
        """Call peft to merge the adapters into some rows of the weight; peft may write to ``rows``."""
        names = {id(parameter): key for key, parameter in _own_parameters(self.layer)}
        base = self.layer.get_base_layer()

        def replacement(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.weight:
                return rows
            if id(tensor) in names and id(tensor) in self.gathered:
                return self._adapter_slice(names[id(tensor)].split(".")[0], self.gathered[id(tensor)], begin, len(rows))
            if tensor is getattr(base, "weight", None) or tensor is getattr(base, "bias", None):
                return rows.new_zeros(self._shape_for_rows(tensor, len(rows)), dtype=tensor.dtype)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        layer: Any = meta_skeleton(self.layer, replacement)
        layer.merged_adapters = []  # the copy shares this list with the original
        reset_caches(layer)
        if self._experts > 1:
            layer.num_experts = len(rows)
        layer.merge(adapter_names=list(self.active))
        result: torch.Tensor = layer.get_base_layer()._parameters[self.key]
        return result.detach()

    def _adapter_slice(self, kind: str, gathered: torch.Tensor, begin: int, length: int) -> torch.Tensor:
        """Return the slice of an adapter's parameter that is needed to merge ``length`` rows of the weight."""
        if self._experts > 1:  # A is (experts * rank, in), B is (out, rank * experts)
            apart = (self._experts, -1, gathered.shape[1]) if kind == "lora_A" else (len(gathered), -1, self._experts)
            dim = 0 if kind == "lora_A" else 2
            return gathered.reshape(apart).narrow(dim, begin, length).flatten(dim // 2, dim // 2 + 1)
        of_inputs, of_outputs = {"lora_A": 1, "lora_embedding_A": 1}, {"lora_B": 0, "lora_magnitude_vector": 0}
        dims = of_inputs if self._rows_are_inputs else of_outputs
        if kind not in dims or (self.key != "bias" and hasattr(self.layer, "num_experts") and self.weight.ndim == 3):
            return gathered
        # The magnitudes of a convolution have a batch dimension before the output dimension.
        dim = 1 if kind == "lora_magnitude_vector" and gathered.ndim > 1 else dims[kind]
        return gathered.narrow(dim, begin, length)

    def _shape_for_rows(self, tensor: torch.Tensor, length: int) -> list[int]:
        """Return the shape of the base layer's other parameter in a copy of the layer that has only ``length`` rows."""
        shape = list(tensor.shape)
        if self.key == "bias":
            shape[1 if _is_transposed(self.layer) else 0] = length
        elif not self._rows_are_inputs:
            shape[0] = length
        return shape


def _rows_of_box(box: ShardBox, low: int, high: int) -> ShardBox | None:
    """Return the part of a box in rows [low, high) of a weight, relative to these rows; None if it is empty."""
    (begin, length), (own, _) = box.full[0], box.local[0]
    first, last = max(low, begin), min(high, begin + length)
    if first >= last:
        return None
    rows = (first - low, last - first), (own + first - begin, last - first)
    return ShardBox((rows[0], *box.full[1:]), (rows[1], *box.local[1:]))


def _row_chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Split rows into chunks that do not depend on the sharding; a short last chunk joins the previous one."""
    starts = list(range(0, length, size))
    if len(starts) > 1 and length - starts[-1] < size // 4:
        starts.pop()
    return list(zip(starts, [*starts[1:], length], strict=True))


def gather_full(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Gather full tensors to this rank's device, several in each collective; collective if they are sharded."""
    full: dict[int, torch.Tensor] = {}
    by_group: dict[dist.ProcessGroup, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        holders = shard_group_of(tensor)
        if holders is None:
            full[key] = values_of(tensor).to(current_device())
            continue
        waiting = by_group.setdefault(holders.group, {})
        waiting[key] = tensor
        if sum(t.nbytes for t in waiting.values()) > sizes.GATHER_BYTES:
            full |= _gather_over(holders.group, by_group.pop(holders.group))
    for group, waiting in by_group.items():
        full |= _gather_over(group, waiting)
    return full


def _gather_over(group: dist.ProcessGroup, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Gather full tensors with one all-reduce of bytes; each byte is zero on all ranks but one, so sums are exact."""
    starts = list(itertools.accumulate((-(-t.nbytes // 16) * 16 for t in tensors.values()), initial=0))
    memory = torch.zeros(starts[-1], dtype=torch.uint8, device=current_device())
    full: dict[int, torch.Tensor] = {}
    for (key, tensor), start in zip(tensors.items(), starts, strict=False):
        full[key] = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        local_shard(tensor).copy_to(full[key], values_of(tensor))
    dist.all_reduce(memory, group=group)
    return full
