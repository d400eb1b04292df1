"""Whether trainer and engine agree: figures, the cause of each fault that is planted, and inputs for a correction."""

from __future__ import annotations

import copy
import logging
import math
import string
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.engines import fakes
from helpers.folders import small_tokenizer
from helpers.models import VOCAB, batch_of, build
from helpers.routing_table import model_with_experts
from helpers.versions import needs_routers_that_choose
from helpers.worlds import some
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.errors import RolloutError
from fsdp2_strategy.parallel.routing import record_routing
from fsdp2_strategy.parallel.routing.routers import RouterPlan
from fsdp2_strategy.rollout import (
    SGLangEngine,
    TransformersEngine,
    VLLMEngine,
    check_engine_agreement,
    importance_inputs,
    sampled_log_probs,
    serve,
    stream_weights,
)
from fsdp2_strategy.rollout.experts import has_routers
from fsdp2_strategy.rollout.protocol import Engine
from fsdp2_strategy.rollout.sampling import generate_samples

LENGTH, ANSWER = 12, 5


def sharp(name="llama"):
    """Build a model whose distributions are far from uniform, so that faults show."""
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
        model.get_output_embeddings().weight.mul_(4)
    return model


def sequences_of(rank, *, rows=3, pad=None):
    """Return sequences with answers of unequal length, their attention mask, and the mask of their answers."""
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=random)
    answers = torch.arange(ANSWER) < torch.tensor([[ANSWER], [2], [4]])[:rows]
    attention = torch.cat([torch.ones(rows, LENGTH - ANSWER), answers], dim=1).long()
    if pad == "left":  # prompts of unequal length end at the same column
        for row in range(rows):
            attention[row, : 2 * row] = 0
    if pad == "right":  # prompt and answer are next to each other, in another column in each row
        attention = torch.arange(LENGTH) < torch.tensor([[12], [7], [10]])[:rows]
        answers = (torch.arange(LENGTH) >= 5) & attention
        attention = attention.long()
    return ids, attention, answers


def reference(model, ids, attention, answers, temperature=1.0):
    """Return the log-probabilities of the answers' tokens, each sequence alone and without its padding."""
    found = []
    for row, mask, chosen in zip(ids, attention.bool(), answers, strict=True):
        with torch.no_grad():
            logits = model(input_ids=row[mask][None]).logits[0].float() / temperature
        log_probs = logits.log_softmax(-1)[:-1].gather(-1, row[mask][1:, None]).squeeze(-1)
        full = torch.zeros(LENGTH)
        full[mask.nonzero()[1:, 0]] = log_probs
        found.append(full[-answers.shape[1] :][chosen])
    return torch.cat(found)


@contextmanager
def trained(name="llama", *, engine=None, **config):
    """Yield an fp32 strategy and an actor, whose engine has its weights."""
    with FSDPV2Strategy(config=StrategyConfig(bf16=False, **config)) as strategy:
        actor = strategy.prepare_model(sharp(name), is_training=True)
        strategy.setup_inference_engine(None, engine or "transformers", actor)
        yield strategy, actor


def check(strategy, actor, *, pad=None, **options):
    ids, attention, answers = sequences_of(strategy.get_rank(), pad=pad)
    return strategy.check_engine_agreement(actor, ids, attention, answer_mask=answers, **options)


def same_on_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, repr(value))
    return len(set(values)) == 1


def raised(strategy, actor, **options):
    """Return the message of the error that every rank raises."""
    with pytest.raises(RolloutError, match="cannot rely on the engine's samples") as caught:
        check(strategy, actor, on_disagreement="raise", **options)
    assert same_on_all_ranks(str(caught.value)) and caught.value.is_agreed
    return str(caught.value)


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 adds embeddings of absolute positions
@pytest.mark.ranks(2)
def test_an_fp32_engine_agrees_with_an_fp32_trainer_with_padding_anywhere(name):
    with trained(name) as (strategy, actor):
        actor.train()
        for module in actor.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        actor.get_input_embeddings().eval()
        modes, random = [module.training for module in actor.modules()], torch.get_rng_state()
        for pad in (None, "left", "right"):
            found = check(strategy, actor, pad=pad, compare_weights=True)
            assert found.agrees and not found.causes and found.largest_difference < 1e-5, (pad, found)
            assert abs(found.kl) < 1e-9 and found.share_outside_band == 0
            answers = [sequences_of(rank, pad=pad)[2] for rank in range(2)]
            assert found.tokens == sum(int(mask.sum()) for mask in answers)
        given = torch.full(sequences_of(0)[2].shape, -5.0)
        assert not check(strategy, actor, engine_log_probs=given).agrees  # searches the cause
        assert [module.training for module in actor.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random)  # so that a resumed run may check at other steps


@pytest.mark.parametrize("pad", some([None, "left", "right"], ["left"]))
@pytest.mark.ranks(2)
def test_figures_are_those_of_sequences_alone_and_all_tokens_of_all_ranks_weigh_the_same(pad):
    with trained() as (strategy, actor):
        rank = strategy.get_rank()
        rows = 3 - rank  # ranks with other numbers of tokens
        ids, attention, answers = (tensor[:rows] for tensor in sequences_of(rank, pad=pad))
        own = reference(sharp(), ids, attention, answers, 0.7)
        noise = 0.5 * torch.randn(own.shape, generator=torch.Generator().manual_seed(9 + rank))
        given = torch.zeros(answers.shape).masked_scatter(answers, (own + noise).clamp(max=0))
        found = strategy.check_engine_agreement(
            actor, ids, attention, answer_mask=answers, engine_log_probs=given, temperature=0.7, ratio_band=(0.5, 1.5)
        )
        log_ratio = torch.cat([part[1] for part in gathered((rank, own - given[answers]))]).double()
        ratio = log_ratio.exp()
        assert found.tokens == len(log_ratio)
        assert found.mean_difference == pytest.approx(log_ratio.abs().mean().item(), rel=1e-4)
        assert found.largest_difference == pytest.approx(log_ratio.abs().max().item(), rel=1e-4)
        assert found.kl == pytest.approx((ratio - 1 - log_ratio).mean().item(), rel=1e-4)
        outside = ((ratio < 0.5) | (ratio > 1.5)).double().mean().item()
        assert 0 < outside < 1 and found.share_outside_band == pytest.approx(outside)
        assert found.metrics() == {
            "engine_difference": found.mean_difference,
            "engine_difference_largest": found.largest_difference,
            "engine_kl": found.kl,
            "engine_share_outside": found.share_outside_band,
        }
        assert same_on_all_ranks(found) and set(found.causes) == {"unknown"}


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.ranks(2)
def test_a_bf16_engine_agrees_with_a_bf16_trainer_and_is_woken_and_put_to_sleep():
    with FSDPV2Strategy(args={"enable_engine_sleep": True}) as strategy:
        actor = strategy.prepare_model(sharp(), is_training=True)
        engine = strategy.setup_inference_engine(None, "transformers", actor)
        assert engine.is_asleep
        found = check(strategy, actor, pad="left", compare_weights=True)
        assert found.agrees and found.tolerance == 0.05 and engine.is_asleep


@pytest.mark.full
@pytest.mark.ranks(2)
def test_images_are_passed_to_both_and_inputs_of_tokens_are_moved_with_them():
    with FSDPV2Strategy(config=StrategyConfig(bf16=False)) as strategy:
        actor = strategy.prepare_model(build("qwen2_vl"), is_training=True)
        strategy.setup_inference_engine(None, "transformers", actor)
        batch = batch_of("qwen2_vl", 0, strategy.get_rank())
        batch.pop("labels")
        ids, answers = batch.pop("input_ids"), torch.ones(2, 4)
        padded = {"sequences": nn.functional.pad(ids, (3, 0)), "attention_mask": nn.functional.pad(ids**0, (3, 0))}
        types_of = batch.pop("mm_token_type_ids")
        for inputs in ({"sequences": ids, "mm_token_type_ids": types_of},
                       {**padded, "mm_token_type_ids": nn.functional.pad(types_of, (3, 0))}):  # fmt: skip
            found = strategy.check_engine_agreement(actor, answer_mask=answers, **inputs, **batch)
            assert found.agrees and found.tokens == 16 and found.largest_difference < 1e-5
        other = {**batch, "pixel_values": batch["pixel_values"] + 1}
        log_probs = [strategy.inference_engine.log_probs(ids, mm_token_type_ids=types_of, **b) for b in (batch, other)]
        assert not torch.equal(*log_probs)


@pytest.mark.full
@pytest.mark.ranks(4)
def test_sequences_that_ranks_share_count_once():
    with trained(sequence_parallel_size=2) as (strategy, actor):
        ids, attention, answers = sequences_of(strategy.dp_rank, pad="left")
        found = strategy.check_engine_agreement(actor, ids, attention, answer_mask=answers)
        assert found.agrees and found.largest_difference < 1e-5
        assert found.tokens == sum(int(sequences_of(rank, pad="left")[2].sum()) for rank in range(2))
        given = -torch.rand(answers.shape, generator=torch.Generator().manual_seed(strategy.dp_rank))
        found = strategy.check_engine_agreement(actor, ids, attention, answer_mask=answers, engine_log_probs=given)
        own = [reference(sharp(), *sequences_of(rank, pad="left")) for rank in range(2)]
        other = [-torch.rand(answers.shape, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        other = [values[sequences_of(rank)[2]] for rank, values in enumerate(other)]
        assert found.mean_difference == pytest.approx((torch.cat(own) - torch.cat(other)).abs().mean().item(), rel=1e-4)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_lora_actor_agrees_with_an_engine_that_has_the_merged_weights():
    from peft import LoraConfig, get_peft_model

    with FSDPV2Strategy(config=StrategyConfig(bf16=False)) as strategy:
        model = get_peft_model(sharp(), LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        actor = strategy.prepare_model(model, is_training=True)
        strategy.setup_inference_engine(None, "transformers", actor)
        assert check(strategy, actor, pad="left", compare_weights=True).agrees
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if "lora_A" in name:
                    parameter.mul_(3)
        assert "weights" in check(strategy, actor).causes


@pytest.mark.full
@pytest.mark.ranks(3)
def test_ranks_without_an_engine_take_part_and_the_engine_may_be_in_another_process():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        serve(TransformersEngine(sharp("mixtral")), peer=0)
        return
    config = StrategyConfig(bf16=False)
    with FSDPV2Strategy(config=config, process_group=group) as strategy:
        actor = strategy.prepare_model(sharp("mixtral"), is_training=True)
        strategy.setup_inference_engine({"remote_engine_rank": 2}, "remote", actor)
        found = check(strategy, actor, pad="left", compare_weights=True)
        assert found.agrees and found.tokens == int(sequences_of(0)[2].sum())  # rank 0 alone has an engine
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.mul_(1.1)
        found = check(strategy, actor, pad="left")
        values = [None] * 2
        dist.all_gather_object(values, dict(found.causes), group=group)
        assert set(found.causes) == {"weights"} and values[0] == values[1]


# --- faults, planted on purpose --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_stale_weights_are_named():
    with trained() as (strategy, actor):
        optimizer = strategy.create_optimizer(actor, lr=0.05)
        ids, _, _ = sequences_of(strategy.get_rank())
        strategy.backward(actor(input_ids=ids, labels=ids).loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, None)
        message = raised(strategy, actor)
        assert "Likely cause: weights: 21 weights" in message and "of 21 differ from the actor's" in message
        assert "the actor has taken 1 optimizer step since its weights were sent" in message
        assert message.count("Likely cause") == 1
        with patch.object(TransformersEngine, "weight_checksums", Engine.weight_checksums):  # as vLLM
            assert "weights: the actor has taken 1 optimizer step" in raised(strategy, actor)
        strategy.update_engine_weights(actor)
        assert check(strategy, actor, compare_weights=True).agrees


@pytest.mark.ranks(2)
def test_weights_of_small_influence_are_compared_on_request():
    with trained() as (strategy, actor):
        with torch.no_grad():
            next(actor.parameters()).add_(1e-7)
        assert check(strategy, actor).agrees
        assert set(check(strategy, actor, compare_weights=True).causes) == {"weights"}
        with patch.object(TransformersEngine, "weight_checksums", Engine.weight_checksums):
            with pytest.raises(RolloutError, match="TransformersEngine has no weight_checksums"):
                check(strategy, actor, compare_weights=True)


@pytest.mark.ranks(2)
def test_an_engine_of_another_dtype_is_named():
    with trained(engine=TransformersEngine(sharp(), dtype=torch.bfloat16)) as (strategy, actor):
        message = raised(strategy, actor)
        assert "Likely cause: dtype: the engine holds 21 weights" in message
        assert "in bfloat16, expected float32" in message and message.count("Likely cause") == 1
        assert "cast, they are equal" in message
        with torch.no_grad():
            next(actor.parameters()).mul_(2)
        message = raised(strategy, actor)
        assert "weights: 1 weight (" in message and "with by_difference also verify=True" in message
        assert "dtype: the engine holds 21 weights" in message
        assert "cast, 20 of them are equal" in message


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_dtype_that_vllm_and_sglang_were_built_in_is_compared():
    with FSDPV2Strategy(config=StrategyConfig(bf16=False)) as strategy:
        actor = strategy.prepare_model(sharp(), is_training=True)
        for package, kind in (("vllm", VLLMEngine), ("sglang", SGLangEngine)):
            for dtype, names in (("bfloat16", {"dtype"}), ("float32", {"unknown"})):
                module = getattr(fakes, package)(sharp, [])
                with patch.dict(sys.modules, module.modules):
                    strategy.setup_inference_engine(None, kind("folder", dtype=dtype), actor)
                found = check(strategy, actor, engine_log_probs=torch.full((3, ANSWER), -5.0))
                assert set(found.causes) == names
        assert "has no weight_checksums" in found.causes["unknown"]


@pytest.mark.parametrize("temperature", some([0.7, 1.3], [0.7]))
@pytest.mark.ranks(2)
def test_another_temperature_is_named_with_its_value(temperature):
    with trained() as (strategy, actor):
        of_engine = TransformersEngine.log_probs

        def warmer(engine, *args, **options):
            return of_engine(engine, *args, **{**options, "temperature": temperature})

        with patch.object(TransformersEngine, "log_probs", warmer):
            message = raised(strategy, actor)
        assert f"divided by {temperature:g} instead of 1. " in message and message.count("Likely cause") == 1


def other_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(small_tokenizer()._tokenizer))


@pytest.mark.ranks(2)
def test_another_tokenizer_or_chat_template_is_named():
    with trained() as (strategy, actor):
        own, template, vocabulary, spaces = (other_tokenizer() for _ in range(4))
        template.chat_template = "{{ messages }}"
        vocabulary.add_tokens(["<answer>"])
        spaces._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        assert check(strategy, actor, tokenizers=(own, other_tokenizer())).agrees
        found = [check(strategy, actor, tokenizers=(own, other)) for other in (template, vocabulary, spaces)]
        assert [list(result.causes) for result in found] == [["chat template"], ["tokenizer"], ["tokenizer"]]
        assert "'<answer>' is no id in the first" in found[1].causes["tokenizer"]
        on_rank_1 = (own, vocabulary if strategy.get_rank() else own)
        assert same_on_all_ranks(found) and "Likely cause: tokenizer" in raised(strategy, actor, tokenizers=on_rank_1)


def letters(shift=0, start=""):
    """Return a tokenizer of letters between spaces; a chat begins with ``start``."""
    vocabulary = {letter: 3 + (number + shift) % 26 for number, letter in enumerate(string.ascii_lowercase)}
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 1, **vocabulary}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = start + "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", chat_template=template)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize(
    ("options", "cause"), [({}, None), ({"shift": 1}, "tokenizer"), ({"start": "x y z "}, "chat template")]
)
@pytest.mark.ranks(2)
def test_an_engine_that_reads_texts_with_another_tokenizer_or_template_disagrees(options, cause):
    own, of_engine = letters(), letters(**options)
    with FSDPV2Strategy(config=StrategyConfig(bf16=False)) as strategy:
        actor = strategy.prepare_model(sharp(), is_training=True)
        engine = strategy.setup_inference_engine(None, TransformersEngine(sharp(), tokenizer=of_engine), actor)
        chats = [[{"role": "user", "content": content}] for content in ("a b c", "k l m")]
        texts = of_engine.apply_chat_template(chats, tokenize=False)
        torch.manual_seed(0)
        params = {"max_tokens": ANSWER, "logprobs": 0, "ignore_eos": True}
        outputs = engine.generate(prompts=texts, sampling_params=params)
        prompts = own(own.apply_chat_template(chats, tokenize=False))["input_ids"]
        answers = [output.outputs[0].token_ids for output in outputs]
        sequences = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
        found = strategy.check_engine_agreement(
            actor,
            sequences,
            answer_mask=torch.ones(2, ANSWER),
            engine_log_probs=sampled_log_probs(outputs, ANSWER),
            tokenizers=(own, of_engine),
            engine_prompts=[output.prompt_token_ids for output in outputs],
        )
        assert set(found.causes) == ({cause, "prompts"} if cause else set()) and found.agrees == (cause is None)
        assert (found.mean_difference > 0.1) == (cause is not None) and same_on_all_ranks(found)


@pytest.mark.ranks(2)
def test_prompts_that_the_engine_encoded_in_another_way_are_named():
    with trained() as (strategy, actor):
        ids, attention, _ = sequences_of(strategy.get_rank(), pad="left")
        pairs = zip(ids[:, :-ANSWER], attention[:, :-ANSWER].bool(), strict=True)
        prompts = [row[mask].tolist() for row, mask in pairs]
        found = check(strategy, actor, pad="left", engine_prompts=prompts)
        assert found.agrees
        prompts[1] = [1, *prompts[1]]  # the engine adds a token of its own
        found = check(strategy, actor, pad="left", engine_prompts=prompts)
        assert "1 prompt of 3 differ; that of sequence 1 has 5 tokens" in found.causes["prompts"]
        prompts[1] = prompts[1][1:]
        ids, attention, answers = sequences_of(strategy.get_rank(), pad="left")
        attention[0, -ANSWER:], answers[0] = 0, 0  # an empty answer
        options = {"answer_mask": answers, "engine_prompts": prompts}
        assert not strategy.check_engine_agreement(actor, ids, attention, **options).causes
        with pytest.raises(RolloutError, match="engine_prompts has 2 prompts, expected 3"):
            check(strategy, actor, engine_prompts=prompts[:2])


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.full)])
@pytest.mark.ranks(2)
def test_a_router_that_chooses_a_different_number_of_experts_is_named(name):
    with trained(name) as (strategy, actor):
        assert check(strategy, actor).agrees
        for module in strategy.inference_engine.model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.top_k = 1
        message = raised(strategy, actor)
        assert "router: the engine chooses 1 expert for each token, the trainer 2" in message
        assert message.count("Likely cause") == 1


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_router_that_chooses_other_experts_for_some_tokens_is_named():
    with trained("mixtral") as (strategy, actor):
        router = strategy.inference_engine.model.model.layers[0].mlp.gate
        forward = type(router).forward

        def changed(hidden):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            wrong = torch.arange(len(hidden)) % LENGTH == LENGTH - 3
            return forward(router, torch.where(wrong[:, None], -hidden, hidden))  # chooses the other two of four

        with patch.object(router, "forward", changed):
            message = raised(strategy, actor)
            assert "router: other experts are chosen for" in message and message.count("Likely cause") == 1
            ids, attention, answers = sequences_of(strategy.get_rank())
            of_engine = strategy.inference_engine.log_probs(ids, attention)[:, -ANSWER:]
        with patch.object(TransformersEngine, "routed_experts", Engine.routed_experts):
            with patch("fsdp2_strategy.rollout.disagreement._FEW_TOKENS", 0.5):
                assert "as if the routers chose other experts" in raised(strategy, actor, engine_log_probs=of_engine)
            found = check(strategy, actor, engine_log_probs=-torch.rand(answers.shape))
            assert set(found.causes) == {"unknown"} and "Not measured: the engine does not report the experts" in str(
                found
            )


@needs_routers_that_choose
@pytest.mark.full
@pytest.mark.parametrize("name", ["dbrx", "hunyuan_v1_moe", "jetmoe", "llama4_text"])
def test_an_engine_reports_the_experts_that_a_replay_would_choose(name):
    model = model_with_experts(name).eval()
    engine = TransformersEngine(model, dtype=None)
    engine.update_weights(stream_weights(model, dtype=None))
    ids, mask = torch.randint(3, 30, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    with torch.no_grad(), record_routing(model) as routing:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert torch.equal(engine.routed_experts(ids, mask), torch.stack(list(routing.layers.values())).long())
    assert has_routers(model)


def test_a_model_without_routers_reports_no_experts():
    model = build("llama")
    engine = TransformersEngine(model, dtype=None)
    engine.update_weights(stream_weights(model, dtype=None))
    assert engine.routed_experts(torch.full((1, 4), 3)) is None and not has_routers(model)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_experts_that_cannot_be_recorded_are_not_said_to_be_the_engines_fault():
    refused = RouterPlan(refused="chooses experts in another way")
    with (
        trained("mixtral") as (strategy, actor),
        patch("fsdp2_strategy.parallel.routing.plan.plan_routers", lambda _: refused),
    ):
        found = check(strategy, actor, engine_log_probs=-torch.rand(sequences_of(0)[2].shape))
        assert set(found.causes) == {"unknown"} and "experts that the actor chooses cannot be recorded" in str(found)


@pytest.mark.ranks(2)
def test_a_token_that_the_engine_gives_no_probability_is_an_unknown_cause():
    with trained("mixtral") as (strategy, actor):
        given = torch.full(sequences_of(0)[2].shape, -5.0)
        given[0, 0] = -math.inf  # as if the engine had removed the token with top_p after it was sampled
        with patch.object(TransformersEngine, "routed_experts", Engine.routed_experts):
            found = check(strategy, actor, engine_log_probs=given)
        assert set(found.causes) == {"unknown"} and found.largest_difference == math.inf


@pytest.mark.ranks(2)
def test_a_warning_is_logged_once_on_rank_0():
    with trained() as (strategy, actor):
        given = torch.full(sequences_of(0)[2].shape, -9.0)
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger = logging.getLogger("fsdp2_strategy")
        logger.addHandler(handler)
        try:
            found = check(strategy, actor, engine_log_probs=given)
            assert check(strategy, actor).agrees
        finally:
            logger.removeHandler(handler)
        warnings = [record for record in records if record.levelno == logging.WARNING]
        assert len(warnings) == (strategy.get_rank() == 0) and not found.agrees
        if warnings:
            assert str(found) in warnings[0].getMessage()


@pytest.mark.ranks(2)
def test_wrong_arguments_on_one_rank_are_errors_on_every_rank():
    with trained() as (strategy, actor):
        ids, attention, answers = sequences_of(0)
        first, padding = torch.zeros(3, LENGTH, dtype=torch.bool), answers.clone()
        first[:, 0], padding[1, -1] = True, True
        wrong = [
            ({"answer_mask": first}, r"selects \[0, 0\], which is the first token"),
            ({"answer_mask": padding}, r"selects \[1, 4\], which is padding"),
            ({"answer_mask": answers[:2]}, r"answer_mask has the shape \[2, 5\]"),
            ({"attention_mask": attention[:, 1:]}, "attention_mask has the shape"),
            ({"sequences": ids[0]}, "sequences has the shape"),
            ({"engine_log_probs": torch.zeros(3, 2)}, "engine_log_probs has the shape"),
            ({"engine_log_probs": [[0.0]]}, "engine_log_probs has the type list, expected a tensor"),
            ({"engine_logprobs": torch.zeros(answers.shape)}, "neither an option .*Did you mean 'engine_log_probs'"),
            ({"on_disagrement": "raise"}, "Did you mean 'on_disagreement'"),
            ({"attn_mask": attention}, "Did you mean 'attention_mask'"),
            ({"engine_log_probs": torch.full(answers.shape, math.nan)}, "contain NaN"),
            ({"engine_log_probs": torch.ones(answers.shape)}, "a number above 0"),
            ({"ratio_band": (1.1, 1.2)}, "ratio_band is"),
            ({"tolerance": -1.0}, "tolerance is -1.0"),
            ({"tolerance": 0.5}, "ranks .* differ from rank 0"),
            ({"on_disagreement": "ignore"}, "on_disagreement is 'ignore'"),
            ({"position_ids": ids}, "position_ids is among the inputs"),
            ({"temperature": 0.0}, "temperature is 0.0|differ from rank 0"),
        ]
        usual = {"sequences": ids, "attention_mask": attention, "answer_mask": answers}
        for options, match in wrong:
            with pytest.raises(RolloutError, match=match):
                strategy.check_engine_agreement(actor, **(usual | options if strategy.get_rank() else usual))
        assert check(strategy, actor).agrees
        with patch.object(TransformersEngine, "log_probs", Engine.log_probs):
            with pytest.raises(RolloutError, match="TransformersEngine has no log_probs"):
                check(strategy, actor)
        with pytest.raises(RolloutError, match="no rank has an engine"):
            check_engine_agreement(actor, None, ids, attention, answer_mask=answers)
        own = FSDPV2Strategy(config=StrategyConfig(bf16=False))
        with pytest.raises(RolloutError, match="there is no inference engine"):
            check(own, actor)
        with pytest.raises(RolloutError, match="padding before a token"):
            strategy.inference_engine.log_probs(*sequences_of(0, pad="left")[:2])
        log_probs = strategy.inference_engine.log_probs(ids, attention)
        assert torch.equal(strategy.inference_engine.log_probs(ids, attention.bool()), log_probs)


# --- log-probabilities of samples ------------------------------------------------------------------------------------

PROMPTS = [[3, 4, 5], [7], [5, 6, 7, 8, 9]]
SAMPLED = {"temperature": 0.6, "top_k": 7, "ignore_eos": True}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_engine_returns_the_log_probs_of_its_samples_as_the_packages_do(kind):
    model = sharp().eval()
    engine = TransformersEngine(model, dtype=torch.float32)
    engine.update_weights(stream_weights(model, dtype=None))
    for limit in ({"stop_token_ids": [5, 6, 7, 8]}, {}):  # some outputs are shorter
        torch.manual_seed(0)
        if kind == "sglang":
            params = {**SAMPLED, "max_new_tokens": 4, "n": 2, **limit}
            outputs = engine.generate(sampling_params=params, input_ids=PROMPTS, return_logprob=True)
            tokens = [output["output_ids"] for output in outputs]
        else:
            params = {**SAMPLED, "max_tokens": 4, "n": 2, "logprobs": 0, **limit}
            outputs = engine.generate(sampling_params=params, prompts=PROMPTS)
            tokens = [own.token_ids for output in outputs for own in output.outputs]
        found = sampled_log_probs(outputs, 6)
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        for prompt, answer, row in zip(prompts, tokens, found, strict=True):
            ids = torch.tensor([prompt + answer])
            temperature = 0.6 if kind == "sglang" else 1.0
            expected = reference(
                model, pad_to(ids), pad_to(torch.ones_like(ids)), answers_of(prompt, answer), temperature
            )
            torch.testing.assert_close(row[: len(answer)], expected, rtol=1e-4, atol=1e-5)
            assert not row[len(answer) :].any()
    with pytest.raises(RolloutError, match="has 4 tokens, expected at most 3"):
        sampled_log_probs(outputs, 3)


def pad_to(ids):
    return nn.functional.pad(ids, (0, LENGTH - ids.shape[1]))


def answers_of(prompt, answer):
    mask = torch.zeros(1, LENGTH, dtype=torch.bool)
    mask[0, len(prompt) : len(prompt) + len(answer)] = True
    return mask


@pytest.mark.parametrize("package", ["sglang", "vllm"])
def test_the_log_probs_of_vllm_and_sglang_are_read_from_their_outputs(package):
    model = sharp().eval()
    module = getattr(fakes, package)(lambda: model, [])
    torch.manual_seed(0)
    if package == "sglang":
        params = {"temperature": 0.6, "max_new_tokens": 4}
        with patch.dict(sys.modules, module.modules):
            engine = SGLangEngine("folder")
        outputs = engine.generate(sampling_params=params, input_ids=PROMPTS, return_logprob=True)
    else:
        params = module.SamplingParams(temperature=0.6, max_tokens=4, logprobs=0)
        with patch.dict(sys.modules, module.modules):
            engine = VLLMEngine("folder")
        outputs = engine.generate(PROMPTS, params)
    torch.manual_seed(0)
    expected = generate_samples(model, PROMPTS, params, log_probs="sampled" if package == "sglang" else "raw")
    found = sampled_log_probs(outputs, 4)
    for row, (sample,) in zip(found, expected, strict=True):
        assert row[: len(sample.log_probs)].tolist() == pytest.approx(sample.log_probs)


def test_samples_do_not_depend_on_whether_log_probs_are_returned():
    model = sharp().eval()
    runs = []
    for params in ({}, {"logprobs": 0}):
        torch.manual_seed(0)
        samples = generate_samples(model, PROMPTS, {**SAMPLED, "max_tokens": 4, **params})
        runs.append([[sample.token_ids for sample in of_prompt] for of_prompt in samples])
    assert runs[0] == runs[1] and not model._forward_hooks


def test_samples_without_log_probs_are_errors():
    model = sharp()
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model))
    few = {"max_new_tokens": 2}
    given = [{"sampling_params": few, "input_ids": PROMPTS}, {"sampling_params": few, "prompts": PROMPTS}]
    for call in given:
        with pytest.raises(RolloutError, match=r"has none, .* logprobs=0 .* return_logprob=True"):
            sampled_log_probs(engine.generate(**call), 200)
    for call, match in (
        ({"sampling_params": {"logprobs": 3}, "prompts": PROMPTS}, "logprobs is 3, expected 0"),
        ({"sampling_params": {}, "prompts": PROMPTS, "return_logprob": True}, "return_logprob was passed with prompts"),
    ):
        with pytest.raises(RolloutError, match=match):
            engine.generate(**call)


# --- importance weights ----------------------------------------------------------------------------------------------


def random_log_probs(seed, *, requires_grad=False):
    values = -4 * torch.rand(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_(requires_grad)


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("limit", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_those_of_their_definition_token_by_token(level, limit):
    new, old, engine = random_log_probs(1, requires_grad=True), random_log_probs(2), random_log_probs(3)
    old.requires_grad_()
    padded = engine.clone()
    padded[MASK == 0] = math.nan  # values of padding do not count
    found = importance_inputs(new, old, padded, MASK, level=level, limit=limit, cap=1.5, floor=0.6)
    limited = 0
    for row in range(3):
        tokens = [column for column in range(4) if MASK[row, column]]
        logs = {column: (old[row, column] - engine[row, column]).item() for column in tokens}
        for column in range(4):
            if column not in tokens:
                assert found.weights[row, column] == 0 and not found.limited[row, column]
                continue
            total = {"token": logs[column], "sequence": sum(logs.values()), "geometric": sum(logs.values()) / len(logs)}
            ratio = math.exp(total[level])
            inside = 0.6 <= ratio <= 1.5
            expected = ratio if inside else 0.0 if limit == "mask" else min(max(ratio, 0.6), 1.5)
            assert found.weights[row, column].item() == pytest.approx(expected, rel=1e-12)
            assert bool(found.limited[row, column]) != inside
            limited += not inside
    assert 0 < limited < MASK.sum()
    (found.weights * found.log_ratio.exp()).sum().backward()
    assert old.grad is None and not found.weights.requires_grad
    expected = found.weights * (new - old).exp().detach() * MASK
    torch.testing.assert_close(new.grad, expected, rtol=1e-12, atol=0)
    assert importance_inputs(new, None, padded, MASK).log_ratio.abs().max() == 0


@pytest.mark.ranks(2)
def test_metrics_weigh_the_tokens_of_all_micro_batches_and_ranks_the_same():
    rank = dist.get_rank()
    pairs = [(random_log_probs(10 * rank + seed), random_log_probs(10 * rank + seed + 5)) for seed in range(2)]
    masks = [MASK, MASK * rank]  # rank 0 has no token in the second
    parts = [importance_inputs(a, None, b, mask) for (a, b), mask in zip(pairs, masks, strict=True)]
    found = (parts[0].differences + parts[1].differences).metrics()
    logs = [(a - b)[mask.bool()] for (a, b), mask in zip(pairs, masks, strict=True)]
    log_ratio = torch.cat([part for of_rank in gathered(logs) for part in of_rank])
    ratio = log_ratio.exp()
    assert len(log_ratio) == 27 and found == {
        "engine_difference": pytest.approx(log_ratio.abs().mean().item()),
        "engine_difference_largest": pytest.approx(log_ratio.abs().max().item()),
        "engine_kl": pytest.approx((ratio - 1 - log_ratio).mean().item()),
        "engine_share_outside": pytest.approx(((ratio < 0.8) | (ratio > 1.25)).double().mean().item()),
        "importance_weight": pytest.approx(ratio.clamp(max=2).mean().item()),
        "importance_share_limited": pytest.approx((ratio > 2).double().mean().item()),
    }
    assert all(math.isnan(importance_inputs(*pairs[0], pairs[0][0], 0 * MASK).differences.metrics()[name])
               for name in ("engine_difference", "importance_weight"))  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"level": "word"}, "level is 'word', expected one of token, sequence, geometric"),
        ({"limit": "drop"}, "limit is 'drop'"),
        ({"cap": 0.5}, "cap is 0.5, expected 0 <= floor <= 1 <= cap"),
        ({"floor": 2.0}, "floor is 2.0"),
        ({"mask": MASK[:2]}, r"new_log_probs has the shape \[3, 4\], expected \[2, 4\]"),
        ({"engine_log_probs": torch.full((3, 4), math.nan)}, "engine_log_probs contains nan"),
        ({"old_log_probs": torch.full((3, 4), 0.5)}, "old_log_probs contains 0.5"),
        ({"engine_log_probs": None}, "engine_log_probs is a NoneType, expected a tensor"),
    ],
)
def test_wrong_inputs_of_a_correction_are_errors(changed, match):
    usual = {"new_log_probs": random_log_probs(1), "old_log_probs": None, "engine_log_probs": random_log_probs(2)}
    with pytest.raises(RolloutError, match=match):
        importance_inputs(**{**usual, "mask": MASK, **changed})
