"""Train a vision-language-action policy on demonstrations, and evaluate it in a simulator at intervals.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/train_vla.py --run-dir runs/vla

An expert puts a puck on a pad (table.py); its demonstrations are written as a data set in LeRobot's format. The inputs
of a tiny PaliGemma are the image and the instruction, and a flow-matching head predicts the next actions (flow_vla.py).
Backbone and head have their own learning rates. The backbone is frozen for the first steps, or with --freeze-backbone
always. A killed run resumes from its last checkpoint. Output: vla.jsonl (losses), success.jsonl, checkpoints, and
policy/, which can be used without the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from flow_vla import CAMERA, CHUNK, FlowBlock, FlowVLA, Processor, make_backbone
from lerobot_writer.generate import DatasetWriter
from options import make_parser, parse
from table import ACTION, FPS, LIMIT, SIZE, STATE, Tables, demonstrate

from fsdp2_strategy import StrategyConfig, init_on_meta
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.collectives import all_reduce
from fsdp2_strategy.errors import DataError
from fsdp2_strategy.integrations.lerobot import LeRobotDataset, save_policy
from fsdp2_strategy.integrations.vitra import VLAFSDPStrategy, VLAMetrics

LARGEST_DIFFERENCE = 0.1  # of normalised actions; with --bf16, the sharded policy computes in bf16
UNSEEN = 1_000_000  # the first seed of tables without demonstrations


# --- demonstrations --------------------------------------------------------------------------------------------------


def write_demonstrations(root: Path, episodes: int, *, distractors: bool = True) -> Path:
    """Write the expert's demonstrations as a data set in LeRobot's format, if it does not exist."""
    if not root.exists():
        unfinished = root.with_name(f"{root.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        features = {
            CAMERA: {"dtype": "video", "shape": (SIZE, SIZE, 3), "names": ["height", "width", "channels"]},
            "observation.state": {"dtype": "float32", "shape": (len(STATE),), "names": list(STATE)},
            "action": {"dtype": "float32", "shape": (len(ACTION),), "names": list(ACTION)},
        }
        with DatasetWriter(unfinished, fps=FPS, features=features, robot_type="magnet", crf=18) as writer:
            for seed in range(episodes):
                frames, instruction = demonstrate(seed, distractors=distractors)
                named = {CAMERA: frames["image"], "observation.state": frames["state"], "action": frames["action"]}
                writer.add_episode(named, task=instruction)
        unfinished.rename(root)
    return root


def open_demonstrations(root: Path) -> LeRobotDataset:
    """Open the data set, with the next actions of each frame."""
    return LeRobotDataset(root, delta_timestamps={"action": [i / FPS for i in range(CHUNK)]})


# --- closed loop -----------------------------------------------------------------------------------------------------


def drive(
    policy: FlowVLA,
    processor: Processor,
    tables: Tables,
    noise_seed: int,
    watch: Callable[[Tables], object] = lambda _: None,
) -> np.ndarray:
    """Run a policy on tables for the maximum number of steps; collective if it is sharded.

    Args:
        policy: sharded or not.
        processor: the policy's processor.
        tables: the tables; the same number on every rank.
        noise_seed: seed of the noise that the flow starts from; the trainer's random state does not change.
        watch: called with the tables at the start and after each step.

    Returns:
        Whether each table was done at some step, (n,).
    """
    done = np.zeros(len(tables), dtype=bool)
    policy.eval()
    policy.reset()
    watch(tables)
    with torch.random.fork_rng():
        torch.manual_seed(noise_seed)
        for _ in range(LIMIT):
            images = torch.from_numpy(tables.images()).permute(0, 3, 1, 2) / 255
            observation = {CAMERA: images, "observation.state": torch.from_numpy(tables.state)}
            chosen = policy.select_action(processor(observation | {"task": tables.instructions}))
            actions = processor.actions(chosen).numpy()
            actions[done] = np.concatenate([tables.magnet, -np.ones((len(tables), 1))], axis=1)[done]  # stay in place
            tables.step(actions)
            done |= tables.done
            watch(tables)
    return done


def evaluate(strategy: VLAFSDPStrategy, processor: Processor, args: argparse.Namespace) -> dict[str, float]:
    """Evaluate the sharded policy, each rank on its own tables; collective, returns the same on every rank."""
    step = strategy.global_step(strategy.vla)
    seeds, noise_seed = trials(args.eval_episodes, args.seed, step, strategy.get_rank(), strategy.world_size)
    done = drive(strategy.vla, processor, Tables(seeds, distractors=args.distractors), noise_seed)
    total = all_reduce({"done": int(done.sum()), "episodes": len(done)}, "sum")
    return {"step": step, "success": total["done"] / total["episodes"], "episodes": total["episodes"]}


def trials(episodes: int, seed: int, step: int, rank: int, ranks: int) -> tuple[range, int]:
    """Return the seeds of the tables that a rank evaluates at a step, and the seed of its noise."""
    return range(UNSEEN + rank, UNSEEN + episodes // ranks * ranks, ranks), (seed * 1_000_003 + step) * 1_009 + rank


# --- training --------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    """Train, and return the exit status; a preempted run has a status other than 0, so that it is started again."""
    args.run_dir.mkdir(parents=True, exist_ok=True)
    backbone = make_backbone(args.run_dir / "backbone")
    torch.manual_seed(args.seed)
    with init_on_meta():  # no rank allocates the full model
        vla = FlowVLA.on(backbone)
    vla.backbone.requires_grad_(not args.freeze_backbone)
    with strategy_for(vla, args) as strategy:
        with all_or_none("write demonstrations", DataError):
            if strategy.is_rank_0():
                write_demonstrations(args.run_dir / "data", args.episodes, distractors=args.distractors)
        with closing(open_demonstrations(args.run_dir / "data")) as data:
            processor = Processor(data.metadata.stats)
            strategy.run_setup(args.run_dir, len(data), {"GemmaDecoderLayer", "SiglipEncoderLayer", FlowBlock})
            resumed = strategy.load_optimizer_and_scheduler(args.run_dir)
            if strategy.is_rank_0() and resumed:
                print(f"resumed at {resumed}", flush=True)
            (args.run_dir / f"rank{strategy.get_rank()}.pid").write_text(str(os.getpid()))
            loader = ResumableLoader(data, args.batch_size, seed=args.seed, pool=64, collate_fn=processor.collate)
            if not learn(strategy, args, loader, processor):
                return 128 + signal.SIGTERM
        save_policy(vla, args.run_dir / "policy", preprocessor=processor)
        check_policy(strategy, args.run_dir / "policy", processor)
    return 0


def check_policy(strategy: VLAFSDPStrategy, folder: Path, processor: Processor) -> None:
    """Open the saved policy on rank 0, and compare its actions with those of the sharded one; collective."""
    tables = Tables([UNSEEN])
    images = torch.from_numpy(tables.images()).permute(0, 3, 1, 2) / 255
    observation = {CAMERA: images, "observation.state": torch.from_numpy(tables.state), "task": tables.instructions}
    batch = processor(observation)

    def actions_of(policy: FlowVLA) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of the noise that the flow starts from
            return policy.eval().predict_action_chunk(batch).float().cpu()

    expected = actions_of(strategy.vla)
    with all_or_none("check the policy", DataError):
        if strategy.is_rank_0():
            difference = (actions_of(FlowVLA.from_pretrained(folder)) - expected).abs().max().item()
            if not difference <= LARGEST_DIFFERENCE:
                raise DataError(
                    f"the saved policy is another one: actions of {folder} differ by {difference:.3g} from those of "
                    f"the trained policy, expected at most {LARGEST_DIFFERENCE}."
                )
            text = "from_pretrained opens it, and its normalised actions differ by at most"
            print(f"saved to {folder}: {text} {difference:.1e} from the trained policy's", flush=True)


def strategy_for(vla: FlowVLA, args: argparse.Namespace) -> VLAFSDPStrategy:
    return VLAFSDPStrategy(
        vla,
        device_id=int(os.environ.get("LOCAL_RANK", "0")),
        stage="vla-train",
        epochs=1_000_000,  # max_steps ends the run
        max_steps=args.steps,
        global_batch_size=args.batch_size,
        per_device_batch_size=args.batch_size // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=args.backbone_learning_rate,
        action_model_learning_rate=args.action_model_learning_rate,
        weight_decay=0.01,
        max_grad_norm=1.0,
        optimizer_betas=(0.9, 0.95),
        lr_scheduler_type="backbone-freeze-warmup",
        llm_freeze_step=args.steps // 40,
        warmup_ratio=0.0,
        enable_gradient_checkpointing=False,
        enable_mixed_precision_training=args.bf16,
        reduce_in_full_precision=True,
        config=StrategyConfig(seed=args.seed),
    )


def learn(strategy: VLAFSDPStrategy, args: argparse.Namespace, loader: ResumableLoader, processor: Processor) -> bool:
    """Train, and evaluate at intervals; return False if the run was preempted."""
    metrics = VLAMetrics(("jsonl",), "vla", args.run_dir, vars(args))
    while True:
        step = strategy.global_step(strategy.vla)
        if step % args.eval_interval == 0 or step == args.steps:
            report(strategy, args.run_dir, evaluate(strategy, processor, args))
        if step == args.steps:
            metrics.finalize()
            return True
        strategy.max_steps = min(step - step % args.eval_interval + args.eval_interval, args.steps)
        if not strategy.run_training(
            loader,
            metrics,
            save_interval=args.save_interval,
            epoch_save_interval=None,
            start_epoch=loader.epoch,
            save_full_model=not args.freeze_backbone,
        ):
            return False


def report(strategy: VLAFSDPStrategy, run_dir: Path, evaluation: dict[str, float]) -> None:
    if strategy.is_rank_0():
        with (run_dir / "success.jsonl").open("a") as log:
            print(json.dumps(evaluation), file=log)
        print("step {step}: {success:.0%} of {episodes} tables done".format(**evaluation), flush=True)


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs/vla"), help="folder of logs, data, checkpoints and the policy")
    add("--episodes", type=int, default=500, help="number of demonstrations, which are written once")
    add("--steps", type=int, default=2500, help="number of optimizer steps")
    add("--batch-size", type=int, default=64, help="samples of a step over all ranks")
    add("--backbone-learning-rate", type=float, default=2e-3, help="peak for the vision-language model")
    add("--action-model-learning-rate", type=float, default=2e-3, help="peak for the action head")
    add("--save-interval", type=int, default=100, help="steps between checkpoints")
    add("--eval-interval", type=int, default=250, help="steps between evaluations in the simulator")
    add("--eval-episodes", type=int, default=128, help="tables of an evaluation, over all ranks")
    add("--distractors", action=argparse.BooleanOptionalAction, default=True, help="put other objects on the tables")
    add("--freeze-backbone", action="store_true", help="train and save only the action model")
    add("--bf16", action=argparse.BooleanOptionalAction, default=False, help="compute in bf16, with fp32 masters")
    add("--seed", type=int, default=42, help="seed of the model, the order of samples and the tables")
    return parse(parser, command_line)


if __name__ == "__main__":
    os._exit(train(arguments()))  # gloo's threads can abort a Python process while it exits
