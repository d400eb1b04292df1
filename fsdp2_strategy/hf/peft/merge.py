"""A model with adapters -> the same model without: adapted weights stand for what they are with the adapters merged.

Input: a model, sharded or not, with layers of peft in it or without any. Output: its modules as they were before peft
came, whose names are the hub's, for all that goes out: files, streams, engines. The model itself stays as it is.

[Note: merging] ``fully_shard`` cuts weights by rows, and the rows of ``W + scaling * B @ A`` that a rank holds need
nothing of the other ranks but adapters, which are small: these are gathered once, and a weight's rows are merged when
somebody asks for its values, one weight at a time. peft's own ``merge`` does it, on a copy of the layer that is cut to
some rows. The cuts are the same on any number of ranks (a rank fills the rows that it lacks with zeros and drops what
becomes of them), so that the same numbers are computed everywhere: a matrix product may round otherwise where it has
another shape.
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
from torch.distributed.tensor import DTensor

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.library_internals import forget_caches
from fsdp2_strategy.hf.skeleton import original_class, twin
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.placeholders import computed, values_of
from fsdp2_strategy.model.shards import local_box

Adapted = Callable[[Any, str, nn.Module], None]


@dataclass(frozen=True, eq=False)
class Merged:
    """A model without its adapters; see [Note: merging]."""

    model: nn.Module
    """The model itself where it has no adapters. Its adapted weights have values once `gather` was called."""
    adapters: dict[int, torch.Tensor] = field(default_factory=dict)
    """The parameters of adapters that are merged, by their identity."""
    whole: dict[int, torch.Tensor] = field(default_factory=dict)
    """The same, gathered."""

    @torch.no_grad()
    def gather(self) -> None:
        """Fetch the adapters from all ranks; collective where they are sharded."""
        self.whole.update(_gathered(self.adapters))


def without_adapters(root: nn.Module) -> Merged:
    """Return a model as it is once its active adapters are merged, its parameters in sharded form; not collective.

    Raises:
        CheckpointError: adapters are of a kind that cannot be merged from a rank's rows alone.
    """
    if not has_adapters(root):
        return Merged(root)
    adapters: dict[int, torch.Tensor] = {}
    whole: dict[int, torch.Tensor] = {}

    def merge(layer: Any, name: str, base: nn.Module) -> None:
        active = _active(layer)
        if not active:
            return
        _check(layer, name, active)
        adapters.update({id(p): p for key, p in _own_parameters(layer) if set(key.split(".")) & set(active)})
        for key in _adapted_keys(layer, active):
            weight = layer.get_base_layer()._parameters[key]
            # A copy, for a forward pass would register gathered parameters in the layer itself.
            rows = _Rows(twin(layer, lambda tensor: tensor), key, tuple(active), weight, whole)
            base._parameters[key] = computed(rows.merged, like=weight)

    model = _stripped(twin(root, lambda tensor: tensor), root, merge)
    _untie(model)
    return Merged(model, adapters, whole)


def base_of(model: nn.Module) -> nn.Module:
    """Return a model as it was before adapters came, with its own parameters; the model where none did."""
    return _stripped(twin(model, lambda tensor: tensor), model, None) if has_adapters(model) else model


def bare_twin(model: nn.Module) -> nn.Module:
    """Return a twin as the model was before adapters came, on meta: its names are those of files; not collective."""
    return twin(base_of(model))


def names_without_adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Return a model's modules with the names that they have without adapters; those of adapters are left out."""
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
    """Say whether a model has layers of peft in it."""
    if "peft" not in sys.modules:  # nobody has made one
        return False
    from peft import PeftMixedModel, PeftModel  # noqa: PLC0415
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415
    from peft.utils import AuxiliaryTrainingWrapper  # noqa: PLC0415

    kinds = (PeftModel, PeftMixedModel, BaseTunerLayer, AuxiliaryTrainingWrapper)
    return any(isinstance(module, kinds) for module in model.modules())


# --- the modules as they were ----------------------------------------------------------------------------------------


def _stripped(copied: nn.Module, root: nn.Module, merge: Adapted | None) -> nn.Module:
    """Take the adapters' modules out of a twin of a model.

    Args:
        copied: the twin, which is changed.
        root: the model.
        merge: is told of each adapted layer, its name and the twin's module that takes its place; None where values
            do not matter.
    """
    return _strip(copied, root, "", merge, {})


def _strip(
    new: nn.Module, module: nn.Module, name: str, merge: Adapted | None, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in done:
        return done[module]
    if path := _path_inside(module, merging=merge is not None):
        inner = _strip(new.get_submodule(path), module.get_submodule(path), name, merge, done)
        if merge is not None and path == "base_layer":
            merge(module, clean(name), inner)
    else:
        inner = new
        for child_name, child in list(module._modules.items()):
            if child is not None:
                in_full = f"{name}.{child_name}" if name else child_name
                inner._modules[child_name] = _strip(new._modules[child_name], child, in_full, merge, done)  # type: ignore[arg-type]
    done[module] = inner
    return inner


def _path_inside(module: nn.Module, *, merging: bool) -> str:
    """Return where within a module of peft that module lies which takes its place; empty for all others.

    Args:
        module: any module.
        merging: the one that is trained takes its place, and not the one that was there before.

    Raises:
        CheckpointError: merging, and it has no such place.
    """
    from peft import PeftMixedModel, PeftModel  # noqa: PLC0415
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer  # noqa: PLC0415
    from peft.utils import AuxiliaryTrainingWrapper  # noqa: PLC0415

    if isinstance(module, PeftModel | PeftMixedModel):
        if merging and not isinstance(module.base_model, BaseTuner):
            raise CheckpointError(
                f"cannot merge adapters: {original_class(module).__name__} learns prompts, expected adapters of "
                "weights. Save the adapters alone with merge_adapters=False."
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
    """Let the configuration say so where adapters were merged into an embedding and not into the head tied to it.

    Raises:
        CheckpointError: the model ties more than that.
    """
    for part in model.modules():
        ties: dict[str, str] = vars(part).get("all_tied_weights_keys") or {}
        broken = [pair for pair in ties.items() if _tensor(part, pair[0]) is not _tensor(part, pair[1])]
        if not broken:
            continue
        if len(ties) > 1:
            raise CheckpointError(
                f"cannot merge adapters: {broken[0][0]} and {broken[0][1]} are tied, with others, and the adapters "
                "change one of them, expected weights that are not tied. Save the adapters alone with "
                "merge_adapters=False."
            )
        vars(part)["all_tied_weights_keys"] = {}
        memo: dict[int, Any] = {}
        for module in part.modules():
            if "config" in vars(module):
                vars(module)["config"] = copy.deepcopy(vars(module)["config"], memo)  # the model's own stays as it is
        config: Any = vars(part)["config"]
        for own in (config, config.get_text_config()):
            own.tie_word_embeddings = False


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path)._parameters.get(key)


# --- which adapters --------------------------------------------------------------------------------------------------


def _active(layer: Any) -> list[str]:
    """Return the adapters of a layer that peft would merge."""
    own = {key.split(".")[1] for key, _ in _own_parameters(layer) if key.count(".")}
    return [name for name in layer.active_adapters if name in own and name not in layer.merged_adapters]


def _own_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of a layer's adapters, by names such as ``lora_A.default.weight``."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("base_layer."):
            yield clean(name), parameter


def _check(layer: Any, name: str, active: Sequence[str]) -> None:
    """Raise where the rows of a merged weight need more than the same rows of the weight, or peft cannot merge."""
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
        what += " without a bias, and its adapter with one"
    elif known and used:
        if used <= by_rows and not _is_transposed(layer) and not layer.merged_adapters:
            return
        what += f" with {', '.join(sorted(variant.__name__ for variant in used))}"
    elif known:
        what += " in groups"
    raise CheckpointError(
        f"cannot merge the adapters of {name}: it is a {what}, expected LoRA of a linear layer, an embedding, a "
        "convolution or a parameter, or DoRA that scales rows of the weight. Save the adapters alone with "
        "merge_adapters=False."
    )


def _is_transposed(layer: Any) -> bool:
    """Say whether a layer's weight is stored as (in, out)."""
    return bool(getattr(layer, "fan_in_fan_out", False))


def _adapted_keys(layer: Any, active: Sequence[str]) -> list[str]:
    """Return the names of the base layer's parameters that an adapter changes."""
    biased = any(layer.lora_bias.get(adapter) for adapter in active)
    return [getattr(layer, "parameter_name", "weight"), *(["bias"] if biased else [])]


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of an adapted weight that this rank holds; see [Note: merging]."""

    layer: Any
    key: str
    active: tuple[str, ...]
    weight: torch.Tensor
    whole: Mapping[int, torch.Tensor]

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return them with the adapters merged, on this rank's device."""
        rows = values_of(self.weight).to(current_device(), copy=True, memory_format=torch.contiguous_format)
        begin, length = local_box(self.weight)[0]
        for low, high in _cuts(self.weight.shape[0], sizes.MERGED_EXPERTS if self._experts > 1 else sizes.MERGED_ROWS):
            first, last = max(low, begin), min(high, begin + length)
            if first >= last:
                continue
            own = cut = rows[first - begin : last - begin]
            if (first, last) != (low, high):
                cut = rows.new_zeros((high - low, *rows.shape[1:]))
                cut[first - low : last - low] = own
            merged = self._merge(cut, low)[first - low : last - low]
            if merged.data_ptr() != own.data_ptr():  # else it was merged in place
                own.copy_(merged)
        return rows

    @property
    def _experts(self) -> int:
        """Number of matrices that a weight of three dimensions holds."""
        return int(getattr(self.layer, "num_experts", 1))

    @property
    def _by_inputs(self) -> bool:
        """Whether a row of the weight is one input of the layer, and not one output."""
        return self.key != "bias" and (bool(len(self.layer.lora_embedding_A)) or _is_transposed(self.layer))

    def _merge(self, rows: torch.Tensor, begin: int) -> torch.Tensor:
        """Let peft merge into rows of the weight; it may write to them."""
        names = {id(parameter): key for key, parameter in _own_parameters(self.layer)}
        base = self.layer.get_base_layer()

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.weight:
                return rows
            if id(tensor) in names and id(tensor) in self.whole:
                return self._cut(names[id(tensor)].split(".")[0], self.whole[id(tensor)], begin, len(rows))
            if tensor is getattr(base, "weight", None) or tensor is getattr(base, "bias", None):
                return rows.new_zeros(self._beside(tensor, len(rows)), dtype=tensor.dtype)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        layer: Any = twin(self.layer, cut)
        layer.merged_adapters = []  # a twin shares what is no tensor
        forget_caches(layer)
        if self._experts > 1:
            layer.num_experts = len(rows)
        layer.merge(adapter_names=list(self.active))
        result: torch.Tensor = layer.get_base_layer()._parameters[self.key]
        return result.detach()

    def _cut(self, kind: str, whole: torch.Tensor, begin: int, length: int) -> torch.Tensor:
        """Return of an adapter's parameter what some rows of the weight need."""
        if self._experts > 1:  # A is (experts * rank, in), B is (out, rank * experts)
            apart = (self._experts, -1, whole.shape[1]) if kind == "lora_A" else (len(whole), -1, self._experts)
            dim = 0 if kind == "lora_A" else 2
            return whole.reshape(apart).narrow(dim, begin, length).flatten(dim // 2, dim // 2 + 1)
        dims = {"lora_A": 1, "lora_embedding_A": 1} if self._by_inputs else {"lora_B": 0, "lora_magnitude_vector": 0}
        if kind not in dims or (self.key != "bias" and hasattr(self.layer, "num_experts") and self.weight.ndim == 3):
            return whole
        # The magnitudes of a convolution have a dimension for the batch before that of the outputs.
        dim = 1 if kind == "lora_magnitude_vector" and whole.ndim > 1 else dims[kind]
        return whole.narrow(dim, begin, length)

    def _beside(self, tensor: torch.Tensor, length: int) -> list[int]:
        """Return the shape that the layer's other parameter has beside some rows of this one."""
        shape = list(tensor.shape)
        if self.key == "bias":
            shape[1 if _is_transposed(self.layer) else 0] = length
        elif not self._by_inputs:
            shape[0] = length
        return shape


def _cuts(length: int, size: int) -> list[tuple[int, int]]:
    """Cut rows evenly, whoever holds them; a short rest goes to the cut before it."""
    starts = list(range(0, length, size))
    if len(starts) > 1 and length - starts[-1] < size // 4:
        starts.pop()
    return list(zip(starts, [*starts[1:], length], strict=True))


def _gathered(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return tensors whole, on this rank's device, in few collectives."""
    found: dict[int, torch.Tensor] = {}
    waiting: dict[Any, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            found[key] = values_of(tensor).to(current_device())
            continue
        group = tensor.device_mesh.get_group(-1)
        waiting.setdefault(group, {})[key] = tensor
        if sum(t.numel() * t.element_size() for t in waiting[group].values()) > sizes.GATHER_BYTES:
            found |= _gathered_over(group, waiting.pop(group))
    for group, left in waiting.items():
        found |= _gathered_over(group, left)
    return found


def _gathered_over(group: dist.ProcessGroup, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return tensors whole that are sharded over a group: bytes of which all but one are zero add up to it."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    starts = list(itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0))
    memory = torch.zeros(starts[-1], dtype=torch.uint8, device=current_device())
    found: dict[int, torch.Tensor] = {}
    for (key, tensor), start, size in zip(tensors.items(), starts[:-1], sizes, strict=True):
        found[key] = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
        own = found[key]
        for dim, (begin, length) in enumerate(local_box(tensor)):
            own = own.narrow(dim, begin, length)
        own.copy_(values_of(tensor))
    dist.all_reduce(memory, group=group)
    return found
