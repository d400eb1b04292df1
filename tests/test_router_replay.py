"""Experts that an engine chose, replayed by the trainer: equal choices, right values and gradients, clear errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import socket
import threading
from itertools import product

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import on_device
from helpers.reference import assert_close, full_grads
from helpers.routing_table import PAGE, entry_of, model_with_experts, rows_of, table_version, written_table
from helpers.split import InFloat64, tiny_model
from helpers.split_table import NAMES
from helpers.versions import ROUTERS_CHOOSE, needs_routers_that_choose
from helpers.worlds import some, some_rows
from torch.nn.functional import one_hot, pad

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, shard_model, stream_weights, token_log_probs
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.parallel import Routing, record_routing, replay_routing
from fsdp2_strategy.parallel.routing.plan import routers_of
from fsdp2_strategy.rollout import RemoteEngine, TransformersEngine, serve

MODELS = ("mixtral", "qwen3_moe", "gpt_oss", *(["deepseek_v3"] if ROUTERS_CHOOSE else []))
PROMPT, NEW = 9, 16
BATCH = 6


def model_of(name):
    """Build a model whose values depend much on the chosen experts."""
    model = tiny_model(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "experts" in parameter_name:
                parameter.mul_(3)
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return model


def prompts(rank=0):
    """Return prompts that are padded on the left, as an engine gets them."""
    generator = torch.Generator().manual_seed(7 + rank)
    ids = torch.randint(3, 64, (BATCH, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    return on_device(ids * mask), on_device(mask)


def generated(engine, ids, mask):
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    sequences = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True)
    return sequences, pad(mask, (0, NEW), value=1)


def padded_right(sequences, mask):
    """Return the same sequences with their padding on the right, as a trainer may lay them out."""
    order = (1 - mask).argsort(dim=1, stable=True)
    return {"input_ids": sequences.gather(1, order), "attention_mask": mask.gather(1, order)}


def of_tokens(choices, mask):
    """Return the experts of each token, sorted, without those of padding and of the last token of a sequence."""
    return [row[each.bool()][: PROMPT + NEW - 5].sort(-1).values for row, each in zip(choices, mask, strict=True)]


def count_differences(first, second):
    return sum(int((a[: len(b)] != b[: len(a)]).any(-1).sum()) for a, b in zip(first, second, strict=True))


def objective(log_probs, mask):
    weights = torch.linspace(0.5, 1.5, log_probs.shape[1], dtype=log_probs.dtype, device=log_probs.device)
    return (log_probs * weights * mask[:, -log_probs.shape[1] :]).sum() / 50


# --- an independent reference: the rule of each router, written out --------------------------------------------------


def weights_by_rule(name, router, hidden, chosen):
    logits = hidden @ router.weight.T + (router.bias if name == "gpt_oss" else 0)
    if name == "gpt_oss":
        return logits, logits.gather(1, chosen).softmax(-1)
    if name == "deepseek_v3":
        weights = logits.sigmoid().gather(1, chosen)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    weights = logits.softmax(-1).gather(1, chosen)
    if name == "deepseek_v2":
        return logits, weights * router.routed_scaling_factor
    is_normalised = name == "mixtral" or router.norm_topk_prob
    return logits, weights / weights.sum(-1, keepdim=True) if is_normalised else weights


@contextlib.contextmanager
def routed_by_rule(name, model, choices):
    """Make the routers of an unsharded model return given choices, with weights that are computed here."""
    changed = []
    for router_name, router in ((n, m) for n, m in model.named_modules() if n in choices):

        def forward(hidden, router=router, chosen=choices[router_name]):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits, weights = weights_by_rule(name, router, hidden, chosen.flatten(0, 1).long())
            return logits, weights, chosen.flatten(0, 1).long()

        router.forward = forward
        changed.append(router)
    yield
    for router in changed:
        del router.forward


# --- an engine in another precision ----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "checkpointing"), some_rows(product(MODELS, (False, True)), [("mixtral", False), ("qwen3_moe", True)])
)
def test_a_trainer_replays_the_experts_of_an_engine_in_bf16(name, checkpointing):
    model = model_of(name)
    unsharded = copy.deepcopy(model)
    shard_model(
        model, build_mesh(), StrategyConfig(bf16=False, activation_checkpointing=checkpointing), is_training=True
    )
    engine = TransformersEngine(model, dtype=torch.bfloat16)
    engine.update_weights(stream_weights(model, dtype=torch.bfloat16))
    with record_routing(engine.model) as routing:
        sequences, mask = generated(engine, *prompts(dist.get_rank()))
    assert routing.shape == (BATCH, PROMPT + NEW - 1)
    assert all(choices.dtype == torch.int8 for choices in routing.layers.values())
    batch = padded_right(sequences, mask)
    position_ids = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    batch["position_ids"] = position_ids

    with torch.no_grad(), record_routing(model) as own:
        without = token_log_probs(model, **batch)
    # Modes are not active in backward, so recomputed blocks compute some values in float32.
    precise, tolerance = (contextlib.nullcontext, 1e-5) if checkpointing else (InFloat64, 1e-10)
    with precise():
        with replay_routing(model, routing), record_routing(model) as replayed:
            log_probs = token_log_probs(model, **batch)
    objective(log_probs, batch["attention_mask"]).backward()

    differences = 0
    for layer, choices in routing.layers.items():
        of_engine = of_tokens(choices, routing.attention_mask)
        differences += count_differences(of_engine, of_tokens(own.layers[layer], batch["attention_mask"]))
        assert count_differences(of_engine, of_tokens(replayed.layers[layer], batch["attention_mask"])) == 0
    total = on_device(torch.tensor(differences))
    dist.all_reduce(total)
    assert total > 0, "the engine chose the same experts: the test shows nothing"

    # The unsharded model with the same choices; each rank computes both batches, for the mean of the gradients.
    batches = [None, None]
    dist.all_gather_object(batches, (batch, replayed.to_tensors()))
    for rank, (of_rank, tensors) in enumerate([map(on_device, pair) for pair in batches]):
        choices = routing_of_padding(unsharded, Routing.from_tensors(tensors), of_rank)
        with precise(), routed_by_rule(name, unsharded, choices):
            logits = unsharded(**of_rank, use_cache=False).logits.log_softmax(-1)
            expected = logits[:, :-1].gather(-1, of_rank["input_ids"][:, 1:, None]).squeeze(-1)
            (objective(expected, of_rank["attention_mask"]) / 2).backward()
        if rank == dist.get_rank():
            is_token = batch["attention_mask"][:, 1:].bool()
            assert (log_probs - expected)[is_token].abs().max() < tolerance
    expected_grads = {n: p.grad for n, p in unsharded.named_parameters() if p.grad is not None}
    assert_close(full_grads(model), expected_grads, 10 * tolerance, "gradient")
    assert all(expected_grads[f"{layer}.weight"].abs().max() > 0 for layer in routing.layers), "of routers"

    with torch.no_grad(), replay_routing(engine.model, routing):
        of_engine = token_log_probs(engine.model, **batch)
    far, near = ((each - of_engine)[is_token].abs().max().item() for each in (without, log_probs.detach()))
    far = on_device(torch.tensor([far, near]))
    dist.all_reduce(far, dist.ReduceOp.MAX)
    assert far[1] < 0.1 and far[0] > 10 * far[1], far


def routing_of_padding(model, replayed, batch):
    """Fill the choices of padding, which a record leaves out, with any experts."""
    filler = on_device(torch.arange(8))
    return {
        name: torch.where(choices < 0, filler[: choices.shape[-1]], choices)
        for name, choices in replayed.layers.items()
    }


# --- a model's own choices -------------------------------------------------------------------------------------------


def results_of(model, batch, context):
    model.zero_grad()
    with context:
        logits = model(**batch, use_cache=False).logits
    (logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])).mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_rows(
        product((*MODELS, "jetmoe"), (torch.float32, torch.bfloat16)),
        [("mixtral", torch.bfloat16), ("deepseek_v3", torch.float32)],
    ),
    ids=str,
)
def test_a_models_own_choices_change_no_bit(name, dtype):
    model = model_of(name).to(dtype)
    ids, mask = prompts()
    batch = {"input_ids": ids, "attention_mask": mask}
    expected = results_of(model, batch, contextlib.nullcontext())
    recording = record_routing(model)
    recorded = results_of(model, batch, recording)
    with torch.no_grad(), record_routing(model) as routing:
        model(**batch, use_cache=False)
    replayed = results_of(model, batch, replay_routing(model, routing))
    for logits, grads in (recorded, replayed):
        assert torch.equal(logits, expected[0])
        assert all(torch.equal(grads[n], g) for n, g in expected[1].items())
    routers = routers_of(model, "test")
    assert routers.keys() == routing.layers.keys()
    for router in routers.values():
        assert any(p.grad.abs().max() > 0 for p in router.module.parameters())


@pytest.mark.full
@pytest.mark.ranks(2)
def test_micro_batches_replay_their_rows_under_the_strategy():
    def strategy_and_model():
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0, gradient_accumulation_steps=2))
        model = strategy.prepare_model(model_of("qwen3_moe"), is_training=True)
        return strategy, model, strategy.create_optimizer(model, lr=1e-2)

    ids, mask = prompts(dist.get_rank())
    norms, results = [], []
    for is_replayed in (False, True):
        strategy, model, optimizer = strategy_and_model()
        with torch.no_grad(), record_routing(model) as routing:
            token_log_probs(model, ids, mask)
        for rows in (slice(0, 3), torch.tensor([3, 4, 5])):
            with replay_routing(model, routing[rows]) if is_replayed else contextlib.nullcontext():
                log_probs = token_log_probs(model, ids[rows], mask[rows])
            strategy.backward(objective(log_probs, mask[rows]), model, optimizer)
            norms.append(strategy.optimizer_step(optimizer, model, None).grad_norm)
        results.append({name: p.full_tensor() for name, p in model.named_parameters()})
    assert norms[1] == norms[3] and norms[1] > 0
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", some((False, True), (False,)))
def test_checkpointing_of_transformers_recomputes_with_the_same_choices_and_leaves_no_hooks(reentrant):
    model = model_of("mixtral")
    ids, _ = prompts()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers_of(other, "test").values():
            router.module.weight.neg_()
        with record_routing(other) as routing:
            other(ids, use_cache=False)
    batch = {"input_ids": ids}
    logits, grads = results_of(model, batch, replay_routing(model, routing))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with replay_routing(model, routing):
        first = model(**batch, use_cache=False).logits
    with replay_routing(model, routing[[1, 0, 2, 3, 4, 5]]):  # a second graph, before the backward of the first
        second = model(ids[[1, 0, 2, 3, 4, 5]], use_cache=False).logits
    assert torch.equal(first, logits) and torch.equal(second[[1, 0]], logits[:2])
    model.zero_grad()
    (first[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])).mean().backward()
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if n in grads)
    del first, second
    gc.collect()
    for router in routers_of(model, "test").values():
        assert not router.module._forward_pre_hooks and not router.module._forward_hooks


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some((*MODELS, "jamba", "deepseek_v32"), ("mixtral",)))
def test_generate_with_a_cache_records_the_choices_of_a_full_pass(name):
    model = model_of(name)
    with InFloat64(), record_routing(model) as routing:
        sequences, mask = generated(model, *prompts())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with InFloat64(), torch.no_grad(), record_routing(model) as full:
        model(sequences, attention_mask=mask, position_ids=positions, use_cache=False)
    assert torch.equal(routing.input_ids, sequences[:, :-1])
    assert torch.equal(routing.attention_mask, mask[:, :-1].bool())
    for layer, choices in full.layers.items():
        assert (choices[0, :4] == -1).all() and (choices[0, 4:] >= 0).all(), "padding has no choice"
        assert torch.equal(routing.layers[layer].sort(-1).values, choices[:, :-1].sort(-1).values)


def test_an_engine_returns_its_routing_as_plain_tensors():
    model = model_of("mixtral").float()
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model, dtype=None))
    ids, mask = prompts()
    sequences, tensors = engine.generate(ids, attention_mask=mask, max_new_tokens=4, return_routing=True)
    routing = Routing.from_tensors({name: tensor.clone() for name, tensor in tensors.items()})
    assert sequences.shape == (BATCH, PROMPT + 4) and routing.shape == (BATCH, PROMPT + 3)
    mask = pad(mask, (0, 4), value=1)
    own = routing_for(model, sequences, mask)
    with torch.no_grad(), replay_routing(model, routing.to("cpu")), record_routing(model) as replayed:
        model(sequences, attention_mask=mask, use_cache=False)
    for layer, choices in own.layers.items():
        assert (routing.layers[layer][0, :4] == -1).all() and (choices[:, -1] >= 0).all()
        assert torch.equal(replayed.layers[layer], choices), "also of the last token, which the engine did not compute"
    with pytest.raises(RolloutError, match="cannot return the routing: sampling_params was passed"):
        engine.generate(sampling_params={}, input_ids=[[1]], return_routing=True)


def test_a_server_sends_the_routing_of_its_engine():
    model = model_of("mixtral").float()
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model, dtype=None))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    thread = threading.Thread(target=serve, args=(engine, address), daemon=True)
    thread.start()
    ids, mask = prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "return_routing": True}
    remote = RemoteEngine(address)
    sequences, tensors = remote.generate(ids, **arguments)
    output, again = remote.generate(ids, **arguments, return_dict_in_generate=True)
    assert output.keys() == {"sequences"} and again.keys() == tensors.keys(), "the cache is not sent"
    remote.close()
    thread.join(60)
    expected, own = engine.generate(ids, **arguments)
    assert torch.equal(sequences, expected) and tensors.keys() == own.keys()
    assert all(torch.equal(tensors[name], own[name]) and tensors[name].dtype == own[name].dtype for name in own)
    assert Routing.from_tensors(tensors).shape == (BATCH, PROMPT + 3)


def test_several_generations_are_recorded_as_one_batch():
    model = model_of("mixtral")
    first, second = torch.arange(3, 9)[None], torch.arange(10, 14).repeat(2, 1)
    with record_routing(model) as routing:
        a, b = (model.generate(ids, max_new_tokens=3, do_sample=False) for ids in (first, second))
    assert routing.shape == (3, 8)
    assert routing.attention_mask.sum(1).tolist() == [8, 6, 6]
    sequences = torch.cat([a, pad(b, (0, 2))])
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2, [1] * 7 + [0] * 2])
    with torch.no_grad(), replay_routing(model, routing), record_routing(model) as replayed:
        model(sequences, attention_mask=mask, use_cache=False)
    for layer, choices in routing.layers.items():
        assert torch.equal(replayed.layers[layer][:, :8][choices >= 0], choices[choices >= 0])


# --- wrappers --------------------------------------------------------------------------------------------------------


class Critic(torch.nn.Module):
    """A wrapper with a value head, which is the root unit."""

    is_actor = True

    def __init__(self):
        super().__init__()
        self.model = model_of("mixtral")
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1, bias=False, dtype=torch.float64)

    def forward(self, ids):
        hidden = self.model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
        return self.head(hidden.double()).squeeze(-1)


@pytest.mark.ranks(2)
def test_a_wrapper_with_its_own_parameters_replays_and_recovers_from_a_wrong_routing():
    torch.manual_seed(0)
    critic = on_device(Critic())
    unsharded = copy.deepcopy(critic)
    shard_model(critic, build_mesh(), StrategyConfig(bf16=False), is_training=True)
    ids = prompts(dist.get_rank())[0].clamp(min=3)
    other = copy.deepcopy(unsharded)
    with torch.no_grad():
        for router in routers_of(other.model, "test").values():
            router.module.weight.neg_()
        with record_routing(other) as routing:
            other(ids)
    expected = []
    for model in (unsharded, critic):
        with replay_routing(model, routing):
            values = model(ids)
        values.square().mean().backward()
        expected.append(values.detach())
    assert (expected[0] - expected[1]).abs().max() < 1e-10
    wrong = routing if dist.get_rank() else without(routing, GATE)
    with pytest.raises(RolloutError, match=f"cannot replay routing: failed on rank 0: .*{re.escape(GATE)}"):
        with replay_routing(critic, wrong):
            critic(ids)
    critic.zero_grad()
    with replay_routing(critic, routing):
        again = critic(ids)
    again.square().mean().backward()
    assert torch.equal(again, expected[1])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_peft_model_replays_the_routing_of_its_merged_engine():
    peft = pytest.importorskip("peft")
    base = model_of("mixtral").float()
    targets = {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]}
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model, dtype=None))
    ids = prompts()[0].clamp(min=3)
    routing = routing_for(engine.model, ids)
    with replay_routing(model, routing), record_routing(model) as replayed:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert all(torch.equal(replayed.layers[name], choices) for name, choices in routing.layers.items())
    assert all(p.grad is not None for n, p in model.named_parameters() if "gate" in n and "lora" in n)


# --- errors ----------------------------------------------------------------------------------------------------------


def routing_for(model, ids, mask=None):
    with torch.no_grad(), record_routing(model) as routing:
        model(ids, attention_mask=mask, use_cache=False)
    return routing


def without(routing, name):
    return Routing({n: c for n, c in routing.layers.items() if n != name}, routing.input_ids)


def changed(routing, function):
    return Routing({name: function(choices) for name, choices in routing.layers.items()}, routing.input_ids)


GATE = "model.layers.1.mlp.gate"
WRONG = {
    "no layers": (lambda r: Routing(), "it has no layers"),
    "no routing": (lambda r: r.to_tensors(), "routing is a dict, expected a Routing"),
    "another model": (
        lambda r: Routing({"model.layers.9.gate": r.layers[GATE]}),
        "are no routers of MixtralForCausalLM",
    ),
    "a layer too few": (lambda r: without(r, GATE), f"{re.escape(GATE)} is not in the routing"),
    "other sequences": (lambda r: r[[1, 0, 2, 3, 4, 5]], "token 0 of sequence 0 is .*, expected .*, as recorded"),
    "fewer sequences": (lambda r: r[:4], "the batch has 6 sequences, expected 4, as recorded"),
    "fewer tokens": (lambda r: Routing({n: c[:, :5] for n, c in r.layers.items()}), "4 tokens of a sequence were not"),
    "k": (lambda r: changed(r, lambda c: c[..., :1]), "has 1 experts for each token, expected 2"),
    "too large": (
        lambda r: changed(r, lambda c: torch.where(c == 0, 90, c)),
        "has the expert 90, expected indices below",
    ),
    "repeated": (lambda r: changed(r, lambda c: c[..., :1].repeat(1, 1, 2)), "a token with an expert twice"),
}


@pytest.mark.ranks(2)
def test_a_wrong_routing_is_an_error_on_every_rank():
    model = model_of("mixtral")
    shard_model(model, build_mesh(), StrategyConfig(bf16=False), is_training=True)
    ids = prompts()[0].clamp(min=3)
    routing = routing_for(model, ids)
    for what, (make, match) in WRONG.items():
        for ranks in ((0, 1), (1,)):
            own = make(routing) if dist.get_rank() in ranks else routing
            with pytest.raises(
                RolloutError, match=f"{'failed on rank 1: ' if ranks == (1,) else '^cannot .*'}.*{match}"
            ):
                with torch.no_grad(), replay_routing(model, own):
                    model(ids, use_cache=False)
                    pytest.fail(f"a forward pass ended: {what}")
    with torch.no_grad(), replay_routing(model, routing):
        model(ids, use_cache=False)  # the model still works


def test_a_replay_or_record_without_a_pass_is_an_error():
    model = model_of("mixtral")
    routing = routing_for(model, prompts()[0])
    with pytest.raises(RolloutError, match=r"ran no forward pass, expected one at least. Run the model inside"):
        with replay_routing(model, routing):
            pass
    with pytest.raises(RolloutError, match=r"cannot record routing: .* ran no forward pass"):
        with record_routing(model):
            pass
    with pytest.raises(RolloutError, match=r"the model is a TransformersEngine, .*pass engine.model"):
        with record_routing(TransformersEngine(model)):
            pass
    with pytest.raises(KeyError), replay_routing(model, routing):
        raise KeyError  # an error of the block is not hidden
    with pytest.raises(RolloutError, match="it has no layers"):
        with record_routing(model) as routing:
            routing.shape  # noqa: B018


def test_a_record_that_begins_in_the_middle_of_a_generation_is_an_error():
    model = model_of("mixtral")
    ids = prompts()[0]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(RolloutError, match="continues 9 cached tokens of 6 sequences, expected 0 of 0"):
            with record_routing(model):
                model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 3, "num_return_sequences": 3}, r"of sequence . is .*, expected .*, as recorded"),
        ({"use_cache": False}, r"the batch has 1 sequence, expected 8, as recorded"),
        ({"prompt_lookup_num_tokens": 2, "eos_token_id": 95}, r"cached tokens of 1 sequence, expected .* of 1, as"),
    ],
    ids=["beams", "no cache", "assistant"],
)
def test_generations_that_cannot_be_replayed_are_an_error(options, match):
    model = model_of("mixtral")
    ids = torch.arange(3, 7).repeat(3)[None]
    with pytest.raises(RolloutError, match=match):
        with record_routing(model) as routing:
            sequences = model.generate(ids, max_new_tokens=8, do_sample=False, **options)
        with replay_routing(model, routing):
            model(sequences, use_cache=False)


def test_a_static_cache_is_replayed_with_the_mask_of_the_prompts():
    model = model_of("mixtral").float()
    ids, mask = prompts()
    with record_routing(model) as routing:
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static"
        )
    mask = pad(mask, (0, 4), value=1)
    if routing.attention_mask is None:
        with pytest.raises(RolloutError, match="as recorded"), replay_routing(model, routing):
            model(sequences, attention_mask=mask, use_cache=False)
    known = Routing(routing.layers, routing.input_ids, mask[:, :-1])
    with torch.no_grad(), replay_routing(model, known), record_routing(model) as replayed:
        model(sequences, attention_mask=mask, use_cache=False)
    is_token = mask[:, :-1].bool()
    for layer, choices in replayed.layers.items():
        assert torch.equal(choices[:, :-1][is_token], routing.layers[layer][is_token])


@needs_routers_that_choose
def test_experts_of_more_groups_than_the_router_chooses_are_an_error():
    model = model_of("deepseek_v3")
    router = next(iter(routers_of(model, "test").values())).module
    assert (router.num_group, router.topk_group, router.top_k) == (4, 2, 2)
    router.topk_group = 1
    ids = prompts()[0]
    routing = routing_for(model, ids)
    choices = next(iter(routing.layers.values()))
    per_group = router.num_experts // 4
    assert torch.equal(choices[..., 0] // per_group, choices[..., 1] // per_group)
    choices[0, 0] = torch.tensor([0, per_group])
    with pytest.raises(RolloutError, match="in more groups than the router chooses"):
        with torch.no_grad(), replay_routing(model, routing):
            model(ids, use_cache=False)


@needs_routers_that_choose
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])  # the first one masks the scores of other groups
def test_groups_follow_from_the_experts(name):
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    model = tiny_model(name, **groups if name == "deepseek_v2" else {})
    ids = prompts()[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers_of(other, "test").values():
            assert router.kind.experts_attribute == "num_experts", "it chooses groups"
            router.module.weight.neg_()
    routing = routing_for(other, ids)
    own = routing_for(model, ids)
    assert any(not torch.equal(routing.layers[n], own.layers[n]) for n in own.layers)
    with torch.no_grad(), InFloat64():
        with replay_routing(model, routing):
            logits = model(ids, use_cache=False).logits
        with routed_by_rule(name, model, routing.layers):
            expected = model(ids, use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-10


@pytest.mark.full
@pytest.mark.ranks(2)
def test_split_sequences_and_compiled_blocks_are_refused():
    ids = prompts()[0].clamp(min=3)
    routing = routing_for(model_of("mixtral"), ids)
    model = shard_model(
        model_of("mixtral"), build_mesh(), StrategyConfig(bf16=False, compile_blocks="eager"), is_training=True
    )
    with pytest.raises(RolloutError, match=r"model.layers.0 is compiled, expected routers.*compile_blocks=False"):
        with replay_routing(model, routing):
            pass
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, sequence_parallel_size=2))
    model = strategy.prepare_model(model_of("mixtral").float(), is_training=True)
    for context in (lambda: record_routing(model), lambda: replay_routing(model, routing)):
        with pytest.raises(
            RolloutError, match=r"ranks share the sequences of MixtralForCausalLM.*sequence_parallel_size=1"
        ):
            with context():
                pass


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model("phimoe"), r"PhimoeForCausalLM chooses experts in another way .* \(PhimoeTopKRouter\)"),
        (lambda: tiny_model("llama"), "LlamaForCausalLM has no mixture of experts"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not a model of transformers"),
        (
            lambda: transformers.SwitchTransformersForConditionalGeneration(
                transformers.SwitchTransformersConfig(
                    vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2
                )
            ),
            "has an encoder and a decoder",
        ),
    ],
    ids=["phimoe", "llama", "linear", "switch"],
)
def test_models_without_replay_are_refused_by_name(model, reason):
    model = model()
    with pytest.raises(RolloutError, match=f"cannot record routing: {'' if 'has an' in reason else reason}"):
        with record_routing(model):
            pytest.fail("the block ran")
    routing = Routing({"a.b": torch.zeros(1, 1, 1, dtype=torch.int8)})
    with pytest.raises(RolloutError, match=f"cannot replay routing: .*{reason}"), replay_routing(model, routing):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"a.b": torch.zeros(2, 3)}, r"the shape \[2, 3\], expected \[batch, length, k\]"),
        ({"a.b": torch.zeros(2, 3, 1).long(), "a.c": torch.zeros(2, 4, 1).long()}, "same batch and length in all"),
        ({"a.b": torch.zeros(2, 3, 1)}, "are torch.float32, expected signed integers"),
        ({"a.b": torch.zeros(2, 3, 1).long(), "input_ids": torch.zeros(2, 4)}, r"input_ids has the shape \[2, 4\]"),
    ],
    ids=["dimensions", "lengths", "dtype", "ids"],
)
def test_tensors_that_are_no_routing_are_an_error(tensors, match):
    with pytest.raises(RolloutError, match=match):
        Routing.from_tensors(tensors)


def test_a_routing_is_sliced_and_concatenated():
    layers = {"a.b": torch.arange(12).view(2, 3, 2)}
    routing = Routing(layers, torch.arange(6).view(2, 3))
    assert len(routing) == 2 and len(routing[[True, False]]) == 1
    with pytest.raises(RolloutError, match="rows is the number 1, expected a slice"):
        routing[1]
    joined = Routing.cat([routing, Routing({"a.b": layers["a.b"][:, :1]}, torch.zeros(2, 1))])
    assert joined.shape == (4, 3) and joined.layers["a.b"][2, 1:].eq(-1).all()
    assert joined.attention_mask.sum(1).tolist() == [3, 3, 1, 1]
    for parts, match in (([], "there are none"), ([routing, Routing(layers)], "only some have token ids")):
        with pytest.raises(RolloutError, match=match):
            Routing.cat(parts)


# --- all model types -------------------------------------------------------------------------------------------------

USUAL = ("mixtral", "gpt_oss", "phimoe")

IDENTITIES_FROM = {"longcat_flash": 8}
"""Experts from this index on have no weights."""

EXPERTS_ELSEWHERE = ("dbrx",)
"""Model types whose experts are not parameters with one row for each expert, next to the router."""


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("name", some(NAMES, USUAL, full=list(rows_of(PAGE.read_text()))[::2]))
def test_each_model_type_is_in_the_table_and_computes_the_replayed_experts(name):
    model = model_with_experts(name)
    entry = entry_of(model)
    if transformers.__version__ == table_version():
        assert rows_of(PAGE.read_text()).get(name) == entry, "run the command of docs/rollout.md"
    if entry is None or not entry[0]:
        return
    model.float()
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
    own = routing_for(model, ids)
    # The first choice of some token for all tokens: experts that the router can choose together.
    same = {layer: choices[0, 3].expand_as(choices) for layer, choices in own.layers.items()}
    with replay_routing(model, Routing(same, ids)), record_routing(model) as replayed:
        logits = model(ids, use_cache=False).logits
    assert all(torch.equal(replayed.layers[layer], choices) for layer, choices in same.items())
    logits.float().square().sum().backward()
    compared = 0
    for layer, choices in same.items():
        block = model.get_submodule(layer.rpartition(".")[0])
        used = one_hot(choices[0, 0].long(), 64).sum(0)[: IDENTITIES_FROM.get(name, 64)]
        for parameter_name, parameter in block.named_parameters():
            is_of_experts = re.search("(?<!shared_)experts|put_linear", parameter_name) and parameter.ndim == 3
            if not is_of_experts or parameter.grad is None:
                continue
            of_expert = parameter.grad.flatten(1).abs().sum(1) > 0
            compared += 1
            assert torch.equal(of_expert[: len(used)], used[: len(of_expert)] > 0), (layer, parameter_name)
    assert compared or name in EXPERTS_ELSEWHERE


def test_the_table_is_what_its_command_writes():
    entries = rows_of(PAGE.read_text())
    assert len(entries) > 60
    assert transformers.__version__ != table_version() or entries.keys() <= set(NAMES)
    assert written_table(entries) in PAGE.read_text()
