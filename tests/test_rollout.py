"""Weights on their way to an inference engine: all of them, exactly, without a hang, and what generates with them."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import time
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.folders import tensors_in
from helpers.models import CASES, FILED, HUGGING_FACE, batch_of, build, device, on_device
from helpers.versions import needs_new_conversions
from helpers.worlds import some, worlds
from torch import nn
from torch.distributed.tensor import Shard
from transformers import MarianConfig, MarianMTModel, PretrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PermuteForRope, WeightConverter

from fsdp2_strategy import EMA, FSDPV2Strategy, StrategyConfig, build_mesh, save_model, shard_model, sizes
from fsdp2_strategy.errors import OffloadError, RolloutError
from fsdp2_strategy.model.fsdp_state import parameter_groups
from fsdp2_strategy.model.offloading import offload
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.rollout import ENGINES, TransformersEngine, stream_weights, weight_checksums
from fsdp2_strategy.rollout import bucket as bucket_module
from fsdp2_strategy.rollout import stream_plan as plan_module

GENERATING = ["llama_tied", "phi3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "t5", "qwen2_vl"]


def sharded(name, **options):
    model = build(name)
    is_training = options.pop("is_training", True)
    shard_model(model, build_mesh(options.pop("shard_size", -1)), StrategyConfig(**options), is_training=is_training)
    return model


def collectives_of(monkeypatch):
    """Count the collectives that move buckets."""
    counted = []
    for module, name in ((dist, "broadcast"), (bucket_module, "all_gather_single")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=function, **k: counted.append(f) or f(*a, **k))
    return counted


# --- the stream ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(1, 2, 3, 4, usual=(2,)))
def test_a_stream_gives_what_an_export_writes(world, tmp_path):
    cases = [*HUGGING_FACE[world::4], "mlp", "unet"]
    for name, (dtype, bucket_bytes) in itertools.product(cases, [(torch.bfloat16, 512 << 20), (None, 6000)]):
        model = sharded(name, shard_size=2 if world == 4 else -1)
        streamed = dict(stream_weights(model, dtype=dtype, bucket_bytes=bucket_bytes))
        folder = tmp_path / f"{name}{dtype}"
        save_model(model, None, folder, dtype=dtype)
        written = tensors_in(folder)
        assert streamed.keys() == written.keys()
        for key, tensor in written.items():
            assert streamed[key].dtype == tensor.dtype and torch.equal(streamed[key], tensor), (name, key)
            assert streamed[key].is_contiguous()


@pytest.mark.ranks(3)
def test_tensors_cut_along_another_dimension_or_not_evenly_arrive_whole():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            shapes = [(7, 5), (5, 7), (1, 4), (2,), (4, 3, 5), (8, 2)]
            self.each = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])

    model, plain = on_device(Odd()), on_device(Odd())
    torch.distributed.fsdp.fully_shard(
        model, mesh=build_mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % 3 == 0 else None
    )
    for bucket_bytes in (1, 100, 1 << 20):
        streamed = dict(stream_weights(model, dtype=None, bucket_bytes=bucket_bytes))
        assert streamed.keys() == dict(plain.named_parameters()).keys()
        assert all(torch.equal(streamed[name], p) for name, p in plain.named_parameters())


@pytest.mark.ranks(2)
def test_empty_tensors_arrive_in_buckets_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
    shard_model(model, config=StrategyConfig(bf16=False))
    for bucket_bytes in (1, 1 << 20):
        streamed = dict(stream_weights(model, dtype=None, bucket_bytes=bucket_bytes))
        assert {name: tuple(t.shape) for name, t in streamed.items()} == {"0.weight": (4, 4), "empty": (0, 3)}


@pytest.mark.ranks(2)
@pytest.mark.real_sizes
def test_many_small_tensors_take_few_collectives_and_large_ones_are_not_copied(monkeypatch):
    model = sharded("llama")
    with monkeypatch.context() as patched:
        counted = collectives_of(patched)
        names = [name for name, _ in stream_weights(model)]
        gathers = dist.get_world_size() if device().type == "cpu" else 1  # of one bucket
        assert len(names) > 20 and len(counted) == gathers
        patched.setattr(sizes, "LARGE_BYTES", 1 << 10)
        copied = []
        read = bucket_module.Part.read
        patched.setattr(bucket_module.Part, "read", lambda part, rows: copied.append((part, rows)) or read(part, rows))
        for _, tensor in stream_weights(model, bucket_bytes=1 << 28):  # another plan
            _, rows = copied.pop()
            if tensor.nbytes >= 1 << 10:
                assert tensor.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


@contextlib.contextmanager
def peaks_of_buffers(most):
    """Collect, whenever a bucket is started, the bytes of all buffers that exist, and the longest time to shrink."""
    storages, peaks = [], []
    start = bucket_module.Bucket.start

    def started(bucket):
        start(bucket)
        storages.append(weakref.ref(bucket._rows.untyped_storage()))
        for _ in range(200):  # gloo's threads release a buffer late
            live = sum(one().nbytes() for one in storages if one() is not None)
            if live <= most:
                break
            time.sleep(0.01)
        peaks.append(live)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bucket_module.Bucket, "start", started)
        yield peaks


@pytest.mark.ranks(2)
def test_a_tensor_does_not_change_while_it_is_held_and_buffers_take_the_memory_of_two_buckets():
    model = sharded("llama")
    expected = weight_checksums(dict(stream_weights(model)))
    held = {}
    for i, (name, tensor) in enumerate(stream_weights(model, bucket_bytes=6000)):
        if i % 3 == 0:
            held[name] = tensor.view(-1)[:]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(weight_checksums([item]) == {item[0]: expected[item[0]]} for item in held.items())
    for bucket_bytes in (6000, 1 << 20):
        largest = max(tensor.nbytes for _, tensor in stream_weights(model, bucket_bytes=bucket_bytes))
        limit = 2 * max(bucket_bytes, largest + 64)
        with peaks_of_buffers(limit) as peaks:
            for _ in stream_weights(model, bucket_bytes=bucket_bytes):
                pass
        assert peaks and max(peaks) <= limit


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_early_or_fails_does_not_hang_the_others():
    model = sharded("llama_tied")
    expected = weight_checksums(stream_weights(model, bucket_bytes=6000))
    for leaving in ("break", "raise", "never look"):
        got = {}
        try:
            for i, (name, tensor) in enumerate(stream_weights(model, bucket_bytes=6000)):
                if leaving == "never look" and dist.get_rank() == 1:
                    continue
                got |= weight_checksums([(name, tensor)])
                if dist.get_rank() == 1 and i == 3:
                    if leaving == "break":
                        break
                    raise OSError("the engine is gone")
        except OSError:
            gc.collect()
        if dist.get_rank() != 1:
            assert got == expected
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3


@pytest.mark.ranks(2)
def test_a_rank_that_closes_its_stream_takes_part_in_the_rest_in_two_buckets_of_memory():
    model = sharded("llama_tied")
    largest = max(tensor.nbytes for _, tensor in stream_weights(model, bucket_bytes=6000))
    limit = 3 * max(6000, largest + 64)  # two buckets, and the one whose tensor the loop's variable holds
    with peaks_of_buffers(limit) as peaks:
        stream = stream_weights(model, bucket_bytes=6000)
        with contextlib.closing(stream):
            for _ in stream:
                if dist.get_rank():
                    break
    assert len(peaks) > 3 and max(peaks) <= limit
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


@pytest.mark.ranks(2)
def test_ranks_that_call_differently_all_raise():
    model = sharded("llama")
    with pytest.raises(RolloutError, match=r"ranks \[1\] differ from rank 0"):
        next(stream_weights(model, dtype=torch.float16 if dist.get_rank() else None))
    with pytest.raises(RolloutError, match="bucket_bytes is 0"):
        next(stream_weights(model, bucket_bytes=0 if dist.get_rank() else 1))
    with torch.device("meta"):
        unreal = CASES["llama"].build()
    shard_model(unreal)
    with pytest.raises(RolloutError, match="have no values yet"):
        next(stream_weights(unreal))


@pytest.mark.ranks(2)
def test_what_is_away_streams_and_averages_stream_in_their_place():
    model = sharded("llama", bf16=True)
    expected = weight_checksums(stream_weights(model))
    assert expected == weight_checksums(stream_weights(build("llama")))  # no collectives: it is plain
    ema = EMA(model, 0.5)
    offload(model)
    assert weight_checksums(stream_weights(model)) == expected
    with pytest.raises(OffloadError):
        model(torch.zeros(1, 3, dtype=torch.long))
    fsdp = FSDPV2Strategy(config=StrategyConfig())
    fsdp.reload_model(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with ema.swapped_in(model):
        assert weight_checksums(stream_weights(model)) == expected
    assert weight_checksums(stream_weights(model)) != expected


@pytest.mark.ranks(2)
def test_buffers_that_differ_between_ranks_arrive_as_rank_0_has_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    shard_model(model, config=StrategyConfig(min_unit_params=1))
    model[1].running_mean += dist.get_rank() + 1
    streamed = dict(stream_weights(model))
    assert list(streamed)[-3:] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert torch.equal(streamed["1.running_mean"], torch.ones(4)) and streamed["1.running_mean"].dtype == torch.float32
    assert streamed["0.weight"].dtype == torch.bfloat16


@pytest.mark.ranks(2)
def test_a_sharded_model_within_a_wrapper_of_any_kind_streams_what_it_is_now():
    wrapper = nn.Sequential(sharded("llama"))
    with torch.no_grad():
        wrapper[0].eval()(torch.zeros(1, 3, dtype=torch.long))  # the root stays gathered
        for group in parameter_groups(wrapper):
            for parameter in group.fsdp_params:
                parameter.sharded_param.zero_()
    assert not any(tensor.any() for _, tensor in stream_weights(wrapper))


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(GENERATING, FILED[:2]))
@pytest.mark.ranks(2)
def test_the_engine_generates_with_exactly_the_models_weights(name, tmp_path):
    model = sharded(name)
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model))
    build(name).save_pretrained(tmp_path)  # rank 0 does
    dist.barrier()
    plain = on_device(type(engine.model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    expected = weight_checksums(stream_weights(plain))
    assert weight_checksums(stream_weights(model)) == expected and engine.weight_checksums() == expected
    if dist.get_rank():
        return  # each rank generates for itself, or not
    inputs = {k: v for k, v in batch_of(name, 0, 0).items() if k in ("input_ids", "pixel_values", "image_grid_thw")}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(engine.generate(**inputs, **options), plain.generate(**inputs, **options))


def args_of(**values):
    return values


@pytest.mark.ranks(2)
def test_a_rank_without_an_engine_says_which_ranks_have_one():
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama_tied"))
    engine = TransformersEngine(actor)
    builders = {"on rank 1": lambda *_: engine if dist.get_rank() else None}
    with patch.dict(ENGINES, builders):
        returned = strategy.setup_inference_engine(None, "on rank 1", actor)
    assert (returned is not None) == bool(strategy.inference_engine) == bool(dist.get_rank())
    if dist.get_rank():
        assert returned is strategy.inference_engine is engine
        return
    for absent in (strategy.inference_engine, copy.copy(strategy.inference_engine)):
        with pytest.raises(
            RolloutError,
            match=r"cannot use 'generate' .*: rank 0 holds none, expected one of 1 rank \(1\)\. Call it there",
        ):
            absent.generate(None)


@pytest.mark.ranks(2)
def test_a_trainer_sets_up_updates_and_puts_its_engine_to_sleep():
    strategy = FSDPV2Strategy(args={"enable_engine_sleep": True})
    actor = strategy.prepare_model(build("llama_tied"), is_training=True)
    optimizer = strategy.create_optimizer(actor, lr=0.1)
    assert not strategy.inference_engine
    with pytest.raises(RolloutError, match=r"cannot use 'generate' .*: there is no inference engine, .*Call setup_inf"):
        strategy.inference_engine.generate(None)
    strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    engine = strategy.setup_inference_engine(None, "transformers", actor)
    assert strategy.inference_engine is engine and strategy.inference_engine_type == "transformers"
    ids = batch_of("llama_tied", 0, 0)["input_ids"]
    with pytest.raises(RolloutError, match="engine is asleep"):
        engine.generate(ids)
    strategy.wakeup_inference_engine()
    before = engine.generate(ids, max_new_tokens=1)
    assert before.shape == (ids.shape[0], ids.shape[1] + 1)
    old = engine.weight_checksums()
    strategy.backward(actor(**batch_of("llama_tied", 0, dist.get_rank())).logits.square().mean(), actor, optimizer)
    strategy.optimizer_step(optimizer, actor)
    strategy.maybe_sleep_inference_engine()
    strategy.offload_model(actor)
    strategy.update_engine_weights(actor, verify=True)
    with pytest.raises(RolloutError, match="engine is asleep"):
        engine.generate(ids)
    strategy.wakeup_inference_engine()
    new = engine.weight_checksums()
    assert new == weight_checksums(stream_weights(actor)) and not set(new.values()) & set(old.values())
    strategy.reload_model(actor)
    with torch.no_grad():
        expected = actor.eval()(input_ids=ids).logits
    got = engine.model(input_ids=ids).logits
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=0, atol=0)


def test_an_engine_that_slept_somewhere_else_gets_its_weights(monkeypatch):
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama_tied"), is_training=True)
    engine = strategy.setup_inference_engine(None, "transformers", actor)
    model = engine.model
    with monkeypatch.context() as patched:  # other memory, as on an accelerator
        patched.setattr(model, "to", lambda device: model._apply(torch.clone))
        engine.sleep()
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.add_(1)
        strategy.update_engine_weights(actor, verify=True)
        assert engine.is_asleep
        strategy.wakeup_inference_engine()
    assert engine.weight_checksums() == weight_checksums(stream_weights(actor)) and not engine.is_asleep
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_engine_computes_in_the_dtype_of_the_strategy():
    for config, dtype in (({"fp16": True}, torch.float16), ({}, torch.bfloat16), ({"bf16": False}, torch.float32)):
        strategy = FSDPV2Strategy(config=StrategyConfig(**config))
        actor = strategy.prepare_model(build("llama"), is_training=True)
        engine = strategy.setup_inference_engine(None, "transformers", actor)
        assert {p.dtype for p in engine.model.parameters()} == {dtype} and engine.model.config.dtype == dtype


def test_an_engine_takes_the_dtype_that_is_sent():
    actor = build("llama")
    engine = TransformersEngine(actor)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        engine.update_weights(stream_weights(actor, dtype=dtype))
        assert engine.weight_checksums() == weight_checksums(stream_weights(actor, dtype=dtype))
        assert engine.model.config.dtype == dtype
    fixed = TransformersEngine(actor, dtype=torch.bfloat16)
    fixed.update_weights(stream_weights(actor, dtype=torch.float32))
    assert {p.dtype for p in fixed.model.parameters()} == {torch.bfloat16}
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.setup_inference_engine(None, fixed, strategy.prepare_model(actor, is_training=True))
    with pytest.raises(
        RolloutError, match=r"it holds 21 weights .* of 21 in bfloat16, expected float32, in which they"
    ):
        strategy.update_engine_weights(actor, verify=True)
    strategy.close()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe"])
def test_an_engine_keeps_every_bit_of_a_stream_of_several_dtypes(name):
    for narrow in ("weight", "embed_tokens", "lm_head", "mlp", "layers.0"):
        actor = build(name)
        for own_name, parameter in actor.named_parameters():
            parameter.data = parameter.data.to(torch.bfloat16 if narrow in own_name else torch.float32)
        engine = TransformersEngine(actor)
        for dtype in (None, torch.float16, None):
            engine.update_weights(stream_weights(actor, dtype=dtype))
            assert engine.weight_checksums() == weight_checksums(stream_weights(actor, dtype=dtype)), narrow
        dtypes = {own_name: parameter.dtype for own_name, parameter in engine.model.named_parameters()}
        assert dtypes == {own_name: parameter.dtype for own_name, parameter in actor.named_parameters()}
        assert engine.model.get_input_embeddings().weight.dtype == actor.get_input_embeddings().weight.dtype


@pytest.mark.ranks(2)
def test_frozen_weights_in_half_precision_are_sent_in_the_dtype_that_the_actor_computes_in():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    actor = build("llama")
    actor.lm_head.to(torch.bfloat16).requires_grad_(False)
    strategy.prepare_model(actor, is_training=True)
    assert actor.lm_head.weight.dtype == torch.bfloat16
    ids = batch_of("llama", 9, 0)["input_ids"]
    for engine_type in ("transformers", TransformersEngine(build("llama"))):
        engine = strategy.setup_inference_engine(None, engine_type, actor)
        strategy.update_engine_weights(actor, verify=True)
        assert set(engine.weight_dtypes().values()) == {"float32"}
        with torch.no_grad():
            assert torch.equal(engine.model(input_ids=ids).logits, actor.eval()(input_ids=ids).logits)
    strategy.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "t5"])
def test_parameters_that_stay_in_fp32_and_merged_experts_keep_every_bit(name):
    actor = build(name)
    for first in (torch.float16, torch.bfloat16, torch.float32):
        engine = TransformersEngine(actor)
        engine.update_weights(stream_weights(actor, dtype=first))
        assert engine.weight_checksums() == weight_checksums(stream_weights(actor, dtype=first))


class Recorder:
    """An engine that keeps what it gets, and may fail."""

    def __init__(self, fault=None):
        self.fault = fault
        self.calls = []
        self.held = {}

    def update_weights(self, weights):
        self.calls.append("update")
        if self.fault == "at once" and dist.get_rank() == 1:
            raise OSError("no engine")
        for i, (name, tensor) in enumerate(weights):
            if self.fault == "midway" and dist.get_rank() == 1 and i == 2:
                raise OSError("engine lost")
            if self.fault == "stops" and i == 2:
                return
            self.held[name] = tensor
        if self.fault == "flips":
            next(iter(self.held.values())).view(-1)[0] += 1

    def weight_checksums(self):
        return weight_checksums(self.held.items())

    def sleep(self):
        self.calls.append("sleep")

    def wake_up(self):
        self.calls.append("wake_up")

    def generate(self, prompt):
        return prompt


@pytest.mark.ranks(2)
def test_an_engine_of_ones_own_takes_its_place_by_name_or_as_it_is(monkeypatch):
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama"), is_training=True)
    with pytest.raises(RolloutError, match=r"engine_type is 'mine', expected one of transformers"):
        strategy.setup_inference_engine(args_of(enable_engine_sleep=True), "mine", actor)
    with pytest.raises(RolloutError, match="no inference engine"):
        strategy.update_engine_weights(actor)
    with pytest.raises(RolloutError, match="it is a Linear, expected an object with update_weights"):
        strategy.setup_inference_engine(None, nn.Linear(1, 1))
    with pytest.raises(RolloutError, match="it is the class TransformersEngine, expected an object"):
        strategy.setup_inference_engine(None, TransformersEngine, actor)
    with pytest.raises(RolloutError, match="actor is None"):
        strategy.setup_inference_engine(None, "transformers")
    with pytest.raises(RolloutError, match="expected a transformers model with a generate method"):
        strategy.setup_inference_engine(None, "transformers", strategy.prepare_model(build("mlp")))
    for builder, match in (
        (lambda args: Recorder(), r"ENGINES\['mine'\] cannot be called with three arguments \(too many positional"),
        (Recorder(), r"ENGINES\['mine'\] is a Recorder, expected a function"),
    ):
        with monkeypatch.context() as patched, pytest.raises(RolloutError, match=match):
            patched.setitem(ENGINES, "mine", builder)
            strategy.setup_inference_engine(None, "mine", actor)
    with monkeypatch.context() as patched:
        # One engine, on rank 0; the other rank takes part all the same.
        patched.setitem(ENGINES, "vllm", lambda args, actor, dtype: None if dist.get_rank() else Recorder())
        engine = strategy.setup_inference_engine(args_of(enable_engine_sleep=True), "vllm", actor)
    strategy.update_engine_weights(actor, verify=True)
    expected = weight_checksums(stream_weights(actor))
    if dist.get_rank():
        assert engine is None
    else:
        assert engine.weight_checksums() == expected
        assert engine.calls == ["update", "sleep", "wake_up", "update", "sleep"]
    mine = Recorder()
    assert strategy.setup_inference_engine(None, mine) is mine and strategy.inference_engine_type == "Recorder"


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("at once", "failed on rank 1: OSError: no engine"),
        ("midway", "failed on rank 1: OSError: engine lost"),
        ("stops", "the engine took 3 tensors of"),
        ("flips", r"1 name \(.*\) of \d+ differ from those that were sent"),
    ],
)
@pytest.mark.ranks(2)
def test_an_engine_that_fails_stops_early_or_holds_something_else_is_an_error_on_every_rank(fault, match):
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama"), is_training=True)
    strategy.setup_inference_engine(None, Recorder(fault))
    with pytest.raises(RolloutError, match=match):
        strategy.update_engine_weights(actor, verify=True)
    strategy.setup_inference_engine(None, Recorder())
    strategy.update_engine_weights(actor, verify=True)


@pytest.mark.ranks(2)
def test_a_stream_that_fails_is_heard_of_on_every_rank_whatever_an_engine_makes_of_it(monkeypatch):
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama"), is_training=True)

    class Wrapping(Recorder):
        def update_weights(self, weights):
            try:
                super().update_weights(weights)
            except Exception as error:
                raise ValueError("the engine is broken") from error

    with monkeypatch.context() as patched:
        patched.setitem(ENGINES, "vllm", lambda args, actor, dtype: None if dist.get_rank() else Wrapping())
        strategy.setup_inference_engine(None, "vllm")
    with torch.device("meta"):
        unreal = CASES["llama"].build()
    shard_model(unreal)
    with pytest.raises(RolloutError, match="have no values yet"):
        strategy.update_engine_weights(unreal)
    strategy.update_engine_weights(actor)

    def broken(args, actor, dtype):
        if dist.get_rank():
            raise OSError("no port is free")
        return Recorder()

    with monkeypatch.context() as patched:
        patched.setitem(ENGINES, "vllm", broken)
        fresh = FSDPV2Strategy()
        for call in (
            lambda: fresh.setup_inference_engine(None, "vllm", actor),
            lambda: fresh.update_engine_weights(actor),
        ):
            with pytest.raises(RolloutError, match=r"rank 1: OSError: no port is free|there is no inference engine"):
                call()


def test_an_engine_with_some_of_its_weights_does_not_generate():
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama"), is_training=True)
    engine = TransformersEngine(actor)
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RolloutError, match="does not have all of its weights"):
        engine.generate(ids)
    weights = dict(stream_weights(actor))
    first, *others = weights
    faults = {
        r"1 name \(.*\) were not received": {name: weights[name] for name in others},
        "is unknown": weights | {"model.norm.weigth": weights[first]},
        "has shape": weights | {first: weights[first][:1]},
    }
    for message, wrong in faults.items():
        engine.update_weights(iter(weights.items()))
        with pytest.raises(RolloutError, match=message):
            engine.update_weights(iter(wrong.items()))
        with pytest.raises(RolloutError, match="does not have all of its weights"):
            engine.generate(ids)
    with pytest.raises(RolloutError, match="was received twice"):
        engine.update_weights(itertools.chain(weights.items(), weights.items()))
    engine.update_weights(weights.items())
    with pytest.raises(RolloutError, match=r"the prompts are a list, expected a tensor \[batch, length\]"):
        engine.generate([[3, 4]])
    with pytest.raises(RolloutError, match=r"the prompts are a list, expected a tensor \[batch, length\]"):
        engine.generate(input_ids=[[3, 4]])
    with pytest.raises(RolloutError, match="prompts was passed without sampling_params"):
        engine.generate(prompts=[[3, 4]], max_tokens=2)
    with pytest.raises(RolloutError, match=r"dtype is 'float32', expected a torch.dtype, 'sent' or None"):
        TransformersEngine(actor, dtype="float32")


def test_an_engine_shares_nothing_with_the_model_it_copies(caplog):
    caplog.set_level(logging.WARNING, "fsdp2_strategy")
    strategy = FSDPV2Strategy(
        config=StrategyConfig(activation_checkpointing=("LlamaDecoderLayer",), compile_blocks="eager")
    )
    actor = strategy.prepare_model(build("llama_tied"), is_training=True)
    engine = TransformersEngine(actor)
    theirs = {id(m) for m in unwrap_model(actor).modules()} | {id(t) for t in actor.parameters()}
    for module in engine.model.modules():
        assert id(module) not in theirs and not hasattr(module, "_is_fsdp_managed_module")
        assert not any(callable(getattr(type(module), name, None)) for name in vars(module))
    assert engine.model.get_input_embeddings().weight is engine.model.get_output_embeddings().weight
    assert not engine.model.training and actor.training
    of_actor = {id(value) for m in actor.modules() for value in vars(m).values() if isinstance(value, PretrainedConfig)}
    configs = [v for m in engine.model.modules() for v in vars(m).values() if isinstance(v, PretrainedConfig)]
    assert len({id(value) for value in configs}) == 1 and not {id(value) for value in configs} & of_actor
    assert engine.model.generation_config is not actor.generation_config
    assert not {id(t) for t in (*engine.model.parameters(), *engine.model.buffers())} & {
        id(t) for t in (*actor.parameters(), *actor.buffers())
    }


def test_an_engine_whose_parameters_no_stream_carries_is_refused():
    config = MarianConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(RolloutError, match="are not in the stream of its weights"):
        TransformersEngine(MarianMTModel(config))


@needs_new_conversions
def test_what_a_model_computes_from_several_tensors_of_the_hub_reaches_the_engine():
    name = "test_rollout_computed"
    model = build("llama")
    model.config.model_type = name
    register_checkpoint_conversion_mapping(
        name, [WeightConverter("self_attn.q_proj", "self_attn.q_proj", operations=[PermuteForRope()])], overwrite=True
    )
    engine = TransformersEngine(model, dtype=None)
    engine.update_weights(stream_weights(model, dtype=None))
    for key, parameter in model.named_parameters():
        assert torch.equal(engine.model.get_parameter(key), parameter), key


@pytest.mark.ranks(2)
def test_streams_of_one_model_share_a_plan_and_nothing_else(monkeypatch):
    model = sharded("llama")
    plans = []
    with monkeypatch.context() as patched:
        plan = plan_module.make_items
        patched.setattr(plan_module, "make_items", lambda *a: plans.append(a) or plan(*a))
        first = weight_checksums(stream_weights(model, bucket_bytes=6000))
        pairs = zip(stream_weights(model, bucket_bytes=6000), stream_weights(model, bucket_bytes=6000), strict=True)
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
        assert len(plans) == 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        second = weight_checksums(stream_weights(model, bucket_bytes=6000))
        assert first.keys() == second.keys() and not set(first.values()) & set(second.values())
        model.register_buffer("late", torch.ones(3))
        assert "late" in dict(stream_weights(model, bucket_bytes=6000)) and len(plans) == 2
        list(stream_weights(model, dtype=None, bucket_bytes=6000))
        assert len(plans) == 3
    gone = weakref.ref(model)
    del model, parameter
    plans.clear()
    gc.collect()
    assert gone() is None
