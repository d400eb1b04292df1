"""A rank that waits long for others logs it: for which call, since when, and what the others last reported."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.training import prepared

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, build_mesh, shard_model
from fsdp2_strategy.distributed import collectives, wait_log
from fsdp2_strategy.distributed.thread_stacks import stack_of_main_thread, stacks_of_threads
from fsdp2_strategy.errors import ConfigError

pytestmark = pytest.mark.unrecorded("the record of collectives is the innermost frame of a rank that waits")

SECONDS = 1.0


@contextmanager
def logged():
    """Yield the warnings of this rank within the block; records of torch go into a folder that is deleted."""
    messages = []
    logger = logging.getLogger("fsdp2_strategy")
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),
        patch.object(logger, "warning", lambda message, *args: messages.append(message % args)),
    ):
        yield messages


def strategy_with(seconds, **settings):
    return FSDPV2Strategy(config=StrategyConfig(bf16=False, wait_warning_seconds=seconds, **settings))


def does_something_else(seconds):
    time.sleep(seconds)


@pytest.mark.full
@pytest.mark.ranks(3)
def test_a_rank_that_calls_alone_says_so_once_with_what_the_others_do(tmp_path):
    strategy = strategy_with(SECONDS)
    model, optimizer, scheduler = prepared(strategy, "mlp")
    dist.barrier()
    with logged() as messages:
        if dist.get_rank():
            does_something_else(3.5)
        strategy.save_ckpt(model, tmp_path / "run", "first", optimizer=optimizer, scheduler=scheduler)
        time.sleep(2)
    strategy.close()
    if dist.get_rank():
        assert messages == []
    else:
        line, end = messages
        assert re.match(
            r"rank 0 waits in save_ckpt \(\w+\), called at test_wait_log\.py:\d+ since \d\d:\d\d:\d\d \(1 s\)\. "
            r"Other ranks: rank 1: in does_something_else at test_wait_log\.py:\d+ \(reported 0 s ago\); "
            r"rank 2: .*|.*ranks 1, 2: in does_something_else at test_wait_log\.py:\d+ \(reported 0 s ago\)",
            line,
        ), line
        assert re.fullmatch(r"rank 0 no longer waits in save_ckpt .*, after [345] s", end), end
        assert (tmp_path / "run" / "first").is_dir()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_rank_that_is_stopped_is_known_by_its_old_report():
    strategy = strategy_with(5.0)
    dist.barrier()
    with logged() as messages:
        if dist.get_rank():
            time.sleep(2.5)  # reports each second, also on a busy machine
            command = f"kill -STOP {os.getpid()}; sleep 10; kill -CONT {os.getpid()}"
            stopper = subprocess.Popen(["sh", "-c", command], start_new_session=True)
            stopper.wait()
        strategy.all_reduce(1.0)
    dist.barrier()
    strategy.close()
    if dist.get_rank() == 0:
        ago = re.search(r"waits in all_reduce \(\w+\).*Other ranks: rank 1: in .* \(reported (\d+) s ago", messages[0])
        assert ago, messages
        assert int(ago[1]) >= 1


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_background_thread_that_waits_is_noticed_while_the_program_goes_on():
    strategy = strategy_with(SECONDS)
    group = dist.new_group([0, 1])
    dist.barrier()
    with logged() as messages:
        if dist.get_rank() == 0:
            thread = threading.Thread(target=dist.barrier, kwargs={"group": group})
            thread.start()
        for _ in range(30):
            strategy.all_reduce(1.0)
            time.sleep(0.1)
        if dist.get_rank():
            dist.barrier(group)
        else:
            thread.join()
    strategy.close()
    waits = [message for message in messages if "waits in barrier" in message and "no longer" not in message]
    assert len(waits) == (dist.get_rank() == 0), messages
    assert not [message for message in messages if "all_reduce" in message.partition("Other")[0]]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_loop_that_waits_a_little_in_each_step_logs_nothing():
    strategy = strategy_with(SECONDS)
    with logged() as messages:
        for _ in range(12):
            if dist.get_rank():
                time.sleep(0.25)
            strategy.all_reduce(1.0)
    strategy.close()
    assert messages == []


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("seconds", [None, 30])
def test_nothing_is_logged_below_the_limit_or_without_one(seconds):
    strategy = strategy_with(seconds)
    with logged() as messages:
        if dist.get_rank():
            time.sleep(2)
        strategy.all_reduce(1.0)
    strategy.close()
    assert messages == []


@pytest.mark.ranks(2)
def test_a_call_that_stays_at_one_instruction_is_a_wait_too():
    """As with an accelerator, whose collectives return at once: the host waits elsewhere."""
    strategy = strategy_with(SECONDS)
    dist.barrier()
    with logged() as messages, patch.object(collectives, "all_reduce", lambda *_, **__: time.sleep(2.5)):
        strategy.all_reduce(1.0)
    strategy.close()
    assert messages[0].startswith(f"rank {dist.get_rank()} waits in all_reduce (at test_wait_log.py:"), messages


@pytest.mark.ranks(2)
def test_the_record_of_the_collectives_is_in_the_file_that_the_line_names(tmp_path):
    dist.barrier()
    if wait_log.flight_record() is None:
        pytest.skip("this torch records no collectives of gloo")
    prefix = tmp_path / "trace_"
    with patch.dict(os.environ, {"TORCH_FR_DUMP_TEMP_FILE": str(prefix)}):
        path = wait_log._dump(dist.get_rank())
    assert path == tmp_path / f"trace_{dist.get_rank()}"
    assert pickle.loads(path.read_bytes())["entries"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with patch.dict(os.environ, {"TORCH_FR_DUMP_TEMP_FILE": str(prefix)}):
        assert wait_log._dump(dist.get_rank()) is None
    assert not (tmp_path / "other").exists()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_model_that_is_sharded_without_a_strategy_is_watched_too():
    wait_log.begin_wait_log(None)
    wait_log._started = None
    with patch.object(wait_log, "WAIT_WARNING_SECONDS", SECONDS):
        model = shard_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), build_mesh(), StrategyConfig(bf16=False))
    dist.barrier()
    with logged() as messages:
        if dist.get_rank():
            time.sleep(3)
        model(torch.ones(1, 4))
    wait_log.begin_wait_log(None)
    assert len([m for m in messages if "rank 0 waits in" in m]) == (dist.get_rank() == 0), messages


@pytest.mark.parametrize("how", ["lost", "stopped"])
def test_a_store_that_does_not_answer_does_not_keep_a_rank_from_its_line(how):
    released = threading.Event()

    def reports_of(_ranks):
        if how == "lost":
            raise RuntimeError("the store is lost")
        released.wait(10)

    with patch.object(wait_log, "reports_of", reports_of), patch.object(wait_log, "_STORE_SECONDS", 0.2):
        assert "does not answer" in wait_log._reports_in_time([1, 2])
    released.set()


class CountingStore:
    def __init__(self, values):
        self.values, self.requests = values, 0

    def check(self, keys):
        self.requests += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self.requests += 1
        return [self.values[key] for key in keys]


@pytest.mark.parametrize(("missing", "most"), [((), 2), ((7,), 32), ((7, 500), 64)])
def test_reports_of_a_thousand_ranks_take_a_few_requests(missing, most):
    keys = {rank: f"key{rank}" for rank in range(1000)}
    store = CountingStore({key: key.encode() for rank, key in keys.items() if rank not in missing})
    found = wait_log._read(store, keys)
    assert found == {rank: key.encode() for rank, key in keys.items() if rank not in missing}
    assert store.requests <= most


@pytest.mark.parametrize("seconds", [0, -1, "a minute", True, float("nan")])
def test_a_wrong_limit_is_an_error(seconds):
    with pytest.raises(ConfigError, match="wait_warning_seconds"):
        StrategyConfig(wait_warning_seconds=seconds)


LOOK_WITH_GARBAGE = """
import gc, sys, threading
from fsdp2_strategy.distributed.thread_stacks import stacks_of_threads

class Cycle: pass

wait = threading.Event()
for _ in range(50):
    threading.Thread(target=wait.wait, daemon=True).start()
is_on = sys.argv[1] == "on"
if not is_on:
    gc.disable()
gc.collect()
for _ in range(20):
    cycle = Cycle()
    cycle.itself, cycle.local = cycle, threading.local()
gc.set_threshold(gc.get_count()[0] + 20)
assert len(stacks_of_threads()) == 50
assert gc.isenabled() == is_on
"""


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("collection", ["on", "off"])
def test_garbage_that_is_collected_while_frames_are_read_stops_no_thread(collection):
    """Python 3.11 would wait for its own lock: each frame that is read is an allocation, which may collect."""
    subprocess.run([sys.executable, "-c", LOOK_WITH_GARBAGE, collection], check=True, timeout=60)


def test_looking_at_threads_keeps_nothing_of_what_they_held():
    """Without collection of garbage, too: two threads look at each other, and at one that holds something."""

    class Held:
        pass

    def hold(held, looked):
        looked.wait(60)
        return held is None

    def look(times):
        for _ in range(times):
            for stack in (*stacks_of_threads().values(), stack_of_main_thread()):
                stack.local(0, "missing")

    gc.collect()
    gc.disable()
    try:
        looked, held = threading.Event(), Held()
        alive = weakref.ref(held)
        holder = threading.Thread(target=hold, args=(held, looked))
        del held
        threads = [holder, *(threading.Thread(target=look, args=(300,)) for _ in range(2))]
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        look(10)
        looked.set()
        holder.join()
        del thread, threads, holder
        assert alive() is None
    finally:
        gc.enable()


def test_what_a_function_releases_is_released_by_its_own_thread():
    """Not by one that looks at it meanwhile, however often Python switches between them."""
    released, ended = set(), threading.Event()

    class Held:
        def __init__(self):
            weakref.finalize(self, lambda: released.add(threading.get_ident()))

    def use():
        held = Held()
        return held is None

    def look():
        while not ended.is_set():
            for stack in (*stacks_of_threads().values(), stack_of_main_thread()):
                stack.local(len(stack.positions) - 1, "missing")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        looker = threading.Thread(target=look)
        looker.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            use()
    finally:
        ended.set()
        looker.join()
        sys.setswitchinterval(interval)
    assert released == {threading.get_ident()}


def test_a_stack_has_the_functions_of_a_thread_and_their_variables():
    begun, ended = threading.Event(), threading.Event()

    def inner(value):
        begun.set()
        ended.wait(60)
        return value

    def outer(value):
        return inner([*value, 2])

    thread = threading.Thread(target=outer, args=([1],))
    thread.start()
    begun.wait(60)
    stack = stacks_of_threads()[thread.ident]
    functions = [position.function for position in stack.positions]
    depth = functions.index("inner")
    assert functions[depth : depth + 2] == ["inner", "outer"]
    position = stack.positions[depth]
    assert (position.file, position.line) == (__file__, inner.__code__.co_firstlineno + 2)
    assert [stack.local(depth + n, "value") for n in (0, 1)] == [[1, 2], [1]]
    assert stack.local(depth, "missing") is None
    ended.set()
    thread.join()
    assert stack.local(depth, "value") is None, "the thread has ended"
    assert thread.ident not in stacks_of_threads()
    here = stack_of_main_thread()
    assert here.thread == threading.get_ident() not in stacks_of_threads()
    names = [position.function for position in here.positions]
    assert "test_a_stack_has_the_functions_of_a_thread_and_their_variables" in names
    assert here.local(names.index("test_a_stack_has_the_functions_of_a_thread_and_their_variables"), "depth") == depth
    assert gc.isenabled()
