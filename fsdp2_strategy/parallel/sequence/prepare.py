"""Prepare a sharded model for split sequences.

Input: a model, and the ranks that share sequences. Output: the same model with the hooks of `split`, and a record of
what it can split.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import SequenceError
from fsdp2_strategy.hf.library_internals import lists_blocks
from fsdp2_strategy.hf.packed_rows import ARGUMENT
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.ranks import sequence_group_of, set_sequence_group
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.parallel.sequence.split import KINDS, SplitPlan, split_sequences
from fsdp2_strategy.parallel.sequence.split_plan import plan_split


def prepare_for_split(model: nn.Module, group: dist.ProcessGroup, *, is_training: bool) -> None:
    """Make a model compute its part of sequences, if its forward gets one; collective.

    If plain sequences cannot be split, a trained model is refused; others compute full ones, and refuse parts.
    """
    root = unwrap_model(model)
    if sequence_group_of(root) is not None:
        return
    inner = next((module for module in root.modules() if lists_blocks(module) and hasattr(module, "config")), None)
    with all_or_none(f"split the sequences of {class_name(root)}", SequenceError):
        plan = SplitPlan(refused=(("plain", "is not a model of transformers"),))
        if inner is not None:
            plan = plan_split(inner, dist.get_world_size(group))
        refused = dict(plan.refused)
        if is_training and "plain" in refused:
            raise _refusal(root, refused["plain"])
    facts = {field: sorted(value) if isinstance(value, frozenset) else value for field, value in vars(plan).items()}
    facts["refused"] = sorted(refused)  # the reasons may contain rounding
    expected = "the same result on a tiny model everywhere. Use equal versions of the libraries on all ranks."
    check_equal(f"split the sequences of {class_name(root)}", facts, SequenceError, expected)
    if inner is None or "plain" in refused:
        root.register_forward_pre_hook(partial(_refuse_parts, refused["plain"]), with_kwargs=True)
        log("%s computes full sequences only: it %s", class_name(root), refused["plain"])
        return
    split_sequences(inner, plan)
    set_sequence_group(root, group)
    full = ", ".join(sorted({name for _, name in plan.full} | plan.outside)) or "none"
    count = dist.get_world_size(group)
    log("%s splits sequences over %d ranks; modules that compute full ones: %s", class_name(root), count, full)
    for kind, reason in plan.refused:
        log("%s: warning: it cannot split %s: it %s", class_name(root), KINDS[kind], reason)


def _refuse_parts(reason: str, root: nn.Module, _args: object, kwargs: Mapping[str, Any]) -> None:
    if ARGUMENT in kwargs:
        raise _refusal(root, reason)


def _refusal(root: nn.Module, reason: str) -> SequenceError:
    return SequenceError(
        f"cannot split sequences: {class_name(root)} {reason}, expected a model of transformers that computes split "
        "sequences with the values of full ones. Set sequence_parallel_size=1."
    )
