r"""Train with GRPO on a verifiable reward, and check that a killed run resumes with the same results.

    python docs/examples/grpo.py

It trains twice under torchrun, with two ranks each. The first run stops early. The second takes all steps; in the
middle, all its processes are killed with SIGKILL, and it is started again. The program fails unless reward, loss, KL,
gradient norm, tokens and the difference between trainer and engine are bitwise equal in each step that both runs took.
It plots the figure of docs/rlhf.md. The engine's log-probabilities of the sampled tokens are compared with the
trainer's in each step, and weigh the tokens in the loss. To run only the trainer:

    torchrun --standalone --nproc-per-node 2 docs/examples/grpo.py --train --run-dir runs/grpo/own

The problems and the sampled answers of a step are a function of (seed, step, data parallel rank). The task is in
arithmetic.py. With `--sequence-parallel-size 2`, two ranks share each sequence: they draw the same problems and
answers, and each computes a part of the tokens. With `--tensor-parallel-size 2`, two ranks share each layer.

For a language model of your own, pass its folder, and questions with numbers as answers (questions.py). On 8 GPUs:

    torchrun --standalone --nproc-per-node 8 docs/examples/grpo.py --train --run-dir runs/grpo-8b \
        --config docs/examples/configs/grpo_8b.yaml --policy /models/Llama-3.1-8B-Instruct --data questions.jsonl

Each run ends with a folder, export/, which the program opens with from_pretrained and compares with the trained actor.
"""

import argparse
import functools
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import arithmetic
import torch
from arithmetic import Batch, split
from exported import check_export
from options import make_parser, parse
from questions import Questions
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.rollout import ImportanceInputs, importance_inputs

EXAMPLES = Path(__file__).parent
COMPARED = ("reward", "loss", "kl", "grad_norm", "tokens", "engine_difference")


def train(args: argparse.Namespace) -> int:
    """Train, and return the exit status; a preempted run has a status other than 0, so that it is started again."""
    with FSDPV2Strategy(
        args.seed, args.max_norm, args.micro_train_batch_size, args.train_batch_size, args.bf16, args
    ) as strategy:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        (args.run_dir / f"rank{strategy.get_rank()}.pid").write_text(str(os.getpid()))
        policy = args.policy or args.run_dir / "policy"
        if args.data is None:
            arithmetic.warm_start(strategy, policy, args.warm_start_steps)
        task = task_of(args)

        actor, optimizer, scheduler, reference, first = prepare(strategy, args, policy)
        strategy.setup_inference_engine(args, engine_type=args.engine, actor=actor)
        strategy.offload_model(reference)
        strategy.maybe_offload_optimizer(optimizer)

        for step in range(first, args.stop_at or args.steps):
            clock = Clock()
            strategy.wakeup_inference_engine()
            batch = rollout(strategy, args, step)
            strategy.maybe_sleep_inference_engine()
            clock.lap("rollout")

            strategy.reload_model(reference)
            with torch.no_grad():
                parts = list(split(batch, args.micro_train_batch_size))
                batch["old_log_probs"] = torch.cat([task.log_probs_of(actor, part) for part in parts])
                batch["reference_log_probs"] = torch.cat([task.log_probs_of(reference, part) for part in parts])
            strategy.offload_model(reference)
            clock.lap("log_probs")

            if step == first or step % 10 == 0:
                check_agreement(strategy, actor, next(split(batch, args.micro_train_batch_size)), step)
            clock.lap("agreement")

            strategy.maybe_load_optimizer(optimizer)
            metrics = update(strategy, args, actor, optimizer, scheduler, batch)
            strategy.maybe_offload_optimizer(optimizer)
            clock.lap("update")

            sent = strategy.update_engine_weights(actor, verify=step == first or step % 10 == 0, by_difference=True)
            clock.lap("weights")

            preempted = strategy.preempted()
            if preempted or (step + 1) % args.save_every == 0:
                strategy.save_ckpt(
                    actor,
                    args.run_dir / "ckpts",
                    f"global_step{step + 1}",
                    max_num=2,
                    client_state={"step": step + 1},
                    async_save=True,
                )
            clock.lap("save")
            metrics["reward"] = strategy.all_reduce(batch["rewards"].mean().item())
            if strategy.is_rank_0():
                metrics |= {"sent_bytes": sent.sent_bytes, "full_bytes": sent.full_bytes, "seconds": clock.seconds}
                with (args.run_dir / "log.jsonl").open("a") as log:
                    print(json.dumps({"step": step + 1, **metrics}), file=log)
            if preempted:
                return 128 + signal.SIGTERM
        tokenizer = None if args.data is None else task.tokenizer
        strategy.save_model(actor, tokenizer, args.run_dir / "export")
        check_export(actor, args.run_dir / "export", torch.arange(8)[None])
    return 0


def task_of(args: argparse.Namespace) -> Any:
    """Return what draws problems, samples answers and rewards them: the module arithmetic, or `Questions`."""
    return (
        arithmetic if args.data is None else _questions(args.data, args.policy, args.prompt_tokens, args.answer_tokens)
    )


_questions = functools.cache(Questions)


def prepare(strategy: FSDPV2Strategy, args: argparse.Namespace, policy: Path) -> tuple[Any, Any, Any, Any, int]:
    """Return actor, optimizer, schedule and reference, from the newest checkpoint if there is one, and the first step.

    Collective.
    """
    with strategy.init_model_context(meta_init=True):
        actor = AutoModelForCausalLM.from_pretrained(policy)
        reference = AutoModelForCausalLM.from_pretrained(policy)
    updates = args.rollout_batch_size * args.n_samples_per_prompt // args.train_batch_size
    (actor, optimizer, scheduler), _, _, reference = strategy.prepare_models_and_optimizers(
        actor, None, None, reference, args, max_steps=args.steps * updates
    )
    resumed, state = strategy.load_ckpt(actor, args.run_dir / "ckpts", optimizer, scheduler)
    if resumed:
        strategy.print(f"resumed from {resumed}")
    return actor, optimizer, scheduler, reference, state.get("step", 0)


def check_agreement(strategy: FSDPV2Strategy, actor: nn.Module, batch: Batch, step: int) -> None:
    """Compare the log-probabilities of trainer and engine, and print them; stop with the cause if they disagree."""
    agreement = strategy.check_engine_agreement(
        actor,
        batch["sequences"],
        batch["attention_mask"],
        answer_mask=batch["answer_mask"],
        engine_log_probs=batch["engine_log_probs"],
        on_disagreement="raise",
    )
    strategy.print(f"step {step + 1}: {agreement}")


def rollout(strategy: FSDPV2Strategy, args: argparse.Namespace, step: int) -> Batch:
    """Draw problems of a step, sample a group of answers to each, and compute rewards and advantages.

    The result is the same on the ranks that share sequences.
    """
    task, key = task_of(args), (args.seed, step, strategy.dp_rank)
    random = torch.Generator().manual_seed(arithmetic.seed_of("problems", *key))
    problems = task.draw_problems(args.rollout_batch_size // strategy.dp_size, random)
    problems = [problem for problem in problems for _ in range(args.n_samples_per_prompt)]
    prompts = task.encode_prompts(problems).to(strategy.device)
    batch = task.generate(strategy.inference_engine, prompts, arithmetic.seed_of("answers", *key))
    batch["rewards"] = task.rewards_of(batch, problems)
    batch["advantages"] = group_advantages(batch["rewards"], args.n_samples_per_prompt)
    return batch


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return rewards [n], normalised within each group to mean 0 and deviation 1; 0 if a group's rewards are equal."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def update(
    strategy: FSDPV2Strategy,
    args: argparse.Namespace,
    actor: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batch: Batch,
) -> dict[str, float]:
    """Take the optimizer steps of one rollout; all tokens of all answers of all ranks have the same weight."""
    task, sums, differences, result = task_of(args), torch.zeros(3, dtype=torch.float64), [], None
    for mini_batch in split(batch, args.train_batch_size // strategy.dp_size):
        for micro_batch in split(mini_batch, args.micro_train_batch_size):
            inputs = importance_inputs(
                task.log_probs_of(actor, micro_batch),
                micro_batch["old_log_probs"],
                micro_batch["engine_log_probs"],
                micro_batch["answer_mask"],
                cap=args.importance_cap,
            )
            loss, kl = grpo_loss(inputs, micro_batch, args.eps_clip, args.init_kl_coef)
            strategy.backward(loss, actor, optimizer, num_items=int(micro_batch["answer_mask"].sum()))
            result = strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
            sums += sums.new_tensor([loss.item(), kl.item(), inputs.mask.sum().item()])
            differences.append(inputs.differences)
    loss_sum, kl_sum, tokens = strategy.all_reduce(sums, "sum").tolist()
    metrics = {"loss": loss_sum / tokens, "kl": kl_sum / tokens, "grad_norm": result.grad_norm, "tokens": int(tokens)}
    return metrics | functools.reduce(operator.add, differences).metrics()


def grpo_loss(
    inputs: ImportanceInputs, batch: Batch, eps_clip: float, kl_coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sums over all tokens of the answers: the loss, and its KL to the reference without the coefficient.

    As in GRPO (https://arxiv.org/abs/2402.03300); the KL is the estimator k3 (http://joschu.net/blog/kl-approx.html).
    The importance weights correct for the difference between the engine, which sampled, and the trainer.
    """
    mask = inputs.mask  # [n, ANSWER]; from here on [tokens]
    advantages = batch["advantages"][:, None].expand_as(mask)[mask]
    objective = clipped_objective(inputs.log_ratio[mask], advantages, eps_clip)
    log_ratio = (batch["reference_log_probs"] - inputs.new_log_probs)[mask]
    kl = log_ratio.exp() - 1 - log_ratio
    return (kl_coef * kl - inputs.weights[mask] * objective).sum(), kl.detach().sum()


def clipped_objective(log_ratio: torch.Tensor, advantages: torch.Tensor, eps_clip: float) -> torch.Tensor:
    """Return PPO's clipped surrogate objective of each token (https://arxiv.org/abs/1707.06347)."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages)


class Clock:
    """Measure the seconds of each part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part], self._last = round(now - self._last, 4), now


# --- compare a killed run --------------------------------------------------------------------------------------------


def demonstrate(args: argparse.Namespace) -> None:
    """Train once for some of the steps, once for all with a kill and a restart; compare the logs, and plot them."""
    started = time.monotonic()
    shutil.rmtree(args.run_dir, ignore_errors=True)
    uninterrupted, killed = args.run_dir / "undisturbed", args.run_dir / "killed"
    kill_after = args.steps // 2 + args.save_every // 2
    compared = kill_after + args.save_every
    options = ["--steps", str(args.steps), "--save-every", str(args.save_every), "--seed", str(args.seed)]
    options += ["--policy", str(args.run_dir / "policy")]
    options += ["--sequence-parallel-size", str(args.sequence_parallel_size)]
    options += ["--tensor-parallel-size", str(args.tensor_parallel_size)]

    print(f"--- first run: uninterrupted, {compared} of {args.steps} steps ---", flush=True)
    if launch(uninterrupted, [*options, "--stop-at", str(compared)]).wait():
        raise SystemExit("the uninterrupted run failed")
    print(f"--- second run: killed after step {kill_after} ---", flush=True)
    kill = kill_all(launch(killed, options), killed, kill_after)
    print(f"--- SIGKILL to all processes after step {kill}; starting again ---", flush=True)
    if launch(killed, options).wait():
        raise SystemExit("the resumed run failed")

    expected, steps = read_log(uninterrupted), read_log(killed)
    by_step = {entry["step"]: entry for entry in expected}
    shared = [entry for entry in steps if entry["step"] in by_step]
    repeated = len(steps) - args.steps
    different = [e["step"] for e in shared if any(e[name] != by_step[e["step"]][name] for name in COMPARED)]
    if different or repeated <= 0 or len(shared) != compared + repeated or steps[-1]["step"] != args.steps:
        raise SystemExit(f"the runs differ: at steps {different}; {repeated} steps repeated, {len(shared)} compared")
    picture = args.picture or args.run_dir / "grpo.png"
    plot(expected, steps, kill, picture)
    after = compared - (kill - repeated)
    print(
        f"{', '.join(COMPARED)} are bitwise equal in the {compared} steps that both runs took: {after} of these steps "
        f"came after the resume, {repeated} were repeated\n"
        f"reward {mean(steps[:5], 'reward'):.2f} -> {mean(steps[-5:], 'reward'):.2f} in {args.steps} steps, KL to the "
        f"reference {mean(steps[-5:], 'kl'):.2f}; mean difference of trainer and engine "
        f"{mean(steps, 'engine_difference'):.1e} nats, largest "
        f"{max(entry['engine_difference_largest'] for entry in steps):.1e}; sent to the engine per "
        f"step: {mean(steps, 'sent_bytes') / mean(steps, 'full_bytes'):.0%} of all weights; picture: {picture}; "
        f"{time.monotonic() - started:.0f} s"
    )


def launch(run_dir: Path, options: list[str]) -> subprocess.Popen:
    """Start the trainer on two ranks, as a user would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([*command, __file__, "--train", "--run-dir", str(run_dir), *options], env=environment)


def kill_all(process: subprocess.Popen, run_dir: Path, step: int) -> int:
    """Send SIGKILL to torchrun and its ranks once ``step`` has been logged; return the last logged step."""
    while not any(entry["step"] >= step for entry in read_log(run_dir)):
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.05)
    for pid in (process.pid, *(int(file.read_text()) for file in run_dir.glob("rank*.pid"))):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return read_log(run_dir)[-1]["step"]


def read_log(run_dir: Path) -> list[dict]:
    """Read the entries that a run has logged; repeated steps appear twice."""
    log = run_dir / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def mean(entries: list[dict], name: str) -> float:
    return sum(entry[name] for entry in entries) / len(entries)


def plot(uninterrupted: list[dict], killed: list[dict], kill: int, picture: Path) -> None:
    """Plot reward and KL over the steps, with the kill and the repeated steps."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    restart = next(i for i in range(1, len(killed)) if killed[i]["step"] <= killed[i - 1]["step"])
    figure, panels = plt.subplots(
        2, figsize=(8, 4.6), layout="constrained", sharex=True, height_ratios=(2, 1), gridspec_kw={"hspace": 0.06}
    )
    curves = [
        (uninterrupted, {"color": "#c9c9c9", "linewidth": 7, "label": "uninterrupted run", "zorder": 1}),
        (killed[:restart], {"color": "#1f6fb4", "linewidth": 1.8, "label": "second run, before the kill", "zorder": 3}),
        (killed[restart:], {"color": "#d1495b", "linewidth": 1.8, "label": "second run, resumed", "zorder": 2}),
    ]
    for axes, name, label in zip(panels, ("reward", "kl"), ("share of right answers", "KL, nats"), strict=True):
        for entries, style in curves:
            axes.plot([e["step"] for e in entries], [e[name] for e in entries], **style)
        axes.axvline(kill, color="#333333", linewidth=1, linestyle=":")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].annotate("SIGKILL", (kill, 0), textcoords="offset points", xytext=(5, 6), fontsize=9)
    panels[0].set_title("GRPO, killed and resumed: rewards are bitwise equal", fontsize=11, loc="left")
    panels[0].legend(frameon=False, fontsize=9, loc="lower right")
    panels[1].set_xlabel("step")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130, metadata={"Software": None})


def arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--train", action="store_true", help="run the trainer as one rank, under torchrun")
    add("--run-dir", type=Path, default=Path("runs/grpo"), help="folder of logs, checkpoints and the export")
    add("--policy", type=Path, help="folder of the initial policy; without --data, trained if it does not exist")
    add("--data", type=Path, help="questions, JSON lines; by default the policy learns to add two numbers")
    add("--prompt-tokens", type=int, default=512, help="with --data: longer questions are left out")
    add("--answer-tokens", type=int, default=512, help="with --data: maximum number of tokens of an answer")
    add("--engine", choices=["transformers", "vllm"], default="transformers", help="inference engine in each process")
    add("--engine-tp-size", type=int, default=1, help="ranks that share an engine of vLLM")
    add("--engine-mem-util", type=float, default=0.5, help="share of the device's memory that vLLM uses")
    add("--picture", type=Path, help="file of the figure; by default grpo.png in the run's directory")
    add("--seed", type=int, default=42, help="seed of the problems, the answers and the initial policy")
    add("--steps", type=int, default=80, help="number of rollouts")
    add("--stop-at", type=int, help="stop after this step; the schedule still covers --steps")
    add("--save-every", type=int, default=10, help="steps between checkpoints")
    add("--warm-start-steps", type=int, default=400, help="supervised steps of the initial policy, without --data")
    add("--rollout-batch-size", type=int, default=64, help="problems per step, over all ranks")
    add("--n-samples-per-prompt", type=int, default=8, help="answers to each problem: a group")
    add("--train-batch-size", type=int, default=256, help="answers per optimizer step, over all ranks")
    add("--micro-train-batch-size", type=int, default=64, help="answers per forward pass of one rank")
    add("--sequence-parallel-size", type=int, default=1, help="ranks that share each sequence")
    add("--tensor-parallel-size", type=int, default=1, help="ranks that share each layer")
    add("--bf16", action="store_true", help="compute in bf16, with fp32 masters")
    add("--importance-cap", type=float, default=2.0, help="largest importance weight of a token")
    add("--actor-learning-rate", type=float, default=1e-3, help="peak of the cosine schedule")
    add("--init-kl-coef", type=float, default=0.02, help="weight of the KL to the initial policy in the loss")
    parser.set_defaults(adam_betas=(0.9, 0.99), lr_warmup_ratio=0.05, max_norm=1.0, eps_clip=0.2)
    parser.set_defaults(enable_engine_sleep=True)
    args = parse(parser, command_line, also=StrategyConfig)
    if args.data is not None and args.policy is None:
        parser.error("--data needs a model and its tokenizer: pass their folder as --policy.")
    if args.data is not None and not args.train:
        parser.error("--data is for a run of your own: start it with torchrun and --train.")
    if args.data is not None:  # vLLM opens the folder, too
        args.pretrain = str(args.policy)
        args.prompt_max_len, args.generate_max_len = args.prompt_tokens, args.answer_tokens
    return args


def main() -> None:
    args = arguments()
    if not args.train:
        demonstrate(args)
        return
    status = train(args)
    sys.stdout.flush()
    os._exit(status)  # gloo's threads can abort a Python process while it exits


if __name__ == "__main__":
    main()
