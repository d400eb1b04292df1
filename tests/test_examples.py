"""The RL examples do what they say: a reward that is right, tokens that weigh alike, a resume that changes no bit."""

from __future__ import annotations

import copy
import json

import arithmetic as task
import grpo
import ppo
import pytest
import torch
import torch.distributed as dist
from helpers.reference import assert_parameters_close, full_parameters
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.model.names import named_parameters

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
    loss = (per_token * mask).sum() / mask.sum()
    loss.backward()
    assert (metrics["loss"], metrics["tokens"]) == (pytest.approx(loss.item(), rel=1e-12), int(mask.sum()))
    assert metrics["engine_difference"] == pytest.approx(of_engine[mask].abs().mean().item(), rel=1e-12)
    assert 0 < metrics["importance_share_limited"] < 1
    expected = {name: (p - p.grad).detach() for name, p in named_parameters(whole).items()}
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


# --- ppo -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.ranks(2)
def test_ppo_trains_actor_and_critic(tmp_path):
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
        sizes = ["--steps", "2", "--rollout-batch-size", "32", "--reward-model-steps", "2"]
        ppo.train(ppo.arguments(["--run-dir", str(tmp_path), *sizes, *TINY]))
    dist.barrier()
    assert stayed == [[]] * 4
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2] and all(0 <= entry["score"] <= 1 for entry in entries)
