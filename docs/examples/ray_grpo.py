"""Train with GRPO in actors of Ray, kill two of them, and check that the run resumes with the same results.

    python docs/examples/ray_grpo.py

Two trainer actors are the ranks of an FSDPV2Strategy; torchrun and its variables are not used. Each of them has an
engine actor, which generates in a process of its own, and they share a reward actor. The program trains twice with the
same actors. In the second run, it kills a trainer and later an engine. Each time, it replaces the dead actor and calls
the trainers again, which resume from the newest checkpoint. The program fails unless reward, loss, KL, gradient norm
and tokens are bitwise equal in each step of both runs. Extra `ray` of the package; docs/ray.md explains each part.

The task and the loss are those of arithmetic.py and grpo.py.
"""

import argparse
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import arithmetic as task
import grpo
import ray
import torch
from options import make_parser
from ray.exceptions import RayActorError, RayTaskError
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy import rollout as inference
from fsdp2_strategy.distributed import Rendezvous, RendezvousServer
from fsdp2_strategy.rollout import RemoteEngine, TransformersEngine, listen_at_free_port, serve

TRAINERS = 2
MAX_RESTARTS = 5
END_SECONDS = 30.0
"""Time for all trainers to raise an error after the first has; then the driver kills the others."""


class Trainer:
    """One rank. After an error, its methods can be called again: each call constructs a strategy, and closes it."""

    def pid(self) -> int:
        return os.getpid()

    def warm_start(self, args: argparse.Namespace, rendezvous: Rendezvous) -> None:
        """Train the initial policy, unless its folder exists; collective."""
        with strategy_of(args, rendezvous) as strategy:
            task.warm_start(strategy, args.policy, args.warm_start_steps)

    def train(self, args: argparse.Namespace, rendezvous: Rendezvous, engine_address: str, reward: Any) -> None:
        """Train from the newest checkpoint to the last step; collective."""
        # Not `from ... import ENGINES`: Ray would copy the names of this script to the actor, and change the copy.
        inference.ENGINES["ray"] = lambda *_: RemoteEngine(engine_address, secret=rendezvous.secret)
        with strategy_of(args, rendezvous) as strategy:
            actor, optimizer, scheduler, reference, first = grpo.prepare(strategy, args, args.policy)
            strategy.setup_inference_engine(args, "ray", actor)  # sends all weights
            for step in range(first, args.steps):
                batch = rollout(strategy, args, step, reward)
                with torch.no_grad():
                    parts = list(task.split(batch, args.micro_train_batch_size))
                    for name, model in (("old_log_probs", actor), ("reference_log_probs", reference)):
                        batch[name] = torch.cat([task.log_probs_of(model, part) for part in parts])
                metrics = grpo.update(strategy, args, actor, optimizer, scheduler, batch)
                strategy.update_engine_weights(actor, by_difference=True)
                if (step + 1) % args.save_every == 0:
                    strategy.save_ckpt(
                        actor,
                        args.run_dir / "ckpts",
                        f"global_step{step + 1}",
                        max_num=2,
                        client_state={"step": step + 1},
                        async_save=True,
                    )
                mean_reward = strategy.all_reduce(batch["rewards"].mean().item())
                if strategy.is_rank_0():
                    with (args.run_dir / "log.jsonl").open("a") as log:
                        print(json.dumps({"step": step + 1, "reward": mean_reward, **metrics}), file=log)


def strategy_of(args: argparse.Namespace, rendezvous: Rendezvous) -> FSDPV2Strategy:
    return FSDPV2Strategy(
        args.seed,
        args.max_norm,
        args.micro_train_batch_size,
        args.train_batch_size,
        args.bf16,
        args,
        rendezvous=rendezvous,
        log_level="WARNING",
    )


def rollout(strategy: FSDPV2Strategy, args: argparse.Namespace, step: int, reward: Any) -> task.Batch:
    """Draw problems of a step, sample answers in the engine actor, and get their rewards from the reward actor."""
    key = (args.seed, step, strategy.dp_rank)
    random = torch.Generator().manual_seed(task.seed_of("problems", *key))
    problems = task.draw_problems(args.rollout_batch_size // strategy.dp_size, random)
    problems = [problem for problem in problems for _ in range(args.n_samples_per_prompt)]
    prompts = task.encode_prompts(problems).to(strategy.device)
    # SGLang's call: its outputs are lists and numbers, which can be sent.
    outputs = strategy.inference_engine.generate(
        input_ids=[[token for token in prompt if token != task.PAD] for prompt in prompts.tolist()],
        sampling_params={"temperature": 1.0, "max_new_tokens": task.ANSWER},
        return_logprob=True,
        seed=task.seed_of("answers", *key),
    )
    batch = task.batch_of_answers(prompts, [output["output_ids"] for output in outputs], outputs)
    batch["rewards"] = ray.get(reward.score.remote(batch["sequences"].cpu(), problems)).to(strategy.device)
    batch["advantages"] = grpo.group_advantages(batch["rewards"], args.n_samples_per_prompt)
    return batch


class Engine:
    """An inference engine that serves one trainer after another."""

    def __init__(self, secret: str) -> None:
        self._address = listen_at_free_port(ray.util.get_node_ip_address(), secret=secret)

    def address(self) -> str:
        return self._address

    def serve(self, policy: Path) -> None:
        """Serve a model of the policy's structure, without end; its weights are those that the trainer sends."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy))
        engine = SeededEngine(model)
        while True:
            serve(engine, self._address)


class SeededEngine(TransformersEngine):
    """Generate with a seed that the trainer passes, so that a repeated step samples the same answers."""

    def generate(self, *args: Any, seed: int, **kwargs: Any) -> Any:
        torch.manual_seed(seed)
        return super().generate(*args, **kwargs)


class Reward:
    def score(self, sequences: torch.Tensor, problems: list[task.Problem]) -> torch.Tensor:
        """Return the reward of each sequence [n]."""
        return task.rewards_of({"sequences": sequences}, problems)


# --- the driver ------------------------------------------------------------------------------------------------------


class Actors:
    """The actors of a run by name; those that die are replaced. The driver outlives them, so it has the server."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.secret = secrets.token_hex(32)  # Ray passes it to the actors
        self.server = RendezvousServer(ray.util.get_node_ip_address(), secret=self.secret)
        self.handles: dict[str, Any] = {}
        self.serving: dict[str, Any] = {}
        """The calls of `Engine.serve`, which end only with an error."""
        self.start_missing()
        if errors := self.run("warm_start", args):
            raise next(iter(errors.values()))
        for name in self.engines:
            self.serving[name] = self.handles[name].serve.remote(args.policy)

    @property
    def trainers(self) -> list[str]:
        return [f"trainer {rank}" for rank in range(TRAINERS)]

    @property
    def engines(self) -> list[str]:
        return [f"engine {rank}" for rank in range(TRAINERS)]

    def start_missing(self) -> None:
        on_device = {"num_cpus": 0, "num_gpus": self.args.num_gpus}
        for name in self.trainers:
            self._start(name, Trainer, on_device)
        for name in self.engines:  # `serve` occupies one thread; the other one answers further calls
            self._start(name, Engine, {**on_device, "max_concurrency": 2}, self.secret)
        self._start("reward", Reward, {"num_cpus": 0})

    def _start(self, name: str, kind: type, options: dict[str, Any], *arguments: str) -> None:
        if name not in self.handles:
            self.handles[name] = ray.remote(**options)(kind).remote(*arguments)

    def replace_dead(self) -> list[str]:
        """Replace the actors that no longer answer or serve, and return their names."""
        ended, _ = ray.wait(list(self.serving.values()), num_returns=TRAINERS, timeout=0)
        dead = [
            name
            for name, actor in self.handles.items()
            if self.serving.get(name) in ended or error_of(actor.__ray_ready__.remote())
        ]
        for name in dead:
            ray.kill(self.handles.pop(name))
        self.start_missing()
        for name in dead:
            if name in self.engines:
                self.serving[name] = self.handles[name].serve.remote(self.args.policy)
        return dead

    def train(self, args: argparse.Namespace, kills: dict[int, str]) -> list[str]:
        """Train to the last step; whenever an actor dies, replace it, and resume from the newest checkpoint.

        Args:
            args: the options.
            kills: which actor to kill after which logged step.

        Returns:
            The errors that the trainers raised, and the names of the actors that were replaced.

        Raises:
            Exception: the error of a trainer, if no actor is dead, or if actors died too often.
        """
        report: list[str] = []
        restarts = 0
        while errors := self.attempt(args, kills):
            report += [f"{name}: {text_of(error)}" for name, error in errors.items()]
            dead = self.replace_dead()
            restarts += 1
            if not dead or restarts > MAX_RESTARTS:  # the next attempt would probably end with the same error
                raise next(iter(errors.values()))
            report.append(f"replaced: {', '.join(dead)}")
        return report

    def attempt(self, args: argparse.Namespace, kills: dict[int, str]) -> dict[str, Exception]:
        """Train from the newest checkpoint to the last step, or to an error; return the errors by actor."""
        calls = {name: self.handles[name].address.remote() for name in self.engines}
        if errors := {name: error for name, call in calls.items() if (error := error_of(call))}:
            return errors  # an engine has died since the last attempt
        addresses = ray.get(list(calls.values()))
        return self.run("train", args, [(address, self.handles["reward"]) for address in addresses], kills)

    def run(
        self, method: str, args: argparse.Namespace, extra: Any = ((),) * TRAINERS, kills: dict[int, str] | None = None
    ) -> dict[str, Exception]:
        """Call a method of all trainers at once; return the errors by name when all calls have ended."""
        calls = {}
        for rank, name in enumerate(self.trainers):
            rendezvous = Rendezvous(self.server.address, rank, TRAINERS, self.secret)
            calls[getattr(self.handles[name], method).remote(args, rendezvous, *extra[rank])] = name
        running = list(calls)
        while running and not any(error_of(call) for call in calls if call not in running):
            _, running = ray.wait(running, timeout=0.05)
            self._kill_when_due(args, kills or {})
        _, running = ray.wait(running, num_returns=len(running), timeout=END_SECONDS) if running else ([], [])
        for call in running:  # a rank that waits for a lost one in its accelerator raises no error
            ray.kill(self.handles[calls[call]])
        return {name: error for call, name in calls.items() if (error := error_of(call))}

    def _kill_when_due(self, args: argparse.Namespace, kills: dict[int, str]) -> None:
        last = max((entry["step"] for entry in grpo.read_log(args.run_dir)), default=0)
        for step in [step for step in kills if step <= last]:
            name = kills.pop(step)
            print(f"--- killing {name} after step {last} ---", flush=True)
            ray.kill(self.handles[name])


def error_of(call: Any) -> Exception | None:
    """Wait for a call of an actor, and return the error that ended it."""
    try:
        ray.get(call)
    except RayTaskError as error:
        return error.cause
    except RayActorError as error:
        return error
    return None


def text_of(error: Exception) -> str:
    """Return an error's class, its first line, and its notes, which name the rank that is lost."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return " ".join([f"{type(error).__name__}: {first_line}", *getattr(error, "__notes__", [])])


def main() -> None:
    args = arguments()
    started = time.monotonic()
    shutil.rmtree(args.run_dir, ignore_errors=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
    )
    try:
        demonstrate(args)
    finally:
        ray.shutdown()
    print(f"{time.monotonic() - started:.0f} s")


def demonstrate(args: argparse.Namespace) -> None:
    """Train without and with kills, and compare the logs."""
    actors = Actors(args)
    logs = []
    kills = {args.save_every + 1: "trainer 1", 2 * args.save_every + 1: "engine 0"}
    for name, due in (("undisturbed", {}), ("killed", kills)):
        print(f"--- {name} run ---", flush=True)
        run = argparse.Namespace(**{**vars(args), "run_dir": args.run_dir / name})
        run.run_dir.mkdir(parents=True)
        print(*actors.train(run, due), sep="\n", flush=True)
        logs.append(grpo.read_log(run.run_dir))
    expected = {entry["step"]: entry for entry in logs[0]}
    different = [e["step"] for e in logs[1] if any(e[name] != expected[e["step"]][name] for name in grpo.COMPARED)]
    repeated = len(logs[1]) - args.steps
    if different or repeated <= 0 or len(expected) != args.steps:
        raise SystemExit(f"the runs differ: at steps {different}; {repeated} steps repeated")
    print(f"{', '.join(grpo.COMPARED)} are bitwise equal in all {args.steps} steps, of which {repeated} were repeated")


def arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.epilog = "Other options are those of grpo.py."
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs/ray_grpo"), help="folder of logs and checkpoints")
    add("--steps", type=int, default=12, help="number of rollouts")
    add("--save-every", type=int, default=3, help="steps between checkpoints")
    add("--warm-start-steps", type=int, default=60, help="supervised steps of the initial policy")
    add("--rollout-batch-size", type=int, default=16, help="problems per step, over all ranks")
    add("--n-samples-per-prompt", type=int, default=8, help="answers to each problem: a group")
    add("--train-batch-size", type=int, default=64, help="answers per optimizer step, over all ranks")
    add("--micro-train-batch-size", type=int, default=32, help="answers per forward pass of one rank")
    add("--num-gpus", type=float, default=0, help="accelerators of each trainer and each engine")
    own, rest = parser.parse_known_args(command_line)
    args = grpo.arguments(rest)
    for name, value in vars(own).items():
        setattr(args, name, value)
    # Ray starts its workers in other directories.
    args.run_dir = args.run_dir.absolute()
    args.policy = (args.policy or args.run_dir / "policy").absolute()
    args.enable_engine_sleep = False
    return args


if __name__ == "__main__":
    main()
