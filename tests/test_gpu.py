"""The same promises on an accelerator: one rank a device, nccl beside gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import batch_of, build, loss_of
from helpers.reference import Unsharded, full_parameters
from safetensors.torch import load_file

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator"),
    pytest.mark.ranks(1),
]


def on_device(batch):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_training_on_a_gpu_equals_the_unsharded_model(cpu_offload):
    model = build("llama").cuda()
    unsharded = Unsharded(model, lambda m, b: loss_of("llama", m, b), max_norm=1.0, lr=1e-3)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0, cpu_offload=cpu_offload))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    for step in range(3):
        batch = on_device(batch_of("llama", step, dist.get_rank()))
        (expected,), norm = unsharded.step([batch])
        loss = loss_of("llama", model, batch)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        strategy.backward(loss, model, optimizer)
        assert strategy.optimizer_step(optimizer, model, None).grad_norm == pytest.approx(norm, rel=1e-4)


def test_resume_on_a_gpu_is_bitwise_exact(tmp_path):
    def start(seed):
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, max_norm=1.0, seed=seed))
        model = strategy.prepare_model(build("llama", seed).cuda(), is_training=True)
        return strategy, model, strategy.create_optimizer(model, lr=1e-3)

    def steps(strategy, model, optimizer, which):
        losses = []
        for step in which:
            loss = loss_of("llama", model, on_device(batch_of("llama", step, 0)))
            strategy.backward(loss, model, optimizer)
            losses.append(
                (loss.item(), strategy.optimizer_step(optimizer, model, None).grad_norm, torch.rand(1).item())
            )
        return losses

    first = start(0)
    steps(*first, range(3))
    first[0].save_ckpt(first[1], tmp_path)
    expected = steps(*first, range(3, 6))
    second = start(1)
    second[0].load_ckpt(second[1], tmp_path)
    assert steps(*second, range(3, 6)) == expected
    saved = full_parameters(first[1])
    assert all(torch.equal(saved[n], p) for n, p in full_parameters(second[1]).items())


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_meta_init_load_and_export_on_a_gpu_equal_from_pretrained(cpu_offload, tmp_path):
    build("mixtral").to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    expected = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "saved")
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, cpu_offload=cpu_offload))
    with strategy.init_model_context(meta_init=True):
        model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "saved")
    strategy.prepare_model(model, is_training=True)
    named = dict([*expected.named_parameters(), *expected.named_buffers()])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        assert torch.equal(local.cpu(), named[name].to(local.dtype)), name
    strategy.save_model(model, None, tmp_path / "out", dtype=torch.bfloat16)
    ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "saved"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
