"""The table of mistakes that new users make: each function makes one, end to end; docs/troubleshooting.md is the table.

Input: an empty folder that all ranks share. Output: the error that the user gets, or the warning in the log.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp2_strategy import (
    EMA,
    FSDPV2Strategy,
    ResumableLoader,
    StrategyConfig,
    build_optimizer,
    linear_log_probs,
    save_model,
)
from fsdp2_strategy.checkpoint.listing import digest_of_manifest
from fsdp2_strategy.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DamageError,
    LogProbError,
    MeshError,
    OffloadError,
    OptimizerError,
    RolloutError,
    SequenceError,
    ShardError,
    StepError,
)
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.integrations.lightrft import get_strategy
from fsdp2_strategy.rollout import listen_at_free_port, stream_weights
from fsdp2_strategy.storage.staged_folder import StagedFolder
from fsdp2_strategy.tracking import Metrics
from helpers.folders import small_tokenizer
from helpers.models import batch_of, build, loss_of
from helpers.training import prepared, strategy_for, train


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake, what the user reads, and what the page says about it."""

    section: str
    message: str
    """A part of the message, as the user reads it."""
    fix: str
    """What the page says about the message; empty: the message says it itself, and the page omits it."""
    quote: str
    """The part of `message` that the page quotes."""
    make: Callable[[Path], object]
    error: type[Exception] | None
    """None: a warning is logged on rank 0."""
    loses_a_rank: bool
    """Whether only rank 0 hears of it, when a peer has ended or a time-out of 5 s is over. The message is then a note
    to torch's error."""


MISTAKES: dict[str, Mistake] = {}
_section = [""]


def mistake(message: str, error: type[Exception] | None, fix: str, *, quote: str = "", loses_a_rank: bool = False):
    assert quote in message, quote

    def register(make):
        assert make.__name__ not in MISTAKES, make.__name__
        MISTAKES[make.__name__] = Mistake(
            section=_section[0],
            message=message,
            fix=fix,
            quote=quote or message,
            make=make,
            error=error,
            loses_a_rank=loses_a_rank,
        )
        return make

    return register


SYMPTOMS = """\
## Symptoms

| Symptom | Cause, and what to do |
|---|---|
| The run hangs. | Ranks wait in different calls, until `timeout_minutes` (30) have passed. Look for `if rank == 0` \
before a [collective call](collectives.md). If ranks run different units, an error names them within 10 seconds. \
Otherwise, each rank that has waited for a minute (`wait_warning_seconds`) logs the call, the line of the program, \
what the other ranks last reported, and the file of torch's flight recorder. A rank whose report is old is stopped. |
| torchrun ends with ChildFailedError. | The cause is in the first traceback above. `exitcode: -9`: a rank was killed, \
often because the host's memory was full. |
| The memory is full (CUDA out of memory). | `explain` prints the memory of each rank; [memory](memory.md) says which \
settings change it. `memory_snapshot: true` shows what fills it: [profile](metrics.md#profile). |
| The loss is different on another number of ranks. | Parts have different sizes, which the loader warns of: use a \
batch size that the ranks divide, or [`num_items`](data.md#another-number-of-ranks-another-batch-size). Or \
dropout, whose random numbers depend on the rank. Sums in another order change the last digits. |
| An error says "rank 1 did not make this call", and no condition is wrong. | Rank 1 was killed: see the exit code \
that torchrun prints. |
""".splitlines()
"""What is seen without a message of this package, by the words that users search for."""

EVERYDAY = """\
## Calls of Hugging Face

| Call | On a model that `prepare_model` got |
|---|---|
| `from_pretrained` | Call it before, in `with strategy.init_model_context(meta_init=True):`: each rank reads a part. |
| `generate` | Works, also with prompts of other lengths on each rank. |
| `gradient_checkpointing_enable()` | Works; `activation_checkpointing` of the configuration is for any model. |
| `tie_weights()`, `num_parameters()`, `get_memory_footprint()` | Work, and count full parameters. |
| `requires_grad_(False)` of some parameters | Works, but memory is saved only if it comes before `prepare_model`. |
| `model.to(device)`, `model.cuda()` | Not needed: the model is on its device. |
| `model.to(dtype)`, `model.half()` | Remove it: the next step raises an error. `bf16` or `fp16` is the compute dtype. |
| `state_dict()` | Returns this rank's shards, as DTensors; saving them with `torch.save` is an error. |
| `load_state_dict(full)` | Works with full tensors, if every rank has them. |
| `save_pretrained`, `push_to_hub`, `torch.save(model)` | An error that names `save_model` and `save_ckpt`. |
| `resize_token_embeddings`, `add_adapter`, `get_peft_model` | An error: call them before. |
| `Trainer.save_model`, `Trainer.train` | With `with_fsdp2(Trainer)`, as usual: [Trainer and TRL](coming_from_trl.md). |
""".splitlines()
"""What usual calls do; `test_everyday_calls` makes those that work, and mistakes of the table make the others."""


def page(mistakes: Iterable[Mistake] = MISTAKES.values()) -> str:
    """Return docs/troubleshooting.md."""
    lines = [
        "# Troubleshooting",
        "",
        "Messages of mistakes that are easily made, and what to do. Search for a part of your message; names and",
        "numbers in it may differ. Messages that say what to do, such as those with 'Did you mean', are not listed.",
        "All are tested on two ranks: every rank raises the error, before anything is lost. If ranks wait in different",
        "collectives, they hear of it when one of them ends, or at the time-out.",
        "",
        *SYMPTOMS,
        "",
        *EVERYDAY,
    ]
    section = ""
    for each in mistakes:
        if not each.fix:
            continue
        if each.section != section:
            section = each.section
            lines += ["", f"## {section}", "", "| Message | What to do |", "|---|---|"]
        kind = "warning" if each.error is None else each.error.__name__
        lines.append(f"| {kind}: {each.quote} | {each.fix} |")
    return "\n".join(lines) + "\n"


def on_rank_0(change: Callable[[], object]) -> None:
    """Change files on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        change()
    dist.barrier()


def two_models(strategy):
    """Return an actor and a critic by name, and the actor's optimizer."""
    models = {name: strategy.prepare_model(build("llama"), is_training=True) for name in ("actor", "critic")}
    optimizers = [strategy.create_optimizer(model, lr=0.1) for model in models.values()]
    return models, optimizers[0]


def saved(folder: Path, steps: int = 1):
    """Train and save a checkpoint; return the strategy and what it trained."""
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(steps))
    strategy.save_ckpt(model, folder / "ckpts", client_state={"step": steps})
    return strategy, model, optimizer, scheduler


# --- configuration ----------------------------------------------------------------------------------------------------

_section[0] = "Configuration"


@mistake(
    "cannot call FSDPV2Strategy: 'max_nrom' is not an argument",
    ArgumentError,
    "",
)
def a_mistyped_argument_of_the_constructor(folder):
    FSDPV2Strategy(max_nrom=1.0)


@mistake(
    "cannot call load_ckpt: 'load_modul_only' is not an argument",
    ArgumentError,
    "",
)
def a_mistyped_argument_of_a_method(folder):
    strategy, model, *_ = saved(folder)
    strategy.load_ckpt(model, folder / "ckpts", load_modul_only=True)


@mistake(
    "cannot configure: pp_size is 2, expected None or 0 or 1",
    ConfigError,
    "Pipeline parallelism is not supported. Remove the option; the same holds for `grad_accum_dtype`.",
)
def a_capability_that_we_lack(folder):
    FSDPV2Strategy(args=Namespace(pp_size=2))


@mistake(
    "cannot train: sequence_parallel_size is 3, expected a divisor of the number of ranks 2",
    MeshError,
    "Use a divisor of the number of ranks; so for `tensor_parallel_size` and `shard_size`.",
    quote="sequence_parallel_size is 3, expected a divisor of the number of ranks 2",
)
def a_sequence_parallel_size_that_does_not_divide_the_ranks(folder):
    FSDPV2Strategy(args=Namespace(sp_size=3))


@mistake(
    "cannot train: tensor_parallel_size is 3, expected a divisor of the number of ranks 2",
    MeshError,
    "",
)
def a_tensor_parallel_size_that_does_not_divide_the_ranks(folder):
    FSDPV2Strategy(args=Namespace(tp_size=3))


@mistake(
    "cannot split the layers of Linear: it has no plan for tensor parallelism",
    ShardError,
    "Pass `tensor_parallel_plan`, or set `tensor_parallel_size=1`.",
    quote="it has no plan for tensor parallelism",
)
def a_model_without_a_plan_for_its_layers(folder):
    strategy_for(tensor_parallel_size=2).prepare_model(nn.Linear(4, 4), is_training=True)


@mistake(
    "sequence_parallel_size is 2 and sp_size is 4, expected one value",
    ConfigError,
    "",
)
def two_sequence_parallel_sizes(folder):
    FSDPV2Strategy(args=Namespace(sequence_parallel_size=2, sp_size=4))


@mistake(
    "cannot configure: max_norm is 1.0 and max_grad_norm is 0.5, expected one value",
    ConfigError,
    "Two names of one setting have different values. Set one of them.",
    quote="max_norm is 1.0 and max_grad_norm is 0.5, expected one value",
)
def two_values_of_one_setting(folder):
    FSDPV2Strategy(args=Namespace(max_norm=1.0, max_grad_norm=0.5))


@mistake(
    "cannot accumulate: gradient_accumulation_steps is 3, expected 2",
    ConfigError,
    "Set only one of `train_batch_size` and `gradient_accumulation_steps`.",
)
def accumulation_that_contradicts_the_batch_size(folder):
    FSDPV2Strategy(micro_train_batch_size=2, train_batch_size=8, gradient_accumulation_steps=3)


@mistake(
    "Use 8 or 12; a run that is resumed with another train_batch_size needs load_data_position='samples', to continue "
    "at the same sample. To keep train_batch_size, use 1 or 3 ranks with micro_train_batch_size 1.",
    ConfigError,
    "The ranks cannot split the global batch into equal micro-batches. Use a size, or a number of ranks, that "
    "the message names.",
    quote="To keep train_batch_size, use",
)
def a_batch_size_that_the_ranks_cannot_share(folder):
    FSDPV2Strategy(micro_train_batch_size=2, train_batch_size=9)


@mistake(
    "cannot configure: 'max_nrom' is not a field of StrategyConfig",
    ConfigError,
    "",
)
def a_mistyped_key_in_yaml(folder):
    on_rank_0(lambda: (folder / "config.yaml").write_text("max_nrom: 1.0\n"))
    StrategyConfig.from_yaml(folder / "config.yaml")


@mistake(
    "cannot configure: profile is 613, expected the first and the last optimizer step",
    ConfigError,
    "YAML reads `10:13` as a number of seconds. Write `profile: 10-13`.",
)
def steps_that_yaml_reads_as_a_number(folder):
    on_rank_0(lambda: (folder / "config.yaml").write_text("profile: 10:13\n"))
    StrategyConfig.from_yaml(folder / "config.yaml")


@mistake(
    "cannot configure: bf16 is 'bf16', expected true or false",
    ConfigError,
    "",
)
def a_switch_as_text(folder):
    FSDPV2Strategy(bf16="bf16")


@mistake(
    "expected a folder that every rank can create and write",
    ConfigError,
    "Set `profile_dir` to a folder that every rank can write.",
)
def a_profile_in_a_folder_that_cannot_be_written(folder):
    on_rank_0(lambda: (folder / "file").write_text(""))
    strategy_for(profile="1-2", profile_dir=folder / "file").prepare_model(build("llama"), is_training=True)


@mistake(
    "cannot record memory for memory_snapshot",
    ConfigError,
    "Set `memory_snapshot` only on CUDA.",
)
def a_memory_snapshot_without_an_accelerator(folder):
    strategy_for(memory_snapshot=True, profile_dir=folder).prepare_model(build("llama"), is_training=True)


@mistake(
    "cannot configure: args is a str",
    ConfigError,
    "Pass the namespace that argparse returns.",
)
def arguments_as_text(folder):
    FSDPV2Strategy(args="--bf16")


@mistake(
    "StrategyConfig has no field 'kl_estimatr', and the trainer's arguments did not contain it.",
    AttributeError,
    "Add the option to the trainer's arguments, or correct its name.",
    quote="StrategyConfig has no field 'kl_estimatr'",
)
def an_option_that_nobody_set(folder):
    FSDPV2Strategy(args=Namespace(kl_estimator="k3")).config.kl_estimatr  # noqa: B018


@mistake(
    "cannot build a mesh: shard_size is 3, expected a divisor of the world size 2",
    MeshError,
    "",
)
def a_shard_size_that_does_not_divide_the_ranks(folder):
    strategy_for().prepare_model(build("llama"), shard_size=3)


@mistake(
    "cannot make a strategy: fsdp is false, which selects DeepSpeed in LightRFT",
    ConfigError,
    "Start LightRFT's script with `--fsdp`.",
    quote="fsdp is false, which selects DeepSpeed in LightRFT",
)
def a_script_that_asks_for_deepspeed(folder):
    get_strategy(Namespace(fsdp=False))


# --- models -----------------------------------------------------------------------------------------------------------

_section[0] = "Models"


@mistake(
    "cannot prepare a model: it is 'Qwen/Qwen3-0.6B', expected an nn.Module",
    ShardError,
    "Load the model first, with `from_pretrained`.",
    quote="it is 'Qwen/Qwen3-0.6B', expected an nn.Module",
)
def the_name_of_a_model(folder):
    strategy_for().prepare_model("Qwen/Qwen3-0.6B")


@mistake(
    "cannot prepare a model: it is a list, expected an nn.Module",
    ShardError,
    "Call `prepare_model` once for each model, or use `prepare`.",
    quote="it is a list, expected an nn.Module",
)
def a_list_of_models(folder):
    strategy_for().prepare_model([build("llama")])


@mistake(
    "the model is a DistributedDataParallel, expected a model without data parallelism",
    ShardError,
    "Pass the inner model, `model.module`.",
)
def a_model_within_ddp(folder):
    strategy_for().prepare_model(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))


@mistake(
    "match no module of LlamaForCausalLM",
    ShardError,
    "Correct `block_class_names`, or leave it empty: blocks are found by themselves.",
)
def a_mistyped_class_name(folder):
    strategy_for(block_class_names=["LlamaDecoderLayr"]).prepare_model(build("llama"))


@mistake(
    "it is already sharded for inference, without fp32 master weights",
    ShardError,
    "Pass `is_training=True` in the first call of `prepare_model`.",
    quote="it is already sharded for inference",
)
def training_after_inference(folder):
    strategy = strategy_for(bf16=True)
    model = strategy.prepare_model(build("llama"))
    strategy.prepare_model(model, is_training=True)


@mistake(
    "since prepare_model, expected torch.float32. Do not cast the model after prepare_model",
    ShardError,
    "Remove the cast, which rounds the fp32 master weights: `bf16=True` computes in bf16.",
    quote="Do not cast the model after prepare_model",
)
def a_cast_after_prepare(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    model.to(torch.bfloat16)
    train(strategy, model, optimizer, None, range(1))


@mistake(
    "cannot shard Linear",
    ShardError,
    "The ranks built different models. Build the model after the strategy, which seeds all ranks equally, or "
    "load the same files.",
)
def other_weights_on_each_rank(folder):
    strategy = strategy_for()
    torch.manual_seed(dist.get_rank())
    strategy.prepare_model(nn.Linear(4, 4), is_training=True)


@mistake(
    "cannot split sequences: Linear is not a model of transformers",
    SequenceError,
    "Set `sequence_parallel_size=1`.",
)
def a_model_whose_sequences_cannot_be_split(folder):
    strategy_for(sequence_parallel_size=2).prepare_model(nn.Linear(4, 4), is_training=True)


@mistake(
    "cannot build an optimizer: no parameter of Linear is trainable",
    OptimizerError,
    "Set `requires_grad` before `prepare_model`.",
    quote="no parameter of Linear is trainable",
)
def an_optimizer_without_parameters(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(nn.Linear(4, 4).requires_grad_(False), is_training=True)
    strategy.create_optimizer(model)


@mistake(
    "cannot build an optimizer: 'weigth_decay' is not an argument of AdamW",
    ArgumentError,
    "",
)
def a_mistyped_option_of_the_optimizer(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(nn.Linear(4, 4), is_training=True)
    strategy.create_optimizer(model, weigth_decay=0.1)


@mistake(
    "cannot build an optimizer: lr is '1e-4', expected a finite number at least 0",
    OptimizerError,
    "",
)
def a_learning_rate_as_text(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    strategy.create_optimizer(model, lr="1e-4")


@mistake(
    "cannot use this model: it is a generator, expected an nn.Module",
    ArgumentError,
    "Pass the model, not `model.parameters()`; choose parameters with `param_groups`.",
    quote="it is a generator, expected an nn.Module",
)
def parameters_in_place_of_the_model(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    strategy.create_optimizer(model.parameters(), lr=1e-4)


@mistake(
    "cosin",
    OptimizerError,
    "",
)
def a_mistyped_schedule(folder):
    strategy = strategy_for()
    _, optimizer, _ = prepared(strategy)
    strategy.create_scheduler(optimizer, "cosin", num_training_steps=4)


@mistake(
    "cannot call save_pretrained: LlamaForCausalLM is sharded",
    CheckpointError,
    "Call `strategy.save_model(model, tokenizer, output_dir)` on every rank.",
)
def save_pretrained_of_a_sharded_model(folder):
    strategy_for().prepare_model(build("llama"), is_training=True).save_pretrained(folder)


@mistake(
    "cannot pickle the state dict of LlamaForCausalLM",
    CheckpointError,
    "`torch.save` would write one rank's shards. Call `save_ckpt` or `save_model` on every rank.",
)
def torch_save_of_a_sharded_state_dict(folder):
    model = strategy_for().prepare_model(build("llama"), is_training=True)
    torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt")


@mistake(
    "cannot pickle LlamaForCausalLM: it is sharded",
    CheckpointError,
    "Call `strategy.save_ckpt(model, save_dir)` to resume, or `strategy.save_model` for `from_pretrained`.",
)
def torch_save_of_a_sharded_model(folder):
    model = strategy_for().prepare_model(build("llama"), is_training=True)
    torch.save(model, folder / f"{dist.get_rank()}.pt")


@mistake(
    "cannot call push_to_hub: LlamaForCausalLM is sharded",
    CheckpointError,
    "Call `save_model(model, tokenizer, output_dir)` on every rank, and upload the folder on one; or pass "
    "`push_to_hub=True, repo_id=...` to it.",
)
def push_to_hub_of_a_sharded_model(folder):
    strategy_for().prepare_model(build("llama"), is_training=True).push_to_hub("me/model")


@mistake(
    "cannot resize the embeddings of LlamaForCausalLM from 96 to 128 tokens",
    ShardError,
    "Call `resize_token_embeddings` before `prepare_model`.",
)
def resize_token_embeddings_of_a_sharded_model(folder):
    strategy_for().prepare_model(build("llama"), is_training=True).resize_token_embeddings(128)


@mistake(
    "cannot call add_adapter: LlamaForCausalLM is sharded",
    ShardError,
    "Call `add_adapter`, or peft's `get_peft_model`, before `prepare_model`.",
)
def add_adapter_to_a_sharded_model(folder):
    from peft import LoraConfig

    model = strategy_for().prepare_model(build("llama"), is_training=True)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))


@mistake(
    "cannot add the module q_proj (Linear) to LlamaForCausalLM: the model is sharded",
    ShardError,
    "Call `get_peft_model` before `prepare_model`.",
    quote="cannot add the module q_proj (Linear) to LlamaForCausalLM",
)
def get_peft_model_of_a_sharded_model(folder):
    from peft import LoraConfig, get_peft_model

    get_peft_model(
        strategy_for().prepare_model(build("llama"), is_training=True), LoraConfig(target_modules=["q_proj"])
    )


@mistake(
    "cannot add the module lm_head (Linear) to LlamaForCausalLM: the model is sharded",
    ShardError,
    "Add heads and adapters before `prepare_model`.",
    quote="cannot add the module lm_head (Linear) to LlamaForCausalLM",
)
def a_head_that_is_replaced_after_prepare_model(folder):
    strategy_for().prepare_model(build("llama"), is_training=True).lm_head = nn.Linear(4, 4)


@mistake(
    "cannot copy LlamaForCausalLM: it is sharded",
    ShardError,
    "Copy the model before `prepare_model`, and prepare the copy; or use `moving_average`.",
)
def a_copy_of_a_sharded_model(folder):
    copy.deepcopy(strategy_for().prepare_model(build("llama"), is_training=True))


@mistake(
    "cannot compute log-probabilities: the weight is a DTensor",
    LogProbError,
    "Call `linear_log_probs` in the forward of a wrapper that `prepare_model` got; or call `token_log_probs`.",
)
def the_weight_of_a_head_outside_of_a_forward(folder):
    model = strategy_for().prepare_model(build("llama"), is_training=True)
    linear_log_probs(torch.randn(2, 3, 32), model.lm_head.weight, torch.zeros(2, 3, dtype=torch.int64))


# --- training ---------------------------------------------------------------------------------------------------------

_section[0] = "Training"


@mistake(
    "cannot step this AdamW directly: gradients would not be clipped",
    StepError,
    "Call `strategy.optimizer_step(optimizer, model, scheduler)`.",
    quote="cannot step this AdamW directly",
)
def a_direct_step(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    optimizer.step()


@mistake(
    "no backward pass since its last step, expected at least one",
    StepError,
    "Call `strategy.backward(loss, model, optimizer)` in place of `loss.backward()`.",
    quote="no backward pass since its last step",
)
def a_direct_backward(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    loss_of("llama", model, batch_of("llama", 0, dist.get_rank())).backward()
    strategy.optimizer_step(optimizer, model)


@mistake(
    "the optimizer is None, expected a torch optimizer",
    StepError,
    "Pass the optimizer that `create_optimizer` returned.",
)
def no_optimizer(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    strategy.optimizer_step(None, model)


@mistake(
    "these may be 2 micro-batches, or 2 losses of one, expected to know which",
    StepError,
    "Put the loop of micro-batches into `with strategy.accumulate(n):`; for several losses, set "
    '`accumulation="optimizer_step"`. See [micro-batches](numerics.md#micro-batches).',
    quote="these may be 2 micro-batches, or 2 losses of one",
)
def a_loop_with_one_optimizer_step(folder):
    strategy = strategy_for(gradient_accumulation_steps=2)
    model, optimizer, _ = prepared(strategy)
    for step in range(2):
        strategy.backward(loss_of("llama", model, batch_of("llama", step, 0)), model, optimizer)
    strategy.optimizer_step(optimizer, model)


@mistake(
    "parameters not in LlamaForCausalLM, expected only parameters of this model",
    StepError,
    "Create the optimizer for this model, after `prepare_model`.",
    quote="parameters not in LlamaForCausalLM",
)
def an_optimizer_from_before_prepare(folder):
    strategy = strategy_for()
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    strategy.prepare_model(model, is_training=True)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    strategy.optimizer_step(optimizer, model)


@mistake(
    "is not sharded, so each of the 2 ranks would train a copy of its own",
    StepError,
    "Call `prepare_model(model, is_training=True)`, and train the model that it returns.",
    quote="each of the 2 ranks would train a copy of its own",
)
def a_model_that_was_not_prepared(folder):
    strategy = strategy_for()
    model = build("llama")
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)


@mistake(
    "zero_grad is ignored between the micro-batches of a step",
    None,
    "Remove `optimizer.zero_grad()`: `optimizer_step` clears the gradients. `discard_gradients(model)` drops them.",
    quote="zero_grad is ignored between the micro-batches",
)
def zero_grad_at_the_top_of_the_loop(folder):
    strategy = strategy_for(gradient_accumulation_steps=2)
    model, optimizer, scheduler = prepared(strategy)
    for step in range(2):
        optimizer.zero_grad()
        strategy.backward(loss_of("llama", model, batch_of("llama", step, dist.get_rank())), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)


@mistake(
    "a pass has raised; its units are reset, and the gradients of this step are discarded",
    None,
    "Nothing, if all ranks skip the same batch. Otherwise end the program.",
    quote="a pass has raised; its units are reset",
)
def an_error_in_a_pass_that_is_caught(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    with contextlib.suppress(IndexError):
        model(input_ids=torch.full((1, 4), 10**6))  # an unknown token
    optimizer.zero_grad()
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    strategy.optimizer_step(optimizer, model)


@mistake(
    "the loss was the same on all ranks: they seem to train on the same batches",
    None,
    "Use `ResumableLoader` or `setup_dataloader`, which give each rank its part.",
    quote="the loss was the same on all ranks",
)
def the_same_batches_on_all_ranks(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    for step in range(6):
        strategy.backward(loss_of("llama", model, batch_of("llama", step, 0)), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)


@mistake(
    "cannot step: num_items_in_batch is 10.0 on rank 0, 11.0 on rank 1, expected the same on all ranks",
    StepError,
    "Sum it over the ranks, or pass `num_items`, which each rank counts for itself.",
    quote="num_items_in_batch is 10.0 on rank 0, 11.0 on rank 1",
)
def a_number_of_items_of_each_rank(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))
    strategy.backward(loss, model, optimizer, num_items_in_batch=10 + dist.get_rank())
    strategy.optimizer_step(optimizer, model)


@mistake(
    "cannot step: lr of parameter group 0 (decay) is 0.1 on rank 0, 0.2 on rank 1, expected the same on all ranks",
    StepError,
    "Use the same settings on all ranks.",
    quote="lr of parameter group 0 (decay) is 0.1 on rank 0, 0.2 on rank 1",
)
def other_learning_rates_on_each_rank(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1 * (1 + dist.get_rank()))
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    strategy.optimizer_step(optimizer, model)


@mistake(
    "the loss has no autograd graph, expected one",
    StepError,
    "Compute the loss with gradients; detach only the copy that is logged.",
)
def a_detached_loss(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank())).detach()
    strategy.backward(loss, model, optimizer)


@mistake(
    "the loss has the shape [2], expected one element",
    StepError,
    "Take the mean of the loss.",
)
def a_loss_for_each_sample(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))
    strategy.backward(torch.stack([loss, loss]), model, optimizer)


@mistake(
    "cannot use this model: it is a Tensor",
    StepError,
    "Call `backward(loss, model, optimizer)`, in this order.",
)
def swapped_arguments_of_backward(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    strategy.backward(model, loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), optimizer)


@mistake(
    "num_items_in_batch is 0",
    StepError,
    "Sum the items over all ranks, and skip empty batches on all of them.",
)
def no_items_in_the_batch(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))
    strategy.backward(loss, model, optimizer, num_items_in_batch=0)


@mistake(
    "cannot save the schedule: this LambdaLR was not stepped in 2 optimizer steps",
    StepError,
    "Call `optimizer_step(optimizer, model, scheduler)`.",
    quote="this LambdaLR was not stepped in 2 optimizer steps",
)
def a_schedule_that_is_never_stepped(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    train(strategy, model, optimizer, None, range(2))
    strategy.save_ckpt(model, folder / "ckpts")


@mistake(
    "the LambdaLR sets the learning rates of another AdamW",
    StepError,
    "Create the schedule again, for the optimizer in use.",
)
def a_schedule_of_another_optimizer(folder):
    strategy = strategy_for()
    model, _, scheduler = prepared(strategy)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    train(strategy, model, optimizer, scheduler, range(1))


@mistake(
    "the program has stepped the LambdaLR 1 time since the last optimizer step, and optimizer_step steps it, too",
    None,
    "Remove `scheduler.step()`.",
    quote="and optimizer_step steps it, too",
)
def a_schedule_that_is_stepped_twice(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    for step in range(2):
        train(strategy, model, optimizer, scheduler, [step])
        scheduler.step()


@mistake(
    "cannot step the ReduceLROnPlateau with the optimizer: its step needs metrics",
    StepError,
    "Step it yourself after each evaluation, and pass `scheduler=` to `save_ckpt` and `load_ckpt`.",
    quote="cannot step the ReduceLROnPlateau with the optimizer",
)
def a_schedule_that_needs_a_metric(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    train(strategy, model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), range(1))


@mistake(
    "is in host memory, expected it on the device. Call reload_model first.",
    OffloadError,
    "Call `reload_model` and `maybe_load_optimizer` before the step.",
)
def a_forward_of_an_offloaded_model(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.offload_model(model)
    loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))


@mistake(
    "input_ids, labels of rank 1 differ from those of rank 0, expected the same batch on the ranks 0, 1",
    SequenceError,
    "Draw batches by `strategy.dp_rank` and `strategy.dp_size`, as `ResumableLoader` and `setup_dataloader` do.",
    quote="input_ids, labels of rank 1 differ from those of rank 0",
)
def other_batches_on_ranks_that_share_sequences(folder):
    ids = torch.full((2, 32), dist.get_rank())
    strategy_for(sequence_parallel_size=2).shard_sequence({"input_ids": ids, "labels": ids})


@mistake(
    "cannot use the strategy: it is closed, expected an open one",
    StepError,
    "Close it after the last use.",
)
def a_save_after_close(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.close()
    strategy.save_ckpt(model, folder / "ckpts")


@mistake(
    "num_tokens is a tensor of the shape [2, 32], expected the number of tokens of this rank's micro-batch",
    StepError,
    "Pass `num_tokens=ids.numel()`, or the sum of the attention mask.",
    quote="num_tokens is a tensor of the shape [2, 32]",
)
def tokens_instead_of_their_number(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    ids = torch.zeros(2, 32, dtype=torch.long)
    strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer, num_tokens=ids)


@mistake(
    "cannot track with 'tensorbord': expected one of jsonl, tensorboard, wandb, or a Tracker object. Did you mean",
    ConfigError,
    "",
)
def a_tracker_that_does_not_exist(folder):
    Metrics("tensorbord", run_id="run", run_dir=folder)


@mistake(
    "cannot start trackers: failed on rank 0: FileExistsError",
    ConfigError,
    "Use a `run_dir` that rank 0 can create and write.",
    quote="cannot start trackers: failed on rank 0",
)
def metrics_in_a_file(folder):
    file = folder / "file"
    file.touch()
    Metrics("jsonl", run_id="run", run_dir=file)


@mistake(
    "cannot log 'loss': the record has a number of this name",
    ArgumentError,
    "Omit it: the record contains the loss of the step. Name another loss differently.",
    quote="cannot log 'loss'",
)
def a_second_loss_in_a_record(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    loss = loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))
    strategy.backward(loss, model, optimizer)
    with Metrics("jsonl", run_id="run", run_dir=folder) as metrics:
        metrics.log(strategy.optimizer_step(optimizer, model, scheduler), loss=loss)


@mistake(
    "cannot take an optimizer step: failed on rank 0: cannot write the metrics of step 1",
    StepError,
    "Correct the cause that the message names, and start the run again, which resumes.",
    quote="cannot write the metrics of step 1",
)
def a_directory_of_metrics_that_is_lost(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    with Metrics("jsonl", run_id="run", run_dir=folder / "run") as metrics:
        if dist.get_rank() == 0:
            (folder / "run" / "run-metrics.jsonl").unlink()
            (folder / "run").rmdir()
            (folder / "run").touch()
        for step in range(2):
            strategy.backward(loss_of("llama", model, batch_of("llama", step, 0)), model, optimizer)
            metrics.log(strategy.optimizer_step(optimizer, model, scheduler))


@mistake(
    "cannot run backward: the parameters of LlamaForCausalLM are the averages of ema.swapped_in",
    StepError,
    "Leave the block of `ema.swapped_in` before a step. Evaluate, export and stream within it.",
    quote="cannot run backward: the parameters of LlamaForCausalLM are the averages",
)
def a_backward_pass_of_averages(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    with EMA(model).swapped_in(model):
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)


# --- saving -----------------------------------------------------------------------------------------------------------

_section[0] = "Saving"


@mistake(
    "saving in the middle of a step: the gradients of 1 micro-batch are not saved",
    None,
    "Save when `result.stepped` is true.",
    quote="saving in the middle of a step",
)
def a_save_within_a_step(folder):
    strategy = strategy_for(gradient_accumulation_steps=2)
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(1))
    strategy.save_ckpt(model, folder / "ckpts")


@mistake(
    "another export writes into it, expected one at a time",
    CheckpointError,
    "Wait for the other export, or choose another folder.",
)
def two_exports_to_one_folder(folder):
    model = strategy_for().prepare_model(build("llama"), is_training=True)
    with StagedFolder(folder / "out") as staged:
        if dist.get_rank() == 0:
            staged.create()
        dist.barrier()
        save_model(model, output_dir=folder / "out")


@mistake(
    "its mode is 0644, expected a regular file of this user with mode 0600",
    CheckpointError,
    "`chmod 600` the file of the key or secret; make a new one if others may have read it.",
)
def a_key_that_others_can_read(folder):
    if dist.get_rank() == 0:
        (folder / "key").write_bytes(bytes(32))
        (folder / "key").chmod(0o644)
    dist.barrier()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, checkpoint_key_file=folder / "key"))
    model = strategy.prepare_model(build("llama"), is_training=True)
    strategy.save_ckpt(model, folder / "ckpts")


@mistake(
    "is replaced by a checkpoint of the same step 0 with other weights",
    None,
    "Step with `strategy.optimizer_step`, which counts steps, or pass a `tag`.",
    quote="is replaced by a checkpoint of the same step 0",
)
def checkpoints_of_one_name(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = build_optimizer(model, lr=0.1)
    for step in range(2):
        strategy.backward(loss_of("llama", model, batch_of("llama", step, dist.get_rank())), model, optimizer)
        optimizer.step()
        strategy.save_ckpt(model, folder / "ckpts")


@mistake(
    "cannot save or load: the parameters of LlamaForCausalLM are the averages of ema.swapped_in",
    CheckpointError,
    "Save after the block of `ema.swapped_in`; `ema=` saves the averages, too.",
    quote="cannot save or load: the parameters of LlamaForCausalLM are the averages",
)
def a_save_of_averages_as_the_weights(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    with EMA(model).swapped_in(model):
        strategy.save_ckpt(model, folder / "ckpts")


@mistake(
    "optimizer is a AdamW, expected a mapping by the names of the models (actor, critic)",
    ArgumentError,
    'Pass `optimizer={"actor": ...}`, or omit it: those of `create_optimizer` are saved.',
    quote="expected a mapping by the names of the models (actor, critic)",
)
def one_optimizer_for_several_models(folder):
    strategy = strategy_for()
    models, optimizer = two_models(strategy)
    strategy.save_ckpt(models, folder / "ckpts", optimizer=optimizer)


@mistake(
    "client_state",
    CheckpointError,
    "Convert values that JSON lacks: `tensor.tolist()`, `str(path)`.",
)
def a_tensor_in_the_client_state(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, folder / "ckpts", client_state={"reward": torch.zeros(1)})


@mistake(
    "tag is 'step/1', expected a plain directory name",
    CheckpointError,
    "Use a name like `global_step100`.",
)
def a_path_as_tag(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, folder / "ckpts", "step/1")


@mistake(
    "expected a str. Pass others by keyword",
    CheckpointError,
    "Pass `optimizer=` by keyword, or omit it: that of `create_optimizer` is saved.",
)
def an_optimizer_as_tag(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    strategy.save_ckpt(model, folder / "ckpts", optimizer)


@mistake(
    "optimizer is 'step1', expected the optimizer itself. Pass tag='step1'",
    ArgumentError,
    "",
)
def a_tag_as_optimizer(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.load_ckpt(model, folder / "ckpts", "step1")


@mistake(
    "max_num is 0",
    CheckpointError,
    "Pass at least 1, or None for no limit.",
)
def a_limit_of_no_checkpoint(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, folder / "ckpts", max_num=0)


@mistake(
    "the same directory, tag, step, limits and objects to save on all ranks",
    CheckpointError,
    "Make the tag from the step, not from the time.",
)
def other_tags_on_each_rank(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, folder / "ckpts", f"at{dist.get_rank()}")


@mistake(
    "exists and is not a checkpoint of this package",
    CheckpointError,
    "Choose another tag, or rename the directory.",
)
def a_tag_that_is_another_directory(folder):
    on_rank_0(lambda: (folder / "ckpts" / "final" / "plots").mkdir(parents=True))
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_ckpt(model, folder / "ckpts", "final")


@mistake(
    "cannot save the tokenizer: it is a str, expected an object with save_pretrained",
    CheckpointError,
    "Call `save_model(model, tokenizer, output_dir)`; without a tokenizer, `save_model(model, output_dir=folder)`.",
    quote="cannot save the tokenizer: it is a str",
)
def a_path_as_tokenizer(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_model(model, str(folder / "out"), small_tokenizer())


@mistake(
    "cannot call save_model: the model is a TokenizersBackend",
    ArgumentError,
    "",
)
def a_tokenizer_as_model(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_model(small_tokenizer(), model, folder / "out")


@mistake(
    "is given as tokenizer and output_dir is missing",
    ArgumentError,
    "",
)
def a_folder_in_the_place_of_the_tokenizer(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_model(model, str(folder / "out"))


@mistake(
    "failed on rank 1: cannot save the model: output_dir is missing",
    ArgumentError,
    "Pass the same arguments on every rank.",
)
def a_folder_that_only_rank_0_knows(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_model(model, output_dir=folder / "out" if strategy.is_rank_0() else None)


@mistake(
    "unknown argument 'dtyp'",
    CheckpointError,
    "",
)
def a_mistyped_argument_of_an_export(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.save_model(model, None, folder / "out", dtyp=torch.bfloat16)


@mistake(
    "call resize_token_embeddings before training",
    None,
    "The tokenizer has more tokens than the model has embeddings. Resize before `prepare_model`, or save this "
    "model's tokenizer.",
)
def a_tokenizer_that_is_too_large(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([f"<extra{n}>" for n in range(200)])
    strategy.save_ckpt(model, folder / "ckpts", tokenizer=tokenizer)


# --- resuming ---------------------------------------------------------------------------------------------------------

_section[0] = "Resuming"


@mistake(
    "it has no signature, expected a checkpoint that this key signed",
    DamageError,
    "If you trust all who can write there, load once without `checkpoint_key_file`, and save with it.",
    quote="it has no signature",
)
def a_checkpoint_from_before_the_key(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    strategy.save_ckpt(model, folder / "ckpts")
    if dist.get_rank() == 0:
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(bytes(32))
    dist.barrier()
    signing = FSDPV2Strategy(config=StrategyConfig(bf16=False, checkpoint_key_file=folder / "key"))
    signing.load_ckpt(signing.prepare_model(build("llama"), is_training=False), folder / "ckpts")


@mistake(
    "it has the state of the optimizer, and the model has no optimizer yet",
    CheckpointError,
    "Create optimizer and schedule before `load_ckpt`; or pass `load_optimizer_states=False`.",
    quote="the model has no optimizer yet",
)
def a_load_before_the_optimizer(folder):
    strategy, *_ = saved(folder)
    model = strategy.prepare_model(build("llama", 1), is_training=True)
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "it has the state of the scheduler, and the model has no scheduler yet",
    CheckpointError,
    "Create the schedule first; or pass `load_lr_scheduler_states=False`.",
    quote="the model has no scheduler yet",
)
def a_load_before_the_schedule(folder):
    strategy, *_ = saved(folder)
    model = strategy.prepare_model(build("llama", 1), is_training=True)
    strategy.create_optimizer(model)
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "'global_step2' is not a committed checkpoint in",
    CheckpointError,
    "Use one of the tags that the message lists.",
)
def a_tag_that_does_not_exist(folder):
    strategy, model, *_ = saved(folder)
    strategy.load_ckpt(model, folder / "ckpts", tag="global_step2")


@mistake(
    "it has the models actor, critic, expected a checkpoint of one model. Pass a mapping of models by name",
    CheckpointError,
    'Pass the same names: `load_ckpt({"actor": actor, "critic": critic}, ...)`.',
    quote="it has the models actor, critic, expected a checkpoint of one model",
)
def one_model_of_several(folder):
    strategy = strategy_for()
    models, _ = two_models(strategy)
    strategy.save_ckpt(models, folder / "ckpts")
    strategy.load_ckpt(models["actor"], folder / "ckpts")


@mistake(
    "it has one model without a name, expected the models actor, critic",
    CheckpointError,
    "Pass the model instead of a mapping.",
    quote="it has one model without a name, expected the models",
)
def several_models_of_one(folder):
    strategy = strategy_for()
    models, _ = two_models(strategy)
    strategy.save_ckpt(models["actor"], folder / "ckpts")
    strategy.load_ckpt(models, folder / "ckpts")


@mistake(
    "a kill between the calls leaves them at different steps: save and load them by one call",
    None,
    "Save both models by one call. To resume this run, load both at the same step with `tag=`.",
    quote="a kill between the calls leaves them at different steps",
)
def models_of_different_steps(folder):
    strategy = strategy_for()
    models, _ = two_models(strategy)
    for name, model in models.items():
        strategy.save_ckpt(model, folder / name)
    optimizer = strategy.create_optimizer(models["actor"], lr=0.1)
    train(strategy, models["actor"], optimizer, None, range(1))
    strategy.save_ckpt(models["actor"], folder / "actor")
    for name, model in models.items():
        strategy.load_ckpt(model, folder / name)


@mistake(
    "There are checkpoints in",
    CheckpointError,
    "Pass the directory that the message names.",
)
def a_directory_one_level_too_high(folder):
    strategy, model, *_ = saved(folder)
    strategy.load_ckpt(model, folder)


@mistake(
    "has no checkpoint of this package: it contains config.json",
    CheckpointError,
    "Pass the directory of checkpoints, not a folder within one.",
)
def a_directory_one_level_too_low(folder):
    strategy, model, *_ = saved(folder)
    strategy.load_ckpt(model, folder / "ckpts" / "global_step1" / "model")


@mistake(
    "does not exist. Did you mean 'ckpts'?",
    None,
    "Correct the name. A missing directory is no error, since every first start has one.",
)
def a_mistyped_directory(folder):
    strategy, model, *_ = saved(folder)
    assert strategy.load_ckpt(model, folder / "ckpt") == (None, {})


@mistake(
    "Pass fallback=True to load an older checkpoint, or delete this one.",
    CheckpointError,
    "Its manifest is missing or corrupt. Do as the message says.",
)
def a_newest_checkpoint_without_manifest(folder):
    strategy, model, optimizer, scheduler = saved(folder)
    train(strategy, model, optimizer, scheduler, range(1))
    strategy.save_ckpt(model, folder / "ckpts")
    on_rank_0((folder / "ckpts" / "global_step2" / "manifest.json").unlink)
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "is a symbolic link, expected a new name or a checkpoint to replace",
    CheckpointError,
    "Choose another tag, or remove the link. A load may name it.",
    quote="is a symbolic link, expected a new name",
)
def a_tag_that_is_a_link(folder):
    strategy, model, *_ = saved(folder)
    on_rank_0(lambda: (folder / "ckpts" / "best").symlink_to("global_step1"))
    strategy.save_ckpt(model, folder / "ckpts", "best")


@mistake(
    "training_state/ is missing. Pass fallback=True to load an older checkpoint",
    CheckpointError,
    "Restore `training_state/`, or pass `fallback=True`.",
    quote="training_state/ is missing",
)
def a_newest_checkpoint_without_training_state(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    layout = LeRobotLayout(total_steps=9, batch_size=1)
    for tag in ("000001", "000002"):
        strategy.save_ckpt(model, folder / "ckpts", tag, layout=layout)
    on_rank_0(lambda: shutil.rmtree(folder / "ckpts" / "000002" / "training_state"))
    strategy.load_ckpt(model, folder / "ckpts")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@mistake(
    "model.safetensors",
    DamageError,
    "Bytes changed on disk. Load another checkpoint by `tag`, or the newest intact one with `fallback=True`.",
)
def a_flipped_byte(folder):
    strategy, model, *_ = saved(folder)
    on_rank_0(lambda: _flip(folder / "ckpts" / "global_step1" / "model" / "model.safetensors"))
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "with fallback=True, for an older checkpoint, or with tag= for one of ['global_step1']",
    DamageError,
    "",
)
def a_flipped_byte_in_the_newest_of_several_checkpoints(folder):
    strategy, model, optimizer, scheduler = saved(folder)
    train(strategy, model, optimizer, scheduler, range(1, 2))
    strategy.save_ckpt(model, folder / "ckpts")
    on_rank_0(lambda: _flip(folder / "ckpts" / "global_step2" / "model" / "model.safetensors"))
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "The saved model has another vocabulary: call resize_token_embeddings(",
    CheckpointError,
    "Make the call that the message names before `prepare_model`.",
    quote="The saved model has another vocabulary",
)
def a_checkpoint_of_a_model_with_more_tokens(folder):
    strategy = strategy_for()
    resized = build("llama")
    resized.resize_token_embeddings(120, mean_resizing=False)
    strategy.prepare_model(resized, is_training=True)
    strategy.create_optimizer(resized, lr=0.1)
    strategy.save_ckpt(resized, folder / "ckpts")
    model, *_ = prepared(strategy)
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "the files may be of a smaller model, or incomplete. To initialise these tensors, build the model outside of "
    "init_on_meta.",
    CheckpointError,
    "Correct the configuration or the folder.",
    quote="the files may be of a smaller model, or incomplete",
)
def files_without_a_layer(folder):
    on_rank_0(lambda: build("llama").save_pretrained(folder / "weights"))
    strategy = strategy_for()
    with strategy.init_model_context(meta_init=True):
        model = AutoModelForCausalLM.from_pretrained(folder / "weights", num_hidden_layers=3)
    strategy.prepare_model(model, is_training=True)


@mistake(
    "a tensor on meta that is not registered, is a parameter of the model, or a view of one",
    CheckpointError,
    "Use the parameter by its registered name, or build the model outside of the context.",
    quote="a tensor on meta that is not registered",
)
def a_list_of_a_parameter_on_meta(_folder):
    strategy = strategy_for()
    with strategy.init_model_context(meta_init=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.first_rows = [model[0].weight[:2]]
    strategy.prepare_model(model, is_training=True)


@mistake(
    "which depend on random numbers, expected values that this block computes without random numbers.",
    CheckpointError,
    "Do this after `prepare_model`, or build the model outside of the context.",
    quote="which depend on random numbers",
)
def a_random_value_on_meta(_folder):
    strategy = strategy_for()
    with strategy.init_model_context(meta_init=True):
        if nn.Linear(4, 4).weight.mean() > 0:
            raise AssertionError("no values are known here")


@mistake(
    "bytes long, expected",
    DamageError,
    "A file is truncated: load another checkpoint, as above.",
)
def a_truncated_file(folder):
    strategy, model, *_ = saved(folder)
    path = folder / "ckpts" / "global_step1" / "optimizer" / "optimizer.safetensors"
    on_rank_0(lambda: path.write_bytes(path.read_bytes()[:-1]))
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "its content is invalid: its entry 'step' is -1, expected an integer",
    DamageError,
    "Another program wrote the file that the message names: load another checkpoint, as above.",
    quote="its content is invalid",
)
def a_manifest_of_another_program(folder):
    strategy, model, *_ = saved(folder)
    path = folder / "ckpts" / "global_step1" / "manifest.json"

    def write():
        manifest = json.loads(path.read_bytes()) | {"step": -1}
        path.write_text(json.dumps(manifest | {"digest": digest_of_manifest(manifest)}))

    on_rank_0(write)
    strategy.load_ckpt(model, folder / "ckpts" / "global_step1")


@mistake(
    "it is a symbolic link, expected a regular file",
    DamageError,
    "Copy the files that the links name, or load another checkpoint.",
)
def a_link_in_a_checkpoint(folder):
    strategy, model, *_ = saved(folder)
    path = folder / "ckpts" / "global_step1" / "trainer_state.json"

    def link():
        path.rename(folder / "elsewhere.json")
        path.symlink_to(folder / "elsewhere.json")

    on_rank_0(link)
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "reading it again",
    None,
    "Nothing, if it is rare. Otherwise check the file system, or the disk if the error is EIO.",
)
def a_read_that_fails_once(folder):
    strategy, model, *_ = saved(folder)
    read, failures = os.preadv, [OSError(errno.ESTALE, "Stale file handle")]

    def fail_once(*args):
        if failures:
            raise failures.pop()
        return read(*args)

    with patch.object(os, "preadv", fail_once):
        strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "cannot load",
    CheckpointError,
    "Build the model that was saved; `load_module_strict=False` loads the names that both have.",
)
def the_checkpoint_of_another_model(folder):
    strategy, *_ = saved(folder)
    model, *_ = prepared(strategy, "gpt2")
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "the checkpoint replaces lr 0.5 by 0.01",
    None,
    "To keep the new learning rate, pass `load_lr_scheduler_states=False`.",
)
def another_learning_rate_than_that_of_the_checkpoint(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    strategy.create_optimizer(model, lr=0.01)
    strategy.save_ckpt(model, folder / "ckpts")
    model = strategy.prepare_model(build("llama"), is_training=True)
    strategy.create_optimizer(model, lr=0.5)
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "the checkpoint holds the state of AdamW, expected that of SGD",
    CheckpointError,
    "Use the same class, or pass `load_optimizer_states=False`.",
)
def another_optimizer(folder):
    strategy, *_ = saved(folder)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1, optimizer_cls=torch.optim.SGD)
    strategy.create_scheduler(optimizer, "constant")
    strategy.load_ckpt(model, folder / "ckpts")


@mistake(
    "expected one that also has the optimizer",
    CheckpointError,
    "It has weights only: pass `load_optimizer_states=False`.",
)
def a_folder_of_weights(folder):
    on_rank_0(lambda: build("llama").save_pretrained(folder / "hub"))
    model, *_ = prepared(strategy := strategy_for())
    strategy.load_ckpt(model, folder / "hub")


@mistake(
    "can be in more than one of them",
    CheckpointError,
    "Create the optimizer with the groups of the saved program; or save by name with `get_optimizer_state_dict`.",
)
def numbers_of_parameters_in_unknown_groups(folder):
    theirs = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    named = list(theirs.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [p for _, p in named[:2]]}, {"params": [p for _, p in named[2:]]}])
    sum(p.sum() for p in theirs.parameters()).backward()
    optimizer.step()
    state = {"model": theirs.state_dict(), "optimizer": optimizer.state_dict()}
    on_rank_0(lambda: torch.save(state, folder / "model.pt"))
    strategy = strategy_for()
    model = strategy.prepare_model(theirs, is_training=True)
    strategy.load_ckpt(model, folder / "model.pt", trust=True, optimizer=strategy.create_optimizer(model, lr=0.1))


@mistake(
    "it has FSDP1's flattened parameters",
    CheckpointError,
    "Save it again with `SHARDED_STATE_DICT` in the old program.",
)
def flattened_parameters(folder):
    on_rank_0(lambda: torch.save({"_flat_param": torch.zeros(8)}, folder / "model.pt"))
    model, *_ = prepared(strategy := strategy_for())
    strategy.load_ckpt(model, folder / "model.pt", trust=True, load_module_only=True)


@mistake(
    "holds files that look like weights",
    CheckpointError,
    "Pass the file or folder to load, or an empty directory.",
)
def a_directory_with_unknown_weights(folder):
    on_rank_0((folder / "model.gguf").touch)
    model, *_ = prepared(strategy := strategy_for())
    strategy.load_ckpt(model, folder)


@mistake(
    "Pass trust=True if you trust its source",
    CheckpointError,
    "It has pickles of another system. With LightRFT's script: `get_strategy(args, trust_checkpoints=True)`.",
)
def a_pickle_of_unknown_source(folder):
    on_rank_0(lambda: torch.save({"weight": torch.zeros(1)}, folder / "model.pt"))
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.load_ckpt(model, folder)


@mistake(
    "Call get_strategy(args, trust_checkpoints=True) if you trust its source",
    CheckpointError,
    "",
)
def a_checkpoint_of_lightrft(folder):
    on_rank_0(lambda: torch.save({"weight": torch.zeros(1)}, folder / "model.pt"))
    strategy = get_strategy({"bf16": False}, train_batch_size=dist.get_world_size())
    model, *_ = prepared(strategy)
    strategy.load_ckpt(model, folder)


# --- data -------------------------------------------------------------------------------------------------------------

_section[0] = "Data"


@mistake(
    "cannot load a data position: it was saved with n 32, expected 24",
    CheckpointError,
    "Use the same data set, or start the order afresh with `dataloader=None`.",
    quote="it was saved with n 32, expected 24",
)
def a_position_in_another_data_set(folder):
    strategy, model, *_ = saved(folder)
    strategy.save_ckpt(model, folder / "ckpts", dataloader=ResumableLoader(list(range(32)), 2))
    strategy.load_ckpt(model, folder / "ckpts", dataloader=ResumableLoader(list(range(24)), 2))


@mistake(
    "global_batch_size 2, expected 4. Samples would be repeated or left out: use the data set and arguments of the run "
    "that is resumed. To continue at the same sample with another batch size, load with load_data_position='samples'",
    CheckpointError,
    'Keep the global batch size, or load with `load_data_position="samples"`.',
    quote="global_batch_size 2, expected 4",
)
def a_position_with_another_batch_size(folder):
    strategy, model, *_ = saved(folder)
    strategy.save_ckpt(model, folder / "ckpts", dataloader=ResumableLoader(list(range(32)), 2))
    strategy.load_ckpt(model, folder / "ckpts", dataloader=ResumableLoader(list(range(32)), 4))


@mistake(
    "cannot load the data position",
    CheckpointError,
    "Pass the loader to `save_ckpt`, too; or pass `dataloader=None` here.",
)
def a_position_that_was_not_saved(folder):
    strategy, model, *_ = saved(folder)
    strategy.load_ckpt(model, folder / "ckpts", dataloader=ResumableLoader(list(range(24)), 2))


@mistake(
    "consumed_samples",
    ConfigError,
    "Pass the samples consumed in this epoch.",
)
def more_samples_consumed_than_there_are(folder):
    strategy_for().setup_dataloader(list(range(8)), 2, consumed_samples=1000)


# --- rollout ----------------------------------------------------------------------------------------------------------

_section[0] = "Rollout"


@mistake(
    "engine_type is 'vlm', expected one of transformers",
    RolloutError,
    "Add a builder to `ENGINES`; see [rollout](rollout.md).",
)
def an_engine_that_is_not_registered(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.setup_inference_engine(engine_type="vlm", actor=model)


@mistake(
    "the package sglang is not installed",
    RolloutError,
    "Install it, or use the engine `transformers`.",
)
def an_engine_whose_package_is_missing(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    with patch.dict(sys.modules, {"sglang": None}):
        strategy.setup_inference_engine({"pretrain": "folder"}, "sglang", model)


@mistake(
    "setup_inference_engine",
    RolloutError,
    "Call `setup_inference_engine` before you send weights.",
)
def weights_without_an_engine(folder):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    strategy.update_engine_weights(model)


@mistake(
    "its mode is 0644, expected a regular file of this user with mode 0600",
    RolloutError,
    "Make a new secret with mode 0600: [engines](threat_model.md#engines).",
)
def a_secret_that_others_can_read(folder):
    path = folder / "secret"
    path.write_text("0" * 64)
    path.chmod(0o644)
    args = {"remote_engine_address": "localhost:1", "remote_engine_secret_file": str(path)}
    strategy_for().setup_inference_engine(args, "remote")


@mistake(
    "has another secret than",
    RolloutError,
    "Copy the secret's file, and pass it as `secret_file` (`remote_engine_secret_file`) at both ends.",
)
def an_engine_with_another_secret(folder):
    address = listen_at_free_port(secret="of another user, or on another host")
    strategy_for().setup_inference_engine({"remote_engine_address": address}, "remote")


@mistake(
    "cannot group ranks by engine: engine_tp_size is 3, expected a divisor of the number of ranks",
    ConfigError,
    "",
)
def engines_over_a_number_of_ranks_that_does_not_divide(folder):
    get_strategy({"engine_tp_size": 3}, train_batch_size=dist.get_world_size())


@mistake(
    "its weights have changed since the stream began, expected the weights of the call for all tensors",
    RolloutError,
    "Read the stream to its end before the next step.",
    quote="its weights have changed since the stream began",
)
def a_step_within_a_stream(folder):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    for _ in stream_weights(model, bucket_bytes=1):
        train(strategy, model, optimizer, scheduler, range(1))


# --- ranks ------------------------------------------------------------------------------------------------------------

_section[0] = "Ranks that are missing"


def impatient():
    """Return a strategy with a time-out of 5 s, and a model that it trains."""
    strategy = strategy_for(timeout_minutes=5 / 60)
    model, optimizer, _ = prepared(strategy)
    return strategy, model, optimizer


@mistake(
    "Rank 0 was in save_ckpt (all_gather), which every rank must call: rank 1 did not make this call",
    RuntimeError,
    "Call `save_ckpt` on every rank: all of them write.",
    quote="rank 1 did not make this call",
    loses_a_rank=True,
)
def a_save_on_rank_0_alone(folder):
    strategy, model, _ = impatient()
    if strategy.is_rank_0():
        strategy.save_ckpt(model, folder / "ckpts")
    time.sleep(12)


@mistake(
    "the ranks make different calls: rank 0 compares values with the other ranks in save_ckpt, rank 1 gathers the root "
    "unit of LlamaForCausalLM, expected the same calls in the same order on every rank. Call save_ckpt on every rank",
    StepError,
    "Call `save_ckpt` on every rank, without `if rank == 0`: all of them write.",
    quote="rank 0 compares values with the other ranks in save_ckpt",
)
def a_save_on_rank_0_alone_before_the_next_step(folder):
    strategy = strategy_for()
    model, optimizer, _ = prepared(strategy)
    if strategy.is_rank_0():
        strategy.save_ckpt(model, folder / "ckpts")
    train(strategy, model, optimizer, None, range(1))


@mistake(
    "rank 0 gathers the root unit of LlamaForCausalLM, rank 1 makes another collective call, or has failed",
    StepError,
    "Make the same calls in the same order on every rank.",
    quote="rank 1 makes another collective call, or has failed",
)
def a_forward_pass_on_rank_0_alone(folder):
    strategy = strategy_for()
    model, _, _ = prepared(strategy)
    if strategy.is_rank_0():
        loss_of("llama", model, batch_of("llama", 0, 0))
    else:
        strategy.save_model(model, None, folder / "out")


@mistake(
    "which every rank must call: rank 1 ended without this call",
    RuntimeError,
    "Give every rank the same number of batches, as `ResumableLoader` does.",
    quote="rank 1 ended without this call",
    loses_a_rank=True,
)
def ranks_with_unequal_numbers_of_steps(folder):
    strategy, model, optimizer = impatient()
    train(strategy, model, optimizer, None, range(2 - strategy.get_rank()))


@mistake(
    "which every rank must call: rank 1 ended with FileNotFoundError: [Errno 2] No such file or directory: 'x.txt'",
    RuntimeError,
    "Correct the error that the note quotes.",
    quote="rank 1 ended with FileNotFoundError",
    loses_a_rank=True,
)
def an_error_in_the_program_of_one_rank(folder):
    strategy, *_ = impatient()
    if strategy.get_rank() == 1:
        Path("x.txt").read_text(encoding="utf-8")
    strategy.all_reduce(1.0)
