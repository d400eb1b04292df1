"""verl's own worker on our engine: numbers, micro-batches, checkpoints, streams, offloading, and the names of verl."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import json
import os
import re
import shutil
import warnings
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
from helpers.crashes import dies_at, removals_at_once
from helpers.reference import CountCollectives, assert_close, full_grads, full_parameters
from helpers.verl_cpu import batch, on_cpu, samples, worker_of, write_model
from transformers import LlamaForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

from fsdp2_strategy import verify_checkpoint
from fsdp2_strategy.checkpoint import deletion, directory
from fsdp2_strategy.errors import CheckpointError, ConfigError, OffloadError, StepError
from fsdp2_strategy.integrations.verl import EngineConfig, StrategyEngine, engine, names
from fsdp2_strategy.integrations.verl.settings import BACKEND
from fsdp2_strategy.model.offloading import is_offloaded
from fsdp2_strategy.optim.accumulation import LossScale, accumulation_of

PAGE = Path(__file__).parents[1] / "docs" / "coming_from_verl.md"
LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}

CALLED = {
    "_build_lora_module": ("self", "module"),
    "_build_lr_scheduler": ("self", "optimizer"),
    "forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "get_data_parallel_group": ("self",),
    "get_data_parallel_size": ("self",),
}
"""Methods of `FSDPEngineWithLMHead` that `StrategyEngine` calls, and their arguments."""

OVERRIDDEN = {
    "initialize": ("self",),
    "_build_module": ("self",),
    "train_mode": ("self", "kwargs"),
    "eval_mode": ("self", "kwargs"),
    "to": ("self", "device", "model", "optimizer", "grad"),
    "forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "optimizer_zero_grad": ("self",),
    "optimizer_step": ("self",),
    "get_per_tensor_param": ("self", "layered_summon", "base_sync_done", "kwargs"),
    "get_per_tensor_param_shard": ("self", "kwargs"),
    "get_per_tensor_param_delta_shard": ("self", "kwargs"),
    "save_checkpoint": ("self", "local_path", "hdfs_path", "global_step", "max_ckpt_to_keep", "kwargs"),
    "load_checkpoint": ("self", "local_path", "hdfs_path", "del_local_after_load", "kwargs"),
}
"""Methods of `FSDPEngineWithLMHead` that `StrategyEngine` replaces, and their arguments."""

INHERITED = (
    "get_data_parallel_rank",
    "infer_batch",
    "is_mp_src_rank_with_outputs",
    "is_optimizer_offload_enabled",
    "is_param_offload_enabled",
    "disable_adapter",
    "lr_scheduler_step",
    "prepare_model_inputs",
    "prepare_model_outputs",
    "train_batch",
)
"""Methods and properties of `FSDPEngineWithLMHead` that verl calls on `StrategyEngine`, and that stay verl's."""

ATTRIBUTES = {
    "__init__": (
        "_autocast_dtype",
        "_is_lora",
        "_is_offload_optimizer",
        "_is_offload_param",
        "mode",
        "use_remove_padding",
    ),
    "_build_module": ("_verl_strip_modules",),
    "_build_model_optimizer": ("lr_scheduler", "module", "optimizer", "pass_packed_cu_seqlens"),
}
"""Attributes of `FSDPEngineWithLMHead` that `StrategyEngine` reads or sets, by the method of verl's that contains them;
``_verl_strip_modules`` is an attribute of a model."""


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
        reduces = []
        for tokens, defers in ((1000, False), (20, True), (20, False)):
            engine = worker_of(folder, engine={"use_no_sync_for_gradient_accumulation": defers}).engine
            data = batch(0)
            tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=tokens, use_remove_padding=False)
            with engine.train_mode():
                with CountCollectives() as counted:
                    output = engine.forward_backward_batch(data, verl_cpu.loss)
                assert len(output["loss"]) == (1 if tokens == 1000 else 3)
                assert "model_output" in output and not output["model_output"]
                reduces.append(counted.counts["reduce_scatter_base"])
                expected = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
                assert_close(full_grads(engine.module), expected, 1e-5, "gradient")
                with pytest.raises(StepError, match="expected optimizer_step"):
                    engine.forward_backward_batch(data, verl_cpu.loss)
            assert all(p.grad is None for p in engine.module.parameters()), "the context clears them"
        assert reduces[0] and reduces == [reduces[0], reduces[0], 3 * reduces[0]]


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


@pytest.mark.ranks(2)
def test_mini_batches_of_an_actor_are_one_step_each(tmp_path):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        worker = worker_of(folder)
        data = batch(0, num_mini_batch=2, epochs=2, dataloader_kwargs={"shuffle": False})
        found = metrics(worker.train_mini_batch(data))
        assert worker.engine.strategy.global_step(worker.engine.module) == 4
        assert len(found["loss"]) == 4 and found["lr"] == pytest.approx([0.005]), "the schedule steps once"


@pytest.mark.ranks(2)
def test_a_resumed_worker_goes_on_bitwise_and_keeps_the_newest_checkpoints(tmp_path):
    folder, runs = write_model(tmp_path / "model", attention_dropout=0.1), tmp_path / "runs"
    with on_cpu():
        whole = worker_of(folder)
        for step in range(3):
            train(whole, [step])
            path = runs / f"global_step_{step}" / "actor"
            whole.save_checkpoint(str(path), None, step, 2)
            if dist.get_rank() == 0:
                (path / "data_0.pt").write_bytes(b"the position of verl's loader, which its trainer writes here")
        dist.barrier()
        assert sorted(p.name for p in runs.iterdir() if (p / "actor").exists()) == ["global_step_1", "global_step_2"]
        assert verify_checkpoint(path).ok
        expected = train(whole, range(3, 5))
        resumed = worker_of(folder, model={"override_config": {}})
        resumed.load_checkpoint(str(path), None, False)
        assert train(resumed, range(3, 5)) == expected
        final = full_parameters(whole.engine.module)
        for name, parameter in full_parameters(resumed.engine.module).items():
            assert torch.equal(parameter, final[name]), name
        LlamaForCausalLM.from_pretrained(path / "model")
        resumed.load_checkpoint(None)
        for missing, why in (
            (tmp_path / "missing", "missing does not exist."),
            (folder, "has no checkpoint of this package: it contains .*"),
        ):
            expected_text = f"{why} Expected a checkpoint that this engine saved. Set trainer.resume_from_path to one"
            with pytest.raises(CheckpointError, match=expected_text):
                resumed.load_checkpoint(str(missing))
        with pytest.raises(ConfigError, match=r"hdfs_path is 'hdfs://somewhere', expected None.*hdfs_dir to null"):
            resumed.save_checkpoint(str(path), "hdfs://somewhere")
        with pytest.raises(ConfigError, match=r"the arguments \['bucket'\], expected only those of verl 0.9. Install"):
            resumed.engine.load_checkpoint(str(path), bucket="mine")


def train_and_save(folder, path, expected):
    write_model(folder)
    with on_cpu():
        worker = worker_of(folder)
        train(worker, range(2))
        worker.save_checkpoint(str(path))
        found = train(worker, range(2, 4))
        if dist.get_rank() == 0:
            expected.write_text(json.dumps(found))


def load_and_train(folder, path, expected):
    with on_cpu():
        worker = worker_of(folder, engine={"max_token_len_per_gpu": 60})
        worker.load_checkpoint(str(path))
        for now, then in zip(train(worker, range(2, 4)), json.loads(expected.read_text()), strict=True):
            assert now == pytest.approx(then, rel=1e-5)


def test_a_checkpoint_of_two_ranks_goes_on_on_one(run_on, tmp_path):
    files = {"folder": tmp_path / "model", "path": tmp_path / "save" / "actor", "expected": tmp_path / "expected"}
    run_on(2, train_and_save, **files)
    run_on(1, load_and_train, **files)


@pytest.mark.ranks(2)
def test_the_contents_of_a_checkpoint_are_those_of_the_configuration(tmp_path):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        contents = {"save_contents": ["model"], "load_contents": ["model"]}
        worker = worker_of(folder, checkpoint=contents)
        train(worker, range(2))
        worker.save_checkpoint(str(tmp_path / "weights"))
        assert not (tmp_path / "weights" / "optimizer").exists()
        assert json.loads((tmp_path / "weights" / "trainer_state.json").read_text())["scheduler"] is None
        saved = full_parameters(worker.engine.module)
        train(worker, [2])
        learning_rate = worker.engine.lr_scheduler.get_last_lr()
        worker.load_checkpoint(str(tmp_path / "weights"))
        assert all(torch.equal(p, saved[n]) for n, p in full_parameters(worker.engine.module).items())
        assert worker.engine.lr_scheduler.get_last_lr() == learning_rate
        for selected, lacking in ((["model", "optimizer", "extra"], "optimizer', 'extra"), (["extra"], "extra")):
            text = rf"cannot load \['{lacking}'\]: .*weights was saved without them.*Remove .* or load a checkpoint"
            with pytest.raises(CheckpointError, match=text):
                worker_of(folder, checkpoint={"load_contents": selected}).load_checkpoint(str(tmp_path / "weights"))

        worker = worker_of(folder, checkpoint={"load_contents": ["optimizer", "extra"]})
        train(worker, range(2))
        worker.save_checkpoint(str(tmp_path / "all"))
        train(worker, [2])
        before = full_parameters(worker.engine.module)
        worker.load_checkpoint(str(tmp_path / "all"))
        assert all(torch.equal(p, before[n]) for n, p in full_parameters(worker.engine.module).items())
        assert worker.engine.strategy.global_step(worker.engine.module) == 2

        worker = worker_of(folder, checkpoint={"async_save": True})
        for step in range(3):
            train(worker, [step])
            worker.save_checkpoint(str(tmp_path / f"later{step}"), max_ckpt_to_keep=1)
        worker.engine.strategy.wait_for_checkpoint()
        dist.barrier()
        assert verify_checkpoint(tmp_path / "later2").ok and not (tmp_path / "later0").exists()


def save_two(worker, runs, name="actor"):
    """Save two checkpoints as verl's trainers do: each in a folder of its own, or with files of verl within it."""
    for step in range(2):
        path = runs / f"global_step_{step}" / name
        worker.save_checkpoint(str(path), None, step, 1)
        if not name:
            (path / "data_0.pt").write_bytes(b"the position of verl's loader")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["actor", ""], ids=["rlhf", "fine-tuning"])
def test_a_crash_while_an_old_checkpoint_is_deleted_leaves_no_half_that_looks_whole(tmp_path, name):
    runs = tmp_path / "runs"
    with on_cpu(), removals_at_once():
        worker = worker_of(write_model(tmp_path / "model"))
        train(worker, [0])
        save_two(worker, runs, name)
        before = list(worker.engine.saved_paths)
        points = 0
        for point in itertools.count():
            saves = tmp_path / f"{point}"
            shutil.copytree(runs, saves)
            worker.engine.saved_paths[:] = [saves / path.relative_to(runs) for path in before]
            paths = [saves / f"global_step_{step}" / name for step in range(4)]
            within = [(os, "unlink")]  # between two files of a directory that is deleted
            if not dies_at(point, lambda: worker.save_checkpoint(str(paths[2]), None, 2, 1), within):  # noqa: B023
                break
            points += 1
            whole = [path for path in paths if path.exists()]
            assert whole and whole[-1] in paths[1:3] and all(verify_checkpoint(path).ok for path in whole), point
            worker.save_checkpoint(str(paths[3]), None, 3, 1)
            hidden = [p for p in saves.rglob(".*") if p.is_dir() and p.parent in (saves, *(q.parent for q in paths))]
            assert paths[3].exists() and not [p for p in hidden if p.name.endswith(".removed")], (point, hidden)
            shutil.rmtree(saves)
        assert points > 10
        assert [path for path in paths if path.exists()] == [paths[2]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_deleted_by_the_next_save(tmp_path, in_background):
    def rename(path, target, original=Path.rename):
        if Path(target).name == ".actor.removed":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, target)

    def fails(_):
        raise OSError("it cannot be deleted")

    def save(step):
        worker.save_checkpoint(str(runs / f"global_step_{step}" / "actor"), None, step, 1)
        worker.engine.strategy.wait_for_checkpoint()
        dist.barrier()

    def left():
        directory.finish_removals()
        dist.barrier()
        names = sorted(str(p.relative_to(runs)) for p in runs.glob("*/*actor*"))
        dist.barrier()
        return names

    folder, runs = write_model(tmp_path / "model"), tmp_path / "runs"
    with on_cpu():
        worker = worker_of(folder, checkpoint={"async_save": in_background})
        train(worker, [0])
        later = int(in_background)  # then the old ones are deleted at the next save
        for step in range(1 + later):
            save(step)
        with patch.object(Path, "rename", rename), patch.object(directory.logger, "warning") as warn:
            save(1 + later)
        if dist.get_rank() == 0:
            texts = [call.args[0] % call.args[1:] for call in warn.call_args_list]
            assert any("/actor: [Errno 13]" in text and "The next save tries again" in text for text in texts), texts
        assert "global_step_0/actor" in left()
        with patch.object(deletion._Deletion, "run", fails), patch.object(directory.logger, "warning") as warn:
            save(2 + later)
            names = left()
            assert "global_step_0/.actor.removed" in names and "global_step_0/actor" not in names
            if dist.get_rank() == 0:
                assert {call.args[0] for call in warn.call_args_list} == {
                    "cannot delete %s: %s. The next save tries again."
                }
        save(3 + later)
        assert left() == [f"global_step_{step}/actor" for step in range(3, 4 + later)]


@pytest.mark.ranks(2)
def test_a_save_that_failed_in_the_background_does_not_count_as_kept(tmp_path):
    folder, runs = write_model(tmp_path / "model"), tmp_path / "runs"
    with on_cpu():
        worker = worker_of(folder, checkpoint={"async_save": True})
        train(worker, [0])
        worker.save_checkpoint(str(runs / "0"), None, 0, 1)
        worker.engine.strategy.wait_for_checkpoint()
        with patch.object(directory, "commit", side_effect=OSError("the disk is full")):
            for step in (1, 2):
                worker.save_checkpoint(str(runs / f"{step}"), None, step, 1)
                with pytest.raises(CheckpointError, match="the disk is full"):
                    worker.engine.strategy.wait_for_checkpoint()
        dist.barrier()
        assert verify_checkpoint(runs / "0").ok, "the only complete one"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded", "expected"),
    [
        (["model", "optimizer"], ["model", "optimizer"], 2.0**9),
        (["model", "optimizer", "extra"], ["model", "optimizer", "extra"], 2.0**9),
        (["model", "optimizer", "extra"], ["model", "extra"], 2.0**16),
        (["model", "extra"], ["model", "extra"], 2.0**16),
    ],
)
def test_the_loss_scale_of_float16_belongs_to_the_optimizer(tmp_path, saved, loaded, expected):
    folder = write_model(tmp_path / "model")
    options = {"engine": {"mixed_precision": {"param_dtype": "fp16"}}}
    with on_cpu():
        worker = worker_of(folder, checkpoint={"save_contents": saved}, **options)
        accumulation_of(worker.engine.module).scale = LossScale(2.0**9, good_steps=3)
        train(worker, [0])
        worker.save_checkpoint(str(tmp_path / "saved"))
        content = json.loads((tmp_path / "saved" / "trainer_state.json").read_text())["loss_scale"]
        assert content == ({"value": 2.0**9, "interval": 2000, "good_steps": 4} if "optimizer" in saved else None)
        resumed = worker_of(folder, checkpoint={"load_contents": loaded}, **options)
        resumed.load_checkpoint(str(tmp_path / "saved"))
        assert accumulation_of(resumed.engine.module).scale.value == expected
        if expected == 2.0**9 and "extra" in saved:
            assert train(resumed, [1]) == train(worker, [1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offloads", [False, True], ids=["resident", "offloaded"])
def test_the_generator_yields_the_weights_of_the_unsharded_model(tmp_path, offloads):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        worker = worker_of(folder, engine={"param_offload": offloads})
        stream, adapter = worker.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        expected = LlamaForCausalLM.from_pretrained(folder).state_dict()
        assert iter(stream) is stream and adapter is None
        assert_equal(dict(stream), expected)
        half = worker_of(folder, engine={"mixed_precision": None}).engine
        assert_equal(dict(half.get_per_tensor_param()[0]), {n: t.bfloat16() for n, t in expected.items()})
        with pytest.raises(ConfigError, match="get_per_tensor_param_shard is not supported"):
            worker.engine.prime_delta_snapshots()


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.ranks(2)
def test_adapters_are_trained_and_streamed_apart_from_the_base(tmp_path):
    folder = write_model(tmp_path / "model")
    base = LlamaForCausalLM.from_pretrained(folder).state_dict()
    with on_cpu():
        worker = worker_of(folder, model=LORA)
        plain = worker_of(folder).infer_batch(batch(9))["log_probs"].values()
        train(worker, range(3))
        adapted = worker.infer_batch(batch(9))["log_probs"].values()
        assert (adapted - plain).abs().max() > 1e-4
        disabled = worker.infer_batch(batch(9, no_lora_adapter=True))["log_probs"].values()
        torch.testing.assert_close(disabled, plain)

        weights, config = worker.engine.get_per_tensor_param(base_sync_done=False)
        weights = {name.replace(".base_layer", ""): (name, tensor) for name, tensor in weights}
        assert_equal({name: tensor for name, (_, tensor) in weights.items()}, base)
        assert weights["model.layers.0.self_attn.q_proj.weight"][0].endswith("q_proj.base_layer.weight")
        assert config["r"] == 2 and config["peft_type"].value == "LORA"
        stream, config = worker.engine.get_per_tensor_param(base_sync_done=True)
        adapter = dict(stream)
        assert {name.rsplit(".", 2)[1] for name in adapter} == {"lora_A", "lora_B"} and len(adapter) == 3 * 2 * 2

        worker.save_checkpoint(str(tmp_path / "full"))
        merged = worker_of(folder, model=LORA | {"lora": {"merge": True}})
        merged.load_checkpoint(str(tmp_path / "full"))
        stream, config = merged.engine.get_per_tensor_param(base_sync_done=True)
        assert config is None
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        product = 2 * adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
        key = "model.layers.0.self_attn.q_proj.weight"
        torch.testing.assert_close(dict(stream)[key], base[key] + product)

        alone = worker_of(folder, model=LORA, checkpoint={"save_lora_only": True})
        train(alone, range(3))
        alone.save_checkpoint(str(tmp_path / "alone"))
        assert not (tmp_path / "alone" / "model").exists() and (tmp_path / "full" / "model").exists()


@pytest.mark.ranks(2)
def test_training_goes_on_from_the_adapters_of_a_folder(tmp_path):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        worker = worker_of(folder, model=LORA)
        train(worker, range(2))
        worker.engine.strategy.save_model(worker.engine.module, None, tmp_path / "adapters", merge_adapters=False)
        expected = worker.infer_batch(batch(9))["log_probs"].values()
        again = worker_of(folder, model=LORA | {"lora_adapter_path": str(tmp_path / "adapters")})
        torch.testing.assert_close(again.infer_batch(batch(9))["log_probs"].values(), expected)
        trained = [name for name, p in again.engine.module.named_parameters() if p.requires_grad]
        assert len(trained) == 12 and len(train(again, [2])) == 1


@pytest.mark.ranks(2)
def test_a_reset_builds_the_same_model_anew(tmp_path):
    folder = write_model(tmp_path / "model", attention_dropout=0.1)  # the random state advances
    with on_cpu():
        worker = worker_of(folder, model=LORA)
        expected = train(worker, range(4))
        worker.reset()
        assert train(worker, range(4)) == expected


@pytest.mark.ranks(2)
def test_streams_of_adapters_have_the_names_of_verls_own_engine(tmp_path):
    folder = write_model(tmp_path / "model")
    found = {}
    with on_cpu(VERL_ENGINE_DEVICE="cuda"):
        for strategy in (BACKEND, "fsdp2"):
            engine = worker_of(folder, strategy=strategy, model=LORA).engine
            streams = [engine.get_per_tensor_param(base_sync_done=done) for done in (False, True)]
            found[strategy] = [(dict(stream), config) for stream, config in streams]
    for (ours, our_config), (theirs, their_config) in zip(found[BACKEND], found["fsdp2"], strict=True):
        assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
        assert our_config == their_config
    assert_equal(found[BACKEND][0][0], found["fsdp2"][0][0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"model": {"use_fused_kernels": True}}, 1e-5),
        ({"model": {"enable_gradient_checkpointing": True}}, 1e-6),
        ({"engine": {"offload_policy": True}}, 1e-6),
        ({"engine": {"fsdp_size": 1}}, 1e-5),
        ({"engine": {"reshard_after_forward": False}}, 1e-6),
        ({"engine": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}}, 1e-6),
        ({"engine": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}}, 1e-5),
        ({"engine": {"mixed_precision": None}}, 2e-2),
        ({"engine": {"mixed_precision": {"param_dtype": "fp16"}}}, 2e-2),
    ],
    ids=lambda value: next(iter(next(iter(value.values())))) if isinstance(value, dict) else "",
)
def test_settings_that_change_no_result_change_none(tmp_path, options, tolerance):
    folder = write_model(tmp_path / "model")
    forward = LlamaForCausalLM.forward  # verl replaces it for fused kernels
    with on_cpu():
        expected = train(worker_of(folder), range(3))
        try:
            found = train(worker_of(folder, **options), range(3))
        finally:
            LlamaForCausalLM.forward = forward
    is_half = tolerance > 1e-3  # then the first steps of fp16 are skipped, until the loss scale fits
    for now, then in zip(found, expected, strict=True):
        assert now[: 1 if is_half else 3] == pytest.approx(then[: 1 if is_half else 3], rel=tolerance)


@pytest.mark.ranks(2)
def test_contexts_load_and_offload_what_the_configuration_says_and_change_no_number(tmp_path):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        expected = train(worker_of(folder), range(3))
        worker = worker_of(folder, engine={"param_offload": True, "optimizer_offload": True})
        engine = worker.engine

        def offloaded():
            return is_offloaded(engine.module), is_offloaded(engine.optimizer)

        assert offloaded()[0] and engine.is_param_offload_enabled and engine.is_optimizer_offload_enabled
        assert train(worker, range(3)) == expected
        assert offloaded() == (True, True)
        with engine.eval_mode():
            assert offloaded() == (False, True) and engine.mode == "eval" and not engine.module.training
        with engine.train_mode():
            assert offloaded() == (False, False) and engine.mode == "train" and engine.module.training
        assert offloaded() == (True, True) and engine.mode is None
        with engine.train_mode(disable_auto_offload=True), pytest.raises(OffloadError, match="reload_model"):
            engine.forward_backward_batch(prepared(batch(0)), verl_cpu.loss)
        engine.to("cpu", model=True, optimizer=False, grad=True)
        assert offloaded() == (False, True), "verl's device is the CPU here"
        with patch("fsdp2_strategy.integrations.verl.names.get_device_name", lambda: "cuda"):
            engine.to("cpu", model=True, optimizer=True, grad=True)
            assert offloaded() == (True, True)
            engine.to("cuda", model=False, optimizer=True, grad=False)
            assert offloaded() == (True, False)
            with pytest.raises(AssertionError, match="along with model"):
                engine.to("cpu", model=False, grad=True)


def prepared(data):
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=1000, use_remove_padding=False)
    return data


@pytest.mark.ranks(2)
def test_a_reference_model_infers_and_has_no_optimizer(tmp_path):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        expected = worker_of(folder).infer_batch(batch(9))
        worker = worker_of(folder, engine={"forward_only": True, "param_offload": True})
        assert worker.engine.optimizer is None and is_offloaded(worker.engine.module)
        torch.testing.assert_close(worker.infer_batch(batch(9))["log_probs"].values(), expected["log_probs"].values())
        assert is_offloaded(worker.engine.module)


@pytest.mark.ranks(2)
def test_ranks_and_sizes_are_those_of_the_process_group(tmp_path):
    folder = write_model(tmp_path / "model")
    with on_cpu():
        engine = worker_of(folder).engine
        group = engine.get_data_parallel_group()
        assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (dist.get_rank(), 2)
        assert dist.get_world_size(group) == 2 and engine.is_mp_src_rank_with_outputs()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": {"ulysses_sequence_parallel_size": 2}}, "ulysses_sequence_parallel_size"),
        ({"engine": {"model_dtype": "bf16"}}, "model_dtype"),
        ({"engine": {"full_determinism": True}}, "full_determinism"),
        ({"engine": {"wrap_policy": {"min_num_params": 10}}}, "min_num_params"),
        ({"model": {"use_liger": True}}, "use_liger"),
        ({"model": {"enable_activation_offload": True}}, "enable_activation_offload"),
        ({"model": {"tiled_mlp": {"enabled": True}}}, "tiled_mlp"),
        ({"optimizer": {"clip_grad": None}}, "clip_grad"),
        ({"checkpoint": {"save_contents": ["optimizer"]}}, "with model or hf_model in save_contents. .* add model to"),
        ({"checkpoint": {"load_contents": ["everything"]}}, "everything.* Remove other names"),
    ],
)
def test_settings_that_this_package_lacks_are_errors(tmp_path, options, named):
    folder = write_model(tmp_path / "model")
    with on_cpu(), pytest.raises(ConfigError, match=named):
        worker_of(folder, **options)


# --- verl's trainers and configurations ------------------------------------------------------------------------------


def overrides(kind):
    """Return the changes of the page to one of verl's configurations, as its command line takes them."""
    (diff,) = re.findall(rf"```diff\n( python3 -m verl.trainer.{kind}.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(diff.splitlines()) < 15
    return [line[1:].strip(" \\") for line in diff.splitlines() if line.startswith("+")]


def sft_configuration(folder, output, **changes):
    from hydra import compose, initialize_config_module

    settings = {
        "model.path": folder,
        "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "eager",
        "engine.use_torch_compile": False,
        "+engine.mixed_precision.param_dtype": "fp32",
        "optim.lr": 1e-2,
        "data.train_files": output.parent / "train.parquet",
        "data.train_batch_size": 8,
        "data.max_token_len_per_gpu": 64,
        "data.num_workers": 0,
        "trainer.default_local_dir": output,
        "trainer.total_epochs": 2,
        "trainer.save_freq": 2,
        "trainer.logger": "[file]",
        "trainer.device": "cpu",
    } | changes
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", [*overrides("sft_trainer"), *(f"{k}={v}" for k, v in settings.items())])


def run_trainer(folder, output, **changes):
    """Run verl's own trainer for supervised fine-tuning, and return the losses of rank 0 and its engine."""
    from verl.trainer.sft_trainer import SFTTrainer

    found = []
    with patch("verl.trainer.sft_trainer.Tracking") as tracking:
        tracking.return_value.log.side_effect = lambda data, step: found.append((step, data["train/loss"]))
        trainer = SFTTrainer(sft_configuration(folder, output, **changes))
        trainer.fit()
    return found, trainer.engine


@pytest.mark.ranks(2)
def test_verls_own_trainer_runs_with_the_changes_of_the_page_and_resumes_bitwise(tmp_path):
    folder = write_model(tmp_path / "model")
    verl_cpu.write_conversations(tmp_path / "train.parquet")
    with on_cpu():
        expected, engine = run_trainer(folder, tmp_path / "whole")
        assert isinstance(engine, StrategyEngine)
        assert verify_checkpoint(tmp_path / "whole" / "global_step_2").ok
        run_trainer(folder, tmp_path / "run", **{"trainer.total_training_steps": 2})
        found, engine = run_trainer(folder, tmp_path / "run")
        if dist.get_rank() == 0:
            assert [step for step, _ in expected] == list(range(1, 7))
            assert found == expected[2:]


@pytest.mark.ranks(2)
def test_a_trainer_that_resumes_from_an_older_checkpoint_replaces_the_newer_ones(tmp_path):
    folder = write_model(tmp_path / "model")
    verl_cpu.write_conversations(tmp_path / "train.parquet")
    with on_cpu():
        expected, _ = run_trainer(folder, tmp_path / "run")
        older = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": tmp_path / "run" / "global_step_2"}
        found, _ = run_trainer(folder, tmp_path / "run", **older)
        if dist.get_rank() == 0:
            assert found == expected[2:]
        for step in (2, 4, 6):
            saved = tmp_path / "run" / f"global_step_{step}"
            assert verify_checkpoint(saved).ok and (saved / f"data_{dist.get_rank()}.pt").exists()
        with pytest.raises(ConfigError, match=r"async_save is True, expected False .* Remove checkpoint\.async_save"):
            run_trainer(folder, tmp_path / "async", **{"+checkpoint.async_save": True})


def hybrid_worker(folder, changes):
    """Return verl's worker of actor, rollout and reference, whose rollout records the weights."""
    from hydra import compose, initialize_config_module
    from verl.workers.engine_workers import ActorRolloutRefWorker

    settings = {
        "model.path": folder,
        "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "eager",
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_gpu": 24,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.1,
        "actor.optim.lr": 1e-2,
        "rollout.log_prob_max_token_len_per_gpu": 24,
        "rollout.name": "vllm",
        "rollout.free_cache_engine": False,
    }
    for role in ("actor", "ref"):
        settings[f"{role}.fsdp_config.use_torch_compile"] = False
        settings[f"{role}.fsdp_config.param_offload"] = True
        settings[f"+{role}.fsdp_config.mixed_precision.param_dtype"] = "fp32"
    settings = [f"{'+' * k.startswith('+')}actor_rollout_ref.{k.lstrip('+')}={v}" for k, v in settings.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*settings, *changes]).actor_rollout_ref
    with patch("verl.workers.engine_workers.get_rollout_class", lambda *_: verl_cpu.RecordingRollout):
        worker = ActorRolloutRefWorker(config, role="actor_rollout_ref")
        worker.init_model()
    return worker


@pytest.mark.ranks(2)
def test_verls_worker_of_actor_rollout_and_reference_equals_itself_on_its_own_engine(tmp_path):
    folder = write_model(tmp_path / "model")
    found = {}
    with on_cpu(VERL_ENGINE_DEVICE="cuda"):
        for name, changes in ((BACKEND, overrides("main_ppo")), ("fsdp2", ["actor_rollout_ref.actor.strategy=fsdp2"])):
            worker = hybrid_worker(folder, changes)
            assert isinstance(worker.actor.engine, StrategyEngine) == isinstance(worker.ref.engine, StrategyEngine)
            assert isinstance(worker.actor.engine, StrategyEngine) == (name == BACKEND)
            steps = [verl_cpu.ppo_step(worker, step) for step in range(3)]
            if name == BACKEND:
                assert is_offloaded(worker.actor.engine.module) and is_offloaded(worker.ref.engine.module)
            asyncio.run(worker.update_weights(global_steps=3, mode="naive"))
            found[name] = steps, worker.rollout.updates
    (ours, [(weights, _, _)]), (theirs, [(expected, _, _)]) = found[BACKEND], found["fsdp2"]
    for now, then in zip(ours, theirs, strict=True):
        assert now.keys() == then.keys()
        assert len(now["grad_norm"]) == 2
        for key in ("loss", "grad_norm", "actor/pg_loss", "kl_loss", "actor/entropy_loss"):
            assert now[key] == pytest.approx(then[key], rel=1e-4, abs=1e-6), key
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_an_actor_and_a_reference_get_the_engine_with_the_changes_of_the_page():
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*overrides("main_ppo"), "actor_rollout_ref.actor.ppo_micro_batch_size=1"])
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.engine.strategy == BACKEND == config.actor_rollout_ref.ref.strategy
    assert config.actor_rollout_ref.model.external_lib == "fsdp2_strategy.integrations.verl"


# --- the names of verl, and the page ---------------------------------------------------------------------------------


def arguments(function):
    return tuple(inspect.signature(function).parameters)


def test_the_names_of_verl_that_the_engine_relies_on_are_those_of_the_installed_version():
    for name, expected in {**CALLED, **OVERRIDDEN}.items():
        assert arguments(getattr(FSDPEngineWithLMHead, name)) == expected, name
    for method, attributes in ATTRIBUTES.items():
        code = getattr(FSDPEngineWithLMHead, method).__code__
        assert set(attributes) <= {*code.co_names, *map(str, code.co_consts)}, method
    own = {name for name in vars(StrategyEngine) if not name.startswith("__") and hasattr(FSDPEngineWithLMHead, name)}
    assert own == set(OVERRIDDEN)
    assert arguments(names.prepare_micro_batches)[:2] == ("data", "dp_group")
    assert "same_micro_num_in_dp" in arguments(names.prepare_micro_batches)
    assert arguments(names.postprocess_batch_func) == ("output_lst", "indices", "data")
    assert arguments(names.build_optimizer) == ("parameters", "config")
    assert arguments(names.replace_lora_wrapper) == ("k", "peft_config")
    assert arguments(EngineRegistry.register) == ("model_type", "backend", "device", "vendor")
    assert arguments(names.apply_monkey_patch)[:4] == (
        "model",
        "ulysses_sp_size",
        "use_remove_padding",
        "use_fused_kernels",
    )


def test_each_method_of_verls_engine_is_served():
    declared = {name for name, value in vars(BaseEngine).items() if not name.startswith("_") and callable(value)}
    declared |= {name for name, value in vars(BaseEngine).items() if isinstance(value, property)}
    own = {"prime_delta_snapshots"}  # calls get_per_tensor_param_shard, which raises
    assert declared == ({*OVERRIDDEN, *INHERITED, *CALLED} | own) & declared
    for name in declared:
        inherited = getattr(StrategyEngine, name) is getattr(BaseEngine, name)
        assert not inherited or name in {"train_batch", "infer_batch", *own}, name


def test_the_engine_has_fewer_than_150_lines_of_code():
    source = Path(engine.__file__).read_text()
    documented = set()
    for node in ast.walk(ast.parse(source)):
        for each in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                documented |= set(range(each.lineno, each.end_lineno + 1))
    lines = [line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in documented]
    assert 100 < len([line for line in lines if line and not line.startswith("#")]) < 150


def test_the_engine_is_registered_for_both_devices_and_has_its_own_configuration():
    for device in ("cpu", "cuda"):
        with patch.dict("os.environ", VERL_ENGINE_DEVICE=device):
            assert EngineRegistry.get_engine_cls("language_model", BACKEND) is StrategyEngine
    assert EngineConfig().strategy == BACKEND
    with pytest.raises(ConfigError, match=r"expected 'fsdp2_strategy'\. Set engine.strategy to it, or leave out"):
        EngineConfig(strategy="fsdp2")


def test_the_page_lists_the_versions_the_stubs_and_what_serves_each_method():
    page = PAGE.read_text()
    for package in ("verl", "tensordict", "ray"):
        assert f"| {package} | {version(package)} |" in page, "run the tests with this version, and add the row"
    for name, text in verl_cpu.STUBS.items():
        assert f"| {name} | {text} |" in page, f"add the row of {name}"
    served = set(re.findall(r"`(\w+)[(`]", page)) | {"get_data_parallel_size", "get_data_parallel_group"}
    methods = {name for name in vars(BaseEngine) if not name.startswith("_")} - {"delta_pin_snapshots"}
    assert methods <= served, methods - served
