"""Checkpoints that the libraries themselves wrote: accelerate's functions, FSDP1, DistributedDataParallel, Trainer."""

from __future__ import annotations

import json
import logging
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.foreign import SAVED, STEPS, Program, decay, loss_at, mean_loss, samples, sharded
from helpers.models import build, next_token_loss
from helpers.training import strategy_for
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp2_strategy.cli import main

pytestmark = [pytest.mark.full, pytest.mark.each]


def is_matrix(name, _parameter):
    return "norm" not in name


def continue_and_record(folder, program):
    losses = program.train(range(SAVED, STEPS))
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def write_with_accelerate(folder):
    from accelerate.utils import fsdp_utils  # the case is skipped without it

    program = Program(sharded())
    program.train(range(SAVED))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    accelerator = SimpleNamespace(
        num_processes=ranks, process_index=rank, is_main_process=rank == 0, wait_for_everyone=dist.barrier
    )
    for kind, use_dcp in (("SHARDED", True), ("SHARDED", False), ("FULL", True)):
        path = folder / f"{kind}_{use_dcp}"
        plugin = SimpleNamespace(
            fsdp_version=2,
            state_dict_type=StateDictType[f"{kind}_STATE_DICT"],
            state_dict_config=SimpleNamespace(),
            optim_state_dict_config=None,
            cpu_ram_efficient_loading=False,
        )
        model, optimizer = program.model, program.optimizer
        with patch.object(fsdp_utils, "logger", logging.getLogger("accelerate")):  # its own needs an Accelerator
            fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(path), use_dcp=use_dcp)
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(path), use_dcp=use_dcp)
        # As Accelerator.save_state of accelerate 1.15.0: its schedule takes a step for each process, and the step of
        # the random states counts micro-batches.
        torch.save({"step": 0, "torch_manual_seed": torch.get_rng_state()}, path / f"random_states_{rank}.pkl")
        if rank == 0:
            schedule = program.scheduler.state_dict() | {"last_epoch": ranks * SAVED, "_step_count": ranks * SAVED + 1}
            torch.save(schedule, path / "scheduler.bin")
            torch.save({"epoch": 1}, path / "custom_checkpoint_0.pkl")
    continue_and_record(folder, program)


def write_with_fsdp1(folder):
    wrapped = FullyShardedDataParallel(
        build("llama"),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or "DecoderLayer" in type(module).__name__,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    program = Program(wrapped, is_matrix)
    program.train(range(SAVED))
    rank = dist.get_rank()
    # On CPUs, torch 2.13 writes wrong moments with FULL_STATE_DICT: `whole_named` of helpers.foreign has this format.
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with (
        warnings.catch_warnings(action="ignore"),
        FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, *options),
    ):
        state = {
            "model": wrapped.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(wrapped, program.optimizer),
            "scheduler": program.scheduler.state_dict(),
            "step": SAVED,
        }
        dcp.save(state, checkpoint_id=folder / "dcp")
        (folder / "per_rank").mkdir(exist_ok=True)
        torch.save(state, folder / "per_rank" / f"checkpoint_rank{rank}.pt")
    continue_and_record(folder, program)


def write_with_flat_parameters(folder):
    """As verl 0.9.1 with FSDP1: weights are DTensors, and the optimizer has the shards of flattened parameters."""
    wrapped = FullyShardedDataParallel(
        build("llama"),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or "DecoderLayer" in type(module).__name__,
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
    )
    program = Program(wrapped, lambda _name, _parameter: True)
    program.train(range(SAVED))
    path = folder / f"global_step_{SAVED}" / "actor"
    path.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with (
        warnings.catch_warnings(action="ignore"),
        FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, *options),
    ):
        torch.save(wrapped.state_dict(), path / f"model_{suffix}")
        torch.save(program.optimizer.state_dict(), path / f"optim_{suffix}")
    torch.save({"lr_scheduler": program.scheduler.state_dict(), "rng": {}}, path / f"extra_state_{suffix}")
    continue_and_record(folder, program)


def write_with_ddp(folder):
    program = Program(DistributedDataParallel(build("llama")))
    program.train(range(SAVED))
    if dist.get_rank() == 0:
        state = {"model": program.model.state_dict(), "optimizer": program.optimizer.state_dict(), "global_step": SAVED}
        torch.save(state | {"lr_sched": program.scheduler.state_dict(), "epoch": 1}, folder / "last.pt")
    continue_and_record(folder, program)


class TrainState(Stateful):
    def state_dict(self):
        return {"step": SAVED, "ntokens_seen": 960}

    def load_state_dict(self, state):
        raise NotImplementedError


def write_with_torchtitan(folder):
    """With the classes of torchtitan 0.3.0; the loop is ours, because its models need an accelerator."""
    from torchtitan.components import checkpoint, optimizer  # the case is skipped without it

    program = Program(sharded())
    options = {"lr": 1e-2, "betas": (0.8, 0.9)}
    groups = [
        optimizer.ParamGroupConfig(
            pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**options, "weight_decay": weight_decay}
        )
        for pattern, weight_decay in (("norm", 0.0), (".*", 0.2))
    ]
    config = optimizer.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    program.optimizer = optimizer.OptimizersContainer(config, model_parts=[program.model])
    program.scheduler = optimizer.LRSchedulersContainer(program.optimizer, decay)
    program.train(range(SAVED))
    manager = checkpoint.CheckpointManager(
        checkpoint.CheckpointManager.Config(enable=True, folder="checkpoint", interval=1),
        dataloader=None,
        model_parts=[program.model],
        optimizers=program.optimizer,
        lr_schedulers=program.scheduler,
        states={"train_state": TrainState()},
        sd_adapter=None,
        base_folder=str(folder),
    )
    manager.save(SAVED)
    manager.close()
    continue_and_record(folder, program)


def resume(folder, name, schedule=None):
    strategy = strategy_for(max_norm=0.0)
    model = strategy.prepare_model(build("llama", seed=1), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.5, betas=(0.5, 0.5), weight_decay=0.9)
    if schedule is None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    else:
        scheduler = strategy.create_scheduler(optimizer, schedule, num_training_steps=STEPS)
    strategy.load_ckpt(model, folder / name, optimizer=optimizer, scheduler=scheduler, trust=True)
    assert (strategy.global_step(model), scheduler.last_epoch) == (SAVED, SAVED)
    losses = []
    for step in range(SAVED, STEPS):
        loss = loss_at(model, step)
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        losses.append(mean_loss(loss))
    assert losses == pytest.approx(json.loads((folder / "losses.json").read_text()), rel=2e-5)
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert decays == ({0.2} if name.startswith("global_step") else {0.2, 0.0})


LIBRARY = {write_with_torchtitan: "torchtitan", write_with_accelerate: "accelerate"}
WRITTEN = {
    write_with_torchtitan: ("checkpoint", "checkpoint/step-3"),
    write_with_accelerate: ("SHARDED_True", "SHARDED_False", "FULL_True"),
    write_with_fsdp1: ("dcp", "per_rank"),
    write_with_flat_parameters: (f"global_step_{SAVED}",),
    write_with_ddp: ("last.pt",),
}


@pytest.mark.parametrize("write", WRITTEN, ids=lambda write: write.__name__.removeprefix("write_with_"))
def test_runs_go_on_from_what_the_libraries_wrote(tmp_path, run_on, write):
    pytest.importorskip(LIBRARY.get(write, "torch"))
    run_on(2, write, folder=tmp_path)
    for name, ranks in zip(WRITTEN[write], (3, 1, 4), strict=False):
        run_on(ranks, resume, folder=tmp_path, name=name)


def test_a_run_of_the_trainer_goes_on(tmp_path, run_on):
    transformers = pytest.importorskip("transformers")
    losses = []

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(dataset or self.train_dataset)

        def compute_loss(self, model, inputs, *arguments, **named):
            loss = super().compute_loss(model, inputs, *arguments, **named)
            losses.append(loss.item())
            return loss

    data = [{"input_ids": ids, "labels": ids} for step in range(STEPS) for ids in samples(step)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        save_steps=SAVED,
        per_device_train_batch_size=12,
        learning_rate=1e-2,
        weight_decay=0.2,
        adam_beta1=0.8,
        adam_beta2=0.9,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=build("llama"), args=arguments, train_dataset=data).train()
    (tmp_path / "losses.json").write_text(json.dumps(losses[SAVED:]))
    run_on(3, resume, folder=tmp_path, name=f"checkpoint-{SAVED}", schedule="linear")
    # The files have other names and another order than the parameters, whose state has numbers.
    assert main(["convert", "--trust", "-q", str(tmp_path / f"checkpoint-{SAVED}"), str(tmp_path / "converted")]) == 0
    run_on(2, resume, folder=tmp_path, name="converted", schedule="linear")


def test_a_run_of_lightning_goes_on(tmp_path, run_on):
    with warnings.catch_warnings(action="ignore"):
        lightning = pytest.importorskip("lightning")  # 2.6.6 was tried
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = build("llama")

        def training_step(self, batch, _index):
            loss = next_token_loss(self.net(input_ids=batch).logits, batch)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            program = Program(self)
            schedule = {"scheduler": program.scheduler, "interval": "step"}
            return {"optimizer": program.optimizer, "lr_scheduler": schedule}

    batches = torch.utils.data.DataLoader(torch.cat([samples(step) for step in range(STEPS)]), batch_size=12)
    for steps in (SAVED, STEPS):
        options = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", devices=1, **options)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(Module(), batches)
        if steps == SAVED:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
    (tmp_path / "losses.json").write_text(json.dumps(losses[-SAVED:]))
    run_on(3, resume, folder=tmp_path, name="saved.ckpt")
