"""Runs of programs without this package, and the checkpoints that they write: plain FSDP2, DDP, FSDP1."""

from __future__ import annotations

import json
import pickle
import sys
import types
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from helpers.models import VOCAB, build, next_token_loss

SAMPLES = 12
"""Samples of a step: 1, 2, 3 and 4 ranks have as many each."""
SAVED = 3
"""Steps before the save."""
STEPS = 6


def samples(step):
    """Return the tokens [12, 8] of a step, on all ranks together."""
    return torch.randint(3, VOCAB, (SAMPLES, 8), generator=torch.Generator().manual_seed(step))


def decay(step):
    return 1 / (1 + step)


def loss_at(model, step):
    """Return this rank's share of the loss of a step: the mean over its samples."""
    ids = samples(step).chunk(dist.get_world_size())[dist.get_rank()]
    return next_token_loss(model(input_ids=ids).logits, ids)


def mean_loss(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Program:
    """A loop of another program: AdamW with two groups, and a schedule."""

    def __init__(self, model, groups=None):
        self.model = model
        named = list(model.named_parameters())
        chosen = groups or (lambda name, p: p.ndim > 1)
        matrices = [p for name, p in named if chosen(name, p)]
        others = [p for name, p in named if not chosen(name, p)]
        groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)

    def train(self, steps):
        """Train, and return the losses."""
        losses = []
        for step in steps:
            loss = loss_at(self.model, step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(mean_loss(loss))
        return losses


def sharded(name="llama"):
    model = build(name)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@dataclass
class Progress:
    """The progress of a run, as prime-rl keeps it."""

    step: int
    total_tokens: int


class App(Stateful):
    """The state of a program in one object, as the tutorial of DCP has it; prime-rl adds its progress."""

    def __init__(self, program):
        self.program = program

    def state_dict(self):
        model, optimizers = get_state_dict(self.program.model, [self.program.optimizer])
        scheduler = self.program.scheduler.state_dict()
        progress = asdict(Progress(SAVED, 960))
        return {"model": model, "optimizers": optimizers, "scheduler": scheduler, "progress": progress}

    def load_state_dict(self, state):
        raise NotImplementedError


def nested(folder, program):
    model, optimizer = get_state_dict(program.model, program.optimizer)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": program.scheduler, "step": SAVED, "epoch": 1}
    dcp.save(state, checkpoint_id=folder / "run")


def flattened(folder, program):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(program.model, program.optimizer, options=options)
    state = {**model, **optimizer, "train": {"step": torch.tensor(SAVED), "epoch": 1}}
    state["sched"] = program.scheduler.state_dict()
    dcp.save(state, checkpoint_id=folder / "run")


def dotted(folder, program):
    """With dots in all keys: the containers of the weights and of the optimizer are prefixes."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(program.model, program.optimizer, options=options)
    state = {f"model.{name}": value for name, value in model.items()}
    state |= {f"optimizer.{key}": value for key, value in optimizer.items()}
    state |= {f"sched.{key}": value for key, value in program.scheduler.state_dict().items()}
    dcp.save({**state, "train.step": SAVED}, checkpoint_id=folder / "run")


def numbered(folder, program):
    state = {"net": program.model.state_dict(), "optim": program.optimizer.state_dict(), "epoch": 1}
    dcp.save(state | {"scheduler": program.scheduler.state_dict()}, checkpoint_id=folder / "run")


def two_folders(folder, program):
    dcp.save(get_model_state_dict(program.model), checkpoint_id=folder / "step_3" / "model")
    state = get_optimizer_state_dict(program.model, program.optimizer)
    dcp.save(state, checkpoint_id=folder / "step_3" / "optim")
    if dist.get_rank() == 0:
        torch.save(program.scheduler.state_dict(), folder / "step_3" / "scheduler.pt")


def torchtitan(folder, program):
    """As torchtitan 0.3.0: the weights at the top, names in all keys of the optimizer, the dataloader as bytes."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(program.model, program.optimizer, options=options)
    state = {
        **model,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": program.scheduler.last_epoch},
        "dataloader": {"dp_rank_0": pickle.dumps({"position": 7}), "world_size": 1},
        "train_state": {"step": SAVED, "ntokens_seen": 960},
    }
    dcp.save(state, checkpoint_id=folder / "step-3")


def torchtitan_early(folder, program):
    """As torchtitan before 0.3: another name and all state of the schedule, and tensors in the state of the run."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(program.model, program.optimizer, options=options)
    train_state = {"step": torch.tensor(SAVED, dtype=torch.int32), "ntokens_seen": 960}
    state = {**model, "optimizer": optimizer, "lr_schedulers": program.scheduler, "train_state": train_state}
    dcp.save(state, checkpoint_id=folder / "step-3")


def prime_rl(folder, program):
    dcp.save({"app": App(program)}, checkpoint_id=folder / "step_3" / "trainer")


def prime_rl_early(folder, program):
    (folder / "step_3").mkdir(parents=True, exist_ok=True)
    state = {"model": program.model.state_dict(), "optimizers": [program.optimizer.state_dict()]}
    theirs = types.ModuleType("their_trainer")
    theirs.Progress = dataclass(type("Progress", (), {"__module__": "their_trainer", "__annotations__": {"step": int}}))
    sys.modules["their_trainer"] = theirs  # a class that a reader cannot import
    try:
        state["progress"] = theirs.Progress(SAVED)
        torch.save(state, folder / "step_3" / f"trainer_{dist.get_rank()}.pt")
    finally:
        del sys.modules["their_trainer"]


def verl(folder, program):
    """As verl 0.9.1 with FSDP2."""
    path = folder / "global_step_3" / "actor"
    path.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(program.model.state_dict(), path / f"model_{suffix}")
    torch.save(program.optimizer.state_dict(), path / f"optim_{suffix}")
    extra = {"lr_scheduler": program.scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, path / f"extra_state_{suffix}")


def _full(program):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(program.model, program.optimizer, options=options)


def whole_named(folder, program):
    model, optimizer = _full(program)
    if dist.get_rank() == 0:
        state = {"model": model, "optimizer": optimizer, "scheduler": program.scheduler.state_dict(), "step": SAVED}
        torch.save(state, folder / "checkpoint.pt")


def whole_numbered(folder, program):
    """A file of a program with DistributedDataParallel and torch.compile."""
    model, optimizer = _full(program)
    if dist.get_rank() == 0:
        state = {"model": {f"module._orig_mod.{name}": value for name, value in model.items()}}
        state |= {"optimizer": numbers_of(optimizer), "step": SAVED, "epoch": 1}
        torch.save(state | {"scheduler": program.scheduler.state_dict()}, folder / "ckpt_3.pt")


def lightning(folder, program):
    """As Lightning 2.6.6 with DDP: the model is an attribute of the LightningModule, parameters have numbers."""
    model, optimizer = _full(program)
    if dist.get_rank() == 0:
        state = {
            "epoch": 1,
            "global_step": SAVED,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"net.{name}": value for name, value in model.items()},
            "loops": {"fit_loop": {"epoch_progress": {"current": {"completed": 1}}}},
            "callbacks": {},
            "optimizer_states": [numbers_of(optimizer)],
            "lr_schedulers": [program.scheduler.state_dict()],
        }
        torch.save(state, folder / "epoch=1-step=3.ckpt")


def lightning_sharded(folder, program):
    """As Lightning 2.6.6 with ModelParallelStrategy: a folder of DCP, and the rest in meta.pt."""
    model, optimizer = get_state_dict(program.model, program.optimizer)
    state = {f"net.{name}": {**values} for name, values in optimizer["state"].items()}
    groups = [{**group, "params": [f"net.{name}" for name in group["params"]]} for group in optimizer["param_groups"]]
    tensors = {"state_dict": {f"net.{name}": value for name, value in model.items()}}
    tensors["optimizer_0"] = {"state": state, "param_groups": groups}
    dcp.save(tensors, checkpoint_id=folder / "epoch=1-step=3.ckpt")
    if dist.get_rank() == 0:
        meta = {"epoch": 1, "global_step": SAVED, "lr_schedulers": [program.scheduler.state_dict()]}
        torch.save(meta, folder / "epoch=1-step=3.ckpt" / "meta.pt")


def numbers_of(optimizer):
    """Return the state of an optimizer by number, as ``Optimizer.state_dict`` has it, from that by name."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    state = {number[name]: values for name, values in optimizer["state"].items()}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": state, "param_groups": groups}


def last_first(model, rate=1e-2):
    """Return the groups of layer-wise learning rates: the last parameter first, and half the rate for each before."""
    return [{"params": [p], "lr": rate / 2**i} for i, p in enumerate(reversed(list(model.parameters())))]


WRITERS = (
    nested,
    flattened,
    dotted,
    numbered,
    two_folders,
    torchtitan,
    torchtitan_early,
    prime_rl,
    prime_rl_early,
    verl,
    whole_named,
    whole_numbered,
    lightning,
    lightning_sharded,
)
"""What the programs write with torch alone; functions of the kind's name."""


def write_all(folder):
    """Train on this rank, write a checkpoint of each kind, and continue; write the losses to ``losses.json``."""
    program = Program(sharded())
    program.train(range(SAVED))
    for write in WRITERS:
        (folder / write.__name__).mkdir(exist_ok=True)
        write(folder / write.__name__, program)
    losses = program.train(range(SAVED, STEPS))
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
