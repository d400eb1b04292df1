"""Two stacks of blocks that a function runs pairwise, so that their own forward is bypassed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from helpers.reference import Unsharded, assert_close, assert_parameters_close, full_grads, full_parameters

WIDTH, LAYERS = 12, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outward(self.dropout(self.inward(self.norm(x)).relu()))


class Parts(nn.Module):
    """A block that is nothing but a place for its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)


def run_pair(left: nn.Module, right: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run two blocks at once, as a mixture of what both make of their inputs; their own forward is not called."""
    a, b = left.inward(left.norm(x)), right.inward(right.norm(y))
    mixed = left.dropout((a + b).relu())
    return x + left.outward(mixed), y + right.outward(mixed * b.sigmoid())


class Paired(nn.Module):
    """Two stacks of blocks that a function runs pairwise."""

    block: type[nn.Module] = Block

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.left = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.right = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = self.begin(x)
        for pair in zip(self.left, self.right, strict=True):
            if self.recompute:
                x, y = checkpoint(run_pair, *pair, x, y, use_reentrant=False)
            else:
                x, y = run_pair(*pair, x, y)
        return self.end(y)

    def one_stack(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.left:
            x = block(x)
        return self.end(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) + self.one_stack(x) + self.end(x)


class PairedParts(Paired):
    block = Parts


def build(kind: type[Paired] = Paired, **options: object) -> Paired:
    torch.manual_seed(0)
    return kind(**options).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(x.abs().sum() * 1e4) % 2**31)  # of the dropout
    return model(x).square().mean()


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def train_beside_reference(model: nn.Module, shard_size: int = -1, **config: object) -> nn.Module:
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded = Unsharded(model, loss_of, max_norm=0.1, lr=1e-2)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=0.1, **config))
    reshard = shard_size != 1
    strategy.prepare_model(model, is_training=True, shard_size=shard_size, reshard_after_forward=reshard)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    for step in range(3):
        expected, norm = unsharded.step([batch_of(step, r) for r in range(world)])
        loss = loss_of(model, batch_of(step, rank))
        assert loss.item() == pytest.approx(expected[rank], rel=1e-10)
        strategy.backward(loss, model, optimizer)
        # Until the step, the gradients of parameters that no rank used are zeros.
        grads = {name: grad for name, grad in full_grads(model).items() if name in unsharded.grads or grad.any()}
        assert_close(grads, unsharded.grads, 1e-10, "gradient")
        assert strategy.optimizer_step(optimizer, model, None).grad_norm == pytest.approx(norm, rel=1e-10)
        assert_parameters_close(full_parameters(model), full_parameters(unsharded.model), 1e-10)
        model.eval(), unsharded.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(batch_of(9, 0)), unsharded.model(batch_of(9, 0)))
        model.train(), unsharded.model.train()
    return model
