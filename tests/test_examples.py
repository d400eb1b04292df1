"""The examples do what they say: rewards and losses are right, a resume changes no bit, configurations fit."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import arithmetic as task
import grpo
import ppo
import pytest
import questions
import sft
import torch
import torch.distributed as dist
import train_streaming
import train_text
import yaml
from exported import check_export
from helpers.reference import assert_parameters_close, full_parameters
from helpers.versions import needs_split_layers
from helpers.worlds import some
from options import print_plan
from torch.nn.functional import log_softmax
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import CheckpointError, DataError
from fsdp2_strategy.integrations.trl import with_fsdp2
from fsdp2_strategy.model.names import named_parameters

pytestmark = pytest.mark.each

EXAMPLES = Path(sft.__file__).parent
TINY = ["--warm-start-steps", "3", "--train-batch-size", "16", "--micro-train-batch-size", "4"]


def sequences_of(*texts):
    """Encode prompts and answers as they stand; an underscore is padding."""
    rows = [prompt.rjust(task.PROMPT, "_") + answer.ljust(task.ANSWER, "_") for prompt, answer in texts]
    return torch.tensor([[task.CHARACTERS.index(c) for c in row] for row in rows])


# --- the task --------------------------------------------------------------------------------------------------------


def test_the_reward_is_for_the_sum_and_its_end_alone():
    answers = ["22\n", "22\n1", "22", "22_\n", "2_2\n", "_22\n", "022\n", "23\n", "\n22\n", "", "+22\n", "222\n"]
    batch = task.batch_of(sequences_of(*[("7+15=", answer) for answer in answers]))
    rewards = task.rewards_of(batch, [(7, 15)] * len(answers))
    assert rewards.tolist() == [1, 1] + [0] * (len(answers) - 2)
    assert batch["answer_mask"].sum(1).tolist() == [3, 3, 4, 4, 4, 4, 4, 3, 1, 4, 4, 4]
    assert (batch["attention_mask"][:, 0] == 0).all() and (batch["attention_mask"][:, 1 : task.PROMPT] == 1).all()


def test_what_a_key_names_is_the_same_at_any_time_and_nothing_elses():
    keys = [(use, 42, step, rank) for use in ("problems", "answers") for step in range(50) for rank in range(2)]
    seeds = [task.seed_of(*key) for key in keys]
    assert seeds == [task.seed_of(*key) for key in keys] and len(set(seeds)) == len(keys)


def test_answers_are_compared_with_their_group():
    advantages = grpo.group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), 4)
    assert advantages[:4].tolist() == pytest.approx([3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2, 3**0.5 / 2], rel=1e-5)
    assert advantages[4:].tolist() == [0, 0, 0, 0]


def test_generalized_advantages_are_the_sums_that_define_them():
    random = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 5, generator=random, dtype=torch.float64)
    errors = rewards + torch.cat([values[:, 1:], torch.zeros(3, 1)], dim=1) - values
    expected = [sum(0.95 ** (k - t) * errors[:, k] for k in range(t, 5)) for t in range(5)]
    torch.testing.assert_close(ppo.gae(rewards, values, 0.95), torch.stack(expected, dim=1))


# --- grpo ------------------------------------------------------------------------------------------------------------


def experience(rank):
    """Return answers of very unequal length: rank 0 has short ones alone."""
    answers = [["\n", "7\n"], ["1+19", "22\n"], ["3\n", "\n"], ["4444", "123\n"]]
    random = torch.Generator().manual_seed(rank)
    rows = [("7+15=", text) for part in (answers[rank], answers[rank + 2]) for text in part]
    batch = task.batch_of(sequences_of(*rows))
    batch["advantages"] = torch.randn(4, generator=random, dtype=torch.float64)
    for name in ("old_log_probs", "reference_log_probs"):
        batch[name] = -2.6 + 0.3 * torch.randn(4, task.ANSWER, generator=random, dtype=torch.float64)
    noise = 0.8 * torch.randn(4, task.ANSWER, generator=random, dtype=torch.float64)
    batch["engine_log_probs"] = (batch["old_log_probs"] + noise).clamp(max=0)
    return batch


@pytest.mark.ranks(2)
def test_each_token_weighs_the_same_on_whatever_rank_and_in_whatever_micro_batch_it_is():
    sizes = {"vocab_size": 14, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, pad_token_id=task.PAD)).double()
    whole = copy.deepcopy(model)
    args = grpo.arguments(["--train-batch-size", "8", "--micro-train-batch-size", "2"])
    strategy = FSDPV2Strategy(args.seed, 0.0, 2, 8, False)
    model = strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1.0, optimizer_cls=torch.optim.SGD)
    metrics = grpo.update(strategy, args, model, optimizer, None, experience(strategy.get_rank()))

    parts = [experience(rank) for rank in range(2)]
    together = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    logits = whole(input_ids=together["sequences"], attention_mask=together["attention_mask"]).logits
    targets = together["sequences"][:, -task.ANSWER :, None]
    log_probs = log_softmax(logits[:, -task.ANSWER - 1 : -1], dim=2).gather(2, targets).squeeze(2)
    mask = together["answer_mask"]
    ratio = (log_probs - together["old_log_probs"]).exp()
    bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
    assert (ratio != bounded)[mask].any() and (ratio == bounded)[mask].any()
    advantages = together["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    of_engine = together["old_log_probs"] - together["engine_log_probs"]
    assert (of_engine.exp() > args.importance_cap)[mask].any()
    behind = together["reference_log_probs"] - log_probs
    per_token = args.init_kl_coef * (behind.exp() - 1 - behind) - of_engine.exp().clamp(max=args.importance_cap) * gain
    total, tokens = (per_token * mask).sum(), int(mask.sum())
    total.backward()  # as the step: not divided, so that what the norms of transformers round to fp32 is the same
    assert (metrics["loss"], metrics["tokens"]) == (pytest.approx(total.item() / tokens, rel=1e-12), tokens)
    assert metrics["engine_difference"] == pytest.approx(of_engine[mask].abs().mean().item(), rel=1e-12)
    assert 0 < metrics["importance_share_limited"] < 1
    expected = {name: (p - p.grad / tokens).detach() for name, p in named_parameters(whole).items()}
    assert_parameters_close(full_parameters(model), expected, 1e-12)


def run_grpo(folder, policy, *more):
    command = ["--run-dir", str(folder), "--policy", str(policy), "--steps", "4", "--save-every", "2", *TINY]
    command += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", *more]
    with pytest.MonkeyPatch.context() as patched:  # an untrained policy is never right
        patched.setattr(task, "rewards_of", lambda batch, _: (batch["sequences"][:, task.PROMPT] < 7).float())
        assert grpo.train(grpo.arguments(command)) == 0
    dist.barrier()
    return grpo.read_log(folder)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_grpo_goes_on_where_it_was_to_the_last_bit(tmp_path):
    undisturbed = run_grpo(tmp_path / "undisturbed", tmp_path / "policy")
    assert [entry["step"] for entry in undisturbed] == [1, 2, 3, 4]
    assert all(entry["loss"] != 0 and entry["grad_norm"] > 0 for entry in undisturbed)
    assert undisturbed[0]["kl"] < undisturbed[3]["kl"]
    assert all(0 < entry["engine_difference_largest"] < 1e-4 for entry in undisturbed)
    assert all(entry["importance_weight"] == pytest.approx(1, abs=1e-4) for entry in undisturbed)
    run_grpo(tmp_path / "stopped", tmp_path / "policy", "--stop-at", "3")
    resumed = run_grpo(tmp_path / "stopped", tmp_path / "policy")
    assert [entry["step"] for entry in resumed] == [1, 2, 3, 3, 4]
    for entry in resumed:
        assert all(entry[name] == undisturbed[entry["step"] - 1][name] for name in grpo.COMPARED), entry
    exported = [LlamaForCausalLM.from_pretrained(tmp_path / run / "export") for run in ("undisturbed", "stopped")]
    for one, other in zip(*(model.parameters() for model in exported), strict=True):
        assert torch.equal(one, other)


def run_ten_steps(folder, policy, sp):
    run_grpo(folder, policy, "--steps", "10", "--sequence-parallel-size", str(sp), "--warm-start-steps", "30")


@pytest.mark.full
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_grpo_with_split_sequences_has_the_rewards_and_losses_of_full_ones(run_on, tmp_path, data_parallel):
    logs = []
    for sp in (1, 2):
        run_on(data_parallel * sp, run_ten_steps, folder=tmp_path / str(sp), policy=tmp_path / "policy", sp=sp)
        logs.append(grpo.read_log(tmp_path / str(sp)))
    for full, split in zip(*logs, strict=True):
        assert all(split[name] == full[name] for name in ("step", "reward", "tokens")), split
        # The loss is a mean of advantages, whose sum is near 0.
        assert all(split[name] == pytest.approx(full[name], rel=1e-5, abs=1e-6) for name in ("loss", "kl", "grad_norm"))
    assert [entry["step"] for entry in logs[1]] == list(range(1, 11))
    assert len({entry["reward"] for entry in logs[1]}) > 3


@pytest.mark.full
@needs_split_layers
def test_grpo_with_split_layers_has_the_rewards_and_losses_of_full_ones(run_on, tmp_path):
    logs = []
    for tp in (1, 2):
        options = ["--tensor-parallel-size", str(tp)]
        run_on(tp, run_on_policy, folder=tmp_path / str(tp), policy=tmp_path / "policy", options=options)
        logs.append(grpo.read_log(tmp_path / str(tp)))
    for full, split in zip(*logs, strict=True):
        assert all(split[name] == full[name] for name in ("step", "reward", "tokens")), split
        assert all(split[name] == pytest.approx(full[name], rel=1e-5, abs=1e-6) for name in ("loss", "kl", "grad_norm"))
    assert [entry["step"] for entry in logs[1]] == [1, 2, 3, 4]


def run_on_policy(folder, policy, options):
    run_grpo(folder, policy, *options)


def test_the_last_number_of_an_answer_decides(tmp_path):
    folder, *_ = small_folder(tmp_path)
    data = tmp_path / "questions.jsonl"
    lines = [{"question": "1000+200?", "answer": "so #### 1,200"}, {"question": "?", "answer": "none"}]
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    task = questions.Questions(data, folder, prompt_tokens=64, answer_tokens=12)
    ((prompt, number),) = task.problems
    assert (task.tokenizer.decode(prompt), number) == ("<|user|>1000+200?<|end|><|assistant|>", "1200")
    answers = ["1200<|end|>", "1,200", "1200 or 7", "no", "-1200", "x=1200."]
    ids = [task.tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
    sequences = torch.tensor([prompt + answer + [0] * (12 - len(answer)) for answer in ids])
    mask = torch.tensor([[i < len(answer) for i in range(12)] for answer in ids])
    rewards = task.rewards_of({"sequences": sequences, "answer_mask": mask}, [task.problems[0]] * len(answers))
    assert rewards.tolist() == [1, 1, 0, 0, 0, 1]
    with pytest.raises(DataError, match="contains no question with at most 3 tokens"):
        questions.Questions(data, folder, prompt_tokens=3, answer_tokens=12)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_grpo_trains_a_folder_of_the_users_on_questions_of_a_file(tmp_path):
    folder, data = tmp_path / "base", tmp_path / "questions.jsonl"
    if dist.get_rank() == 0:
        small_folder(tmp_path)
        lines = [{"question": f"{'1+' * i}1?", "answer": str(i + 1)} for i in range(9)]
        data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    dist.barrier()
    options = ["--data", str(data), "--train", "--answer-tokens", "6", "--steps", "2"]
    with pytest.MonkeyPatch.context() as patched:  # an untrained model is never right
        patched.setattr(questions.Questions, "rewards_of", lambda *_: torch.arange(16.0) % 2)
        entries = run_grpo(tmp_path / "run", folder, *options)
    assert [entry["step"] for entry in entries] == [1, 2]
    assert all(entry["grad_norm"] > 0 and 0 < entry["tokens"] <= 32 * 6 for entry in entries)
    assert all(0 < entry["engine_difference_largest"] < 1e-4 for entry in entries), "positions of padded prompts agree"
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "export").chat_template == sft.TEMPLATE


# --- ppo -------------------------------------------------------------------------------------------------------------


def run_ppo(folder):
    """Run the program, and return the log without times."""
    sizes = ["--steps", "2", "--save-every", "1", "--rollout-batch-size", "32", "--reward-model-steps", "2"]
    ppo.train(ppo.arguments(["--run-dir", str(folder), *sizes, *TINY]))
    dist.barrier()
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_ppo_trains_actor_and_critic_and_resumes_both_at_one_step(tmp_path):
    stayed = []
    update = ppo.update

    def watched(strategy, args, of_actor, of_critic, batch):
        models = [of_actor[0].model, of_critic[0]]
        before = [full_parameters(model) for model in models]
        metrics = update(strategy, args, of_actor, of_critic, batch)
        for old, new in zip(before, map(full_parameters, models), strict=True):
            stayed.append([name for name in old if torch.equal(old[name], new[name])])
        return metrics

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ppo, "update", watched)
        entries = run_ppo(tmp_path)
    assert stayed == [[]] * 4
    assert [entry["step"] for entry in entries] == [1, 2] and all(0 <= entry["score"] <= 1 for entry in entries)
    if dist.get_rank() == 0:
        newest = (tmp_path / "ckpts" / "latest").read_text().strip()
        assert (tmp_path / "ckpts" / newest / "critic").is_dir()
        shutil.rmtree(tmp_path / "ckpts" / newest)  # as if the run had been killed before this save
    dist.barrier()
    assert run_ppo(tmp_path) == [*entries, entries[1]]


# --- sft -------------------------------------------------------------------------------------------------------------


def small_folder(folder):
    """Make the folder and the data of sft.py's tiny model."""
    return sft.make_inputs(folder, write=True)


def sft_settings(**training):
    settings = yaml.safe_load((EXAMPLES / "sft.yaml").read_text())
    return StrategyConfig.from_mapping(settings["strategy"]), sft.Training(**settings["train"] | training)


def test_the_tokens_to_learn_are_those_of_the_assistant(tmp_path):
    folder, *_ = small_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "add"}, *sft.conversation(7, 16)]
    tokens, learned = sft.tokenize(messages, tokenizer, "here")
    assert tokenizer.decode(tokens).startswith("<|system|>add<|end|><|user|>7+16?<|end|><|assistant|>23<|end|>")
    taught = [token for token, is_learned in zip(tokens, learned, strict=True) if is_learned]
    assert tokenizer.decode(taught) == "23<|end|>46<|end|>"


def test_a_template_that_changes_earlier_messages_is_an_error(tmp_path):
    folder, *_ = small_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(DataError, match=r"train.jsonl, line 3, the chat template changes earlier messages"):
        sft.tokenize(sft.conversation(1, 2), tokenizer, "train.jsonl, line 3")


def test_packing_keeps_each_document_once_within_the_length_and_wastes_little():
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 101, (500,), generator=random).tolist()
    documents = [([i] * length, [True] * length) for i, length in enumerate(lengths)]
    rows = sft.pack(documents, 100)
    assert sorted(tokens[0] for row in rows for tokens, _ in row) == list(range(500))
    sizes = [sum(len(tokens) for tokens, _ in row) for row in rows]
    assert max(sizes) <= 100 and sum(lengths) / (100 * len(rows)) > 0.95


def test_packed_documents_have_the_loss_and_the_gradients_of_documents_alone(tmp_path):
    folder, data, _ = small_folder(tmp_path)
    documents = sft.read_documents(data, AutoTokenizer.from_pretrained(folder), 128)[:24]
    packed, alone = sft.pack(documents, 128), [[document] for document in documents]
    assert 1 < len(packed) < 8
    losses, gradients = [], []
    for rows in (packed, alone):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
        loss = sft.loss_of(model, sft.batch_of(rows, torch.device("cpu")))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in named_parameters(model).items()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert_parameters_close(*gradients, 1e-8)


def run_sft(folder, config, training, *more):
    args = sft.arguments(["--run-dir", str(folder), *more])
    assert sft.train(args, config, training) == 0
    dist.barrier()
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("packing", [True, False])
def test_fine_tuning_resumes_exactly_and_exports_a_model_that_learned(tmp_path, packing):
    config, training = sft_settings(packing=packing, save_every=4, eval_every=6)
    config = config.replace(train_batch_size=8)
    whole = run_sft(tmp_path / "whole", config, training, "--steps", "12")
    # A run that lost its newest checkpoint goes on from the one before it.
    again = tmp_path / "again"
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "whole", again)
        shutil.rmtree(again / "checkpoints" / "global_step12")
        shutil.rmtree(again / "export")
    dist.barrier()
    resumed = run_sft(again, config, training, "--steps", "12")
    losses = {name: [e for e in entries if "loss" in e] for name, entries in (("whole", whole), ("again", resumed))}
    assert losses["again"][: len(losses["whole"])] == losses["whole"]
    repeated = losses["again"][len(losses["whole"]) :]
    assert [e["step"] for e in repeated] == list(range(9, 13))
    by_step = {e["step"]: (e["loss"], e["grad_norm"], e.get("eval_loss")) for e in losses["whole"]}
    assert all((e["loss"], e["grad_norm"], e.get("eval_loss")) == by_step[e["step"]] for e in repeated)
    assert by_step[12][2] < 0.8 * by_step[1][0]
    for one, other in zip(*(LlamaForCausalLM.from_pretrained(tmp_path / run / "export").parameters()
                            for run in ("whole", "again")), strict=True):  # fmt: skip
        assert torch.equal(one, other)
    tokenizer = AutoTokenizer.from_pretrained(again / "export")
    assert tokenizer.chat_template == sft.TEMPLATE


@pytest.mark.full
@pytest.mark.ranks(2)
@needs_split_layers
@pytest.mark.parametrize("shared", ["sequence_parallel_size", "tensor_parallel_size"])
def test_fine_tuning_with_shared_sequences_or_layers_has_the_losses_of_one_rank(tmp_path, shared):
    config, training = sft_settings(eval_every=4)
    entries = run_sft(tmp_path, config.replace(**{shared: 2}), training, "--steps", "4")
    folder, data, held_out = tmp_path / "base", tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = sft.pack(sft.read_documents(data, tokenizer, training.sequence_length), training.sequence_length)
    model = LlamaForCausalLM.from_pretrained(folder)
    batch = [rows[int(i)] for i in ResumableLoader(rows, 16, seed=config.seed, dp_rank=0, dp_size=1).peek(16)]
    assert len(batch) == 16
    with torch.no_grad():
        loss = sft.loss_of(model, sft.batch_of(batch, torch.device("cpu"))) / sft.learned_tokens(batch)
    assert entries[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    with torch.no_grad():
        exported = LlamaForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
        rows = [[document] for document in sft.read_documents(held_out, tokenizer, training.sequence_length)]
        loss = sft.loss_of(exported, sft.batch_of(rows, torch.device("cpu"))) / sft.learned_tokens(rows)
    assert entries[-1]["eval_loss"] == pytest.approx(loss.item(), abs=0.02)  # the export is in bf16


@pytest.mark.ranks(2)
def test_an_export_that_is_another_model_is_an_error_on_every_rank(tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    with FSDPV2Strategy(config=StrategyConfig(bf16=False)) as strategy:
        model = strategy.prepare_model(LlamaForCausalLM(config), is_training=True)
        folder = tmp_path / "export"
        strategy.save_model(model, output_dir=folder)
        ids = torch.arange(8)[None]
        exported = check_export(model, folder, ids)
        assert (exported is None) == (dist.get_rank() != 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        with pytest.raises(CheckpointError, match="the export is another model"):
            check_export(model, folder, ids)


# --- the command lines -----------------------------------------------------------------------------------------------

SCRIPTS = (
    "demo",
    "grpo",
    "ppo",
    "ray_grpo",
    "robot",
    "sft",
    "train_streaming",
    "train_text",
    "train_vla",
    "trainer_sft",
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_the_command_and_explains_every_option(name, monkeypatch, capsys):
    if name == "ray_grpo":
        pytest.importorskip("ray")
    module = importlib.import_module(name)
    parsers = []
    parse = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_known_args", lambda self, *rest: (parsers.append(self), parse(self, *rest))[1]
    )
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    entry = getattr(module, "arguments", None) or module.main
    with pytest.raises(SystemExit) as stopped:
        entry()
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"docs/examples/{name}.py" in module.__doc__ and module.__doc__.splitlines()[0] in text
    for action in parsers[0]._actions:
        assert action.help and action.option_strings[0] in text, action


def test_every_script_is_tested_for_its_help():
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    assert scripts == set(SCRIPTS)


def test_options_of_a_file_are_defaults_of_the_command_line(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text("steps: 3\npolicy: here\nactor-learning-rate: 1.0e-6\nactivation_checkpointing: true\n")
    args = grpo.arguments(["--config", str(file), "--steps", "5"])
    assert (args.steps, args.policy, args.actor_learning_rate) == (5, Path("here"), 1e-6)
    assert StrategyConfig.from_args(args).activation_checkpointing is True
    file.write_text("step: 3\n")
    with pytest.raises(SystemExit):
        grpo.arguments(["--config", str(file)])
    assert "contains step, expected names of options, and of fields of StrategyConfig" in capsys.readouterr().err


# --- configurations of a real size -----------------------------------------------------------------------------------

RANKS, GPU_BYTES = 8, 80e9
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def sizes_in(text, name):
    """Return the bytes in the line of a plan that begins with ``name``."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.e+]+) (B|kB|MB|GB)\b", line)]


def llama_8b(folder):
    LlamaConfig(**LLAMA_8B).save_pretrained(folder)
    return folder


def explain_sft(path, folder):
    sft.main(["--config", str(path), "--model", str(llama_8b(folder)), "--explain", str(RANKS)])
    settings = yaml.safe_load(path.read_text())
    return settings["strategy"], settings["train"]["sequence_length"], LLAMA_8B


def explain_text(path, folder):
    train_text.main(["--config", str(path), "--explain", str(RANKS)])
    settings = yaml.safe_load(path.read_text())
    return settings["strategy"], settings["train"]["sequence_length"], settings["model"]


def explain_grpo(path, folder):
    args = grpo.arguments(["--train", "--config", str(path), "--policy", str(llama_8b(folder)), "--data", "q.jsonl"])
    config = StrategyConfig.from_args(args).replace(bf16=args.bf16)
    config.accumulation_steps(RANKS)
    assert args.rollout_batch_size % RANKS == 0
    assert args.rollout_batch_size * args.n_samples_per_prompt % args.train_batch_size == 0
    with torch.device("meta"):
        print_plan(LlamaForCausalLM(LlamaConfig(**LLAMA_8B)), config, RANKS)
    return vars(args), args.prompt_tokens + args.answer_tokens, LLAMA_8B


def explain_trainer(path, folder):
    trl = pytest.importorskip("trl")
    settings = yaml.safe_load(path.read_text())
    with_fsdp2(trl.SFTTrainer, **settings["strategy"])
    with warnings.catch_warnings():  # of TRL and transformers
        warnings.simplefilter("ignore")
        args = trl.SFTConfig(str(folder), **settings["train"], use_cpu=True)
    config = StrategyConfig(bf16=args.bf16, activation_checkpointing=args.gradient_checkpointing)
    with torch.device("meta"):
        print_plan(LlamaForCausalLM(LlamaConfig(**LLAMA_8B)), config, RANKS)
    return {"micro_train_batch_size": args.per_device_train_batch_size}, args.max_length, LLAMA_8B


EXPLAIN = {
    "sft_8b.yaml": explain_sft,
    "pretrain_1b.yaml": explain_text,
    "grpo_8b.yaml": explain_grpo,
    "trainer_sft_8b.yaml": explain_trainer,
}


LANGUAGE_MODELS = [path for path in sorted(EXAMPLES.glob("configs/*.yaml")) if path.name != "streaming_droid.yaml"]


@pytest.mark.parametrize("path", some(LANGUAGE_MODELS, LANGUAGE_MODELS[:1]), ids=lambda path: path.name)
def test_a_configuration_of_a_real_size_is_accepted_and_fits_the_memory(path, tmp_path, capsys):
    settings, tokens, model = EXPLAIN[path.name](path, tmp_path)
    text = capsys.readouterr().out
    assert f"on {RANKS} ranks" in text and "warning" not in text
    assert "bf16 compute, fp32 reduction" in text and "recomputed" in text
    held, gathered = sum(sizes_in(text, "each rank")), sum(sizes_in(text, "gathered"))
    tokens *= settings["micro_train_batch_size"]
    layers, hidden, inner = (model[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    # Inputs of all blocks; and in one block some 16 tensors of hidden states and 4 of the MLP, with their gradients.
    activations = 2 * tokens * (layers * hidden + 2 * (16 * hidden + 4 * inner))
    logits = 4 * 256 * 2**20  # chunks of `token_log_probs`
    largest = max(
        sizes_in(line, "")[-1] for line in text.splitlines() if re.search(r"\b(block|head|embedding)\b.*B$", line)
    )
    total = held + gathered + 3 * 2 * largest + activations + logits
    assert 1.5 * total < 0.9 * GPU_BYTES, f"{total / 1e9:.1f} GB"
    says = re.search(r"holds ([\d.]+) GB", path.read_text())
    assert float(says[1]) == pytest.approx(held / 1e9, rel=0.05)


def test_the_configuration_for_streaming_is_accepted_and_its_policy_is_sharded(capsys):
    args = train_streaming.parse(["--config", str(EXAMPLES / "configs" / "streaming_droid.yaml"), "--seed", "1"])
    assert (args.repo_id, args.batch_size, args.on_corrupt, args.bf16) == ("lerobot/droid_1.0.1", 64, "skip", True)
    with torch.device("meta"):
        policy = train_streaming.Policy(cameras=3, state_size=8, action_size=8, actions=args.n_action_steps)
    print_plan(policy, StrategyConfig(block_class_names=("TransformerEncoderLayer",)), RANKS)
    text = capsys.readouterr().out
    assert f"on {RANKS} ranks" in text and "blocks.0 … 3 (4 equal)" in text and sum(sizes_in(text, "each rank")) < 1e8


# --- on several hosts ------------------------------------------------------------------------------------------------


def slurm(tmp_path, *options, **environment):
    """Run run.slurm with replacements for the commands of SLURM and torch, which note how they were called."""
    commands = {
        "srun": f'echo "srun $SRUN_CPUS_PER_TASK" >> {tmp_path}/calls; exec "$@"',
        "scontrol": f'[ "$1" = show ] && printf "host7\\nhost8\\n" || echo "scontrol $*" >> {tmp_path}/calls',
        "torchrun": f'echo "torchrun $*" >> {tmp_path}/calls; exit ${{STATUS:-0}}',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "70123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "host[7-8]"}
    job |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "calls").write_text("")
    command = ["bash", *map(str, options)]
    done = subprocess.run(command, env=os.environ | job | environment, cwd=EXAMPLES.parents[1], check=False, timeout=60)
    return done.returncode, (tmp_path / "calls").read_text().splitlines()


RENDEZVOUS = "--max-restarts 3 --rdzv-backend c10d --rdzv-id 70123 --rdzv-endpoint host7:20123"


def test_the_slurm_script_runs_any_script_and_requeues_what_is_not_complete(tmp_path):
    script = EXAMPLES / "run.slurm"
    status, calls = slurm(tmp_path, script, "docs/examples/sft.py", "--run-dir", "/shared/a b")
    started = f"torchrun --nnodes 2 --nproc-per-node 8 {RENDEZVOUS} docs/examples/sft.py --run-dir /shared/a b"
    assert (status, calls) == (0, ["srun 64", started])
    status, calls = slurm(tmp_path, script, "docs/examples/sft.py", STATUS="143")
    assert (status, calls[2:]) == (1, ["scontrol requeue 70123"])
    status, calls = slurm(tmp_path, script, "docs/examples/sft.py", STATUS="1", SLURM_RESTART_COUNT="20")
    assert (status, len(calls)) == (1, 2)
    assert slurm(tmp_path, script) == (2, [])


def test_the_slurm_script_of_streaming_runs_its_script_by_the_common_one(tmp_path):
    status, calls = slurm(tmp_path, EXAMPLES / "train_streaming.slurm", "--repo_id", "a/b")
    script = "docs/examples/train_streaming.py --repo_id a/b"
    assert (status, calls[1:]) == (0, [f"torchrun --nnodes 2 --nproc-per-node 8 {RENDEZVOUS} {script}"])


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.slurm")), ids=lambda path: path.name)
def test_a_slurm_script_is_valid_bash_and_asks_for_a_signal_before_its_end(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "#SBATCH --signal=TERM@120\n" in script.read_text() and "#SBATCH --requeue\n" in script.read_text()
