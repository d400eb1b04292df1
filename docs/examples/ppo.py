"""Train with PPO, which has four models: an actor, a critic, a frozen reference and a frozen reward model.

    torchrun --standalone --nproc-per-node 2 docs/examples/ppo.py --run-dir runs/ppo

The reward model is a language model, trained on right sums first, which takes seconds. Its score is the probability
that it gives to an answer. PPO gets only scores; the log also contains the share of right answers. The task is in
arithmetic.py. Actor and critic are saved as one checkpoint, from which the program resumes.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import arithmetic as task
import torch
from arithmetic import PROMPT, Batch, log_probs_of, split
from grpo import Clock, clipped_objective
from options import make_parser
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy


class Critic(nn.Module):
    """A critic: a backbone and a linear head that predicts the value of each state."""

    def __init__(self, policy: Path) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(policy)
        self.value_head = nn.Linear(self.model.config.hidden_size, 1, bias=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return [n, ANSWER]: the value of the state before each token of the answer."""
        states = self.model(input_ids=batch["sequences"], attention_mask=batch["attention_mask"], use_cache=False)
        return self.value_head(states.last_hidden_state[:, PROMPT - 1 : -1]).squeeze(-1)


def train(args: argparse.Namespace) -> None:
    with FSDPV2Strategy(
        args.seed, args.max_norm, args.micro_train_batch_size, args.train_batch_size, args.bf16, args
    ) as strategy:
        policy = args.run_dir / "policy"
        task.warm_start(strategy, policy, args.warm_start_steps)
        with strategy.init_model_context(meta_init=True):
            actor, reward_model, reference = (AutoModelForCausalLM.from_pretrained(policy) for _ in range(3))
            critic = Critic(policy)
        train_reward_model(strategy, args, reward_model)
        updates = args.rollout_batch_size // args.train_batch_size
        actor_and_optimizer, critic_and_optimizer, reward_model, reference = strategy.prepare_models_and_optimizers(
            actor, critic, reward_model, reference, args, max_steps=args.steps * updates
        )
        trained = {"actor": actor, "critic": critic}
        _, state = strategy.load_ckpt(trained, args.run_dir / "ckpts")
        strategy.setup_inference_engine(args, engine_type="transformers", actor=actor)
        strategy.offload_model([reward_model, reference])

        for step in range(state.get("step", 0), args.steps):
            clock = Clock()
            strategy.wakeup_inference_engine()
            batch, right = rollout(strategy, args, step)
            strategy.maybe_sleep_inference_engine()
            clock.lap("rollout")

            strategy.reload_model([reward_model, reference])
            parts = list(split(batch, args.micro_train_batch_size))
            experience = [make_experience(part, actor, critic, reward_model, reference, args) for part in parts]
            batch |= {name: torch.cat([part[name] for part in experience]) for name in experience[0]}
            strategy.offload_model([reward_model, reference])
            clock.lap("judge")

            batch["advantages"] = normalise(strategy, batch["advantages"], batch["answer_mask"])
            for _, optimizer, _ in (actor_and_optimizer, critic_and_optimizer):
                strategy.maybe_load_optimizer(optimizer)
            metrics = update(strategy, args, actor_and_optimizer, critic_and_optimizer, batch)
            for _, optimizer, _ in (actor_and_optimizer, critic_and_optimizer):
                strategy.maybe_offload_optimizer(optimizer)
            clock.lap("update")

            strategy.update_engine_weights(actor, verify=step == 0)
            clock.lap("weights")
            means = strategy.all_reduce({"right": right.mean().item(), "score": batch["scores"].mean().item()})
            if strategy.is_rank_0():
                with (args.run_dir / "log.jsonl").open("a") as log:
                    print(json.dumps({"step": step + 1, **means, **metrics, "seconds": clock.seconds}), file=log)
            if (step + 1) % args.save_every == 0:  # one commit: both models resume at the same step
                strategy.save_ckpt(trained, args.run_dir / "ckpts", client_state={"step": step + 1})
        strategy.save_model(actor, output_dir=args.run_dir / "export")


def train_reward_model(strategy: FSDPV2Strategy, args: argparse.Namespace, model: nn.Module) -> None:
    """Train the reward model on right answers; collective."""
    _, optimizer, scheduler = strategy.prepare_reward_model(model, args, args.reward_model_steps)
    task.train_on_answers(strategy, model, optimizer, scheduler, args.reward_model_steps, accuracy=1.0)
    model.eval().requires_grad_(False)


def rollout(strategy: FSDPV2Strategy, args: argparse.Namespace, step: int) -> tuple[Batch, torch.Tensor]:
    """Draw this rank's problems of a step, sample an answer to each, and return them and whether each is right."""
    key = (args.seed, step, strategy.get_rank())
    random = torch.Generator().manual_seed(task.seed_of("problems", *key))
    problems = task.draw_problems(args.rollout_batch_size // strategy.world_size, random)
    prompts = task.encode_prompts(problems).to(strategy.device)
    batch = task.generate(strategy.inference_engine, prompts, task.seed_of("answers", *key))
    return batch, task.rewards_of(batch, problems)


@torch.no_grad()
def make_experience(
    batch: Batch,
    actor: nn.Module,
    critic: nn.Module,
    reward_model: nn.Module,
    reference: nn.Module,
    args: argparse.Namespace,
) -> Batch:
    """Compute advantages and returns from KL penalties of all tokens, and the score at the last token; collective."""
    mask = batch["answer_mask"]
    log_probs, values = log_probs_of(actor, batch), critic(batch) * mask
    scores = (log_probs_of(reward_model, batch) * mask).sum(1).exp()
    rewards = args.init_kl_coef * (log_probs_of(reference, batch) - log_probs) * mask
    rewards.scatter_add_(1, mask.sum(1, keepdim=True) - 1, scores[:, None])
    advantages = gae(rewards, values, args.lambd) * mask
    return {
        "old_log_probs": log_probs,
        "values": values,
        "scores": scores,
        "advantages": advantages,
        "returns": advantages + values,
    }


def gae(rewards: torch.Tensor, values: torch.Tensor, lambd: float) -> torch.Tensor:
    """Return generalized advantages [n, tokens] (https://arxiv.org/abs/1506.02438), without discount (gamma = 1)."""
    advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    for t in reversed(range(rewards.shape[1])):
        advantage = rewards[:, t] + next_values[:, t] - values[:, t] + lambd * advantage
        advantages[:, t] = advantage
    return advantages


def normalise(strategy: FSDPV2Strategy, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalise values where ``mask`` is set, over all ranks, to mean 0 and deviation 1; collective."""
    selected = values[mask].double()
    sums = strategy.all_reduce(
        torch.stack([selected.new_tensor(len(selected)), selected.sum(), selected.square().sum()]), "sum"
    )
    mean, mean_square = sums[1:] / sums[0]
    return ((values - mean) / (mean_square - mean**2 + 1e-8).sqrt()).float() * mask


def update(
    strategy: FSDPV2Strategy,
    args: argparse.Namespace,
    actor_and_optimizer: tuple,
    critic_and_optimizer: tuple,
    batch: Batch,
) -> dict[str, float]:
    """Take the optimizer steps of one rollout with actor and critic; all tokens of all ranks have the same weight."""
    actor, optimizer, scheduler = actor_and_optimizer
    critic, critic_optimizer, critic_scheduler = critic_and_optimizer
    sums = torch.zeros(3, dtype=torch.float64)
    for mini_batch in split(batch, args.train_batch_size // strategy.world_size):
        for micro_batch in split(mini_batch, args.micro_train_batch_size):
            mask = micro_batch["answer_mask"]
            tokens = int(mask.sum())
            log_ratio = (log_probs_of(actor, micro_batch) - micro_batch["old_log_probs"])[mask]
            loss = -clipped_objective(log_ratio, micro_batch["advantages"][mask], args.eps_clip).sum()
            strategy.backward(loss, actor, optimizer, num_items=tokens)
            strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
            value_loss = clipped_value_loss(critic(micro_batch), micro_batch, args.value_clip)
            strategy.backward(value_loss, critic, critic_optimizer, num_items=tokens)
            strategy.optimizer_step(critic_optimizer, critic, critic_scheduler, name="critic")
            sums += sums.new_tensor([loss.item(), value_loss.item(), tokens])
    loss_sum, value_loss_sum, tokens = strategy.all_reduce(sums, "sum").tolist()
    return {"loss": loss_sum / tokens, "value_loss": value_loss_sum / tokens, "tokens": int(tokens)}


def clipped_value_loss(values: torch.Tensor, batch: Batch, value_clip: float) -> torch.Tensor:
    """Return the sum over all tokens of the larger squared error: of the value, or of the value after clipping."""
    mask = batch["answer_mask"]
    values, old, returns = values[mask], batch["values"][mask], batch["returns"][mask]
    clipped = old + (values - old).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square()).sum()


def arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs/ppo"), help="folder of logs and models")
    add("--seed", type=int, default=42, help="seed of the problems, the answers and the models")
    add("--steps", type=int, default=30, help="number of rollouts")
    add("--warm-start-steps", type=int, default=400, help="supervised steps of the initial policy")
    add("--reward-model-steps", type=int, default=150, help="supervised steps of the reward model")
    add("--rollout-batch-size", type=int, default=512, help="problems per step, over all ranks")
    add("--train-batch-size", type=int, default=256, help="answers per optimizer step, over all ranks")
    add("--micro-train-batch-size", type=int, default=128, help="answers per forward pass of one rank")
    add("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.set_defaults(
        actor_learning_rate=1e-3, critic_learning_rate=1e-3, lr_warmup_ratio=0.05, adam_betas=(0.9, 0.99)
    )
    parser.set_defaults(max_norm=1.0, eps_clip=0.2, value_clip=0.2, lambd=0.95, init_kl_coef=0.01)
    parser.set_defaults(bf16=False, enable_engine_sleep=True)
    return parser.parse_args(command_line)


if __name__ == "__main__":
    train(arguments())
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a Python process while it exits
