"""Find the blocks of a model: its repeated modules, which are sharded one by one.

Input: any model, and class names if the user gives them. Output: blocks by dotted name, from which `plan` makes units.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import ShardError, did_you_mean
from fsdp2_strategy.hf.library_internals import no_split_class_names
from fsdp2_strategy.model.names import clean
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.sharding.known_policies import policy_of

manual_transformer_cls_names_to_wrap = [
    "Embedding",
    "Qwen2VLDecoderLayer",
    "Qwen2VLVisionBlock",
    "Qwen2_5_VLVisionBlock",
    "Qwen2_5_VLDecoderLayer",
    "Qwen2DecoderLayer",
    "LlamaDecoderLayer",
    "DeepseekDecoderLayer",
]
"""Class names of blocks that some models do not list in ``_no_split_modules``. RLHF trainers extend this list in place.

"Embedding" is in it for compatibility and has no effect: embeddings are found by other means.
"""

# Modules that use the parameters of their children, but never call the forward of the children.
_CHILDREN_NOT_CALLED = (nn.MultiheadAttention, nn.RNNBase)
_LARGEST_SIZE_BASED_UNIT = 50_000_000

Classes = Iterable[type[nn.Module] | str] | type[nn.Module] | str | None


def find_blocks(
    model: nn.Module, block_class_names: Sequence[str] = (), *, min_unit_params: int | None = None
) -> dict[str, nn.Module]:
    """Find the repeated modules of a model that should be sharded one by one; not collective.

    The blocks come from the first of these sources that applies. Sources 4 and 5 apply only if they yield a block:
      1. ``block_class_names``, if given
      2. modules with at least ``min_unit_params`` parameters, if given
      3. the classes that a policy lists in ``_fsdp_wrap_modules``
      4. the classes in ``_no_split_modules`` of the model and the models within it, in
         ``manual_transformer_cls_names_to_wrap``, and in the blocks of a registered policy
      5. the entries of the largest ModuleList with repeated layers, and of other ModuleLists with repeated layers that
         hold at least a tenth of the model's parameters
      6. modules that hold at least an eighth of the model's parameters, or at least 50 million parameters; parameters
         of smaller blocks within the module do not count
    Sources 4 and 5 are skipped for a policy that is registered without blocks.

    Args:
        model: any module; it is only read.
        block_class_names: names of module classes.
        min_unit_params: choose as blocks all modules with at least this number of parameters; parameters of smaller
            blocks within a module do not count.

    Returns:
        The blocks by dotted name, in module order.

    Raises:
        ShardError: a name in ``block_class_names`` matches no module, or none of the classes in ``_fsdp_wrap_modules``
            does.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), "out": nn.Linear(4, 2)})
        >>> list(find_blocks(model))
        ['layers.0', 'layers.1', 'layers.2']
    """
    model = unwrap_model(model)
    blocks = choose_blocks(model, block_class_names, min_unit_params)
    log("blocks of %s: %d, %s", type(model).__name__, len(blocks.modules), blocks.source)
    return blocks.modules


def modules_of_class(model: nn.Module, class_names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules whose class has one of ``class_names``, by dotted name; raise if one matches none."""
    found = {clean(n): m for n, m in model.named_modules() if type(m).__name__ in class_names}
    missing = [name for name in class_names if name not in {type(m).__name__ for m in found.values()}]
    if missing:
        types = sorted({type(m).__name__ for m in model.modules()})
        hints = "".join(did_you_mean(name, types) for name in missing)
        raise ShardError(
            f"no unit to shard: class names {missing} match no module of {type(model).__name__}. "
            f"Its module types: {', '.join(types)}.{hints}"
        )
    return found


def class_names_of(model: nn.Module, classes: Classes) -> tuple[str, ...]:
    """Return the class names of the model's modules that are instances of the given classes, sorted; keep given names.

    Trainers pass the same classes for all their models, so a class without an instance in the model is left out if
    another class or a name is given. Otherwise the names of the classes are returned, for an error that lists them.
    """
    names: set[str] = set()
    absent: set[str] = set()
    for given in (classes,) if isinstance(classes, type | str) else classes or ():
        if isinstance(given, str):
            names.add(given)
            continue
        found = {type(m).__name__ for m in model.modules() if isinstance(m, given)}
        names |= found
        absent |= set() if found else {given.__name__}
    if names and absent:
        log("no module of %s is a %s", type(model).__name__, " or a ".join(sorted(absent)))
    return tuple(sorted(names or absent))  # the order of a set differs between processes


class Blocks(NamedTuple):
    """The blocks of a model, and how they were found."""

    kind: str
    """"block", or "size" if they were chosen by their number of parameters."""
    source: str
    """How they were found, as text."""
    modules: dict[str, nn.Module]


def choose_blocks(
    model: nn.Module, block_class_names: Sequence[str], min_unit_params: int | None, ignored: Iterable[nn.Module] = ()
) -> Blocks:
    """Choose blocks as `find_blocks` does; blocks that are chosen by class name may be ``ignored`` modules."""
    excluded = {inner for module in ignored for inner in module.modules()}
    if block_class_names:
        modules = _without_containers(modules_of_class(model, block_class_names))
        return Blocks("block", f"from the class names {', '.join(block_class_names)}", modules)
    if min_unit_params is not None:
        return _of_size(model, min_unit_params, excluded)
    policy = policy_of(model)
    known = policy.blocks if policy else None
    if policy and known and policy.declared:
        present = [name for name in known if any(type(m).__name__ == name for m in model.modules())]
        modules = _without_containers(modules_of_class(model, present or known))
        return Blocks("block", f"from _fsdp_wrap_modules of {policy.name}: {', '.join(present)}", modules)
    if known != ():
        declared = {name for m in model.modules() for name in no_split_class_names(m)}
        listed = declared.union(known or (), manual_transformer_cls_names_to_wrap) - {"Embedding"}
        modules = {clean(n): m for n, m in model.named_modules() if type(m).__name__ in listed and n}
        if policy and known:
            _check_found(model, policy.name, known)
        if modules := _without_thin_wrappers(_without_containers(modules)):
            origin = f"the registered policy {policy.name}" if policy and known else "the model's own list"
            names = ", ".join(sorted({type(m).__name__ for m in modules.values()}))
            return Blocks("block", f"from {origin}: {names}", modules)
        if modules := _largest_module_lists(model, excluded):
            parents = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in modules))
            return Blocks("block", f"the repeated layers of {parents}", modules)
    return _of_size(model, max(1, min(parameter_count(model) // 8, _LARGEST_SIZE_BASED_UNIT)), excluded)


def _check_found(model: nn.Module, policy: str, known: Sequence[str]) -> None:
    """Raise if none of a registered policy's block classes is in the model: all would belong to the root unit."""
    types = sorted({type(m).__name__ for m in model.modules()})
    if not set(known) & set(types):
        hints = "".join(did_you_mean(name, types) for name in known)
        raise ShardError(
            f"cannot shard {type(model).__name__}: it is registered as the policy {policy} with the blocks "
            f"{', '.join(known)}, expected at least one of them among its module types: {', '.join(types)}.{hints} "
            f"Call register_policy({policy!r}, [...]) with the names of its blocks, or pass block_class_names."
        )


def _of_size(model: nn.Module, minimum: int, excluded: Container[nn.Module]) -> Blocks:
    modules: dict[str, nn.Module] = {}
    _pack_by_size("", model, minimum, excluded, modules)
    return Blocks("size", f"modules with at least {minimum:,} parameters", modules)


def _without_thin_wrappers(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop each block whose nested blocks hold at least nine tenths of its parameters: the rest is too small a unit."""
    within: dict[str, set[nn.Parameter]] = {}
    for name, block in blocks.items():
        parts = name.split(".")
        for outer in (".".join(parts[:depth]) for depth in range(len(parts)) if name):
            if outer in blocks:
                within.setdefault(outer, set()).update(block.parameters())
    nested = {name: sum(p.numel() for p in parameters) for name, parameters in within.items()}
    return {name: block for name, block in blocks.items() if nested.get(name, 0) * 10 < parameter_count(block) * 9}


def _without_containers(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Replace each module that cannot be gathered as one unit by its children."""
    found = {}
    for name, module in blocks.items():
        if has_forward(module) or _is_gathered_by_submodules(module):
            found[name] = module
        else:
            found |= _without_containers({f"{name}.{n}": m for n, m in module.named_children()})
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether the class of a module defines a forward."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_gathered_by_submodules(module: nn.Module) -> bool:
    """Return whether hooks on submodules can gather a module without a forward; see [Note: bypassed units]."""
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    return not is_container and not any(True for _ in module.parameters(recurse=False))


def can_be_unit(module: nn.Module) -> bool:
    """Return whether callers run a module by its forward; callers often iterate over a Sequential instead."""
    return has_forward(module) and not isinstance(module, nn.Sequential)


def _largest_module_lists(model: nn.Module, excluded: Container[nn.Module]) -> dict[str, nn.Module]:
    """Return the entries of the largest ModuleList in which a class repeats, and of other large lists."""
    sizes = {
        (name, module): parameter_count(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and module not in excluded
        and max(Counter(type(m) for m in module).values(), default=0) > 1
    }
    blocks: dict[str, nn.Module] = {}
    total = parameter_count(model)
    for (name, module), size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not size or (blocks and size * 10 < total):
            break
        if not any(_is_nested(name, other) or _is_nested(other, name) for other in blocks):
            blocks |= _without_containers({f"{name}.{i}" if name else str(i): m for i, m in enumerate(module)})
    order = [clean(n) for n, _ in model.named_modules()]
    return {name: blocks[name] for name in order if name in blocks and parameter_count(blocks[name])}


def _pack_by_size(
    name: str, module: nn.Module, minimum: int, excluded: Container[nn.Module], blocks: dict[str, nn.Module]
) -> int:
    """Add modules with at least ``minimum`` parameters to ``blocks``; return how many parameters are in none."""
    if module in excluded:
        return 0
    remaining = sum(p.numel() for p in module.parameters(recurse=False))
    if isinstance(module, _CHILDREN_NOT_CALLED):
        remaining = parameter_count(module)
    else:
        for child_name, child in module.named_children():
            remaining += _pack_by_size(f"{name}.{child_name}" if name else child_name, child, minimum, excluded, blocks)
    if name and remaining >= minimum and can_be_unit(module):
        blocks[name] = module
        return 0
    return remaining


def vocabulary_modules(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the embeddings and output heads of a model, each with its kind: "embedding" or "head".

    These are the modules that ``get_input_embeddings`` and ``get_output_embeddings`` return. In addition, they are each
    large ``nn.Embedding``, and each large ``nn.Linear`` with as many outputs as an embedding has entries. A module is
    large if it has at least a quarter of the median number of parameters of a block.

    Heads of a model whose forward was replaced are left out: the new forward may use the weight of the head without
    calling the head, as the fused losses of TRL and Liger do.
    """
    found: dict[nn.Module, str] = {}
    used_directly = set()
    for module in model.modules():
        for method, kind in (("get_input_embeddings", "embedding"), ("get_output_embeddings", "head")):
            vocabulary = _call_or_none(module, method)
            if isinstance(vocabulary, nn.Embedding | nn.Linear):
                found[vocabulary] = kind
                if kind == "head" and _is_forward_replaced(module):
                    used_directly.add(vocabulary)
    sizes = [parameter_count(block) for block in blocks.values()]
    worthwhile = statistics.median(sizes) / 4 if sizes else math.inf
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        is_head = isinstance(module, nn.Linear) and module.out_features in vocabularies
        if (is_head or isinstance(module, nn.Embedding)) and parameter_count(module) >= worthwhile:
            found.setdefault(module, "head" if is_head else "embedding")
    for module in used_directly:
        del found[module]
    # A peft layer may use the weight of its base layer without calling that layer, so the peft layer becomes the unit.
    adapted = {m.base_layer: m for m in model.modules() if isinstance(m._modules.get("base_layer"), nn.Module)}
    return {adapted.get(module, module): kind for module, kind in found.items()}


def _is_forward_replaced(module: nn.Module) -> bool:
    """Return whether the forward of a module, or of its class, is a function from another module of Python."""
    defined_in = {cls.__module__ for cls in type(module).__mro__}
    return "forward" in vars(module) or getattr(type(module).forward, "__module__", None) not in defined_in


def _call_or_none(module: nn.Module, method: str) -> object:
    try:
        return getattr(module, method)()
    except (AttributeError, NotImplementedError, TypeError):
        return None  # not every model has a vocabulary


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters of a module; shared parameters are counted once."""
    return sum(p.numel() for p in module.parameters())


def _is_nested(inner: str, outer: str) -> bool:
    return not outer or inner == outer or inner.startswith(outer + ".")
