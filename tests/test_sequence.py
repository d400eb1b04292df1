"""Sequences that are split over ranks train as full ones do, in every batch and with the rest of the strategy."""

from __future__ import annotations

import copy
import gc
import json
import logging
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import VOCAB, PlainTransformer, build, on_device
from helpers.reference import (
    Unsharded,
    assert_close,
    assert_parameters_close,
    full_grads,
    full_parameters,
    same_on_all_ranks,
)
from helpers.training import assert_same, full_state
from helpers.worlds import some
from transformers import AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, token_log_probs
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import CheckpointError, ConfigError, MeshError, SequenceError
from fsdp2_strategy.parallel.sequence.split import SplitPlan
from fsdp2_strategy.rollout import stream_weights, weight_checksums

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
LENGTH = 21


def layouts(*chosen):
    """Return the values of ``sp`` and ``shard_size``, each on its number of ranks; others than these are long."""
    cases = {"2": (2, 2, -1), "3": (3, 3, -1), "2x2": (4, 2, -1), "4": (4, 4, -1), "2x2-hybrid": (4, 2, 2)}
    return [
        pytest.param(
            sp, size, id=name, marks=[pytest.mark.ranks(world), *([] if name in chosen else [pytest.mark.full])]
        )
        for name, (world, sp, size) in cases.items()
    ]


def strategy_for(sp=2, **config):
    config = {"sequence_parallel_size": sp, "bf16": False, "max_norm": 0.5, **config}
    return FSDPV2Strategy(config=StrategyConfig(**config))


def ids_of(step, number, length=LENGTH, size=2):
    """Return the tokens that data parallel rank ``number`` gets at a step."""
    return torch.randint(3, VOCAB, (size, length), generator=torch.Generator().manual_seed(1000 * step + number))


def plain(ids):
    return {"input_ids": ids, "labels": ids}


def padded(ids, *, left):
    """Pad the two sequences by 6 and 2 tokens; positions count tokens."""
    mask = torch.ones_like(ids)
    for row, missing in enumerate((6, 2)):
        mask[row, slice(missing) if left else slice(-missing, None)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.where(mask == 1, -100)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def packed(ids, *lengths):
    positions = torch.cat([torch.arange(n) for n in (*lengths, ids.shape[1] - sum(lengths))])
    return {"input_ids": ids, "position_ids": positions.expand_as(ids), "labels": ids}


KINDS = {
    "not divided by the ranks": plain,
    "divided by the ranks": lambda ids: plain(ids[:, :12]),
    "a token per rank": lambda ids: plain(ids[:, :5]),
    "padded left": lambda ids: padded(ids, left=True),
    "padded right": lambda ids: padded(ids, left=False),
    "padded, without positions": lambda ids: {k: v for k, v in padded(ids, left=False).items() if k != "position_ids"},
    "packed": lambda ids: packed(ids, 3, 8),
    "packed, split at a document": lambda ids: packed(ids[:, :12], 6, 3),
    "some labels": lambda ids: {"input_ids": ids, "labels": ids.where(ids % 3 > 0, -100)},
    "no labels in the first half": lambda ids: {
        "input_ids": ids,
        "labels": ids.where(torch.arange(ids.shape[1]) > ids.shape[1] // 2 + 1, -100),
    },
    "divided by another number": lambda ids: {**plain(ids), "num_items_in_batch": torch.tensor(57)},
}


def loss_of(model, batch):
    return model(**on_device(batch), use_cache=False).loss


def mean_over_ranks(loss):
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def prepared(strategy, model, shard_size=-1, **options):
    strategy.prepare_model(model, is_training=True, shard_size=shard_size)
    return strategy.create_optimizer(model, **{**OPTIONS, **options})


def step_next_to(unsharded, strategy, model, optimizer, batches, tolerance=1e-5):
    """Take a step of both models on the batches of all data parallel ranks, and compare them."""
    losses, norm = unsharded.step(batches, scale=strategy.sp_size)
    loss = loss_of(model, strategy.shard_sequence(batches[strategy.dp_rank]))
    assert mean_over_ranks(loss) == pytest.approx(sum(losses) / len(losses), rel=min(tolerance, 1e-5))
    strategy.backward(loss, model, optimizer)
    assert_close(full_grads(model), unsharded.grads, tolerance, "gradient of")
    result = strategy.optimizer_step(optimizer, model)
    assert result.grad_norm == pytest.approx(norm, rel=tolerance)
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=min(tolerance, 1e-5))


def train_next_to_unsharded(strategy, model, *, kinds=(plain,), steps=3, tolerance=1e-5, shard_size=-1, prepare=None):
    """Train a model and its copy that is not sharded, and compare losses, gradients, norms and parameters."""
    unsharded = Unsharded(model, loss_of, max_norm=strategy.max_norm, **OPTIONS)
    optimizer = prepared(strategy, model, shard_size)
    if prepare is not None:
        prepare(model)
    for step in range(steps):
        make = kinds[step % len(kinds)]
        batches = [make(ids_of(step, number)) for number in range(strategy.dp_size)]
        step_next_to(unsharded, strategy, model, optimizer, batches, tolerance)
    assert_parameters_close(full_parameters(model), full_parameters(unsharded.model), 20 * tolerance)
    return optimizer


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sp", "shard_size"), layouts("2x2", "3"))
def test_split_training_has_the_losses_gradients_norms_and_parameters_of_unsharded(sp, shard_size):
    with strategy_for(sp) as strategy:
        assert (strategy.sp_size, strategy.dp_size) == (sp, dist.get_world_size() // sp)
        assert dist.get_process_group_ranks(strategy.sp_group) == [strategy.dp_rank * sp + i for i in range(sp)]
        assert dist.get_process_group_ranks(strategy.dp_group)[strategy.dp_rank] == strategy.get_rank()
        train_next_to_unsharded(strategy, build("llama").double(), shard_size=shard_size)


@pytest.mark.parametrize(("sp", "shard_size"), layouts("2", "3"))
def test_every_kind_of_batch_has_the_gradients_of_full_sequences(sp, shard_size):
    with strategy_for(sp) as strategy:
        model = build("llama").double()
        unsharded = Unsharded(model, loss_of, max_norm=strategy.max_norm, **OPTIONS)
        optimizer = prepared(strategy, model, shard_size, lr=0.0, weight_decay=0.0)
        unsharded.optimizer.param_groups[0]["lr"] = unsharded.optimizer.param_groups[1]["lr"] = 0.0
        for number, (kind, make) in enumerate(KINDS.items()):
            batches = [make(ids_of(number, rank)) for rank in range(strategy.dp_size)]
            try:
                step_next_to(unsharded, strategy, model, optimizer, batches)
            except AssertionError as error:
                raise AssertionError(f"{kind}: {error}") from error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["llama", "opt"], ["opt"]))
def test_default_positions_are_those_of_the_model(name):
    """OPT counts the tokens that are not padding, most models all of them."""

    def without_positions(ids):
        return {key: value for key, value in padded(ids, left=True).items() if key != "position_ids"}

    with strategy_for() as strategy:
        train_next_to_unsharded(strategy, build(name), kinds=(without_positions, plain), steps=2, tolerance=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("sp", "shard_size"), layouts("2x2"))
def test_accumulation_weighs_all_tokens_equally_if_their_number_is_odd(sp, shard_size):
    steps = [[(21, 9, -100), (13, 6, 3)], [(9, 5, -100), (6, 3, -100)]]  # lengths, and the token that is no label

    def batch(number, length, ignored):
        ids = ids_of(length, number, length)[:1] % 9 + 3
        return {"input_ids": ids, "labels": ids.where(ids != ignored, -100)}

    with strategy_for(sp, gradient_accumulation_steps=2) as strategy:
        model = build("llama").double()
        unsharded = copy.deepcopy(model)
        reference = torch.optim.AdamW(unsharded.parameters(), lr=1e-3, weight_decay=0.0)
        optimizer = prepared(strategy, model, shard_size, weight_decay=0.0)
        for number, cases in enumerate(steps):
            micro_batches = [
                [batch(10 * number + 3 * i + rank, length - rank, ignored) for rank in range(strategy.dp_size)]
                for i, (length, ignored, _) in enumerate(cases)
            ]
            every = [full for of_ranks in micro_batches for full in of_ranks]
            tokens = sum(int((full["labels"][:, 1:] != -100).sum()) for full in every)
            expected = sum(unsharded(**full, num_items_in_batch=tokens).loss for full in every)
            expected.backward()
            for of_ranks in micro_batches:
                own = strategy.shard_sequence(of_ranks[strategy.dp_rank])
                items = own["num_items_in_batch"]
                strategy.backward(loss_of(model, own) * items, model, optimizer, num_items=items)
                result = strategy.optimizer_step(optimizer, model)
            assert result.tokens == tokens
            assert result.loss == pytest.approx(expected.item(), rel=1e-6)
            torch.nn.utils.clip_grad_norm_(unsharded.parameters(), strategy.max_norm)
            reference.step()
            reference.zero_grad()
        assert_parameters_close(full_parameters(model), full_parameters(unsharded), 1e-5)


@pytest.mark.ranks(2)
def test_num_items_of_the_step_divide_the_losses_of_all_micro_batches():
    with strategy_for(gradient_accumulation_steps=2, loss_reduction="sum") as strategy:
        model = build("llama").double()
        unsharded = copy.deepcopy(model)
        optimizer = prepared(strategy, model)
        micro_batches = [ids_of(0, 0), ids_of(1, 0, 8)]
        items = sum(ids[:, 1:].numel() for ids in micro_batches)
        for ids in micro_batches:
            unsharded(**plain(ids), num_items_in_batch=items).loss.backward()
            own = strategy.shard_sequence({**plain(ids), "num_items_in_batch": items})
            assert isinstance(own["num_items_in_batch"], torch.Tensor) and own["num_items_in_batch"] * 2 == items
            strategy.backward(loss_of(model, own), model, optimizer)
        assert_close(full_grads(model), {n: p.grad for n, p in unsharded.named_parameters()}, 1e-6, "gradient of")


@pytest.mark.full
@pytest.mark.parametrize(("sp", "shard_size"), layouts("2x2"))
def test_log_probs_of_full_sequences_have_the_gradients_of_unsharded(sp, shard_size):
    with strategy_for(sp) as strategy:
        model = build("llama")
        unsharded = copy.deepcopy(model)
        optimizer = prepared(strategy, model, shard_size)
        for last in (None, 3, 9):
            losses = []
            for number in range(strategy.dp_size):
                full = padded(ids_of(0, number), left=True)
                given = (full["input_ids"], full["attention_mask"])
                options = {"position_ids": full["position_ids"], "last": last, "entropy": True}
                is_own = number == strategy.dp_rank
                for own in (unsharded, model) if is_own else (unsharded,):
                    found, entropy = token_log_probs(own, *given, **options)
                    losses.append((found.exp() * found).mean() + 0.1 * entropy.mean())
            of_rank = losses.pop(strategy.dp_rank + 1)
            torch.testing.assert_close(of_rank, losses[strategy.dp_rank], rtol=1e-5, atol=1e-7)
            (sum(losses) / len(losses)).backward()
            strategy.backward(of_rank, model, optimizer)
            expected = {name: p.grad for name, p in unsharded.named_parameters()}
            assert_close(full_grads(model), expected, 1e-4, f"last={last}, gradient of")
            optimizer.zero_grad()
            unsharded.zero_grad()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_batches_that_differ_within_a_group_are_an_error_on_every_rank():
    with strategy_for() as strategy:
        ids, rank = ids_of(0, strategy.dp_rank), strategy.get_rank()
        changed = ids.clone()
        changed[1, -1] += 1
        wrong = {
            "values": ({"input_ids": changed if rank == 3 else ids}, "input_ids of rank 3"),
            "order": ({"input_ids": ids.flip(0) if rank == 1 else ids, "labels": ids}, "input_ids of rank 1"),
            "shapes": ({"input_ids": ids[:, :-1] if rank == 3 else ids}, "input_ids of rank 3"),
            "names": ({"input_ids": ids, **({"labels": ids} if rank == 1 else {})}, "labels of rank 1"),
            "no tensors": ({} if rank == 2 else {"input_ids": ids}, "input_ids of rank 3"),
            "numbers": ({"input_ids": ids, "num_items_in_batch": 40 + (rank == 3)}, "num_items_in_batch of rank 3"),
            "no mapping": (None if rank == 3 else {"input_ids": ids}, "failed on rank 3: AttributeError"),
            "a failure": ({"input_ids": ids, "logits_to_keep": 1} if rank == 0 else {"input_ids": ids}, "rank 0"),
        }
        for case, (batch, text) in wrong.items():
            begin = time.monotonic()
            with pytest.raises(SequenceError, match=text) as raised:
                strategy.shard_sequence(batch)
            assert time.monotonic() - begin < 30, case  # the time-out of a collective is 60
            assert same_on_all_ranks(str(raised.value)), case
        assert strategy.shard_sequence({"input_ids": ids})["input_ids"].shape == (2, 11)


@pytest.mark.ranks(3)
def test_the_size_must_divide_the_ranks():
    with pytest.raises(MeshError, match=r"sequence_parallel_size is 2.*of \[1, 3\]"):
        strategy_for(2)
    with strategy_for(1) as strategy:
        assert (strategy.dp_rank, strategy.dp_size, strategy.sp_rank) == (strategy.get_rank(), 3, 0)
        batch = {"input_ids": ids_of(0, strategy.get_rank())}
        assert strategy.shard_sequence(batch) == batch


class OwnLoss(type(build("llama"))):
    """Computes its loss from its own labels only."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        kwargs = {k: v for k, v in kwargs.items() if k not in ("shift_labels", "num_items_in_batch")}
        output = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            targets = labels[:, 1:].flatten()
            output.loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets)
        return output


@pytest.mark.ranks(2)
def test_a_model_that_ignores_shifted_labels_is_refused_when_it_gets_labels():
    with strategy_for() as strategy:
        model = OwnLoss(build("llama").config)
        optimizer = prepared(strategy, model)
        with pytest.raises(SequenceError, match="cannot split sequences with labels: OwnLoss computes another loss"):
            model(**strategy.shard_sequence(plain(ids_of(0, 0))))
        own = strategy.shard_sequence({"input_ids": ids_of(0, 0)})
        strategy.backward(model(**own).logits.square().mean(), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).stepped


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_model_that_cannot_be_split_is_refused_for_training_and_computes_full_sequences():
    with strategy_for() as strategy:
        for model in (build("bart"), PlainTransformer()):
            with pytest.raises(SequenceError, match=f"cannot split sequences: {type(model).__name__}"):
                strategy.prepare_model(model, is_training=True)
        model = build("bart").eval()
        ids = ids_of(0, 0)
        expected = model(input_ids=ids).logits
        strategy.prepare_model(model)
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
        with pytest.raises(SequenceError, match="BartForConditionalGeneration"):
            model(**strategy.shard_sequence({"input_ids": ids}))
        other = PlainTransformer().eval()
        expected = other(ids)
        strategy.prepare_model(other)
        torch.testing.assert_close(other(ids), expected)


@pytest.mark.ranks(2)
def test_arguments_that_cannot_be_split_are_refused():
    with strategy_for() as strategy:
        model = strategy.prepare_model(build("llama"), is_training=True)
        ids = ids_of(0, 0)
        with pytest.raises(SequenceError, match="output_attentions is set for LlamaForCausalLM"):
            model(**strategy.shard_sequence({"input_ids": ids}), output_attentions=True)
        mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        with pytest.raises(SequenceError, match=r"attention_mask has the shape \[2, 1, 21, 21\], expected \[2, 21\]"):
            strategy.shard_sequence({"input_ids": ids, "attention_mask": mask})
        for name in ("logits_to_keep", "past_key_values"):
            with pytest.raises(SequenceError, match=name):
                strategy.shard_sequence({"input_ids": ids, name: 3})
        assert model(**strategy.shard_sequence({"input_ids": ids}), output_hidden_states=True).hidden_states
        model.set_attn_implementation("eager")  # refused with sdpa
        model.config.output_attentions = True
        with pytest.raises(SequenceError, match="output_attentions is set"):
            model(**strategy.shard_sequence({"input_ids": ids}))


# --- with the rest of the strategy -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["llama", "mixtral", "mamba2", "gpt2", "bloom"], ["llama"]))
@pytest.mark.parametrize("how", some(["ours", "before", "after", "reentrant"], ["ours"]))
def test_recomputed_activations_have_the_gradients_of_unsharded(name, how):
    """Ours, or those of transformers: enabled before or after the model is prepared."""
    with strategy_for(activation_checkpointing=how == "ours") as strategy:
        model = build(name)

        def enable(model):
            model.train()
            if how in ("after", "reentrant"):
                model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})

        if how == "before":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if how == "reentrant":
            model.enable_input_require_grads()
        train_next_to_unsharded(strategy, model, kinds=(plain,), steps=2, tolerance=1e-4, prepare=enable)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["llama", "mamba2"], ["llama"]))
def test_lora_and_frozen_parameters_train_as_unsharded(name):
    from peft import LoraConfig, get_peft_model

    def adapted():
        targets = ["in_proj"] if name == "mamba2" else ["q_proj", "down_proj"]
        model = get_peft_model(build(name), LoraConfig(r=3, target_modules=targets, lora_dropout=0.0))
        generator = torch.Generator().manual_seed(4)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        return model

    def frozen():
        model = build(name)
        for parameter in (*model.get_input_embeddings().parameters(), *model.base_model.layers[0].parameters()):
            parameter.requires_grad_(False)
        return model

    for make in (adapted, frozen):
        with strategy_for() as strategy:
            model = make()
            train_next_to_unsharded(strategy, model, kinds=(plain, KINDS["padded left"]), tolerance=1e-4)
            trained = [parameter.requires_grad for parameter in model.parameters()]
            assert any(trained) and not all(trained)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_offloaded_parameters_and_averages_are_those_of_full_sequences():
    found = []
    for sp in (2, 1):
        with strategy_for(sp, cpu_offload=True) as strategy:
            model, average = build("llama_tied"), strategy.prepare_model(build("llama_tied"))
            optimizer = prepared(strategy, model)
            for step in range(3):
                loss = loss_of(model, strategy.shard_sequence(plain(ids_of(step, 0))))
                strategy.backward(loss, model, optimizer)
                strategy.optimizer_step(optimizer, model)
                strategy.moving_average(model, average, 0.5)
            found.append({**full_parameters(model), **{f"average.{n}": p for n, p in full_parameters(average).items()}})
    assert_parameters_close(*found, 1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["llama", "gemma3", "gpt_oss"], ["llama"]))
def test_bf16_losses_are_close_to_those_of_full_sequences(name):
    found = []
    for sp in (2, 1):
        with strategy_for(sp, bf16=True) as strategy:
            model = build(name)
            optimizer = prepared(strategy, model)
            for step in range(4):
                loss = loss_of(model, strategy.shard_sequence(plain(ids_of(step % 2, 0))))
                strategy.backward(loss, model, optimizer)
                result = strategy.optimizer_step(optimizer, model)
                found.append((result.loss, result.grad_norm))
    for split, full in zip(found[:4], found[4:], strict=True):
        assert split == pytest.approx(full, rel=2e-2)
    assert found[2][0] < found[0][0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", some(["eager", "aot_eager"], (), ["aot_eager"]))
def test_compiled_blocks_train_as_unsharded(backend):
    with strategy_for(compile_blocks=backend) as strategy:
        kinds = (plain, KINDS["padded left"], KINDS["packed"])
        train_next_to_unsharded(strategy, build("llama"), kinds=kinds, tolerance=1e-4)


@pytest.mark.ranks(2)
def test_attention_that_is_replaced_later_is_split_too():
    with strategy_for() as strategy:
        model = build("llama")
        train_next_to_unsharded(
            strategy, model, steps=2, tolerance=1e-4, prepare=lambda model: model.set_attn_implementation("eager")
        )


def test_compiled_blocks_that_are_recomputed_cannot_be_split():
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2, expected 1 with compile_blocks and activation"):
        StrategyConfig(sequence_parallel_size=2, compile_blocks=True, activation_checkpointing=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["llama_tied", "mixtral", "mamba2", "gpt_oss"], ["llama_tied"]))
def test_a_prepared_model_generates_and_streams_as_unsharded(name):
    prompts = ids_of(0, 0, 7)
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0

    def generated(model):
        torch.manual_seed(3)
        options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6}
        return [model.generate(prompts, do_sample=samples, **options).tolist() for samples in (False, True)]

    expected, checksums = generated(build(name).eval()), []
    for sp in (2, 1):
        with strategy_for(sp) as strategy:
            model = strategy.prepare_model(build(name), is_training=True).eval()
            assert generated(model) == expected
            checksums.append(weight_checksums(stream_weights(model, dtype=None)))
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize(("sp", "shard_size"), layouts("2"))
@pytest.mark.parametrize("name", some(["mixtral", "qwen3_moe"], ["mixtral"]))
def test_losses_that_balance_experts_are_those_of_full_sequences(name, sp, shard_size):
    with strategy_for(sp) as strategy:
        model = build(name)
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        full = plain(ids_of(9, 0)), KINDS["padded right"](ids_of(9, 0))
        expected = [copy.deepcopy(model)(**batch, use_cache=False) for batch in full]
        optimizer = prepared(strategy, model, shard_size)
        for batch, of_full in zip(full, expected, strict=True):
            output = model(**strategy.shard_sequence(batch))
            torch.testing.assert_close(output.aux_loss, of_full.aux_loss, rtol=1e-5, atol=0)
            assert mean_over_ranks(output.loss) == pytest.approx(of_full.loss.item(), rel=1e-5)
            for logits, of_unsharded in zip(output.router_logits, of_full.router_logits, strict=True):
                shape = (len(ids_of(0, 0)), -1, logits.shape[-1])
                torch.testing.assert_close(
                    logits.reshape(shape)[:, :LENGTH], of_unsharded.reshape(shape), rtol=1e-4, atol=1e-5
                )
        del optimizer


@pytest.mark.parametrize(("sp", "shard_size"), layouts())
def test_experts_train_with_a_loss_that_balances_them(sp, shard_size):
    with strategy_for(sp) as strategy:
        model = build("mixtral")
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        kinds = (plain, KINDS["padded right"], KINDS["divided by the ranks"])
        train_next_to_unsharded(strategy, model, kinds=kinds, tolerance=1e-4, shard_size=shard_size)


# --- random numbers --------------------------------------------------------------------------------------------------


def with_dropout(name, attention="attention_dropout", residual="resid_pdrop"):
    model = build(name)
    other = copy.deepcopy(model.config)
    setattr(other, attention, 0.3)
    if residual:
        setattr(other, residual, 0.3)
    found = type(model)(other)
    found.load_state_dict(model.state_dict())
    return found.train()


def train_on(strategy, model, optimizer, steps, batch=plain):
    results = []
    for step in steps:
        loss = loss_of(model, strategy.shard_sequence(batch(ids_of(step, strategy.dp_rank))))
        strategy.backward(loss, model, optimizer)
        result = strategy.optimizer_step(optimizer, model)
        results.append((mean_over_ranks(loss), result.grad_norm))
    return results


@pytest.mark.parametrize(("sp", "shard_size"), layouts("2x2"))
@pytest.mark.parametrize("recomputes", some([False, True], [False]))
def test_dropout_differs_between_parts_and_leaves_one_random_state(sp, shard_size, recomputes):
    with strategy_for(sp, activation_checkpointing=recomputes) as strategy:
        model = with_dropout("gpt2", "attn_pdrop")
        seen = []
        model.transformer.h[0].attn.resid_dropout.register_forward_hook(
            lambda _m, args, out: seen.append(out.eq(0).tolist())
        )
        optimizer = prepared(strategy, model, shard_size)
        strategy.set_seed(strategy.get_rank() // sp * 100, per_rank=False)
        same = ids_of(0, 0)[:, :1].expand(2, sp * 6).contiguous()
        before = torch.get_rng_state()
        loss = loss_of(model, strategy.shard_sequence(plain(same)))
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, seen[0])
        assert len({json.dumps(masks) for masks in of_ranks}) == dist.get_world_size()
        assert not torch.equal(before, torch.get_rng_state())
        states = [None] * sp
        dist.all_gather_object(states, torch.get_rng_state().tolist(), group=strategy.sp_group)
        assert all(state == states[0] for state in states)
        strategy.backward(loss, model, optimizer)
        if recomputes:
            assert len(seen) == 2 and seen[0] == seen[1]
        dist.all_gather_object(states, torch.get_rng_state().tolist(), group=strategy.sp_group)
        assert all(state == states[0] for state in states)
        state = torch.get_rng_state()
        model.eval()
        model(**strategy.shard_sequence(plain(same)))
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.ranks(2)
def test_dropout_keeps_the_mean_and_its_gradients_belong_to_its_masks():
    """A step against the gradient does what the gradient says, with the same random numbers."""
    with strategy_for(max_norm=0.0) as strategy:
        model = with_dropout("llama", residual=None).double()
        optimizer = strategy.create_optimizer(
            strategy.prepare_model(model, is_training=True), lr=1e-3, optimizer_cls=torch.optim.SGD, weight_decay=0.0
        )
        own = strategy.shard_sequence(plain(ids_of(0, 0)))

        def loss_with_seed():
            torch.manual_seed(5)
            return model(**own).logits.double().square().mean()

        first = loss_with_seed()
        assert loss_with_seed().item() == first.item()
        strategy.backward(first, model, optimizer)
        norm = strategy.optimizer_step(optimizer, model).grad_norm
        change = mean_over_ranks(loss_with_seed()) - mean_over_ranks(first)
        assert change == pytest.approx(-1e-3 * norm**2, rel=1e-2)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(["gpt2", "mamba2"], ["gpt2"]))
def test_a_resumed_run_with_dropout_is_bitwise_equal(name, tmp_path):
    def start(seed):
        strategy = strategy_for(seed=seed)
        model = with_dropout("gpt2", "attn_pdrop") if name == "gpt2" else build(name)
        optimizer = prepared(strategy, model)
        strategy.set_seed(seed, per_rank=True)
        assert same_on_all_ranks(torch.initial_seed())
        return strategy, model, optimizer

    strategy, model, optimizer = start(3)
    train_on(strategy, model, optimizer, range(2))
    strategy.save_ckpt(model, tmp_path)
    expected = train_on(strategy, model, optimizer, range(2, 5))
    state = full_state(model, optimizer)
    strategy.close()
    strategy, model, optimizer = start(4)
    strategy.load_ckpt(model, tmp_path)
    assert train_on(strategy, model, optimizer, range(2, 5)) == expected
    assert_same(full_state(model, optimizer), state)
    strategy.close()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.full
@pytest.mark.ranks(4)
def test_checkpoints_have_the_same_bytes_for_any_sequence_parallel_size(tmp_path):
    with strategy_for(1) as strategy:
        model = build("llama")
        optimizer = prepared(strategy, model)
        train_on(strategy, model, optimizer, range(2), batch=plain)
        strategy.save_ckpt(model, tmp_path / "1", "one")
        strategy.save_model(model, output_dir=tmp_path / "model1")
    for sp in (2, 4):
        with strategy_for(sp) as strategy:
            model = build("llama", seed=1)
            prepared(strategy, model)
            strategy.load_ckpt(model, tmp_path / "1")
            strategy.save_ckpt(model, tmp_path / str(sp), "one")
            strategy.save_model(model, output_dir=tmp_path / f"model{sp}")
            dist.barrier()
            for folder in ("{}/one", "model{}"):
                expected, found = (files_in(tmp_path / folder.format(size)) for size in (1, sp))
                assert found.keys() == expected.keys()
                assert not [name for name in expected if found[name] != expected[name]], sp
            opened = AutoModelForCausalLM.from_pretrained(tmp_path / f"model{sp}")
            assert_same(dict(opened.named_parameters()), full_parameters(model))
            assert "sequence_parallel" not in json.dumps(opened.config.to_dict())
            copied = type(model.config).from_dict(model.config.to_dict())
            assert copied._attn_implementation in (None, "sdpa")


@pytest.mark.full
@pytest.mark.ranks(4)
def test_a_run_resumes_with_another_sequence_parallel_size(tmp_path):
    def run(sp, steps, *, saves=None):
        with strategy_for(sp) as strategy:
            model = build("llama", seed=sp)
            optimizer = prepared(strategy, model)
            if steps[0]:
                strategy.load_ckpt(model, tmp_path)
            results = []
            for step in steps:
                ids = torch.cat([ids_of(step, number, size=1) for number in range(4)])
                own = ids.chunk(strategy.dp_size)[strategy.dp_rank]
                loss = loss_of(model, strategy.shard_sequence(plain(own)))
                strategy.backward(loss, model, optimizer)
                result = strategy.optimizer_step(optimizer, model)
                results.append((mean_over_ranks(loss), result.grad_norm))
                if step == saves:
                    strategy.save_ckpt(model, tmp_path)
            return results

    expected = run(2, range(5), saves=2)[3:]
    assert run(2, range(3, 5)) == expected
    for sp in (1, 4):
        for found, of_two in zip(run(sp, range(3, 5)), expected, strict=True):
            assert found == pytest.approx(of_two, rel=1e-5)


@pytest.mark.full
@pytest.mark.ranks(4)
def test_random_states_of_another_layout_become_equal_within_a_group(tmp_path):
    for saved, loaded in ((1, 2), (2, 4), (4, 2)):
        with strategy_for(saved) as strategy:
            model = build("llama")
            prepared(strategy, model)
            strategy.set_seed(3, per_rank=True)
            assert torch.initial_seed() == 3 + strategy.dp_rank
            strategy.save_ckpt(model, tmp_path / f"{saved}{loaded}")
        with strategy_for(loaded) as strategy:
            model = build("llama")
            prepared(strategy, model)
            strategy.load_ckpt(model, tmp_path / f"{saved}{loaded}")
            states = [None] * loaded
            dist.all_gather_object(states, torch.get_rng_state().tolist(), group=strategy.sp_group)
            assert all(state == states[0] for state in states)


@pytest.mark.full
@pytest.mark.ranks(4)
def test_data_is_divided_between_data_parallel_ranks(tmp_path):
    def gathered(own):
        of_ranks = [None] * 4
        dist.all_gather_object(of_ranks, own)
        return of_ranks

    for sp in (2, 4):
        with strategy_for(sp) as strategy:
            assert strategy.train_batch_size == 4 // sp
            drawn = {
                "loader": [i for batch in ResumableLoader(range(24), 4, tail="drop") for i in batch.tolist()],
                "dataloader": [i for batch in strategy.setup_dataloader(range(24), 2) for i in batch.tolist()],
            }
            for name, own in drawn.items():
                of_ranks = gathered(own)
                assert all(of_ranks[rank] == of_ranks[rank // sp * sp] for rank in range(4)), name
                assert sorted(i for rank in range(0, 4, sp) for i in of_ranks[rank]) == list(range(24)), name
    with strategy_for(2) as strategy:
        model = build("llama")
        prepared(strategy, model)
        loader = ResumableLoader(range(24), 4, tail="drop")
        batches = iter(loader)
        first = [next(batches).tolist() for _ in range(2)]
        strategy.save_ckpt(model, tmp_path, dataloader=loader)
    for sp in (1, 2, 4):
        with strategy_for(sp) as strategy:
            model = build("llama")
            prepared(strategy, model)
            loader = ResumableLoader(range(24), 4, tail="drop")
            strategy.load_ckpt(model, tmp_path, dataloader=loader)
            rest = gathered([i for batch in loader for i in batch.tolist()])
            assert all(rest[rank] == rest[rank // sp * sp] for rank in range(4))
            seen = [i for of_rank in gathered(first)[::2] for batch in of_rank for i in batch]
            assert sorted(seen + [i for rank in range(0, 4, sp) for i in rest[rank]]) == list(range(24))


class Stateful:
    """Draws numbers of this data parallel rank, and has one state per rank."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.full
@pytest.mark.ranks(4)
def test_loaders_with_a_state_per_rank_resume_by_data_parallel_rank(tmp_path):
    with strategy_for(2) as strategy:
        model = build("llama")
        prepared(strategy, model)
        strategy.save_ckpt(model, tmp_path, dataloader=Stateful(10 + strategy.dp_rank))
    with strategy_for(2) as strategy:
        model = build("llama")
        prepared(strategy, model)
        loader = Stateful(0)
        strategy.load_ckpt(model, tmp_path, dataloader=loader)
        assert loader.number == 10 + strategy.dp_rank
    with strategy_for(4) as strategy:
        model = build("llama")
        prepared(strategy, model)
        with pytest.raises(CheckpointError, match="2 ranks, and this run has 1, expected the same number"):
            strategy.load_ckpt(model, tmp_path, dataloader=Stateful(0))


@pytest.mark.ranks(2)
def test_ranks_that_would_split_a_model_in_different_ways_all_raise():
    plan = SplitPlan(packs=dist.get_rank() == 0)
    config = StrategyConfig(sequence_parallel_size=2, bf16=False)
    with (
        patch("fsdp2_strategy.parallel.sequence.prepare.plan_split", lambda *_: plan),
        FSDPV2Strategy(config=config) as strategy,
        pytest.raises(SequenceError, match=r"ranks \[1\] differ from rank 0, expected the same result"),
    ):
        strategy.prepare_model(build("llama"), is_training=True)


@pytest.mark.ranks(2)
def test_a_part_that_no_prepared_model_computes_is_reported():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("fsdp2_strategy")
    logger.addHandler(handler)
    try:
        with FSDPV2Strategy(config=StrategyConfig(sequence_parallel_size=2, bf16=False)) as strategy:
            prepared = strategy.prepare_model(build("llama"), is_training=True)
            batch = {"input_ids": torch.arange(3, 11)[None]}
            for model, is_reported in ((prepared, False), (build("llama"), dist.get_rank() == 0)):
                model(**strategy.shard_sequence(batch))
                gc.collect()
                assert any("no prepared model" in text for text in messages) == is_reported, messages
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(("sp", "shard_size"), layouts("2x2", "2"))
def test_tokens_of_full_sequences_count_once_in_every_way_of_counting(sp, shard_size):
    """Losses of full sequences from `token_log_probs`, in two micro-batches with different numbers of tokens."""
    with strategy_for(sp, gradient_accumulation_steps=2) as strategy:
        model = build("llama").double()
        unsharded = copy.deepcopy(model)
        optimizer = prepared(strategy, model, shard_size, lr=0.0, weight_decay=0.0)

        def summed(policy, ids):
            mask = (ids[:, 1:] % 3 > 0).double()
            return -(token_log_probs(policy, ids) * mask).sum(), int(mask.sum())

        steps = [[ids_of(number, rank) for rank in range(strategy.dp_size)] for number in range(2)]
        counted_by_hand = [[summed(unsharded, ids) for ids in of_ranks] for of_ranks in steps]
        tokens = sum(count for of_ranks in counted_by_hand for _, count in of_ranks)
        expected = sum(loss for of_ranks in counted_by_hand for loss, _ in of_ranks) / tokens
        expected.backward()
        grads = {name: parameter.grad for name, parameter in unsharded.named_parameters()}
        own = sum(of_ranks[strategy.dp_rank][1] for of_ranks in counted_by_hand)
        assert strategy.all_reduce({"n": torch.tensor(own)}, "sum")["n"] == tokens
        for way in ("num_items_in_batch", "num_items", "num_items, tensor", "num_tokens"):
            for of_ranks in steps:
                loss, count = summed(model, of_ranks[strategy.dp_rank])
                if way == "num_items_in_batch":
                    strategy.backward(loss, model, optimizer, num_items_in_batch=tokens)
                elif way == "num_tokens":
                    given = loss * (2 * strategy.dp_size / tokens)
                    strategy.backward(given, model, optimizer, num_tokens=count)
                else:
                    given = count if way == "num_items" else torch.tensor(count)
                    strategy.backward(loss, model, optimizer, num_items=given)
                if of_ranks is steps[-1] and "num_items," not in way and way != "num_items":
                    # transformers computes rotary embeddings in float32
                    assert_close(full_grads(model), grads, 1e-6, "gradient of")
                result = strategy.optimizer_step(optimizer, model)
            assert result.tokens == tokens, way
            assert result.loss == pytest.approx(expected.item(), rel=1e-7), way
            norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
            assert result.grad_norm == pytest.approx(norm, rel=1e-6), way


@pytest.mark.ranks(2)
def test_tokens_of_parts_count_once():
    with strategy_for(2) as strategy:
        model = build("llama").double()
        unsharded = copy.deepcopy(model)
        optimizer = prepared(strategy, model, lr=0.0, weight_decay=0.0)
        ids = ids_of(0, 0)
        expected = unsharded(**plain(ids)).loss
        expected.backward()
        tokens = ids[:, 1:].numel()
        for way in ("num_items_in_batch", "num_items", "num_tokens"):
            part = strategy.shard_sequence(plain(ids))
            count = int((part["shift_labels"] != -100).sum())
            loss = loss_of(model, part)
            of_part = loss * part["num_items_in_batch"]  # the sum over this rank's part
            given = {"num_items_in_batch": tokens, "num_items": count, "num_tokens": count}[way]
            strategy.backward(loss if way == "num_tokens" else of_part, model, optimizer, **{way: given})
            result = strategy.optimizer_step(optimizer, model)
            assert result.tokens == tokens, way
            assert result.loss == pytest.approx(expected.item(), rel=1e-6), way
            norm = torch.stack([p.grad.norm() for p in unsharded.parameters()]).norm().item()
            assert result.grad_norm == pytest.approx(norm, rel=1e-6), way


OUTLIVES = """
import builtins, torch, torch.distributed as dist
from fsdp2_strategy.parallel import shard_sequence

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
builtins.kept = shard_sequence({"input_ids": torch.ones(2, 8, dtype=torch.long)}, dist.group.WORLD)
"""


@pytest.mark.full
def test_an_unused_part_that_outlives_the_program_is_warned_of_without_an_error():
    run = subprocess.run([sys.executable, "-c", OUTLIVES], capture_output=True, text=True, check=True, timeout=100)
    assert "a part of sequences was used by no prepared model" in run.stderr
    assert "Exception ignored" not in run.stderr
