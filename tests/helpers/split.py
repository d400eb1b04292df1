"""Compare models whose sequences are split over several ranks with the unsharded model, in float64.

Ranks are threads of this process, or the ranks of a test. The loss is a cross-entropy outside of the model, because the
losses of transformers compute it in float32. `InFloat64` keeps the model itself from doing so.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from fsdp2_strategy.parallel.sequence.ranks import SequenceRanks, run_in_threads
from fsdp2_strategy.parallel.sequence.shard import ARGUMENT, shard_sequence
from fsdp2_strategy.parallel.sequence.split import SplitPlan, split_sequences
from fsdp2_strategy.parallel.tiny_config import tiny_config
from helpers.architectures import default_config
from helpers.models import on_device

LENGTH = 23
"""More than three windows of a tiny configuration; neither 2 nor 4 ranks divide it."""

IN_FLOAT32 = ("xglm",)
"""Model types that transformers cannot run in float64."""

NOT_TRAINED = ("reformer",)
"""Model types whose gradients need sequences of an exact length."""

WITHOUT_LOSS = ("git",)
"""Model types whose own loss needs images."""

Batch = dict[str, torch.Tensor]


@dataclass
class Result:
    """What a model computes for a batch."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def tiny_model(name: str, **changed: Any) -> Any:
    """Build a tiny causal model of a model type, with random weights that make each token depend on earlier ones.

    ``changed`` are attributes of the configuration.
    """
    config = tiny_config(default_config(name))
    for attribute, value in changed.items():
        setattr(config, attribute, value)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.config.get_text_config()._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return on_device(model if name in IN_FLOAT32 else model.double())


class InFloat64(TorchFunctionMode):
    """Make casts to float32 and new float32 tensors float64, in models that compute some values in float32."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return torch.Tensor.double(*args, **kwargs)
        return func(*(_wider(value) for value in args), **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def batches(model: Any) -> dict[str, Batch]:
    """Return plain, padded and packed sequences; padding is left in the first sequence and right in the second."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, min(config.vocab_size, 64), (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, -7:] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    packed = torch.cat([torch.arange(n) for n in (7, 2, 11, 3)]).expand(2, -1)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    found = {
        "plain": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        "packed": {
            "input_ids": ids,
            "position_ids": packed.expand(4, 2, -1) if "mrope_section" in str(rope) else packed,
        },
    }
    return on_device(found)


def targets_of(batch: Batch) -> torch.Tensor:
    """Return the next token of each token; -100 for padding, for the last token and for some others."""
    labels = batch["input_ids"].where(batch["input_ids"] % 7 != 0, -100)
    if "attention_mask" in batch:
        labels = labels.where(batch["attention_mask"].bool(), -100)
    targets = pad(labels, (0, 1), value=-100)[:, 1:]
    return targets.where(batch["attention_mask"].bool(), -100) if "attention_mask" in batch else targets


def of_full(model: Any, batch: Batch, *, is_trained: bool = True) -> Result:
    """Return what the unsharded model computes."""
    return _run(copy.deepcopy(model), batch, targets_of(batch), is_trained=is_trained)


def of_part(model: Any, batch: Batch, ranks: Any, *, is_trained: bool = True) -> Result:
    """Return what a model computes for this rank's part, with the part's gradients of all parameters."""
    arguments = shard_sequence(batch, ranks)
    shard = arguments[ARGUMENT]
    targets = targets_of(batch)
    targets = shard.local(pad(targets, (0, shard.length - targets.shape[1]), value=-100))
    return _run(model, arguments, targets, is_trained=is_trained)


def of_threads(model: Any, plan: SplitPlan, count: int, batch: Batch, *, is_trained: bool = True) -> Result:
    """Return the logits of all parts, and the sums of their gradients, computed by threads."""
    models = [copy.deepcopy(model) for _ in range(count)]
    for own in models:
        split_sequences(own, plan)
    parts = run_in_threads(count, lambda ranks: of_part(models[ranks.rank], batch, ranks, is_trained=is_trained))
    gradients: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, gradient in part.gradients.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Result(torch.cat([part.logits for part in parts], dim=1), gradients)


def of_group(model: Any, plan: SplitPlan, batch: Batch) -> Result:
    """Return the logits of all parts, and the sums of their gradients, computed by the ranks of the test."""
    model = copy.deepcopy(model)
    split_sequences(model, plan)
    part = of_part(model, batch, dist.group.WORLD)
    logits = [torch.empty_like(part.logits) for _ in range(dist.get_world_size())]
    dist.all_gather(logits, part.logits.contiguous())
    for name, parameter in model.named_parameters():
        dist.all_reduce(part.gradients.setdefault(name, torch.zeros_like(parameter)))
    return Result(torch.cat(logits, dim=1), part.gradients)


def _run(model: Any, arguments: dict[str, Any], targets: torch.Tensor, *, is_trained: bool) -> Result:
    is_double = next(model.parameters()).dtype == torch.float64
    with torch.set_grad_enabled(is_trained), InFloat64() if is_double else nullcontext():
        logits = model(**arguments | {"use_cache": False}).logits
    if is_trained:
        cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(logits.detach(), gradients)


def losses(model: Any, plan: SplitPlan, count: int, batch: Batch) -> tuple[float, float]:
    """Return the mean over threads of the loss that the model itself computes, and the unsharded model's loss."""
    batch = batch | {"labels": batch["input_ids"].where(batch["input_ids"] % 7 != 0, -100)}
    models = [copy.deepcopy(model) for _ in range(count)]
    for own in models:
        split_sequences(own, plan)

    def work(ranks: SequenceRanks) -> float:
        with torch.no_grad():
            return models[ranks.rank](**shard_sequence(batch, ranks)).loss.item()

    with torch.no_grad():
        expected = model(**batch, use_cache=False).loss.item()
    return sum(run_in_threads(count, work)) / count, expected


def assert_equal(found: Result, expected: Result, batch: Batch, tolerance: float) -> None:
    """Compare logits of tokens, each gradient and the norm of all gradients, by relative differences."""
    is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    logits, full = found.logits[:, : is_token.shape[1]][is_token], expected.logits[is_token]
    assert (logits - full).abs().max() <= tolerance * full.abs().max(), "logits"
    largest = max((gradient.abs().max().item() for gradient in expected.gradients.values()), default=0.0)
    for name in found.gradients.keys() | expected.gradients.keys():
        own, other = found.gradients.get(name), expected.gradients.get(name)
        own = torch.zeros_like(other) if own is None else own
        other = torch.zeros_like(own) if other is None else other
        # Some gradients are zero except for rounding, such as those of biases that softmax cancels.
        bound = tolerance * max(other.abs().max().item(), 1e-4 * largest)
        assert (own - other).abs().max() <= bound, f"gradient of {name}"
    norms = [sum(g.square().sum().item() for g in each.gradients.values()) ** 0.5 for each in (found, expected)]
    assert abs(norms[0] - norms[1]) <= tolerance * norms[1], "norm"
