"""Train a policy on streamed robot data, on any number of ranks and hosts; a killed run resumes exactly.

It reads LeRobot v3 data sets from a folder, a URL or the Hub. The rows of some episodes are in memory, video frames are
decoded for the samples of each batch, and remote files are on disk as long as their episodes are needed.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/train_streaming.py \
        --generate 32 --root runs/streaming/data --output_dir runs/streaming --episode_pool_size 8

``--repo_id`` names a data set of the Hub instead. docs/multi_node.md describes several hosts, SLURM and accelerate.
"""

import argparse
import itertools
import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from lerobot_writer import DatasetWriter
from options import make_parser
from options import parse as parse_options
from safetensors.torch import load_file
from shortages import warn_of_shortages
from torch import nn
from torch.nn.functional import interpolate

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, list_checkpoints, load_checkpoint
from fsdp2_strategy.checkpoint.data_position import LATER
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.errors import DataError
from fsdp2_strategy.integrations.lerobot import LeRobotDataset, Metadata
from fsdp2_strategy.tracking.throughput import Rates, Throughput

SIZE, PATCH = 96, 16  # of the images that the policy gets, and of the patch that becomes one token
WIDTH, HEADS, LAYERS = 128, 4, 4
LARGEST_DIFFERENCE = 0.1  # of scaled actions; with bf16, the sharded policy computes in bf16
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images.top"  # CAMERA: only in generated data

Batch = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What determines the order of samples, together with data and seed; a run keeps it on any number of ranks."""

    global_batch_size: int
    lanes: int  # one per rank of the first start; each has its own episodes
    pool: int  # episodes that are mixed at a time, over all lanes


class Policy(nn.Module):
    """A transformer over the patches of all cameras, the state, and one query per action; its outputs are actions."""

    def __init__(self, cameras: int, state_size: int, action_size: int, actions: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cameras = nn.Parameter(torch.zeros(cameras, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.state = nn.Linear(state_size, WIDTH)
        self.queries = nn.Parameter(0.02 * torch.randn(actions, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, action_size)

    def forward(self, images: list[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
        """Return actions (batch, actions, action_size) for images (batch, 3, SIZE, SIZE) and states (batch, size)."""
        patches = [
            self.patches(image).flatten(2).transpose(1, 2) + self.positions + camera
            for image, camera in zip(images, self.cameras, strict=True)
        ]
        queries = self.queries.expand(len(state), -1, -1)
        x = torch.cat([*patches, self.state(state).unsqueeze(1), queries], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -queries.shape[1] :]))


class Task:
    """The features of a data set that are inputs and outputs of the policy, and their scale."""

    def __init__(self, metadata: Metadata, n_action_steps: int) -> None:
        self.cameras, self.stats, self.n_action_steps = metadata.camera_keys, metadata.stats, n_action_steps
        shapes = {name: feature["shape"] for name, feature in metadata.features.items()}
        self.state_size, self.action_size = math.prod(shapes.get(STATE, [1])), math.prod(shapes[ACTION])
        self.delta_timestamps = {ACTION: [i / metadata.fps for i in range(n_action_steps)]}

    def policy(self) -> Policy:
        return Policy(len(self.cameras), self.state_size, self.action_size, self.n_action_steps)

    def loss(self, policy: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the mean errors of the actions that count, and their number."""
        images = [2 * interpolate(batch[name], (SIZE, SIZE), mode="area") - 1 for name in self.cameras]
        target = self._scaled(ACTION, batch[ACTION].reshape(-1, self.n_action_steps, self.action_size))
        state = target.new_zeros(len(target), 1)
        if STATE in batch:
            state = self._scaled(STATE, batch[STATE].reshape(-1, self.state_size))
        error = (policy(images, state).float() - target).abs().mean(dim=2)
        counts = ~batch[f"{ACTION}_is_pad"]
        if "sample_mask" in batch:  # a sample that could not be read
            counts = counts & batch["sample_mask"][:, None]
        return (error * counts).sum(), counts.sum()

    def _scaled(self, name: str, value: torch.Tensor) -> torch.Tensor:
        mean, std = (self.stats[name][which].flatten().to(value.device) for which in ("mean", "std"))
        return (value.float() - mean) / torch.where(std < 1e-6, 1.0, std)  # constant values stay near 0


# --- data ------------------------------------------------------------------------------------------------------------


def open_dataset(args: argparse.Namespace, **options: Any) -> LeRobotDataset:
    return LeRobotDataset(
        args.root or f"hf://datasets/{args.repo_id}",
        tolerance_s=args.tolerance_s,
        decoder_cache=args.video_decoder_cache_size,
        on_corrupt=args.on_corrupt,
        cache_dir=args.cache_dir,
        **options,
    )


def read_task(args: argparse.Namespace) -> Task:
    with all_or_none("open the data set", DataError), closing(open_dataset(args)) as data:  # reads only metadata
        return Task(data.metadata, args.n_action_steps)


def open_loader(strategy: FSDPV2Strategy, args: argparse.Namespace, plan: Plan, task: Task) -> ResumableLoader:
    ranks = strategy.world_size
    lanes_of_rank = min(-(-plan.lanes // ranks) + bool(plan.lanes % ranks), plan.lanes)
    pool_of_rank = lanes_of_rank * plan.pool // plan.lanes
    with all_or_none("open the data set", DataError):
        data = open_dataset(args, pool=pool_of_rank, delta_timestamps=task.delta_timestamps)
        loader = ResumableLoader(
            data,
            plan.global_batch_size,
            seed=args.seed,
            pool=plan.pool,
            lanes=plan.lanes,
            num_workers=args.num_workers,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=2,
        )
    warn_of_shortages(
        ranks=ranks,
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        global_batch_size=plan.global_batch_size,
        lanes=plan.lanes,
        pool=plan.pool,
        episodes=len(data.episode_lengths),
        batches=len(loader),
        num_workers=args.num_workers,
    )
    return loader


def batches_on(device: torch.device, loader: ResumableLoader) -> Iterator[Batch]:
    """Yield the batches of one epoch after the other."""
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        yield {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }


def generate(strategy: FSDPV2Strategy, root: Path, episodes: int) -> None:
    """Write a data set with episodes of different lengths if it does not exist; collective, rank 0 writes."""
    with all_or_none("generate a data set", DataError):
        if strategy.is_rank_0() and not root.exists():
            unfinished = root.with_name(f"{root.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            features = {
                STATE: {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
                ACTION: {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
                CAMERA: {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
            }
            files = {"episodes_per_data_file": 4, "episodes_per_video_file": 3}  # several files, as in a large data set
            with DatasetWriter(unfinished, fps=10, features=features, **files) as writer:
                for i in range(episodes):
                    writer.add_episode(demonstration(i, 20 + 7 * i % 25), task="move the square to the corner")
            unfinished.rename(root)


def demonstration(seed: int, length: int) -> dict[str, np.ndarray]:
    """Return an episode in which a white square moves from a random position to the corner of a noisy image."""
    random = np.random.default_rng(seed)
    path = np.linspace(random.random(2), 1.0, length, dtype=np.float32)
    images = random.integers(0, 128, (length, 64, 96, 3), dtype=np.uint8)
    for image, (x, y) in zip(images, path, strict=True):
        left, top = int(80 * x), int(48 * y)
        image[top : top + 16, left : left + 16] = 255
    return {STATE: path, ACTION: np.concatenate([path[1:], path[-1:]]), CAMERA: images}


# --- training --------------------------------------------------------------------------------------------------------


class Journal:
    """The log of a run: a line per report, and with --log_ids the samples that each rank received."""

    def __init__(self, strategy: FSDPV2Strategy, args: argparse.Namespace, files: ExitStack) -> None:
        self.writes = strategy.is_rank_0()
        args.output_dir.mkdir(parents=True, exist_ok=True)
        self.log = files.enter_context((args.output_dir / "log.jsonl").open("a")) if self.writes else None
        self.ids: TextIO | None = None
        if args.log_ids:
            begun = len(list(args.output_dir.glob("ids-*-0.jsonl")))
            name = f"ids-{strategy.all_reduce(begun, 'max')}-{strategy.get_rank()}.jsonl"
            self.ids = files.enter_context((args.output_dir / name).open("w"))

    def batch(self, number: int, batch: Batch) -> None:
        """Log the samples of a global batch that this rank received."""
        if self.ids:
            print(json.dumps({"batch": number, "index": batch["index"].tolist()}), file=self.ids, flush=True)

    def report(self, rates: Rates, **facts: float) -> None:
        """Log the progress and speed of the run."""
        if self.log:
            speed = {
                "frames_per_second": rates.frames_per_second,
                "waiting_share": rates.waiting_share,
                "first_batch_seconds": rates.first_batch_seconds,
            }
            print(json.dumps(facts | speed), file=self.log, flush=True)
            print(", ".join([*(f"{name} {value:.4g}" for name, value in facts.items()), str(rates)]), flush=True)


def measure_loading(strategy: FSDPV2Strategy, args: argparse.Namespace, plan: Plan, journal: Journal) -> int:
    """Load batches as training does, without training."""
    loader, meter = open_loader(strategy, args, plan, read_task(args)), Throughput()
    for batch in itertools.islice(meter.over(batches_on(strategy.device, loader)), args.steps):
        journal.batch(loader.batches - 1, batch)
        meter.count(len(batch["index"]))
        if loader.batches % args.log_freq == 0:
            journal.report(meter.lap(), step=loader.batches, epoch=loader.epoch)
    finish(strategy, loader, meter)
    return 0


def train(strategy: FSDPV2Strategy, args: argparse.Namespace, plan: Plan, journal: Journal) -> int:
    """Train, and return the exit status; a preempted run has a status other than 0, so that it is started again."""
    task = read_task(args)
    with strategy.init_model_context(meta_init=True):  # no rank allocates the full model
        policy = task.policy().train()
    policy = strategy.prepare_model(policy, is_training=True)
    optimizer = strategy.create_optimizer(policy, lr=args.lr, weight_decay=0.01)
    scheduler = strategy.create_scheduler(optimizer, "cosine", num_training_steps=args.steps, warmup_ratio=0.05)
    strategy.set_seed(args.seed, per_rank=True)

    own = args.output_dir / "checkpoints"
    resumed, state = strategy.load_ckpt(policy, where_to_resume(own, args.resume_from), dataloader=LATER)
    if resumed:
        plan = Plan(**state["plan"])
        log("resumed from %s, at step %d", resumed, strategy.global_step(policy))
        if plan.global_batch_size != (asked := args.batch_size * strategy.world_size):
            message = "the run continues with its global batch of %d samples instead of %d (--batch_size %d x %d ranks)"
            log(message, plan.global_batch_size, asked, args.batch_size, strategy.world_size, level=logging.WARNING)
    loader = open_loader(strategy, args, plan, task)
    if resumed:
        load_checkpoint(policy, resumed, load_model=False, dataloader=loader)  # its batch size was in the client state

    meter = Throughput()
    batches = meter.over(batches_on(strategy.device, loader))
    preempted = False
    while strategy.global_step(policy) < args.steps and not preempted:
        with all_or_none("load a batch", DataError):  # an error on one rank is raised on all ranks
            batch = next(batches)
        journal.batch(loader.batches - 1, batch)
        loss, count = task.loss(policy, batch)
        total = strategy.all_reduce(torch.stack([loss.detach().double(), count.double()]), "sum").tolist()
        items = max(total[1], 1.0)  # each action has the same weight on any number of ranks
        strategy.backward(loss, policy, optimizer, num_items_in_batch=items)
        result = strategy.optimizer_step(optimizer, policy, scheduler)
        meter.count(len(batch["index"]))
        if result.stepped and result.step % args.log_freq == 0:
            facts = {"loss": total[0] / items, "norm": result.grad_norm, "lr": scheduler.get_last_lr()[0]}
            journal.report(meter.lap(), step=result.step, epoch=loader.epoch, **facts)
        preempted = strategy.preempted()
        is_due = result.step % args.save_freq == 0 or result.step == args.steps
        if preempted or (result.stepped and is_due):
            state = {"plan": asdict(plan)}
            strategy.save_ckpt(policy, own, client_state=state, dataloader=loader, async_save=True)
    finish(strategy, loader, meter)
    if preempted and strategy.global_step(policy) < args.steps:
        return 128 + signal.SIGTERM
    strategy.save_model(policy, output_dir=args.output_dir / "policy")
    check_export(strategy, policy, task, args.output_dir / "policy")
    return 0


@torch.no_grad()
def check_export(strategy: FSDPV2Strategy, policy: nn.Module, task: Task, folder: Path) -> None:
    """Load the exported weights into a new policy on rank 0, and compare its actions; collective."""
    random = torch.Generator().manual_seed(0)
    images = [torch.rand(1, 3, SIZE, SIZE, generator=random) for _ in task.cameras]
    state = torch.rand(1, task.state_size, generator=random)
    on_device = [image.to(strategy.device) for image in images], state.to(strategy.device)
    expected = policy.eval()(*on_device).float().cpu()
    with all_or_none("check the export", DataError):
        if strategy.is_rank_0():
            exported = task.policy().eval()
            weights = [load_file(file) for file in folder.glob("*.safetensors")]
            exported.load_state_dict({name: tensor for part in weights for name, tensor in part.items()})
            difference = (exported(images, state) - expected).abs().max().item()
            if not difference <= LARGEST_DIFFERENCE:
                raise DataError(
                    f"the export is another policy: actions of {folder} differ by {difference:.3g} from those of the "
                    f"trained policy, expected at most {LARGEST_DIFFERENCE}."
                )
            log("exported to %s: its actions differ by %.1e from those of the trained policy", folder, difference)


def where_to_resume(own: Path, resume_from: Path | None) -> Path:
    """Return the folder to resume from: a run's own checkpoints first, so that a restarted run loses no steps."""
    if resume_from is None or list_checkpoints(own):
        return own
    if not list_checkpoints(resume_from) and not list_checkpoints(resume_from.parent):
        raise SystemExit(f"cannot resume: {resume_from} contains no checkpoint, expected one. Change --resume_from.")
    return resume_from


def finish(strategy: FSDPV2Strategy, loader: ResumableLoader, meter: Throughput) -> None:
    rates = meter.total()
    log("%s; the first batch took %.2f s", rates, rates.first_batch_seconds)
    loader.close()
    log(
        "samples and frames of all ranks, including those loaded ahead: %s",
        strategy.all_reduce(loader.dataset.counts, "sum"),
    )
    loader.dataset.close()


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--repo_id", help="data set of the Hub")
    add("--root", help="folder or URL of the data set; takes precedence over --repo_id")
    add("--generate", type=int, metavar="EPISODES", help="first write a data set with this many episodes to --root")
    add("--tolerance_s", type=float, default=1e-4, help="seconds by which a video frame may differ from its timestamp")
    add("--output_dir", type=Path, default=Path("runs/streaming"), help="folder of logs, checkpoints and the policy")
    add("--cache_dir", type=Path, help="folder for temporary files of a remote data set, on a local disk of each host")
    add("--steps", type=int, default=200, help="number of optimizer steps")
    add("--batch_size", type=int, default=16, help="samples of a step on one rank, at the first start")
    add("--num_workers", type=int, default=2, help="processes per rank that decode")
    add("--episode_pool_size", type=int, default=64, help="episodes that one rank mixes at a time")
    add(
        "--video_decoder_cache_size",
        type=int,
        help="videos that a process keeps open; by default the pool, at most 128",
    )
    add("--n_action_steps", type=int, default=16, help="actions that the policy predicts at once")
    add("--on_corrupt", choices=["raise", "skip"], default="raise", help="how to handle corrupt samples")
    add("--lr", type=float, default=1e-4, help="peak of the cosine schedule")
    add("--seed", type=int, default=42, help="seed of the policy and of the order of samples")
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="compute in bf16, with fp32 masters",
    )
    add("--save_freq", type=int, default=50, help="steps between checkpoints")
    add("--log_freq", type=int, default=10, help="steps between lines of the log")
    add("--log_ids", action="store_true", help="write the samples that each rank received to ids-START-RANK.jsonl")
    add("--resume_from", type=Path, help="checkpoint, or folder of checkpoints, for a run without its own")
    add("--dummy", action="store_true", help="only measure loading")
    add("--buffer_size", type=int, help="ignored: --episode_pool_size sets the number of episodes that are mixed")
    args = parse_options(parser, arguments)
    if args.repo_id is None and args.root is None:
        parser.error("the data set is missing: pass --repo_id or --root.")
    if args.generate and (args.root is None or "://" in args.root):
        parser.error("--generate writes to a folder: pass it as --root.")
    return args


def main(arguments: Iterable[str] | None = None) -> int:
    args = parse(arguments)
    config = StrategyConfig(
        seed=args.seed, max_norm=1.0, bf16=args.bf16, block_class_names=("TransformerEncoderLayer",)
    )
    with FSDPV2Strategy(config=config) as strategy, ExitStack() as files:
        if args.buffer_size is not None:
            log("--buffer_size is ignored: use --episode_pool_size", level=logging.WARNING)
        if args.generate:
            generate(strategy, Path(args.root), args.generate)
        ranks = strategy.world_size
        plan = Plan(args.batch_size * ranks, lanes=ranks, pool=args.episode_pool_size * ranks)
        run = measure_loading if args.dummy else train
        return run(strategy, args, plan, Journal(strategy, args, files))


if __name__ == "__main__":
    os._exit(main())  # gloo's threads can abort a Python process while it exits
