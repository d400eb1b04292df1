"""BatchNorm in a model that computes in half precision: it computes in fp32, as its statistics are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.reference import assert_close, full_grads
from helpers.training import strategy_for
from torch import nn

from fsdp2_strategy.model.names import named_parameters


class Images(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8))
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        return self.head(self.net(images).mean((2, 3))).square().mean()


def unfused(model):
    """Return the same arithmetic unsharded: modules in bf16 with casts around those that keep statistics."""
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(torch.bfloat16)
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _m, _i, output: output.to(torch.bfloat16))
    return reference


def images_of(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 3, 8, 8, generator=generator).to(torch.bfloat16)


def instance_norm(channels):
    return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, instance_norm])
@pytest.mark.ranks(2)
def test_a_norm_with_statistics_computes_in_fp32_beside_bf16(norm):
    torch.manual_seed(0)
    model = Images(norm)
    reference, ranks, rank = unfused(model), dist.get_world_size(), dist.get_rank()
    with strategy_for(bf16=True, max_norm=0.0) as strategy:
        model = strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        loss = model(images_of(rank))
        strategy.backward(loss, model, optimizer)
        for other in range(ranks):
            own = copy.deepcopy(reference)
            its_loss = own(images_of(other))
            its_loss.backward()
            for ours, its in zip(reference.parameters(), own.parameters(), strict=True):
                ours.grad = its.grad / ranks + (0 if ours.grad is None else ours.grad)
            if other == rank:
                assert loss.item() == its_loss.item()
                for name, buffer in own.named_buffers():
                    assert torch.equal(model.get_buffer(name), buffer), name
                    assert buffer.dtype in (torch.float32, torch.int64)
        assert_close(
            full_grads(model), {n: p.grad.float() for n, p in named_parameters(reference).items()}, 2e-2, "bf16"
        )
        strategy.optimizer_step(optimizer, model)
        model.eval()
        with torch.no_grad():
            assert model(images_of(rank, 1)).isfinite()


@pytest.mark.ranks(2)
def test_a_frozen_batch_norm_and_an_ignored_one_run_in_bf16():
    for is_ignored in (False, True):
        torch.manual_seed(0)
        model = Images(nn.BatchNorm2d)
        model.net.requires_grad_(False)
        with strategy_for(bf16=True, ignored_modules=["net"] if is_ignored else []) as strategy:
            model = strategy.prepare_model(model, is_training=True)
            optimizer = strategy.create_optimizer(model, lr=1e-3)
            strategy.backward(model(images_of(dist.get_rank())), model, optimizer)
            assert strategy.optimizer_step(optimizer, model).stepped
            assert model.net[1].running_mean.dtype == torch.float32
        inference = strategy_for(bf16=True).prepare_model(Images(nn.BatchNorm2d).eval())
        with torch.no_grad():
            assert inference(images_of(0)).isfinite()
