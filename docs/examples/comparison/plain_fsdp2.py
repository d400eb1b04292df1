"""Train a Llama with FSDP2 and torch.distributed.checkpoint alone.

    torchrun --standalone --nproc-per-node 2 plain_fsdp2.py

It resumes from its newest checkpoint in plain_ckpts, and exports to
plain_out. docs/coming_from_fsdp2.md compares it with with_strategy.py, and
a test compares their losses.
"""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
)

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
TOKENS = torch.arange(480 * 32).view(480, 32) % 251
DATA = [{"input_ids": ids, "labels": ids} for ids in TOKENS]
STEPS, SAVE_EVERY = 40, 10
BATCH, MICRO_BATCHES = 12, 2  # samples of a micro-batch over all ranks
CHECKPOINTS = Path("plain_ckpts")


class Run(Stateful):
    """All that a checkpoint has."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.batches = scheduler, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "batches": self.batches,
            f"random{dist.get_rank()}": random,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches = state["batches"]
        random = state[f"random{dist.get_rank()}"]
        torch.set_rng_state(random["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])


def samples(first: int) -> Iterator[list[int]]:
    """Yield this rank's part of each micro-batch from the first one on."""
    size = BATCH // dist.get_world_size()
    for i in itertools.count(first):
        begin = i * BATCH + dist.get_rank() * size
        yield [j % len(DATA) for j in range(begin, begin + size)]


def train() -> list[float]:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(42)
    model = LlamaForCausalLM(CONFIG).to(device).train()
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for block in model.model.layers:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.01, fused=True
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, STEPS)

    run, losses = Run(model, optimizer, scheduler), []
    complete = sorted(CHECKPOINTS.glob("step*/.metadata"))
    if complete:
        dcp.load({"run": run}, checkpoint_id=complete[-1].parent)

    loader = DataLoader(DATA, batch_sampler=samples(run.batches))
    total = torch.zeros((), device=device)
    for batch in loader:
        if run.batches >= STEPS * MICRO_BATCHES:
            break
        inputs = {name: t.to(device) for name, t in batch.items()}
        loss = model(**inputs).loss / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
        run.batches += 1
        if run.batches % MICRO_BATCHES:
            continue
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        step = run.batches // MICRO_BATCHES
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        total.zero_()
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, norm {norm:.2f}")

        if step % SAVE_EVERY == 0:
            folder = CHECKPOINTS / f"step{step:06}"
            dcp.save({"run": run}, checkpoint_id=folder)
            if rank == 0:
                for old in sorted(CHECKPOINTS.glob("step*"))[:-3]:
                    shutil.rmtree(old)

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=full)
    if rank == 0:
        model.save_pretrained("plain_out", state_dict=weights)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    train()
