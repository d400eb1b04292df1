"""transformers' own Trainer and TRL's trainers on our strategy: numbers, checkpoints, resumes, and refusals."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import trainers
from helpers.reference import CountCollectives, full, full_parameters
from helpers.trainers import KINDS, fsdp2_on_cpu, launched, logged, trainer_of, write_model
from helpers.worlds import some, some_rows, worlds
from huggingface_hub.utils import filter_repo_objects
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import fsdp2_strategy.integrations.trl.trainer
from fsdp2_strategy import list_checkpoints, sizes, verify_checkpoint
from fsdp2_strategy.checkpoint.lock import is_held_elsewhere
from fsdp2_strategy.errors import CheckpointError, ConfigError
from fsdp2_strategy.integrations.trl import FSDP2Trainer, with_fsdp2

pytest.importorskip("trl")

WITH_AND_WITHOUT_LORA = some_rows(
    itertools.product(KINDS, (False, True)), (), [*itertools.product(KINDS, (False,)), ("sft", True)]
)


def name_of(value):
    return value if isinstance(value, str) else "lora" if value else "full"


def published(cls):
    return cls


def run(kind, wrap, folder, output, *, resume=None, variables=None, **arguments):
    with launched(**(variables or {})):
        trainer = trainer_of(kind, wrap, folder, output, **arguments)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lora", some([False, True], [False]), ids=["full", "lora"])
@pytest.mark.parametrize("kind", some(KINDS, ["plain"]))
def test_a_trainer_computes_what_it_computes_without_sharding(tmp_path, kind, lora):
    model = write_model(tmp_path / "model")
    expected = run(kind, published, model, tmp_path / "ddp", lora=lora, max_steps=6)
    ours = run(kind, with_fsdp2, model, tmp_path / "ours", lora=lora, max_steps=6)
    assert len(logged(ours)) == 6
    first, second = ours.state.log_history[:2]
    assert "memory_allocated_bytes" in first and "samples_per_second" not in first
    assert second["samples_per_second"] > 0 and second["data_seconds"] >= 0 and second["save_seconds"] >= 0
    for now, then in zip(logged(ours), logged(expected), strict=True):
        assert now == pytest.approx(then, rel=1e-5, abs=1e-6)
    weights = dict(ours.accelerator.unwrap_model(ours.model).named_parameters())
    full = full_parameters(ours.model)
    for name, parameter in expected.accelerator.unwrap_model(expected.model).named_parameters():
        assert weights[name].requires_grad == parameter.requires_grad
        torch.testing.assert_close(full[name], parameter.detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("world", worlds(1, 2, 3, usual=(1, 2)))
@pytest.mark.parametrize("lora", some([False, True], [False]), ids=["full", "lora"])
def test_smoothed_labels_are_shifted_as_without_sharding(tmp_path, world, lora):
    model = write_model(tmp_path / "model")
    options = {"label_smoothing_factor": 0.1, "lora": lora, "max_steps": 4}
    expected = run("plain", published, model, tmp_path / "ddp", **options)
    ours = run("plain", with_fsdp2, model, tmp_path / "ours", **options)
    for now, then in zip(logged(ours), logged(expected), strict=True):
        assert now == pytest.approx(then, rel=1e-5, abs=1e-6)


ACCELERATE = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
ACCELERATE |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "lora"), WITH_AND_WITHOUT_LORA, ids=name_of)
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
@pytest.mark.parametrize("kind", some(KINDS, ["plain"]))
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_file_that_trl_adds_to_a_checkpoint_is_there_and_read_with_async_save(tmp_path):
    model = write_model(tmp_path / "model")
    wrap = lambda cls: with_fsdp2(cls, async_save=True)  # noqa: E731
    options = {"save_strategy": "steps", "save_steps": 2, "use_adaptive_entropy": True, "entropy_target": 9.0}
    whole = run("grpo", wrap, model, tmp_path / "run", **options)
    last = list_checkpoints(tmp_path / "run")[-1].path
    assert verify_checkpoint(last).ok and (last / "entropy_ctrl_state.json").exists()
    resumed = run("grpo", wrap, model, tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-4"), **options)
    assert resumed.entropy_coef == whole.entropy_coef != 0
    assert logged(resumed) == logged(whole)


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.ranks(2)
def test_recomputed_activations_and_half_precision_train(tmp_path):
    model = write_model(tmp_path / "model")
    plain = logged(run("sft", with_fsdp2, model, tmp_path / "a", gradient_checkpointing=False))
    assert logged(run("sft", with_fsdp2, model, tmp_path / "b", gradient_checkpointing=True)) == plain
    half = run("sft", with_fsdp2, model, tmp_path / "c", bf16=True)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}, "master weights"
    for now, then in zip(logged(half), plain, strict=True):
        assert now == pytest.approx(then, rel=0.02)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "arguments", "least", "reductions"),
    [
        ({}, {}, None, 6),
        ({}, {}, 0, 12),
        ({"grad_sync": "every"}, {}, None, 12),
        ({}, {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, None, 12),
    ],
    ids=["small", "large", "grad_sync", "sync_each_batch"],
)
def test_a_step_makes_one_all_reduce_and_gathers_layers_alone_twice(tmp_path, settings, arguments, least, reductions):
    """As with accelerate, a small model's gradients are reduced once, unless the program asks for more."""
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
    limit = patch.object(sizes, "FULL_GRADIENTS_BYTES", sizes.FULL_GRADIENTS_BYTES if least is None else least)
    with launched(), limit:
        trainer = trainer_of("plain", partial(with_fsdp2, **settings), model, tmp_path / "run", **arguments)
        trainer.add_callback(Counting())
        trainer.train()
    # The root, three layers, embedding and head; two micro-batches. Root and head stay gathered until backward, which
    # needs no weights of the embedding.
    expected = {"allgather_base": 2 * (6 + 3), "reduce_scatter_base": reductions, "allreduce": 1}
    for clipped, stepped in counts:
        assert clipped == stepped, "the step needs no further collective"
        assert {name: stepped.get(name) for name in expected} == expected


@pytest.fixture(scope="module")
def launch():
    """Return a function that runs a trainer on a number of ranks, and returns their exit codes."""
    path = os.pathsep.join((str(Path(trainers.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, trainers.__file__], env={**os.environ, "PYTHONPATH": path}, **pipes
    ) as server:

        def run(ranks, kind, model, output, **options):
            server.stdin.write(json.dumps([ranks, kind, str(model), str(output), options]) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


def printed(output):
    return "".join(file.read_text()[-2000:] for file in sorted(output.parent.glob(f"{output.name}-rank*.log")))


def samples_by_step(output):
    seen = {}
    for file in sorted(output.parent.glob(f"{output.name}-rank*.jsonl")):
        for line in file.read_text().splitlines():
            step, rows = json.loads(line)
            seen.setdefault(step, []).extend(map(tuple, rows))
    return {step: sorted(rows) for step, rows in seen.items()}


MICRO_BATCHES = {2: 3, 1: 6, 3: 2}
"""The micro-batches of two samples that make a step of twelve, by number of ranks."""


def kill_and_resume(launch, kind, folder, *, kill_at, **options):
    """Run a trainer to its end, and kill it, and resume it on 2, 1 and 3 ranks; all in ``folder``."""
    model = write_model(folder / "model")
    options = {"save_strategy": "steps", "per_device_train_batch_size": 2, **options}
    batch = {ranks: {"gradient_accumulation_steps": count} for ranks, count in MICRO_BATCHES.items()}
    if kind == "grpo":  # twelve completions of three prompts
        options |= {"samples": 12, "num_generations": 4}
    whole = launch(2, kind, model, folder / "whole", **options, **batch[2])
    assert whole == [0, 0], printed(folder / "whole")
    killed = launch(2, kind, model, folder / "killed", **options, **batch[2], kill_at=kill_at)
    assert killed[1] == -signal.SIGKILL, printed(folder / "killed")
    for ranks in MICRO_BATCHES:
        output = folder / f"on{ranks}"
        shutil.copytree(folder / "killed", output)
        resumed = launch(ranks, kind, model, output, **options, **batch[ranks], resume=True)
        assert resumed == [0] * ranks, printed(output)
    return model


def final_weights(folder, kind, lora, model):
    """Load the folder that a run wrote at its end, with transformers or peft, and return all weights."""
    if lora:
        loaded = peft.PeftModel.from_pretrained(trainers.untrained(kind, model), folder).state_dict()
        assert any("lora_B" in name and tensor.any() for name, tensor in loaded.items())
        return loaded
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return loaded.state_dict()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("kind", "lora"), WITH_AND_WITHOUT_LORA, ids=name_of)
def test_a_run_killed_within_an_epoch_goes_on_with_the_same_samples_on_any_number_of_ranks(
    launch, kind, lora, tmp_path
):
    # An epoch has four steps.
    model = kill_and_resume(launch, kind, tmp_path, lora=lora, save_steps=2, max_steps=7, kill_at=3)
    assert [c.tag for c in list_checkpoints(tmp_path / "killed")] == ["checkpoint-2"]
    samples = {step: rows for step, rows in samples_by_step(tmp_path / "whole").items() if step > 2}
    expected = json.loads((tmp_path / "whole" / "losses.json").read_text())
    for ranks in MICRO_BATCHES:
        assert samples_by_step(tmp_path / f"on{ranks}") == samples
        losses = json.loads((tmp_path / f"on{ranks}" / "losses.json").read_text())
        if ranks == 2:
            assert losses == expected
        elif kind != "grpo":  # each rank generates with random numbers of its own
            for now, then in zip(losses, expected, strict=True):
                assert now == pytest.approx(then, rel=1e-5)
    whole = final_weights(tmp_path / "whole" / "final", kind, lora, model)
    for name, tensor in final_weights(tmp_path / "on2" / "final", kind, lora, model).items():
        assert torch.equal(tensor, whole[name]), name
    for ranks in (1, 3):
        assert final_weights(tmp_path / f"on{ranks}" / "final", kind, lora, model).keys() == whole.keys()


@pytest.mark.full
def test_grpo_that_is_resumed_within_a_generation_generates_again_for_its_prompts(launch, tmp_path):
    # A generation is for the six prompts of two steps, and an epoch has two generations.
    options = {"max_steps": 8, "save_steps": 3, "kill_at": 4}
    kill_and_resume(
        lambda ranks, *args, **given: launch(ranks, *args, **given, steps_per_generation=2 * MICRO_BATCHES[ranks]),
        "grpo",
        tmp_path,
        **options,
    )
    assert [c.tag for c in list_checkpoints(tmp_path / "killed")] == ["checkpoint-3"]
    whole = samples_by_step(tmp_path / "whole")
    for ranks in MICRO_BATCHES:
        resumed = samples_by_step(tmp_path / f"on{ranks}")
        assert list(resumed) == [4, 5, 6, 7, 8]
        assert len(resumed[4]) == 12 and set(resumed[4]) <= set(whole[3] + whole[4])
        for first in (5, 7):  # which half of a generation a step trains on is drawn on each rank
            assert sorted(resumed[first] + resumed[first + 1]) == sorted(whole[first] + whole[first + 1])


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


@pytest.mark.full
@pytest.mark.each
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


def with_fused_loss(model, _config):
    """Replace the forward of a model as Liger does: its loss reads the weight of the head, and calls no head."""

    def forward(input_ids, labels, **_):
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
        logits = (hidden @ model.lm_head.weight.T).flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}

    model.forward = forward


@pytest.mark.ranks(2)
def test_a_forward_that_liger_replaces_has_the_same_losses_also_after_an_evaluation(tmp_path):
    model = write_model(tmp_path / "model")
    options = {"eval_strategy": "epoch", "use_liger_kernel": True, "prediction_loss_only": True}
    logs = []
    for folder, wrap in ((tmp_path / "ddp", published), (tmp_path / "ours", with_fsdp2)):
        with launched(), ExitStack() as patches:
            for module in (transformers.trainer, fsdp2_strategy.integrations.trl.trainer):
                patches.enter_context(patch.object(module, "apply_liger_kernel", with_fused_loss))
            trainer = trainer_of("plain", wrap, model, folder, **options)
            if wrap is with_fsdp2:
                trainer.evaluate()
            trainer.train()
        logs.append(logged(trainer))
    for now, then in zip(*logs, strict=True):
        assert now == pytest.approx(then, rel=1e-5)


class Hub:
    """Stands in for the Hub: keeps a copy of what is uploaded."""

    def __init__(self, folder):
        self.folder, self.created, self.uploads = folder, [], {}

    def create_repo(self, repo_id, **_options):
        self.created.append(repo_id)
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, *, folder_path, commit_message, path_in_repo="", ignore_patterns=None, **options):
        copy = self.folder / commit_message / path_in_repo
        names = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder_path) / name, copy / name)
        assert options["repo_id"] == "me/run"
        self.uploads[commit_message] = copy
        done = Future()
        done.set_result(commit_message)
        return done if options.get("run_as_future") else commit_message

    def in_place_of_the_hub(self):
        if hasattr(transformers.trainer, "hf_api"):
            return patch.object(transformers.trainer, "hf_api", lambda: self)
        functions = {"create_repo": self.create_repo, "upload_folder": self.upload_folder}
        return patch.multiple(transformers.trainer, **functions)


SAVED = ["Training in progress, step 2", "Training in progress, step 4"]
PUSHED = {"end": [], "every_save": SAVED, "checkpoint": [*SAVED, *(f"{message}, checkpoint" for message in SAVED)]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lora", some([False, True], [False]), ids=["full", "lora"])
@pytest.mark.parametrize("strategy", some(PUSHED, ["checkpoint"]))
def test_rank_0_pushes_complete_models_and_keeps_the_lock(tmp_path, strategy, lora):
    model = write_model(tmp_path / "model")
    hub = Hub(tmp_path / f"hub{dist.get_rank()}")
    wrap = lambda cls: with_fsdp2(cls, async_save=True)  # noqa: E731
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lora": lora}
    with launched(), hub.in_place_of_the_hub():
        pushes = {"push_to_hub": True, "hub_strategy": strategy}
        trainer = trainer_of("sft", wrap, model, tmp_path / "run", **options, **pushes)
        trainer.train()
        assert sorted(hub.uploads) == ([] if dist.get_rank() else sorted(PUSHED[strategy]))
        trainer.push_to_hub()
        trainer.save_model()
    assert is_held_elsewhere(tmp_path / "run") == (dist.get_rank() == 1), "an upload of the lock would release it"
    expected = full_parameters(trainer.model)
    if dist.get_rank():
        assert not hub.created and not hub.uploads
        return
    assert hub.created == ["run"]
    assert {*hub.uploads} == {*PUSHED[strategy], "End of training", "Model save"}
    for message, folder in hub.uploads.items():
        names = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
        assert not any(name.startswith(".") for name in names)
        assert ("training_state" in names) == message.endswith("checkpoint")
        if lora:
            loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), folder)
        else:
            loaded, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(report.values()), report
        if "step 2" not in message:
            for name, parameter in loaded.named_parameters():
                assert torch.equal(parameter, expected[name]), name
    if strategy == "checkpoint":
        assert verify_checkpoint(hub.uploads["Training in progress, step 4, checkpoint"]).ok


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


@pytest.mark.ranks(2)
def test_an_optimizer_of_ones_own_is_used_whatever_optim_says(tmp_path):
    model = LlamaForCausalLM.from_pretrained(write_model(tmp_path / "model"))
    arguments = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "bf16": False}
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with launched():
        args = TrainingArguments(str(tmp_path / "run"), optim="adafactor", **arguments)
        positional = (model, args, None, trainers.Sequences(), *[None] * 6, (own, None))
        trainer = with_fsdp2(Trainer)(*positional)
        trainer.train()
        assert trainer.optimizer.optimizer is own
        named = {"train_dataset": trainers.Sequences(), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
        with_fsdp2(Trainer)(model, args, **named)
        with pytest.raises(ConfigError, match="optim is 'adafactor'"):
            with_fsdp2(Trainer)(*positional[:-1], (None, None))


@pytest.mark.full
def test_options_that_the_trainer_sets_or_that_are_unknown_are_errors():
    with pytest.raises(ConfigError, match="max_norm was passed, expected max_grad_norm of TrainingArguments"):
        with_fsdp2(Trainer, max_norm=1.0)
    with pytest.raises(ConfigError, match=r"shard_sizes is unknown.*Did you mean 'shard_size'"):
        with_fsdp2(Trainer, shard_sizes=2)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size is 2, expected 1.*FSDPV2Strategy and shard_seq"):
        with_fsdp2(Trainer, sequence_parallel_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, expected 1.*FSDPV2Strategy and dp_rank"):
        with_fsdp2(Trainer, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"not a subclass of transformers.Trainer"):
        with_fsdp2(TrainingArguments)


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.ranks(2)
def test_true_resumes_from_the_checkpoint_that_was_saved_last_and_not_from_the_highest_number(tmp_path):
    model = write_model(tmp_path / "model")
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run("plain", with_fsdp2, model, tmp_path / "run", **saves)
    middle = str(tmp_path / "run" / "checkpoint-2")
    run("plain", with_fsdp2, model, tmp_path / "run", resume=middle, **saves | {"save_steps": 1, "max_steps": 3})
    assert [c.tag for c in list_checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-4", "checkpoint-3"]
    seen = []

    class Begin(transformers.TrainerCallback):
        def on_train_begin(self, _args, state, *_, **__):
            seen.append(state.global_step)

    with launched():
        trainer = trainer_of("plain", with_fsdp2, model, tmp_path / "run", **saves | {"max_steps": 5})
        trainer.add_callback(Begin())
        trainer.train(resume_from_checkpoint=True)
        empty = trainer_of("plain", with_fsdp2, model, tmp_path / "empty", **saves)
        with pytest.raises(ValueError, match="No valid checkpoint found"):
            empty.train(resume_from_checkpoint=True)
    assert seen == [3]


class Gradients(transformers.TrainerCallback):
    """Records the norm of the gradients that callbacks see."""

    def __init__(self):
        self.norms = []

    def record(self, model):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(sum(full(gradient).double().square().sum().item() for gradient in gradients) ** 0.5)

    def on_pre_optimizer_step(self, _args, _state, _control, model, **_):
        self.record(model)

    def on_optimizer_step(self, _args, _state, _control, model, **_):
        self.record(model)

    def on_step_end(self, _args, _state, _control, model, **_):
        self.record(model)


@pytest.mark.ranks(2)
def test_callbacks_see_clipped_gradients_until_the_step_ends(tmp_path):
    model = write_model(tmp_path / "model")
    norms = []
    for wrap in (published, with_fsdp2):
        with launched():
            trainer = trainer_of("plain", wrap, model, tmp_path / wrap.__name__, max_steps=2, max_grad_norm=0.1)
            callback = Gradients()
            trainer.add_callback(callback)
            trainer.train()
        norms.append(callback.norms)
    assert norms[0][0] == norms[0][1] != 0 == norms[0][2]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", some(["dpo", "grpo"], ["dpo"]))
def test_a_reference_model_that_is_synchronised_is_the_one_without_sharding(tmp_path, kind):
    model = write_model(tmp_path / "model")
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3, "max_steps": 5}
    trainers_of = {}
    for wrap in (published, with_fsdp2):
        trainers_of[wrap] = run(kind, wrap, model, tmp_path / wrap.__name__, learning_rate=1e-2, **options)
    if kind == "dpo":
        for now, then in zip(*(logged(trainers_of[wrap]) for wrap in (with_fsdp2, published)), strict=True):
            assert now == pytest.approx(then, rel=1e-4, abs=1e-6)
    start = dict(LlamaForCausalLM.from_pretrained(model).named_parameters())
    expected = dict(
        trainers_of[published].accelerator.unwrap_model(trainers_of[published].ref_model).named_parameters()
    )
    for name, parameter in full_parameters(trainers_of[with_fsdp2].ref_model).items():
        assert not torch.equal(parameter, start[name])
        if kind == "dpo":
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_computed_prompts_are_refused_before_training_and_prompts_are_saved_and_resumed(tmp_path):
    model = write_model(tmp_path / "model")

    def with_prompts(config):
        def wrap(cls):
            class Prompted(cls):
                def __init__(self, *args, **kwargs):
                    adapted = peft.get_peft_model(kwargs.pop("model"), config)
                    super().__init__(*args, model=adapted, **kwargs)

            return with_fsdp2(Prompted)

        return wrap

    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    tuned = with_prompts(peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    whole = run("plain", tuned, model, tmp_path / "run", **options)
    again = run("plain", tuned, model, tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"), **options)
    assert logged(again) == logged(whole)
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), tmp_path / "run" / "checkpoint-4")
    prompts = full_parameters(whole.model)["prompt_encoder.default.embedding.weight"]
    assert torch.equal(loaded.prompt_encoder.default.embedding.weight, prompts)
    computed = with_prompts(peft.PromptEncoderConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(CheckpointError, match=r"PromptEncoder computes its prompts.*Use prompt tuning"):
        run("plain", computed, model, tmp_path / "computed", **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", some([False, True], [False]), ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", some([False, True], [True]), ids=["untied", "tied"])
def test_a_head_that_trl_casts_to_fp32_trains(tmp_path, tied, bf16):
    model = write_model(tmp_path / "model", tie_word_embeddings=tied, dtype="bfloat16")

    def in_bf16(cls):
        class InBf16(cls):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs | {"model": kwargs["model"].bfloat16()})

        return with_fsdp2(InBf16)

    options = {"cast_lm_head_to_fp32": True, "max_steps": 2, "bf16": bf16}
    trainer = run("grpo", in_bf16, model, tmp_path / "run", **options)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert all(norm > 0 for _, norm in logged(trainer))
