"""verl's own worker on our engine: numbers, micro-batches, checkpoints, streams, offloading, and the names of verl."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("verl", reason="verl is not installed: docs/coming_from_verl.md says how to run these tests")

from helpers import verl_cpu
from helpers.reference import CountCollectives, assert_close, full_grads, full_parameters
from helpers.verl_cpu import batch, configuration, on_cpu, samples, worker_of, write_model
from transformers import LlamaForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

from fsdp2_strategy import CheckpointError, ConfigError, OffloadError, StepError, verify_checkpoint
from fsdp2_strategy.compat.verl import EngineConfig, StrategyEngine, names
from fsdp2_strategy.compat.verl.settings import BACKEND
from fsdp2_strategy.model.offload import is_offloaded

PAGE = Path(__file__).parents[1] / "docs" / "coming_from_verl.md"
LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def metrics(output):
    return tu.get(output, "metrics")


def train(worker, steps, **extra):
    """Take steps, and return losses, norms and learning rates."""
    found = [metrics(worker.train_batch(batch(step, **extra))) for step in steps]
    return [(each["loss"], each["grad_norm"], each["lr"]) for each in found]


class Reference:
    """The same steps without sharding, without verl's engine and without micro-batches."""

    def __init__(self, folder):
        self.model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, step / 2))

    def loss(self, step):
        total, count = torch.zeros(()), 0
        for ids, mask in samples(step):
            logits = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
            total = total - (logits.gather(-1, ids[1:, None])[:, 0] * mask[1:]).sum()
            count += int(mask.sum())
        return total / count

    def train(self, steps):
        found = []
        for step in steps:
            loss = self.loss(step)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            found.append((loss.item(), norm.item(), self.schedule.get_last_lr()[0]))
        return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_steps_equal_those_of_the_unsharded_model(tmp_path, packed):
    folder = write_model(tmp_path / "model")
    reference = Reference(folder)
    with on_cpu():
        worker = worker_of(folder, model={"use_remove_padding": packed})
        assert isinstance(worker.engine, StrategyEngine)
        for now, then in zip(train(worker, range(4)), reference.train(range(4)), strict=True):
            assert now == pytest.approx(then, rel=1e-5)
        expected = dict(reference.model.named_parameters())
        for name, parameter in full_parameters(worker.engine.module).items():
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_gradients_of_dynamic_micro_batches_equal_those_of_the_whole_batch(tmp_path):
    folder = write_model(tmp_path / "model")
    reference = Reference(folder)
    reference.loss(0).backward()
    with on_cpu():
        for tokens, defers in ((20, False), (20, True), (1000, False)):
            engine = worker_of(folder, engine={"use_no_sync_for_gradient_accumulation": defers}).engine
            data = batch(0)
            tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=tokens, use_remove_padding=False)
            with engine.train_mode():
                with CountCollectives() as counted:
                    output = engine.forward_backward_batch(data, verl_cpu.loss)
                assert (len(output["loss"]) > 2) == (tokens == 20)
                reduces = sum(n for name, n in counted.counts.items() if "reduce_scatter" in name)
                assert reduces == 4 * (1 if defers else len(output["loss"]))
                gradients = full_grads(engine.module)
                assert_close(gradients, {n: p.grad for n, p in reference.model.named_parameters()}, 1e-5, "grad")


@pytest.mark.ranks(2)
def test_losses_and_outputs_equal_those_of_verls_own_engine(tmp_path):
    folder = write_model(tmp_path / "model")
    found = {}
    with on_cpu(VERL_ENGINE_DEVICE="cuda"):  # for which verl registers its own engine
        for strategy in (BACKEND, "fsdp2"):
            worker = worker_of(folder, strategy=strategy)
            steps = train(worker, range(4))
            inferred = worker.infer_batch(batch(9, calculate_entropy=True, update_lr_scheduler=False))
            found[strategy] = steps, metrics(inferred)["loss"], inferred["log_probs"], inferred["entropy"]
    ours, theirs = found[BACKEND], found["fsdp2"]
    for now, then in zip(ours[0], theirs[0], strict=True):
        assert now == pytest.approx(then, rel=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    for now, then in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(now.offsets(), then.offsets())
        torch.testing.assert_close(now.values(), then.values(), rtol=1e-4, atol=1e-5)
