"""A policy with a frozen language model, and runs of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from torch import nn

from helpers.models import build, tokens
from helpers.training import strategy_for, take_steps


class Scale(nn.Module):
    """A scale that follows its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        self.mean.lerp_(x.detach().float().abs().mean(), 0.1)
        return x / self.mean.to(x.dtype)


class Policy(nn.Module):
    """A frozen language model from a folder, and a head."""

    def __init__(self, folder):
        super().__init__()
        self.backbone = transformers.AutoModelForCausalLM.from_pretrained(folder).model.requires_grad_(False)
        self.backbone.name_or_path = str(folder)
        self.head = nn.Sequential(nn.Linear(32, 32), Scale(), nn.Linear(32, 1))

    def forward(self, ids):
        return self.head(self.backbone(ids).last_hidden_state.mean(1)).square().mean()


def folder_with(path, seed):
    if dist.get_rank() == 0:
        build("llama", seed).save_pretrained(path)
    dist.barrier()
    return path


def start(folder, *, seed=0, bf16=True, frozen=True):
    strategy = strategy_for(bf16=bf16)
    torch.manual_seed(seed)
    model = Policy(folder)
    model.backbone.requires_grad_(not frozen)
    model = strategy.prepare_model(model, is_training=True)
    return strategy, model, strategy.create_optimizer(model, lr=0.1)


def train(strategy, model, optimizer, steps):
    batches = (tokens(torch.Generator().manual_seed(step + 10 * dist.get_rank()), batch=4) for step in steps)
    return take_steps(strategy, model, optimizer, (model(batch) for batch in batches))
