"""What LeRobot's training script gets in place of accelerate's accelerator, without LeRobot.

`test_peers_lerobot_train` runs LeRobot's own script, where its source and Python 3.12 are.
"""

from __future__ import annotations

import json
import types
import warnings
from types import SimpleNamespace as Namespace

import pytest
import torch
import torch.distributed as dist
from helpers.reference import full_parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp2_strategy import ConfigError
from fsdp2_strategy.compat import lerobot as compat
from fsdp2_strategy.compat.lerobot import Accelerator

OFF = Namespace(enable=False)


def configuration(steps=8, save_freq=4, accumulation=2, precision="no", **more):
    """Return the part of LeRobot's configuration that the accelerator reads."""
    sharding = Namespace(
        reshard_after_forward=True, wrap_modules=None, min_num_params=None, cpu_offload=False, ignored_modules=None
    )
    settings = Namespace(
        mixed_precision=precision,
        gradient_accumulation=Namespace(steps=accumulation),
        fsdp=sharding,
        compile=Namespace(enabled=False),
        activation_checkpointing=Namespace(mode=Namespace(value="none")),
    )
    run = {"seed": 1, "steps": steps, "save_freq": save_freq, "save_checkpoint": True, "batch_size": 2}
    lacking = {"ema": OFF, "env": None, "peft": None, "is_reward_model_training": False}
    topology = Namespace(dp_shard=2, cp_size=1)
    writes_nothing = {"save_pretrained": lambda _folder: None}
    return Namespace(**{**run, **lacking, **writes_nothing, "accelerator": settings, "parallelism": topology, **more})


def small_policy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def micro_batches():
    torch.manual_seed(3)
    return TensorDataset(torch.randn(32, 4), torch.randn(32, 1))


def step_as_lerobot(accelerator, policy, optimizer, schedule, batch, factor=1.0):
    """Make the calls of ``update_policy`` of LeRobot 0.6, in its order."""
    with accelerator.accumulate(policy), accelerator.autocast():
        loss = nn.functional.mse_loss(policy(batch[0]), batch[1]) * factor
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LeRobot steps the schedule in each micro-batch
            schedule.step()
    return accelerator.sync_gradients


def built(cfg):
    accelerator, policy = Accelerator(cfg), small_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return accelerator, *accelerator.prepare(policy, optimizer, DataLoader(micro_batches(), 2), schedule)


@pytest.mark.ranks(2)
def test_the_calls_of_lerobots_loop_train_as_one_process_does():
    accelerator, policy, optimizer, loader, schedule = built(configuration())
    last = [step_as_lerobot(accelerator, policy, optimizer, schedule, batch) for batch in loader]
    assert last == [False, True] * 4

    plain = small_policy()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain_schedule = torch.optim.lr_scheduler.StepLR(reference, 1, 0.9)
    inputs, targets = micro_batches().tensors
    for number in range(8):
        for rank in range(2):
            rows = slice(4 * number + 2 * rank, 4 * number + 2 * rank + 2)
            (nn.functional.mse_loss(plain(inputs[rows]), targets[rows]) / 4).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
            reference.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain_schedule.step()
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    expected = full_parameters(plain)
    assert all(torch.allclose(t, expected[n], rtol=1e-4, atol=1e-6) for n, t in full_parameters(policy).items())


@pytest.mark.ranks(2)
def test_a_skipped_step_does_not_move_the_place_at_which_a_run_resumes(tmp_path):
    """LeRobot derives the data position from the micro-batches that were consumed."""
    cfg = configuration()
    accelerator, policy, optimizer, loader, schedule = built(cfg)
    for number, batch in zip(range(4), loader, strict=False):
        step_as_lerobot(accelerator, policy, optimizer, schedule, batch, factor=float("nan") if number < 2 else 1.0)
    compat.save_checkpoint(tmp_path / "000004", 4, cfg, policy, optimizer, schedule, accelerator=accelerator)
    cfg.checkpoint_path = tmp_path / "last"
    assert compat.resume_before_prepare(cfg) == 4
    recorded = json.loads((tmp_path / "000004/training_state/training_step.json").read_text())
    assert recorded["grad_accum_steps"] == 2
    saved = full_parameters(policy)

    accelerator, policy, optimizer, loader, schedule = built(cfg)
    compat.resume_after_prepare(cfg, accelerator, policy, optimizer, schedule)
    assert all(torch.equal(t, saved[n]) for n, t in full_parameters(policy).items())
    state = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), state), "the seed that the iterator draws is undone"


@pytest.mark.ranks(2)
def test_lerobots_options_are_settings_of_the_strategy():
    cfg = configuration(precision="bf16", accumulation=4)
    cfg.accelerator.fsdp.wrap_modules, cfg.accelerator.fsdp.reshard_after_forward = ["Linear"], False
    accelerator = Accelerator(cfg)
    config = accelerator.strategy.config
    assert config.bf16 and config.shard_size == 2 and config.block_class_names == ("Linear",)
    assert not config.reshard_after_forward and accelerator.strategy.accumulated_gradient == 4
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
    mean = accelerator.reduce(torch.tensor(float(dist.get_rank())), reduction="mean")
    assert mean.item() == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ema": Namespace(enable=True)}, "--ema.enable"),
        ({"env": Namespace(type="pusht")}, "--env.type"),
        ({"peft": Namespace()}, "--peft"),
        ({"is_reward_model_training": True}, "a reward model"),
        ({"parallelism": Namespace(dp_shard=2, cp_size=2)}, "context_parallel"),
        ({"save_freq": 3}, "expected multiples of 2.*--save_checkpoint=false"),
        ({"steps": 7}, "expected multiples of 2"),
        ({"precision": "fp8"}, "expected 'no', 'bf16' or 'fp16'"),
    ],
)
def test_what_is_not_supported_is_an_error_before_anything_starts(change, message):
    with pytest.raises(ConfigError, match=message):
        Accelerator(configuration(**change))


def test_a_script_that_is_not_lerobots_is_an_error():
    with pytest.raises(ConfigError, match=r"it lacks make_accelerator, set_fsdp_wrap_modules.*Install LeRobot 0.6"):
        compat.run(types.ModuleType("other"))


def test_the_names_of_a_script_are_replaced_while_it_runs_and_not_after():
    script, seen = types.ModuleType("script"), {}
    for name in compat._REPLACED:
        setattr(script, name, name)
    script.main = lambda: seen.update({name: getattr(script, name) for name in compat._REPLACED})
    compat.run(script)
    assert seen == compat._REPLACED
    assert all(getattr(script, name) == name for name in compat._REPLACED)
