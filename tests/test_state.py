"""What is known of a model: in one place, gone with the model, and of free functions as of the class."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from helpers.models import batch_of, build, loss_of
from torch import nn

import fsdp2_strategy
from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, backward, build_optimizer, optimizer_step, shard_model
from fsdp2_strategy.errors import StepError
from fsdp2_strategy.model.state import ATTACHED, Slot, attach, attached, model_state, remove_attached
from fsdp2_strategy.optim import accumulation_of

PACKAGE = Path(fsdp2_strategy.__file__).parent
COUNT = Slot[int]("a count of the tests")


def test_a_slot_holds_its_value_for_one_model():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert model_state(one).get(COUNT) is None
    assert model_state(one).set(COUNT, 3) == 3 and model_state(one).get(COUNT) == 3
    assert model_state(other).get(COUNT) is None and repr(model_state(one)) == "ModelState(a count of the tests)"
    assert model_state(one).pop(COUNT) == 3 and model_state(one).pop(COUNT) is None


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'a count of the tests'.*expected another name"):
        Slot("a count of the tests")


def test_what_is_known_of_a_model_goes_with_it():
    class Value:
        pass

    model, value = nn.Linear(1, 1), Value()
    gone = weakref.ref(value)
    model_state(model).set(COUNT, value)
    del value
    assert gone() is not None
    del model
    gc.collect()
    assert gone() is None


def test_what_a_module_carries_follows_copies_and_pickles():
    module = nn.Linear(1, 1)
    attach(module, COUNT, 5)
    copied, stored = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    remove_attached(module, COUNT)
    assert attached(module, COUNT) is None and attached(copied, COUNT) == attached(stored, COUNT) == 5
    assert ATTACHED not in vars(nn.Linear(1, 1)) and attached(nn.Linear(1, 1), COUNT) is None


def test_no_other_table_of_models_is_kept():
    """Those that are left are not of models: groups, loaders, recordings, sockets, and optimizers that keep masters."""
    left = {
        "checkpoint/background_save.py": {"_background_groups"},
        "model/state.py": {"_states"},
        "model/master_weights.py": {"_optimizers"},
        "distributed/terminal.py": {"_bars"},
        "distributed/background_store.py": {"_stores"},
        "distributed/process_group.py": {"_exchanges", "_group_counts", "_joined", "_local_ranks"},
        "distributed/same_batch.py": {"_later"},
        "distributed/unusable_groups.py": {"_reasons"},
        "hf/meta/recorded_init.py": {"_recordings"},
        "integrations/vitra/epochs.py": {"_original_seeds"},
        "rollout/connection.py": {"_of_this_process"},
    }
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            called = getattr(getattr(node, "value", None), "func", None)
            if (
                isinstance(node, ast.AnnAssign | ast.Assign)
                and "Weak" in ast.dump(called or node)
                and called is not None
            ):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if "Tensor" not in ast.dump(called):
                    found.setdefault(str(path.relative_to(PACKAGE)), set()).add(target.id)
    assert found == left


@pytest.mark.ranks(2)
def test_a_model_that_was_trained_and_offloaded_is_freed_with_all_that_is_known_of_it():
    model = build("mlp")
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    strategy.backward(loss_of("mlp", model, batch_of("mlp", 0, 0)), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    strategy.offload_model(model)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    strategy.close()


@pytest.mark.ranks(2)
def test_free_functions_accumulate_and_step_as_the_class_does():
    config = StrategyConfig(bf16=False, train_batch_size=4, max_norm=0.5)
    strategy = FSDPV2Strategy(config=config)
    assert strategy.accumulated_gradient == 2
    by_class, by_functions = build("mlp"), build("mlp")
    strategy.prepare_model(by_class, is_training=True)
    shard_model(by_functions, config=StrategyConfig(bf16=False), is_training=True)
    one, other = strategy.create_optimizer(by_class, lr=1e-2), build_optimizer(by_functions, 1e-2)
    with pytest.raises(StepError, match="no backward pass since its last step"):
        optimizer_step(other, by_functions)
    for micro in range(4):
        batch = batch_of("mlp", micro, strategy.get_rank())
        strategy.backward(loss_of("mlp", by_class, batch), by_class, one)
        expected = strategy.optimizer_step(one, by_class, None)
        backward(loss_of("mlp", by_functions, batch), by_functions, accumulation_steps=2, grad_sync=config.grad_sync)
        own = accumulation_of(by_functions)
        assert (own.micro_batches, own.backward_passes) == (micro % 2, 1)
        assert optimizer_step(other, by_functions, accumulation_steps=2, max_norm=0.5) == expected
    assert accumulation_of(by_functions).steps == 2
    for a, b in zip(by_class.parameters(), by_functions.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
