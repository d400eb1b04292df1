"""Describe the settings of a VLA training run for the log.

Input: a strategy whose `run_setup` has built the optimizer and schedule. Output: text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fsdp2_strategy.optim.schedule import BACKBONE_FREEZE

if TYPE_CHECKING:
    from fsdp2_strategy.integrations.vitra.strategy import VLAFSDPStrategy


def summary(s: VLAFSDPStrategy, n_train_examples: int) -> str:
    """Describe batches, precision, schedule, learning rates and steps, one fact per line."""
    config = s.config
    computed = torch.bfloat16 if config.bf16 else torch.float32
    batch = f"{s.per_device_batch_size} per rank x {s.world_size} ranks x {s.grad_accumulation_steps} micro-batches"
    decay = f"backbone {s.weight_decay}, action model {s.action_model_weight_decay}"
    if s.as_flattened:
        decayed = "only the cognition token" if s.cognition_token_weight_decay else "no parameter"
        decay = f"{decay}, applied to {decayed} (as_flattened)"
    named = config.activation_checkpointing
    recomputed = ("each block" if named else "none") if isinstance(named, bool) else ", ".join(named) or "none"
    facts = {
        "stage": s.stage,
        "batch": f"{s.global_batch_size} = {batch}",
        "sharding": s.sharding_strategy,
        "precision": f"parameters {computed}, reduction {s.buffer_dtype}",
        "buffers": _buffers(s),
        "activation checkpointing": recomputed,
        "schedule": f"{s.lr_scheduler_type}, {_warm_up(s)}",
        "learning rates": f"backbone {s.learning_rate}, action model {s.action_model_learning_rate}",
        "weight decay": decay,
        "betas": s.optimizer_betas,
        "gradient norm": f"clipped to {s.max_grad_norm}" if s.max_grad_norm else "not clipped",
        "data": f"{n_train_examples} examples",
        "steps": s.num_training_steps,
    }
    return "set up:\n" + "\n".join(f"  {name:<24} {fact}" for name, fact in facts.items())


def _buffers(s: VLAFSDPStrategy) -> str:
    if not s.cast_buffers:
        return "dtypes unchanged"
    return f"{s.buffer_dtype}" if s.cast_buffers == "all" else f"{s.buffer_dtype}, statistics of data unchanged"


def _warm_up(s: VLAFSDPStrategy) -> str:
    if s.lr_scheduler_type == BACKBONE_FREEZE:
        return f"backbone's learning rate 0 for {s.llm_freeze_step} steps"
    unused = f"; llm_freeze_step {s.llm_freeze_step} has no effect on this schedule" if s.llm_freeze_step else ""
    if s.warmup_ratio is None:
        return f"no warm-up{unused}"
    return f"warm-up {int(s.num_training_steps * s.warmup_ratio)} steps ({s.warmup_ratio}){unused}"
