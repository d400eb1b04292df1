"""Run transformers' ``Trainer``, and any subclass of it, on `FSDPV2Strategy`.

Input: a trainer class and its arguments. Output: the same trainer, whose model is sharded by this package, and whose
checkpoints are this package's, in directories with the Trainer's names. `FSDP2Trainer` overrides these methods:

    create_accelerator_and_postprocess    an accelerator that shards models and steps optimizers with a strategy
    create_optimizer                      the Trainer's own optimizer, over the sharded parameters
    get_batch_samples                     tells the strategy the number of micro-batches of the step
    _save_checkpoint, save_model          `FSDPV2Strategy.save_ckpt` in the layout `TrainerLayout`; `save_model`
    _load_optimizer_and_scheduler, ...    `FSDPV2Strategy.load_ckpt`

The engine of TRL's trainers (``vllm_generation``) gets the weights from `stream_weights`.

`with_fsdp2` inserts them between a trainer class and ``Trainer``, so that what the class itself overrides still runs.
tests/test_compat_transformers.py checks the names against the installed version.
"""

from __future__ import annotations

from fsdp2_strategy.extras import check_installed

check_installed("accelerate", "run a Trainer")

from fsdp2_strategy.integrations.trl.layout import TrainerLayout
from fsdp2_strategy.integrations.trl.trainer import FSDP2Trainer, with_fsdp2

__all__ = ["FSDP2Trainer", "TrainerLayout", "with_fsdp2"]
