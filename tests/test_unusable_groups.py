"""After a failure that leaves collectives of an accelerator without a partner, later calls raise on every rank.

The collectives of gloo are complete when they return. These tests let them count as those of an accelerator, so that a
rank that fails before its collective leaves those of the other ranks without a partner.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.distributed import unit_log, unusable_groups
from fsdp2_strategy.distributed.agreement import all_or_none
from fsdp2_strategy.distributed.unusable_groups import begun_collectives, is_asynchronous, unpaired_group
from fsdp2_strategy.errors import CheckpointError, StepError


@contextmanager
def asynchronous(counts=None):
    """Let groups count as those of an accelerator, on which this rank has begun so many collectives."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(unusable_groups, "_reasons", WeakKeyDictionary()))
        stack.enter_context(patch.object(unit_log, "is_asynchronous", lambda _group: True))
        stack.enter_context(patch.object(unit_log, "_logs", {}))
        if counts is not None:
            stack.enter_context(patch("fsdp2_strategy.distributed.agreement.begun_collectives", lambda: counts))
        yield


def fail_on_rank_1(error):
    if dist.get_rank() == 1:
        raise error


@pytest.mark.ranks(2)
def test_ranks_that_have_begun_different_collectives_refuse_every_later_call():
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    with asynchronous({"0 of the ranks [0, 1]": 7 - dist.get_rank()}):
        with pytest.raises(CheckpointError, match="out of memory") as caught, all_or_none("save", CheckpointError):
            fail_on_rank_1(torch.OutOfMemoryError("out of memory"))
        assert "unusable" in caught.value.__notes__[0]
        for call in (lambda: strategy.all_reduce(1.0), lambda: strategy.load_ckpt(None, "folder")):
            with pytest.raises(StepError, match=r"process groups are unusable.*cannot save.*Start the run again"):
                call()
        strategy.wait_for_checkpoint()
        strategy.close()
    assert not unusable_groups._reasons


@pytest.mark.parametrize(
    ("count", "error", "is_refused"),
    [
        (7, torch.OutOfMemoryError("out of memory"), False),
        (None, CheckpointError("cannot save: no folder"), False),
        (None, torch.OutOfMemoryError("out of memory"), True),
    ],
)
@pytest.mark.ranks(2)
def test_equal_counts_leave_groups_usable_and_unknown_ones_only_after_errors_of_this_package(count, error, is_refused):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    with asynchronous({"0 of the ranks [0, 1]": count}):
        with pytest.raises(CheckpointError), all_or_none("save", CheckpointError):
            fail_on_rank_1(error)
        if is_refused:
            with pytest.raises(StepError, match="unusable"):
                strategy.all_reduce(1.0)
        else:
            assert strategy.all_reduce(1.0) == 1.0


@pytest.mark.ranks(2)
def test_groups_of_a_cpu_are_usable_after_any_failure():
    assert not is_asynchronous(None) or torch.accelerator.is_available()
    if is_asynchronous(None):
        return
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
    assert begun_collectives() == {}
    with pytest.raises(CheckpointError), all_or_none("save", CheckpointError):
        fail_on_rank_1(RuntimeError("any"))
    assert strategy.all_reduce(1.0) == 1.0


def test_only_groups_that_a_rank_is_in_are_compared():
    of_ranks = [{"a": 3, "b": 5}, {"a": 3, "c": 6}, {"c": 6}]
    assert unpaired_group(of_ranks, is_foreign=True) is None
    assert unpaired_group([*of_ranks, {"c": 7}], is_foreign=False) == "c"


@pytest.mark.ranks(2)
def test_a_rank_that_fails_in_a_gather_makes_the_next_pass_of_every_rank_raise():
    """Rank 1 fails before it queues its gather, and goes on; rank 0 has queued its own."""
    with asynchronous():
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model)

        def step():
            strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, optimizer)
            strategy.optimizer_step(optimizer, model)

        step()
        log = unit_log.current_log()
        entry = next(iter(entry for entry, text in log._texts.items() if text.startswith("gathers")))
        if dist.get_rank() == 1:
            with pytest.raises(torch.OutOfMemoryError):
                log.run(entry, lambda: fail_on_rank_1(torch.OutOfMemoryError("out of memory")))
            optimizer.zero_grad()
        else:
            log.run(entry, lambda: None)  # queued: the host does not wait for it
        with pytest.raises(StepError, match=r"rank 1 has failed where it gathers") as caught:
            step()
        assert caught.value.is_agreed
        with pytest.raises(StepError, match=r"process groups are unusable.*has failed where it gathers"):
            step()
        with pytest.raises(StepError, match="process groups are unusable"):
            strategy.all_reduce(1.0)


@pytest.mark.ranks(2)
def test_ranks_that_all_fail_in_the_same_gather_go_on():
    with asynchronous():
        strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False))
        model = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(model)

        def fail():
            raise torch.OutOfMemoryError("out of memory")

        log = unit_log.current_log()
        entry = next(iter(entry for entry, text in log._texts.items() if text.startswith("gathers")))
        with pytest.raises(torch.OutOfMemoryError):
            log.run(entry, fail)
        strategy.backward(loss_of("llama", model, batch_of("llama", 0, 0)), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).stepped
