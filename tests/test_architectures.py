"""Every architecture goes through prepare, three steps, save and load, with the numbers of the unsharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.models import CASES, FAMILIES, batch_of, build, loss_of
from helpers.reference import Unsharded, assert_close, assert_parameters_close, full_grads, full_parameters
from helpers.training import train
from helpers.worlds import some
from torch.distributed.fsdp import FSDPModule

from fsdp2_strategy import FSDPV2Strategy

STEPS = 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(CASES, FAMILIES[4:7]))
def test_an_architecture_trains_with_parity_and_resumes_bitwise(name, tmp_path):
    rank = dist.get_rank()
    model = build(name)
    unsharded = Unsharded(model, lambda m, b: loss_of(name, m, b), max_norm=1.0, lr=1e-3)
    strategy = FSDPV2Strategy(bf16=False, max_norm=1.0)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    assert len(units) > 1, "blocks were found"
    for step in range(STEPS):
        expected, expected_norm = unsharded.step([batch_of(name, step, r) for r in range(2)])
        loss = loss_of(name, model, batch_of(name, step, rank))
        assert loss.item() == pytest.approx(expected[rank], rel=1e-5)
        strategy.backward(loss, model, optimizer)
        assert_close(full_grads(model), unsharded.grads, 1e-5, "gradient")
        result = strategy.optimizer_step(optimizer, model, None)
        assert result.grad_norm == pytest.approx(expected_norm, rel=1e-4)
        assert_parameters_close(full_parameters(model), full_parameters(unsharded.model), 2e-4)

    strategy.save_ckpt(model, tmp_path)
    other = strategy.prepare_model(build(name, seed=7), is_training=True)
    other_optimizer = strategy.create_optimizer(other, lr=0.5)
    strategy.load_ckpt(other, tmp_path)
    saved, loaded = full_parameters(model), full_parameters(other)
    assert all(torch.equal(saved[n], loaded[n]) for n in saved)
    assert strategy.global_step(other) == STEPS
    went_on = train(strategy, model, optimizer, None, [3, 4], name)
    assert train(strategy, other, other_optimizer, None, [3, 4], name) == went_on
