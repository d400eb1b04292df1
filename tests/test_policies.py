"""Robot policies train as they do unsharded, go on to the bit where they were, and come out as their own classes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from helpers.policies import CASES, actions_of, backbone_batch, batch_of, build, loss_of
from helpers.policies.base import FRONT, WRIST
from helpers.reference import (
    Unsharded,
    assert_close,
    assert_parameters_close,
    full_grads,
    full_parameters,
    same_on_all_ranks,
)
from helpers.training import take_steps
from helpers.versions import NEW_CONVERSIONS
from helpers.worlds import USUAL, matrix, some, worlds
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_optimizer
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.model.names import matches, named_parameters

# Where a gradient is zero but for rounding, Adam makes a step of it; this keeps the step as small as the rounding.
OPTIONS = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}


NEED_THEIR_DTYPE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.LayerNorm, nn.GroupNorm)


class MixedPrecision(nn.Module):
    """The arithmetic of bf16 beside fp32, unsharded: fp32 masters, and a copy of each in its own dtype for a forward.

    Args:
        model: the policy.
        keep_fp32: patterns of what is computed in fp32.
        units: the names of the sharded one's units, and how FSDP2 casts what goes in and out.
    """

    def __init__(self, model, keep_fp32, units):
        super().__init__()
        self.inner = copy.deepcopy(model).float()
        self.keep_fp32 = tuple(keep_fp32)
        for name, policy in units.items():
            module = self.inner.get_submodule(name)
            if policy.cast_forward_inputs or policy.param_dtype == torch.bfloat16:
                of_unit = cast if policy.cast_forward_inputs else cast_but_numbers_of_samples
                module.register_forward_pre_hook(partial(_cast_inputs, of_unit, policy.param_dtype), with_kwargs=True)
            module.register_forward_hook(partial(_cast_outputs, policy.output_dtype))
        for module in self.inner.modules():
            if isinstance(module, NEED_THEIR_DTYPE):
                module.register_forward_pre_hook(_cast_to_weights, with_kwargs=True)

    def forward(self, batch):
        parameters = self.inner.named_parameters()
        low = {n: p if matches(n, self.keep_fp32) else p.to(torch.bfloat16) for n, p in parameters}
        return torch.func.functional_call(self.inner, low, (batch,))


def _cast_inputs(how, dtype, _module, args, kwargs):
    return how((args, kwargs), dtype)


def _cast_to_weights(module, args, kwargs):
    return None if torch.is_autocast_enabled("cpu") else cast((args, kwargs), next(module.parameters()).dtype)


def _cast_outputs(dtype, _module, _args, output):
    return cast(output, dtype) if dtype else output


def cast(tree, dtype):
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def cast_but_numbers_of_samples(tree, dtype):
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() and t.ndim > 1 else t, tree)


def strategy_for(name, **config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, "max_norm": 1.0, **CASES[name].config, **config}))


def unsharded_for(name, plain, model):
    """Return the reference of a sharded policy, from a plain copy: in fp32, or in the dtypes that its case asks for."""
    if CASES[name].config.get("bf16"):
        plain = mixed_precision_of(plain, model, CASES[name].config["keep_fp32"])
    return Unsharded(plain, lambda m, b: loss_of(name, m, b), max_norm=1.0, **OPTIONS)


def mixed_precision_of(plain, model, keep_fp32=()):
    units = {n: m._get_fsdp_state()._mp_policy for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    return MixedPrecision(plain, keep_fp32, units)


def without_prefix(tensors):
    return {name.removeprefix("inner."): tensor for name, tensor in tensors.items()}


def names_of_units(model):
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def losses_at(name, model, steps):
    return (loss_of(name, model, batch_of(name, step, dist.get_rank())) for step in steps)


def step_beside(unsharded, strategy, name, model, optimizer, batches, tolerance=1e-5):
    """Take one step sharded and unsharded, on one batch a rank, and compare loss, gradients and norm."""
    expected, expected_norm = unsharded.step(batches)
    loss = loss_of(name, model, batches[dist.get_rank()])
    assert loss.item() == pytest.approx(expected[dist.get_rank()], rel=1e-5)
    strategy.backward(loss, model, optimizer)
    assert_close(full_grads(model), without_prefix(unsharded.grads), tolerance, "gradient")
    result = strategy.optimizer_step(optimizer, model)
    assert result.grad_norm == pytest.approx(expected_norm, rel=1e-5)
    assert same_on_all_ranks(result.grad_norm)


def steps_beside(unsharded, strategy, name, model, optimizer, steps, batches_at=None, tolerance=1e-5):
    """Take steps as `step_beside` does, and compare the parameters after them."""
    ranks = range(dist.get_world_size())
    for step in steps:
        batches = batches_at(step) if batches_at else [batch_of(name, step, rank) for rank in ranks]
        step_beside(unsharded, strategy, name, model, optimizer, batches, tolerance)
    assert_parameters_close(full_parameters(model), without_prefix(full_parameters(unsharded.model)), 2e-4)


def assert_comes_out_as_its_own_class(strategy, name, model, folder):
    """Export, load the way that the unsharded class is loaded, and take actions with both."""
    strategy.save_model(model, None, folder)
    plain = loaded_as_its_class(name, folder)
    expected = full_parameters(model)
    assert all(torch.equal(p, expected[n].to(p.dtype)) for n, p in plain.named_parameters())
    batch = batch_of(name, 9, dist.get_rank())
    tolerance = 2e-2 if strategy.config.bf16 else 1e-5
    actions = actions_of(name, model.eval(), batch).float()
    torch.testing.assert_close(actions, actions_of(name, plain, batch), rtol=tolerance, atol=tolerance)
    model.train()


def assert_resumes_to_the_bit(strategy, name, model, optimizer, other, other_optimizer, folder):
    """Save, load into another model, and go on with both."""
    strategy.save_ckpt(model, folder)
    strategy.load_ckpt(other, folder)
    went_on = take_steps(strategy, model, optimizer, losses_at(name, model, (5, 6)))
    assert take_steps(strategy, other, other_optimizer, losses_at(name, other, (5, 6))) == went_on
    expected, found = full_parameters(model), full_parameters(other)
    assert all(torch.equal(expected[n], found[n]) for n in expected)


@pytest.mark.parametrize(("world", "name"), matrix((1, 2, 3), CASES, usual=("smolvla",)))
def test_a_policy_trains_with_parity_comes_out_as_its_own_class_and_resumes_to_the_bit(world, name, tmp_path):
    """Parity on one rank, two and three; the rest, which other tests hold on any number of ranks, on three."""
    model = build(name)
    plain = copy.deepcopy(model)
    strategy = strategy_for(name)
    strategy.prepare_model(model, is_training=True)
    assert len(names_of_units(model)) > 2, "blocks were found"
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    steps_beside(unsharded_for(name, plain, model), strategy, name, model, optimizer, range(3))
    if world != USUAL:
        return
    assert_comes_out_as_its_own_class(strategy, name, model, tmp_path / "export")
    other = strategy.prepare_model(build(name, seed=7), is_training=True)
    other_optimizer = strategy.create_optimizer(other, lr=0.5)
    assert_resumes_to_the_bit(strategy, name, model, optimizer, other, other_optimizer, tmp_path / "run")


def loaded_as_its_class(name, folder):
    """Load an export the way that its unsharded class is loaded."""
    fresh = build(name, seed=7).eval()
    if hasattr(type(fresh), "_no_split_modules"):
        return type(fresh).from_pretrained(folder).eval()
    missing, unexpected = safetensors.torch.load_model(fresh, str(folder / "model.safetensors"), strict=True)
    assert not missing
    assert not unexpected
    return fresh


@pytest.mark.full
@pytest.mark.ranks(2)
def test_recomputed_decoders_of_which_one_reads_the_others_cache_change_no_number():
    def batches(step):
        return [batch_of("pi0_of_transformers", step, rank) for rank in range(2)]

    train_on("pi0_of_transformers", batches, activation_checkpointing=["GemmaDecoderLayer"])


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name", some(["pi0", "smolvla", "act", "diffusion", "groot", "xvla", "multi_task_dit"], ["pi0", "xvla"])
)
def test_under_autocast_a_policy_that_makes_fp32_of_its_own_computes_in_bf16(name):
    """Noise, tables of times and fp32 buffers would meet bf16 weights; LeRobot's loop runs under autocast as well."""
    model = build(name)
    plain = copy.deepcopy(model)
    strategy = strategy_for(name, bf16=True)
    strategy.prepare_model(model, is_training=True)
    reference = mixed_precision_of(plain, model)
    for rank in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(name, reference, batch_of(name, 0, rank))
        (loss / 2).backward()
        if rank == dist.get_rank():
            expected = loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(name, model, batch_of(name, 0, dist.get_rank()))
    assert loss.item() == expected
    strategy.backward(loss, model)
    grads = {n: p.grad for n, p in named_parameters(reference.inner).items() if p.grad is not None}
    # What has several consumers adds up its bf16 gradients in another order.
    assert_close(full_grads(model), grads, 5e-2 if name in ("groot", "diffusion") else 1e-5, "gradient")
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert actions_of(name, model, batch_of(name, 1, dist.get_rank())).isfinite().all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name", some(["pi0", "pi0_of_transformers", "smolvla", "act", "diffusion", "multi_task_dit"], ["pi0", "act"])
)
def test_a_policy_that_makes_fp32_of_its_own_computes_in_bf16_without_autocast(name):
    """Those that multiply by weights themselves, as groot and xvla do with those of an embodiment, cannot."""
    model = build(name)
    plain = copy.deepcopy(model)
    strategy = strategy_for(name, bf16=True)
    strategy.prepare_model(model, is_training=True)
    batch = batch_of(name, 0, dist.get_rank())
    loss = loss_of(name, model, batch)
    loss_of(name, plain, batch).float().backward()
    strategy.backward(loss, model)
    grads = full_grads(model)
    assert grads.keys() == {name for name, p in plain.named_parameters() if p.grad is not None}
    assert all(gradient.isfinite().all() for gradient in (loss, *grads.values()))
    assert actions_of(name, model.eval(), batch).isfinite().all()


# --- a tower that is frozen and in fp32 beside bf16, later unfrozen ------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("way", some(["waits", "made anew", "added"], ["waits"]))
@pytest.mark.ranks(2)
def test_an_fp32_tower_beside_bf16_is_unfrozen_midway_and_has_masters(way, tmp_path):
    """The optimizer knows the tower from the start and waits, or is made anew, or gets another group."""
    name = "backbone_mixed"
    strategy = strategy_for(name)

    def towers():
        return model.backbone.model.vision_tower, unsharded.model.inner.backbone.model.vision_tower

    model = build(name)
    plain = copy.deepcopy(model)
    for one in (model, plain):
        one.backbone.model.vision_tower.requires_grad_(way == "waits")
    strategy.prepare_model(model, is_training=True)
    unsharded = unsharded_for(name, plain, model)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    for tower in towers():
        tower.requires_grad_(False)
    frozen = {n: t for n, t in full_parameters(model).items() if "vision_tower" in n}
    steps_beside(unsharded, strategy, name, model, optimizer, range(2))
    now = full_parameters(model)
    assert all(torch.equal(now[n], t) for n, t in frozen.items())

    for tower in towers():
        tower.requires_grad_(True)
    assert {p.dtype for p in towers()[0].parameters()} == {torch.float32}
    if way == "made anew":
        optimizer = strategy.create_optimizer(model, **OPTIONS)
        unsharded.optimizer = build_optimizer(unsharded.model, **OPTIONS)
    elif way == "added":
        for tower, one in zip(towers(), (optimizer, unsharded.optimizer), strict=True):
            one.add_param_group(group_of(tower))
    tolerance = 1e-5 if NEW_CONVERSIONS else 3e-4  # with transformers 5.5, for a reason that is not known
    steps_beside(unsharded, strategy, name, model, optimizer, range(2, 4), tolerance=tolerance)
    now = full_parameters(model)
    assert not any(torch.equal(now[n], t) for n, t in frozen.items())

    other = build(name, seed=7)
    tower = other.backbone.model.vision_tower.requires_grad_(way != "added")
    strategy.prepare_model(other, is_training=True)
    other_optimizer = strategy.create_optimizer(other, lr=0.5)
    if way == "added":
        other_optimizer.add_param_group(group_of(tower.requires_grad_(True)))
    assert_resumes_to_the_bit(strategy, name, model, optimizer, other, other_optimizer, tmp_path)


def group_of(tower):
    return {"params": list(tower.parameters()), "name": "tower", "lr": 1e-4, "weight_decay": 0.0}


# --- batches that lack images, or labels of actions, on some ranks -------------------------------------------------


def at(step, rank, world):
    """Say whether a rank's batch has something at a step: on one rank, on all, on none, on all others."""
    return [rank == 0, True, False, rank != 0 or world == 1][step % 4]


def _runs_the_head_always(model):
    model.unlabelled = "mask"


def train_on(name, batches_at, prepare=lambda model: None, **config):
    """Train four steps beside the reference on what ``batches_at(step)`` gives each rank."""
    model = build(name)
    prepare(model)
    strategy = strategy_for(name, **config)
    plain = copy.deepcopy(model)
    strategy.prepare_model(model, is_training=True)
    unsharded = unsharded_for(name, plain, model)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    steps_beside(unsharded, strategy, name, model, optimizer, range(4), batches_at)


def backbone_batches(step, **lacking):
    """Make a batch for each rank; ``lacking`` says of what some ranks have none."""
    world = dist.get_world_size()
    return [
        backbone_batch(
            torch.Generator().manual_seed(1000 * step + rank),
            **{what: not lacks or at(step, rank, world) for what, lacks in lacking.items()},
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize("policy", some(["root", "dummy", "replicate"], ["root"]))
@pytest.mark.ranks(2)
def test_images_on_some_ranks_only_change_no_number(policy):
    train_on("backbone", lambda step: backbone_batches(step, images=True), mixed_mm_data=policy)


FLOW_BLOCKS = ("FlowBlock", "GemmaDecoderLayer", "SiglipEncoderLayer")


@pytest.mark.full
@pytest.mark.parametrize("blocks", some([(), FLOW_BLOCKS], [FLOW_BLOCKS]), ids=["root", "units"])
@pytest.mark.parametrize("world", worlds(2, 3))
def test_a_head_that_runs_without_labels_too_and_counts_for_nothing_keeps_ranks_in_step(world, blocks):
    def batches(step):
        return backbone_batches(step, actions=True)

    train_on("backbone", batches, _runs_the_head_always, block_class_names=blocks)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_neither_images_nor_labels_need_be_on_every_rank():
    def batches(step):
        return backbone_batches(step, actions=True, images=True)

    train_on("backbone", batches, _runs_the_head_always, mixed_mm_data="root")


@pytest.mark.ranks(2)
def test_a_head_that_some_ranks_skip_is_named():
    expected = r"rank 0 gathers action_model.blocks.0 of .*, rank 1 gathers backbone"
    blocks = ("FlowBlock", "GemmaDecoderLayer")
    with pytest.raises(StepError, match=expected):
        train_on("backbone", lambda step: backbone_batches(step, actions=True), block_class_names=blocks)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_head_of_the_root_unit_may_be_skipped_on_some_ranks():
    train_on("backbone", lambda step: backbone_batches(step, actions=True), block_class_names=())


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["pi0", "smolvla", "act", "diffusion"], ["act"]))
def test_actions_that_are_all_padding_on_a_rank_keep_it_in_step(name):
    def batches(step):
        made = [batch_of(name, step, rank) for rank in range(2)]
        for rank, batch in enumerate(made):
            batch["action_is_pad"] |= not at(step, rank, 2)
        return made

    train_on(name, batches)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_cameras_that_a_rank_lacks_are_black_and_masked():
    def batches(step):
        made = [batch_of("pi0", step, rank) for rank in range(2)]
        return [
            {name: value for name, value in batch.items() if at(step, rank, 2) or name not in (FRONT, WRIST)}
            for rank, batch in enumerate(made)
        ]

    train_on("pi0", batches)
