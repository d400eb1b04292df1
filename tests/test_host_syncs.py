"""A training step waits for the device once: what is read on the host travels together.

The counts on a device are those of the simulated accelerator. Here, tensors of the CPU count as those of a device.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2_strategy import EMA, FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.model import offloading
from fsdp2_strategy.model.offloading import copies_on_host, copy_from_host
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.optim import ema as averages
from fsdp2_strategy.optim import step as steps


class Reads(TorchDispatchMode):
    """Count how often a value of a tensor is read on the host."""

    count = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def trained(items, *, on_device=True):
    """Train a step with two micro-batches; return the result, the weights, and how often backward read a value."""
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    torch.manual_seed(0)
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model)
    with patch.object(steps, "on_accelerator", lambda _: on_device):
        count = 0
        for number in range(2):
            loss = loss_of("llama", model, batch_of("llama", number, dist.get_rank()))
            with Reads() as reads:
                strategy.backward(loss, model, optimizer, num_items_in_batch=items)
            count += reads.count
        result = strategy.optimizer_step(optimizer, model)
    return result, [values_of(p).clone() for p in model.parameters()], count


@pytest.mark.ranks(2)
def test_a_number_of_items_on_the_device_is_not_read_in_backward():
    result, weights, count = trained(torch.tensor(24), on_device=True)
    expected, expected_weights, expected_count = trained(24)
    assert count == expected_count == 0
    assert (result.loss, result.tokens, result.grad_norm) == (expected.loss, 24, expected.grad_norm)
    assert all(torch.equal(*pair) for pair in zip(weights, expected_weights, strict=True))
    assert trained(torch.tensor(24), on_device=False)[2] > 0, "a number in host memory is read"


@pytest.mark.parametrize(("items", "match"), [((0, 0), "is 0, and"), ((24, 12), "is 18, and the numbers are not")])
@pytest.mark.ranks(2)
def test_a_wrong_number_of_items_on_the_device_is_an_error_of_the_step_on_every_rank(items, match):
    with pytest.raises(StepError, match=match):
        trained(torch.tensor(items[dist.get_rank()]))


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 4096])
@pytest.mark.ranks(2)
def test_averages_in_host_memory_are_updated_by_a_few_copies(buffer_bytes, monkeypatch):
    monkeypatch.setattr("fsdp2_strategy.sizes.OFFLOAD_BYTES", buffer_bytes)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    model = strategy.prepare_model(build("llama"), is_training=True)
    target = strategy.prepare_model(build("llama"), is_training=False)
    together, alone = EMA(model, 0.9), EMA(model, 0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            values_of(parameter).add_(1)
    alone.update(model)
    sizes, copy_all = [], offloading.CopyQueue.copy_all

    def counted(self, targets, sources):
        sizes.append(len(targets))
        copy_all(self, targets, sources)

    with (
        patch.object(averages, "_is_in_other_memory", lambda _own, other: other.numel() > 0),
        patch.object(offloading.CopyQueue, "copy_all", counted),
    ):
        together.update(model)
        assert sum(sizes) == len([p for p in model.parameters() if values_of(p).numel()])
        assert (len(sizes) == 1) == (buffer_bytes > 4096)
        together.copy_to(target)
    for name, average in alone.averages.items():
        assert torch.equal(values_of(average), values_of(together.averages[name]))
        assert torch.equal(values_of(average), values_of(dict(target.named_parameters())[name]))


def test_copies_between_host_and_device_keep_shape_strides_and_values():
    tensors = [torch.arange(6.0).view(2, 3).T, torch.tensor(1, dtype=torch.int64), torch.ones(5, dtype=torch.bfloat16)]
    for tensor, copy in zip(tensors, copies_on_host(tensors), strict=True):
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    copy_from_host(targets, [tensor.double() for tensor in tensors])
    assert all(torch.equal(*pair) for pair in zip(targets, tensors, strict=True))
