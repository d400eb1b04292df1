"""What an RLHF trainer calls, in the order in which it calls it, with the numbers of unsharded training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, device, loss_of, tokens
from helpers.reference import Unsharded, assert_parameters_close, full, full_parameters
from helpers.training import assert_same, full_state, tags, train
from helpers.worlds import some, worlds
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp2_strategy import (
    EMA,
    FSDPadaptOptimizer,
    FSDPV2Strategy,
    StrategyConfig,
    build_mesh,
    build_optimizer,
    clip_grad_norm,
    is_mp_optimizer,
    shard_model,
)
from fsdp2_strategy.distributed.torch_internals import FUSED_ADAM_DEVICES
from fsdp2_strategy.errors import CheckpointError, ConfigError, OptimizerError, ShardError
from fsdp2_strategy.model.master_weights import masters_of
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import is_offloaded
from fsdp2_strategy.optim.accumulation import LossScale

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


class Actor(nn.Module):
    """A policy, wrapped as trainers wrap it."""

    def __init__(self, seed=0):
        super().__init__()
        self.model = build("llama_tied", seed)

    def forward(self, ids):
        return self.model(input_ids=ids).logits


class Critic(nn.Module):
    """A value model: a backbone with a head of its own."""

    def __init__(self, seed=1):
        super().__init__()
        self.model = build("llama", seed).model
        torch.manual_seed(seed)
        self.value_head = nn.Linear(32, 1, bias=False)

    def forward(self, ids):
        return self.value_head(self.model(input_ids=ids).last_hidden_state).squeeze(-1)


def ids_of(step, rank):
    return tokens(torch.Generator().manual_seed(1000 * step + rank))


def policy_loss(actor, ids):
    logits = actor(ids)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def value_loss(critic, ids):
    return (critic(ids) - ids.to(critic.value_head.weight.dtype) / 96).square().mean()


def strategy_for(**config):
    return FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, "max_norm": 0.5, **config}))


# --- the sequence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", worlds(2, 4, usual=(2,)))
def test_the_sequence_of_an_rlhf_trainer_runs_as_it_is(world, tmp_path):  # noqa: PLR0915  it is that long
    args = SimpleNamespace(
        actor_learning_rate=1e-3, critic_learning_rate=2e-3, adam_betas=(0.9, 0.95), l2=0.01, lr_warmup_ratio=0.5
    )
    args.enable_engine_sleep = True
    source = tmp_path / "source"
    if dist.get_rank() == 0:
        build("llama_tied").save_pretrained(source)
    dist.barrier()
    strategy = FSDPV2Strategy(42, 1.0, 1, 2 * world, True, args)
    strategy.setup_distributed()
    assert (strategy.world_size, strategy.accumulated_gradient, strategy.args) == (world, 2, args)

    with strategy.init_model_context(meta_init=True):
        actor = Actor.__new__(Actor)
        nn.Module.__init__(actor)
        actor.model = AutoModelForCausalLM.from_pretrained(source)
    actor.is_actor = True
    actor = strategy.prepare_model(actor, is_training=True)
    actor.model.model.layers[0].requires_grad_(False)  # freezing after preparation
    reference = strategy.prepare_model(Actor(), is_training=False, shard_size="auto")
    strategy.offload_model(reference)
    critic, rewards, ema = Critic(), [Critic(2), None], strategy.prepare_model(Actor())
    of_actor, of_critic, rewards, reference = strategy.prepare_models_and_optimizers(
        actor, critic, rewards, reference, args, 10
    )
    (actor, optimizer, scheduler), (critic, critic_optimizer, critic_scheduler) = of_actor, of_critic
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95) and scheduler.get_last_lr()[0] == 0
    loaded = strategy.load_ckpt(actor.model, tmp_path / "ckpts", optimizer=optimizer, scheduler=scheduler)
    assert loaded == (None, {})
    strategy.setup_inference_engine(args, engine_type="transformers", actor=actor)

    for step in range(4):
        strategy.wakeup_inference_engine()
        prompt = ids_of(100 + step, strategy.get_rank())[:, :3]
        sequences = strategy.inference_engine.generate(
            prompt, max_new_tokens=2 + strategy.get_rank(), eos_token_id=None
        )
        assert sequences.shape[1] == 5 + strategy.get_rank()
        strategy.maybe_sleep_inference_engine()
        strategy.reload_model([reference, *rewards])
        with torch.no_grad():
            for model in (reference, rewards[0]):
                assert torch.isfinite(model(ids_of(step, strategy.get_rank()))).all()
        strategy.offload_model([reference, *rewards])
        strategy.maybe_load_optimizer(optimizer, strategy.device)
        strategy.maybe_load_optimizer(critic_optimizer)
        for micro in range(2):
            ids = ids_of(2 * step + micro, strategy.get_rank())
            strategy.backward(policy_loss(actor, ids), actor, optimizer)
            result = strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
            strategy.backward(value_loss(critic, ids), critic, critic_optimizer)
            its_result = strategy.optimizer_step(critic_optimizer, critic, critic_scheduler, name="critic")
            assert result.stepped == its_result.stepped == (micro == 1)
        assert result.step == its_result.step == step + 1
        strategy.moving_average(actor, ema, 0.9, "cuda")
        assert strategy.maybe_offload_optimizer(optimizer) is optimizer
        strategy.update_engine_weights(actor)
        status = strategy.all_reduce({"loss": float(strategy.get_rank()), "n": 1}, op="mean")
        assert status == {"loss": (world - 1) / 2, "n": 1.0}
        # Positional, without optimizer or schedule, while the optimizer's state is away.
        strategy.save_ckpt(actor.model, str(tmp_path / "ckpts"), f"global_step{step}", 2, 1000, {"step": step})
    assert tags(tmp_path / "ckpts") == ["global_step2", "global_step3"]
    assert "memory in GB, after training: " in strategy.report_memory("after training")
    strategy.sync_and_clear_cache()
    strategy.save_model(actor, None, tmp_path / "out")

    resumed = Actor(7)
    resumed.is_actor = True
    strategy.prepare_model(resumed, is_training=True)
    resumed.model.model.layers[0].requires_grad_(False)
    its_optimizer = strategy.create_optimizer(resumed, **OPTIONS)
    its_ema = strategy.prepare_model(Actor())
    path, state = strategy.load_ckpt(
        resumed.model, tmp_path / "ckpts", optimizer=its_optimizer, load_lr_scheduler_states=False, ema=its_ema
    )
    assert path.endswith("global_step3") and state == {"step": 3}
    strategy.maybe_load_optimizer(optimizer)
    assert_same(full_state(resumed, its_optimizer), full_state(actor, optimizer))
    assert_same(full_parameters(its_ema), full_parameters(ema))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(opened.named_parameters()), full_parameters(actor.model))


def cycle(strategy, models, optimizers, emas, steps):
    """Train actor and critic in turns, with everything going away and coming back between the steps."""
    norms = []
    for step in steps:
        for micro in range(2):
            ids = ids_of(2 * step + micro, dist.get_rank())
            for name, loss in (("actor", policy_loss), ("critic", value_loss)):
                if micro == 0:
                    strategy.reload_model(models[name])
                    strategy.maybe_load_optimizer(optimizers[name])
                strategy.backward(loss(models[name], ids), models[name], optimizers[name])
                result = strategy.optimizer_step(optimizers[name], models[name], None, name=name)
                if result.stepped:
                    norms.append(result.grad_norm)
                    emas[name].update(models[name])
                    strategy.offload_model(models[name])
                    strategy.maybe_offload_optimizer(optimizers[name])
    for name in models:
        strategy.reload_model(models[name])
        strategy.maybe_load_optimizer(optimizers[name])
    return norms


def clones(model):
    return {n: p.detach().clone() for n, p in named_parameters(model).items()}


def roles(strategy, dtype, seed=0, **options):
    models = {"actor": Actor(seed).to(dtype), "critic": Critic(seed + 1).to(dtype)}
    copies = {
        name: Unsharded(m, loss, max_norm=0.5, **OPTIONS)
        for (name, m), loss in zip(models.items(), (policy_loss, value_loss), strict=True)
    }
    optimizers, emas = {}, {}
    for name, model in models.items():
        model.is_actor = name == "actor"
        strategy.prepare_model(model, is_training=True, **options)
        optimizers[name] = strategy.create_optimizer(model, **OPTIONS)
        emas[name] = EMA(model, 0.9)
    return models, copies, optimizers, emas


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(2, 4, usual=(2,)))
def test_interleaved_steps_equal_the_unsharded_run(world):
    strategy = strategy_for(train_batch_size=2 * world)
    shard_size = 2 if world == 4 else -1
    models, copies, optimizers, emas = roles(strategy, torch.float64, shard_size=shard_size)
    averages = {
        name: {n: p.detach().clone() for n, p in named_parameters(c.model).items()} for name, c in copies.items()
    }
    steps = {2: 20, 4: 8}[world]
    norms = cycle(strategy, models, optimizers, emas, range(steps))
    expected_norms = []
    for step in range(steps):
        for name, copy in copies.items():
            batches = [ids_of(2 * step + micro, rank) for micro in range(2) for rank in range(world)]
            expected_norms.append(copy.step(batches, scale=0.5)[1])
            for n, p in named_parameters(copy.model).items():
                averages[name][n].lerp_(p.detach(), 1 - 0.9)
    assert norms == pytest.approx(expected_norms, rel=1e-10)
    for name, model in models.items():
        inner = strategy.unwrap_model(model)
        prefix = "model." if name == "actor" else ""
        expected = {n.removeprefix(prefix): p.detach() for n, p in named_parameters(copies[name].model).items()}
        assert_parameters_close(full_parameters(inner), expected, 1e-10)
        names = {id(p): n for n, p in named_parameters(inner).items()}
        state = {names[id(p)]: s for p, s in optimizers[name].state.items()}
        for copied, its_state in copies[name].optimizer.state.items():
            n = next(k for k, p in named_parameters(copies[name].model).items() if p is copied).removeprefix(prefix)
            for key in ("exp_avg", "exp_avg_sq"):
                assert_parameters_close({n: full(state[n][key])}, {n: its_state[key]}, 1e-9)
        expected = {n.removeprefix(prefix): a for n, a in averages[name].items()}
        assert_parameters_close({n: full(a) for n, a in emas[name].averages.items()}, expected, 1e-6)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_kill_in_the_middle_of_it_changes_no_bit(tmp_path):
    strategy = strategy_for(train_batch_size=4)
    models, _, optimizers, emas = roles(strategy, torch.float32)
    norms = cycle(strategy, models, optimizers, emas, range(10))
    for name, model in models.items():
        strategy.save_ckpt(model, tmp_path / name, ema=emas[name])
    norms += cycle(strategy, models, optimizers, emas, range(10, 20))

    strategy = strategy_for(train_batch_size=4)
    others, _, its_optimizers, its_emas = roles(strategy, torch.float32, seed=5)
    for name, model in others.items():
        strategy.load_ckpt(model, tmp_path / name, ema=its_emas[name])
        assert strategy.global_step(model) == 10
    assert cycle(strategy, others, its_optimizers, its_emas, range(10, 20)) == norms[20:]
    for name, model in others.items():
        assert_same(full_state(model, its_optimizers[name]), full_state(models[name], optimizers[name]))
        assert_same(
            {n: full(a) for n, a in its_emas[name].averages.items()},
            {n: full(a) for n, a in emas[name].averages.items()},
        )


# --- masters in the optimizer, float16 -------------------------------------------------------------------------------


def rounded_llama(seed=0):
    model = build("llama", seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_sync", some(["defer_all_reduce", "last"], ["last"]))
def test_masters_in_the_optimizer_are_the_same_arithmetic_as_masters_in_the_model(grad_sync, tmp_path):
    def prepare(*, use_mp_opt, seed=0):
        strategy = strategy_for(bf16=True, train_batch_size=4, use_mp_opt=use_mp_opt, grad_sync=grad_sync)
        model = strategy.prepare_model(rounded_llama(seed), is_training=True)
        return strategy, model, strategy.create_optimizer(model, **OPTIONS)

    plain = prepare(use_mp_opt=False)
    expected = train(*plain, None, range(12))
    strategy, model, optimizer = prepare(use_mp_opt=True)
    assert is_mp_optimizer(optimizer) and not is_mp_optimizer(plain[2])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    results = train(strategy, model, optimizer, None, range(6))
    strategy.save_ckpt(model, tmp_path)
    strategy.maybe_offload_optimizer(optimizer)
    assert all(m._local_tensor.is_meta for m in masters_of(model).values()), "masters go away with the optimizer"
    strategy.maybe_load_optimizer(optimizer)
    results += train(strategy, model, optimizer, None, range(6, 12))
    assert results == expected
    masters = {n: full(masters_of(model)[id(p)]) for n, p in named_parameters(model).items()}
    assert_same(masters, full_parameters(plain[1]))
    assert_same(full_parameters(model), {n: m.bfloat16() for n, m in masters.items()})

    resumed = prepare(use_mp_opt=True, seed=3)
    resumed[0].load_ckpt(resumed[1], tmp_path)
    assert train(*resumed, None, range(6, 12)) == expected[6:]
    with pytest.raises(
        CheckpointError, match=r"holds the state of FSDPadaptOptimizer\(AdamW\), expected that of AdamW"
    ):
        plain[0].load_ckpt(plain[1], tmp_path)


def save_with_masters(path):
    strategy = strategy_for(bf16=True, use_mp_opt=True)
    model = strategy.prepare_model(rounded_llama(), is_training=True)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    train(strategy, model, optimizer, None, range(2))
    strategy.save_ckpt(model, path)
    state = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, path / "expected.pt")
    dist.barrier()


def load_with_masters(path, shard_size):
    strategy = strategy_for(bf16=True, use_mp_opt=True)
    model = strategy.prepare_model(rounded_llama(4), is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    strategy.load_ckpt(model, path)
    expected = torch.load(path / "expected.pt")
    assert any(name.endswith(".master") for name in expected)
    assert_same(full_state(model, optimizer), expected)


@pytest.mark.full
def test_masters_load_on_any_number_of_ranks(tmp_path, run_on):
    run_on(3, save_with_masters, path=tmp_path)
    for world, shard_size in ((1, -1), (4, 2)):
        run_on(world, load_with_masters, path=tmp_path, shard_size=shard_size)


@pytest.mark.ranks(2)
def test_weights_that_come_from_elsewhere_reach_the_masters(tmp_path):
    strategy = strategy_for(bf16=True, use_mp_opt=True)
    model = strategy.prepare_model(rounded_llama(), is_training=True)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    strategy.save_ckpt(model, tmp_path)
    train(strategy, model, optimizer, None, range(2))
    strategy.load_ckpt(model, tmp_path, load_optimizer_states=False)
    expected = dict(rounded_llama().named_parameters())
    assert_same({n: full(masters_of(model)[id(p)]) for n, p in named_parameters(model).items()}, expected)


@pytest.mark.ranks(2)
def test_masters_have_the_same_numbers_with_every_kernel_of_adam():
    kernels = [{"foreach": True}, {"foreach": False}]
    kernels += [{"fused": True}] if device().type in FUSED_ADAM_DEVICES else []
    found = []
    for kernel in kernels:
        strategy = strategy_for(bf16=True, use_mp_opt=True)
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2, **kernel)
        train(strategy, model, optimizer, None, range(2))
        found.append({name: full(masters_of(model)[id(p)]) for name, p in named_parameters(model).items()})
    for other in found[1:]:
        assert_parameters_close(other, found[0], 1e-5)


def test_any_optimizer_gets_masters_around_it_or_from_parameters():
    torch.manual_seed(0)
    weights = [torch.randn(8, 4).bfloat16().float(), torch.randn(4)]
    gradients = [[torch.randn(8, 4).bfloat16().float(), torch.randn(4)] for _ in range(5)]

    def parameters(dtype):
        return [nn.Parameter(weights[0].to(dtype, copy=True)), nn.Parameter(weights[1].clone())]

    for cls, options in ((torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})):
        expected = parameters(torch.float32)
        around, made = parameters(torch.bfloat16), parameters(torch.bfloat16)
        optimizers = [
            cls(expected, **options),
            FSDPadaptOptimizer(cls(around, **options)),
            FSDPadaptOptimizer(made, optimizer_cls=cls, **options),
        ]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
        for i, step in enumerate(gradients):
            if i == 3:
                kept = optimizers[2].state_dict()
                optimizers[2] = FSDPadaptOptimizer(cls(made, lr=1.0, **{k: v for k, v in options.items() if k != "lr"}))
                optimizers[2].load_state_dict(kept)
                schedules[2] = torch.optim.lr_scheduler.ExponentialLR(optimizers[2], 0.5, last_epoch=2)
                schedules[2].load_state_dict(schedules[1].state_dict())
                optimizers[2].param_groups[0]["lr"] = optimizers[1].param_groups[0]["lr"]
            for optimizer, own, schedule in zip(optimizers, (expected, around, made), schedules, strict=True):
                for parameter, gradient in zip(own, step, strict=True):
                    parameter.grad = gradient.to(parameter.dtype)
                optimizer.step()
                schedule.step()
        for own in (around, made):
            assert torch.equal(own[0], expected[0].bfloat16()) and torch.equal(own[1], expected[1])
    with pytest.raises(ValueError, match=r"saved groups have \[1\] parameters, expected \[2\]"):
        optimizers[1].load_state_dict(FSDPadaptOptimizer([nn.Parameter(torch.ones(1))]).state_dict())


@pytest.mark.full
@pytest.mark.ranks(2)
def test_float16_scales_its_loss_skips_overflows_and_resumes(tmp_path):
    def prepare(seed=0):
        strategy = strategy_for(fp16=True, train_batch_size=4)
        model = strategy.prepare_model(build("llama", seed), is_training=True)
        return strategy, model, strategy.create_optimizer(model, **OPTIONS)

    strategy, model, optimizer = prepare()
    exact = strategy_for(train_batch_size=4)
    beside = exact.prepare_model(build("llama"), is_training=True)
    its_optimizer = exact.create_optimizer(beside, **OPTIONS)
    expected = train(exact, beside, its_optimizer, None, range(4))
    results = train(strategy, model, optimizer, None, range(4))
    for (loss, result, _), (its_loss, its_result, _) in zip(results, expected, strict=True):
        assert loss == pytest.approx(its_loss, rel=2e-3)
        assert result.stepped == its_result.stepped
        if result.stepped:
            assert result.grad_norm == pytest.approx(its_result.grad_norm, rel=2e-2)
    run = strategy._state_of(model).accumulation
    run.scale.value = 2.0**40
    before = full_parameters(model)
    results = train(strategy, model, optimizer, None, range(4, 6))
    assert results[1][1].skipped and run.scale.value == 2.0**39
    assert_same(full_parameters(model), before)
    run.scale.value = 2.0**14
    strategy.save_ckpt(model, tmp_path)
    expected = train(strategy, model, optimizer, None, range(6, 10))
    resumed = prepare(seed=2)
    resumed[0].load_ckpt(resumed[1], tmp_path)
    assert resumed[0]._state_of(resumed[1]).accumulation.scale.value == 2.0**14
    assert train(*resumed, None, range(6, 10)) == expected
    anew = prepare(seed=2)
    anew[0].load_ckpt(anew[1], tmp_path, load_optimizer_states=False)
    assert anew[0]._state_of(anew[1]).accumulation.scale.value == 2.0**16, "it belongs to the optimizer"


def test_a_loss_scale_grows_and_shrinks():
    scale = LossScale(8.0, interval=3)
    seen = []
    for finite in (True, True, True, True, False, True, True, True, False, False, False, False, False):
        scale.update(finite=finite)
        seen.append(scale.value)
    assert seen == [8, 8, 16, 16, 8, 8, 8, 16, 8, 4, 2, 1, 1]


@pytest.mark.ranks(2)
def test_under_float16_clipping_by_hand_speaks_of_true_gradients():
    strategy = strategy_for(fp16=True)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    strategy.backward(loss_of("llama", model, batch_of("llama", 0, dist.get_rank())), model, optimizer)
    norm = strategy.clip_grad_norm(model, 100.0)
    assert norm < 10
    assert strategy.clip_grad_norm(model, norm / 2) == pytest.approx(norm)
    assert strategy.clip_grad_norm(model, 100.0) == pytest.approx(norm / 2, rel=1e-3)


@pytest.mark.ranks(2)
def test_masters_are_not_lost_on_the_way_into_a_strategy():
    strategy = strategy_for(bf16=True, use_mp_opt=True)
    model = rounded_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with pytest.raises(OptimizerError, match="it keeps no fp32 master weights"):
        strategy.prepare((model, optimizer))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    with pytest.raises(OptimizerError, match="a learning-rate schedule was already built"):
        FSDPadaptOptimizer(optimizer)


@pytest.mark.ranks(2)
def test_a_scalar_parameter_has_the_same_numbers_wherever_masters_are():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = rounded_llama()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, input_ids):
            out = self.model(input_ids=input_ids)
            out.logits = out.logits * self.scale
            return out

    results = []
    for use_mp_opt in (False, True):
        strategy = strategy_for(bf16=True, use_mp_opt=use_mp_opt)
        model = strategy.prepare_model(Scaled(), is_training=True)
        optimizer = strategy.create_optimizer(model, **OPTIONS)
        results.append(train(strategy, model, optimizer, None, range(6)))
    assert results[0] == results[1]


# --- several meshes --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_one_optimizer_steps_parameters_of_several_meshes_with_one_right_norm():
    sizes = {"sharded": -1, "hybrid": 2, "replicated": 1, "plain": None}
    torch.manual_seed(0)
    modules = nn.ModuleDict({name: nn.Linear(6, 5).double() for name in sizes})

    def loss(m, x):
        return sum(m[name](x).square().mean() * (i + 1) for i, name in enumerate(sizes))

    unsharded = Unsharded(modules, loss, max_norm=0.1, **OPTIONS)
    for name, size in sizes.items():
        if size is not None:
            shard_model(modules[name], build_mesh(size), StrategyConfig(bf16=False), is_training=True)
    optimizer = build_optimizer(modules, **OPTIONS)
    for step in range(5):
        inputs = [
            torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step * 4 + r))
            for r in range(4)
        ]
        losses, norm = unsharded.step(inputs)
        value = loss(modules, inputs[dist.get_rank()])
        assert value.item() == pytest.approx(losses[dist.get_rank()], rel=1e-10)
        value.backward()
        for parameter in modules["plain"].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
        assert clip_grad_norm(modules, 0.1) == pytest.approx(norm, rel=1e-10)
        optimizer.step()
        optimizer.zero_grad()
        assert_parameters_close(full_parameters(modules), full_parameters(unsharded.model), 1e-10)


@pytest.mark.ranks(4)
def test_a_replicated_reference_stands_beside_a_sharded_actor():
    strategy = strategy_for()
    actor = strategy.prepare_model(Actor(), is_training=True, shard_size="auto")
    reference = strategy.prepare_model(Actor(), shard_size="auto")
    assert next(actor.parameters()).device_mesh.size() == 4
    assert next(reference.parameters()).to_local().shape == next(reference.parameters()).shape
    ids = ids_of(0, dist.get_rank())
    torch.testing.assert_close(actor(ids), reference(ids))


# --- averages --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_averages_take_the_parameters_place_and_give_it_back(tmp_path):
    strategy = strategy_for(bf16=True, use_mp_opt=True)
    model = strategy.prepare_model(rounded_llama(), is_training=True)
    optimizer = strategy.create_optimizer(model, **OPTIONS)
    ema = EMA(model, 0.5, device="cpu")
    expected = {n: p.detach().to("cpu", copy=True) for n, p in rounded_llama().named_parameters()}
    for step in range(3):
        train(strategy, model, optimizer, None, [step])
        ema.update(model)
        for n, p in named_parameters(model).items():
            expected[n].lerp_(full(masters_of(model)[id(p)]).cpu(), 0.5)
    own = full_parameters(model)
    with ema.swapped_in(model) as swapped:
        assert swapped is model
        assert_same(full_parameters(model), {n: a.bfloat16() for n, a in expected.items()})
        strategy.save_model(model, None, tmp_path)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
    assert_same(full_parameters(model), own)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(opened.named_parameters()), {n: a.bfloat16() for n, a in expected.items()})
    ema.copy_to(model)
    assert all(torch.equal(full(masters_of(model)[id(p)]).bfloat16(), full(p)) for p in model.parameters())
    other = strategy.prepare_model(nn.Linear(4, 4))
    before = full_parameters(other)
    with pytest.raises(ShardError, match="is missing"), ema.swapped_in(other):
        pass
    assert_same(full_parameters(other), before)
    with pytest.raises(ConfigError, match="decay is 2"):
        EMA(model, 2)
    with pytest.raises(ShardError, match=r"expected shape \[\d+, \d+\]"):
        ema.update(strategy.prepare_model(build("mlp")))


@pytest.mark.full
@pytest.mark.ranks(4)
def test_a_moving_average_keeps_fp32_behind_a_bf16_model_of_another_sharding():
    strategy = strategy_for(bf16=True)
    actor = strategy.prepare_model(Actor(), is_training=True)
    optimizer = strategy.create_optimizer(actor, **OPTIONS)
    ema = strategy.prepare_model(Actor(), shard_size=2)
    expected = {n: p.detach().bfloat16().float().cpu() for n, p in named_parameters(Actor()).items()}
    for step in range(3):
        strategy.backward(policy_loss(actor, ids_of(step, dist.get_rank())), actor, optimizer)
        strategy.optimizer_step(optimizer, actor)
        strategy.moving_average(actor, ema, 0.992, "cpu")
        for n, p in full_parameters(actor).items():
            expected[n].lerp_(p, 1 - 0.992)
    assert_same(full_parameters(ema), {n: p.bfloat16() for n, p in expected.items()})


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_moving_average_acts_once_per_optimizer_step(tmp_path):
    def start():
        strategy = strategy_for(train_batch_size=6)  # 3 micro-batches of 1 on each of 2 ranks
        actor = strategy.prepare_model(Actor(), is_training=True)
        optimizer = strategy.create_optimizer(actor, **OPTIONS)
        return strategy, actor, optimizer, strategy.prepare_model(Actor())

    def train(strategy, actor, optimizer, ema, micro_batches, expected):
        for micro in micro_batches:  # as LightRFT's trainers call it: after every micro-batch
            strategy.backward(policy_loss(actor, ids_of(micro, dist.get_rank())), actor, optimizer)
            stepped = strategy.optimizer_step(optimizer, actor).stepped
            strategy.moving_average(actor, ema, 0.9, "cpu")
            for n, p in full_parameters(actor).items() if stepped else ():
                expected[n].lerp_(p, 1 - 0.9)
        assert_same(full_parameters(ema), expected)

    strategy, actor, optimizer, ema = start()
    expected = full_parameters(ema)
    train(strategy, actor, optimizer, ema, range(7), expected)
    strategy.save_ckpt(actor, tmp_path)  # one micro-batch of the third step is lost

    strategy, actor, optimizer, ema = start()
    strategy.load_ckpt(actor, tmp_path, ema=ema)
    train(strategy, actor, optimizer, ema, range(6, 12), expected)

    other = strategy.prepare_model(Actor(9), is_training=True)  # other code steps it: every call acts
    expected = full_parameters(ema)
    for micro in range(2):
        strategy.backward(policy_loss(other, ids_of(micro, dist.get_rank())), other)
        strategy.moving_average(other, ema, 0.9)
        for n, p in full_parameters(other).items():
            expected[n].lerp_(p, 1 - 0.9)
    assert_same(full_parameters(ema), expected)


# --- the rest of the surface -----------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_all_reduce_and_all_gather_take_numbers_tensors_and_dicts():
    strategy = strategy_for()
    rank = strategy.get_rank()
    data = {"a": rank + 0.5, "n": rank, "t": torch.full((2,), rank), "deep": {"b": torch.tensor(2.0 * rank).bfloat16()}}
    mean = strategy.all_reduce(data)
    assert (mean["a"], mean["n"]) == (1.5, 1.0) and torch.equal(mean["t"], torch.ones(2))
    assert mean["deep"]["b"].dtype == torch.bfloat16 and mean["deep"]["b"] == 2
    assert data["n"] == rank and torch.equal(data["t"], torch.full((2,), rank)), "what was given is left alone"
    total = strategy.all_reduce(data, op="sum")
    assert total["n"] == 3 and isinstance(total["n"], int) and torch.equal(total["t"], torch.full((2,), 3))
    assert strategy.all_reduce(2**40 + rank, "max") == 2**40 + 2
    assert torch.equal(strategy.all_reduce(torch.tensor([True, rank == 0]), "max"), torch.tensor([True, True]))
    gathered = strategy.all_gather(data)
    assert torch.equal(gathered["t"], torch.tensor([0, 0, 1, 1, 2, 2]))
    assert gathered["a"].tolist() == [0.5, 1.5, 2.5] and gathered["deep"]["b"].tolist() == [0, 2, 4]
    assert strategy.all_reduce({"a/b": 1, "a": {"b": 0 if rank else 0.5}}, "sum") == {"a/b": 3, "a": {"b": 0.5}}
    with pytest.raises(ConfigError, match="op is 'min'"):
        strategy.all_reduce(1, "min")
    with pytest.raises(ConfigError, match=r"ranks \[2\] differ from rank 0"):
        strategy.all_reduce({"only": 1} if rank == 2 else {"other": 1})
    with pytest.raises(ConfigError, match="x is a str"):
        strategy.all_gather({"x": "text"})


@pytest.mark.ranks(2)
def test_a_loader_goes_on_in_the_middle_of_an_epoch():
    strategy = strategy_for(seed=3)
    data = list(range(22))

    def drawn(loader):
        return strategy.all_gather(torch.cat(list(loader))).reshape(2, -1)

    for shuffle in (True, False):
        loader = strategy.setup_dataloader(data, 2, shuffle=shuffle, drop_last=False)
        whole = drawn(loader)
        assert sorted(whole.flatten().tolist()) == data and len(loader.sampler) == 11
        rest = drawn(strategy.setup_dataloader(data, 2, shuffle=shuffle, drop_last=False, consumed_samples=8))
        assert torch.equal(rest, whole[:, 4:])
        loader.sampler.set_epoch(1)
        assert torch.equal(drawn(loader), whole) != shuffle
    assert len(strategy.setup_dataloader(list(range(21)), 4, collate_fn=list)) == 2, "what is over is left out"
    uneven = drawn(strategy.setup_dataloader(list(range(21)), 11, drop_last=False))
    assert len(uneven.flatten()) == 22 and set(uneven.flatten().tolist()) == set(range(21))
    for consumed in (24, 3, -2):
        with pytest.raises(ConfigError, match=f"consumed_samples is {consumed}"):
            strategy.setup_dataloader(data, 2, consumed_samples=consumed)


@pytest.mark.ranks(2)
def test_prepare_takes_models_and_pairs_whose_optimizer_is_older_than_the_shards():
    strategy = strategy_for()
    model, other = build("llama"), build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    (pair, single) = strategy.prepare((model, optimizer, schedule), other, is_rlhf=True)
    assert pair == (model, optimizer, schedule) and single is other
    before = full_parameters(model)
    train(strategy, model, optimizer, None, [0])
    after = full_parameters(model)
    assert all(not torch.equal(before[n], after[n]) for n in before)
    assert strategy.prepare(model) is model, "what is prepared passes through"
    assert strategy.prepare((model, optimizer))[1] is optimizer
    stepped = build("mlp", 1)
    its_optimizer = torch.optim.SGD(stepped.parameters(), lr=1, momentum=0.9)
    for parameter in stepped.parameters():
        parameter.grad = torch.ones_like(parameter)
    its_optimizer.step()
    with pytest.raises(OptimizerError, match="already has state"):
        strategy.prepare((stepped, its_optimizer))


@pytest.mark.ranks(2)
def test_a_reward_model_is_prepared_to_be_trained_and_offload_can_be_switched_off():
    strategy = FSDPV2Strategy(args={"actor_learning_rate": 0.5, "adam_offload": False, "bf16": False})
    reward, optimizer, scheduler = strategy.prepare_reward_model(Critic(), max_steps=100)
    strategy.backward(value_loss(reward, ids_of(0, strategy.get_rank())), reward, optimizer)
    assert strategy.optimizer_step(optimizer, reward, scheduler).stepped
    assert scheduler.get_last_lr()[0] == pytest.approx(0.5 / 3)
    assert strategy.maybe_offload_optimizer(optimizer) is optimizer and not is_offloaded(optimizer)
    assert strategy.maybe_offload_optimizer(None) is None and strategy.maybe_load_optimizer(None) is None
    assert strategy.offload_model(None) is None and strategy.prepare_models_and_optimizers(
        Actor(), None, None, None, None, 10
    )[1:] == ((None, None, None), None, None)
