"""Ranks that use different parameters: the gradient of the unsharded model, or an error on every rank."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.reference import (
    CountCollectives,
    Unsharded,
    assert_close,
    assert_parameters_close,
    full_grads,
    full_parameters,
)
from helpers.worlds import some
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2_strategy import FSDPV2Strategy, explain, shard_model
from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.distributed import unit_log, unit_watcher
from fsdp2_strategy.distributed.agreement import from_rank_0, to_rank_0
from fsdp2_strategy.distributed.process_group import on_group
from fsdp2_strategy.errors import ShardError, StepError

STEPS = 8
NAMES = ("a", "b", "c")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Base(nn.Module):
    """A trunk of blocks, and an output; subclasses run parts that depend on the sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(8, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def trunk(self, x, sample):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x, sample):
        return self.out(self.trunk(x, sample))


class LayerDrop(Base):
    def trunk(self, x, sample):
        for layer, keep in zip(self.layers, sample["keep"], strict=True):
            x = layer(x) if keep else x
        return x


class Reversed(LayerDrop):
    """Runs its layers from the last to the first, as some decoders do."""

    def trunk(self, x, sample):
        for layer, keep in zip(reversed(self.layers), sample["keep"], strict=True):
            x = layer(x) if keep else x
        return x


class DroppedOutputs(Base):
    def trunk(self, x, sample):
        for layer, keep in zip(self.layers, sample["keep"], strict=True):
            y = layer(x)
            x = y if keep else x
        return x


class Heads(Base):
    """A head for each robot, of which some ranks scale the output."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: Block() for name in NAMES})

    def forward(self, x, sample):
        y = self.out(self.heads[sample["head"]](self.trunk(x, sample)))
        return y * self.temperature if sample["head"] == "a" else y


class AllHeads(Heads):
    """All heads run, and the loss uses one of them."""

    def forward(self, x, sample):
        x = self.trunk(x, sample)
        return {name: self.out(head(x)) for name, head in self.heads.items()}[sample["head"]]


class ReturnedHeads(Heads):
    """All heads run within the model, and the caller chooses one of their outputs."""

    def forward(self, x, sample):
        x = self.trunk(x, sample)
        return {name: head(x) for name, head in self.heads.items()}


class Towers(Base):
    """A tower of blocks for each robot."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Sequential(Block(), Block()) for name in NAMES})

    def trunk(self, x, sample):
        return self.towers[sample["head"]](super().trunk(x, sample))


class Experts(Base):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def trunk(self, x, sample):
        x = super().trunk(x, sample)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (sample["route"] == number).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]))
        return x + mixed


class Conditional(Base):
    """Parameters, a small module and a block that only some samples use."""

    def __init__(self):
        super().__init__()
        self.embed, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.extra = Block()

    def trunk(self, x, sample):
        if sample["keep"][0]:
            x = x + self.embed(x)
        if sample["keep"][1]:
            x = x * self.scale
        x = super().trunk(x, sample)
        return self.extra(x) if sample["keep"][2] else x


MODELS = {
    cls.__name__: cls
    for cls in (LayerDrop, DroppedOutputs, Heads, AllHeads, ReturnedHeads, Towers, Experts, Conditional)
}


def loss_of(model, batch):
    x, sample, target = batch
    output = model(x, sample)
    if isinstance(output, dict):
        return (output[sample["head"]][:, :4] - target).pow(2).mean()
    return (output - target).pow(2).mean()


def batch_of(step, rank, micro_batch=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro_batch)
    unused = 0 if step % 4 == 3 else 1  # in some steps, no rank uses most parts
    sample = {
        "keep": (torch.rand(4, generator=generator) < 0.6 * unused).tolist(),
        "route": torch.randint(0, 4, (5,), generator=generator) * unused,
        "head": NAMES[int(torch.randint(0, 3, (), generator=generator)) * unused],
    }
    x = torch.randn(5, 8, generator=generator).double()
    return x, sample, torch.randn(5, 4, generator=generator).double()


def compare(name, *, frozen=(), micro_batches=1, shard_size=-1, **settings):
    """Train sharded and unsharded, with evaluation in between, and compare parameters."""
    ranks = dist.get_world_size()
    options = {"lr": 1e-2, "weight_decay": 0.1}
    settings = {"block_class_names": ("Block",), **settings}
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, train_batch_size=micro_batches * ranks, **settings))
    torch.manual_seed(0)
    model = {**MODELS, **UNUSUAL}[name]().double()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in parameter_name for part in frozen))
    reference = Unsharded(model, loss_of, **options)
    strategy.prepare_model(model, is_training=True, shard_size=shard_size)
    optimizer = strategy.create_optimizer(model, **options)
    for step in range(STEPS):
        batches = [[batch_of(step, rank, i) for i in range(micro_batches)] for rank in range(ranks)]
        own = batches[dist.get_rank()]
        if not step:  # a pass without gradients
            with torch.no_grad():
                torch.testing.assert_close(model(*own[0][:2]), reference.model(*own[0][:2]), rtol=1e-12, atol=0)
        _, norm = reference.step([b for of_rank in batches for b in of_rank], scale=1 / micro_batches)
        for batch in own:
            strategy.backward(loss_of(model, batch), model, optimizer)
            result = strategy.optimizer_step(optimizer, model)
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
    assert_parameters_close(full_parameters(model), full_parameters(reference.model), 1e-9)


@dataclass(frozen=True)
class Observation:
    state: torch.Tensor
    count: int = 0


class OfObservation(Block):
    def forward(self, inputs):
        return {"actions": (super().forward(inputs["observation"].state), None, 3)}


class OfTask(Block):
    """Gets integers only."""

    def __init__(self):
        super().__init__()
        self.tasks = nn.Embedding(4, 8)

    def forward(self, *, route):
        return super().forward(self.tasks(route))


class OfNothing(Block):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.ones(5, 8))

    def forward(self):
        return super().forward(self.queries)


class Observed(Heads):
    """The inputs and outputs of heads, and the output of the module that has them, are nested."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: OfObservation() for name in NAMES})

    def forward(self, x, sample):
        return self.out(self.observed(self.trunk(x, sample), sample).state)

    def observed(self, x, sample):
        return Observation(self.heads[sample["head"]]({"observation": Observation(x)})["actions"][0])


class OfPolicy(nn.Module):
    """Its own module returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.policy, self.last = Observed(), nn.Linear(8, 4)
        self.policy.forward = self.policy.observed

    def forward(self, x, sample):
        return self.last(self.policy(x, sample).state)


class Tasks(Heads):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: OfTask() for name in NAMES})

    def forward(self, x, sample):
        return self.out(self.trunk(x + self.heads[sample["head"]](route=sample["route"]), sample))


class Tables(Heads):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Embedding(4, 8) for name in NAMES})

    def forward(self, x, sample):
        return self.out(self.trunk(x + self.heads[sample["head"]](sample["route"]), sample))


class Queries(Heads):
    """Heads without inputs, before the trunk and after it."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: OfNothing() for name in NAMES})
        self.last = nn.ModuleDict({name: OfNothing() for name in NAMES})

    def forward(self, x, sample):
        x = self.trunk(x + self.heads[sample["head"]](), sample)
        return self.out(x + self.last[sample["head"]]())


class Checkpointed(Base):
    """Recomputes its layers itself, with the hooks of each."""

    def trunk(self, x, sample):
        for layer, keep in zip(self.layers, sample["keep"], strict=True):
            if keep:
                x = checkpoint(layer, x, use_reentrant=False) if torch.is_grad_enabled() else layer(x)
        return x


class ChangesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        x.add_(1.0)
        return self.block(x * 1.0)


class InPlace(Heads):
    """A head changes its input, which the model uses afterwards."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: ChangesInput() for name in NAMES})

    def forward(self, x, sample):
        x = self.trunk(x, sample) * 1.0
        return self.out(self.heads[sample["head"]](x) + x)


UNUSUAL = {cls.__name__: cls for cls in (InPlace, Observed, OfPolicy, Tasks, Tables, Queries, Checkpointed)}


@pytest.mark.parametrize("name", some(UNUSUAL, ["InPlace", "Queries", "Checkpointed"]))
@pytest.mark.parametrize("frozen", [(), pytest.param(("layers",), marks=pytest.mark.full)], ids=["", "frozen"])
@pytest.mark.ranks(2)
def test_parts_may_have_inputs_and_outputs_of_any_kind(name, frozen):
    classes = ("Block", "OfObservation", "OfTask", "OfNothing", "Embedding")
    compare(name, frozen=frozen, block_class_names=[c for c in classes if c in names_of_classes(UNUSUAL[name]())])


def names_of_classes(model):
    return {type(module).__name__ for module in model.modules()}


def ranked(*rows):
    return [
        pytest.param(*row, marks=[pytest.mark.ranks(row[0]), *([pytest.mark.full] if is_full else [])])
        for is_full, row in rows
    ]


@pytest.mark.parametrize(
    ("world", "name"),
    ranked(
        *((name not in ("LayerDrop", "Experts"), (2, name)) for name in MODELS),
        *((name not in ("DroppedOutputs", "Conditional"), (3, name)) for name in MODELS),
    ),
)
def test_ranks_that_use_different_parameters_train_as_the_unsharded_model(world, name):
    settings = {"conditional_modules": ("extra",)} if name == "Conditional" else {}
    compare(name, **settings)


SETTINGS = {
    "last": {"micro_batches": 3, "grad_sync": "last"},
    "deferred": {"micro_batches": 3, "grad_sync": "defer_all_reduce"},
    "every": {"micro_batches": 2, "grad_sync": "every"},
    "frozen trunk": {"frozen": ("layers",)},
    "frozen parts": {"frozen": ("layers.0", "heads.b", "experts.1", "towers.c")},
    "recomputed": {"activation_checkpointing": ("Block",)},
    "gathered": {"reshard_after_forward": False},
    "prefetched": {"prefetch_depth": 1},
    "masters": {"use_mp_opt": True},
    "size": {"block_class_names": (), "min_unit_params": 100},
    "ignored": {"ignored_modules": (r"heads\.b", r"experts\.2", "layers.1")},
}


@pytest.mark.parametrize(
    "name", some(["LayerDrop", "DroppedOutputs", "Heads", "AllHeads", "Towers", "Experts"], [], ["LayerDrop", "Heads"])
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.ranks(2)
def test_they_do_so_with_every_setting(name, settings):
    chosen = dict(SETTINGS[settings])
    if settings == "ignored":
        names = dict(MODELS[name]().named_modules())
        chosen["ignored_modules"] = [p for p in chosen["ignored_modules"] if p.replace("\\", "") in names]
    compare(name, **chosen)


@pytest.mark.parametrize("name", ["LayerDrop", "Heads", "Experts"])
@pytest.mark.parametrize("grad_sync", ["every", "defer_all_reduce", "last"])
@pytest.mark.ranks(4)
@pytest.mark.full
def test_they_do_so_with_replicas(name, grad_sync):
    compare(name, micro_batches=2, grad_sync=grad_sync, shard_size=2)


def gradients_of(cls, samples, **settings):
    """Compare the gradients of some passes with those of the unsharded model; ``samples`` are those of each rank."""
    torch.manual_seed(0)
    model = cls().double()
    reference = Unsharded(model, loss_of, lr=0.1)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=("Block",), **settings))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    for of_ranks in samples:
        x, _, target = batch_of(0, 0)
        reference.step([(x, sample, target) for sample in of_ranks])
        yield
        strategy.backward(loss_of(model, (x, of_ranks[dist.get_rank()], target)), model, optimizer)
        grads = full_grads(model)
        assert not any(grads[name].any() for name in grads.keys() - reference.grads.keys())
        assert_close({name: grads[name] for name in reference.grads}, reference.grads, 1e-9, cls.__name__)
        strategy.optimizer_step(optimizer, model)


class Methods(Heads):
    def loss(self, x, sample, target):
        """Run the heads outside of the forward."""
        return (self.out(self.heads[sample["head"]](self.trunk(x, sample))) - target).pow(2).mean()

    def twice(self, x, sample):
        return self(x, sample) + self(x, sample)

    @torch.no_grad()
    def act(self, x, sample):
        """Return an action that is stored, or run the heads, without gradients."""
        return x if x.shape[0] == 1 else self.out(self.heads[sample["head"]](self.trunk(x, sample)))


@pytest.mark.ranks(2)
def test_methods_of_the_model_may_run_parts():
    torch.manual_seed(0)
    model = Methods().double()
    reference = Unsharded(model, lambda own, batch: own.loss(*batch), lr=0.1)
    config = StrategyConfig(bf16=False, block_class_names=("Block",), forward_methods=("loss", "twice", "act"))
    strategy = FSDPV2Strategy(config=config)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    for step in range(3):
        batches = [batch_of(step, rank) for rank in range(2)]
        own = batches[dist.get_rank()]
        reference.step(batches)
        strategy.backward(model.loss(*own), model, optimizer)
        grads = full_grads(model)
        assert_close({name: grads[name] for name in reference.grads}, reference.grads, 1e-9, "methods")
        strategy.optimizer_step(optimizer, model)
        with torch.no_grad(), CountCollectives() as collectives:
            found = model.twice(*own[:2])
        torch.testing.assert_close(found, reference.model.twice(*own[:2]), rtol=1e-9, atol=1e-9)
        gathers = sum(count for name, count in collectives.counts.items() if "allgather" in name)
        assert gathers == 1 + 2 * 7  # the root, and twice four layers and three heads
        with CountCollectives() as collectives:
            action = model.act(*own[:2])
            stored = model.act(own[0][:1], own[1])
        assert not action.requires_grad and not stored.requires_grad
        gathers = sum(count for name, count in collectives.counts.items() if "allgather" in name)
        assert gathers <= 1 + 7 + 1  # the second call gathers the root at most


@pytest.mark.ranks(2)
def test_an_order_that_is_not_that_of_the_modules_is_learned_from_a_pass_without_skips():
    all_, none = {"keep": [True] * 4}, {"keep": [False] * 4}
    some_, others = {"keep": [True, False, True, False]}, {"keep": [False, True, True, False]}
    for _ in gradients_of(Reversed, [(all_, all_), (some_, others), (none, others), (all_, none)]):
        pass


@pytest.mark.ranks(2)
def test_a_rank_may_run_a_pass_while_it_handles_an_error():
    samples = [({"keep": [True, False, False, False]}, {"keep": [True] * 4})] * 2
    passes = gradients_of(LayerDrop, samples)
    next(passes)
    try:
        raise KeyError("a batch that is replaced")
    except KeyError as error:
        if dist.get_rank() == 0:
            next(passes)
        caught = error
    if dist.get_rank() == 1:
        next(passes)
    assert caught.args == ("a batch that is replaced",)
    assert not list(passes)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.heads = nn.ModuleDict({name: nn.Linear(8, 4) for name in "ab"})

    def forward(self, x, name):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.heads[name](x)


@pytest.mark.ranks(2)
def test_a_gradient_that_no_rank_computed_is_none_at_the_step_and_zero_where_another_rank_did():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    model = strategy.prepare_model(Policy(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    stepped = {}
    optimizer.register_step_pre_hook(
        lambda *_: stepped.update({n: p.grad is not None for n, p in model.named_parameters()})
    )
    before = full_parameters(model)
    strategy.backward(model(torch.ones(2, 8), "a").sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    assert stepped["heads.a.weight"] and not stepped["heads.b.weight"] and not stepped["heads.b.bias"]
    after = full_parameters(model)
    assert torch.equal(before["heads.b.weight"], after["heads.b.weight"])
    strategy.backward(model(torch.ones(2, 8), "ab"[dist.get_rank()]).sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    assert stepped["heads.a.weight"] and stepped["heads.b.weight"]


@pytest.mark.ranks(2)
def test_models_whose_ranks_agree_communicate_no_more():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=("Block",)))
    model = strategy.prepare_model(LayerDrop(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    sample = {"keep": [True] * 4}
    for _ in range(2):
        with CountCollectives() as collectives:
            strategy.backward(model(torch.ones(2, 8), sample).sum(), model, optimizer)
            strategy.optimizer_step(optimizer, model)
        counts = {name: count for name, count in collectives.counts.items() if "reduce_scatter" in name}
        assert sum(counts.values()) == 5  # four blocks and the root
        gathers = sum(count for name, count in collectives.counts.items() if "allgather" in name)
        assert gathers == 9  # twice each block, once the root
        assert collectives.counts["allreduce"] == 2  # the norm, and the parameter without dimensions


# --- real models of transformers --------------------------------------------------------------------------------------


def speech(model_class, config_class):
    config = config_class(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16),
        conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        layerdrop=0.4, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, apply_spec_augment=False, num_feat_extract_layers=2, vocab_size=12,
        ctc_loss_reduction="mean", attn_implementation="eager",
    )  # fmt: skip
    labels = {"low": 1, "high": 12, "size": (2, 5)}
    return model_class(config), lambda g: {
        "input_values": torch.randn(2, 120, generator=g).double(),
        "labels": torch.randint(**labels, generator=g),
    }


def hubert():
    from transformers import HubertConfig, HubertForCTC

    return speech(HubertForCTC, HubertConfig)


def wav2vec2():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return speech(Wav2Vec2ForCTC, Wav2Vec2Config)


def m2m100():
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    config = M2M100Config(
        vocab_size=50, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layerdrop=0.4,
        decoder_layerdrop=0.4, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, max_position_embeddings=40,
        pad_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    return M2M100ForConditionalGeneration(config), lambda g: {
        "input_ids": torch.randint(3, 50, (2, 7), generator=g),
        "labels": torch.randint(3, 50, (2, 6), generator=g),
    }


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, ffn_dim=32, num_attention_heads=2, layerdrop=0.4,
        dropout=0.0, attention_dropout=0.0, max_position_embeddings=40, word_embed_proj_dim=16, pad_token_id=1,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return OPTForCausalLM(config), lambda g: dict.fromkeys(
        ("input_ids", "labels"), torch.randint(3, 50, (2, 7), generator=g)
    )


def switch():
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=3, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, router_jitter_noise=0.0,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config), lambda g: {
        "input_ids": torch.randint(3, 50, (1, 4), generator=g),
        "labels": torch.randint(3, 50, (1, 3), generator=g),
    }


REAL = {make.__name__: make for make in (hubert, wav2vec2, m2m100, opt, switch)}


def seeded_loss(model, batch):
    torch.manual_seed(batch["seed"])  # layerdrop draws from the global generator
    return model(**{name: value for name, value in batch.items() if name != "seed"}).loss


@pytest.mark.parametrize(
    ("world", "name"),
    ranked(
        *((name not in ("hubert", "opt"), (2, name)) for name in REAL),
        *((True, (3, name)) for name in REAL),
    ),
)
def test_real_models_with_layerdrop_or_experts_train_as_unsharded_with_a_seed_per_rank(world, name):
    torch.manual_seed(0)
    model, batch_of = REAL[name]()
    dtype = torch.float32 if name == "switch" else torch.float64  # its router computes in fp32
    tolerance = 1e-5 if name == "switch" else 1e-9
    model = model.to(dtype).train()
    reference = Unsharded(model, seeded_loss, lr=1e-3, eps=1e-3, weight_decay=0.1)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3, eps=1e-3, weight_decay=0.1)
    for step in range(5):
        batches = [
            {**batch_of(torch.Generator().manual_seed(100 * step + rank)), "seed": 1000 * step + 7 * rank}
            for rank in range(world)
        ]
        reference.step(batches)
        strategy.backward(seeded_loss(model, batches[dist.get_rank()]), model, optimizer)
        grads = full_grads(model)
        assert not any(grads[n].any() for n in grads.keys() - reference.grads.keys())
        assert_close({n: grads[n] for n in reference.grads}, reference.grads, tolerance, name)
        strategy.optimizer_step(optimizer, model)


# --- errors -----------------------------------------------------------------------------------------------------------


class Ordered(Base):
    """Runs two units that are attributes in an order that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()

    def trunk(self, x, sample):
        for name in sample:
            x = getattr(self, name)(x)
        return x


def prepared(cls, **settings):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=("Block",), **settings))
    torch.manual_seed(0)
    model = strategy.prepare_model(cls(), is_training=True)
    return strategy, model, strategy.create_optimizer(model, lr=1e-2)


def all_raise(call, match):
    """Return the seconds until the error, which every rank must raise."""
    began = time.monotonic()
    with pytest.raises(StepError, match=match) as caught:
        call()
    text = [None] * dist.get_world_size()
    dist.all_gather_object(text, str(caught.value))
    assert len(set(text)) == 1, text
    return time.monotonic() - began


@contextmanager
def without_board():
    """Begin new logs, of ranks that share no memory, as those of several hosts."""
    alone = staticmethod(lambda group: None)
    with patch.object(unit_log._Board, "shared_by", alone), patch.object(unit_log, "_logs", {}):
        yield


@pytest.mark.parametrize("world", ranked((False, (2,)), (True, (3,))))
def test_units_in_another_order_are_an_error_on_every_rank_that_names_them(world):
    strategy, model, optimizer = prepared(Ordered)
    order = ("one", "two") if dist.get_rank() == 0 else ("two", "one")

    def train():
        for _ in range(2):
            strategy.backward(model(torch.ones(2, 8), order).sum(), model, optimizer)
            strategy.optimizer_step(optimizer, model)

    assert all_raise(train, r"rank 0 gathers two of Ordered, rank 1 gathers one of Ordered") < 10
    # the process group is as before, for another model
    compare("Heads")


CALLS = {
    "save_ckpt": (lambda strategy, model, folder: strategy.save_ckpt(model, folder), "compares values .* in save_ckpt"),
    "from_rank_0": (lambda *_: from_rank_0(1), "gets a value from rank 0"),
    "all_reduce": (lambda strategy, *_: strategy.all_reduce(1.0), "compares values .* in all_reduce"),
    "to_rank_0": (lambda *_: to_rank_0(1), "gathers values on rank 0"),
    "sync_and_clear_cache": (lambda strategy, *_: strategy.sync_and_clear_cache(), "waits in a barrier in .*_cache"),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", some(CALLS, ["save_ckpt"]))
@pytest.mark.ranks(2)
def test_a_rank_that_makes_another_call_and_one_that_runs_the_model_both_hear_of_it(name, first, tmp_path):
    """Also if the rank that makes the call has not run the model yet."""
    strategy, model, _ = prepared(Ordered)
    call, text = CALLS[name]

    def run():
        time.sleep(0.2 if dist.get_rank() != first else 0)  # one rank waits in its collective
        if dist.get_rank():
            call(strategy, model, tmp_path)
        else:
            model(torch.ones(2, 8), ("one", "two"))

    names = f"(?s)the ranks make different calls: rank 0 gathers the root unit of Ordered, rank 1 {text}"
    assert all_raise(run, f"{names}, expected .* Call {'it' if name.endswith('rank_0') else name} on every rank") < 5


@pytest.mark.full
@pytest.mark.ranks(3)
def test_a_rank_that_is_still_in_the_collective_before_hears_of_units_in_another_order():
    strategy, model, _ = prepared(Ordered)
    rank = dist.get_rank()

    def end(log, original=unit_log.UnitLog.end):
        time.sleep(0.2 if rank == 1 else 0)
        original(log)

    def train():
        strategy.backward(model(torch.ones(2, 8), ("two", "one") if rank == 2 else ("one", "two")).sum(), model)

    with patch.object(unit_log.UnitLog, "end", end):
        each = "rank 0 gathers two of Ordered, rank 1 gathers two of Ordered, rank 2 gathers one of Ordered"
        assert all_raise(train, each) < 5


@pytest.mark.ranks(2)
def test_a_rank_that_runs_another_pass_is_an_error_on_every_rank():
    strategy, model, optimizer = prepared(Heads)
    batch = batch_of(0, dist.get_rank())

    def train():
        strategy.backward(loss_of(model, batch), model, optimizer)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model(*batch[:2])
        strategy.optimizer_step(optimizer, model)

    assert all_raise(train, "rank 0 takes an optimizer step, rank 1 gathers the root unit of Heads") < 10
    strategy.optimizer_step(optimizer, model)  # nothing is lost
    strategy.wait_for_checkpoint()


@pytest.mark.ranks(2)
def test_modules_that_only_some_ranks_run_may_be_named():
    class Skipping(Ordered):
        pass

    _, model, _ = prepared(Skipping, conditional_modules=("one", "two"))
    order = ("one", "two") if dist.get_rank() == 0 else ("two",)
    model(torch.ones(2, 8), order).sum().backward()
    with pytest.raises(ShardError, match="the pattern 'three' matches no module"):
        prepared(Ordered, conditional_modules=("three",))


@pytest.mark.ranks(2)
def test_passes_without_backward_are_compared_at_the_next_collective_call():
    with without_board(), on_group(dist.new_group([0, 1])):
        model = shard_model(Ordered(), config=StrategyConfig(block_class_names=("Block",), bf16=False))
        log = unit_log.current_log()
        assert log._board is None
        log.begin(log.register("runs a", "", lambda: False))
        log.end()
        log.begin(log.register(f"runs {'bc'[dist.get_rank()]}", "", lambda: False))
        log.end()
        from fsdp2_strategy.distributed.agreement import any_rank

        assert all_raise(lambda: any_rank(False), "rank 0 runs b, rank 1 runs c") < 10
        assert not any_rank(False)  # and only once
        model(torch.ones(2, 8), ("one", "two"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["barrier", "step"])
@pytest.mark.ranks(2)
def test_ranks_that_wait_for_each_other_are_named_within_ten_seconds(kind, end_ranks):
    with without_board():
        strategy, model, optimizer = prepared(Heads)
        batch = batch_of(0, 0)
        strategy.backward(loss_of(model, batch), model, optimizer)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            if dist.get_rank() == 0:
                model(*batch[:2])
            elif kind == "barrier":
                dist.barrier()
            else:
                strategy.optimizer_step(optimizer, model)
    assert time.monotonic() - began < 10
    if kind == "step":
        expected = "rank 0 gathers the root unit of Heads, rank 1 takes an optimizer step"
        assert isinstance(caught.value, StepError) and expected in str(caught.value)
    elif dist.get_rank() == 0:  # the other rank waits in a call of torch
        assert isinstance(caught.value, StepError)
        assert "all ranks wait for each other" in str(caught.value) and "barrier" in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.full
def test_ranks_that_are_slow_in_turn_are_no_error():
    with patch.object(unit_watcher, "WATCH_SECONDS", 0.05):
        strategy, model, optimizer = prepared(Heads)
        for step in range(2):
            time.sleep(1.5 if dist.get_rank() == step else 0)
            loss = loss_of(model, batch_of(step, 0))
            time.sleep(1.5 if dist.get_rank() != step else 0)  # both have waited since the last comparison
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)


@pytest.mark.ranks(3)
@pytest.mark.full
def test_a_rank_that_waits_for_processes_that_train_no_model_is_no_error():
    engine = dist.new_group([0, 2])  # rank 2 stands for a process that generates
    with on_group(dist.new_group([0, 1])) if dist.get_rank() < 2 else nullcontext():
        if dist.get_rank() < 2:
            with patch.object(unit_watcher, "WATCH_SECONDS", 0.05):
                model = shard_model(Base(), config=StrategyConfig(block_class_names=("Block",), bf16=False))
                model(torch.ones(2, 8), None)
                if dist.get_rank() == 0:
                    dist.broadcast(torch.ones(1), group=engine, src=0)
                    dist.broadcast(torch.ones(1), group=engine, src=2)
                assert model(torch.ones(2, 8), None).isfinite().all()
        else:
            dist.broadcast(torch.ones(1), group=engine, src=0)
            time.sleep(3)
            dist.broadcast(torch.ones(1), group=engine, src=2)
    dist.barrier()


@pytest.mark.ranks(2)
def test_logs_are_compared_after_many_entries_without_a_comparison():
    with (
        patch.multiple(unit_log, _MOST_ENTRIES=5, _MOST_PUBLISHED=3),
        without_board(),
        on_group(dist.new_group([0, 1])),
    ):
        log = unit_log.begin_log()
        entries = {name: log.register(f"runs {name}", "", lambda: False) for name in "abc"}

        def difference():
            logs = [None] * 2
            dist.all_gather_object(logs, log.to_publish())
            return log.difference(dict(enumerate(logs))) if logs[0].epoch == logs[1].epoch else None

        for place in range(23):
            log.begin(entries["ab"[place % 2]])
            log.end()
            assert difference() is None
        log.begin(entries["a" if dist.get_rank() else "b"])
        log.end()
        assert "rank 0 runs b, rank 1 runs a" in difference()
        for _ in range(7):
            log.begin(entries["c"])
            log.end()
        sums = torch.tensor(log.numbers(), dtype=torch.float64)
        dist.all_reduce(sums)
        assert all_raise(lambda: log.check(sums.tolist()), "the ranks run different units") < 5
        assert difference() is None


@pytest.mark.ranks(1)
def test_what_a_rank_publishes_is_of_one_time():
    log = unit_log.UnitLog(dist.group.WORLD)

    class Watched(unit_log._Entries):
        def __getitem__(self, places):
            found = super().__getitem__(places)
            log.begin(entry)  # the main thread goes on
            log.check([0.0] * 4)
            log.begin(entry)
            return found

    entry = log.register("runs a", "", lambda: False)
    log._entries = Watched(7, [entry, entry])
    published = log.to_publish()
    assert (published.epoch, published.first, len(published.entries)) == (7, 0, 2)


@pytest.mark.ranks(2)
def test_a_board_that_is_full_is_used_again():
    with patch.object(unit_log, "_LENGTH", 8), patch.object(unit_log, "_logs", {}), on_group(dist.new_group([0, 1])):
        log = unit_log.begin_log()
        assert log._board is not None
        names = "abc"
        entries = {name: log.register(f"runs {name}", "", lambda: dist.barrier() is None) for name in names}
        run = lambda name: log.run(entries[name], dist.barrier)  # noqa: E731
        for place in range(29):
            run(names[place % 3])
        assert all_raise(lambda: run(names[dist.get_rank()]), "rank 0 runs a, rank 1 runs b") < 10
        for place in range(29):
            run(names[place % 3])


def test_plans_say_which_modules_ranks_may_skip():
    model, _ = opt()
    assert "layerdrop is 0.4, so ranks skip different layers" in explain(model, is_training=True, world_size=2)
    text = explain(Heads(), StrategyConfig(block_class_names=("Block",)), is_training=True, world_size=2)
    assert "ranks may use different entries of heads" in text
