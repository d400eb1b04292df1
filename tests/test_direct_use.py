"""Weights that are used without a call of their module: by wrappers, chunked losses, and tied matrices."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from helpers.frames import keeping_frames
from helpers.reference import CountCollectives, assert_close, full_grads, full_parameters
from helpers.training import strategy_for
from helpers.worlds import some, worlds
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import build_optimizer
from fsdp2_strategy.distributed.torch_internals import DisableTorchFunctionSubclass
from fsdp2_strategy.errors import LogProbError, ShardError
from fsdp2_strategy.logprob import linear_log_probs
from fsdp2_strategy.model.names import named_parameters


def llama(*, tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).double()


def chunked(hidden, weight, ids):
    """The cross-entropy of shifted tokens, for two rows at a time."""
    hidden, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = [
        F.cross_entropy(F.linear(h, weight), t, reduction="sum")
        for h, t in zip(hidden.split(2), targets.split(2), strict=True)
    ]
    return sum(parts) / len(targets)


class LogProbs(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, ids):
        hidden = self.lm.model(ids).last_hidden_state
        return -linear_log_probs(hidden[:, :-1], self.lm.lm_head.weight, ids[:, 1:], chunk_bytes=1).mean()


class Chunked(LogProbs):
    def forward(self, ids):
        return chunked(self.lm.model(ids).last_hidden_state, self.lm.lm_head.weight, ids)


class Checkpointed(LogProbs):
    """The weight is read again in backward."""

    use_reentrant = False

    def forward(self, ids):
        hidden = self.lm.model(ids).last_hidden_state
        part = lambda h, t: F.cross_entropy(F.linear(h, self.lm.lm_head.weight), t, reduction="sum")  # noqa: E731
        pairs = zip(hidden[:, :-1].flatten(0, 1).split(3), ids[:, 1:].flatten().split(3), strict=True)
        if not torch.is_grad_enabled():
            return sum(part(h, t) for h, t in pairs)
        return sum(checkpoint(part, h, t, use_reentrant=self.use_reentrant) for h, t in pairs)


class ReentrantCheckpoint(Checkpointed):
    use_reentrant = True


class EmbeddingAsHead(LogProbs):
    """Untied in the configuration, and used as head as well as embedding."""

    def forward(self, ids):
        hidden = self.lm.model(ids).last_hidden_state
        return chunked(hidden, self.lm.model.embed_tokens.weight, ids) + chunked(hidden, self.lm.lm_head.weight, ids)


class DtypeFirst(LogProbs):
    """Each layer's dtype is read before it runs, as adapters do; the head runs without gradients, too."""

    def forward(self, ids):
        hidden = self.lm.model(ids).last_hidden_state
        dtype = self.lm.lm_head.weight.dtype
        with torch.no_grad():
            target = self.lm.lm_head(hidden.to(dtype))
        return (self.lm.lm_head(hidden.to(self.lm.lm_head.weight.dtype)) - target / 2).square().mean()


class Actor(nn.Module):
    """A wrapper without parameters, whose inner model is the root."""

    is_actor = True

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        hidden = self.model(ids, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
        return chunked(hidden, self.model.lm_head.weight, ids)


class ActorOfDecoder(Actor):
    def forward(self, ids):
        return chunked(self.model.model(ids).last_hidden_state, self.model.lm_head.weight, ids)


class WeightFirst(nn.Module):
    """A layer whose weight is used before and after its forward: an autoencoder with tied weights, and more."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)

    def forward(self, ids):
        x = F.one_hot(ids, 64).double().view(*ids.shape, 4, 16).sum(2) if ids.ndim == 2 else ids
        x = torch.tanh(F.linear(self.other(x), self.inner.weight.t()))
        x = torch.tanh(self.inner(x) + self.inner.weight.sum())
        x = torch.tanh(self.outer(self.inner(x)))
        return F.linear(x, self.outer.weight.t(), self.inner.bias).square().mean()


class Kernel(torch.autograd.Function):
    """A linear layer as compiled code computes it: no operation of torch gets the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        with DisableTorchFunctionSubclass():
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class KernelFirst(WeightFirst):
    def forward(self, ids):
        x = F.one_hot(ids, 64).double().view(*ids.shape, 4, 16).sum(2)
        x = torch.tanh(Kernel.apply(self.other(x), self.inner.weight))
        return torch.tanh(self.outer(self.inner(x))).square().mean()


class Subclass(LlamaForCausalLM):
    def forward(self, ids):
        return chunked(self.model(ids).last_hidden_state, self.lm_head.weight, ids)


def subclass():
    model = llama()
    model.__class__ = Subclass
    return model


class Looked(nn.Module):
    """Three embeddings: a plain one, one that is computed again in backward, and one with a forward of its own."""

    _no_split_modules = ("Linear",)  # as transformers' models have: otherwise, embeddings stay gathered

    def __init__(self):
        super().__init__()
        self.plain, self.again = nn.Embedding(61, 16), nn.Embedding(61, 16)
        self.own = Own(61, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids):
        x = self.plain(ids) + self.own(ids)
        x = x * checkpoint(self.again, ids, use_reentrant=False)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class Own(nn.Embedding):
    def forward(self, ids):
        return F.one_hot(ids, self.num_embeddings).to(self.weight.dtype) @ self.weight


CASES = {
    "log-probs": lambda: LogProbs(llama()),
    "chunks": lambda: Chunked(llama()),
    "tied": lambda: Chunked(llama(tied=True)),
    "recomputed": lambda: Checkpointed(llama()),
    "recomputed, reentrant": lambda: ReentrantCheckpoint(llama()),
    "embedding": lambda: EmbeddingAsHead(llama()),
    "dtype": lambda: DtypeFirst(llama()),
    "actor": lambda: Actor(llama()),
    "tied actor": lambda: Actor(llama(tied=True)),
    "actor's decoder": lambda: ActorOfDecoder(llama()),
    "layers": lambda: WeightFirst().double(),
    "kernel": lambda: KernelFirst().double(),
    "own forward": subclass,
    "embeddings": lambda: Looked().double(),
}


def ids_of(step, rank):
    return torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def compare(case, *, frozen=(), wrap_later=False, micro_batches=1, after_backward=int, **config):
    """Train two steps beside the unsharded model, with passes without gradients in between."""
    torch.manual_seed(0)
    model = CASES[case]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    unsharded = copy.deepcopy(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = {"train_batch_size": 2 * ranks * micro_batches, "micro_train_batch_size": 2}
    with strategy_for(max_norm=0.0, **sizes, **config) as strategy:
        if wrap_later:
            strategy.prepare_model(model.model, is_training=True)
        model = strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        reference = build_optimizer(unsharded, lr=1e-2)
        for step in range(0, 2 * micro_batches, micro_batches):
            with torch.no_grad():
                passed = [model(ids_of(step, rank)).item() for _ in range(2)]
                expected = unsharded(ids_of(step, rank)).item()
            assert passed == pytest.approx([expected] * 2, abs=1e-12)
            for part in range(step, step + micro_batches):
                for other in range(ranks):
                    (unsharded(ids_of(part, other)) / micro_batches).backward()
                strategy.backward(model(ids_of(part, rank)), model, optimizer)
                after_backward()
                if part == step + micro_batches - 1:
                    for parameter in unsharded.parameters():
                        if parameter.grad is not None:
                            parameter.grad /= ranks
                    wanted = {n: p.grad for n, p in named_parameters(unsharded).items() if p.grad is not None}
                    assert_close(full_grads(model), wanted, 1e-10, case)
                strategy.optimizer_step(optimizer, model)
            reference.step()
            reference.zero_grad()
        assert_close(full_parameters(model), dict(named_parameters(unsharded)), 1e-9, case)


@pytest.mark.parametrize("case", some(CASES, [*CASES][::2]))
@pytest.mark.ranks(2)
def test_a_weight_that_is_used_directly_has_its_gradient(case):
    compare(case)


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(1, 3, usual=(3,)))
def test_a_weight_is_used_directly_on_any_number_of_ranks(world):
    for case in ("chunks", "embedding", "layers"):
        compare(case)


@pytest.mark.parametrize("case", some(CASES, ["embedding"]))
@pytest.mark.ranks(2)
def test_direct_uses_accumulate_gradients(case):
    for grad_sync in ("every", "last"):
        compare(case, micro_batches=3, grad_sync=grad_sync)


@pytest.mark.ranks(2)
def test_a_rank_whose_frames_another_thread_keeps_runs_what_the_other_runs():
    with keeping_frames() if dist.get_rank() else nullcontext(int) as release:
        compare("embedding", micro_batches=4, after_backward=release)


class Keeps:
    """A mode that keeps what it has run returned, as its frame does if another thread keeps the frame."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def run(self, func, types, args=(), kwargs=None):
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


class KeepOperators(Keeps, TorchDispatchMode):
    __torch_dispatch__ = Keeps.run


class KeepFunctions(Keeps, TorchFunctionMode):
    __torch_function__ = Keeps.run


@pytest.mark.parametrize("mode", [KeepOperators, KeepFunctions])
@pytest.mark.ranks(2)
def test_a_rank_with_a_mode_of_its_own_runs_what_the_other_runs(mode):
    """To read a dtype is no use, although the mode keeps what an operation on the weight returned."""
    with strategy_for() as strategy:
        model = strategy.prepare_model(DtypeFirst(llama()), is_training=True)
        for step in range(3):
            with mode() if dist.get_rank() else nullcontext():
                loss = model(ids_of(step, dist.get_rank()))
            strategy.backward(loss, model)


@pytest.mark.parametrize("case", some(CASES, ["actor"]))
@pytest.mark.ranks(2)
def test_direct_uses_need_no_resharding(case):
    compare(case, reshard_after_forward=False)


@pytest.mark.ranks(2)
def test_a_frozen_weight_that_is_used_directly_passes_gradients_on():
    compare("chunks", frozen=["lm_head"])
    compare("embedding", frozen=["embed_tokens"])
    compare("layers", frozen=["inner"])
    compare("kernel", frozen=["inner"])


@pytest.mark.parametrize("world", worlds(1, 3, 4, usual=(3,)))
def test_embeddings_have_their_gradients_on_any_number_of_ranks(world):
    for options in ({}, {"reshard_after_forward": False}, {"micro_batches": 2, "grad_sync": "last"}):
        compare("embeddings", **options)


@pytest.mark.ranks(2)
def test_a_plain_embedding_is_gathered_once_in_a_step():
    with strategy_for() as strategy:
        model = strategy.prepare_model(Looked().double(), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        gathered = []
        for step in range(3):
            with CountCollectives() as counter:
                strategy.backward(model(ids_of(step, dist.get_rank())), model, optimizer)
            strategy.optimizer_step(optimizer, model)
            gathered.append(counter.counts["allgather_base"])
    # Twice: the blocks, the embedding that is computed again, and the one whose forward is its own.
    assert gathered == [2 * 2 + 1 + 2 + 2] * 3, gathered


class EmbeddingOfRank(Looked):
    """Robots with an embedding each, which runs before the blocks."""

    def __init__(self):
        super().__init__()
        blocks = self._modules.pop("blocks")
        self.robots = nn.ModuleDict({"0": nn.Embedding(61, 16), "1": nn.Embedding(61, 16)})
        self.blocks = blocks

    def forward(self, ids, robot):
        x = self.plain(ids) + self.robots[robot](ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@pytest.mark.ranks(2)
def test_ranks_may_look_up_in_different_embeddings():
    torch.manual_seed(0)
    model = EmbeddingOfRank().double()
    unsharded, rank = copy.deepcopy(model), dist.get_rank()
    with strategy_for() as strategy:
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.0)
        for step, robots in enumerate(["01", "10", "00"]):
            unsharded.zero_grad()
            for other in range(2):
                (unsharded(ids_of(step, other), robots[other]) / 2).backward()
            strategy.backward(model(ids_of(step, rank), robots[rank]), model, optimizer)
            wanted = {n: p.grad for n, p in named_parameters(unsharded).items() if p.grad is not None}
            assert_close(full_grads(model), wanted, 1e-10, "gradient")
            strategy.optimizer_step(optimizer, model)


@pytest.mark.ranks(2)
def test_a_hook_of_backward_that_reads_an_embedding_on_one_rank_gathers_nothing():
    with strategy_for() as strategy:
        model = strategy.prepare_model(llama(), is_training=True)
        read = []
        if dist.get_rank():
            hook = lambda _: read.append(model.model.embed_tokens.weight)  # noqa: E731
            model.model.layers[0].register_forward_pre_hook(lambda _, args: args[0].register_hook(hook) and None)
        for step in range(2):
            strategy.backward(model(ids_of(step, dist.get_rank()), labels=ids_of(step, 0)).loss, model)
        assert len(read) == 2 * dist.get_rank()
        assert all(isinstance(weight, DTensor) for weight in read)


@pytest.mark.ranks(2)
def test_a_wrapper_of_a_prepared_model_uses_its_head():
    compare("actor", wrap_later=True)
    compare("actor's decoder", wrap_later=True)


class FailsOnce(Actor):
    fails = True

    def forward(self, ids):
        hidden = self.model.model(ids).last_hidden_state
        if self.fails:
            raise KeyError("this batch")
        return chunked(hidden, self.model.lm_head.weight, ids)


@pytest.mark.ranks(2)
def test_a_pass_of_a_wrapper_that_raised_is_forgotten():
    unsharded = FailsOnce(llama())
    unsharded.fails = False
    with strategy_for() as strategy:
        model = strategy.prepare_model(FailsOnce(llama()), is_training=True)
        with pytest.raises(KeyError, match="this batch"):
            model(ids_of(0, 0))
        model.fails = False
        assert model(ids_of(0, 0)).item() == pytest.approx(unsharded(ids_of(0, 0)).item(), abs=1e-12)


@pytest.mark.ranks(2)
def test_log_probs_of_a_sharded_weight_name_the_ways():
    with strategy_for() as strategy:
        model = strategy.prepare_model(llama(), is_training=True)
        with torch.no_grad():
            hidden = model(ids_of(0, 0), output_hidden_states=True).hidden_states[-1]
        with pytest.raises(LogProbError, match="Pass the wrapper whose forward calls it to prepare_model"):
            linear_log_probs(hidden, model.lm_head.weight, ids_of(0, 0))


class UsesBlock(LogProbs):
    def forward(self, ids):
        hidden = self.lm.model(ids).last_hidden_state
        return F.linear(hidden, self.lm.model.layers[0].self_attn.q_proj.weight).square().mean()


@pytest.mark.ranks(2)
def test_a_weight_of_a_block_that_is_used_outside_of_it_is_refused():
    with strategy_for() as strategy:
        model = strategy.prepare_model(UsesBlock(llama()), is_training=True)
        for _ in range(2):
            with pytest.raises(ShardError, match="used outside of the forward of its block"):
                model(ids_of(0, 0))


@pytest.mark.ranks(2)
def test_reading_the_dtype_of_a_weight_changes_nothing():
    """As Mamba reads that of its head; the head's gradients are reduced as early as ever."""
    with strategy_for() as strategy:
        model = strategy.prepare_model(ReadsDtype(llama()), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        reduced = []
        model.lm.model.layers[0].register_full_backward_hook(
            lambda *_: reduced.append(named_parameters(model)["lm.lm_head.weight"].grad is not None)
        )
        for step in range(2):
            strategy.backward(model(ids_of(step, dist.get_rank())), model, optimizer)
            strategy.optimizer_step(optimizer, model)
        assert reduced == [True, True]


class ReadsDtype(LogProbs):
    def forward(self, ids):
        hidden = self.lm.model(ids).last_hidden_state
        return self.lm.lm_head(hidden.to(self.lm.lm_head.weight.dtype)).square().mean()


@pytest.mark.ranks(1)
def test_outside_of_passes_a_weight_is_sharded():
    with strategy_for() as strategy:
        model = strategy.prepare_model(Chunked(llama()), is_training=True)
        assert isinstance(model.lm.lm_head.weight, DTensor)
        with torch.no_grad():
            model(ids_of(0, 0))
        assert isinstance(model.lm.lm_head.weight, DTensor)
        assert model.lm.lm_head.weight is dict(model.named_parameters())["lm.lm_head.weight"]
