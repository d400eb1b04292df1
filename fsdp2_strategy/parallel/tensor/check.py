"""Check a tensor plan on a tiny model of the same configuration: its outputs and gradients must not depend on it.

Input: a model, its `TensorPlan`, and the ranks that share each layer. Output: the plan, or a corrected one that works;
or an error that says what differs.

[Note: corrected plans] Some plans of transformers do not work as they are. Four corrections are tried:
  1. A plan may lack a module that has a full parameter and sees only a part of the activations, such as the norm of
     queries, or a learned activation. The gradient of its parameter is then a part of the sum over the ranks. If this
     sum is the gradient of the model without the plan, the module gets the style that sums it.
  2. A model may change the output of a layer in place, which autograd allows only for a copy.
  3. A model may use the weight of its embedding directly. The embedding is then not split.
  4. A part of a block may need all of its activations, such as an MLP that keeps the largest ones. Only the parts with
     which the tiny model has the expected values are split.
Modules that the tiny model does not run for token ids, such as a vision encoder, cannot be checked. They are not split,
unless the user's plan names them.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.torch_internals import local_of
from fsdp2_strategy.errors import ShardError, some
from fsdp2_strategy.hf.library_internals import attention_implementation
from fsdp2_strategy.model.fsdp_state import class_name, original_class
from fsdp2_strategy.model.names import generic_name
from fsdp2_strategy.parallel.tensor.plan import TensorPlan, check_sizes, transformers_models
from fsdp2_strategy.parallel.tensor.split import SUMS_GRADIENTS, split_layers
from fsdp2_strategy.parallel.tiny_config import tiny_config
from fsdp2_strategy.parallel.tiny_model import SEED, build_tiny, use_attention_of_cpu

_LENGTH = 24
_TOLERANCE = 1e-4
"""Largest relative difference of outputs and gradients; models compute parts of them in float32."""
_SMALLEST = 1e-3
"""Gradients are compared relative to their largest element, but at least to this part of the largest of all."""
_NOISE = 0.05
"""Standard deviation of what is added to weights, so that no gradient is zero because of the initialisation."""

Values = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The output of a model, and its gradients by name."""


def check_tensor_plan(root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> TensorPlan:
    """Run tiny models with and without the plan, and return the plan, completed; collective over the axis "tp".

    A model that differs is refused, and so is one that cannot be run, unless the plan is the user's: then it is not
    checked.
    """
    models = transformers_models(root)
    inside = {id(module) for model in models.values() for module in model.modules()}
    if outside := [n for n, module in root.named_modules() if n in plan.styles and id(module) not in inside]:
        message = (
            "%s: the tensor-parallel plan of %s is not checked, because they belong to no model of transformers. "
            "Compare a step with the unsharded model"
        )
        log(message, class_name(root), some(outside, "module"), level=logging.WARNING)
    for prefix, model in models.items():
        if not (own := plan.within(prefix)):
            continue
        name = class_name(model)
        try:
            tiny, expected = _tiny_values(model, mesh)
            check_sizes(tiny, TensorPlan.of(tiny, plan.size, own))  # otherwise, only some ranks could raise an error
        except Exception as error:  # models run arbitrary code
            if plan.is_given:
                log("%s: the tensor-parallel plan is not checked: a tiny model failed: %s", name, _text(error))
                continue
            raise ShardError(
                f"cannot split the layers of {name}: its plan cannot be checked, because a tiny model of its "
                f"configuration failed: {_text(error)} Expected outputs for token ids. Pass tensor_parallel_plan, "
                "which is used without a check in this case, or set tensor_parallel_size=1."
            ) from error
        if unchecked := _without_gradients(tiny, expected, own):
            log("%s: %s of the tensor-parallel plan cannot be checked", name, some(unchecked))
        if not plan.is_given:
            own = {key: style for key, style in own.items() if key not in unchecked}
        checked, copies_outputs = _first_that_works(tiny, expected, own, plan, mesh)
        if checked != (own := plan.within(prefix)) or copies_outputs:
            changes = [f"{key}: {checked.get(key)}" for key in own | checked if checked.get(key) != own.get(key)]
            changes += ["outputs are copied"] if copies_outputs else []
            log("%s: its tensor-parallel plan is changed: %s", name, ", ".join(changes))
            plan = plan.changed(root, prefix, checked, copies_outputs=copies_outputs)
    return plan


def _without_gradients(tiny: nn.Module, expected: Values, own: dict[str, str]) -> list[str]:
    """Return the keys of a plan that match modules or parameters of a tiny model, but none that has a gradient."""
    first = {id(p): name in expected[1] for name, p in tiny.named_parameters()}
    has_gradient: dict[str, bool] = {}
    for full, parameter in tiny.named_parameters(remove_duplicate=False):
        parts = generic_name(full).split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            has_gradient[name] = has_gradient.get(name, False) or first[id(parameter)]
    return [key for key in own if has_gradient.get(key) is False]


def _first_that_works(
    tiny: Any, expected: Values, own: dict[str, str], plan: TensorPlan, mesh: DeviceMesh
) -> tuple[dict[str, str], bool]:
    """Return the first plan with which a tiny model has the expected values, and whether outputs are copied."""
    without_embeddings = {key: style for key, style in own.items() if not style.startswith("embedding")}
    variants = [(own, False), (own, True)]
    if not plan.is_given and without_embeddings != own:  # some models use the weight of the embedding directly
        variants.append((without_embeddings, False))
    first_error: ShardError | None = None
    for variant, copies_outputs in variants:
        try:
            return _completed(tiny, expected, variant, mesh, copies_outputs=copies_outputs), copies_outputs
        except ShardError as error:
            first_error = first_error or error
    assert first_error is not None
    if not plan.is_given and (parts := _parts_that_work(tiny, expected, own, mesh)):
        return parts, False
    raise first_error


def _parts_that_work(tiny: Any, expected: Values, own: dict[str, str], mesh: DeviceMesh) -> dict[str, str]:
    """Return the parts of a plan, one for each child of a block, that work alone and together; collective."""
    parts: dict[str, dict[str, str]] = {}
    for key, style in own.items():
        before, star, after = key.partition("*.")
        parts.setdefault(before + star + after.split(".")[0], {})[key] = style
    working: dict[str, str] = {}
    for part in parts.values():
        try:
            working = _completed(tiny, expected, working | part, mesh, copies_outputs=False)
        except ShardError as error:
            log("%s: not split: %s: %s", class_name(tiny), ", ".join(part), error)
    return working


def _completed(
    tiny: Any, expected: Values, given: dict[str, str], mesh: DeviceMesh, *, copies_outputs: bool
) -> dict[str, str]:
    """Return a plan, with the modules added whose gradients must be summed over the ranks; collective."""
    added = _partial_gradients(tiny, expected, given, mesh, copies_outputs=copies_outputs)
    if added:
        given = given | dict.fromkeys(added, SUMS_GRADIENTS)
        if others := _partial_gradients(tiny, expected, given, mesh, copies_outputs=copies_outputs):
            raise _difference(tiny, mesh.size(), f"other gradients of {some(others, 'module')}")
    return given


def _partial_gradients(
    tiny: Any, expected: Values, given: dict[str, str], mesh: DeviceMesh, *, copies_outputs: bool
) -> list[str]:
    """Return the modules whose gradients are parts of a sum over ranks; raise for other differences; collective."""
    split, size = copy.deepcopy(tiny), mesh.size()
    styles = TensorPlan.of(split, size, given, copies_outputs=copies_outputs)
    try:
        split_layers(split, styles, mesh)
        found = _run(split)
    except Exception as error:  # models run arbitrary code
        raise _difference(tiny, size, f"an error: {_text(error)}") from error
    splits = styles.split_dims(split)
    floor = _SMALLEST * max((float(g.abs().max()) for g in expected[1].values()), default=0.0)
    wrong, sums = [], {}
    for key, full in expected[1].items():
        is_split = key in splits
        part = _part_of(full, *splits[key], mesh.get_local_rank(), size) if is_split else full
        own = found[1].get(key, torch.zeros_like(part))
        wrong.append(_differs(own, part, floor))
        if not is_split:
            sums[key] = own.clone()
    flags = torch.tensor([_differs(found[0], expected[0], 0.0), *wrong], dtype=torch.float32, device=mesh.device_type)
    for tensor in (flags, *sums.values()):
        dist.all_reduce(tensor, group=mesh.get_group())
    has_other_outputs, *has_others = (flags > 0).tolist()
    if has_other_outputs:
        raise _difference(tiny, size, "other outputs")
    differing = [key for key, differs in zip(expected[1], has_others, strict=True) if differs]
    partial = [key for key in differing if key in sums and not _differs(sums[key], expected[1][key], floor)]
    if others := [key for key in differing if key not in partial]:
        raise _difference(tiny, size, f"other gradients of {some(others, 'parameter')}")
    return sorted({generic_name(key.rpartition(".")[0]) for key in partial})


def _difference(tiny: nn.Module, size: int, what: str) -> ShardError:
    return ShardError(
        f"cannot split the layers of {class_name(tiny)} over {size} ranks: with its plan, a tiny model of its "
        f"configuration has {what.rstrip('.')}, expected the same outputs and gradients as without the plan. Pass "
        "another tensor_parallel_plan, or set tensor_parallel_size=1."
    )


def _tiny_values(model: Any, mesh: DeviceMesh) -> tuple[Any, Values]:
    """Return a tiny model and its values without a plan; in float32 if it does not run in float64."""
    tiny = _tiny_model(model).to(mesh.device_type)
    try:
        return tiny, _run(tiny)
    except Exception:  # noqa: BLE001  models run arbitrary code
        return tiny.float(), _run(tiny.float())


def _tiny_model(model: Any) -> Any:
    """Build a model of the same class with a tiny configuration, with the same weights on all ranks."""
    cls, config = original_class(model), tiny_config(model.config)
    config.use_cache = False
    for level in (config, config.get_text_config()):
        if getattr(level, "pad_token_id", None) is None:  # classifiers need one for several sequences
            level.pad_token_id = 0
    use_attention_of_cpu(config, cls, attention_implementation(model.config.get_text_config()))
    return build_tiny(cls, config, torch.float64, noise=_NOISE).requires_grad_(True)


def _batch_of(tiny: Any) -> dict[str, Any]:
    """Return a batch in which each token of the vocabulary occurs, as far as the number of tokens allows it."""
    config = tiny.config.get_text_config()
    count = config.vocab_size // 2
    ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(SEED))[: 2 * count]
    ids = ids.view(2, count)[:, : 2 * _LENGTH]
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(0)} if tiny.config.is_encoder_decoder else {})


def _run(model: Any) -> Values:
    """Return the output of a model, and the gradients of a sum of its elements with fixed random weights."""
    with torch.enable_grad():
        batch = {name: ids.to(next(model.parameters()).device) for name, ids in _batch_of(model).items()}
        output = model(**batch)
        values = next(v for v in _candidates(output) if isinstance(v, torch.Tensor) and v.is_floating_point())
        weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        (values.double() * weights.to(values.device)).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: _local(p) for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return values.detach(), gradients


def _candidates(output: Any) -> list[Any]:
    named = [getattr(output, name, None) for name in ("logits", "last_hidden_state")]
    return [*named, *(output.values() if hasattr(output, "values") else ())]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local part of a gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return local_of(gradient)
    return gradient


def _part_of(full: torch.Tensor, dim: int, is_packed: bool, rank: int, count: int) -> torch.Tensor:
    """Return the part of a full tensor that a rank has."""
    halves = full.chunk(2, dim) if is_packed else (full,)
    parts = [half.chunk(count, dim) for half in halves]
    return torch.cat([of_half[rank] if rank < len(of_half) else of_half[0][:0] for of_half in parts], dim)


def _differs(found: torch.Tensor, expected: torch.Tensor, floor: float) -> bool:
    """Return whether an element differs by more than the tolerance, relative to the largest one; NaN differs."""
    if found.shape != expected.shape or not expected.numel():
        return found.shape != expected.shape
    scale = max(float(expected.abs().max()), floor)
    return not float((found.double() - expected.double()).abs().max()) <= _TOLERANCE * scale


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") + "." if lines else "no message."
    return text if isinstance(error, ShardError) else f"{type(error).__name__}: {text}"
