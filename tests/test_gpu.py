"""The same promises on accelerators: one rank per device, with nccl and gloo.

Each code path that only an accelerator takes has a test here: pinned memory, the copy stream, the random state of the
device, nccl's collectives, the peaks of device memory. Tests on two ranks are skipped if there is one accelerator.
"""

from __future__ import annotations

import copy
import gc
import json
import warnings

import pytest
import simulated_accelerator
import torch
import torch.distributed as dist
import transformers
from helpers.models import VOCAB, batch_of, build, loss_of
from helpers.reference import Unsharded, assert_close, full_grads, full_parameters
from safetensors.torch import load_file
from torch import nn

from fsdp2_strategy import (
    EMA,
    FSDPV2Strategy,
    StrategyConfig,
    build_mesh,
    init_on_meta,
    load_weights,
    shard_model,
    stream_weights,
    token_log_probs,
)
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.distributed.process_group import control_device, current_device
from fsdp2_strategy.errors import ConfigError, StepError
from fsdp2_strategy.logprob import linear_log_probs
from fsdp2_strategy.model import offload, reload
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.model.offloading import _host_buffers
from fsdp2_strategy.model.placeholders import values_of
from fsdp2_strategy.rollout import TransformersEngine, weight_checksums
from fsdp2_strategy.rollout.difference import TensorDifference

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1)]


def on_two_gpus(test):
    """Run a test on two ranks, if there are two accelerators."""
    return pytest.mark.ranks(2)(test)


def on_device(batch):
    return {k: v.to(current_device()) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def on_this_rank(model):
    """Use this rank's accelerator: a rank of the tests' pool begins with the first one."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_rank())
    return model.to(current_device())


def trained(name="llama", **config):
    """Prepare a model, and train it for one step."""
    strategy = FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, "max_norm": 1.0, **config}))
    model = strategy.prepare_model(build(name), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    train_step(strategy, model, optimizer, 0)
    return strategy, model, optimizer


def train_step(strategy, model, optimizer, step):
    loss = loss_of("llama", model, on_device(batch_of("llama", step, dist.get_rank())))
    strategy.backward(loss, model, optimizer)
    return strategy.optimizer_step(optimizer, model, None)


def tensors_of(model, optimizer):
    """Return copies of this rank's part of all weights and of the optimizer state, in host memory."""
    found = {**named_parameters(model), **optimizer_tensors(model, optimizer)}
    return {name: values_of(tensor).detach().to("cpu", copy=True) for name, tensor in found.items()}


def assert_bitwise_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


class Large(nn.Module):
    """Matrices of 16 MiB: their shards fill buffers, and copies of them take a while."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def large():
    """Prepare a model of large matrices; return it with a function that takes a step."""
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0, block_class_names=("Linear",)))
    model = strategy.prepare_model(Large(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)

    def step():
        strategy.backward(model(torch.ones(4, 2048, device=strategy.device)).square().mean(), model, optimizer)
        strategy.optimizer_step(optimizer, model, None)

    step()
    return strategy, model, optimizer, step


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_training_on_a_gpu_equals_the_unsharded_model(cpu_offload):
    model = build("llama").to(current_device())
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
        model = strategy.prepare_model(build("llama", seed).to(current_device()), is_training=True)
        return strategy, model, strategy.create_optimizer(model, lr=1e-3)

    def steps(strategy, model, optimizer, which):
        losses = []
        for step in which:
            loss = loss_of("llama", model, on_device(batch_of("llama", step, 0)))
            strategy.backward(loss, model, optimizer)
            norm = strategy.optimizer_step(optimizer, model, None).grad_norm
            drawn = torch.rand(1).item(), torch.rand(1, device=strategy.device).item()
            losses.append((loss.item(), norm, *drawn))
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


def test_recorded_constructors_run_on_the_device_and_follow_the_seed():
    def initialised(seed):
        with init_on_meta():
            model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        shard_model(model, build_mesh(), StrategyConfig(bf16=False, block_class_names=["Linear"]))
        torch.manual_seed(seed)
        load_weights(model)
        assert {parameter.device for parameter in model.parameters()} == {current_device()}
        return {name: values_of(parameter).detach().cpu() for name, parameter in model.named_parameters()}

    first = initialised(1)
    assert_bitwise_equal(initialised(1), first)
    other = initialised(2)
    for name, value in first.items():
        assert not torch.equal(other[name], value)
        bound = (64 if name.startswith("0") else 128) ** -0.5  # that of nn.Linear
        assert 0.9 * bound < value.abs().max() <= bound
        assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.25)


def test_offloaded_models_free_the_device_and_return_with_the_same_bits():
    _, model, optimizer, step = large()
    before = tensors_of(model, optimizer)
    gc.collect()
    held = torch.accelerator.memory_allocated()
    nbytes = sum(tensor.nbytes for tensor in before.values())
    for _ in range(2):  # the second time with the pinned buffers of the first
        buffers = sum(map(len, _host_buffers._free.values()))
        offload(model)
        offload(optimizer)
        gc.collect()
        assert held - torch.accelerator.memory_allocated() > 0.95 * nbytes
        assert all(values_of(parameter).is_pinned() for parameter in model.parameters())
        assert_bitwise_equal(tensors_of(model, optimizer), before)
        reload(model)
        reload(optimizer)
        assert sum(map(len, _host_buffers._free.values())) >= max(buffers, 1)
    assert_bitwise_equal(tensors_of(model, optimizer), before)
    _host_buffers.clear()
    assert not _host_buffers._free
    step()


def test_an_offload_copies_what_the_running_kernels_compute_and_kernels_wait_for_a_reload():
    _, model, _, _ = large()
    parameters = list(model.parameters())
    with torch.no_grad():
        for _ in range(50):  # queued on the device when the offload begins
            for parameter in parameters:
                values_of(parameter).mul_(1.01)
        for parameter in parameters:
            values_of(parameter).fill_(3.0)
    offload(model)
    assert all(bool((values_of(parameter) == 3.0).all()) for parameter in parameters)
    reload(model)
    with torch.no_grad():
        total = sum(values_of(parameter).sum(dtype=torch.float64) for parameter in parameters)
    assert total.item() == 3.0 * sum(values_of(parameter).numel() for parameter in parameters)


def test_an_asynchronous_save_holds_the_state_before_the_next_step(tmp_path):
    strategy, model, optimizer, step = large()
    for tag in ("first", "second"):  # the second one with the pinned memory of the first
        expected = tensors_of(model, optimizer)
        strategy.save_ckpt(model, tmp_path, tag, async_save=True)
        step()
        strategy.wait_for_checkpoint()
        changed = tensors_of(model, optimizer)
        assert any(not torch.equal(changed[name], expected[name]) for name in expected)
        strategy.load_ckpt(model, tmp_path, tag=tag)
        assert_bitwise_equal(tensors_of(model, optimizer), expected)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_weights_are_streamed_onto_the_device_and_equal_a_saved_folder(is_offloaded, tmp_path):
    strategy, model, _ = trained(bf16=True)
    strategy.save_model(model, None, tmp_path, dtype=torch.bfloat16)
    expected = load_file(tmp_path / "model.safetensors")
    if is_offloaded:
        offload(model)
    found = {}
    for name, tensor in stream_weights(model):
        assert tensor.device == current_device()
        found[name] = tensor.cpu()
    assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("retain", ["copy", "hashes"])
def test_changed_weights_bring_an_engine_on_the_device_to_the_same_bits(retain):
    strategy, model, optimizer = trained(bf16=True)
    engine, version, kinds = {}, "", set()
    for step in range(3):
        stream = stream_weights(model, since=version, retain=retain)
        for name, given in stream:
            kinds.add(type(given))
            if isinstance(given, TensorDifference):
                given.apply_(engine[name])
            else:
                engine[name] = given.clone()
        version = stream.version
        assert weight_checksums(engine) == weight_checksums(stream_weights(model))
        with torch.no_grad():  # an element of each parameter, so that a difference takes fewer bytes
            for parameter in model.parameters():
                values_of(parameter).view(-1)[step] += 1
    assert kinds >= {TensorDifference}
    assert {tensor.device for tensor in engine.values()} == {current_device()}
    train_step(strategy, model, optimizer, 1)


def test_an_engine_sleeps_in_host_memory_and_generates_the_same_after_it():
    strategy, model, _ = trained(bf16=True)
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model))
    prompt = torch.tensor([[3, 4, 5]], device=strategy.device)
    expected = engine.generate(prompt, max_new_tokens=4, do_sample=False)
    engine.sleep()
    assert {parameter.device.type for parameter in engine.model.parameters()} == {"cpu"}
    engine.wake_up()
    assert {parameter.device for parameter in engine.model.parameters()} == {current_device()}
    assert torch.equal(engine.generate(prompt, max_new_tokens=4, do_sample=False), expected)


def test_log_probabilities_on_a_gpu_equal_a_log_softmax_and_keep_the_random_state():
    model = build("llama").to(current_device())
    reference = copy.deepcopy(model)
    shard_model(model, build_mesh(), StrategyConfig(bf16=False), is_training=True)
    ids = on_device(batch_of("llama", 0, 0))["input_ids"]
    logits = reference(input_ids=ids).logits[:, :-1]
    expected = logits.log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    expected.mean().backward()
    torch.manual_seed(5)
    drawn = torch.rand(1, device=current_device()).item()
    torch.manual_seed(5)
    found = token_log_probs(model, ids, chunk_bytes=3 * 4 * VOCAB)  # the first call runs an additional pass
    assert torch.rand(1, device=current_device()).item() == drawn
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.mean().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_close(full_grads(model), gradients, 1e-4, "gradients")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_logits_of_a_head_take_the_documented_memory(dtype):
    # Workspaces of matrix products on a GPU are hidden by large chunks; the simulated one has none, and is slow.
    is_simulated = current_device().type == "sim"
    count, width, vocabulary, chunk_bytes = (512, 64, 8000, 4 << 20) if is_simulated else (4096, 256, 32_000, 64 << 20)
    like = {"dtype": dtype, "device": current_device(), "requires_grad": True}
    hidden, weight = torch.randn(count, width, **like), torch.randn(vocabulary, width, **like)
    targets = torch.randint(vocabulary, (count,), device=current_device())

    def peak(call):
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        result = call()
        return torch.accelerator.max_memory_allocated() - before, result

    for _ in range(2):  # the first pass also allocates workspaces of matrix products
        hidden.grad = weight.grad = None
        forward, log_probs = peak(lambda: linear_log_probs(hidden, weight, targets, chunk_bytes=chunk_bytes))
        backward, _ = peak(lambda log_probs=log_probs: log_probs.sum().backward())
    gradients = hidden.nbytes + weight.numel() * 4 + 2 * weight.nbytes
    assert chunk_bytes < forward < 2.6 * chunk_bytes
    assert chunk_bytes < backward < 4.1 * chunk_bytes + gradients


@pytest.mark.parametrize("device", ["cpu", None])
def test_averages_are_kept_in_host_memory_or_on_the_device(device):
    strategy, model, optimizer = trained()
    averages = EMA(model, 0.5, device=device)
    expected = {name: values_of(p).detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    for step in (1, 2):
        train_step(strategy, model, optimizer, step)
        averages.update(model)
        for name, parameter in model.named_parameters():
            expected[name] = 0.5 * expected[name] + 0.5 * values_of(parameter).detach().cpu()
    where = torch.device(device) if device else current_device()
    assert {values_of(average).device for average in averages.averages.values()} == {where}
    for name, average in averages.averages.items():
        torch.testing.assert_close(values_of(average).cpu(), expected[name], rtol=1e-6, atol=1e-7)


def test_numbers_are_reduced_in_host_memory_and_tensors_of_the_device_on_it():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    assert control_device() == torch.device("cpu")
    value = torch.arange(3.0, device=strategy.device)
    reduced = strategy.all_reduce({"number": 3, "host": torch.ones(2), "device": value}, op="sum")
    assert reduced["number"] == 3 and torch.equal(reduced["host"], torch.ones(2))
    assert reduced["device"].device == current_device() and torch.equal(reduced["device"], value)
    assert "device peak" in strategy.report_memory()
    held = torch.accelerator.memory_reserved()
    del value, reduced
    torch.empty(64 << 20, dtype=torch.uint8, device=strategy.device)
    strategy.sync_and_clear_cache()
    assert torch.accelerator.memory_reserved() <= held + (32 << 20)


def test_batches_are_pinned_on_request():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    [batch] = strategy.setup_dataloader([torch.ones(2), torch.zeros(2)], 2, pin_memory=True)
    assert batch.is_pinned() and batch.to(strategy.device, non_blocking=True).sum().item() == 2


def test_an_image_of_zeros_keeps_the_random_state_of_the_device():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, mixed_mm_data="dummy"))
    model = strategy.prepare_model(build("qwen2_vl"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    batch = on_device(batch_of("qwen2_vl", 0, 0))
    texts = {name: batch[name] for name in ("input_ids", "labels")}
    for given in (batch, texts):
        before = torch.get_device_module().get_rng_state()
        strategy.backward(model(**given).loss, model, optimizer)
        assert strategy.optimizer_step(optimizer, model, None).stepped
        assert torch.equal(torch.get_device_module().get_rng_state(), before)


def test_accelerates_use_cpu_is_refused_if_there_is_a_device(tmp_path):
    path = tmp_path / "accelerate.json"
    path.write_text(json.dumps({"use_cpu": True, "distributed_type": "FSDP"}))
    with pytest.raises(ConfigError, match="use_cpu is True, but there is an accelerator"):
        StrategyConfig.from_accelerate(path)


def steps_of_two_ranks(**config):
    """Train for three steps with the batches of both ranks, also without sharding; compare losses and norms."""
    model = on_this_rank(build("llama"))
    shared = config.get("tensor_parallel_size", 1) > 1 or config.get("sequence_parallel_size", 1) > 1
    batches = 1 if shared else 2  # ranks that share layers or sequences have the same batch
    unsharded = Unsharded(model, lambda m, b: loss_of("llama", m, b), max_norm=1.0, ranks=batches, lr=1e-3)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0, **config))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    for step in range(3):
        of_ranks = [on_device(batch_of("llama", step, rank)) for rank in range(batches)]
        losses, norm = unsharded.step(of_ranks)
        batch = of_ranks[dist.get_rank() % batches]
        given = strategy.shard_sequence(batch) if config.get("sequence_parallel_size", 1) > 1 else batch
        loss = model(**given, use_cache=False).loss
        strategy.backward(loss, model, optimizer)
        result = strategy.optimizer_step(optimizer, model, None)
        assert result.loss == pytest.approx(sum(losses) / batches, rel=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    return strategy, model


@on_two_gpus
@pytest.mark.parametrize("config", [{}, {"shard_size": 1}, {"sequence_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_two_gpus_train_as_one(config):
    steps_of_two_ranks(**config)


@on_two_gpus
def test_two_gpus_stream_what_they_save(tmp_path):
    strategy, model = steps_of_two_ranks()
    strategy.save_model(model, None, tmp_path, dtype=torch.bfloat16)
    expected = load_file(tmp_path / "model.safetensors")
    assert_bitwise_equal({name: tensor.cpu() for name, tensor in stream_weights(model, bucket_bytes=4096)}, expected)


def waits_of_host(call):
    """Return how often the host waits for values of the device in a call."""
    if simulated_accelerator.is_loaded():
        with simulated_accelerator.counted() as counters:
            call()
        return counters.syncs + counters.blocking_to_host
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


PARALLEL = [{"sequence_parallel_size": 2}, {"tensor_parallel_size": 2}]


@on_two_gpus
@pytest.mark.parametrize("config", [{}, {"shard_size": 1}, {"bf16": True}, {"train_batch_size": 8}, *PARALLEL])
def test_the_host_waits_for_the_device_once_in_a_step(config):
    if not simulated_accelerator.is_loaded() and current_device().type != "cuda":
        pytest.skip("torch reports waits of the host for CUDA alone")
    model = on_this_rank(build("llama"))

    def without_sharding():
        model(**on_device(batch_of("llama", 0, 0)), use_cache=False).loss.backward()

    of_model = waits_of_host(without_sharding)
    model.zero_grad()
    strategy = FSDPV2Strategy(config=StrategyConfig(**{"bf16": False, "max_norm": 1.0, **config}))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    averages = EMA(model, decay=0.9)
    rank = 0 if config in PARALLEL else dist.get_rank()
    micro_batches = 4 if "train_batch_size" in config else 1

    def step(number):
        for index in range(micro_batches):
            batch = on_device(batch_of("llama", number + index, rank))
            part = strategy.shard_sequence(batch)
            loss = model(**part, use_cache=False).loss
            items = torch.tensor(rank + 3, device=current_device())
            strategy.backward(loss, model, optimizer, num_tokens=items)
            result = strategy.optimizer_step(optimizer, model, None)
        averages.update(model)
        assert result.stepped

    step(0)
    step(4)
    assert waits_of_host(lambda: step(8)) == 1 + (0 if strategy.sp_size > 1 else of_model * micro_batches)


@on_two_gpus
@pytest.mark.parametrize("config", PARALLEL)
def test_ranks_with_other_batches_on_the_device_are_an_error_of_the_step(config):
    model = on_this_rank(build("llama"))
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, **config))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)

    def step(rank, factor=1):
        batch = strategy.shard_sequence(on_device(batch_of("llama", 0, rank)))
        strategy.backward(factor * model(**batch, use_cache=False).loss, model, optimizer)
        return strategy.optimizer_step(optimizer, model, None)

    before = tensors_of(model, optimizer)
    with pytest.raises(StepError, match=r"input_ids, labels of rank 1 differ from those of rank 0, .* 0, 1, which"):
        step(dist.get_rank())
    assert_bitwise_equal(tensors_of(model, optimizer), before)
    optimizer.zero_grad()
    if "tensor_parallel_size" in config:
        with pytest.raises(StepError, match=r"the losses of the ranks 0, 1 are [\d.]+, [\d.]+, expected equal losses"):
            step(0, factor=1 + dist.get_rank())
        optimizer.zero_grad()
    assert step(0).stepped
