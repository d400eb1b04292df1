"""Share samples between the ranks of a sequence-parallel group, and split their sequences in LightRFT's forwards.

Input: the samples that each rank generated; an actor or critic whose forward takes ``num_actions``. Output: the samples
of all ranks that share sequences; the same model, which takes full sequences and returns full results, and of which
each rank computes a part.

LightRFT passes ``num_actions`` with samples, which are equal on these ranks after `SequenceParallelData.preprocess`.
Without ``num_actions``, as for the PTX loss, each rank computes full sequences of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.errors import SequenceError, counted
from fsdp2_strategy.hf.packed_rows import ARGUMENT
from fsdp2_strategy.hf.transformers_models import inner_model
from fsdp2_strategy.integrations.lightrft.generation import gather_lists
from fsdp2_strategy.parallel.sequence.exchange import gather_results
from fsdp2_strategy.parallel.sequence.shard import SequenceShard

T = TypeVar("T")

_ACTIONS = "num_actions"
_OF_TOKENS = ("logits", "last_hidden_state", "hidden_states", "attentions")
"""Outputs of a model that have a dimension of tokens."""


class SequenceParallelData:
    """Distribute samples over the ranks that share sequences (``sp_group``, in their order); None: keep them.

    ``is_used`` says whether `preprocess` was called.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.sp_group = group
        self.sp_size, self.sp_rank = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.is_used = False

    def preprocess(self, data: list[T]) -> list[T]:
        """Return the samples of all ranks that share sequences, in rank order; collective over these ranks."""
        self.is_used = True
        return [sample for own in gather_lists(data, self.sp_group) for sample in own] if self.sp_group else data

    def postprocess(self, data: list[T]) -> list[T]:
        """Return the equal part of the samples that this rank keeps; collective if ranks share sequences."""
        if self.sp_size == 1:
            return data
        with all_or_none("divide samples between ranks that share sequences", SequenceError):
            if len(data) % self.sp_size:
                raise SequenceError(
                    f"cannot divide {counted(len(data), 'sample')} between {self.sp_size} ranks that share sequences, "
                    "expected a multiple. Generate the same number of samples on each rank."
                )
        count = len(data) // self.sp_size
        return data[self.sp_rank * count :][:count]


def takes_actions(model: nn.Module) -> bool:
    """Return whether a model is called with ``num_actions``, as LightRFT's actors and critics are."""
    return _ACTIONS in inspect.signature(model.forward).parameters


def split_within_forward(wrapper: nn.Module, shard_sequence: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Register hooks that split sequences before the inner model's forward, and gather its outputs after it.

    The ranks that share sequences then compute the same loss. Its gradients are right, because the gather sums them
    over these ranks, and the reduction of gradients divides by their number.
    """
    model = inner_model(wrapper)
    names_of_wrapper = tuple(inspect.signature(wrapper.forward).parameters)
    names = tuple(inspect.signature(model.forward).parameters)
    has_actions: list[bool] = []
    """For each call of the wrapper that is running."""
    lengths: list[int | None] = []
    """For each call of the model that is running: the tokens of its sequences; None if they are not split."""

    def begin(_wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_actions.append(_named(names_of_wrapper, args, kwargs).get(_ACTIONS) is not None)

    def end(*_: object) -> None:
        del has_actions[-1:]  # it is empty if a hook ahead of `begin` raised

    def split(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lengths.append(None)
        if not has_actions or not has_actions[-1]:
            return None
        batch = _named(names, args, kwargs)
        lengths[-1] = batch["input_ids"].shape[1]
        return (), shard_sequence(batch)

    def gather(_model: nn.Module, _args: object, kwargs: dict[str, Any], output: Any) -> Any:
        length = lengths.pop() if lengths else None
        return None if length is None or output is None else _full_output(output, kwargs[ARGUMENT], length)

    wrapper.register_forward_pre_hook(begin, with_kwargs=True)
    wrapper.register_forward_hook(end, always_call=True)
    model.register_forward_pre_hook(split, with_kwargs=True, prepend=True)  # the other hooks see the parts
    model.register_forward_hook(gather, with_kwargs=True, always_call=True)


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _full_output(output: Any, shard: SequenceShard, length: int) -> Any:
    """Return a model's output for full sequences: the last hidden states if these were requested, else the logits.

    A critic requests hidden states and uses the last ones only; logits of full sequences would be much larger.
    """
    full = {name: value for name, value in output.items() if name not in _OF_TOKENS}
    if "hidden_states" in output:
        full["hidden_states"] = (gather_results(output.hidden_states[-1], shard.ranks)[:, :length],)
    else:
        of_parts = {name: output[name] for name in ("logits", "last_hidden_state") if name in output}
        full |= {name: gather_results(part, shard.ranks)[:, :length] for name, part in of_parts.items()}
    return type(output)(**full)
