"""Models and optimizers that go to host memory and come back: bit for bit, with nothing left behind, never garbage."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import batch_of, build, loss_of
from helpers.reference import full_parameters, resident
from helpers.training import assert_same, full_state, prepared, strategy_for, train
from helpers.worlds import some
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForCausalLM

from fsdp2_strategy import EMA, build_optimizer, load_weights
from fsdp2_strategy.checkpoint.training_state import optimizer_tensors
from fsdp2_strategy.errors import OffloadError
from fsdp2_strategy.model import offload, reload
from fsdp2_strategy.model.offloading import CopyQueue, is_offloaded
from fsdp2_strategy.model.placeholders import _offloaded, values_of


def trimmed():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident("VmRSS")


def peak_of(call, *args, **options):
    """Return how many bytes of memory a call takes at most in addition to those that this process holds."""
    before = trimmed()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    call(*args, **options)
    return resident("VmHWM") - before


def forward(model):
    return loss_of("llama", model, batch_of("llama", 0, dist.get_rank()))


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard_size", some([-1, 1], [-1]))
@pytest.mark.parametrize("copies", [True, False])
def test_a_trip_changes_no_number_of_a_run(shard_size, copies, monkeypatch):
    if copies:
        monkeypatch.setattr("fsdp2_strategy.model.offloading._needs_copies", lambda: True)

    def run(*, moves):
        strategy = strategy_for(train_batch_size=4)
        model, optimizer, scheduler = prepared(strategy, shard_size=shard_size)
        results = []
        for step in range(12):
            if moves and step % 2 == 0:
                assert strategy.maybe_load_optimizer(optimizer, "cpu") is optimizer
                assert strategy.reload_model([model, None]) == [model, None]
            results += train(strategy, model, optimizer, scheduler, [step])
            if moves and step % 2 == 1:
                assert strategy.offload_model(model) is model
                assert strategy.maybe_offload_optimizer(optimizer) is optimizer
                strategy.offload_model(model, empty_cache=False)  # again: nothing happens
        strategy.reload_model(model)
        strategy.maybe_load_optimizer(optimizer)
        return results, full_state(model, optimizer)

    (expected, state), (moved, its_state) = run(moves=False), run(moves=True)
    assert moved == expected
    assert_same(its_state, state)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.ranks(2)
def test_what_is_away_holds_no_memory_on_the_device_and_is_never_garbage(copies, monkeypatch):
    if copies:  # as if the device had its own memory
        monkeypatch.setattr("fsdp2_strategy.model.offloading._needs_copies", lambda: True)
    others = set(_offloaded)  # of models of other tests
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(2))
    expected = full_state(model, optimizer)
    offload(model)
    offload(optimizer)
    assert is_offloaded(model) and is_offloaded(optimizer)
    for parameter in model.parameters():
        assert parameter._local_tensor.is_meta
    moments = {n: t for n, t in optimizer_tensors(model, optimizer).items() if t.ndim}
    assert moments and all(t._local_tensor.is_meta for t in moments.values())
    steps = [t for t in optimizer_tensors(model, optimizer).values() if not t.ndim]
    assert steps and not any(t.is_meta for t in steps), "the optimizer wants its step counters where they are"
    for use in (lambda: forward(model), lambda: model.generate(torch.zeros(1, 2, dtype=torch.long)), model.unshard):
        with pytest.raises(OffloadError, match="Call reload_model first"):
            use()
    reload(model)
    loss = forward(model)
    strategy.backward(loss, model, optimizer)
    with pytest.raises(OffloadError, match="Call maybe_load_optimizer first"):
        strategy.optimizer_step(optimizer, model, scheduler)
    offload(model)  # its gradients go along
    assert all(p.grad._local_tensor.is_meta for p in model.parameters())
    with pytest.raises(OffloadError, match="Call reload_model first"):
        strategy.clip_grad_norm(model)
    reload(model)
    reload(optimizer)
    assert_same(full_state(model, optimizer), expected)
    assert strategy.optimizer_step(optimizer, model, scheduler).stepped
    assert set(_offloaded) <= others


@pytest.mark.ranks(2)
def test_a_model_that_dies_while_it_is_away_leaves_nothing():
    others = list(_offloaded.values())  # of models of other tests, some of which may be collected meanwhile
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(1))
    offload(model)
    offload(optimizer)
    own = [weakref.ref(values) for values in _offloaded.values() if all(values is not each for each in others)]
    assert own
    del model, optimizer, scheduler, strategy
    gc.collect()
    assert not any(values() is not None for values in own)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_fifty_trips_leave_nothing_behind():
    strategy = strategy_for()
    model = strategy.prepare_model(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))), True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(model(torch.ones(1, 1024)).mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    held = 3 * sum(p.to_local().nbytes for p in model.parameters())

    def trip():
        strategy.offload_model(model)
        strategy.maybe_offload_optimizer(optimizer)
        strategy.reload_model(model)
        strategy.maybe_load_optimizer(optimizer)

    for _ in range(3):
        trip()
    expected = full_state(model, optimizer)
    before = trimmed()
    for _ in range(50):
        trip()
    assert trimmed() - before < held, "less than a fiftieth a trip"
    assert_same(full_state(model, optimizer), expected)


@pytest.mark.ranks(2)
def test_where_memory_runs_out_nothing_is_lost(monkeypatch):
    monkeypatch.setattr("fsdp2_strategy.model.offloading._needs_copies", lambda: True)
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(1))
    expected = full_state(model, optimizer)

    def failing(countdown, original):
        def call(*args, **kwargs):
            nonlocal countdown
            countdown -= 1
            if countdown == -1:
                raise torch.OutOfMemoryError("no memory left")
            return original(*args, **kwargs)

        return call

    for countdown in (0, 5):
        with monkeypatch.context() as patched:
            patched.setattr(CopyQueue, "copy", failing(countdown, CopyQueue.copy))
            with pytest.raises(OffloadError, match="Nothing was offloaded"):
                offload(optimizer)
        assert not is_offloaded(optimizer)
        assert_same(full_state(model, optimizer), expected)
    with monkeypatch.context() as patched:
        patched.setattr(CopyQueue, "copy", failing(5, CopyQueue.copy))
        with pytest.raises(OffloadError, match="Nothing was offloaded"):
            offload(model)
    assert not is_offloaded(model)
    offload(model)
    offload(optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(CopyQueue, "copy", failing(5, CopyQueue.copy))
        with pytest.raises(torch.OutOfMemoryError):
            reload(optimizer)
    assert is_offloaded(optimizer)
    reload(optimizer)
    reload(model)
    assert_same(full_state(model, optimizer), expected)


def save_and_load_in_little_memory(folder):
    strategy = strategy_for()
    model = strategy.prepare_model(torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))), True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(model(torch.ones(1, 2048)).mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    state = 3 * sum(p.to_local().nbytes for p in model.parameters())
    assert state > 3 * 64e6

    def save(tag, **options):
        strategy.save_ckpt(model, folder, tag, **options)
        strategy.wait_for_checkpoint()

    save("first")  # Python and torch read modules at their first use
    assert peak_of(save, "second") < 64e6
    assert peak_of(strategy.load_ckpt, model, folder) < 64e6
    assert peak_of(save, "third", async_save=True) < state + 64e6
    assert peak_of(offload, optimizer) < 8e6
    assert peak_of(save, "fourth") < 64e6, "of what is offloaded"


@pytest.mark.full
@pytest.mark.real_sizes
def test_training_state_is_saved_and_loaded_in_little_memory(tmp_path, run_on):
    run_on(2, save_and_load_in_little_memory, folder=tmp_path)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.ranks(2)
def test_state_is_never_twice_in_host_memory(copies, monkeypatch):
    if copies:
        monkeypatch.setattr("fsdp2_strategy.model.offloading._needs_copies", lambda: True)
    strategy = strategy_for()
    model = strategy.prepare_model(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))), True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    strategy.backward(model(torch.ones(1, 1024)).mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    tensors = [t for t in optimizer_tensors(model, optimizer).values() if t.ndim]
    nbytes, addresses = sum(values_of(t).nbytes for t in tensors), [values_of(t).data_ptr() for t in tensors]
    for call in (offload, reload):
        assert peak_of(call, optimizer) < (1.25 if copies else 0.25) * nbytes, call
    assert ([values_of(t).data_ptr() for t in tensors] == addresses) != copies


@pytest.mark.ranks(2)
def test_an_offload_waits_for_the_device_once(monkeypatch):
    monkeypatch.setattr("fsdp2_strategy.model.offloading._needs_copies", lambda: True)
    waits, leave = [], CopyQueue.__exit__
    monkeypatch.setattr(CopyQueue, "__exit__", lambda self, *args: (waits.append(self), leave(self, *args))[1])
    model, *_ = prepared(strategy_for())
    offload(model)
    assert len(waits) == 1
    reload(model)
    assert len(waits) == 2


@pytest.mark.ranks(2)
def test_between_micro_batches_a_model_whose_gradients_are_held_back_stays():
    strategy = strategy_for(train_batch_size=4, grad_sync="last")
    model, optimizer, _ = prepared(strategy)
    strategy.backward(forward(model), model, optimizer)
    with pytest.raises(OffloadError, match="after optimizer_step"):
        strategy.offload_model(model)
    strategy.optimizer_step(optimizer, model, None)
    strategy.backward(forward(model), model, optimizer)
    assert strategy.optimizer_step(optimizer, model, None).stepped
    strategy.reload_model(strategy.offload_model(model))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard_size", [-1, 1], ids=["sharded", "replicated"])
def test_what_is_away_is_saved_exported_and_loaded_where_it_is(tmp_path, shard_size):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy, "gpt2", shard_size=shard_size)
    train(strategy, model, optimizer, scheduler, range(2), "gpt2")
    strategy.save_ckpt(model, tmp_path / "here", "t")
    expected = full_state(model, optimizer)
    offload(model)
    offload(optimizer)
    strategy.save_ckpt(model, tmp_path / "away", "t")
    strategy.save_model(model, None, tmp_path / "out")
    assert is_offloaded(model) and is_offloaded(optimizer)
    dist.barrier()
    here, away = (
        {f.relative_to(top): f.read_bytes() for f in top.rglob("*") if f.is_file()}
        for top in (tmp_path / "here/t", tmp_path / "away/t")
    )
    assert here == away
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(opened.named_parameters()), {n: t for n, t in expected.items() if not n.startswith("state.")})

    other, its_optimizer, its_scheduler = prepared(strategy, "gpt2", seed=1, shard_size=shard_size)
    train(strategy, other, its_optimizer, its_scheduler, range(3), "gpt2")
    offload(other)
    offload(its_optimizer)
    strategy.load_ckpt(other, tmp_path / "away")
    assert is_offloaded(other) and is_offloaded(its_optimizer)
    reload(other)
    reload(its_optimizer)
    assert_same(full_state(other, its_optimizer), expected)

    third, *_ = prepared(strategy, "gpt2", seed=2, shard_size=shard_size)
    offload(third)
    load_weights(third, tmp_path / "out")
    reload(third)
    assert_same(full_parameters(third), full_parameters(other))


@pytest.mark.ranks(2)
def test_a_fresh_optimizer_gets_its_state_while_its_model_is_away(tmp_path):
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    train(strategy, model, optimizer, scheduler, range(2))
    strategy.save_ckpt(model, tmp_path)
    expected = full_state(model, optimizer)
    other, its_optimizer, its_scheduler = prepared(strategy, seed=1)
    strategy.offload_model(other)
    strategy.load_ckpt(other, tmp_path)
    strategy.reload_model(other)
    assert_same(full_state(other, its_optimizer), expected)
    assert train(strategy, other, its_optimizer, its_scheduler, [2]) == train(
        strategy, model, optimizer, scheduler, [2]
    )


@pytest.mark.ranks(2)
def test_an_optimizer_never_steps_a_model_that_is_away():
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    optimizer = build_optimizer(model, lr=0.1)  # the strategy does not control it
    strategy.backward(forward(model), model, optimizer)
    offload(model)
    with pytest.raises(OffloadError, match="Call reload_model first"):
        optimizer.step()
    reload(model)
    optimizer.step()


@pytest.mark.ranks(2)
def test_reloading_what_is_there_in_the_middle_of_a_pass_changes_nothing():
    strategy = strategy_for()
    (model, optimizer, _), (other, its_optimizer, _) = prepared(strategy), prepared(strategy)
    for each, own in ((model, optimizer), (other, its_optimizer)):
        loss = forward(each)
        if each is other:
            strategy.reload_model(each)
        strategy.backward(loss, each, own)
        strategy.optimizer_step(own, each)
    assert_same(full_state(other, its_optimizer), full_state(model, optimizer))


@pytest.mark.ranks(2)
def test_what_others_wrote_is_not_loaded_into_what_is_away(tmp_path):
    strategy = strategy_for()
    model, *_ = prepared(strategy)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "theirs")
    expected = full_parameters(model)
    offload(model)
    with pytest.raises(OffloadError, match="Call reload_model first"):
        strategy.load_ckpt(model, tmp_path, trust=True, load_optimizer_states=False, load_lr_scheduler_states=False)
    reload(model)
    assert_same(full_parameters(model), expected)


@pytest.mark.ranks(2)
def test_a_forward_pass_that_raised_leaves_a_model_that_can_go_away():
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    expected = full_parameters(model)

    def fail(*_):
        raise ValueError("out of luck")

    handle = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="out of luck"):
        forward(model)
    handle.remove()
    offload(model)
    with pytest.raises(OffloadError):
        forward(model)
    reload(model)
    assert_same(full_parameters(model), expected)
    assert_same(full_state(model, optimizer), expected)
    other, its_optimizer, its_scheduler = prepared(strategy)
    assert train(strategy, model, optimizer, scheduler, range(3)) == train(
        strategy, other, its_optimizer, its_scheduler, range(3)
    )


@pytest.mark.ranks(2)
def test_the_inner_model_of_a_wrapper_means_the_wrapper():
    class Critic(torch.nn.Module):
        is_actor = True

        def __init__(self):
            super().__init__()
            self.model = build("llama")
            self.value_head = torch.nn.Linear(32, 1)

    strategy = strategy_for()
    critic = strategy.prepare_model(Critic(), is_training=True)
    strategy.offload_model(critic.model)
    assert all(p._local_tensor.is_meta for p in critic.parameters() if p.numel() > 1)
    strategy.reload_model(critic.model)
    assert not any(p._local_tensor.is_meta for p in critic.parameters())


@pytest.mark.ranks(2)
def test_averages_are_taken_of_what_is_away():
    strategy = strategy_for()
    model, optimizer, scheduler = prepared(strategy)
    ema = EMA(model, 0.5)
    train(strategy, model, optimizer, scheduler, range(1))
    other = EMA(model, 0.5)
    offload(model)
    ema.update(model)
    other.update(model)
    assert not any(average._local_tensor.is_meta for average in ema.averages.values())
    own, expected = other.averages, {name: model.get_parameter(name) for name in other.averages}
    assert_same(*({name: values_of(each).cpu() for name, each in of.items()} for of in (own, expected)))
