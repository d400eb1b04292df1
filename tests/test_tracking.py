"""Metrics: one record per step, from rank 0 alone, in files that a resume continues; their errors reach all ranks."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, loss_of
from helpers.reference import CountCollectives
from helpers.training import prepared, strategy_for

from fsdp2_strategy import StepResult, StrategyConfig
from fsdp2_strategy.errors import ArgumentError, ConfigError, StepError
from fsdp2_strategy.integrations.vitra import VLAMetrics
from fsdp2_strategy.tracking import Metrics

STEP = {"step", "loss", "lr", "grad_norm", "seconds_per_step", "skipped"}


class Recorder:
    """A tracker that keeps what it gets, and fails where it is told to."""

    def __init__(self, fails=()):
        self.calls, self.records, self.fails = [], [], fails

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise OSError(f"no space for {name}")

    def write_hyperparameters(self):
        self._call("hparams")

    def write(self, global_step, metrics):
        self._call("write")
        self.records.append((global_step, dict(metrics)))

    def finalize(self):
        self._call("finalize")


def result_of(step, *, skipped=False, **values):
    given = {"grad_norm": 0.5, "lr": 0.1, "loss": 2.0 / step, "tokens": 8 * step} | values
    return StepResult(step=step, stepped=not skipped, skipped=skipped, **given)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars_of(folder):
    """Read TensorBoard's files back: the scalars as (step, value) by name, and the names of the texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}, tags["tensors"]


@pytest.mark.ranks(2)
def test_a_loop_writes_one_record_per_step_from_rank_0(tmp_path):
    strategy = strategy_for(gradient_accumulation_steps=2)
    model, optimizer, scheduler = prepared(strategy)
    own, recorder = tmp_path / str(dist.get_rank()), Recorder()
    results = []
    with Metrics(["jsonl", recorder], run_id="sft", run_dir=own, hparams=strategy.config) as metrics:
        for i in range(6):
            loss = loss_of("llama", model, batch_of("llama", i, dist.get_rank()))
            loss = loss * math.nan if i == 2 else loss
            strategy.backward(loss, model, num_tokens=5 + dist.get_rank())
            results.append(strategy.optimizer_step(optimizer, model, scheduler))
            metrics.log(results[-1], reward=torch.tensor([i / 2]), clipped=np.float32(0.5), epoch=i // 4)
    if dist.get_rank():
        assert not own.exists() and recorder.calls == ["hparams", "finalize"]
        return
    first, skipped, last = records = lines_of(own / "sft.jsonl")
    given = STEP | {"tokens", "tokens_per_second", "reward", "clipped", "epoch"}
    measured = {"samples", "model_flops", "hardware_flops", "save_seconds", "memory_allocated_bytes"}
    assert all(record.keys() - {"data_seconds", "samples_per_second"} == given | measured for record in records)
    for record, result in zip((first, last), (results[1], results[5]), strict=True):
        for name in ("step", "loss", "lr", "grad_norm", "tokens", *measured):
            assert record[name] == getattr(result, name), name
        assert (record["skipped"], record["tokens"]) == (0, 22)
        assert record["tokens_per_second"] == pytest.approx(22 / record["seconds_per_step"])
    assert (last["reward"], last["clipped"], last["epoch"]) == (2.5, 0.5, 1)
    assert (skipped["step"], skipped["skipped"], skipped["loss"], last["step"]) == (2, 1, None, 2)
    assert [step for step, _ in recorder.records] == [1, 2, 2]
    [settings] = lines_of(own / "run-metrics.jsonl")
    assert settings["run_id"] == "sft" and settings["hparams"]["gradient_accumulation_steps"] == 2
    assert settings["hparams"].keys() == {f for f in StrategyConfig.__dataclass_fields__ if f != "extra"}


@pytest.mark.ranks(2)
def test_logging_is_not_collective(tmp_path):
    with Metrics("jsonl", run_id="sft", run_dir=tmp_path / str(dist.get_rank())) as metrics:
        with CountCollectives() as collectives:
            if dist.get_rank() == 0:
                metrics.log(result_of(1), reward=torch.tensor(1.0))
    assert not collectives.counts


@pytest.mark.ranks(1)
def test_unknown_numbers_are_omitted_and_time_is_that_between_records(tmp_path):
    recorder = Recorder()
    metrics = Metrics(recorder, run_id="sft", run_dir=tmp_path, hparams=StrategyConfig.from_args({"kl_coef": 0.1}))
    time.sleep(0.05)
    metrics.log(StepResult(step=3, stepped=False, skipped=False, grad_norm=None), reward=1)
    metrics.log(result_of(4, tokens=None))
    [(step, record)] = recorder.records
    assert step == 4 and record.keys() == STEP and 0.05 <= record["seconds_per_step"] < 5
    metrics.log(result_of(5, tokens=40))
    seconds = recorder.records[1][1]["seconds_per_step"]
    assert seconds < 0.05 and recorder.records[1][1]["tokens_per_second"] == 40 / seconds
    for values, message in (
        ({"loss": 1.0}, "cannot log 'loss': the record has a number of this name"),
        ({"rewards": torch.ones(2)}, r"cannot log 'rewards': it is a Tensor of the shape \[2\]"),
        ({"name": "a"}, "cannot log 'name': it is a str"),
    ):
        with pytest.raises(ArgumentError, match=message):
            metrics.log(result_of(6), **values)
    metrics.close()
    metrics.close()
    assert recorder.calls == ["hparams", "write", "write", "finalize"]
    with pytest.raises(StepError, match="they are closed"):
        metrics.log(result_of(6))


def test_a_namespaces_own_options_are_settings_too(tmp_path):
    config = StrategyConfig.from_args({"kl_coef": 0.1, "seed": 7})
    with Metrics("jsonl", run_id="sft", run_dir=tmp_path, hparams=config):
        pass
    [settings] = lines_of(tmp_path / "run-metrics.jsonl")
    assert (settings["hparams"]["kl_coef"], settings["hparams"]["seed"]) == (0.1, 7)


@pytest.mark.ranks(2)
def test_tensorboard_has_the_records_and_a_resumed_run_replaces_the_repeated_steps(tmp_path):
    own = tmp_path / str(dist.get_rank())
    for lives, scale in (((1, 2, 3), 1.0), ((3, 4), 2.0)):  # the first process was killed after a checkpoint at step 2
        metrics = Metrics(["tensorboard", "jsonl"], run_id="sft", run_dir=own, hparams={"lr": 1, "path": tmp_path})
        for step in lives:
            metrics.log(result_of(step), reward=scale * step)
        if scale == 2.0:
            metrics.log(result_of(4, skipped=True, loss=math.nan, grad_norm=math.inf, tokens=None))
            metrics.close()
    if dist.get_rank():
        assert not own.exists()
        return
    scalars, texts = scalars_of(own / "tensorboard" / "sft")
    assert "hparams/text_summary" in texts
    assert scalars["reward"] == [(1, 1.0), (2, 2.0), (3, 6.0), (4, 8.0)]
    assert scalars["loss"][:4] == [(step, pytest.approx(2.0 / step)) for step in (1, 2, 3, 4)]
    assert scalars["loss"][4][0] == 5 and math.isnan(scalars["loss"][4][1])
    assert scalars["skipped"] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)]
    assert scalars.keys() == STEP | {"tokens", "tokens_per_second", "reward"}
    lines = lines_of(own / "sft.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5]
    recorded = {line["step"]: line for line in lines}
    for name in ("seconds_per_step", "tokens_per_second"):
        assert scalars[name] == [(s, pytest.approx(r[name])) for s, r in recorded.items() if name in r]


@pytest.mark.ranks(2)
def test_vla_metrics_write_to_tensorboard_too(tmp_path):
    metrics = VLAMetrics("tensorboard", "vla", tmp_path / str(dist.get_rank()), {})
    metrics.commit(loss=torch.tensor(2.0))
    metrics.commit(update_step_time=True, global_step=7, epoch=1, lr=0.5)
    metrics.push()
    metrics.finalize()
    if dist.get_rank() == 0:
        scalars, _ = scalars_of(tmp_path / "0" / "tensorboard" / "vla")
        assert scalars["VLA Train/Loss"] == [(7, 2.0)] and scalars["VLA Train/Backbone Learning Rate"] == [(7, 0.5)]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_weights_and_biases_gets_the_records_offline_in_a_project_of_its_own_choice(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "MODE": "offline",
            "SILENT": "true",
            "_SERVICE_WAIT": "200",
            "PROJECT": "a-project",
        }.items():
            patch.setenv(f"WANDB_{name}", value)
        with Metrics("wandb", run_id="sft", run_dir=tmp_path / str(dist.get_rank()), hparams={"lr": 1}) as metrics:
            metrics.log(result_of(7), reward=1.0)
    files = list(tmp_path.glob(f"{dist.get_rank()}/wandb/offline-run-*/*.wandb"))
    if dist.get_rank():
        assert not files
        return
    [written] = files
    names = [name.encode() for name in (*STEP, "reward", "tokens_per_second", "a-project")]
    deadline = time.monotonic() + 30  # its service writes the file when it comes to it, also after the run has ended
    while missing := [name for name in names if name not in written.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)
    assert b"vitra" not in written.read_bytes()


# --- errors --------------------------------------------------------------------------------------------------------


def on_rank_0(name):
    return Recorder(fails=(name,) if dist.get_rank() == 0 else ())


@pytest.mark.ranks(2)
def test_a_tracker_that_cannot_start_is_an_error_on_every_rank_and_closes_the_others(tmp_path):
    first = Recorder()
    with pytest.raises(ConfigError, match="cannot start trackers: failed on rank 0: OSError: no space for hparams"):
        Metrics([first, on_rank_0("hparams")], run_id="sft", run_dir=tmp_path)
    assert first.calls == ["hparams", "finalize"]
    for wrong, message in (
        ("tensorbord", r"'tensorbord': expected one of jsonl, tensorboard, wandb.*mean 'tensorboard'"),
        (print, r"<built-in function print>: expected one of jsonl"),
    ):
        with pytest.raises(ConfigError, match=message):
            Metrics(wrong, run_id="sft", run_dir=tmp_path)
    if dist.get_rank() == 0:
        (tmp_path / "file").touch()
    dist.barrier()
    for name in ("jsonl", "tensorboard"):
        with pytest.raises(ConfigError, match="cannot start trackers: failed on rank 0"):
            Metrics(name, run_id="sft", run_dir=tmp_path / "file")


@pytest.mark.ranks(2)
def test_a_record_that_cannot_be_written_is_an_error_of_the_next_step_on_every_rank(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)

    def step(metrics):
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model)
        metrics.log(result := strategy.optimizer_step(optimizer, model, scheduler))
        return result

    message = "cannot write the metrics of step {}: OSError: no space for write"
    recorder = on_rank_0("write")
    with pytest.raises(StepError, match="step: failed on rank 0: " + message.format(1)):
        with Metrics(recorder, run_id="sft", run_dir=tmp_path) as metrics:
            assert step(metrics).step == 1
            step(metrics)
    assert recorder.calls[-1] == "finalize"
    assert strategy.global_step(model) == 1

    metrics = Metrics(on_rank_0("write"), run_id="sft", run_dir=tmp_path)
    assert step(metrics).step == 2
    with pytest.raises(StepError, match="cannot close trackers: failed on rank 0: " + message.format(2)):
        metrics.close()
    with pytest.raises(StepError, match="cannot close trackers: failed on rank 0: OSError: no space for finalize"):
        Metrics(on_rank_0("finalize"), run_id="sft", run_dir=tmp_path).close()
    with (
        pytest.raises(RuntimeError, match="own"),
        Metrics(on_rank_0("write"), run_id="sft", run_dir=tmp_path) as metrics,
    ):
        step(metrics)
        raise RuntimeError("own")
    with Metrics(Recorder(), run_id="sft", run_dir=tmp_path) as metrics:
        assert step(metrics).step == 4  # no error is left from before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_folder_that_is_lost_in_a_run_is_an_error_on_every_rank(name, tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    metrics = Metrics(name, run_id="sft", run_dir=tmp_path / "run")
    if dist.get_rank() == 0:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").touch()
    with pytest.raises(StepError, match=r"failed on rank 0: cannot write the metrics of step 1: \w*(Error|Exists)"):
        for _ in range(2):
            strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model)
            metrics.log(strategy.optimizer_step(optimizer, model, scheduler))
    metrics.close()


def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        for name in ("tensorboard", "wandb"):
            with pytest.raises(
                ConfigError, match=f"the package {name} is not installed, expected the extra 'tracking'"
            ):
                Metrics(name, run_id="sft", run_dir=tmp_path)
