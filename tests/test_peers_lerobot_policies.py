"""LeRobot's real policies on two ranks: parity, what a robot loads, and an exact resume.

With the environment variable FSDP2_TABLE, they write the figures of docs/coming_from_lerobot.md to that folder.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import lerobot_full_size as full_size
from helpers import lerobot_policies as real
from helpers.peers import LACKS_ACCELERATOR, has_accelerator, skip_without_lerobot
from helpers.reference import Unsharded, assert_close, full_grads, full_parameters

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.sharding.plan import plan_units

skip_without_lerobot()

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.01}
LAYOUT = LeRobotLayout(total_steps=100, batch_size=2)


def cast(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def batch_of(name, step, rank, dtype=torch.float32):
    return {key: cast(value, dtype) for key, value in real.batch_of(name, step, rank).items()}


def prepared(name, dtype=torch.float32):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    policy = real.build(name).train().to(dtype)
    strategy.prepare_model(policy, is_training=True)
    return strategy, policy, strategy.create_optimizer(policy, **OPTIONS)


def step_of(strategy, name, policy, optimizer, step, dtype=torch.float32):
    rank = dist.get_rank()
    loss = real.loss_of(name, policy.train(), batch_of(name, step, rank, dtype), seed=10 * step + rank)
    strategy.backward(loss, policy, optimizer)
    strategy.optimizer_step(optimizer, policy)
    return loss.item()


class Reference(Unsharded):
    """The unsharded policy, whose buffers change as on the ranks: each starts with the same, and rank 0's are kept."""

    def __init__(self, name, plain):
        super().__init__(plain, self.loss_of, max_norm=1.0, **OPTIONS)
        self.name, self.before, self.of_rank_0 = name, {}, {}

    def loss_of(self, policy, batch):
        rank, inputs, seed = batch
        if rank == 0:
            self.before = self.buffers()
        self.set_buffers(self.before)
        loss = real.loss_of(self.name, policy.train(), inputs, seed)
        if rank == 0:
            self.of_rank_0 = self.buffers()
        self.set_buffers(self.of_rank_0)
        return loss

    def buffers(self):
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def set_buffers(self, values):
        """Replace buffers, since backward may still need the old ones."""
        for name, value in values.items():
            module, _, attribute = name.rpartition(".")
            self.model.get_submodule(module)._buffers[attribute] = value.clone()

    def take_step(self, step, dtype=torch.float32):
        batches = [(r, batch_of(self.name, step, r, dtype), 10 * step + r) for r in range(dist.get_world_size())]
        return self.step(batches)[0]


def same_on_all_ranks(tensors):
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {name: tensor.clone() for name, tensor in tensors.items()})
    return all(torch.equal(of_ranks[0][name], tensor) for other in of_ranks for name, tensor in other.items())


def units_of(policy):
    """Return the number of units, and the share of the root's parameters besides embeddings and heads."""
    plan = plan_units(policy, StrategyConfig(bf16=False), is_training=True)
    return len(plan.units), plan._unexpected_in(plan.units[-1]) / sum(p.numel() for p in policy.parameters())


def case(name):
    """Return a parameter of a test that is skipped if the installed LeRobot's policy has other settings."""
    is_newer = name.partition(":")[0] in ("vla_jepa", "molmoact2")
    return pytest.param(name, marks=pytest.mark.skipif(is_newer and not has_accelerator(), reason=LACKS_ACCELERATOR))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [case(name) for name in real.CASES])
def test_a_real_policy_trains_with_parity_and_comes_back(name, tmp_path):
    rank, plain = dist.get_rank(), real.build(name).train()
    units, share = units_of(copy.deepcopy(plain))
    strategy, policy, optimizer = prepared(name)
    reference = Reference(name, plain)
    for step in range(2):
        losses = reference.take_step(step)
        loss = real.loss_of(name, policy.train(), batch_of(name, step, rank), seed=10 * step + rank)
        strategy.backward(loss, policy, optimizer)
        if not real.CASES[name].reduces_itself:
            assert loss.item() == pytest.approx(losses[rank], rel=1e-4)
            assert_close(full_grads(policy), reference.grads, 1e-3, "gradient")
        strategy.optimizer_step(optimizer, policy)
        assert same_on_all_ranks(dict(policy.named_buffers()))
    expected = full_parameters(reference.model)
    for tensor_name, tensor in full_parameters(policy).items():
        # A gradient that is zero but for rounding, as of the bias of keys, moves a parameter by 1e-6.
        close = torch.allclose(tensor, expected[tensor_name], rtol=1e-4, atol=1e-5)
        assert close or real.CASES[name].reduces_itself, tensor_name
    strategy.save_ckpt(policy, tmp_path, layout=LAYOUT)

    batch = real.batch_of(name, 5, 0, real.CASES[name].acts_on)
    ours = real.actions_of(name, policy, batch)
    robot = real.reload(name, tmp_path / "000002/pretrained_model")
    assert torch.equal(ours, real.actions_of(name, robot, batch)), "on every rank"
    if hasattr(policy, "reset"):
        policy.reset()

    uninterrupted = [step_of(strategy, name, policy, optimizer, step) for step in (2, 3)]
    strategy, policy, optimizer = prepared(name)
    strategy.load_ckpt(policy, tmp_path)
    assert [step_of(strategy, name, policy, optimizer, step) for step in (2, 3)] == uninterrupted
    if rank == 0 and (folder := os.environ.get("FSDP2_TABLE")):
        (Path(folder) / f"{name}.json").write_text(json.dumps({"units": units, "root": share}))


NOT_IN_BF16 = {"vqbet": "fails under autocast, unsharded too", "vqbet:codebook": "the same"}
NOT_IN_BF16 |= dict.fromkeys(("wall_x", "lingbot_va"), "bfloat16 means float32 in their code here")
DRAW_BF16 = ("groot", "groot:frozen", "gaussian_actor")
"""They draw noise in the dtype of a gathered weight or an output, and other numbers in bf16 than in fp32."""
KEEP_FP32 = {"diffusion": ["*rgb_encoder*"]}
"""On a CPU, batch norm needs parameters in the dtype of its running statistics."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [case(name) for name in real.CASES if name not in NOT_IN_BF16])
def test_a_real_policy_trains_in_bf16_under_autocast(name):
    """The losses are those of the unsharded fp32 policy under autocast, whose inputs are cast to bf16, too."""
    plain, rank = real.build(name).train(), dist.get_rank()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, max_norm=1.0, keep_fp32=KEEP_FP32.get(name, [])))
    policy = strategy.prepare_model(real.build(name).train(), is_training=True)
    optimizer = strategy.create_optimizer(policy, **OPTIONS)
    losses = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            if step == 0:
                inputs = batch_of(name, step, rank, torch.bfloat16)
                expected = real.loss_of(name, plain, inputs, seed=10 * step + rank).item()
            loss = real.loss_of(name, policy.train(), batch_of(name, step, rank), seed=10 * step + rank)
        losses.append(loss.item())
        strategy.backward(loss, policy, optimizer)
        strategy.optimizer_step(optimizer, policy)
    if name not in DRAW_BF16:
        assert losses[0] == pytest.approx(expected, rel=1e-2)
    assert all(map(math.isfinite, losses))
    with torch.autocast("cpu", torch.bfloat16):
        actions = real.actions_of(name, policy, real.batch_of(name, 5, 0, real.CASES[name].acts_on))
    assert actions.isfinite().all()


def test_every_policy_of_lerobot_is_run():
    importlib.import_module("lerobot.policies")
    names = importlib.import_module("lerobot.configs.policies").PreTrainedConfig.get_known_choices()
    assert {name.partition(":")[0] for name in real.CASES} == set(names)


@pytest.mark.parametrize("name", full_size.POLICIES)
def test_the_root_of_a_policy_of_full_size_is_small(name):
    """The table of policies names their blocks: what no block holds stays gathered from forward to backward."""
    policy = full_size.build(name)
    units, share = units_of(policy)
    assert sum(p.numel() for p in policy.parameters()) > 5e8 and share < 0.07
    if folder := os.environ.get("FSDP2_TABLE"):
        (Path(folder) / f"{name} of full size.json").write_text(json.dumps({"units": units, "root": share}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.float64, 1e-9)], ids=["fp32", "fp64"])
def test_what_differs_in_the_actions_of_group_norm_diffusion_is_rounding(dtype, tolerance):
    """After three steps, the actions of ten denoising steps differ as the dtype rounds, not as ranks are many."""
    name = "diffusion:group_norm"
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of the embedding of time steps
    try:
        difference = difference_of_actions(name, dtype)
    finally:
        torch.set_default_dtype(default)
    assert difference <= tolerance
    if dist.get_rank() == 0 and (folder := os.environ.get("FSDP2_TABLE")):
        (Path(folder) / f"rounding {dtype}.json").write_text(json.dumps(difference))


def difference_of_actions(name, dtype):
    strategy, policy, optimizer = prepared(name, dtype)
    reference = Reference(name, real.build(name).train().to(dtype))
    for step in range(3):
        reference.take_step(step, dtype)
        step_of(strategy, name, policy, optimizer, step, dtype)
    batch = batch_of(name, 5, 0, dtype)
    expected = real.actions_of(name, reference.model, batch)
    return (real.actions_of(name, policy, batch) - expected).abs().max().item()
