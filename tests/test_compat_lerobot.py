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
from helpers.folders import tensors_in
from helpers.log_lines import Lines
from helpers.reference import full_parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.lerobot import checkpoints
from fsdp2_strategy.integrations.lerobot import script as compat
from fsdp2_strategy.integrations.lerobot.accelerator import Averages
from fsdp2_strategy.integrations.lerobot.script import Accelerator
from fsdp2_strategy.model.placeholders import full_tensor_of

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
    run = {"seed": 1, "steps": steps, "save_freq": save_freq, "save_checkpoint": True, "batch_size": 2, "log_freq": 200}
    lacking = {"policy": None, "ema": OFF, "env": None, "peft": None, "is_reward_model_training": False}
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


def save_after(cfg, count, folder):
    """Train on a number of micro-batches, and save."""
    accelerator, policy, optimizer, loader, schedule = built(cfg)
    for _, batch in zip(range(count), loader, strict=False):
        step_as_lerobot(accelerator, policy, optimizer, schedule, batch)
    path = folder / f"{count:06}"
    compat.save_checkpoint(path, count, cfg, policy, optimizer, schedule, accelerator=accelerator)
    return accelerator, policy, path


def resume(cfg, folder):
    cfg.checkpoint_path = folder / "last"
    accelerator, policy, optimizer, _, schedule = built(cfg)
    compat.resume_after_prepare(cfg, accelerator, policy, optimizer, schedule)
    return accelerator


@pytest.mark.ranks(2)
def test_the_calls_of_lerobots_loop_train_as_one_process_does():
    accelerator, policy, optimizer, loader, schedule = built(configuration())
    with Lines() as log:
        last = [step_as_lerobot(accelerator, policy, optimizer, schedule, batch) for batch in loader]
    assert last == [False, True] * 4
    # LeRobot's 8 steps are 4 optimizer steps.
    assert [line.partition(":")[0] for line in log.of_steps()] == (["step 1/4"] if dist.get_rank() == 0 else []), (
        log.lines
    )

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
        ({"ema": Namespace(enable=True), "peft": Namespace()}, "--ema.enable with --peft"),
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
    with pytest.raises(ConfigError, match=r"it lacks make_accelerator, set_fsdp_wrap_modules.*LeRobot 0.6.2 or newer"):
        compat.run(types.ModuleType("other"))


class RefusesAdapters(Namespace):
    def _validate_distributed(self):
        if self.peft is not None or self.env is not None or self.compile:
            raise ValueError("not supported under sharded training")


def test_the_names_of_a_script_are_replaced_while_it_runs_and_not_after():
    script, seen = types.ModuleType("script"), {}
    replaced = (
        "make_accelerator", "set_fsdp_wrap_modules", "finalize_sharded_policy", "save_checkpoint",
        "update_last_checkpoint", "resume_before_prepare", "resume_after_prepare", "eval_policy_all",
    )  # fmt: skip
    for name in replaced:
        setattr(script, name, name)
    script.TrainPipelineConfig = RefusesAdapters
    adapted = RefusesAdapters(peft="r=2", env="pusht", compile=False)

    def main():
        seen.update({name: getattr(script, name) for name in replaced})
        adapted._validate_distributed()
        with pytest.raises(ValueError, match="not supported"):
            RefusesAdapters(peft=None, env=None, compile=True)._validate_distributed()

    script.main = main
    compat.run(script)
    assert all(callable(function) for function in seen.values())
    assert seen["save_checkpoint"] is compat.save_checkpoint
    assert (adapted.peft, adapted.env) == ("r=2", "pusht")
    assert all(getattr(script, name) == name for name in replaced)
    with pytest.raises(ValueError, match="not supported"):
        adapted._validate_distributed()


def averaging(**options):
    return Namespace(**{
        "enable": True, "decay": None, "update_after_step": 0, "inv_gamma": 1.0, "power": 0.75, "min_decay": 0.0,
        "max_decay": 0.9999, "use_for_eval": True, **options,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.0, 1 - 2**-0.75, 1 - 3**-0.75]),
        ({"inv_gamma": 2.0, "max_decay": 0.3}, [0.0, 1 - 1.5**-0.75, 0.3]),
        ({"min_decay": 0.5, "update_after_step": 1}, [0.0, 0.0, 0.5]),
        ({"decay": 0.99}, [0.0, 0.99, 0.99]),
    ],
)
def test_the_decay_follows_the_schedule_of_lerobots_averages(options, expected):
    policy = small_policy()
    averages, found = Averages(policy, averaging(**options)), []
    reference = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for decay in expected:
        with torch.no_grad():
            for name, p in policy.named_parameters():
                p.add_(1.0)
                reference[name] = decay * reference[name] + (1 - decay) * p
        averages.update(policy)
        found.append(averages.decay)
    assert found == pytest.approx(expected)
    assert all(torch.allclose(averages.ema.averages[name], reference[name]) for name in reference)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_a_checkpoint_has_the_averaged_policy_and_a_resumed_run_continues_its_averages(tmp_path):
    cfg = configuration(ema=averaging())
    accelerator, policy, path = save_after(cfg, 4, tmp_path)
    assert not cfg.ema.enable, "the script would refuse it"
    assert accelerator.config.ema.enable
    assert accelerator.averages.steps == 2, "one for each optimizer step, not for each micro-batch"
    averages = {name: full_tensor_of(a) for name, a in accelerator.averages.ema.averages.items()}
    parameters, in_files = full_parameters(policy), tensors_in(path / "pretrained_model_ema")
    assert in_files.keys() == averages.keys()
    assert all(torch.equal(in_files[name], averages[name]) for name in averages)
    assert not all(torch.equal(in_files[name], parameters[name]) for name in averages)

    resumed = resume(configuration(ema=averaging()), tmp_path).averages
    assert resumed.steps == 2
    assert all(torch.equal(full_tensor_of(resumed.ema.averages[name]), averages[name]) for name in averages)


@pytest.mark.ranks(2)
def test_averages_that_a_checkpoint_lacks_start_from_its_weights(tmp_path):
    _, policy, path = save_after(configuration(), 2, tmp_path)
    weights = full_parameters(policy)
    assert not (path / "pretrained_model_ema").exists()

    started = resume(configuration(ema=averaging()), tmp_path).averages
    assert started.steps == 0
    assert all(torch.equal(full_tensor_of(a), weights[name]) for name, a in started.ema.averages.items())


@pytest.mark.ranks(2)
def test_averages_that_another_trainer_saved_continue_at_the_step_of_its_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(checkpoints, "_AVERAGED_STEPS", "unknown to this package")
        save_after(configuration(ema=averaging()), 4, tmp_path)
    assert resume(configuration(ema=averaging()), tmp_path).averages.steps == 2


class Robot(nn.Module):
    """A policy whose ``select_action`` calls another method, draws noise, and keeps a queue, as LeRobot's do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.reset()

    def reset(self):
        self.queue = []

    def forward(self, batch):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch

    def predict_action_chunk(self, batch):
        noise = torch.rand(1)
        return [self(batch["state"]) + 0 * noise + number for number in range(2)]

    def select_action(self, batch):
        if not self.queue:
            self.queue = self.predict_action_chunk(batch)
        return self.queue.pop(0)


def actions_of(policy):
    """Run an episode as LeRobot's rollout does."""
    policy.eval()
    policy.reset()
    with torch.inference_mode():
        actions = [policy.select_action({"state": torch.full((1, 4), float(number))}) for number in range(5)]
    policy.train()
    return torch.cat(actions)


@pytest.mark.ranks(2)
def test_ranks_that_wait_run_the_policy_that_rank_0_evaluates_alone():
    accelerator = Accelerator(configuration(env=Namespace(type="pusht"), ema=averaging(decay=0.5)))
    expected = actions_of(Robot().apply(lambda module: [p.data.mul_(1.5) for p in module.parameters(recurse=False)]))
    policy = Robot()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy, *_ = accelerator.prepare(policy, optimizer, DataLoader(micro_batches(), 2), None)
    with torch.no_grad():
        for average in accelerator.averages.ema.averages.values():
            average.mul_(1.5)
    weights, state = full_parameters(policy), torch.get_rng_state()
    if dist.get_rank() == 0:
        with accelerator.evaluation.leading(policy):
            assert torch.allclose(actions_of(policy), expected, atol=1e-6), "averaged weights are evaluated"
        with pytest.raises(ValueError, match="the environment failed"), accelerator.evaluation.leading(policy):
            raise ValueError("the environment failed")
    accelerator.wait_for_everyone()
    assert policy.training and len(policy.queue) == 1, "every rank has made the calls of rank 0"
    assert dist.get_rank() == 0 or torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, weights[n]) for n, t in full_parameters(policy).items())
    # the next step trains on all ranks, although the evaluation ran in inference mode
    with accelerator.accumulate(policy):
        accelerator.backward(policy(torch.ones(1, 4)).sum())
