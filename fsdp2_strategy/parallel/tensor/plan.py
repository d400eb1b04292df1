"""Decide how tensor parallelism splits the layers of a model: which style of transformers each module gets.

Input: a model, whose configuration may have a plan, or a plan of the user; a tensor-parallel size. Output: a
`TensorPlan` with the styles by full names, which `split` applies and `explain` prints.

[Note: tensor plans] A plan maps names of modules and parameters to styles, with ``*`` for numbers:
``{"model.layers.*.mlp.up_proj": "colwise"}``. transformers defines the styles. A style of a module changes its inputs
and outputs, and splits its own parameters unless they have a style themselves. ``colwise`` splits the outputs of a
linear layer over the ranks, ``rowwise`` its inputs, and sums the partial outputs.

[Note: adapters] In a layer of peft, the style of a linear layer applies to its base layer. Its LoRA matrices are split
accordingly. If the outputs are split, lora_B is split like the base layer, and lora_A is not split. If the inputs are
split, lora_A is split like the base layer, and lora_B is not split. A module of ``modules_to_save`` is a wrapper around
the original module and a trained copy: the style applies to both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp2_strategy.errors import ShardError, counted, did_you_mean, some
from fsdp2_strategy.hf.library_internals import lists_blocks, parallel_styles
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import clean, generic_name

OLDEST_TRANSFORMERS = "5.23"
"""The lowest version of transformers that was tested: its styles make DTensors of parameters of all sizes."""

_PACKED = ("PackedColwiseParallel", "PackedRowwiseParallel")
_SPLITS_OUTPUTS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_SPLITS_FULL_INPUTS = ("rowwise_split_input", "rowwise_rep")
_ON_ANY_MODULE = ("mla_kv_a_proj", "all_reduce", "replicate", "replicated_with_grad_allreduce")
_KINDS: dict[str, tuple[type[nn.Module], str]] = {
    "colwise": (nn.Linear, "a linear layer"),
    "rowwise": (nn.Linear, "a linear layer"),
    "embedding": (nn.Embedding, "an embedding"),
}
"""The class of modules that styles with these prefixes split, and its description."""
_NOT_SUPPORTED = {"sequence_parallel": "it splits sequences, which sequence_parallel_size does"}


@dataclass(kw_only=True)
class TensorPlan:
    """The styles of a model's modules and parameters; see [Note: tensor plans]."""

    size: int
    """Number of ranks that share each layer."""
    given: dict[str, str]
    """The plan with ``*`` for numbers, and names from the root."""
    is_given: bool = False
    """Whether the plan is the user's, and not that of a transformers model."""
    copies_outputs: bool = False
    """Whether outputs of styles are copied, because the model changes them in place, which autograd does not allow."""
    styles: dict[str, str] = field(default_factory=dict)
    """Style by full name: the parameters of each module, then the module itself."""
    not_split: list[str] = field(default_factory=list)
    """Modules that are not split, because they share a parameter with one that is split in another way or not split."""

    @classmethod
    def of(cls, root: nn.Module, size: int, given: Mapping[str, str], **options: Any) -> TensorPlan:
        """Return the plan for the modules of a model that ``given`` names; sizes are not checked."""
        plan = cls(size=size, given=dict(given), **options)
        for name, module in root.named_modules():
            plan.styles |= _styles_of_module(name, module, plan.given)
        _remove_tied(root, plan)
        return plan

    def within(self, prefix: str) -> dict[str, str]:
        """Return the part of the given plan that is for one module of the root, with names from that module."""
        start = f"{generic_name(prefix)}." if prefix else ""
        return {key.removeprefix(start): style for key, style in self.given.items() if key.startswith(start)}

    def changed(self, root: nn.Module, prefix: str, own: Mapping[str, str], *, copies_outputs: bool) -> TensorPlan:
        """Return a copy with another part for one module of the root; see `within`."""
        start = f"{generic_name(prefix)}." if prefix else ""
        given = {key: style for key, style in self.given.items() if not key.startswith(start)}
        given |= {start + key: style for key, style in own.items()}
        copies_outputs = copies_outputs or self.copies_outputs
        return TensorPlan.of(root, self.size, given, is_given=self.is_given, copies_outputs=copies_outputs)

    def split_dims(self, model: nn.Module) -> dict[str, tuple[int, bool]]:
        """Return for each parameter that is split its dimension, from 0, and whether it is split in two halves."""
        found = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            style = self.styles.get(name)
            if style is not None and (split := _split_of(style, name, parameter.ndim)) is not None:
                found[name] = split
        return found


def _split_of(style_name: str, name: str, ndim: int) -> tuple[int, bool] | None:
    """Return which dimension of a parameter a style splits, and whether in two halves; None if it splits none."""
    kind = type(parallel_styles()[style_name]).__name__
    is_vector = ndim == 1
    if kind in ("ColwiseParallel", "PackedColwiseParallel"):
        return (ndim - 1 if is_vector else ndim - 2), kind in _PACKED and not is_vector
    if kind == "RowwiseParallel":
        return None if name.endswith("bias") else (ndim - 1, False)
    if kind == "PackedRowwiseParallel":
        return None if is_vector else (ndim - 1, True)
    if kind == "EmbeddingParallel":
        return parallel_styles()[style_name].shard_dim, False
    return None


def plan_tensor_parallel(
    root: nn.Module, size: int, plan: Mapping[str, str] | None = None, *, without: Collection[str] = ()
) -> TensorPlan:
    """Return the plan of a model that is not sharded, for ``size`` ranks that share each layer; not collective.

    The styles are those of ``plan``, or else of the transformers models in ``root``; see [Note: tensor plans]. Modules
    ``without`` are left out, because their experts are divided among ranks.
    """
    given = dict(plan) if plan is not None else plans_of_models(root, "tp_plan")
    left_out = {generic_name(clean(name)) for name in without}
    given = {key: style for key, style in given.items() if not left_out.intersection((key, key.rpartition(".")[0]))}
    if not given:
        raise ShardError(
            f"cannot split the layers of {class_name(root)}: it has no plan for tensor parallelism, expected a model "
            "of transformers with a tp_plan. Pass tensor_parallel_plan, or set tensor_parallel_size=1."
        )
    if not parallel_styles():
        raise ShardError(
            f"cannot split the layers of {class_name(root)}: the installed transformers has no tensor parallelism that "
            f"works with fully_shard, expected version {OLDEST_TRANSFORMERS} or newer. Update transformers, or set "
            "tensor_parallel_size=1."
        )
    _check_styles(root, given)
    found = TensorPlan.of(root, size, given, is_given=plan is not None)
    names = {generic_name(clean(name)) for name, _ in (*root.named_modules(), *root.named_parameters())}
    if plan is not None and (unused := sorted(set(given) - names)):
        raise ShardError(
            f"cannot split the layers of {class_name(root)}: {some(unused)} of tensor_parallel_plan match no module "
            f"and no parameter, expected names with * for numbers.{did_you_mean(unused[0], names)}"
        )
    if not found.styles:
        raise ShardError(
            f"cannot split the layers of {class_name(root)}: its plan matches no module, expected at least one. Pass "
            "tensor_parallel_plan, or set tensor_parallel_size=1."
        )
    check_sizes(root, found)
    return found


def plans_of_models(root: nn.Module, attribute: str) -> dict[str, str]:
    """Return the plans that outermost transformers models have in an attribute, with names from ``root``."""
    return {
        f"{prefix}.{key}" if prefix else key: style
        for prefix, model in transformers_models(root).items()
        for key, style in (getattr(model, attribute, None) or {}).items()
    }


def transformers_models(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost transformers models in a model by name; the root itself under an empty name."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not is_inside and lists_blocks(module) and hasattr(module, "config"):
            found[name] = module
    return found


def _check_styles(root: nn.Module, plan: Mapping[str, str]) -> None:
    known = parallel_styles()
    for name, style in plan.items():
        reason = _NOT_SUPPORTED.get(style, "" if style in known else "transformers has no such style")
        if reason:
            others = [each for each in known if each not in _NOT_SUPPORTED]
            raise ShardError(
                f"cannot split {name} of {class_name(root)}: its style is {style!r}, and {reason}, expected one of "
                f"{', '.join(sorted(others))}.{did_you_mean(style, others)}"
            )


def _styles_of_module(
    name: str, module: nn.Module, plan: Mapping[str, str], style: str | None = None
) -> dict[str, str]:
    """Return the styles of a module's own parameters, and of the module; ``style`` is that of the wrapper around it."""
    style = style or plan.get(generic_name(clean(name)))
    if style is not None and module._modules.get("base_layer") is not None:
        return _styles_of_adapted(name, module, style)
    if style is not None and module._modules.get("original_module") is not None:
        return _styles_of_saved(name, module, plan, style)
    found = {}
    for own, _ in module.named_parameters(recurse=False):
        full = f"{name}.{own}" if name else own
        if (of_parameter := plan.get(generic_name(clean(full)), style)) is not None:
            found[full] = of_parameter
    if style is not None:
        found[name] = style
        kind, layer = next((kind for start, kind in _KINDS.items() if style.startswith(start)), (nn.Module, ""))
        if not isinstance(module, kind):
            raise ShardError(
                f"cannot split {name}: it is a {class_name(module)}, and its style {style!r} is for "
                f"nn.{kind.__name__}, expected {layer}. Correct the plan, or set tensor_parallel_size=1."
            )
    return found


def _styles_of_saved(name: str, wrapper: nn.Module, plan: Mapping[str, str], style: str) -> dict[str, str]:
    """Return the styles of a module of peft's ``modules_to_save`` and of its copies; see [Note: adapters]."""
    copies = wrapper._modules.get("modules_to_save")
    if not isinstance(copies, nn.ModuleDict):
        raise ShardError(
            f"cannot split {name}: it is a {class_name(wrapper)} of peft, and its parameters cannot be split with the "
            f"style {style!r}, expected the module itself, LoRA of a linear layer, or one of modules_to_save. Leave "
            "this module out of the adapter, or set tensor_parallel_size=1."
        )
    found: dict[str, str] = {}
    for child in ("original_module", *(f"modules_to_save.{adapter}" for adapter in copies)):
        found |= _styles_of_module(f"{name}.{child}", wrapper.get_submodule(child), plan, style)
    return found


def _styles_of_adapted(name: str, layer: nn.Module, style: str) -> dict[str, str]:
    """Return the styles of the base layer and the LoRA matrices of a layer of peft; see [Note: adapters]."""
    base: Any = layer._modules["base_layer"]
    parts: dict[str, Any] = {kind: layer._modules.get(kind) for kind in ("lora_A", "lora_B")}
    known = {"base_layer", "lora_dropout", *parts}
    others = [
        child for child, inner in layer.named_children() if child not in known and any(True for _ in inner.parameters())
    ]
    others += [own for own, _ in layer.named_parameters(recurse=False)]
    is_linear = isinstance(base, nn.Linear) and all(isinstance(part, nn.ModuleDict) for part in parts.values())
    is_linear &= style in (*_SPLITS_OUTPUTS, *_SPLITS_FULL_INPUTS, *_ON_ANY_MODULE, "rowwise")
    if not is_linear or others:
        what = f"its parameters {', '.join(others)}" if others else f"its base layer, a {class_name(base)},"
        raise ShardError(
            f"cannot split {name}: it is a {class_name(layer)} of peft, and {what} cannot be split with the style "
            f"{style!r}, expected LoRA of a linear layer. Leave this module out of target_modules, use plain LoRA, or "
            "set tensor_parallel_size=1."
        )
    if style in _ON_ANY_MODULE:
        return {name: style}
    found: dict[str, str] = {}

    def add(part: str, module: nn.Module, of_part: str) -> None:
        found.update({f"{part}.{own}": of_part for own, _ in module.named_parameters(recurse=False)})
        found[part] = of_part

    add(f"{name}.base_layer", base, style)
    if (kind := "lora_B" if style in _SPLITS_OUTPUTS else "lora_A" if style == "rowwise" else "") in parts:
        for adapter, matrix in parts[kind].items():
            add(f"{name}.{kind}.{adapter}", matrix, style)
    return found


def _remove_tied(root: nn.Module, plan: TensorPlan) -> None:
    """Remove the styles of modules that share a parameter, unless all of them split it in the same way."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    splits = plan.split_dims(root)
    for shared in names.values():
        if len({splits.get(name) for name in shared}) > 1:
            for name in shared:
                module = name.rpartition(".")[0]
                for each in [n for n in plan.styles if n == module or n.rpartition(".")[0] == module]:
                    del plan.styles[each]
                if module not in plan.not_split:
                    plan.not_split.append(module)


def check_sizes(root: nn.Module, plan: TensorPlan) -> None:
    """Raise if the ranks do not divide the heads of attention, or a dimension that is split; not collective."""
    modules = dict(root.named_modules())
    parameters = dict(root.named_parameters(remove_duplicate=False))
    for name, (dim, is_packed) in plan.split_dims(root).items():
        parent, _, own = name.rpartition(".")
        module, style = modules[parent], plan.styles[name]
        size, parts = parameters[name].shape[dim], 2 if is_packed else 1
        is_vocabulary = isinstance(module, nn.Embedding) or style in ("colwise_gather_output", "colwise_rep")
        without_peft = re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)$", "", parent)
        around = modules[without_peft.rpartition(".")[0]]
        head_dim = getattr(around, "head_dim", None)
        if own == "weight" and style == "colwise" and isinstance(head_dim, int) and size % head_dim == 0:
            heads = size // head_dim
            if heads % plan.size:
                raise ShardError(
                    f"cannot split {parent} over {plan.size} ranks: it has {counted(heads, 'head')} of dimension "
                    f"{head_dim}, expected a number of heads that {plan.size} ranks divide. Use a "
                    "tensor_parallel_size that divides all numbers of query and key/value heads."
                )
        if size % (parts * plan.size) and not is_vocabulary:
            halves = " in two halves" if is_packed else ""
            raise ShardError(
                f"cannot split {name} over {plan.size} ranks: its dimension {dim} has the size {size}, expected a size "
                f"that {plan.size} ranks divide{halves}. Use another tensor_parallel_size."
            )
