"""A LeRobot loop moves over as the docs say, and what its guide promises holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.policies import actions_of, batch_of
from helpers.policies.act import ACTPolicy
from helpers.policies.pi0 import PI0Policy

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.distributed.agreement import from_rank_0
from fsdp2_strategy.sharding.features import load_policies
from fsdp2_strategy.sharding.known_policies import _registered

DOCS = Path(__file__).parent.parent / "docs"


def new_side_of_the_diff() -> str:
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (DOCS / "vla.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


@dataclass
class TrainConfig:
    output_dir: Path
    steps: int
    seed: int = 7
    batch_size: int = 2
    save_freq: int = 2
    policy: str = "pi0"
    optimizer: Any = field(default_factory=lambda: SimpleNamespace(grad_clip_norm=1.0))

    def save_pretrained(self, folder: Path) -> None:
        (folder / "train_config.json").write_text(json.dumps({"steps": self.steps, "batch_size": self.batch_size}))


class Processor:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, batch: Any) -> Any:
        return {key: value * 0.5 if key == "observation.state" else value for key, value in batch.items()}

    def save_pretrained(self, folder: Path) -> None:
        (folder / f"{self.name}.json").write_text(json.dumps({"name": self.name, "steps": []}))


class Frames:
    """A data set as LeRobot's: samples by index, and what is known of them."""

    meta = SimpleNamespace(stats={})

    def __len__(self) -> int:
        return 13

    def __getitem__(self, i: int) -> Any:
        batch = batch_of("pi0", i, 0)
        return {key: value[0] for key, value in batch.items() if key != "seed"}


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def run_the_loop(make_policy: Callable[[], Any], output_dir: Path, steps: int) -> Any:
    """Run the docs' loop with stand-ins for what is LeRobot's; return its names."""
    losses: list[float] = []

    def make(cfg: Any, ds_meta: Any) -> Any:
        torch.manual_seed(0)
        policy = make_policy()
        policy.register_forward_hook(lambda _module, _inputs, output: losses.append(output[0].item()))
        return policy

    def make_optimizer_and_scheduler(cfg: Any, policy: Any) -> Any:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    names = {
        "cfg": TrainConfig(output_dir, steps),
        "dataset": Frames(),
        "make_policy": make,
        "make_pre_post_processors": lambda *_, **__: (
            Processor("policy_preprocessor"),
            Processor("policy_postprocessor"),
        ),
        "make_optimizer_and_scheduler": make_optimizer_and_scheduler,
        "cycle": cycle,
        "losses": losses,
    }
    exec(compile(new_side_of_the_diff(), "docs/vla.md", "exec"), names)
    return names


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_diff_of_the_docs_trains_saves_and_goes_on(tmp_path, monkeypatch):
    folder = from_rank_0(tmp_path)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        if dist.get_rank() == 0:
            fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
            content = {"distributed_type": "FSDP", "mixed_precision": "no", "num_processes": 2, "fsdp_config": fsdp}
            (folder / "fsdp.yaml").write_text(json.dumps(content))
        dist.barrier()
        whole = run_the_loop(PI0Policy, folder / "whole", steps=8)
        run_the_loop(PI0Policy, folder / "parts", steps=4)
        rest = run_the_loop(PI0Policy, folder / "parts", steps=8)
    assert rest["losses"] == whole["losses"][4:]
    last = folder / "parts/checkpoints/last"
    assert last.readlink() == Path("000008")
    pretrained = {path.name for path in (last / "pretrained_model").iterdir()}
    own = {"config.json", "model.safetensors", "train_config.json"}
    assert pretrained == own | {"policy_preprocessor.json", "policy_postprocessor.json"}
    recorded = json.loads((last / "training_state/training_step.json").read_text())
    assert recorded == {
        "step": 8,
        "num_processes": 2,
        "dp_world_size": 2,
        "batch_size": 2,
        "grad_accum_steps": 1,
        "parallelism": {"dp_replicate": 1, "dp_shard": 2, "ring_degree": 1, "ulysses_degree": 1},
    }
    robot = PI0Policy.from_pretrained(last / "pretrained_model")
    batch = batch_of("pi0", 0, 0)
    torch.testing.assert_close(actions_of("pi0", robot, batch), actions_of("pi0", whole["policy"], batch))


def prepared(seed: int, per_rank: bool) -> tuple[FSDPV2Strategy, Any, Any]:
    strategy = FSDPV2Strategy(seed=seed, config=StrategyConfig(bf16=False))
    torch.manual_seed(0)
    policy = strategy.prepare_model(ACTPolicy(), is_training=True)
    optimizer = strategy.create_optimizer(policy, lr=1e-3)
    strategy.set_seed(seed, per_rank=per_rank)
    return strategy, policy, optimizer


def take_steps(strategy: FSDPV2Strategy, policy: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss, _ = policy({key: value for key, value in batch_of("act", 0, 0).items() if key != "seed"})
        strategy.backward(loss, policy, optimizer)
        strategy.optimizer_step(optimizer, policy)
        losses.append(loss.item())
    return losses


def of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.full
@pytest.mark.ranks(2)
def test_noise_differs_between_ranks_and_comes_again(tmp_path):
    """The same batch on every rank: what differs is the noise alone."""
    folder = from_rank_0(tmp_path)
    run = prepared(seed=3, per_rank=True)
    losses = take_steps(*run, 3)
    assert len(set(of_all_ranks(losses[0]))) == 2
    assert take_steps(*prepared(seed=3, per_rank=True), 3) == losses
    assert take_steps(*prepared(seed=4, per_rank=True), 3) != losses
    run[0].save_ckpt(run[1], folder)
    expected = take_steps(*run, 2)
    resumed = prepared(seed=5, per_rank=False)
    resumed[0].load_ckpt(resumed[1], folder)
    assert take_steps(*resumed, 2) == expected
    alike = take_steps(*prepared(seed=3, per_rank=False), 1)
    assert len(set(of_all_ranks(alike[0]))) == 1


def test_the_table_of_policies_is_that_of_the_code():
    load_policies()
    page = (DOCS / "coming_from_lerobot.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (yes)? ?\|$", page, flags=re.MULTILINE)
    shown = {name: (tuple(re.findall(r"`(\w+)`", blocks)), bool(bypassed)) for name, blocks, bypassed in rows}
    assert shown == {name: (policy.blocks, policy.bypassed) for name, policy in _registered.items()}
