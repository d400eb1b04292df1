"""VITRA's strategy: trains as the unsharded model does, and goes on exactly wherever it was stopped."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from flow_vla import FlowBlock, FlowVLA, Processor, make_backbone
from helpers.log_lines import Lines
from helpers.models import build
from helpers.reference import CountCollectives, full_parameters
from helpers.training import assert_same, full_state
from helpers.worlds import some
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler
from tqdm import tqdm
from train_vla import open_demonstrations, write_demonstrations

from fsdp2_strategy import StrategyConfig, list_checkpoints
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.errors import CheckpointError, ConfigError, DataError, OptimizerError, ShardError, StepError
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.integrations.lerobot.layout import TRAIN_CONFIG
from fsdp2_strategy.integrations.vitra import VLAFSDPStrategy, VLAMetrics, vla_parameter_groups
from fsdp2_strategy.integrations.vitra.summary import summary
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.state import model_state
from fsdp2_strategy.optim.step import _IS_STEPPING

SAMPLES = 20  # 5 micro-batches of 2 on 2 ranks: an odd number


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("offset", torch.linspace(0, 1, 8))

    def forward(self, x):
        return x + torch.tanh(self.inner(x) + self.offset.to(x.dtype))


class Policy(nn.Module):
    """A VLA without vision or language: what draws random numbers, has a backbone, and takes VITRA's arguments."""

    def __init__(self, noise=True):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), Block(), Block())
        self.cognition_token = nn.Parameter(torch.zeros(1, 8))
        self.action_model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2 if noise else 0.0), nn.Linear(8, 4))
        self.noise = noise

    def forward(
        self,
        rgb,
        input_ids,
        attention_mask,
        action_labels,
        action_masks,
        current_state_mask,
        current_state,
        fov,
        data_source,
    ):
        assert data_source == ["action"]
        x = rgb + input_ids * attention_mask + current_state * current_state_mask + fov
        error = self.action_model(self.backbone(x) + self.cognition_token) - action_labels
        error = (error + 0.1 * torch.randn_like(error) * self.noise).square() * action_masks
        return {"loss": error.mean(), "left_hand_6d": error[:, :2].mean(), "right_hand_joints": error[:, 2:].mean()}


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        random = torch.Generator().manual_seed(i)
        batch = {name: torch.randn(6, generator=random) for name in ("pixel_values", "current_state", "fov")}
        batch |= {"input_ids": torch.randint(0, 3, (6,), generator=random), "attention_mask": torch.ones(6)}
        batch |= {"current_state_mask": torch.ones(6), "action_masks": torch.ones(4)}
        return batch | {"actions": torch.randn(4, generator=random), "dataset_name": i}


class Stopped(Exception):
    """What kills a run in a test."""


@dataclass
class Recorder:
    """A tracker that remembers, and kills the run after some steps."""

    stop_after: int | None = None
    records: dict[int, dict] = field(default_factory=dict)

    def write_hyperparameters(self): ...

    def write(self, global_step, metrics):
        if self.stop_after is not None and global_step > self.stop_after:
            raise Stopped
        self.records[global_step] = {k: v for k, v in metrics.items() if not k.endswith("Step Time")}

    def finalize(self): ...


def strategy_of(vla, **options):
    defaults = {
        "device_id": 0,
        "stage": "test",
        "epochs": 3,
        "max_steps": None,
        "global_batch_size": 8,
        "per_device_batch_size": 8 // dist.get_world_size() // 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "backbone-freeze-warmup",
        "warmup_ratio": 0.25,
        "llm_freeze_step": 2,
        "action_model_learning_rate": 0.03,
        "enable_mixed_precision_training": False,
    }
    return VLAFSDPStrategy(vla, **{**defaults, **options})


def set_up(run_dir, *, seed=0, vla=None, blocks=(Block,), **options):
    torch.manual_seed(seed)
    strategy = strategy_of(vla or Policy(), **options)
    strategy.run_setup(run_dir, SAMPLES, set(blocks), None)
    return strategy


def metrics_for(run_dir, recorder, accumulation=2):
    return VLAMetrics((recorder,), "run", run_dir, {}, grad_accumulation_steps=accumulation, window_size=accumulation)


def resumable():
    return ResumableLoader(Samples(), 4, seed=3)


def plain():
    sampler = DistributedSampler(Samples(), seed=3)
    return DataLoader(Samples(), 2, sampler=sampler)


def shuffled():
    return DataLoader(Samples(), 4, shuffle=True)


def in_workers():
    sampler = RandomSampler(Samples(), generator=torch.Generator().manual_seed(dist.get_rank()))
    return DataLoader(
        Samples(), batch_sampler=BatchSampler(sampler, 4, drop_last=False), num_workers=1, persistent_workers=True
    )


class Stateful:
    """A loader of someone else's, which draws random numbers and knows its place."""

    def __init__(self):
        self.at, self.random = 0, torch.Generator().manual_seed(dist.get_rank())

    def __len__(self):
        return 5

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            picked = torch.randint(0, SAMPLES, (2,), generator=self.random).tolist()
            yield torch.utils.data.default_collate([Samples()[i] for i in picked])
        self.at = 0

    def state_dict(self):
        self.state = {"at": self.at, "random": self.random.get_state()} | getattr(self, "state", {})
        self.state.update(at=self.at, random=self.random.get_state())  # the same object each time
        return self.state

    def load_state_dict(self, state):
        self.at = state["at"]
        self.random.set_state(state["random"])


def micro_batch(strategy, batch):
    loss = strategy.vla(**strategy.forward_inputs(batch))["loss"]
    strategy.backward(loss, strategy.vla, strategy.optimizer)
    strategy.optimizer_step(strategy.optimizer, strategy.vla, strategy.lr_scheduler)


LOADERS = {"resumable": resumable, "plain": plain, "shuffled": shuffled, "in workers": in_workers, "stateful": Stateful}


def run(run_dir, loader, *, stop_after=None, seed=0, save_interval=2, **options):
    """Train until the end, or until it is killed; go on where the directory is."""
    strategy = set_up(run_dir, seed=seed, **options)
    recorder = Recorder(stop_after)
    strategy.load_optimizer_and_scheduler(run_dir)
    metrics = metrics_for(run_dir, recorder, strategy.grad_accumulation_steps)
    with pytest.raises(StepError, match="Stopped") if stop_after is not None else contextlib.nullcontext():
        assert strategy.run_training(LOADERS[loader](), metrics, save_interval=save_interval)
    strategy.wait_for_checkpoint()
    return strategy, recorder.records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_terminal", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_loop_shows_its_steps_once(tmp_path, on_terminal):
    shown = []
    with contextlib.ExitStack() as patches, Lines() as log:
        patches.enter_context(patch.object(sys.stderr, "isatty", lambda: on_terminal))
        patches.enter_context(patch("fsdp2_strategy.tracking.step_meter.SECONDS_OF_BAR", 0.0))
        patches.enter_context(patch.object(Progress, "describe", lambda _, status: shown.append(status)))
        config = StrategyConfig(log_every_steps=2)
        strategy, _ = run(tmp_path, "resumable", save_interval=None, config=config)
        taken = strategy.global_step(strategy.vla)
        strategy.close()
    steps = [line.partition(" loss")[0] for line in log.of_steps()]
    total = strategy.num_training_steps
    if on_terminal:
        assert steps == [] and "samples/s" in shown[-1] and "Global Step" in shown[-1]
    else:
        lines = [1, *range(2, taken + 1, 2), *([taken] if taken % 2 else [])]
        expected = [f"{strategy.stage}: step {step}/{total}:" for step in lines]
        assert steps == (expected if dist.get_rank() == 0 else [])
        assert not any("samples/s" in status for status in shown)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("micro_batches", "loader"),
    [
        (1, "resumable"),
        *(pytest.param(1, loader, marks=pytest.mark.full) for loader in LOADERS if loader != "resumable"),
        *(pytest.param(2, loader, marks=pytest.mark.full) for loader in LOADERS if loader != "in workers"),
    ],
)
def test_a_run_that_is_killed_goes_on_with_the_same_losses(tmp_path, loader, micro_batches):
    options = {"per_device_batch_size": 2, "global_batch_size": 4 * micro_batches}
    whole, expected = run(tmp_path / "whole", loader, **options)
    total = 15 // micro_batches
    assert dist.get_rank() or list(expected) == list(range(1, total + 1))
    seen = {}
    for seed, stop_after in ((0, 3), (7, 5), (8, None)):  # in the first epoch, behind an epoch's end
        strategy, records = run(tmp_path / "killed", loader, stop_after=stop_after, seed=seed, **options)
        for step, record in records.items():
            assert record == expected[step], f"step {step} after a kill behind step {stop_after}"
        seen |= records
    assert seen == expected
    assert_same(full_state(strategy.vla, strategy.optimizer), full_state(whole.vla, whole.optimizer))
    assert [c.tag for c in list_checkpoints(tmp_path / "killed" / "checkpoints")] == [
        c.tag for c in list_checkpoints(tmp_path / "whole" / "checkpoints")
    ]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_run_in_lerobots_layout_resumes_with_the_same_losses(tmp_path):
    layout = LeRobotLayout(total_steps=7, batch_size=2, gradient_accumulation_steps=2, train_config={"seed": 3})
    options = {"per_device_batch_size": 2, "global_batch_size": 8, "layout": layout}
    whole, expected = run(tmp_path / "whole", "resumable", **options)
    run(tmp_path / "killed", "resumable", stop_after=5, **options)
    strategy, records = run(tmp_path / "killed", "resumable", seed=7, **options)
    assert records == {step: record for step, record in expected.items() if step > 5}
    assert_same(full_state(strategy.vla, strategy.optimizer), full_state(whole.vla, whole.optimizer))
    checkpoints = tmp_path / "killed" / "checkpoints"
    # The epochs end within steps 3 and 5, and after step 7; the newest three are kept, and each step has one name.
    assert [c.tag for c in list_checkpoints(checkpoints)] == ["000005", "000006", "000007"]
    assert (checkpoints / "last").readlink().name == "000007"
    assert {p.name for p in (checkpoints / "last/pretrained_model").iterdir()} == {"model.safetensors", TRAIN_CONFIG}
    step = json.loads((checkpoints / "last/training_state/training_step.json").read_text())
    assert (step["step"], step["batch_size"], step["grad_accum_steps"]) == (14, 2, 2)
    assert json.loads((checkpoints / "last/training_state/meta.json").read_text()) == {"epoch": 2, "global_step": 7}


@pytest.mark.ranks(2)
def test_a_layout_for_another_batch_size_or_accumulation_is_an_error():
    for batch_size, accumulated in ((4, 2), (2, 1)):
        layout = LeRobotLayout(total_steps=7, batch_size=batch_size, gradient_accumulation_steps=accumulated)
        with pytest.raises(ConfigError, match=r"of layout is [14], expected 2, as this strategy trains"):
            strategy_of(Policy(), layout=layout)


@pytest.mark.ranks(2)
def test_micro_batches_that_fill_no_step_are_carried_over_an_epochs_end(tmp_path):
    model = Policy(noise=False)
    unsharded = copy.deepcopy(model)
    strategy = set_up(tmp_path, vla=model, global_batch_size=8, per_device_batch_size=2)
    recorder = Recorder()
    strategy.run_training(resumable(), metrics_for(tmp_path, recorder))
    # The same in plain torch: 15 micro-batches of all ranks in three epochs make 7 steps of two.
    groups = vla_parameter_groups(unsharded, learning_rate=0.01, weight_decay=0.1, action_model_learning_rate=0.03)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    loader = ResumableLoader(Samples(), 4, seed=3, dp_rank=0, dp_size=1)
    batches = [batch for _ in range(3) for batch in loader]
    assert len(batches) == 15
    for step in range(7):
        for group in optimizer.param_groups[:2]:
            group["lr"] = 0.0 if step < 2 else 0.01
        for batch in batches[2 * step : 2 * step + 2]:
            (unsharded(**strategy.forward_inputs(batch))["loss"] / 2).backward()
        torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in full_parameters(strategy.vla).items():
        torch.testing.assert_close(parameter, named_parameters(unsharded)[name].detach(), rtol=2e-4, atol=2e-5)
    assert strategy.global_step(strategy.vla) == 7
    assert dist.get_rank() or len(recorder.records) == 7


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_bar_counts_optimizer_steps_from_where_the_run_goes_on(tmp_path):
    bars = []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(**options, file=io.StringIO())
            bars.append((self, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp2_strategy.distributed.progress.tqdm", Bar)
        patch.setattr(sys.stderr, "isatty", lambda: True)
        for stop_after in (3, None):
            run(tmp_path, "resumable", stop_after=stop_after, per_device_batch_size=2)
    bars = [(bar, options) for bar, options in bars if options["unit"] == "step"]
    assert [(options["total"], options["initial"]) for _, options in bars] == [(7, 0), (7, 2)]
    assert all(options["disable"] == (dist.get_rank() > 0) for _, options in bars)
    assert dist.get_rank() or [bar.n for bar, _ in bars] == [3, 7]


@pytest.mark.ranks(2)
def test_checkpoints_have_vitras_names_and_facts_and_are_rotated(tmp_path):
    strategy = set_up(tmp_path, per_device_batch_size=4, max_num=4)
    strategy.run_training(ResumableLoader(Samples(), 8), metrics_for(tmp_path, Recorder(), 1), save_interval=2)
    found = list_checkpoints(tmp_path / "checkpoints")
    # Three epochs of 3, 2 and 3 batches of 8: 20 samples an epoch, each batch in the epoch in which it begins.
    names = ["epoch=0-step=2", "epoch=0-step=3.end", "epoch=1-step=4", "epoch=1-step=5.end", "epoch=2-step=6"]
    names += ["epoch=2-step=8", "epoch=2-step=8.end"]
    assert [c.tag for c in found] == [f"{name}.ckpt" for name in names[-4:]]
    assert json.loads((found[-1].path / "meta.json").read_text()) == {"epoch": 2, "global_step": 8}
    assert (found[-1].path / "optimizer").is_dir() and found[-1].step == 8


@pytest.mark.ranks(2)
def test_a_run_ends_at_max_steps_with_a_checkpoint_and_has_nothing_left_then(tmp_path):
    options = {"max_steps": 4, "epochs": 100, "per_device_batch_size": 4}
    strategy = set_up(tmp_path, **options)
    assert strategy.num_training_steps == 4
    strategy.run_training(ResumableLoader(Samples(), 8), metrics_for(tmp_path, Recorder(), 1), save_interval=None)
    assert [c.tag for c in list_checkpoints(tmp_path / "checkpoints")] == [
        "epoch=0-step=3.end.ckpt",
        "epoch=1-step=4.ckpt",
    ]
    again = set_up(tmp_path, **options)
    assert again.load_optimizer_and_scheduler(tmp_path) == {"epoch": 1, "global_step": 4}
    recorder = Recorder()
    assert again.run_training(ResumableLoader(Samples(), 8), metrics_for(tmp_path, recorder, 1))
    assert not recorder.records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "full-shard", "shard_size": 1}])
def test_a_strategy_explains_what_its_setup_then_does(options, tmp_path):
    strategy = strategy_of(Policy(), **options)
    text = strategy.explain(auto_wrap_policy_modules={Block}, checkpointing_policy_modules=[Block], file=io.StringIO())
    config = strategy.config
    strategy.run_setup(tmp_path, SAMPLES, {Block}, [Block])
    assert config.block_class_names == () and strategy.config.block_class_names == ("Block",)
    blocks = [m for m in strategy.vla.modules() if isinstance(m, Block)]
    units = [m for m in strategy.vla.modules() if isinstance(m, FSDPModule)]
    assert all(isinstance(block, FSDPModule) for block in blocks)
    assert "blocks     from the class names Block" in text and f"recomputed {len(blocks)} modules" in text
    rows = text.split("parameters   gathered\n")[1].split("\n\n")[0].splitlines()
    assert sum(int(m[1]) if (m := re.search(r"\((\d+) equal\)", row)) else 1 for row in rows) == len(units)
    assert f"each parameter split over {1 if options else 2}" in text
    assert ("stay gathered from forward to backward: the root unit" if options else ": all units") in text
    strategy.close()


@pytest.mark.ranks(2)
def test_steps_follow_from_whole_batches_of_examples(tmp_path):
    for examples, steps in ((16, 6), (17, 9), (24, 9)):
        torch.manual_seed(0)
        strategy = strategy_of(Policy(), lr_scheduler_type="warmup_constant")
        strategy.run_setup(tmp_path, examples, {Block}, None)
        assert strategy.num_training_steps == steps
        assert strategy.optimizer.param_groups[0]["lr"] == 0.0
        for _ in range(int(steps * 0.25)):
            assert strategy.optimizer.param_groups[0]["lr"] < 0.01
            model_state(strategy.optimizer).set(_IS_STEPPING, True)  # as in optimizer_step
            strategy.optimizer.step()
            strategy.lr_scheduler.step()
        assert strategy.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_freeze_holds_from_the_first_step_and_no_resume_repeats_it(tmp_path):
    def backbone(strategy):
        return {n: p for n, p in full_parameters(strategy.vla).items() if n.startswith("backbone")}

    options = {"llm_freeze_step": 4, "per_device_batch_size": 4}
    before = backbone(set_up(tmp_path / "other", **options))
    strategy = set_up(tmp_path, **options)
    recorder = Recorder()
    for max_steps in (2, 4, 7):
        strategy = set_up(tmp_path, max_steps=max_steps, **options)
        strategy.load_optimizer_and_scheduler(tmp_path)
        strategy.run_training(ResumableLoader(Samples(), 8), metrics_for(tmp_path, recorder, 1), save_interval=None)
        if max_steps <= 4:
            assert_same(backbone(strategy), before)
        else:
            assert all(not torch.equal(p, before[n]) for n, p in backbone(strategy).items())
    if dist.get_rank() == 0:
        keys = "VLA Train/Backbone Learning Rate", "VLA Train/Action Model Learning Rate"
        rates = [tuple(record[key] for key in keys) for record in recorder.records.values()]
        assert rates == [(0.0, 0.03)] * 3 + [(0.01, 0.03)] * 4, "what the next step has, as VITRA reports it"


@pytest.mark.full
@pytest.mark.ranks(2)
def test_trainable_weights_alone_are_saved_where_the_caller_says_so(tmp_path):
    def frozen():
        torch.manual_seed(0)
        vla = Policy()
        vla.backbone.requires_grad_(False)
        return vla

    whole, expected = run_frozen(tmp_path / "whole", frozen())
    for stop_after in (4, None):
        strategy, records = run_frozen(tmp_path / "killed", frozen(), stop_after=stop_after)
        assert all(record == expected[step] for step, record in records.items())
    assert_same(full_state(strategy.vla, strategy.optimizer), full_state(whole.vla, whole.optimizer))
    assert dist.get_rank() or {r["VLA Train/Backbone Learning Rate"] for r in expected.values()} == {0.0}
    newest = list_checkpoints(tmp_path / "killed" / "checkpoints")[-1].path
    assert (newest / "trainable").is_dir() and not (newest / "model").exists()


def run_frozen(run_dir, vla, stop_after=None):
    strategy = set_up(run_dir, vla=vla)
    strategy.load_optimizer_and_scheduler(run_dir)
    recorder = Recorder(stop_after)
    with pytest.raises(StepError) if stop_after else contextlib.nullcontext():
        strategy.run_training(resumable(), metrics_for(run_dir, recorder), save_interval=2, save_full_model=False)
    strategy.wait_for_checkpoint()
    return strategy, recorder.records


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_true_vla_trains_and_goes_on_with_its_frozen_backbone_from_its_folder(tmp_path):
    if dist.get_rank() == 0:
        make_backbone(tmp_path / "backbone")
        write_demonstrations(tmp_path / "data", episodes=2)
    dist.barrier()
    folder = tmp_path / "backbone"

    def start(stop_after=None, run_dir="killed"):
        strategy = VLAFSDPStrategy(
            flow_vla(folder, frozen=True), 0, "test", 9, 6, 8, 4, 1e-3, 0.01, 1.0, "constant", 0.0, llm_freeze_step=0
        )
        data = open_demonstrations(tmp_path / "data")
        strategy.run_setup(tmp_path / run_dir, 24, {"GemmaDecoderLayer", "SiglipEncoderLayer", FlowBlock}, {FlowBlock})
        strategy.load_optimizer_and_scheduler(tmp_path / run_dir)
        recorder = Recorder(stop_after)
        loader = ResumableLoader(data, 8, seed=1, collate_fn=Processor(data.metadata.stats).collate)
        with pytest.raises(StepError) if stop_after else contextlib.nullcontext():
            strategy.run_training(loader, metrics_for(run_dir, recorder, 1), save_interval=2, save_full_model=False)
        data.close()
        return strategy, recorder.records

    def metrics_for(run_dir, recorder, accumulation):
        return VLAMetrics((recorder,), "run", tmp_path / run_dir, {}, grad_accumulation_steps=accumulation)

    whole, expected = start(run_dir="whole")
    start(stop_after=4)
    strategy, records = start()
    assert dist.get_rank() or (set(records) == {5, 6} and all(r == expected[s] for s, r in records.items()))
    assert_same(full_state(strategy.vla, strategy.optimizer), full_state(whole.vla, whole.optimizer))
    newest = list_checkpoints(tmp_path / "killed" / "checkpoints")[-1]
    frozen_bytes = sum(p.numel() * 2 for p in whole.vla.backbone.parameters())
    trained_bytes = sum(p.numel() * 4 * 3 for p in whole.vla.parameters() if p.requires_grad)  # with Adam's moments
    assert newest.total_bytes - trained_bytes < 1e5 < frozen_bytes


def flow_vla(folder, *, frozen):
    torch.manual_seed(0)
    vla = FlowVLA.on(folder)
    vla.backbone.requires_grad_(not frozen)
    return vla


# --- sharding and precision ----------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharding_strategy", some(["shard-grad-op", "full-shard"], ["full-shard"]))
@pytest.mark.parametrize("by_node", some([False, True], [True]))
def test_both_strengths_shard_within_a_node_and_replicate_across(tmp_path, sharding_strategy, by_node):
    model = Policy(noise=False)
    unsharded = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        if by_node:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
        shard_size = None if by_node else 2
        strategy = set_up(
            tmp_path,
            vla=model,
            sharding_strategy=sharding_strategy,
            shard_size=shard_size,
            lr_scheduler_type="constant",
        )
    mesh = strategy.vla.backbone[1].inner.weight.device_mesh
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.shape == (2, 2)
    batch = next(iter(DataLoader(Samples(), SAMPLES)))
    own = {name: value[5 * dist.get_rank() : 5 * dist.get_rank() + 5] for name, value in batch.items()}
    with CountCollectives() as counted:
        micro_batch(strategy, own)
    gathers = 3 if sharding_strategy == "shard-grad-op" else 5  # two blocks and the root; the blocks twice
    assert counted.counts["allgather_base"] == gathers
    assert counted.counts["reduce_scatter_base"] == 3 and not counted.counts["allreduce"], dict(counted.counts)
    unsharded(**strategy.forward_inputs(batch))["loss"].div(2).backward()
    micro_batch(strategy, own)
    groups = vla_parameter_groups(unsharded, learning_rate=0.01, weight_decay=0.1, action_model_learning_rate=0.03)
    unsharded(**strategy.forward_inputs(batch))["loss"].div(2).backward()
    torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 1.0)
    torch.optim.AdamW(groups, betas=(0.9, 0.999)).step()
    for name, parameter in full_parameters(strategy.vla).items():
        torch.testing.assert_close(parameter, named_parameters(unsharded)[name].detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("full", [False, True])
def test_micro_batches_are_never_summed_in_half_precision(tmp_path, full):
    """What waits for its all-reduce is kept in the dtype of reduction: bf16 is reduced at once."""
    strategy = set_up(tmp_path, shard_size=2, enable_mixed_precision_training=True, reduce_in_full_precision=full)
    batch = next(iter(DataLoader(Samples(), 5)))
    with CountCollectives() as counted:
        micro_batch(strategy, batch)
    assert counted.counts["allreduce"] == (0 if full else 3)
    assert all(p.grad is None if full else p.grad.dtype == torch.float32 for p in strategy.vla.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "computed", "reduced"),
    [
        pytest.param({}, torch.bfloat16, torch.bfloat16, marks=pytest.mark.full),
        ({"reduce_in_full_precision": True}, torch.bfloat16, torch.float32),
        ({"enable_mixed_precision_training": False}, torch.float32, torch.float32),
        pytest.param({"mixed_precision_dtype": torch.float32}, torch.float32, torch.float32, marks=pytest.mark.full),
    ],
)
def test_precision_is_as_asked(tmp_path, options, computed, reduced):
    strategy = set_up(tmp_path, **{"enable_mixed_precision_training": True, **options})
    parameter = strategy.vla.backbone[1].inner.weight
    assert parameter.dtype == torch.float32, "masters"
    assert {buffer.dtype for buffer in strategy.vla.buffers()} == {reduced}
    seen = []
    strategy.vla.backbone[1].inner.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    strategy.run_training(resumable(), metrics_for(tmp_path, Recorder()), save_interval=None, epoch_save_interval=None)
    assert set(seen) == {computed}
    assert {group._reduce_dtype or computed for group in parameter_groups(strategy.vla)} == {reduced}
    torch.manual_seed(0)
    vla = Policy()
    vla.backbone[1].offset = vla.backbone[2].offset
    shared = set_up(tmp_path, vla=vla).vla.backbone
    assert shared[1].offset is shared[2].offset
    kept = set_up(tmp_path, cast_buffers=False)
    assert {buffer.dtype for buffer in kept.vla.buffers()} == {torch.float32}


class Normalizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.tensor([998.4]))


@pytest.mark.ranks(1)
def test_statistics_of_a_normaliser_keep_their_dtype(tmp_path):
    for cast, kept in ((True, torch.float32), (False, torch.float32), ("all", torch.bfloat16)):
        torch.manual_seed(0)
        vla = Policy()
        vla.scaler, vla.norm = Normalizer(), nn.BatchNorm1d(2)
        vla.register_buffer("action_mean", torch.tensor([998.4]))
        vla.register_buffer("proprio_q01", torch.tensor([998.4]))
        strategy = set_up(tmp_path, vla=vla, enable_mixed_precision_training=True, cast_buffers=cast)
        dtypes = {name: buffer.dtype for name, buffer in strategy.vla.named_buffers() if buffer.is_floating_point()}
        statistics = ["scaler.offset", "norm.running_mean", "norm.running_var", "action_mean", "proprio_q01"]
        assert {dtypes.pop(name) for name in statistics} == {kept}
        assert set(dtypes.values()) == {torch.bfloat16 if cast else torch.float32}
    with pytest.raises(ConfigError, match="cast_buffers is 'some'"):
        strategy_of(Policy(), cast_buffers="some")


@pytest.mark.ranks(2)
def test_activations_of_the_named_classes_are_recomputed_and_nothing_changes(tmp_path):
    runs = {}
    for recompute in (True, False):
        torch.manual_seed(0)
        strategy = strategy_of(Policy(), enable_gradient_checkpointing=recompute)
        calls = []
        strategy.vla.backbone[1].inner.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        strategy.run_setup(tmp_path, SAMPLES, {Block}, [Block])
        recorder = Recorder()
        strategy.run_training(resumable(), metrics_for(tmp_path, recorder), None, None)
        runs[recompute] = (recorder.records, len(calls))
    assert runs[True][0] == runs[False][0] and runs[True][1] == 2 * runs[False][1]


@pytest.mark.ranks(2)
def test_a_frozen_backbone_costs_no_optimizer_state_and_no_gradient_traffic(tmp_path):
    counts = {}
    for frozen in (False, True):
        torch.manual_seed(0)
        vla = Policy()
        vla.backbone.requires_grad_(not frozen)
        strategy = set_up(tmp_path, vla=vla, sharding_strategy="full-shard")
        batch = next(iter(resumable()))
        with CountCollectives() as counted:
            for _ in range(2):
                micro_batch(strategy, batch)
        counts[frozen] = counted.counts
        names = {id(p): name for name, p in named_parameters(strategy.vla).items()}
        with_state = {names[id(p)] for p in strategy.optimizer.state}
        assert with_state == {n for n in names.values() if not (frozen and n.startswith("backbone"))}
    assert counts[False]["reduce_scatter_base"] == 2 * 3, "two blocks and the root"
    assert counts[True]["reduce_scatter_base"] == 2 * 1, "the root alone"
    assert counts[True]["allgather_base"] < counts[False]["allgather_base"], "backward gathers nothing that is frozen"


# --- checkpoints of the original -----------------------------------------------------------------------------------


def as_vitra_trains(model, steps, rates):
    """Train as the original does, on the whole batch: without sharding, and without decay."""
    groups = vla_parameter_groups(
        model, learning_rate=0.01, weight_decay=0.1, action_model_learning_rate=0.03, as_flattened=True
    )
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for step in steps:
        rates(optimizer, step)
        model(**inputs_of(next(iter(DataLoader(Samples(), 8)))))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield optimizer


def inputs_of(batch):
    renamed = {"pixel_values": "rgb", "actions": "action_labels"}
    given = {renamed.get(name, name): value for name, value in batch.items() if name != "dataset_name"}
    return given | {"data_source": ["action"]}


def freeze_two(optimizer, step):
    for group in optimizer.param_groups[:2]:
        group["lr"] = 0.0 if step < 2 else 0.01


@pytest.mark.ranks(2)
def test_a_checkpoint_of_the_original_goes_on_with_trust(tmp_path):
    torch.manual_seed(0)
    original = Policy(noise=False)
    training = as_vitra_trains(original, range(5), freeze_two)
    optimizer = [next(training) for _ in range(3)][-1]
    folder = tmp_path / "checkpoints" / "epoch=1-step=3.end.ckpt"
    if dist.get_rank() == 0:
        write_as_vitra(folder, original, optimizer, epoch=1, step=3)
    dist.barrier()
    list(training)

    strategy = set_up(
        tmp_path, vla=Policy(noise=False), seed=5, per_device_batch_size=4, as_flattened=True, max_steps=5, epochs=9
    )
    with pytest.raises(CheckpointError, match="trust=True"):
        strategy.load_optimizer_and_scheduler(folder)
    lacking = tmp_path / "lacking" / "epoch=1-step=3.ckpt"
    if dist.get_rank() == 0:
        write_as_vitra(lacking, original, optimizer, epoch=1, step=3, without="action_model")
        write_as_vitra(folder.with_name("epoch=1-step=3.ckpt"), original, optimizer, epoch=1, step=3)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"lack 4 names \(action_model\.0\.weight"):
        strategy.load_optimizer_and_scheduler(lacking, trust=True)
    strategy.load_optimizer_and_scheduler(tmp_path, trust=True)  # twice, which brings the schedule along once
    assert strategy._resumed.path == folder, "of two of one step, that of the epoch's end"
    assert strategy.load_optimizer_and_scheduler(folder, trust=True) == {"epoch": 1, "global_step": 3}
    recorder = Recorder()
    own = [next(iter(DataLoader(Samples(), 4, sampler=range(4 * dist.get_rank(), 8))))]
    strategy.run_training(own, metrics_for(tmp_path, recorder, 1), None, None, start_epoch=2, start_global_step=3)
    if dist.get_rank() == 0:
        assert [(step, r["VLA Train/Epoch"]) for step, r in recorder.records.items()] == [(4, 2), (5, 3)]
        assert recorder.records[4]["VLA Train/Backbone Learning Rate"] == 0.01, "it does not freeze again"
    for name, parameter in full_parameters(strategy.vla).items():
        torch.testing.assert_close(parameter, named_parameters(original)[name].detach(), rtol=2e-4, atol=2e-5)


def write_as_vitra(folder, model, optimizer, *, epoch, step, without="nothing"):
    folder.mkdir(parents=True)
    names = {id(p): name for name, p in model.named_parameters()}
    state = {names[id(p)]: values for p, values in optimizer.state.items() if without not in names[id(p)]}
    listed = [[name for p in g["params"] if without not in (name := names[id(p)])] for g in optimizer.param_groups]
    groups = [{**g, "params": own} for g, own in zip(optimizer.param_groups, listed, strict=True)]
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
    (folder / "meta.json").write_text(json.dumps({"epoch": epoch, "global_step": step}))


@pytest.mark.ranks(2)
def test_a_checkpoint_of_the_original_has_the_names_of_an_earlier_transformers(tmp_path):
    class Vla(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = build("llava")
            self.action_model = nn.Linear(32, 4)

    torch.manual_seed(0)
    original = Vla()
    optimizer = torch.optim.AdamW(vla_parameter_groups(original, learning_rate=0.01, weight_decay=0.1))
    for parameter in original.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    folder = tmp_path / "epoch=1-step=3.ckpt"
    if dist.get_rank() == 0:
        write_as_vitra(folder, original, optimizer, epoch=1, step=3)
        with_earlier_names(folder)
    dist.barrier()

    torch.manual_seed(1)
    strategy = strategy_of(Vla())
    strategy.run_setup(tmp_path, SAMPLES)
    strategy.load_optimizer_and_scheduler(folder, trust=True)
    assert_same(full_state(strategy.vla, strategy.optimizer), full_state(original, optimizer))


def with_earlier_names(folder):
    """Give the tensors of a checkpoint with Llava the names that transformers 4.47 gave them."""

    def earlier(name):
        name = name.replace("vision_tower.vision_model.", "vision_tower.")  # as transformers 5.5 has it
        for now, then in (
            ("backbone.model.language_model.", "backbone.language_model.model."),
            ("backbone.lm_head.", "backbone.language_model.lm_head."),
            ("backbone.model.", "backbone."),
            ("vision_tower.", "vision_tower.vision_model."),
        ):
            name = name.replace(now, then)
        return name

    weights = torch.load(folder / "weights.pt")
    torch.save({earlier(name): tensor for name, tensor in weights.items()}, folder / "weights.pt")
    optimizer = torch.load(folder / "optimizer.pt")
    state = {earlier(name): values for name, values in optimizer["state"].items()}
    groups = [{**group, "params": [earlier(name) for name in group["params"]]} for group in optimizer["param_groups"]]
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
    assert "backbone.language_model.model.embed_tokens.weight" in state


# --- stops and errors ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_run_that_is_told_to_stop_saves_and_says_that_it_is_not_through(tmp_path):
    class Terminated(Recorder):
        def write(self, global_step, metrics):
            if global_step == 3 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    with set_up(tmp_path) as strategy:
        before = signal.getsignal(signal.SIGTERM)
        metrics = metrics_for(tmp_path, Terminated())
        assert not strategy.run_training(resumable(), metrics, save_interval=None, epoch_save_interval=None)
        with pytest.raises(ConfigError, match="SIGTERM stopped this run before its end"):
            strategy.run_training(resumable(), metrics)
        assert signal.getsignal(signal.SIGTERM) is before
    assert [c.tag for c in list_checkpoints(tmp_path / "checkpoints")] == ["epoch=1-step=3.ckpt"]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_what_cannot_be_done_is_said_on_every_rank(tmp_path):
    for error, options in (
        (ConfigError, {"sharding_strategy": "full_shard"}),
        (ConfigError, {"mixed_precision_dtype": torch.float16}),
        (ConfigError, {"max_steps": 0}),
        (ConfigError, {"epochs": 0}),
        (ConfigError, {"global_batch_size": 7}),
        (ConfigError, {"config": StrategyConfig(sequence_parallel_size=2)}),
        (ConfigError, {"config": StrategyConfig(tensor_parallel_size=2)}),
        (OptimizerError, {"lr_scheduler_type": "linear-warmup"}),
    ):
        with pytest.raises(error, match="expected"):
            strategy_of(Policy(), **options)
    torch.manual_seed(0)
    with pytest.raises(ShardError, match="'Conv2d'"):
        strategy_of(Policy()).run_setup(tmp_path, SAMPLES, {nn.Conv2d}, None)

    strategy = set_up(tmp_path)
    metrics = metrics_for(tmp_path, Recorder())
    with pytest.raises(CheckpointError, match="does not exist, expected the checkpoint that its name means"):
        strategy.load_optimizer_and_scheduler(tmp_path / "checkpoints" / "epoch=0-step=9.ckpt")
    with pytest.raises(CheckpointError, match="is neither a committed checkpoint nor the directory of a run"):
        strategy.load_optimizer_and_scheduler(tmp_path / "misspelt")
    assert strategy.load_optimizer_and_scheduler(tmp_path) is None
    strategy.run_training(resumable(), metrics, save_interval=2, epoch_save_interval=None)

    again = set_up(tmp_path)
    again.load_optimizer_and_scheduler(tmp_path)
    with pytest.raises(ConfigError, match="start_epoch is 1 and start_global_step 0, expected 2 and 7"):
        again.run_training(resumable(), metrics, start_epoch=1)
    with pytest.raises(CheckpointError, match="saved with a ResumableLoader on 2 ranks, expected a loader without"):
        again.run_training(plain(), metrics)
    seen = Recorder()
    again.run_training(resumable(), metrics_for(tmp_path, seen))  # what was refused is not forgotten
    assert not seen.records, "it was through"
    again = set_up(tmp_path)
    again.load_optimizer_and_scheduler(tmp_path, load_data_position=False)
    assert again.run_training(plain(), metrics, save_interval=None, epoch_save_interval=None)

    results = [(torch.ones(2),), {"logits": torch.ones(2)}]

    class Silent(Policy):
        def forward(self, rgb, **inputs):
            return results.pop()

    torch.manual_seed(0)
    strategy = set_up(tmp_path, vla=Silent())
    with pytest.raises(StepError, match="returned logits, expected a mapping with a 'loss'"):
        strategy.run_training(resumable(), metrics)
    with pytest.raises(StepError, match="returned a tuple, expected a mapping"):
        strategy.run_training(resumable(), metrics)


@pytest.mark.ranks(1)
def test_without_a_ratio_there_is_no_warm_up(tmp_path):
    for schedule in ("constant", "warmup_constant"):
        torch.manual_seed(0)
        strategy = strategy_of(Policy(), lr_scheduler_type=schedule, warmup_ratio=None)
        strategy.run_setup(tmp_path, SAMPLES, {Block}, None)
        assert f"{schedule}, no warm-up" in summary(strategy, SAMPLES)
        assert strategy.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.ranks(1)
def test_keys_that_are_parameters_of_the_forward_keep_their_names():
    class Named(nn.Module):
        def forward(self, pixel_values, input_ids, actions=None, **kwargs): ...

    batch = dict.fromkeys(("pixel_values", "input_ids", "actions", "fov", "labels"))
    given = ["pixel_values", "input_ids", "actions", "fov", "data_source"]
    assert list(strategy_of(Named()).forward_inputs(batch)) == given
    given = ["rgb", "input_ids", "action_labels", "fov", "data_source"]
    assert list(strategy_of(Policy()).forward_inputs(batch)) == given


@pytest.mark.ranks(2)
def test_a_loader_that_fails_or_ends_on_one_rank_ends_all(tmp_path):
    class Broken(Samples):
        def __getitem__(self, i):
            if i == 12 and dist.get_rank() == 1:
                raise OSError("no such frame")
            return super().__getitem__(i)

    metrics = metrics_for(tmp_path, Recorder())
    with pytest.raises(DataError, match="cannot draw a batch: failed on rank 1: OSError: no such frame"):
        set_up(tmp_path).run_training(DataLoader(Broken(), 2), metrics, None, None)
    uneven = DataLoader(Samples(), 2, sampler=range(8 - 2 * dist.get_rank()))
    with pytest.raises(DataError, match="after 3 batches of epoch 0 some ranks have none left"):
        set_up(tmp_path).run_training(uneven, metrics, None, None)
    with pytest.raises(DataError, match="yields no batch in epoch 1"):
        set_up(tmp_path).run_training(iter(plain()), metrics, None, None)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_random_numbers_that_are_drawn_before_training_goes_on_change_nothing(tmp_path):
    _, expected = run(tmp_path / "whole", "resumable", per_device_batch_size=2)
    run(tmp_path / "killed", "resumable", per_device_batch_size=2, stop_after=3)
    strategy = set_up(tmp_path / "killed", seed=7, per_device_batch_size=2)
    strategy.load_optimizer_and_scheduler(tmp_path / "killed")
    torch.manual_seed(dist.get_rank())  # as VITRA's script does, and a tracker or a data set may
    recorder = Recorder()
    strategy.run_training(resumable(), metrics_for(tmp_path / "killed", recorder), save_interval=2)
    assert dist.get_rank() or (recorder.records == {s: r for s, r in expected.items() if s > 2})


def train_without_noise(run_dir, stop_after, per_device=None):
    """Train with micro-batches of four samples over all ranks, however many there are, or of ``per_device`` on each."""
    torch.manual_seed(0)
    options = {"per_device_batch_size": per_device or 4 // dist.get_world_size()}
    strategy = set_up(run_dir, vla=Policy(noise=False), **options)
    batches = partial(ResumableLoader, Samples(), options["per_device_batch_size"] * dist.get_world_size(), seed=3)
    loader = batches()
    if per_device and strategy.load_optimizer_and_scheduler(run_dir):
        with pytest.raises(CheckpointError, match="load with load_data_position='samples'"):
            strategy.run_training(loader, metrics_for(run_dir, Recorder()))
    strategy.load_optimizer_and_scheduler(run_dir, load_data_position="samples" if per_device else True)
    with pytest.raises(StepError) if stop_after else contextlib.nullcontext():
        strategy.run_training(loader, metrics_for(run_dir, Recorder(stop_after)), save_interval=1)
    strategy.close()
    if not stop_after:
        other = set_up(run_dir.parent / "whole", vla=strategy_free_policy(), **options)
        other.run_training(batches(), metrics_for(run_dir.parent / "whole", Recorder()), None, None)
        expected = full_parameters(other.vla)
        for name, parameter in full_parameters(strategy.vla).items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6)
        other.close()


def strategy_free_policy():
    torch.manual_seed(0)
    return Policy(noise=False)


@pytest.mark.full
def test_a_run_goes_on_at_another_number_of_ranks(tmp_path, run_on):
    run_on(2, train_without_noise, run_dir=tmp_path / "run", stop_after=3)
    run_on(1, train_without_noise, run_dir=tmp_path / "run", stop_after=5)
    run_on(4, train_without_noise, run_dir=tmp_path / "run", stop_after=None)


@pytest.mark.full
def test_a_run_goes_on_at_the_same_sample_with_other_micro_batches(tmp_path, run_on):
    run_on(2, train_without_noise, run_dir=tmp_path / "run", stop_after=3, per_device=2)
    run_on(1, train_without_noise, run_dir=tmp_path / "run", stop_after=5, per_device=2)
    run_on(4, train_without_noise, run_dir=tmp_path / "run", stop_after=None, per_device=2)


@pytest.mark.ranks(2)
def test_a_plain_loader_must_keep_its_batch_size(tmp_path):
    metrics = metrics_for(tmp_path, Recorder(2))
    with pytest.raises(StepError):
        set_up(tmp_path).run_training(plain(), metrics, save_interval=1)
    again = set_up(tmp_path)
    again.load_optimizer_and_scheduler(tmp_path)
    with pytest.raises(CheckpointError, match="was saved with a batch_size of 2, expected 4"):
        again.run_training(DataLoader(Samples(), 4, sampler=DistributedSampler(Samples(), seed=3)), metrics)
    again.load_optimizer_and_scheduler(tmp_path, load_data_position="samples")
    with pytest.raises(CheckpointError, match="'samples': the loader is a loader without state_dict, expected"):
        again.run_training(plain(), metrics)


@pytest.mark.ranks(2)
def test_a_start_that_nothing_was_loaded_for_brings_the_schedule_along(tmp_path):
    strategy = set_up(tmp_path, per_device_batch_size=4, llm_freeze_step=4)
    recorder = Recorder()
    strategy.run_training(
        ResumableLoader(Samples(), 8),
        metrics_for(tmp_path, recorder, 1),
        None,
        None,
        start_epoch=2,
        start_global_step=3,
    )
    if dist.get_rank() == 0:
        found = {
            step: (r["VLA Train/Epoch"], r["VLA Train/Backbone Learning Rate"]) for step, r in recorder.records.items()
        }
        assert found == {4: (2, 0.01), 5: (2, 0.01), 6: (2, 0.01)}
    with pytest.raises(ConfigError, match="start_global_step is 2, expected 6"):
        strategy.run_training(resumable(), metrics_for(tmp_path, recorder, 1), start_global_step=2)


class Placed:
    """A batch sampler as VITRA's: it is told of an epoch, and of a step to begin at."""

    def __init__(self):
        self.calls = []
        self.set_epoch(0)

    def set_epoch(self, epoch, step=0):
        self.epoch, self.first = epoch, step
        self.calls.append((epoch, step))

    def __len__(self):
        return 4

    def __iter__(self):
        yield from ([[2 * i + self.epoch, 2 * i + 1] for i in range(self.first, 4)])


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_sampler_that_the_caller_has_brought_to_its_place_is_left_there(tmp_path):
    def start(place, stop_after=None, **begin):
        strategy = set_up(tmp_path, vla=None, epochs=3, per_device_batch_size=4)
        sampler, recorder = Placed(), Recorder(stop_after)
        if place:
            sampler.set_epoch(*place)
        strategy.load_optimizer_and_scheduler(tmp_path)
        loader = DataLoader(Samples(), batch_sampler=sampler)
        with pytest.raises(StepError) if stop_after else contextlib.nullcontext():
            strategy.run_training(loader, metrics_for(tmp_path, recorder, 1), 1, None, **begin)
        strategy.wait_for_checkpoint()
        return sampler.calls[1:], list(recorder.records)

    steps = start((1, 1), stop_after=8, start_epoch=1, start_global_step=7)
    assert steps[0] == [(1, 1)] and (dist.get_rank() or steps[1] == [8])
    with pytest.raises(DataError, match="the position of the sampler is not set"):
        start(None)
    steps = start((1, 2))
    assert steps[0] == [(1, 2), (2, 0)] and (dist.get_rank() or steps[1] == [9, 10, 11, 12, 13, 14])


@pytest.mark.ranks(2)
def test_a_sampler_that_nobody_has_brought_to_a_place_begins_its_epoch(tmp_path):
    sampler = Placed()
    strategy = set_up(tmp_path, epochs=2, per_device_batch_size=4)
    loader = DataLoader(Samples(), batch_sampler=sampler)
    strategy.run_training(loader, metrics_for(tmp_path, Recorder(), 1), None, None, start_epoch=1, start_global_step=4)
    assert sampler.calls == [(0, 0), (1, 0)]


@pytest.mark.ranks(2)
def test_a_run_that_saves_at_all_saves_its_last_step(tmp_path):
    strategy = set_up(tmp_path, epochs=2, per_device_batch_size=4)
    strategy.run_training(ResumableLoader(Samples(), 8), metrics_for(tmp_path, Recorder(), 1), 1000, 2)
    names = ["epoch=0-step=3.end.ckpt", "epoch=1-step=5.end.ckpt"]
    assert [c.tag for c in list_checkpoints(tmp_path / "checkpoints")] == names


@pytest.mark.ranks(2)
def test_the_gradients_are_clipped_and_the_optimizer_goes_on_beside_other_weights_where_asked(tmp_path):
    strategy = set_up(tmp_path)
    batch = next(iter(resumable()))
    strategy.backward(strategy.vla(**strategy.forward_inputs(batch))["loss"], strategy.vla)
    norm = strategy.clip_grad_norm()
    assert strategy.clip_grad_norm() == pytest.approx(min(norm, 1.0), rel=1e-3)
    strategy.optimizer_step(strategy.optimizer, strategy.vla, strategy.lr_scheduler)
    micro_batch(strategy, batch)
    strategy.save_checkpoint(tmp_path, 1, 0, only_trainable=False)
    again = set_up(tmp_path, seed=5)
    before = full_parameters(again.vla)
    again.load_optimizer_and_scheduler(tmp_path, load_weights=False)
    assert_same(full_parameters(again.vla), before)
    assert again.global_step(again.vla) == 1 and again.optimizer.state


@pytest.mark.ranks(2)
def test_a_save_keeps_the_loss_of_pending_micro_batches_and_dropping_them_drops_it(tmp_path):
    strategy = set_up(tmp_path)

    def micro_step(number):
        loss = strategy.vla(**strategy.forward_inputs(batch))["loss"]
        strategy.backward(number * (1.0 + 0.0 * loss), strategy.vla, num_tokens=5)
        return strategy.optimizer_step(strategy.optimizer, strategy.vla, strategy.lr_scheduler)

    batch = next(iter(resumable()))
    rate = strategy.optimizer.param_groups[0]["lr"]
    micro_step(1.0)
    strategy.save_checkpoint(tmp_path, 0, 0)
    assert strategy.pending_micro_batches == 1
    result = micro_step(4.0)
    assert (result.loss, result.tokens, result.lr) == (2.5, 20, rate)
    micro_step(8.0)
    strategy.pending_micro_batches = 0  # as the loop does at the end of its epochs
    clear_gradients(strategy.vla)
    micro_step(1.0)
    assert micro_step(2.0).loss == 1.5


# --- metrics -------------------------------------------------------------------------------------------------------

KEYS = {"Step", "Epoch", "Loss", "Loss (Raw)", "Backbone Learning Rate", "Action Model Learning Rate", "Step Time"}


def one_step(metrics, step, losses=(1.0, 3.0)):
    for loss in losses:
        metrics.commit(loss=torch.tensor(loss), left_hand_6d=torch.tensor([2 * loss]))
    rates = {"backbone_decay_lr": 0.1, "action_decay_lr": 0.2}
    metrics.commit(update_step_time=True, global_step=step, epoch=4, lr=0.1, **rates)
    return metrics.push()


@pytest.mark.ranks(2)
def test_json_lines_have_vitras_files_and_keys_from_rank_0_alone(tmp_path):
    own = tmp_path / str(dist.get_rank())
    metrics = VLAMetrics(
        ("jsonl",), "a-run", own, {"path": tmp_path, "lr": 1}, grad_accumulation_steps=2, window_size=4
    )
    assert "Global Step 000007" in one_step(metrics, 7)
    metrics.finalize()
    if dist.get_rank() == 0:  # a crash tears a line
        with (own / "a-run.jsonl").open("a") as file:
            file.write('{"VLA Train/St')
    metrics = VLAMetrics(("jsonl",), "a-run", own, {"path": tmp_path, "lr": 2}, grad_accumulation_steps=2)
    one_step(metrics, 8, losses=(5.0, float("nan")))
    metrics.finalize()
    if dist.get_rank():
        assert not own.exists()
        return
    hparams = {"path": str(tmp_path), "lr": 2}
    assert json.loads((own / "run-metrics.jsonl").read_text()) == {"run_id": "a-run", "hparams": hparams}
    first, second = map(json.loads, (own / "a-run.jsonl").read_text().splitlines())
    assert {key.removeprefix("VLA Train/") for key in first if key.startswith("VLA Train/")} == KEYS
    assert (first["VLA Train/Loss"], first["VLA Train/Loss (Raw)"], first["Other/left_hand_6d"]) == (2.0, 2.0, 4.0)
    assert (first["VLA Train/Backbone Learning Rate"], first["VLA Train/Action Model Learning Rate"]) == (0.1, 0.2)
    assert (second["VLA Train/Step"], second["VLA Train/Loss"]) == (8, None)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_weights_and_biases_gets_the_same_records_offline(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB__SERVICE_WAIT", "200")  # its service is slow to start on a busy machine
        metrics = VLAMetrics(("wandb",), "a-run", tmp_path / str(dist.get_rank()), {"lr": 1})
        one_step(metrics, 7)
        metrics.finalize()
    files = list(tmp_path.glob(f"{dist.get_rank()}/wandb/offline-run-*/*.wandb"))
    if dist.get_rank():
        assert not files
        return
    [written] = files
    deadline = time.monotonic() + 30  # its service writes the file when it comes to it, also after the run has ended
    while missing := [key for key in KEYS if f"VLA Train/{key}".encode() not in written.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


@pytest.mark.ranks(2)
def test_a_tracker_that_fails_on_rank_0_fails_on_every_rank(tmp_path):
    with pytest.raises(ConfigError, match=r"'jsonls': expected one of jsonl, tensorboard, wandb.*mean 'jsonl'"):
        VLAMetrics(("jsonls",), "a-run", tmp_path, {})
    if dist.get_rank() == 0:
        (tmp_path / "file").touch()
    dist.barrier()
    with pytest.raises(ConfigError, match="cannot start trackers: failed on rank 0"):
        VLAMetrics(("jsonl",), "a-run", tmp_path / "file", {})
    strategy = set_up(tmp_path)
    metrics = VLAMetrics(("jsonl",), "gone", tmp_path / "run", {}, grad_accumulation_steps=2)
    if dist.get_rank() == 0:
        (tmp_path / "run" / "gone.jsonl").mkdir()
    with pytest.raises(StepError, match="cannot track metrics: failed on rank 0: IsADirectoryError"):
        strategy.run_training(resumable(), metrics)


def test_without_the_extra_weights_and_biases_is_an_error_that_says_so(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="extra 'tracking'"):
            VLAMetrics(("wandb",), "a-run", tmp_path, {})
