"""Log-probabilities in chunks: those of the full logits, in value and gradient, whatever holds the head."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import _BASE, VOCAB, batch_of, build
from helpers.reference import assert_close, full_grads
from helpers.worlds import some, worlds
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, shard_model, sizes, token_log_probs
from fsdp2_strategy.errors import LogProbError
from fsdp2_strategy.logprob import LogitShape, linear_log_probs

ROW = VOCAB * 4
"""Bytes of one row of fp32 logits."""


def plain(model, ids, last, temperature=1.0, **inputs):
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))[:, -last - 1 : -1] / temperature
    all_log_probs = logits.log_softmax(dim=-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(dim=-1)
    return all_log_probs.gather(-1, ids[:, -last:, None]).squeeze(-1), entropy


def loss_of(log_probs, entropy):
    like = {"dtype": log_probs.dtype, "device": log_probs.device}
    weights = torch.linspace(-1, 2, log_probs.numel(), **like).view(log_probs.shape)
    return (log_probs * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.25), LogitShape(cap=3.0), LogitShape(0.5, 2.0)])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_a_linear_heads_log_probs_are_the_plain_ones_in_value_and_gradient(bias, shape, rows):
    assert_equals_plain(bias, shape, rows * ROW)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.25), LogitShape(0.5, 2.0)])
@pytest.mark.parametrize("cached_bytes", some([8, 400, 2400], [400]))
def test_log_probs_of_parts_of_the_vocabulary_are_the_plain_ones_in_value_and_gradient(
    bias, shape, cached_bytes, monkeypatch
):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", cached_bytes)
    assert_equals_plain(bias, shape, None)


def assert_equals_plain(bias, shape, chunk_bytes):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (15, VOCAB))
    offset = torch.randn(VOCAB, generator=generator, dtype=torch.float64) if bias else None
    targets = torch.randint(0, VOCAB, (3, 5), generator=generator)
    results = []
    for chunked in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, offset) if t is not None]
        h, w, *b = leaves
        if chunked:
            both = linear_log_probs(
                h.view(3, 5, 8), w, targets, *b, temperature=0.7, entropy=True, chunk_bytes=chunk_bytes, shape=shape
            )
        else:
            logits = shape.apply(nn.functional.linear(h.view(3, 5, 8), w, *b)) / 0.7
            every = logits.log_softmax(-1)
            both = every.gather(-1, targets[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)
        loss_of(*both).backward()
        results.append([*both, *(leaf.grad for leaf in leaves)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    options = {"temperature": 0.7, "chunk_bytes": chunk_bytes, "shape": shape}
    assert torch.equal(linear_log_probs(hidden.view(3, 5, 8), weight, targets, offset, **options), results[0][0])


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(1, 2, 3, 4))
def test_a_sharded_models_log_probs_and_gradients_are_those_of_full_logits(world):
    # llama: the head is a unit of its own; llama_tied, qwen2: it lies in the root; gpt2: no rotary positions
    for name in ("llama", "llama_tied", "gpt2", "qwen3", "qwen2_vl"):
        model = build(name).double()
        reference = copy.deepcopy(model)
        shard_model(model, build_mesh(2 if world == 4 else -1), StrategyConfig(bf16=False), is_training=True)
        batches = [batch_of(name, 0, rank) for rank in range(world)]
        for batch in batches:
            batch.pop("labels")
        if "pixel_values" in batches[0]:
            for batch in batches:
                batch["pixel_values"] = batch["pixel_values"].double()
        for batch in batches:
            ids, others = batch["input_ids"], {k: v for k, v in batch.items() if k != "input_ids"}
            loss_of(*plain(reference, ids, 7, 0.9, **others)).backward()
        batch = batches[dist.get_rank()]
        ours = token_log_probs(model, **batch, last=7, temperature=0.9, entropy=True, chunk_bytes=3 * ROW)
        assert ours[0].shape == (2, 7)
        loss_of(*ours).backward()
        with torch.no_grad():
            ids, others = batch["input_ids"], {k: v for k, v in batch.items() if k != "input_ids"}
            for mine, expected in zip(ours, plain(reference, ids, 7, 0.9, **others), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
        expected = {name: p.grad / world for name, p in reference.named_parameters() if p.grad is not None}
        # transformers computes parts of a float64 model in fp32
        assert_close(full_grads(model), expected, 1e-10 if name in ("llama", "llama_tied") else 1e-5, name)


@pytest.mark.ranks(2)
def test_in_bf16_they_are_the_plain_ones_of_the_same_model(monkeypatch):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", 1 << 10)  # no part of a sum may be rounded
    strategy = FSDPV2Strategy(config=StrategyConfig())
    for name in ("llama", "llama_tied"):
        model = strategy.prepare_model(build(name), is_training=True)
        ids = batch_of(name, 0, dist.get_rank())["input_ids"]
        grads = []
        for chunked in (True, False):
            both = (
                token_log_probs(model, ids, entropy=True, chunk_bytes=4 * ROW)
                if chunked
                else plain(model, ids, ids.shape[1] - 1)
            )
            assert both[0].dtype == torch.float32
            loss_of(*both).backward()
            grads.append(([t.detach() for t in both], full_grads(model)))
            model.zero_grad()
        for mine, expected in zip(grads[0][0], grads[1][0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
        assert_close(grads[0][1], grads[1][1], 1e-2, name)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
def test_training_on_them_takes_the_steps_of_the_plain_ones_with_accumulation_and_recomputation():
    config = StrategyConfig(bf16=False, train_batch_size=4, activation_checkpointing=("LlamaDecoderLayer",))
    finals = []
    for chunked in (True, False):
        strategy = FSDPV2Strategy(config=config)
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.01)
        for step in range(4):
            ids = batch_of("llama", step, dist.get_rank())["input_ids"]
            log_probs = token_log_probs(model, ids, chunk_bytes=ROW) if chunked else plain(model, ids, 11)[0]
            strategy.backward(-log_probs.mean(), model, optimizer)
            result = strategy.optimizer_step(optimizer, model, None)
        assert result.stepped
        finals.append({name: p.detach().full_tensor().clone() for name, p in model.named_parameters()})
    assert_close(finals[0], finals[1], 1e-4, "after two steps")  # Adam amplifies rounding, which depends on the CPU


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch):
    model = build("llama")
    ids = torch.randint(3, VOCAB, (4, 12))
    rows = []

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim > 1 and result.shape[-1] == VOCAB:
                rows.append(result.numel() // VOCAB)
            return result

    token_log_probs(model, ids)
    with Rows():
        token_log_probs(model, ids, chunk_bytes=5 * ROW).sum().backward()
    assert max(n for n in rows if n != 32) == 5  # what has 32 rows is the transposed weight


def test_on_a_cpu_only_the_logits_that_fit_into_the_cache_exist(monkeypatch):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", 4096)
    hidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (300, 500))
    targets, most = torch.randint(500, (300,)), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                most.append(result.untyped_storage().nbytes())
            return result

    with Sizes():
        sum(found.sum() for found in linear_log_probs(hidden, weight, targets, entropy=True)).backward()
    assert 4000 <= max(n for n in most if n not in (hidden.nbytes, weight.nbytes)) <= 5 * 4096


def test_parts_of_the_vocabulary_are_as_exact_as_a_softmax(monkeypatch):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", 1 << 10)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator) * 25
    bias = torch.zeros(VOCAB)
    bias[: VOCAB // 2] = -torch.inf  # no token of some parts is possible
    targets = torch.randint(VOCAB // 2, VOCAB, (64,), generator=generator)
    found, entropies = linear_log_probs(hidden, weight, targets, bias, entropy=True)
    exact = nn.functional.linear(hidden.double(), weight.double(), bias.double()).log_softmax(-1)
    torch.testing.assert_close(found, exact.gather(-1, targets[:, None]).squeeze(-1).float(), rtol=1e-6, atol=1e-4)
    of_exact = -(exact.exp() * exact.clamp(min=-1e9)).sum(-1)
    torch.testing.assert_close(entropies, of_exact.float(), rtol=1e-4, atol=1e-4)


def test_parts_of_the_vocabulary_are_computed_without_subnormal_numbers(monkeypatch):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", 1 << 10)
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(VOCAB, 16, requires_grad=True)
    subnormal = []

    class Found(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.__name__.split(".")[0] in ("exp", "exp_", "mul_", "addmm_"):
                subnormal.append(bool(((result != 0) & (result.abs() < torch.finfo(torch.float32).tiny)).any()))
            return result

    with Found():
        linear_log_probs(hidden * 20, weight, torch.zeros(64, dtype=torch.int64)).mean().backward()
    assert subnormal and not any(subnormal)


@pytest.mark.parametrize("own", [60, VOCAB])
@pytest.mark.ranks(2)
def test_ranks_that_share_a_head_combine_a_few_numbers_per_row(own, monkeypatch):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", 1 << 10)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (15, VOCAB))
    targets = torch.randint(0, VOCAB, (15,), generator=generator)
    part = slice(0, own) if dist.get_rank() == 0 else slice(own, VOCAB)
    results, sent = [], []

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                sent.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    for tokens, group in ((part, dist.group.WORLD), (slice(None), None)):
        h, w = hidden.clone().requires_grad_(), weight[tokens].clone().requires_grad_()
        with Sent():
            both = linear_log_probs(h, w, targets, entropy=True, group=group)
            loss_of(*both).backward()
        results.append([*both, h.grad, w.grad])
    assert len(sent) == 3, "the sizes of the parts, the sums of all rows, the gradient of the hidden states"
    results[1][3] = results[1][3][part]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_a_target_outside_of_the_vocabulary_is_an_error(monkeypatch):
    monkeypatch.setattr(sizes, "CACHED_LOGITS_BYTES", 1 << 10)
    hidden, weight = torch.randn(3, 4), torch.randn(5000, 4)
    for target in (-100, 5000):
        with pytest.raises(LogProbError, match=f"a target is {target}, expected 0 to 4999"):
            linear_log_probs(hidden, weight, torch.tensor([0, target, 1]))


CAPPED = {
    "Gemma2Config": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "GraniteConfig": {"logits_scaling": 3.0},
    "CohereConfig": {"logit_scale": 0.0625},
}


@pytest.mark.parametrize("config", CAPPED)
@pytest.mark.ranks(2)
def test_what_a_model_does_to_its_logits_after_the_head_is_done_to_the_chunks(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**_BASE, **CAPPED[config]))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    reference = copy.deepcopy(model)
    shard_model(model, config=StrategyConfig(bf16=False), is_training=True)
    ids, forward = torch.randint(3, VOCAB, (2, 9)), vars(model)["forward"]
    before = torch.get_rng_state()
    ours = token_log_probs(model, ids, entropy=True, chunk_bytes=ROW)
    assert torch.equal(torch.get_rng_state(), before)
    expected = plain(reference, ids, 8)
    loss_of(*ours).backward()
    loss_of(*expected).backward()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert_close(full_grads(model), {n: p.grad for n, p in reference.named_parameters()}, 1e-4, config)
    assert vars(model)["forward"] is forward and "forward" not in vars(model.get_output_embeddings())


def test_a_factor_before_a_soft_cap_is_measured():
    class ScaledAndCapped(transformers.LlamaForCausalLM):  # as Muse's
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.logits = torch.tanh(output.logits * 26**-0.5 / 20) * 20
            return output

    model = build("llama")
    model.__class__ = ScaledAndCapped
    with torch.no_grad():
        model.lm_head.weight.mul_(300)
    ids = torch.randint(3, VOCAB, (2, 9))
    torch.testing.assert_close(token_log_probs(model, ids), plain(model, ids, 8)[0])


@pytest.mark.ranks(2)
def test_what_cannot_be_is_an_error_on_every_rank():
    model = build("llama")
    shard_model(model)
    ids = torch.randint(3, VOCAB, (2, 9))
    for wrong in ({"last": 9}, {"last": 0}, {"temperature": 0.0}, {"chunk_bytes": 0}):
        with pytest.raises(LogProbError, match=next(iter(wrong))):
            token_log_probs(model, ids, **(wrong if dist.get_rank() else {}))
    with pytest.raises(LogProbError, match="at least two tokens"):
        token_log_probs(model, ids[0])
    with pytest.raises(LogProbError, match=r"'temprature' is neither an option .*Did you mean 'temperature'"):
        token_log_probs(model, ids, **({"temprature": 2.0} if dist.get_rank() else {}))
    token_log_probs(model, ids, output_attentions=False)  # similar to attention_mask
    for name in ("labels", "logits_to_keep"):
        with pytest.raises(LogProbError, match=f"{name} is among the inputs"):
            token_log_probs(model, ids, **({name: ids} if dist.get_rank() else {}))
    expected = token_log_probs(model, ids)
    assert torch.equal(expected, token_log_probs(model, ids))
    for name in ("t5", "bert", "vit", "mlp"):
        with pytest.raises(LogProbError, match=r"the head of \w+ is a"):
            token_log_probs(build(name), ids)


class Wrapper(nn.Module):
    """A wrapper without ``is_actor``, whose forward accepts only some arguments of the model's."""

    def __init__(self):
        super().__init__()
        self.model = build("llama")

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids, attention_mask)


class RenamingWrapper(Wrapper):
    def forward(self, sequences, attention_mask=None):
        return self.model(sequences, attention_mask)


def test_a_wrapper_needs_an_argument_for_the_tokens_and_no_other():
    wrapper, ids = Wrapper(), torch.randint(3, VOCAB, (2, 9))
    assert torch.equal(token_log_probs(wrapper, ids), token_log_probs(wrapper.model, ids))
    with pytest.raises(LogProbError, match=r"RenamingWrapper.forward has no argument input_ids.* is_actor = True"):
        token_log_probs(RenamingWrapper(), ids)


def test_they_are_as_exact_as_a_softmax_of_large_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator) * 25
    targets = (hidden @ weight.T).argmax(-1)
    ours = linear_log_probs(hidden, weight, targets, chunk_bytes=64 * ROW)
    assert torch.equal(ours, (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1))


def test_autocast_means_the_same_forward_and_backward():
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, VOCAB, (6,), generator=generator)
    grads = []
    for chunked in (True, False):
        hidden, weight = (torch.randn(n, 8, generator=generator.manual_seed(n)).requires_grad_() for n in (6, VOCAB))
        with torch.autocast("cpu", torch.bfloat16):
            if chunked:
                found = linear_log_probs(hidden, weight, targets, chunk_bytes=2 * ROW)
            else:
                logits = nn.functional.linear(hidden, weight).float()
                found = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
        found.sum().backward()
        grads.append({"hidden": hidden.grad, "weight": weight.grad})
    assert_close(grads[0], grads[1], 1e-2, "autocast")


@pytest.mark.ranks(2)
def test_a_model_may_be_asked_on_one_rank_before_it_is_sharded():
    model = build("llama")
    ids = batch_of("llama", 0, 0)["input_ids"]
    if dist.get_rank() == 0:
        token_log_probs(model, ids)
    shard_model(model, config=StrategyConfig(bf16=False))
    torch.testing.assert_close(token_log_probs(model, ids), plain(build("llama"), ids, ids.shape[1] - 1)[0])


def test_logits_that_are_changed_in_another_way_are_refused():
    class Trained(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2

    ids = torch.randint(3, VOCAB, (2, 9))
    halved = build("llama")
    halved.lm_head.register_forward_hook(lambda _m, _i, output: output * 0.5)
    trained = build("llama")
    factor = nn.Parameter(torch.tensor(2.0))
    trained.register_forward_hook(lambda _m, _i, output: setattr(output, "logits", output.logits * factor))
    of_another_class = build("llama")
    of_another_class.lm_head.__class__ = Trained
    masked = build("llama")
    mask = torch.arange(VOCAB) < VOCAB - 1
    masked.register_forward_hook(lambda _m, _i, output: setattr(output, "logits", output.logits * mask))
    in_place = build("llama")  # would change the log-probabilities, too
    in_place.register_forward_hook(lambda _m, _i, output: setattr(output, "logits", output.logits.mul_(0.5)))
    for odd in (halved, trained, of_another_class, masked, in_place):
        with pytest.raises(LogProbError, match="cannot compute"):
            token_log_probs(odd, ids)
    model = build("llama")
    model.register_forward_hook(lambda _m, _i, output: setattr(output, "logits", output.logits + 1))
    with pytest.raises(LogProbError, match="at most a fixed factor and a soft cap"):
        token_log_probs(model, torch.randint(3, VOCAB, (2, 9)))
