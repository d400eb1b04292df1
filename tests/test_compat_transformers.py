"""transformers' own Trainer and TRL's trainers on our strategy: numbers, checkpoints, resumes, and refusals."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import trainers
from helpers.reference import CountCollectives, full_parameters
from helpers.trainers import KINDS, fsdp2_on_cpu, launched, logged, trainer_of, write_model
from helpers.worlds import some
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fsdp2_strategy import CheckpointError, list_checkpoints, verify_checkpoint
from fsdp2_strategy.compat.transformers import FSDP2Trainer, with_fsdp2
from fsdp2_strategy.errors import ConfigError

pytest.importorskip("trl")


def published(cls):
    return cls


def run(kind, wrap, folder, output, *, resume=None, variables=None, **arguments):
    with launched(**(variables or {})):
        trainer = trainer_of(kind, wrap, folder, output, **arguments)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lora", some([False, True], [False]), ids=["full", "lora"])
@pytest.mark.parametrize("kind", some(KINDS, ["plain", "sft", "grpo"]))
def test_a_trainer_computes_what_it_computes_without_sharding(tmp_path, kind, lora):
    model = write_model(tmp_path / "model")
    expected = run(kind, published, model, tmp_path / "ddp", lora=lora, max_steps=10)
    ours = run(kind, with_fsdp2, model, tmp_path / "ours", lora=lora, max_steps=10)
    assert len(logged(ours)) == 10
    for now, then in zip(logged(ours), logged(expected), strict=True):
        assert now == pytest.approx(then, rel=1e-5, abs=1e-6)
    weights = dict(ours.accelerator.unwrap_model(ours.model).named_parameters())
    full = full_parameters(ours.model)
    for name, parameter in expected.accelerator.unwrap_model(expected.model).named_parameters():
        assert weights[name].requires_grad == parameter.requires_grad
        torch.testing.assert_close(full[name], parameter.detach(), rtol=2e-4, atol=2e-5)


ACCELERATE = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
ACCELERATE |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_computes_what_it_computes_with_accelerates_fsdp2(tmp_path, kind, lora):
    model = write_model(tmp_path / "model")
    with launched(**ACCELERATE):
        with fsdp2_on_cpu():
            theirs = trainer_of(kind, published, model, tmp_path / "theirs", lora=lora, max_steps=10)
        assert theirs.is_fsdp_enabled
        theirs.train()
    ours = run(kind, with_fsdp2, model, tmp_path / "ours", lora=lora, max_steps=10)
    for now, then in zip(logged(ours), logged(theirs), strict=True):
        assert now == pytest.approx(then, rel=1e-5, abs=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", some(KINDS, ["plain", "grpo"]))
def test_a_resumed_trainer_goes_on_bitwise(tmp_path, kind, lora):
    model = write_model(tmp_path / "model", attention_dropout=0.1)
    options = {"save_strategy": "steps", "save_steps": 4, "lora": lora, "weight_decay": 0.1}
    whole = run(kind, with_fsdp2, model, tmp_path / "run", **options)
    assert [c.tag for c in list_checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-6"]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    dist.barrier()
    resumed = run(kind, with_fsdp2, model, tmp_path / "run", resume=True, **options)
    assert resumed.state.global_step == 6
    assert logged(resumed) == logged(whole)
    expected = full_parameters(whole.model)
    for name, parameter in full_parameters(resumed.model).items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.ranks(2)
def test_checkpoints_are_folders_of_the_trainer_committed_and_rotated(tmp_path):
    model = write_model(tmp_path / "model")
    wrap = lambda cls: with_fsdp2(cls, async_save=True)  # noqa: E731
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = run("sft", wrap, model, tmp_path / "run", **options)
    checkpoints = list_checkpoints(tmp_path / "run")
    assert [c.tag for c in checkpoints] == ["checkpoint-5", "checkpoint-6"]
    last = checkpoints[-1].path
    assert get_last_checkpoint(str(tmp_path / "run")) == str(last)
    assert verify_checkpoint(last).ok
    assert {p.name for p in last.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
        "training_args.json",
        "training_state",
    }
    state = json.loads((last / "trainer_state.json").read_text())
    assert state["global_step"] == 6 and len(state["log_history"]) == 6
    inputs = torch.arange(4, 12)[None]
    with torch.no_grad():
        expected = trainer.model(input_ids=inputs).logits
        torch.testing.assert_close(LlamaForCausalLM.from_pretrained(last)(input_ids=inputs).logits, expected)
        trainer.save_model(str(tmp_path / "final"))
        final = LlamaForCausalLM.from_pretrained(tmp_path / "final")
        torch.testing.assert_close(final(input_ids=inputs).logits, expected)


@pytest.mark.ranks(2)
def test_adapters_are_saved_as_peft_does(tmp_path):
    from peft import PeftModel

    model = write_model(tmp_path / "model")
    trainer = run("sft", with_fsdp2, model, tmp_path / "run", lora=True, save_strategy="steps", save_steps=6)
    trainer.save_model(str(tmp_path / "final"))
    inputs = torch.arange(4, 12)[None]
    with torch.no_grad():
        expected = trainer.model(input_ids=inputs).logits
        for folder in (tmp_path / "run" / "checkpoint-6", tmp_path / "final"):
            assert not (folder / "model.safetensors").exists()
            loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), folder)
            torch.testing.assert_close(loaded(input_ids=inputs).logits, expected)


@pytest.mark.ranks(2)
def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path):
    model = write_model(tmp_path / "model")
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "save_total_limit": 1, "max_steps": 4, "eval_on_start": True}
    options |= {"metric_for_best_model": "loss", "greater_is_better": False}
    folders = {}
    for name, wrap in (("ours", with_fsdp2), ("published", published)):
        rising = iter([4.0, 3.0, 1.0, 2.0, 5.0])

        def evaluated(cls, wrap=wrap, rising=rising):
            class Evaluated(cls):
                def evaluate(self, *args, **kwargs):
                    super().evaluate(*args, **kwargs)
                    return {"eval_loss": next(rising)}

            return wrap(Evaluated)

        trainer = run("plain", evaluated, model, tmp_path / name, **options)
        assert trainer.state.best_model_checkpoint == str(tmp_path / name / "checkpoint-2")
        folders[name] = trainer
    best = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-2")
    for name, parameter in full_parameters(folders["ours"].model).items():
        assert torch.equal(parameter, best.get_parameter(name)), name
    assert len(logged(folders["ours"])) == 4


@pytest.mark.ranks(2)
def test_evaluation_before_and_after_training_gives_the_trainers_own_values(tmp_path):
    model = write_model(tmp_path / "model")
    values = {"ours": [], "published": []}
    for name, wrap in (("ours", with_fsdp2), ("published", published)):
        with launched():
            if name == "published":  # after an evaluation, it trains without a reduction of gradients
                trainer = trainer_of("plain", wrap, model, tmp_path / "before", eval_strategy="epoch")
                values[name].append(trainer.evaluate()["eval_loss"])
            trainer = trainer_of("plain", wrap, model, tmp_path / name, eval_strategy="epoch")
            if name == "ours":
                values[name].append(trainer.evaluate()["eval_loss"])
            trainer.train()
            values[name].append(trainer.evaluate()["eval_loss"])
            values[name].append(torch.tensor(trainer.predict(trainer.eval_dataset).predictions))
    assert values["ours"][:2] == pytest.approx(values["published"][:2], rel=1e-5)
    torch.testing.assert_close(values["ours"][2], values["published"][2], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_recomputed_activations_and_half_precision_train(tmp_path):
    model = write_model(tmp_path / "model")
    plain = logged(run("sft", with_fsdp2, model, tmp_path / "a", gradient_checkpointing=False))
    assert logged(run("sft", with_fsdp2, model, tmp_path / "b", gradient_checkpointing=True)) == plain
    half = run("sft", with_fsdp2, model, tmp_path / "c", bf16=True)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}, "master weights"
    for now, then in zip(logged(half), plain, strict=True):
        assert now == pytest.approx(then, rel=0.02)


@pytest.mark.ranks(2)
def test_a_step_makes_one_all_reduce_and_gathers_each_unit_as_often_as_a_loop_of_ones_own(tmp_path):
    counts = []

    class Counting(transformers.TrainerCallback):
        def on_step_begin(self, *_args, **_kwargs):
            self.counted = CountCollectives()
            self.counted.__enter__()

        def on_pre_optimizer_step(self, *_args, **_kwargs):
            self.clipped = dict(self.counted.counts)

        def on_optimizer_step(self, *_args, **_kwargs):
            self.counted.__exit__(None, None, None)
            counts.append((self.clipped, dict(self.counted.counts)))

    model = write_model(tmp_path / "model")
    with launched():
        trainer = trainer_of("plain", with_fsdp2, model, tmp_path / "run")
        trainer.add_callback(Counting())
        trainer.train()
    # The root, three layers, embedding and head; two micro-batches.
    expected = {"allgather_base": 2 * (6 + 5), "reduce_scatter_base": 2 * 6, "allreduce": 1}
    for clipped, stepped in counts:
        assert clipped == stepped, "the step needs no further collective"
        assert {name: stepped.get(name) for name in expected} == expected


def launch(ranks, kind, model, output, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [trainers.__file__, kind, str(model), str(output), json.dumps(options)]
    path = os.pathsep.join((str(Path(trainers.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280, check=False
    )


def samples_by_step(output):
    seen = {}
    for file in sorted(output.parent.glob(f"{output.name}-rank*.jsonl")):
        for line in file.read_text().splitlines():
            step, rows = json.loads(line)
            seen.setdefault(step, []).extend(map(tuple, rows))
    return {step: sorted(rows) for step, rows in seen.items()}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_a_run_killed_within_an_epoch_goes_on_with_the_same_samples_on_any_number_of_ranks(kind, tmp_path):
    model = write_model(tmp_path / "model")
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7}  # an epoch has four steps of 12 samples
    micro_batches = {2: 3, 1: 6, 3: 2}
    batch = {ranks: {"gradient_accumulation_steps": count} for ranks, count in micro_batches.items()}
    whole = launch(2, kind, model, tmp_path / "whole", **options, **batch[2])
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = launch(2, kind, model, tmp_path / "killed", **options, **batch[2], kill_at=3)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr
    assert [c.tag for c in list_checkpoints(tmp_path / "killed")] == ["checkpoint-2"]
    expected = json.loads((tmp_path / "whole" / "losses.json").read_text())
    samples = samples_by_step(tmp_path / "whole")
    for ranks in (2, 1, 3):
        output = tmp_path / f"on{ranks}"
        shutil.copytree(tmp_path / "killed", output)
        resumed = launch(ranks, kind, model, output, **options, **batch[ranks], resume=True)
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert samples_by_step(output) == {step: rows for step, rows in samples.items() if step > 2}
        losses = json.loads((output / "losses.json").read_text())
        if ranks == 2:
            assert losses == expected
        for now, then in zip(losses, expected, strict=True):
            assert now == pytest.approx(then, rel=1e-5)
    final = LlamaForCausalLM.from_pretrained(tmp_path / "on2" / "final")
    for name, parameter in LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "final").named_parameters():
        assert torch.equal(parameter, final.get_parameter(name)), name


class Loaded:
    """Stands in for vLLM's engine: keeps what its loader is given."""

    def __init__(self):
        self.weights = {}
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def load_weights(self, weights):
        self.weights |= {name: tensor.clone() for name, tensor in weights}

    def reset_prefix_cache(self):
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_trls_vllm_engine_gets_full_weights_with_adapters_merged(tmp_path, lora):
    from trl.generation.vllm_generation import VLLMGeneration

    model = write_model(tmp_path / "model")
    with launched():
        trainer = trainer_of("grpo", with_fsdp2, model, tmp_path / "run", lora=lora)
        engine = object.__new__(VLLMGeneration)  # its constructor starts vLLM
        vars(engine).update(
            model=trainer.model, accelerator=trainer.accelerator, mode="colocate", enable_sleep_mode=False, llm=Loaded()
        )
        trainer.vllm_generation = engine
        trainer.train()
        engine.sync_weights()
    trainer.strategy.save_model(trainer.model, None, tmp_path / "merged")
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert engine.llm.weights.keys() == expected.keys()
    for name, tensor in engine.llm.weights.items():
        torch.testing.assert_close(tensor, expected[name])


REFUSED = {
    "fsdp": ({"fsdp": "full_shard"}, {}, r"set fsdp.*Leave them out"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}, r"set auto_find_batch_size"),
    "optim": ({"optim": "adafactor"}, {}, r"optim is 'adafactor', expected one of adamw_torch"),
    "environment": ({}, {"ACCELERATE_USE_FSDP": "true"}, r"ACCELERATE_USE_FSDP"),
    "full_eval": ({"bf16_full_eval": True}, {}, r"bf16_full_eval"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_contradict_it_are_errors(tmp_path, name):
    arguments, variables, message = REFUSED[name]
    model = write_model(tmp_path / "model")
    with launched(**variables), pytest.raises((ConfigError, ValueError), match=message):
        trainer_of("plain", with_fsdp2, model, tmp_path / "run", **arguments)


def test_options_that_the_trainer_sets_or_that_are_unknown_are_errors():
    with pytest.raises(ConfigError, match="max_norm was passed, expected max_grad_norm of TrainingArguments"):
        with_fsdp2(Trainer, max_norm=1.0)
    with pytest.raises(ConfigError, match=r"shard_sizes is unknown.*Did you mean 'shard_size'"):
        with_fsdp2(Trainer, shard_sizes=2)
    with pytest.raises(ConfigError, match=r"not a subclass of transformers.Trainer"):
        with_fsdp2(TrainingArguments)


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_trainer_or_batch_size_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    run("plain", published, model, tmp_path / "other", **saves)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of this package.*load them with from_pretrained"):
        run("plain", with_fsdp2, model, tmp_path / "other", resume=True, **saves)
    run("plain", with_fsdp2, model, tmp_path / "own", **saves)
    with pytest.raises(CheckpointError, match=r"had 8 samples, now it has 12.*gradient_accumulation_steps"):
        run("plain", with_fsdp2, model, tmp_path / "own", resume=True, gradient_accumulation_steps=3, **saves)
    run(
        "plain",
        with_fsdp2,
        model,
        tmp_path / "own",
        resume=True,
        gradient_accumulation_steps=3,
        **saves | {"ignore_data_skip": True, "max_steps": 3},
    )


OWN = ("_processor", "_stream_weights_to")


def test_what_is_overridden_are_methods_of_the_installed_trainer():
    for name, method in vars(FSDP2Trainer).items():
        if not inspect.isfunction(method) or name.startswith("__") or name in OWN:
            continue
        theirs = getattr(Trainer, name, None)
        assert theirs is not None or name == "_has_mixed_mesh_grads", f"Trainer has no {name}"
        if theirs is not None:
            own = inspect.signature(method).parameters
            takes_any = any(p.kind is p.VAR_POSITIONAL for p in own.values())
            assert takes_any or list(own) == list(inspect.signature(theirs).parameters), name
    assert hasattr(transformers.trainer, "Accelerator")
    from trl.generation.vllm_generation import VLLMGeneration

    assert list(inspect.signature(VLLMGeneration._iter_named_params).parameters) == ["self"]
